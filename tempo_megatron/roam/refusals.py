"""Explains in one sentence why a step cannot be captured, naming the operation and the module that calls it.

`BatchStructure` takes a micro batch of any structure apart. Its tensors are inputs of the captured step; all other
values are compiled in, and a later batch in which they differ is refused.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_FOR_ALL_DATA = "on which the rest of the step depends; expected a step that is the same for all data"
_NO_FAKE = "has no fake kernel, which says the shapes of its results; register one with torch.library.register_fake"
# A kind of torch's errors, or a part of their text -> the sentence for them.
_SENTENCES: dict[type[Exception] | str, str] = {
    fake_tensor.DynamicOutputShapeException: "makes a tensor whose shape depends on data; expected shapes that are "
    "known before the step (mask instead of select)",
    fake_tensor.DataDependentOutputException: f"reads a number out of a tensor, {_FOR_ALL_DATA}",
    "Please convert all Tensors to FakeTensors first": "is given a tensor that is neither parameter, buffer nor part "
    "of the micro batch; register it as a buffer",
    "is not supported for tensor subclasses": f"takes numbers out of a tensor, {_FOR_ALL_DATA}",
    "symbolically trace a dynamo-optimized function": "is compiled by torch.compile; expected a model that is not (the "
    'backend "tempo_order" orders compiled ones)',
    fake_tensor.UnsupportedOperatorException: _NO_FAKE,
    "no fake impl": _NO_FAKE,
    "from the 'Meta' backend": _NO_FAKE,
}


class TensorOf(NamedTuple):
    """What is captured of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


_SIMPLE = (bool, int, float, str, Tensor, TensorOf, type(None))


def check_model(model: torch.nn.Module) -> None:
    """Raises ValueError for hooks on gradients, which run in eager mode but not in a traced step."""
    for name, module in model.named_modules():
        if type(module).__name__ == "DistributedDataParallel":
            raise ValueError(
                f"{name or 'the model'} is {type(module).__name__}, which reduces gradients in hooks that a traced "
                "step does not call; expected the module inside"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter {name} has a hook on its gradient, which a traced step does not call; expected none"
            )


@contextlib.contextmanager
def refuse_changed_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Restores every module's attributes, and raises ValueError if the step has set a number, a text or a tensor."""
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    try:
        yield
    finally:
        changed = None
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                if differ(before[name].get(attribute), value):
                    changed = changed or f"module {name or type(module).__name__} sets its attribute {attribute}"
            vars(module).clear()
            vars(module).update(before[name])
    if changed:
        raise ValueError(
            f"{changed} while it runs, which a traced step would not do; expected a model that changes its parameters "
            "and buffers only"
        )


def differ(before: Any, after: Any) -> bool:
    """Whether a number, text or tensor differs; values of other types are not compared."""
    if before is after or not isinstance(after, _SIMPLE):
        return False
    return isinstance(after, Tensor) or type(before) is not type(after) or before != after


@contextlib.contextmanager
def explain_refusals(model: torch.nn.Module) -> Iterator[None]:
    """Turns errors of fake tensors into ValueErrors."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        for sign, sentence in _SENTENCES.items():
            if sign in str(error) if isinstance(sign, str) else isinstance(error, sign):
                found = re.search(r"\baten\.\w+|\b\w+::\w+", str(error))
                called = getattr(error, "func", None) or (found.group() if found else "what runs")
                raise ValueError(f"{called} {_say_where(model, error)} {sentence}") from error
        raise


def _say_where(model: torch.nn.Module, error: BaseException) -> str:
    """Names the innermost module that was running."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    found = "in compute_loss"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            found = f"in module {name}"
    return found


class BatchStructure:
    """The structure of a micro batch: shapes and dtypes of its tensors, and all other values. It holds no tensor."""

    def __init__(self, batch: Sequence[Any]) -> None:
        leaves, self._tree = tree_flatten(tuple(batch))
        self._leaves = list(map(_describe, leaves))

    def list_tensors(self, batch: Sequence[Any]) -> list[Tensor]:
        """Lists the tensors of another micro batch in the same order, whatever the order of its keys.

        Raises ValueError if its structure, shapes, numbers or texts differ.
        """
        try:
            leaves = self._tree.flatten_up_to(tuple(batch))
        except ValueError as error:
            raise ValueError(f"the micro batch has not the structure that was captured: {error}") from error
        for given, captured in zip(map(_describe, leaves), self._leaves, strict=True):
            if differ(captured, given) or (isinstance(captured, TensorOf) and captured != given):
                raise ValueError(
                    f"the micro batch has {given!r} where the step was captured with {captured!r}, which is compiled "
                    "in; expected the same, or another step for it"
                )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def fill(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """Returns the micro batch with these tensors in it."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, TensorOf) else leaf for leaf in self._leaves]
        batch: Sequence[Any] = tree_unflatten(leaves, self._tree)
        return batch


def _describe(leaf: Any) -> Any:
    return TensorOf(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
