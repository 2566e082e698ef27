"""Makes a language model's logits one chunk of tokens at a time where only a cross entropy needs them.

In a training forward with labels, the head returns `DeferredLogits`. So the model's own code still defines the loss,
by a loss function of transformers, `nn.CrossEntropyLoss` or a `compute_loss`: labels, their shift, what is ignored, and
the divisor. The head is called when the loss or the logits are made, so that ZeRO-3 and FSDP, which gather its weight,
see the call.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tempo_kernels.late_check import LateCheck
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_torch.linear import DropsInput
from tempo_torch.replace import Replaced, change_class, give_class_back

_IS_OUTSIDE = LateCheck(
    "a label is neither in the model's vocabulary nor ignored (on a GPU in an earlier step, whose loss was infinite); "
    "expected token ids below vocab_size, or the cross entropy's ignore_index; correct the labels, or resize the "
    "model's token embeddings",
    IndexError,
)


class LossHead(DropsInput):
    """nn.Linear of [..., h] that returns logits [..., v] or, for labels, the tokens' losses in float32."""

    tempo_defers = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns logits, or an object that makes them later."""
        if self.tempo_defers and len(args) == 1 and not kwargs and args[0].numel() > 0:
            return DeferredLogits(self, args[0])
        return super().__call__(*args, **kwargs)

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        ignore_index: int = -100,
        softcap: float | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Returns the logits z, or the cross entropies of softcap tanh(z / softcap) / temperature. Raises IndexError
        for labels outside of the vocabulary, as stock does; on a GPU in the next step."""
        if labels is None:
            return super().forward(hidden)  # type: ignore[misc,no-any-return]
        if not torch.compiler.is_compiling():
            is_inside = (labels >= 0) & (labels < self.out_features) | (labels == ignore_index)
            _IS_OUTSIDE.raise_if_noted()
            _IS_OUTSIDE.note(~is_inside.all())
        weight, bias = self.weight, self.bias
        if (dtype := _get_autocast(hidden)) is not None:
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        rows, labels = hidden.flatten(0, -2).unsqueeze(1), labels.reshape(1, -1)
        more: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index}
        if softcap is None and temperature == 1.0:
            return linear_cross_entropy(rows, weight, labels, **more).view(-1)  # type: ignore[no-any-return]
        return -linear_log_prob(rows, weight, labels, temperature, softcap, **more).view(-1)  # type: ignore[no-any-return]


_KNOWN = ("dim", "dtype", "ndim", "numel", "shape", "size")
"""What logits tell without values."""


