"""Times candidates for the tiles of attention's passes, and writes the table of the fastest beside the records.

A candidate is timed in turn with the shape that the kernels have today, and its result compared. A table of another GPU
of the same architecture may differ. Nothing is tuned at run time: the kernels read shapes.json of their folder, over
which the written table can be copied.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from measurements import read_records
from torch import Tensor

from gpu import timing
from gpu.records import Results
from tempo_kernels.attention import kernel
from tempo_kernels.attention.settings import Inputs, Kept, Settings
from tempo_kernels.attention.walks import Splits

TOKENS, LENGTH, WIDTH, P = 8192, 2048, 2048, 0.1
TOLERANCE = 2e-2
"""Of the largest number of a result: tiles sum in another order, in 16 bits."""
TABLE = "shapes.json"

# (queries, keys, warps, stages) of each pass; what does not fit into the GPU fails, and is recorded as that.
GRIDS = {
    "forward": ((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
    "grad_q": ((64, 128), (32, 64), (4, 8), (1, 2)),
    "grad_kv": ((16, 32, 64), (64, 128), (4, 8), (1, 2)),
    "one_walk": ((32, 64, 128), (64, 128), (4, 8), (1, 2, 3)),
}


class Candidate(NamedTuple):
    walk: str
    """One of kernel.PASSES."""
    head_dim: int
    shape: tuple[int, int, int, int]
    """queries, keys, warps, stages."""


def list_candidates(architecture: int) -> list[Candidate]:
    """Today's shape of each pass and head size, and behind it the others that have about as much to hold."""
    found = []
    for walk, rows in kernel.SHAPES[architecture].items():
        for head_dim, today in rows.items():
            shapes = [tuple(today[:4]), *itertools.product(*GRIDS[walk])]
            # A tile far larger than today's, or far smaller, cannot be the fastest.
            size = today.queries * today.keys
            shapes = [shape for shape in shapes if size / 2 <= math.prod(shape[:2]) <= 2 * size]
            found += [Candidate(walk, head_dim, shape) for shape in dict.fromkeys(shapes)]  # type: ignore[arg-type]
    return found


def measure(results: Results, clock: Any, device: torch.device | str, architecture: int, one: Candidate) -> None:
    """Adds a record: milliseconds of the pass with the candidate and with today's shape, or why there are none."""
    run = make_step(one, device)
    today = tuple(kernel.SHAPES[architecture][one.walk][one.head_dim][:4])
    fields: dict[str, Any] = {
        "walk": one.walk,
        "head_dim": one.head_dim,
        "shape": list(one.shape),
        "today": list(today),
    }
    try:
        found = {}
        for name, shape in (("today", today), ("tempo", one.shape)):
            with use(architecture, one._replace(shape=shape)):
                found[name] = run()
        pairs = zip(found["tempo"], found["today"], strict=True)
        if not all((a.float() - b.float()).abs().max() <= TOLERANCE * b.float().abs().max() for a, b in pairs):
            raise ArithmeticError("its result is another one than that of today's shape")
        del found, pairs

        def pass_of(name: str, shape: tuple[int, int, int, int]) -> timing.Pass:
            def launch() -> object:
                with use(architecture, one._replace(shape=shape)):
                    return run()

            return timing.Pass(name, launch, 1)

        times = timing.measure([pass_of("today", today), pass_of("tempo", one.shape)], clock)
        fields |= {"tempo": times["tempo"].ms, "others": {"today": times["today"].ms}, "unit": "ms"}
    except Exception as error:  # whatever Triton raises for what it cannot compile or the GPU cannot hold
        fields["left_out"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    results.add("tune", {}, operation="attention", what=one.walk, dtype="bfloat16", p=P, **fields)


def make_step(one: Candidate, device: torch.device | str) -> Callable[[], Sequence[Tensor]]:
    """Returns a function that runs the pass alone: backward's own launches around it stand beside every candidate."""
    samples, heads = TOKENS // LENGTH, WIDTH // one.head_dim
    q, k, v, grad = torch.randn(4, LENGTH, samples, heads, one.head_dim, device=device).bfloat16()
    inputs, settings = Inputs(q, k, v), Settings(True, one.head_dim**-0.5, P, 1, 0, 0)
    if one.walk == "forward":
        return lambda: kernel.forward(inputs, settings)[:1]
    kept = Kept(*kernel.forward(inputs, settings))
    splits = (kernel.choose_splits(inputs) or Splits(1)) if one.walk == "one_walk" else None

    def run() -> Sequence[Tensor]:
        with mock.patch.object(kernel, "choose_splits", lambda inputs: splits):
            return kernel.backward(grad, inputs, kept, settings)[:3]

    return run


@contextlib.contextmanager
def use(architecture: int, one: Candidate) -> Iterator[None]:
    """The kernels take the candidate's shape inside the context."""
    rows = kernel.SHAPES[architecture][one.walk]
    with mock.patch.dict(rows, {one.head_dim: kernel.Shape(*one.shape, architecture >= 90)}):
        kernel._find_shapes.cache_clear()
        try:
            yield
        finally:
            kernel._find_shapes.cache_clear()


def find_left(candidates: Sequence[Candidate], path: Path, environment: Mapping[str, Any]) -> list[Candidate]:
    """Returns the candidates of which there is no record of this GPU and Triton."""
    records = _read(path, environment)
    known = {(one["walk"], one["head_dim"], tuple(one["shape"]), tuple(one["today"])) for one in records}
    today = {(one.walk, one.head_dim): one.shape for one in reversed(candidates)}
    return [one for one in candidates if (*one, today[one.walk, one.head_dim]) not in known]


def write_table(architecture: int, path: Path, environment: Mapping[str, Any]) -> Path:
    """Writes the kernels' table with the fastest candidate of every pass and head size that was measured."""
    table = {
        number: {walk: {size: list(shape[:4]) for size, shape in rows.items()} for walk, rows in passes.items()}
        for number, passes in kernel.SHAPES.items()
    }
    fastest: dict[tuple[str, int], float] = {}
    for one in _read(path, environment):
        place = one["walk"], one["head_dim"]
        rows = kernel.SHAPES[architecture].get(one["walk"], {})
        if "tempo" not in one or one["today"] != list(rows.get(one["head_dim"], ())[:4]):
            continue
        ratio = one["tempo"] / one["others"]["today"]
        if ratio < fastest.get(place, 1.0):
            fastest[place] = ratio
            table[architecture][one["walk"]][one["head_dim"]] = one["shape"]
    lines = [
        f' "{number}": {{\n' + ",\n".join(f'  "{walk}": {json.dumps(rows)}' for walk, rows in passes.items()) + "\n }"
        for number, passes in table.items()
    ]
    written = path.with_name(TABLE)
    written.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return written


def _read(path: Path, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [one for one in read_records(path) if all(one[name] == environment[name] for name in ("device", "triton"))]
