"""Writes a safetensors file one tensor after the other, so that only one is in memory, and reads single tensors of one.

The package safetensors writes only what is wholly in memory. Its format is a header of JSON, which says for each tensor
where it lies, and the tensors behind it: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from tempo_megatron.beside import first_line

Shape = tuple[int, ...]
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The dtypes that weights may have, by their names in the format."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Layout = Sequence[tuple[str, torch.dtype, Shape]]


def write_tensors(path: Path, layout: Layout, tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> None:
    """Writes `tensors`, which have the names, dtypes and shapes of `layout`; shows its progress.

    Raises OSError if the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape in layout:
        end = at + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    # disable=None shows no bar if the output is not a terminal.
    bar = tqdm(total=at, unit="B", unit_scale=True, unit_divisor=1024, desc="written", disable=None, leave=False)
    with path.open("wb") as file, bar:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, shape), tensor in zip(layout, tensors, strict=True):
            assert tensor.dtype == dtype and tensor.shape == shape, name
            file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
            bar.update(tensor.nbytes)


class _Piece(NamedTuple):
    """Rows of one of several stacked matrices."""

    stack: str
    number: int
    first_row: int
    num_rows: int


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of some safetensors files by name, each read from the disk when it is asked for.

    Raises ValueError, in one sentence, if a file is missing or damaged, or if two have a tensor of one name.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        self._pieces: dict[str, _Piece] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise ValueError(f"{path} is missing; give the whole folder") from None
            except Exception as error:  # SafetensorError, or the operating system's
                raise ValueError(
                    f"{path} is damaged or no safetensors file ({first_line(error)}); copy it again"
                ) from error
            for name in list(file.keys()):  # type: ignore[no-untyped-call]
                if name in self._files:
                    raise ValueError(f"{path} has {name}, which another file of the folder has too; remove one of them")
                self._files[name] = file

    def unstack(self, stacks: Mapping[str, tuple[str, ...]]) -> None:
        """Replaces stacked tensors, [n, rows, columns], by the [rows / parts, columns] of each of the n and each part.

        Args:
            stacks: end of a name -> the ends of the names of the parts, in which * becomes a number below n.
        """
        for name in list(self._files):
            for end, parts in stacks.items():
                shape = self.describe(name)[1]
                if not name.endswith(end) or len(shape) != 3 or shape[1] % len(parts):
                    continue
                file, rows, before = self._files.pop(name), shape[1] // len(parts), name.removesuffix(end)
                for number, part in itertools.product(range(shape[0]), range(len(parts))):
                    new = before + parts[part].replace("*", str(number))
                    if new in self._files:
                        raise ValueError(f"the files have {new} and {name}, which holds it too; remove one of them")
                    self._files[new] = file
                    self._pieces[new] = _Piece(name, number, part * rows, rows)
                break

    def __getitem__(self, name: str) -> Tensor:
        if (piece := self._pieces.get(name)) is not None:
            rows = slice(piece.first_row, piece.first_row + piece.num_rows)
            found: Tensor = self._files[name].get_slice(piece.stack)[piece.number : piece.number + 1, rows]
            return found[0]
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def describe(self, name: str) -> tuple[str, Shape]:
        """Returns a tensor's dtype, by its name in the format, and its shape, without reading it."""
        piece = self._pieces.get(name)
        stored = self._files[name].get_slice(name if piece is None else piece.stack)
        shape = tuple(stored.get_shape())
        return stored.get_dtype(), shape if piece is None else (piece.num_rows, *shape[2:])
