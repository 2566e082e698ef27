"""Each operation on the CPU, forward and backward, beside the torch operations that it replaces.

python benchmarks/cpu_operations.py        # appends to benchmarks/results/cpu_operations.jsonl

Both sides alternate in one process; the ratio of the medians is the result, 1 is torch's time. What is compiled has
been compiled before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from measurements import DTYPES, RESULTS, add_output_argument, append_records, describe_cpu_run
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.philox import eager as philox
from tempo_kernels.squared_relu import squared_relu

SEQ_LENGTH, BATCH, HIDDEN, HEADS, P = 512, 2, 768, 12, 0.1


class Case(NamedTuple):
    """Two functions of the same inputs."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


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


def cases() -> Iterator[tuple[str, Case]]:
    hidden, wide, row = (SEQ_LENGTH, BATCH, HIDDEN), (SEQ_LENGTH, BATCH, 4 * HIDDEN), (HIDDEN,)
    inner, outer = (4 * HIDDEN,), (SEQ_LENGTH, BATCH, 8 * HIDDEN)
    heads = ((SEQ_LENGTH, BATCH, HEADS, HIDDEN // HEADS),) * 3
    yield "gelu", Case(gelu, lambda x, b: F.gelu(x + b), (wide, inner))
    yield (
        "gelu tanh",
        Case(lambda x, b: gelu(x, b, "tanh"), lambda x, b: F.gelu(x + b, approximate="tanh"), (wide, inner)),
    )
    yield "gelu from input", Case(lambda x, b: gelu(x, b, keep="input"), lambda x, b: F.gelu(x + b), (wide, inner))
    yield "squared_relu", Case(squared_relu, lambda x, b: F.relu(x + b).square(), (wide, inner))
    yield "swiglu", Case(swiglu, _gated(F.silu), (outer, (8 * HIDDEN,)))
    yield "geglu", Case(geglu, _gated(F.gelu), (outer, (8 * HIDDEN,)))
    yield "reglu", Case(reglu, _gated(F.relu), (outer, (8 * HIDDEN,)))
    yield "layer_norm", Case(layer_norm, lambda x, w, b: F.layer_norm(x, row, w, b), (hidden, row, row))
    yield "rms_norm", Case(rms_norm, lambda x, w: F.rms_norm(x, row, w, 1e-5), (hidden, row))
    yield (
        "bias_dropout_add",
        Case(
            lambda x, b, r: bias_dropout_add(x, b, r, p=P, key=1),
            lambda x, b, r: r + F.dropout(x + b, P),
            (hidden, row, hidden),
        ),
    )
    yield "attention", Case(_attention, _unfused_attention, heads)


def inputs_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Random leaves; a vector is a weight near 1."""
    generator = torch.Generator().manual_seed(1)
    values = (torch.randn(shape, generator=generator) for shape in case.shapes)
    values = ((1 + 0.1 * t if t.dim() == 1 else t) for t in values)
    return [t.to(dtype).requires_grad_() for t in values]


def median_ms(functions: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Of functions that take turns, after two of each that do not count."""
    seconds: list[list[float]] = [[] for _ in functions]
    for number in range(rounds + 2):
        for took, function in zip(seconds, functions, strict=True):
            start = time.perf_counter()
            function()
            if number >= 2:
                took.append(time.perf_counter() - start)
    return [1e3 * statistics.median(took) for took in seconds]


def measure(case: Case, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    inputs = inputs_of(case, dtype)
    with torch.no_grad():
        grad = torch.randn_like(case.torchs(*inputs))

    def step(function: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(*inputs), inputs, grad.view(grad.shape))

    ours, torchs = median_ms([step(case.ours), step(case.torchs)], rounds)
    return {"ours_ms": round(ours, 3), "torch_ms": round(torchs, 3), "ours_over_torch": round(ours / torchs, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="default %(default)s")
    parser.add_argument("--only", nargs="+", help="names of operations (default all)")
    add_output_argument(parser, RESULTS / "cpu_operations.jsonl")
    args = parser.parse_args()
    philox.DRAWS_BEFORE_COMPILING = 0
    # As in a process that trains: once a tensor of this size was freed, glibc gives smaller ones back to nobody.
    large = torch.empty(31 << 20, dtype=torch.uint8)
    del large
    chosen = [(name, case) for name, case in cases() if not args.only or name in args.only]
    records = []
    for name, case in tqdm(chosen, unit="operation", disable=None):
        for dtype in DTYPES:
            record = {"operation": name, "dtype": dtype, "shapes": case.shapes, "rounds": args.rounds}
            record |= measure(case, DTYPES[dtype], args.rounds)
            records.append(record | describe_cpu_run())
    append_records(args.output, records)
    for record in records:
        print(f"{record['operation']:18} {record['dtype']}  {record['ours_ms']:8.2f} / {record['torch_ms']:8.2f} ms"
              f" = {record['ours_over_torch']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
