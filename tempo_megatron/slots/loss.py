"""The fused loss head in Megatron's GPTModel: labels in, losses out, and no logits of all tokens.

GPTModel computes logits in its output layer and hands them to compute_language_model_loss. With labels at hand the
output layer gives the losses at once, inside its own forward, so that whatever hooks gather or release its weight
(ZeRO-3's) do so around it; the second step then has nothing to do. Without labels all is as in Megatron.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor
from torch.autograd.function import once_differentiable

from tempo_kernels.linear_cross_entropy import linear_cross_entropy
from tempo_megatron.config import TempoConfig
from tempo_megatron.slots.late_check import LateCheck
from tempo_megatron.slots.refusals import find_refusal

_IGNORED = -100
# Of the largest gradient: what float32 leaves of proportions.
_TOLERANCE = 1e-4
_IS_MULTIPLE = LateCheck(
    "the gradient of the losses is not a number times loss_mask, for which the fused loss made its gradients (on a GPU "
    "they became NaN in an earlier step); sum loss_mask * losses, or call the model without loss_mask"
)


class TempoOutputLayer(ColumnParallelLinear):
    """ColumnParallelLinear that gives the losses of the labels it is told, and without them logits."""

    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    logits_scale: float = 1.0
    """What the model multiplies logits by (MuP); the losses are those of the logits so scaled."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(losses [b, s] in float32, None) of input_ [s, b, h], or with sequence parallelism [s/p, b, h]."""
        _IS_MULTIPLE.raise_if_noted()
        if self.labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        bias = None if self.skip_bias_add else self.bias
        if self.logits_scale != 1.0:
            # There are no logits to scale; what they are made of is.
            input_ = input_ * self.logits_scale
            bias = None if bias is None else bias * self.logits_scale
        num_rows = weight.size(0)
        is_outside = (self.labels < 0) | (self.labels >= num_rows * get_pg_size(self.tp_group))
        token_weights = None
        if self.loss_mask is not None and torch.is_grad_enabled():
            token_weights = self.loss_mask.view_as(self.labels).float()
        found = linear_cross_entropy(
            input_,
            weight,
            self.labels.masked_fill(is_outside, _IGNORED),
            bias=bias,
            ignore_index=_IGNORED,
            vocab_start=get_pg_rank(self.tp_group) * num_rows,
            group=self.tp_group,
            sequence_parallel=self.sequence_parallel,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            token_weights=token_weights,
        )
        return (found if token_weights is None else _LossesOfTotal.apply(*found, token_weights)), None


class _FusedLoss:
    """What a GPTModel does otherwise where its output layer is a TempoOutputLayer."""

    output_layer: TempoOutputLayer

    def _postprocess(
        self, hidden_states: Tensor, input_ids: Any, position_ids: Any, labels: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if kwargs.get("output_processor") is not None:
            # It is the user's, and may ask the output layer for logits.
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)  # type: ignore[misc]
        layer = self.output_layer
        layer.labels, layer.loss_mask = labels, kwargs.get("loss_mask")
        try:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)  # type: ignore[misc]
        finally:
            layer.labels = layer.loss_mask = None

    def _scale_logits(self, logits: Tensor) -> Tensor:
        """Logits as the model scales them; losses are those of scaled logits already."""
        if self.output_layer.labels is not None:
            return logits
        return super()._scale_logits(logits)  # type: ignore[misc]

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """The losses that the output layer gave, or of real logits Megatron's."""
        if self.output_layer.labels is not None:
            return logits
        return super().compute_language_model_loss(labels, logits)  # type: ignore[misc]


class TempoGPTModel(_FusedLoss, GPTModel):
    """GPTModel with the fused loss head."""


