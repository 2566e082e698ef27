"""Times each operation on the CPU, forward and backward, beside the torch operations that it replaces.

python benchmarks/cpu_operations.py        # appends to benchmarks/results/cpu/operations.jsonl

Both sides alternate in one process; the result is the ratio of the medians, where 1 is torch's time. Compilation is not
timed. The loss head runs beside Megatron's: its linear layer and vocab_parallel_cross_entropy. On a busy machine use
--clock thread, which counts the time that one thread computes, without the time that it waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from measurements import DTYPES, RESULTS, add_output_argument, append_records, describe_cpu_run
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.squared_relu import squared_relu
from tempo_megatron.cpu import use_cpu
from tempo_megatron.memory.fake_tensors import simulate_layout

P, VOCAB_SIZE, HEAD_SIZE = 0.1, 50304, 64
# thread_time covers backward, too: on a CPU torch runs it in the calling thread.
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}


class Shape(NamedTuple):
    """The sizes of a layer's hidden states."""

    seq_length: int
    batch: int
    hidden: int


SHAPES = {"quickstart": Shape(256, 4, 256), "gpt2": Shape(512, 2, 768), "large": Shape(1024, 2, 1024)}


class Case(NamedTuple):
    """Two functions of the same inputs."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    share_of_rounds: float = 1.0
    """Fewer for what takes seconds."""


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, bias: Tensor) -> Tensor:
        gate, up = (x + bias).chunk(2, dim=-1)
        return activation(gate) * up

    return run


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal=True, softmax_scale=q.size(-1) ** -0.5, dropout_p=P, dropout_key=1)


def _unfused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Megatron's DotProductAttention without fusions."""
    s, b, a, d = q.shape
    q, k, v = (t.permute(1, 2, 0, 3).reshape(b * a, s, d) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)) * d**-0.5
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -10000.0)
    kept = F.dropout(torch.softmax(scores, dim=-1), P)
    return torch.bmm(kept, v).view(b, a, s, d).permute(2, 0, 1, 3).contiguous()


