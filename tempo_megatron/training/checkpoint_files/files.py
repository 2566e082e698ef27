"""Reads checkpoint files without running what is in them, and writes them without leaving a rank waiting."""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from tempo_megatron.beside import first_line
from tempo_megatron.disk import flush_to_disk


def _find_member(cls: Any, name: str) -> Any:
    """Replaces getattr while a file is read: Python 3.11.0 to 3.11.3 pickles a member of an enum as a call of it."""
    if cls is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"getattr of {cls} and {name!r}, where only members of ZeroStageEnum are read")
    return ZeroStageEnum[name]


# The classes that DeepSpeed's optimizers save besides tensors and plain containers. None of them runs code from a file.
ALLOWED_CLASSES: list[Any] = [
    *(DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address),
    (_find_member, "builtins.getattr"),
]


def read_tensors(path: str | Path, map_location: Any = "cpu", *, is_mapped: bool = False) -> Any:
    """Reads what torch.save wrote: tensors, plain containers and the few classes of DeepSpeed's optimizers.

    With `is_mapped` a tensor is read from the disk when it is first used.

    Raises ValueError if the file is missing or damaged, or holds anything else, which is not executed.
    """
    try:
        with safe_globals(ALLOWED_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(find_fault(path) or f"{path} is damaged; give another checkpoint") from error
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing, so the checkpoint is not whole; give another checkpoint") from error
    except Exception as error:  # the unpickler raises any kind of error on damaged bytes
        raise ValueError(f"{path} is damaged or cannot be read ({first_line(error)}); give another one") from error


def find_fault(path: str | Path) -> str | None:
    """Says in one sentence that a file is damaged or holds more than read_tensors allows; returns None if it is sound.

    It reads the pickle, not the tensors, and executes nothing.
    """
    try:
        with safe_globals(ALLOWED_CLASSES):
            foreign = get_unsafe_globals_in_checkpoint(str(path))
    except Exception as error:  # the parser raises any kind of error on damaged bytes
        return f"{path} is damaged or not a file of torch.save ({first_line(error)}); give another checkpoint"
    if not foreign:
        return None
    return (
        f"{path} holds {', '.join(sorted(foreign))} where a checkpoint has only tensors and numbers; nothing of it was "
        "executed; do not trust the checkpoint, give another one"
    )


class CheckpointFiles(TorchCheckpointEngine):  # type: ignore[misc]  # to mypy DeepSpeed's class is Any
    """The checkpoint engine by which DeepSpeed reads and writes its files.

    A file that cannot be written does not raise at once, because the other ranks wait for this one inside DeepSpeed.
    Call take_failure when DeepSpeed has returned. With `in_background` what is to be written is only copied to the
    host's memory, and `take_writer` writes it.
    """

    def __init__(self, in_background: bool) -> None:
        super().__init__()
        self.in_background = in_background
        self._failure: str | None = None
        self._paths: list[str] = []
        self._copies: list[Any] = []

    def take_writer(self) -> Callable[[], list[str]]:
        """Returns what writes the files of the calls of `save` since the last call, as far as they did not themselves.

        It may run in another thread, returns the files, and raises what try_to_write catches.
        """
        paths, self._paths = self._paths, []
        copies, self._copies = self._copies, []

        def write() -> list[str]:
            for path in paths[len(paths) - len(copies) :]:
                torch.save(copies.pop(0), path)  # one after the other out of memory
                flush_to_disk(path)
            return paths

        return write

    def take_failure(self) -> str | None:
        """Returns why the first file that failed since the last call could not be written, or None."""
        failure, self._failure = self._failure, None
        return failure

    def load(self, path: str, map_location: Any = None) -> Any:
        return read_tensors(path, map_location)

    def save(self, state_dict: Any, path: str) -> None:
        self._paths.append(path)
        if self.in_background:
            self._copies.append(copy_to_host(state_dict))
        else:
            self.attempt(torch.save, state_dict, path)

    def attempt(self, write: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Calls what writes, also a function of DeepSpeed that does so without this engine."""
        self._failure = self._failure or try_to_write(write, *args, **options)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.attempt(os.makedirs, path, exist_ok=exist_ok)


def try_to_write(write: Any, *args: Any, **options: Any) -> str | None:
    """Calls `write`. Returns the operating system's error message, or None."""
    try:
        write(*args, **options)
    except OSError as error:
        return str(error)
    except RuntimeError as error:
        # On a full disk torch.save raises a RuntimeError of its writer.
        if not re.search("inline_container|PytorchStreamWriter|unexpected pos", str(error)):
            raise
        return "the disk took only a part of a file"
    return None


def name_rank_file(rank: int) -> str:
    """Names the file that the trainer itself writes for a rank, beside DeepSpeed's files."""
    return f"rank_{rank:05d}.pt"


def copy_to_host(state: Any) -> Any:
    """Returns a copy of a state, its tensors in the host's memory; later changes of the state do not reach it.

    Mappings, lists and tuples are copied at any depth. Tensors that share a storage share its copy, so that torch.save
    writes files of the same size.
    """
    storages: dict[tuple[str, int], Any] = {}

    def copy_any(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_tensor(value)
        if isinstance(value, Mapping):
            copied = {key: copy_any(inner) for key, inner in value.items()}
            return copied if type(value) is dict else type(value)(copied)  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(copy_any, value))
        return type(value)(map(copy_any, value)) if isinstance(value, (list, tuple)) else copy.deepcopy(value)

    def copy_tensor(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place = (str(storage.device), storage.data_ptr())
        if place not in storages or storage.nbytes() == 0:
            storages[place] = torch.UntypedStorage(storage.nbytes()).copy_(storage)
        host = torch.empty(0, dtype=tensor.dtype)
        return host.set_(storages[place], tensor.storage_offset(), tensor.size(), tensor.stride())

    return copy_any(state)
