"""Every kernel where its tensors have more than 2**31 elements, without a GPU.

Memory that nobody touches costs nothing. So under Triton's interpreter only a launch's last programs run, over tensors
of which only the last rows hold numbers: the last elements have to be, bit for bit, those of the last rows alone. What
the interpreter does not show, as it runs few programs, the ranges of all numbers do (ttir_ranges.py). On a GPU
test_large_tensors.py runs all programs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

import triton.language as tl
from ahead_of_time import Launch, record_launches, source_of
from attention_kernel_cases import settings
from interpreted import INTERPRETED
from torch import Tensor
from ttir_ranges import find_overflows

import tempo_kernels
from tempo_kernels import kernel_sums
from tempo_kernels.activation import ACTIVATIONS
from tempo_kernels.activation import kernel as activation
from tempo_kernels.attention import kernel as attention
from tempo_kernels.attention.settings import Inputs
from tempo_kernels.attention.settings import Kept as KeptByAttention
from tempo_kernels.dropout_add import Draw
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.linear_cross_entropy import kernel as loss
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.norm import eager as norm_eager
from tempo_kernels.norm import kernel as norm
from tempo_kernels.norm.settings import Blocks, Kept, Norm, Statistics, get_reserve_size

LIMIT = 1 << 31
ROWS, WIDTH, DTYPE = 16, 8192, torch.bfloat16
TAIL = 8
SMALL_PROGRAMS = Blocks(forward_programs=1 << 24, multiprocessors=1 << 24)
NUMBERS = torch.Generator().manual_seed(1)


class Case(NamedTuple):
    run: Callable[..., list[Tensor]]
    """run(is_large, *tensors): what the kernels write, the last elements of each."""
    tensors: list[Tensor]
    """The last elements of large ones; a vector [h] is its whole self."""
    shapes: list[tuple[int, ...]]
    """Of the large ones."""
    heads: int | None = None
    """Of all samples, where programs are shared out among heads."""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=NUMBERS).to(DTYPE)


def of_rows(run: Callable[..., list[Tensor]], *tensors: Tensor, width: int = WIDTH) -> Case:
    """A case of tensors [rows, ...], of which those of `width` columns have more than LIMIT elements."""
    num_rows = LIMIT // width + ROWS
    shapes = [(num_rows, *t.shape[1:]) if len(t) == ROWS else tuple(t.shape) for t in tensors]
    return Case(lambda is_large, *t: run(0 if is_large else num_rows - ROWS, *t), list(tensors), shapes)


def place_last(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape whose last elements are these, while the others take no memory."""
    large = torch.empty(shape, dtype=tensor.dtype)
    large[tuple(slice(-size, None) for size in tensor.shape)] = tensor
    return large


def draw(first_row: int) -> Draw:
    return Draw(0.1, 2**64 - 1, 5, first_row)


