"""Checks that a checkpoint is what was saved, by the sizes and SHA-256 in its description, which is itself sealed.

Every process compares the sizes before anything starts. The ranks divide the contents among them, once they have met.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.beside import first_line

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
