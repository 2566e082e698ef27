"""Keeps a folder of checkpoints whose latest one is always whole, even if the writing process is killed.

A checkpoint is written to iter_XXXXXXX.tmp, flushed to disk, renamed, and only then named in the file `latest`, which
is itself replaced in one step. It is what was saved if it has the sizes and SHA-256 in its description, which is itself
sealed: every process compares the sizes before anything starts, and the ranks divide the contents among them, once they
have met. Nothing here knows what the files contain.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.beside import first_line
from tempo_megatron.disk import flush_to_disk

LATEST = "latest"
LOCK = "lock"
_UNFINISHED = re.compile(r"(iter_\d{7,}(\.old)?|latest|shared_[0-9a-f]+_\d+)\.tmp")
_NAME = re.compile(r"iter_(\d{7,})")


class CheckpointFolder:
    """The checkpoints under `path`. One process calls lock, begin and commit; the others only write and read files.

    `option` is that by which the user has given it, for the errors of `lock`.
    """

    def __init__(self, path: str | Path, option: str = "--save") -> None:
        self.path, self.option = Path(path), option
        self._lock: int | None = None

    def find_latest(self) -> str | None:
        """Returns the name of the newest whole checkpoint, or None if there is none.

        The file `latest` names it. Without that file it is the one of the highest step: a checkpoint gets its name when
        it is whole, and a kill may have come before the file was written.

        Raises ValueError if `latest` names a checkpoint that was moved or deleted.
        """
        try:
            name = (self.path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return max(self._list_checkpoints(), key=parse_iteration, default=None)
        if not _NAME.fullmatch(name) or not (self.path / name).is_dir():
            present = self._list_checkpoints()
            choice = f"write one of {', '.join(present)} into it" if present else "remove it to start anew"
            raise ValueError(f"{self.path / LATEST} names {name!r}, which is not a checkpoint there; {choice}")
        return name

    def list_up_to(self, name: str) -> list[str]:
        """Lists the checkpoint `name` and those of earlier steps, the newest first."""
        step = parse_iteration(name)
        return [other for other in reversed(self._list_checkpoints()) if parse_iteration(other) <= step]

    def set_aside(self, damaged: Iterable[str], name: str) -> list[str]:
        """Renames damaged checkpoints, so that they can be examined, and makes `name` the latest.

        Returns their new names. The folder must be locked.
        """
        renamed = []
        for other in damaged:
            names = (f"{other}.damaged{number or ''}" for number in itertools.count())
            renamed.append(next(new for new in names if not (self.path / new).exists()))
            (self.path / other).rename(self.path / renamed[-1])
        self._name_latest(name)
        return renamed

    def is_named(self) -> bool:
        """Whether the file `latest` exists."""
        return (self.path / LATEST).exists()

    def _list_checkpoints(self) -> list[str]:
        return sorted(entry.name for entry in self.path.glob("iter_*") if _NAME.fullmatch(entry.name))

    def lock(self) -> None:
        """Keeps other runs from saving here until unlock() or the end of this process, even by a kill.

        Raises ValueError if the folder cannot be written, or if another run saves to it. The launcher of that run may
        be gone while its ranks still train.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"{self.option} {self.path} cannot be written ({error}); give another folder") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ValueError(
                f"{self.option} {self.path} is being written by another run; wait for it or end it, or give another "
                "folder"
            ) from error
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, iteration: int) -> str:
        """Makes and names an empty folder for the checkpoint of `iteration`; removes what killed runs left."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.remove_unfinished()
        name = name_unfinished(iteration)
        (self.path / name).mkdir()
        return name

    def commit(self, iteration: int) -> None:
        """Makes what was written after begin(iteration) the latest checkpoint. Every file must be on disk."""
        name = name_checkpoint(iteration)
        target, replaced = self.path / name, self.path / f"{name}.old.tmp"
        if target.exists():
            # A run was killed before it could name this one in `latest`, or went on from an earlier checkpoint.
            if self.find_latest() == name:
                raise ValueError(f"{target} is already the latest checkpoint")
            target.rename(replaced)
        (self.path / name_unfinished(iteration)).rename(target)
        flush_to_disk(self.path)
        self._name_latest(name)
        shutil.rmtree(replaced, ignore_errors=True)

    def _name_latest(self, name: str) -> None:
        unfinished = self.path / f"{LATEST}.tmp"
        unfinished.write_text(f"{name}\n", encoding="utf-8")
        flush_to_disk(unfinished)
        unfinished.replace(self.path / LATEST)
        flush_to_disk(self.path)

    def remove_older_than_newest(self, number: int) -> None:
        """Keeps the newest `number` checkpoints up to the latest one and deletes those before them.

        A checkpoint is renamed before it is deleted, so that a kill never leaves half of one under its name. What
        cannot be deleted stays.
        """
        latest = self.find_latest()
        assert latest is not None and number >= 1
        for name in reversed(self.list_up_to(latest)[number:]):
            doomed = self.path / f"{name}.old.tmp"
            with contextlib.suppress(OSError):
                (self.path / name).rename(doomed)
                flush_to_disk(self.path)
                shutil.rmtree(doomed)

    def remove_unfinished(self) -> None:
        """Deletes what unfinished saves have left behind."""
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            if _UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def name_checkpoint(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def name_unfinished(iteration: int) -> str:
    """Names the folder of a checkpoint while it is written."""
    return f"{name_checkpoint(iteration)}.tmp"


def parse_iteration(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


RUN_FILE = "run.json"
FORMAT = 4
"""Of the description; it stores every field of the run as a setting."""
IMPORTED = "imported_from"
"""In the description of a checkpoint that import has made: the folder of the model. The trainer writes none."""
_SEAL = "sha256_of_the_rest"

Files = dict[str, tuple[int, str]]
"""A file's name in the checkpoint -> its bytes and its SHA-256."""