class DeferredLogits:
    """Logits that are computed when they are read.

    They act like a tensor: an attribute, an operator or a function of torch that needs values computes them once, with
    their graph. Multiplication and division by a number, tanh, casts and views that keep the vocabulary are only noted,
    and `F.cross_entropy` makes the logits one chunk of tokens at a time. `read()` returns a tensor.

    Once they are read, they are that tensor for every later use, and so are those made of them and they were made of:
    what is written to it, or to a view of it, counts for a loss that follows.

    Keeps: the head's input, while it lives.
    Raises RuntimeError where they are read after the head's weight, or its input, was written to.
    """

    def __init__(self, head: LossHead, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden
        self._autocast = _get_autocast(hidden)
        self._steps: tuple[tuple[Any, ...], ...] = ()  # methods of a tensor, each with its arguments
        self._versions = None if torch.compiler.is_compiling() else self._get_versions()
        self._read: Tensor | None = None
        self.device = hidden.device
        dtype = hidden.dtype if self._autocast is None else self._autocast
        self._like = torch.empty(*hidden.shape[:-1], head.out_features, dtype=dtype, device="meta")
        self._relatives = [] if self._versions is None else [weakref.ref(self)]  # what is made of the same logits

    def read(self) -> Tensor:
        """Returns the logits."""
        if self._read is None:
            if self._versions is not None and self._versions != self._get_versions():
                raise RuntimeError(
                    "logits are read after what they are made of was written to; expected to read them before the "
                    'optimizer\'s step; read them earlier, or give tempoize loss="off"'
                )
            made: dict[Any, Tensor] = {}
            # With a graph, since a loss may follow, and all together, before anybody writes to one of them.
            with torch.enable_grad():
                for each in (self, *(relative() for relative in self._relatives)):
                    if each is not None:
                        each._read = each._make(each._steps, made)
        return self._read  # type: ignore[return-value]

    def _make(self, steps: tuple[tuple[Any, ...], ...], made: dict[Any, Tensor]) -> Tensor:
        """Returns the logits after these steps; equal ones are one tensor, so that views are views of it."""
        if steps not in made:
            made[steps] = _apply(self._make(steps[:-1], made), *steps[-1]) if steps else self._call_head()
        return made[steps]

    def compute_loss(self, labels: Tensor, ignore_index: int, reduction: str) -> Tensor | None:
        """Returns F.cross_entropy of the logits and these labels; None if the logits have to be read for it."""
        if self._read is not None or (scaling := _get_scaling(self._steps)) is None:
            return None
        losses = self._call_head(labels, ignore_index, *scaling)
        losses = losses.to(self.dtype if self._autocast is None else torch.float32)
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if reduction == "sum" else total / (labels != ignore_index).sum()

    def _call_head(self, *wanted: Any) -> Tensor:
        is_same = self._autocast == _get_autocast(self._hidden)
        dtype, is_enabled = self._autocast, self._autocast is not None
        with contextlib.nullcontext() if is_same else torch.autocast(self.device.type, dtype=dtype, enabled=is_enabled):
            # Not head(...), which would defer again.
            return super(LossHead, self._head).__call__(self._hidden, *wanted)  # type: ignore[no-any-return]

    def _get_versions(self) -> tuple[Any, ...]:
        weight = self._head.weight
        return self._hidden._version, weight._version, id(weight)

    def _then(self, *step: Any) -> Any:
        if self._read is not None:
            return _apply(self._read, *step)
        made = object.__new__(DeferredLogits)
        made.__dict__.update({**self.__dict__, "_steps": (*self._steps, step), "_like": _apply(self._like, *step)})
        if not torch.compiler.is_compiling():
            self._relatives.append(weakref.ref(made))
        return made

    # Operations that are noted.

    def __mul__(self, other: Any) -> Any:
        return self._then("mul", other) if isinstance(other, int | float) else self.read() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then("div", other) if isinstance(other, int | float) else self.read() / other

    def tanh(self) -> Any:
        return self._then("tanh")

    def float(self) -> Any:
        return self._then("to", torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        (target,) = args if len(args) == 1 and not kwargs else (None,)
        if isinstance(target, torch.dtype) and target.is_floating_point:
            return self._then("to", target)
        if target is not None and not isinstance(target, Tensor) and torch.device(target) == self.device:
            return self
        return self.read().to(*args, **kwargs)

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if sizes == (-1, self.shape[-1]):
            return self._then("view", self.shape[:-1].numel(), self.shape[-1])
        return self.read().view(*shape)

    reshape = view

    def contiguous(self) -> DeferredLogits:
        return self

    requires_grad = True

    # Operations that read them.

    @property
    def data(self) -> Tensor:
        return self.read().data

    @data.setter
    def data(self, value: Tensor) -> None:
        self.read().data = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_head":
            raise AttributeError(name)  # copy and pickle ask for these
        return getattr(self._like if name in _KNOWN else self.read(), name)

    def __repr__(self) -> str:
        return f"DeferredLogits({list(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is F.cross_entropy and (loss := _compute_cross_entropy(*args, **kwargs)) is not None:
            return loss
        if func in (torch.tanh, Tensor.tanh) and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return func(*map(_read_inside, args), **{name: _read_inside(value) for name, value in kwargs.items()})


def _get_autocast(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _read_inside(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        return value.read()
    return type(value)(map(_read_inside, value)) if type(value) in (list, tuple) else value


def _forward_operator(name: str) -> Callable[..., Any]:
    def call(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.read(), name)(*map(_read_inside, args))

    return call


_OPERATORS = (
    "add radd sub rsub neg pow rpow rtruediv matmul rmatmul mod floordiv abs getitem setitem len iter eq "
    "ne lt le gt ge invert bool array float int iadd isub imul itruediv ifloordiv imod ipow iand ior ixor and or xor "
    "contains"
)
for _name in _OPERATORS.split():
    setattr(DeferredLogits, f"__{_name}__", _forward_operator(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]


def _apply(logits: Tensor, name: str, *args: Any) -> Tensor:
    return getattr(logits, name)(*args)  # type: ignore[no-any-return]


def _get_scaling(steps: tuple[tuple[Any, ...], ...]) -> tuple[float | None, float] | None:
    """Returns (softcap, temperature) of logits after these steps; None if the steps are another function."""
    inner, outer, is_capped = 1.0, 1.0, False
    for name, *values in steps:
        if name == "tanh":
            if is_capped:
                return None
            is_capped, inner, outer = True, outer, 1.0
        elif name == "div":
            outer *= values[0]
        elif name == "mul":
            outer = outer / values[0] if values[0] else 0.0
    # tanh(z / inner) / outer
    softcap, temperature = (inner, outer * inner) if is_capped else (None, outer)
    return (softcap, temperature) if inner > 0 and 0 < temperature < float("inf") else None


def _compute_cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Returns F.cross_entropy of deferred logits [n, v]; None if they have to be read for it."""
    if not isinstance(input, DeferredLogits) or not isinstance(target, Tensor):
        return None
    is_plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not is_plain or input.ndim != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return None
    if target.size(0) != input.size(0) or target.device != input.device or reduction not in ("mean", "sum", "none"):
        return None
    return input.compute_loss(target, ignore_index, reduction)


class FusedLoss(Replaced):
    """A language model of transformers whose output in training with labels has `DeferredLogits`."""

    labels_place: int
    """The place of `labels` among the arguments of its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output."""
        head = self.get_output_embeddings()
        labels = args[self.labels_place] if len(args) > self.labels_place else kwargs.get("labels")
        if not (labels is not None and self.training and torch.is_grad_enabled() and isinstance(head, LossHead)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        head.tempo_defers = True
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            head.tempo_defers = False


def is_language_model(model: Any) -> bool:
    """Returns whether a module is a language model of transformers, which takes labels and has a head over words."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(model, models.PreTrainedModel):
        return False
    return "labels" in inspect.signature(model.forward).parameters and model.get_output_embeddings() is not None


def use_fused_loss(model: Any) -> str | None:
    """Gives a language model the fused loss; returns the reason if that is impossible."""
    head = model.get_output_embeddings()
    if not isinstance(head, LossHead):
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            return "its head is no plain linear"
        give_class_back(head)
        change_class(head, LossHead, tempo_defers=False)
    if not isinstance(model, FusedLoss):
        names = list(inspect.signature(model.forward).parameters)
        change_class(model, FusedLoss, labels_place=names.index("labels"))
    return None