def list_activations() -> Iterator[tuple[str, Case]]:
    x, grad, bias = random(ROWS, WIDTH), random(ROWS, WIDTH), random(WIDTH)
    half, bits = random(ROWS, WIDTH // 2), torch.randint(256, (ROWS, WIDTH // 8), generator=NUMBERS, dtype=torch.uint8)
    for name, row in ACTIVATIONS.items():
        run = lambda _, x, b, name=name: activation.forward(x, b, name, "gated")[:1]  # noqa: E731
        yield f"{name} gated", of_rows(run, x, bias, width=WIDTH // 2)
        run = lambda _, x, name=name: activation.forward(x, None, name, "recompute")[:1]  # noqa: E731
        yield f"{name} without bias", of_rows(run, x)
        for form, grad_y in (("recompute", grad), ("gated", half)):
            run = lambda _, g, x, b, name=name, form=form: activation.backward(g, x, b, None, name, form, True)[:1]  # noqa: E731
            yield f"{name} backward, {form}", of_rows(run, grad_y, x, bias)
        if row.x_min is not None:
            run = lambda _, x, b, name=name: activation.forward(x, b, name, "inplace")  # noqa: E731
            yield f"{name} in place", of_rows(run, x, bias)
            run = lambda _, g, y, b, name=name: activation.backward(g, y, None, b.view(-1), name, "inplace", True)[:1]  # noqa: E731
            yield f"{name} backward in place", of_rows(run, grad, x, bits)
    run = lambda _, g, y: activation.backward(g, y, None, None, "squared_relu", "inplace", True)[:1]  # noqa: E731
    yield "squared_relu backward in place", of_rows(run, grad, x.abs())


def list_dropouts() -> Iterator[tuple[str, Case]]:
    x, grad, bias = random(ROWS, WIDTH), random(ROWS, WIDTH), random(WIDTH)
    run = lambda n, x, b, y: [dropout_add.forward(x[:, None], b, y[:, None], draw(n))]  # noqa: E731
    yield "bias_dropout_add", of_rows(run, x, bias, grad)
    yield "dropout", of_rows(lambda n, x: [dropout_add.forward(x[:, None], None, None, draw(n))], x)
    for sums in (False, True):
        run = lambda n, g, sums=sums: dropout_add.backward(g[:, None], draw(n), sums)[:1]  # noqa: E731
        yield f"bias_dropout_add backward{' with sums' if sums else ''}", of_rows(run, grad)


def list_norms(width: int, has_lost: bool) -> Iterator[tuple[str, Case]]:
    x, grad, weight, bias = random(ROWS, width), random(ROWS, width), random(width).abs() + 4, random(width)
    if has_lost:
        weight[::100] = 0
    parameters = Norm(weight, bias, 1e-5, True, False)
    y, kept = norm_eager.forward(x, parameters)
    missing = get_reserve_size(width) - len(kept.lost)
    channels = torch.nn.functional.pad(kept.lost, (0, missing), value=-1).int()
    columns = torch.nn.functional.pad(kept.lost_xhat, (0, missing))
    statistics = norm_eager.forward_from_input(x, parameters)[1]

    def forward(_: int, x: Tensor) -> list[Tensor]:
        y, found = norm.forward(x, parameters, blocks=SMALL_PROGRAMS)
        lost = [found.lost_xhat[:, : len(kept.lost)]] if has_lost else []
        return [y, found.rstd, *lost]

    def backward(_: int, grad: Tensor, y: Tensor, rstd: Tensor, columns: Tensor) -> list[Tensor]:
        kept_by_gpu = Kept(rstd, kept.affine, channels, columns)
        return [norm.backward(grad, y, kept_by_gpu, True, DTYPE, DTYPE, SMALL_PROGRAMS, checks=False)[0]]

    def forward_from_input(_: int, x: Tensor) -> list[Tensor]:
        y, statistics = norm.forward_from_input(x, parameters, SMALL_PROGRAMS)
        return [y, *statistics]

    def refill(_: int, x: Tensor, *kept: Tensor) -> list[Tensor]:
        y = torch.empty_like(x)
        norm.refill(y, x, parameters, Statistics(*kept), SMALL_PROGRAMS)
        return [y]

    def backward_from_input(_: int, grad: Tensor, x: Tensor, *kept: Tensor) -> list[Tensor]:
        return [norm.backward_from_input(grad, x, parameters, Statistics(*kept), SMALL_PROGRAMS)[0]]

    name = f"norm of {width}{' with lost channels' if has_lost else ''}"
    yield f"{name}", of_rows(forward, x, width=width)
    yield f"{name} backward", of_rows(backward, grad, y, kept.rstd, columns, width=width)
    if not has_lost:
        yield f"{name} from its input", of_rows(forward_from_input, x, width=width)
        yield f"{name} refill", of_rows(refill, x, *statistics, width=width)
        yield f"{name} backward from its input", of_rows(backward_from_input, grad, x, *statistics, width=width)


def list_attention() -> Iterator[tuple[str, Case]]:
    """The last rows of the last head of the last sample, of tensors [s, b, a, d] and of a bias and a mask [a, s, s]."""
    rows, d = 256, 64
    own = [random(rows, 1, 1, d) for _ in range(4)]
    extra = [random(1, 1, rows, rows), random(1, 1, rows, rows) > 1]
    extra[1][..., -1, -1] = False  # nobody else sees the last key
    for name, (s, b, a), others in (
        ("attention", (1280, 128, 256), []),
        ("attention with bias and mask", (4096, 1, 256), extra),
    ):
        first = {"first_sample": b - 1, "first_head": a - 1, "first_row": s - rows, "first_column": s - rows}

        def run(is_large: bool, *tensors: Tensor, first: dict[str, int] = first) -> list[Tensor]:
            q, k, v, grad, bias, mask = (*tensors, None, None)[:6]
            inputs = Inputs(q, k, v, bias=bias, mask=mask)
            place = {"first_sample": 0, "first_head": 0} if is_large else first
            chosen = settings(causal=False, window_size=(63, 0), **place)
            out, logsumexp = attention.forward(inputs, chosen)
            grads = attention.backward(grad, inputs, KeptByAttention(out, logsumexp), chosen, bias is not None)
            return [out, logsumexp, *(grad for grad in grads if grad is not None)]

        shapes = [(s, b, a, d)] * 4 + [(1, a, s, s)] * len(others)
        yield name, Case(run, own + others, shapes, a * b)


def list_losses() -> Iterator[tuple[str, Case]]:
    size = 32768
    logits, columns, vectors = (
        random(ROWS, size),
        torch.randint(size, (ROWS,), generator=NUMBERS),
        random(4, ROWS).float().abs(),
    )
    shares = Shares(1.0, 0.1, size, False, 30.0, 0.7, True)

    def compute_statistics(_: int, logits: Tensor, columns: Tensor) -> list[Tensor]:
        return [loss.compute_statistics(logits, columns, shares).mT]

    def write_gradient(_: int, logits: Tensor, columns: Tensor, *vectors: Tensor) -> list[Tensor]:
        loss.write_gradient_(logits, Rows(columns, *vectors), shares)
        return [logits]

    yield "the loss's statistics", of_rows(compute_statistics, logits, columns, width=size)
    yield "the loss's gradient", of_rows(write_gradient, logits, columns, *vectors, width=size)


CASES = dict(
    [
        *list_activations(),
        *list_dropouts(),
        *(case for form in ((4096, False), (4096, True), (32768, False), (32768, True)) for case in list_norms(*form)),
        *list_attention(),
        *list_losses(),
    ]
)


def count_in_bits(*bounds: Any) -> Iterator[Any]:
    wide = any(getattr(bound, "dtype", None) == tl.int64 for bound in bounds)
    for number in range(*(int(bound) for bound in bounds)):
        yield tl.full((), number, tl.int64) if wide else number


@pytest.fixture
def last_programs(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> Callable[[int | None], None]:
    """Has launches run their last programs, or, where so many heads share them, the first and last ones of a head."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    # Python's range has whole numbers without end, while a compiled loop's counter has its bounds' type.
    for module in set(list_kernels().values()):
        monkeypatch.setattr(module, "range", count_in_bits, raising=False)

    def limit(heads: int | None) -> None:
        def run(self, *given, **named):
            accepted = inspect.getfullargspec(self.fn).args
            arguments = inspect.getcallargs(self.fn, *given, **{n: v for n, v in named.items() if n in accepted})
            scope = interpreter._patch_lang(self.fn)
            try:
                arguments = {
                    name: value if name in self.constexprs else interpreter._implicit_cvt(value)
                    for name, value in arguments.items()
                }
                grid = (*self.grid, 1, 1)[:3]
                builder.set_grid_dim(*grid)
                lasts = {grid[0] - i for i in (1, 2, 3, 4)}
                if heads:
                    lasts |= {grid[0] - grid[0] // heads + i for i in (0, 1, 2, 3)}
                for number in sorted(n for n in lasts if 0 <= n < grid[0]):
                    builder.set_grid_idx(number, grid[1] - 1, grid[2] - 1)
                    self.fn(**arguments)
            finally:
                if scope is not None:
                    scope.restore()

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)

    return limit


@pytest.fixture
def few_tiles_a_program(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> None:
    monkeypatch.setattr(kernel_sums, "count_multiprocessors", lambda device: 1 << 24)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU test_large_tensors.py runs all programs")
@pytest.mark.parametrize("name", CASES)
def test_the_last_elements_of_large_tensors_are_those_of_their_rows_alone(name, last_programs, few_tiles_a_program):
    case = CASES[name]
    assert any(torch.Size(shape).numel() > LIMIT for shape in case.shapes)
    expected = case.run(False, *[t.clone() for t in case.tensors])
    last_programs(case.heads)
    found = case.run(True, *[place_last(*pair) for pair in zip(case.tensors, case.shapes, strict=True)])
    for number, (large, alone) in enumerate(zip(found, expected, strict=True)):
        tails = [t[-1].flatten()[-TAIL:] for t in (large, alone)]
        assert torch.equal(*tails) and tails[0].any(), (number, tails)


def list_kernels() -> dict[str, ModuleType]:
    """All kernels, and the modules that have them, by the names of both."""
    found = {}
    for file in sorted(Path(tempo_kernels.__file__).parent.rglob("kernel*.py")):
        name = ".".join(file.relative_to(Path(tempo_kernels.__file__).parents[1]).with_suffix("").parts)
        module = importlib.import_module(name)
        kernels = [value.fn for key, value in vars(module).items() if key.endswith("_kernel")]
        found |= {f"{name}.{kernel.__name__}": module for kernel in kernels if kernel.__module__ == name}
    return found


def list_large_launches(cases: Iterable[Case]) -> dict[str, Launch]:
    """One launch of each form of each kernel, over large tensors that take no memory."""
    launches: dict[str, Launch] = {}
    modules = set(list_kernels().values())
    for case in cases:
        tensors = [torch.empty(shape, dtype=t.dtype) for t, shape in zip(case.tensors, case.shapes, strict=True)]
        for launch in record_launches(lambda case=case, tensors=tensors: case.run(True, *tensors), modules):
            launches.setdefault(source_of(launch).hash(), launch)
    return launches


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_no_number_of_32_bits_runs_over_on_its_way_to_an_address(fresh_plans):
    launches = list_large_launches(CASES.values())
    found: dict[str, list[str]] = {}
    for launch in launches.values():
        name = f"{launch.kernel.fn.__module__}.{launch.kernel.fn.__name__}"
        found.setdefault(name, []).extend(find_overflows(launch))
    assert found.keys() == list_kernels().keys()
    assert not any(found.values()), found
