"""Checks that a checkpoint is what was saved, by sizes and SHA-256 in its description, which has one of its own.

Sizes are compared before anything starts, by every process; contents once the ranks have met, who divide the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RUN_FILE = "run.json"
FORMAT = 4
"""Its settings are every field of the run."""
READ_FORMATS = (2, 3, FORMAT)
"""3 has few settings, see `resume.read_settings`; 2 no checksums either."""
_SEAL = "sha256_of_the_rest"
_BLOCK_BYTES = 1 << 24

Files = dict[str, tuple[int, str]]
"""A file's name in the checkpoint -> its bytes and its SHA-256."""


def describe_files(checkpoint: Path, paths: Iterable[str | Path]) -> Files:
    """Sizes and checksums of files of `checkpoint`, read from the disk."""
    return {
        Path(path).relative_to(checkpoint).as_posix(): (Path(path).stat().st_size, hash_file(Path(path)))
        for path in paths
    }


def write_description(checkpoint: Path, content: Mapping[str, Any], files: Files) -> None:
    """Write the RUN_FILE of a checkpoint with these files, and seal it."""
    described = {**content, "format": FORMAT, "files": dict(sorted(files.items()))}
    sealed = {**described, _SEAL: _seal(described)}
    (checkpoint / RUN_FILE).write_text(json.dumps(sealed, indent=2) + "\n", encoding="utf-8")


def read_description(checkpoint: Path) -> dict[str, Any]:
    """The content of RUN_FILE of one checkpoint, of whatever version.

    Raises ValueError where there is none, where it is not a JSON object, and where it was changed.
    """
    path = checkpoint / RUN_FILE
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{checkpoint} is not a checkpoint of Tempo's trainer ({_shorten(error)}); give another --load"
        ) from error
    if not isinstance(description, dict):
        raise ValueError(
            f"{checkpoint} is not a checkpoint of Tempo's trainer ({RUN_FILE} holds a "
            f"{type(description).__name__}, expected an object); give another --load"
        )
    seal = description.pop(_SEAL, None)
    if (seal is not None or description.get("format") in READ_FORMATS[1:]) and seal != _seal(description):
        raise ValueError(f"{path} is not what the trainer wrote: its checksum differs; give another checkpoint")
    return description


def find_missing(checkpoint: Path, files: Any) -> str | None:
    """Which of `files`, those of its description, a checkpoint lacks or has in another size; None where all are there.

    Looks at names and sizes only.
    """
    missing = [name for name in files if not (checkpoint / name).is_file()]
    if missing:
        return f"{checkpoint} lacks {', '.join(missing)}"
    if not isinstance(files, dict):
        return None
    for name, (num_bytes, _) in files.items():
        if (found := (checkpoint / name).stat().st_size) != num_bytes:
            from tempo_megatron.training.checkpoint_files.files import find_fault  # it imports deepspeed

            return find_fault(checkpoint / name) or f"{checkpoint / name} has {found} bytes, and {num_bytes} were saved"
    return None


def find_damage(checkpoint: Path, files: Any, rank: int, world_size: int) -> str | None:
    """The first file of this rank's share that is not what was saved, as one sentence; None where all are.

    Reads every byte of the share: as long as loading it takes. All ranks together look at every file.
    """
    from tempo_megatron.training.checkpoint_files.files import find_fault  # it imports deepspeed

    for name in sorted(files)[rank::world_size]:
        path = checkpoint / name
        try:
            if fault := find_fault(path):
                return fault
            if isinstance(files, dict) and hash_file(path) != files[name][1]:
                return f"{path} is damaged: its content is not what was saved"
        except OSError as error:
            return f"{path} cannot be read ({error})"
    return None


def hash_file(path: Path) -> str:
    """SHA-256 of what is in a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()


def _seal(description: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _shorten(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