def cases(shape: Shape) -> Iterator[tuple[str, Case]]:
    s, b, h = shape
    hidden, wide, row, inner = shape, (s, b, 4 * h), (h,), (4 * h,)
    outer = ((s, b, 8 * h), (8 * h,))
    for keep in ("inplace", "recompute"):
        suffix = "" if keep == "inplace" else " from input"
        for form, name in (("none", "gelu"), ("tanh", "gelu tanh")):
            yield name + suffix, Case(*_gelus(form, keep), (wide, inner))
        yield (
            "squared_relu" + suffix,
            Case(partial(squared_relu, keep=keep), lambda x, b: F.relu(x + b).square(), (wide, inner)),
        )
        yield (
            "layer_norm" + suffix,
            Case(partial(layer_norm, keep=keep), lambda x, w, b: F.layer_norm(x, row, w, b), (hidden, row, row)),
        )
        yield (
            "rms_norm" + suffix,
            Case(partial(rms_norm, keep=keep), lambda x, w: F.rms_norm(x, row, w, 1e-5), (hidden, row)),
        )
    yield "swiglu", Case(swiglu, _gated(F.silu), outer)
    yield "geglu", Case(geglu, _gated(F.gelu), outer)
    yield "reglu", Case(reglu, _gated(F.relu), outer)
    yield (
        "bias_dropout_add",
        Case(
            lambda x, b, r: bias_dropout_add(x, b, r, p=P, key=1),
            lambda x, b, r: r + F.dropout(x + b, P),
            (hidden, row, hidden),
        ),
    )
    yield "attention", Case(_attention, _unfused_attention, ((s, b, h // HEAD_SIZE, HEAD_SIZE),) * 3)


def loss_heads(shape: Shape) -> Iterator[tuple[str, Case]]:
    """Yields the head for batches of 1 to 4, Megatron's beside both of ours: with four matrix products, where backward
    makes the logits again, and with three, where forward makes the gradients."""
    for batch in range(1, 5):
        labels = torch.randint(VOCAB_SIZE, (batch, shape.seq_length), generator=torch.Generator().manual_seed(2))
        stock = partial(_stock_head, labels=labels.t().contiguous())
        shapes = ((shape.seq_length, batch, shape.hidden), (VOCAB_SIZE, shape.hidden))
        recomputed = partial(linear_cross_entropy, labels=labels)
        in_forward = partial(linear_cross_entropy, labels=labels, token_weights=torch.ones(labels.shape))
        yield "linear_cross_entropy", Case(recomputed, stock, shapes, 0.12)
        yield (
            "linear_cross_entropy in forward",
            Case(partial(_first, in_forward), partial(_sum, stock), shapes, 0.12),
        )


def _first(function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor) -> Tensor:
    return function(*inputs)[0]


def _sum(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return function(*inputs).sum()


def _gelus(form: str, keep: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return (
        lambda x, bias: gelu(x, bias, form, keep=keep),
        lambda x, bias: F.gelu(x + bias, approximate=form),
    )


def _stock_head(hidden: Tensor, weight: Tensor, *, labels: Tensor) -> Tensor:
    losses: Tensor = vocab_parallel_cross_entropy(F.linear(hidden, weight), labels)
    return losses.t().contiguous()


def inputs_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Makes random leaves; a vector is a weight near 1, a matrix a weight near 0."""
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(shape, generator=generator) for shape in case.shapes)
    values = (1 + 0.1 * t if t.dim() == 1 else 0.02 * t if t.dim() == 2 else t for t in values)
    return [t.to(dtype).requires_grad_() for t in values]


def median_ms(
    functions: Sequence[Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Returns the median time of functions that take turns, after two calls of each that do not count."""
    seconds: list[list[float]] = [[] for _ in functions]
    for number in range(rounds + 2):
        for took, function in zip(seconds, functions, strict=True):
            start = clock()
            function()
            if number >= 2:
                took.append(clock() - start)
    return [1e3 * statistics.median(took) for took in seconds]


def measure(case: Case, dtype: torch.dtype, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    inputs = inputs_of(case, dtype)
    with torch.no_grad():
        grad = torch.randn_like(case.torchs(*inputs))

    def step(function: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad.view(grad.shape))

    functions = [step(case.ours), step(case.torchs)]
    ours, torchs = median_ms(functions, max(3, round(rounds * case.share_of_rounds)), clock)
    return {"ours_ms": round(ours, 3), "torch_ms": round(torchs, 3), "ours_over_torch": round(ours / torchs, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="default %(default)s")
    parser.add_argument("--only", nargs="+", help="names of operations (default all)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default all")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default all")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default %(default)s")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="default %(default)s")
    parser.add_argument("--note", default="", help="what else the machine was doing")
    add_output_argument(parser, RESULTS / "cpu" / "operations.jsonl")
    args = parser.parse_args()
    if args.clock == "thread" and args.threads != [1]:
        parser.error(f"--clock thread with --threads {args.threads} leaves threads out; expected --threads 1")
    use_cpu()
    # As in a process that trains: after a tensor of this size was freed, glibc keeps the memory of smaller ones.
    large = torch.empty(31 << 20, dtype=torch.uint8)
    del large
    with simulate_layout(1):
        append_records(args.output, (_show(record) for record in measure_all(args)))


def measure_all(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chosen = [
        (name, case, dtype, shape)
        for shape in args.shapes
        for name, case in (*cases(SHAPES[shape]), *(loss_heads(SHAPES[shape]) if shape == "gpt2" else ()))
        for dtype in args.dtypes
        if not args.only or name in args.only
    ]
    for name, case, dtype, shape in tqdm(chosen, unit="operation", disable=None):
        for threads in args.threads:
            torch.set_num_threads(threads)
            record = {"operation": name, "shape": shape, "dtype": dtype, "shapes": case.shapes, "rounds": args.rounds}
            record |= measure(case, DTYPES[dtype], args.rounds, CLOCKS[args.clock])
            yield record | {"clock": args.clock, "note": args.note} | describe_cpu_run()


def _show(record: dict[str, Any]) -> dict[str, Any]:
    tqdm.write(
        f"{record['operation']:31} {record['shape']:10} {record['dtype']} {torch.get_num_threads()} "
        f"{record['ours_ms']:8.2f} / {record['torch_ms']:8.2f} ms = {record['ours_over_torch']:.2f}"
    )
    return record


if __name__ == "__main__":
    main()
