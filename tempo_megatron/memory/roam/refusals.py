"""Why a step cannot be captured, in one sentence with the operation and the module in which it is called."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

import torch
from torch._subclasses import fake_tensor


@contextlib.contextmanager
def explain_refusals(model: torch.nn.Module) -> Iterator[None]:
    """Turns what fake tensors refuse into a ValueError."""
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
    except (fake_tensor.UnsupportedOperatorException, NotImplementedError, RuntimeError) as error:
        func = getattr(error, "func", None)
        missing = str(func) if func is not None else _find_operator_without_fake(error)
        if missing is None:
            raise
        raise ValueError(
            f"{missing} {_say_where(model, error)} has no fake kernel, which says the shapes of its results; register "
            "one with torch.library.register_fake"
        ) from error


def _find_operator_without_fake(error: BaseException) -> str | None:
    """Its name from the text of the error, which has no other place for it."""
    text = str(error)
    if "no fake impl" not in text and not ("Could not run" in text and "Meta" in text):
        return None
    found = re.search(r"\w+::\w+", text)
    return found.group() if found else None


def _say_where(model: torch.nn.Module, error: BaseException) -> str:
    """The innermost module that was running, by name."""
    names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
    found = "in compute_loss"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            found = f"in module {name}"
    return found