def tempoize_loss(model: Any, tempo_config: TempoConfig) -> None:
    """Give a built GPTModel the fused loss head, where `choose_loss` says so and it has a head at all.

    The model keeps its modules, parameters and checkpoint keys; it and its output layer change class. Called with
    labels it gives losses [b, s] in float32 and keeps no logits; called without, logits. A label outside of the
    vocabulary has loss 0. Called with an `output_processor` it is as in Megatron. Where the model scales its logits
    (MuP) a scaled copy of the hidden states is kept.

    Called with `loss_mask` too, as Megatron's pretrain_gpt.py does, it makes the gradients in forward and spares the
    recomputation of the logits. The loss must then be a number times sum(loss_mask * losses), which is what
    Megatron's loss functions are, and have one backward; any other gradient of the losses raises RuntimeError. A GPU
    is not waited for: there the gradients become NaN, and a later forward raises the error.

    Raises ValueError where `tempo_config.loss` is "fused" and the model or its configuration has what the fused head
    cannot do; "auto" leaves such a model as it is.
    """
    if choose_loss(model, tempo_config)[0] == "off" or not model.post_process:
        return
    cls: Any = type(model)
    logits_scale = _find_logits_scale(model)
    model.output_layer.__class__ = TempoOutputLayer
    model.output_layer.logits_scale = logits_scale
    model.__class__ = _make_fused_class(cls)


def choose_loss(model: Any, tempo_config: TempoConfig) -> tuple[str, str | None]:
    """("fused" or "off", why "auto" is "off") for a built model; the reason is None where "auto" has its first choice
    and where the value was written.

    Raises ValueError where `tempo_config.loss` is "fused" and the model cannot have it.
    """
    if tempo_config.loss == "off":
        return "off", None
    reason = _find_obstacle(model)
    if reason is None:
        return "fused", None
    if tempo_config.loss == "auto":
        return "off", reason
    raise ValueError(f'{reason}; set tempo.loss to "off"')


def _find_obstacle(model: Any) -> str | None:
    """Why a built model cannot have the fused head; None where it can."""
    if not isinstance(model, GPTModel):
        return f"the model is a {type(model).__name__}, and the fused loss is for a GPTModel only"
    refusal = find_refusal("loss", "fused", model.config)
    if refusal is not None:
        return refusal.reason
    if not model.post_process:
        return None
    layer = model.output_layer
    if type(layer) not in (ColumnParallelLinear, TempoOutputLayer):
        return f"the output layer is a {type(layer).__name__}, where a ColumnParallelLinear is expected"
    if _find_logits_scale(model) is None:
        return f"{type(model).__name__} does more to its logits than multiply them by a number"
    return None


def _find_logits_scale(model: Any) -> float | None:
    """The number that a model's logits are multiplied by; None where it does something else with them."""
    if isinstance(model, _FusedLoss):
        return model.output_layer.logits_scale
    scale_logits = getattr(model, "_scale_logits", None)
    if scale_logits is None:
        return 1.0
    logits = torch.tensor([1.0, -3.0, 50.0], dtype=torch.float64)
    scaled = scale_logits(logits)
    return scaled[0].item() if torch.equal(scaled, scaled[0] * logits) else None


@functools.cache
def _make_fused_class(cls: Any) -> Any:
    if issubclass(cls, _FusedLoss):
        return cls
    return TempoGPTModel if cls is GPTModel else type(f"Tempo{cls.__name__}", (_FusedLoss, cls), {})


class _LossesOfTotal(torch.autograd.Function):
    """The losses, with a gradient that may only be a multiple of token_weights: that of their weighted total."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, losses: Tensor, token_weights: Tensor) -> Tensor:
        ctx.save_for_backward(token_weights)
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        (token_weights,) = ctx.saved_tensors
        square = token_weights.square().sum()
        factor = (grad_losses * token_weights).sum() / torch.where(square > 0, square, 1.0)
        expected = factor * token_weights
        error, largest = (grad_losses - expected).abs().amax(), expected.abs().amax()
        is_another = error > _TOLERANCE * largest
        _IS_MULTIPLE.note(is_another)
        # On a GPU an exception here would wait for the device: NaN goes on, and words follow.
        return torch.where(is_another, torch.nan, factor), None, None
