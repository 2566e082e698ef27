"""Reads checkpoint files without running what is in them, and writes them without leaving a rank waiting."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


def _find_member(cls: Any, name: str) -> Any:
    """What stands for getattr in a file: some Pythons (3.11.0 to 3.11.3) write a member of an enum by its name."""
    if cls is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"getattr of {cls} and {name!r}, where only members of ZeroStageEnum are read")
    return ZeroStageEnum[name]


# All that DeepSpeed's optimizers put into a checkpoint besides tensors and plain containers. None of them runs code
# that the file brings along.
ALLOWED_CLASSES: list[Any] = [
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
    (_find_member, "builtins.getattr"),
]


def read_tensors(path: str | Path, map_location: Any = "cpu", *, is_mapped: bool = False) -> Any:
    """What torch.save wrote to `path`: tensors, plain containers and the few classes of DeepSpeed's optimizers.

    With `is_mapped` a tensor is read from the disk when it is used, and one that is not used never.

    Raises ValueError where the file is missing or damaged, or holds anything else, which is not executed.
    """
    try:
        with safe_globals(ALLOWED_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(find_fault(path) or f"{path} is damaged; give another checkpoint") from error
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing, so the checkpoint is not whole; give another checkpoint") from error
    except Exception as error:  # the unpickler raises any kind of error on damaged bytes
        raise ValueError(
            f"{path} is damaged or cannot be read ({_take_first_line(error)}); give another one"
        ) from error


def find_fault(path: str | Path) -> str | None:
    """One sentence where the file is damaged or holds more than tensors and what DeepSpeed adds; else None.

    Reads the outline of the file, not its tensors, and executes nothing.
    """
    try:
        with safe_globals(ALLOWED_CLASSES):
            foreign = get_unsafe_globals_in_checkpoint(str(path))
    except Exception as error:  # whatever a parser says of a file that is not one of torch's
        return f"{path} is damaged or not a file of torch.save ({_take_first_line(error)}); give another checkpoint"
    if not foreign:
        return None
    return (
        f"{path} holds {', '.join(sorted(foreign))} where a checkpoint has only tensors and numbers; nothing of it was "
        "executed; do not trust the checkpoint, give another one"
    )


class CheckpointFiles(TorchCheckpointEngine):  # type: ignore[misc]  # to mypy DeepSpeed's class is Any
    """The checkpoint engine that DeepSpeed reads and writes its files through.

    A file that cannot be written does not raise at once: the other ranks wait for this one inside DeepSpeed. Call
    take_failure when DeepSpeed is through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.zipfile_serialization = True  # find_fault reads no other format
        self._failure: str | None = None
        self._written: list[str] = []

    def take_written(self) -> list[str]:
        """The files that were written since the last call."""
        written, self._written = self._written, []
        return written

    def take_failure(self) -> str | None:
        """What the disk had against the first file that was not written since the last call; None where all were."""
        failure, self._failure = self._failure, None
        return failure

    def load(self, path: str, map_location: Any = None) -> Any:
        return read_tensors(path, map_location)

    def save(self, state_dict: Any, path: str) -> None:
        self._failure = self._failure or try_to_write(torch.save, state_dict, path)
        self._written.append(path)

    def attempt(self, write: Callable[..., Any], *args: Any) -> None:
        """Let DeepSpeed write what does not come through save."""
        self._failure = self._failure or try_to_write(write, *args)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._failure = self._failure or try_to_write(os.makedirs, path, exist_ok=exist_ok)


def try_to_write(write: Any, *args: Any, **options: Any) -> str | None:
    """Call `write`. Returns the operating system's error message, or None."""
    try:
        write(*args, **options)
    except OSError as error:
        return str(error)
    except RuntimeError as error:
        # What torch.save raises on a full disk is a RuntimeError of its writer.
        if not re.search("inline_container|PytorchStreamWriter|unexpected pos", str(error)):
            raise
        return "the disk took a part of a file only"
    return None


def name_rank_file(rank: int) -> str:
    """What the trainer itself writes for one rank, beside DeepSpeed's files."""
    return f"rank_{rank:05d}.pt"


def _take_first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
