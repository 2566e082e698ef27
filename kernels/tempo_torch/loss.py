"""Causal language models whose loss is made with the logits of a chunk of tokens at a time.

In a forward with labels in training, the head gives the losses of the tokens in the logits' place, and the model's loss
function takes their mean. Both run where the model runs them, so that what gathers the head's weight (ZeRO-3, FSDP)
sees the head called.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_kernels.linear_cross_entropy import linear_cross_entropy
from tempo_torch.linear import DropsInput
from tempo_torch.replace import Replaced, change_class

_IGNORED = -100


class LossHead(DropsInput):
    """nn.Linear of [b, s, h]: the logits [b, s, v] or, while `tempo_labels` are set, the losses [b, s] in float32."""

    tempo_labels: Tensor | None = None
    weight: Tensor
    bias: Tensor | None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits or losses."""
        labels = self.tempo_labels
        if labels is None:
            return super().forward(hidden)  # type: ignore[misc,no-any-return]
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        losses: Tensor = linear_cross_entropy(hidden.transpose(0, 1), weight, labels, bias=bias, ignore_index=_IGNORED)
        return losses


class FusedLoss(Replaced):
    """A causal language model of transformers. In training with labels its output has no logits."""

    training: bool
    lm_head: LossHead

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output."""
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        is_plain = not kwargs.get("logits_to_keep") and kwargs.get("return_dict") is not False and not args[1:]
        if labels is None or not self.training or not torch.is_grad_enabled() or not is_plain:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        self.lm_head.tempo_labels, before = shifted.contiguous(), self.__dict__.get("_loss_function")
        self.__dict__["_loss_function"] = _reduce
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.lm_head.tempo_labels = None
            if before is None:
                del self.__dict__["_loss_function"]
            else:
                self.__dict__["_loss_function"] = before
        output.logits = None
        return output


def _reduce(logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> Tensor:
    """The loss, as transformers reduces it, of the losses that the head gave in the logits' place."""
    shifted = kwargs.get("shift_labels")
    kept = labels[..., 1:] if shifted is None else shifted
    count = num_items_in_batch if num_items_in_batch is not None else (kept != _IGNORED).sum()
    return logits.sum() / (count.to(logits.device) if isinstance(count, Tensor) else count)


def is_language_model(model: nn.Module) -> bool:
    """Whether a module is a causal language model of transformers."""
    return hasattr(model, "loss_type") and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def use_fused_loss(model: nn.Module) -> str | None:
    """Give a causal language model the fused loss; the reason where that cannot be."""
    # transformers names no loss of the oldest of its causal language models.
    expected = None if type(model).__name__.endswith("LMHeadModel") else "ForCausalLM"
    if getattr(model, "loss_type", None) not in ("ForCausalLM", expected) or "_loss_function" in model.__dict__:
        return "its loss is not the cross entropy of the next token"
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return "its lm_head is no plain linear"
    if not _hands_logits_on(type(model)):
        return "its forward changes the logits before the loss"
    head.__class__ = getattr(head, "stock_class", type(head))
    change_class(head, LossHead)
    change_class(model, FusedLoss)
    return None


def _hands_logits_on(stock: type[nn.Module]) -> bool:
    """Whether a forward gives what the head returned, and nothing else, to the loss function."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(stock.forward))))
    except (OSError, TypeError):
        return False
    nodes = list(ast.walk(tree))
    heads = [node for node in nodes if isinstance(node, ast.Assign) and _is_call_of(node.value, "lm_head")]
    if len(heads) != 1 or not isinstance(heads[0].targets[0], ast.Name):
        return False
    name = heads[0].targets[0].id
    stores = [
        node for node in nodes if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    ]
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_call_of(node, "loss_function")]
    given = [
        value for call in calls for value in (*call.args[:1], *(k.value for k in call.keywords if k.arg == "logits"))
    ]
    return len(stores) == 1 and len(given) == 1 and isinstance(given[0], ast.Name) and given[0].id == name


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
