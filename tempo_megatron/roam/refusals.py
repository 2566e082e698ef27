"""Explains in one sentence why a step cannot be captured, naming the operation and the module that calls it.

`BatchStructure` takes a micro batch of any structure apart. Its tensors are inputs of the captured step; all other
values are compiled in, and a later batch in which they differ is refused.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# Parts of torch's errors, and the sentences for them.
_SENTENCES = {
    "Please convert all Tensors to FakeTensors first": "is given a tensor that is neither parameter, buffer nor part "
    "of the micro batch; register it as a buffer",
    "is not supported for tensor subclasses": "takes numbers out of a tensor, on which the rest of the step depends; "
    "expected a step that is the same for all data",
    "symbolically trace a dynamo-optimized function": "is compiled by torch.compile; expected a model that is not (the "
    'backend "tempo_order" orders compiled ones)',
}
_SIMPLE = (bool, int, float, str, Tensor, type(None))


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
    except fake_tensor.DynamicOutputShapeException as error:
        raise ValueError(
            f"{error.func} {_say_where(model, error)} makes a tensor whose shape depends on data; expected shapes that "
            "are known before the step (mask instead of select)"
        ) from error
    except fake_tensor.DataDependentOutputException as error:
        raise ValueError(
            f"{error.func} {_say_where(model, error)} reads a number out of a tensor, on which the rest of the step "
            "depends; expected a step that is the same for all data"
        ) from error
    except (fake_tensor.UnsupportedOperatorException, NotImplementedError, RuntimeError, AssertionError) as error:
        for text, sentence in _SENTENCES.items():
            if text in str(error):
                raise ValueError(f"{_find_called(error)} {_say_where(model, error)} {sentence}") from error
        func = getattr(error, "func", None)
        missing = str(func) if func is not None else _find_operator_without_fake(error)
        if missing is None:
            raise
        raise ValueError(
            f"{missing} {_say_where(model, error)} has no fake kernel, which says the shapes of its results; register "
            "one with torch.library.register_fake"
        ) from error


def _find_operator_without_fake(error: BaseException) -> str | None:
    """Finds the operator's name in the text of the error, which has it nowhere else."""
    text = str(error)
    if "no fake impl" not in text and not ("Could not run" in text and "Meta" in text):
        return None
    found = re.search(r"\w+::\w+", text)
    return found.group() if found else None


def _find_called(error: BaseException) -> str:
    """Names the operation in the error's text, or says "what runs"."""
    found = re.search(r"\baten\.\w+", str(error))
    return found.group() if found else "what runs"


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
    """The structure of a micro batch: the places of its tensors, and all other values. It holds no tensor."""

    def __init__(self, batch: Sequence[Any]) -> None:
        leaves, self._tree = tree_flatten(tuple(batch))
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._values = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def list_tensors(self, batch: Sequence[Any]) -> list[Tensor]:
        """Lists the tensors of another micro batch in the same order, whatever the order of its keys.

        Raises ValueError if its structure, numbers or texts differ.
        """
        try:
            leaves = self._tree.flatten_up_to(tuple(batch))
        except ValueError as error:
            raise ValueError(f"the micro batch has not the structure that was captured: {error}") from error
        tensors = [leaves[place] for place in self._places]
        given = [None if place in self._places else leaf for place, leaf in enumerate(leaves)]
        for value in (t for t in tensors if not isinstance(t, Tensor)):
            raise ValueError(f"the micro batch has {value!r} where the step was captured with a tensor; expected one")
        for value, captured in zip(given, self._values, strict=True):
            if differ(captured, value):
                found = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"the micro batch has {found} where the step was captured with {captured!r}, which is compiled "
                    "in; expected the same, or another step for it"
                )
        return tensors

    def fill(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """Returns the micro batch with these tensors in it."""
        leaves = list(self._values)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        batch: Sequence[Any] = tree_unflatten(leaves, self._tree)
        return batch