def describe_files(checkpoint: Path, paths: Iterable[str | Path]) -> Files:
    """Reads the sizes and checksums of files of `checkpoint` from the disk."""
    return {
        Path(path).relative_to(checkpoint).as_posix(): (Path(path).stat().st_size, hash_file(Path(path)))
        for path in paths
    }


def write_description(checkpoint: Path, content: Mapping[str, Any], files: Files) -> None:
    """Writes and seals the RUN_FILE of a checkpoint with these files."""
    described = {**content, "format": FORMAT, "files": dict(sorted(files.items()))}
    sealed = {**described, _SEAL: _seal(described)}
    (checkpoint / RUN_FILE).write_text(json.dumps(sealed, indent=2) + "\n", encoding="utf-8")


def read_description(checkpoint: Path) -> dict[str, Any]:
    """Reads the RUN_FILE of a checkpoint.

    Raises ValueError if it is missing, is not a JSON object, or was changed; see check_format for other formats.
    """
    path = checkpoint / RUN_FILE
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(description, dict):
            raise ValueError(f"{RUN_FILE} holds a {type(description).__name__}, expected an object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{checkpoint} is not a checkpoint of Tempo's trainer ({first_line(error)}); give another --load"
        ) from error
    seal = description.pop(_SEAL, None)
    if (seal is not None or description.get("format") == FORMAT) and seal != _seal(description):
        raise ValueError(f"{path} is not what the trainer wrote: its checksum differs; give another checkpoint")
    return description


def describe_layout(description: Mapping[str, Any]) -> str:
    """`TP 2, PP 2, DP 1, ZeRO 1`; import writes no pipeline."""
    pp = description.get("pipeline_model_parallel_size", 1)
    tp, dp, stage = (description[name] for name in ("tensor_model_parallel_size", "data_parallel_size", "zero_stage"))
    return f"TP {tp}, {f'PP {pp}, ' if pp > 1 else ''}DP {dp}, ZeRO {stage}"


def check_format(description: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a description of another version of the trainer; `where` names it."""
    if "files" not in description:
        raise ValueError(f"{where} is not a checkpoint of Tempo's trainer; give another one")
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{where}: its {RUN_FILE} has format {description.get('format')}, expected {FORMAT}; it is of another "
            "version of this trainer; use that one"
        )


def find_missing(checkpoint: Path, files: Files) -> str | None:
    """Says in one sentence which of `files`, those of its description, a checkpoint lacks or has in another size.

    It looks at names and sizes only, and returns None if all are right.
    """
    missing = [name for name in files if not (checkpoint / name).is_file()]
    if missing:
        return f"{checkpoint} lacks {', '.join(missing)}"
    for name, (num_bytes, _) in files.items():
        if (found := (checkpoint / name).stat().st_size) != num_bytes:
            from tempo_megatron.training.checkpoint_files.files import find_fault  # it imports deepspeed

            fault = find_fault(checkpoint / name) if name.endswith(".pt") else None
            return fault or f"{checkpoint / name} has {found} bytes, and {num_bytes} were saved"
    return None


def find_damage(checkpoint: Path, files: Files, rank: int, world_size: int) -> str | None:
    """Says in one sentence which file of this rank's share is not what was saved; returns None if all are.

    It reads every byte of the share, which takes as long as loading. All ranks together read every file.
    """
    from tempo_megatron.training.checkpoint_files.files import find_fault  # it imports deepspeed

    for name in sorted(files)[rank::world_size]:
        path = checkpoint / name
        try:
            if path.suffix == ".pt" and (fault := find_fault(path)):
                return fault
            if hash_file(path) != files[name][1]:
                return f"{path} is damaged: its content is not what was saved"
        except OSError as error:
            return f"{path} cannot be read ({error})"
    return None


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            found.update(block)
    return found.hexdigest()


def _seal(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
