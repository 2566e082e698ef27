"""Is it fast? Operations, attention and the loss head beside torch eager, torch.compile and Liger.

Operations run at 8192 tokens and h 4096 in bfloat16, beside a copy of the fewest bytes that both passes must move.
Attention with dropout stands beside torch's flash attention: what dropout costs, here and there. The loss head, from
hidden states to their gradient and the weight's, stands beside torch, torch.compile and Liger.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.operations import OPERATIONS, Operation, Sizes
from gpu.right import WITHOUT_FLASH
from gpu.steps import Step
from tempo_kernels.attention import attention
from tempo_kernels.linear_cross_entropy import linear_cross_entropy

Function = Callable[..., Any]
ROUNDS, WARM_UPS = 15, 5
# Two roundings of bfloat16 in a row are off by less, a gate taken for an up or a wrong bias by much more.
AGREEMENT = 0.02
LEAD_CYCLES = 20_000_000
"""For which the GPU sleeps, about 10 ms, before a pass begins, so that no launch is waited for."""


class Pass:
    """Forward and backward of a function over copies of `tensors`, since some write over inputs and gradients."""

    def __init__(self, function: Function, tensors: Sequence[Tensor]) -> None:
        self._function = function
        self.leaves = [t.detach().clone().requires_grad_() for t in tensors]
        torch.manual_seed(0)
        self._grads = [torch.randn_like(y) for y in self.outputs()]

    def outputs(self) -> tuple[Tensor, ...]:
        found = self._function(*self.leaves)
        return found if isinstance(found, tuple) else (found,)

    def __call__(self) -> list[Tensor]:
        """Returns the outputs and every gradient."""
        outputs = self.outputs()
        return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, self.leaves, self._grads)]

    def count_bytes(self) -> int:
        """Counts what both passes must move: each input and what was kept read once, each result written once."""
        kept: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            outputs = self.outputs()
        of_forward = {t.untyped_storage().data_ptr(): t.nbytes for t in (*self.leaves, *outputs)}
        found = {t.data_ptr(): t.nbytes for t in torch.autograd.grad(outputs, self.leaves, self._grads)}
        of_backward = found | {t.data_ptr(): t.nbytes for t in self._grads}
        return sum((kept | of_forward).values()) + sum(kept.values()) + sum(of_backward.values())


def measure(passes: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Returns the median milliseconds of each, which take turns."""
    samples: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(WARM_UPS + ROUNDS):
        for name, run in passes.items():
            samples[name].append(_time_on_gpu(run) if device == "cuda" else _time_on_host(run))
    return {name: statistics.median(found[WARM_UPS:]) for name, found in samples.items()}


def _time_on_host(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def _time_on_gpu(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LEAD_CYCLES)
    start.record()
    kept = run()
    end.record()
    end.synchronize()
    del kept
    return start.elapsed_time(end)


def _copy(num_bytes: int, device: str) -> Callable[[], object]:
    """Returns the device's own copy, moving num_bytes: half of them read, half written."""
    source = torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=device)
    return functools.partial(torch.empty_like(source).copy_, source)


def compare(
    functions: Mapping[str, Function], tensors: Sequence[Tensor], copies: Sequence[str] = (), holds: bool = False
) -> dict[str, Any]:
    """Times forward and backward of those that run, and says of the others why they do not.

    They are other people's: whatever one raises is a reason to leave it out, and none to stop.

    Args:
        functions: the same of `tensors`, eager first.
        copies: the names of those beside which a copy of what they must move is timed.
        holds: to leave out those of other people that do not agree with the first.
    """
    passes: dict[str, Callable[[], object]] = {}
    left_out, device = {}, tensors[0].device.type
    for name, function in functions.items():
        try:
            one = Pass(function, tensors)
            found = one()
            if not passes:
                expected = found
            elif holds and name not in copies and (error := compute_disagreement(found, expected)) > AGREEMENT:
                raise ValueError(f"disagrees with torch eager by {error:.3g} of its norm")
        except Exception as reason:
            left_out[name] = f"{type(reason).__name__}: {reason}".partition("\n")[0]
            continue
        passes[name] = one
        if name in copies:
            passes[f"copy {name}"] = _copy(one.count_bytes(), device)
    ms = measure(passes, device)
    ours = min((name for name in ms if name in copies or name.startswith("tempo")), key=ms.__getitem__)
    text = f"{ours} {ms[ours]:.3f} ms; {', '.join(f'{name} {value / ms[ours]:.2f}' for name, value in ms.items())}"
    return {"answer": text, "ms": ms, "left_out": left_out}


def compute_disagreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest norm(found - expected) / norm(expected) over the results; NaN counts as infinite."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        largest = max(largest, error.nan_to_num(float("inf")).item())
    return largest


def _compile(function: Function) -> Function:
    # Backward runs many times over one graph, so what is saved may not be given away.
    torch._functorch.config.donated_buffer = False
    compiled: Function = torch.compile(function, dynamic=False)
    return compiled


def measure_operation(operation: Operation, device: str, sizes: Sizes) -> dict[str, Any]:
    """Compares an operation's forms with all others, beside a copy."""
    plain = operation.plain(sizes.p)
    functions = {"eager": plain, "compile": _compile(plain)}
    functions |= {"liger": operation.liger} if operation.liger else {}
    forms = {form.keeps: form.factory(sizes.p) for form in operation.forms}
    # What draws is torch's own formula, which there is nothing to hold against.
    return compare(functions | forms, operation.tensors(sizes, device), list(forms), not operation.draws)


class AttentionShape(NamedTuple):
    """Causal, bf16, [s, b, a, d]."""

    s: int
    b: int
    a: int
    d: int


class HeadShape(NamedTuple):
    """bf16; hidden [s, b, h] and weight [v, h]."""

    s: int
    b: int
    h: int
    v: int


def measure_attention(
    device: str, shape: AttentionShape, backend: SDPBackend = SDPBackend.FLASH_ATTENTION
) -> dict[str, Any]:
    """Compares attention on q, k and v [s, b, a, d], which torch takes as views."""

    def ours(p: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(WITHOUT_FLASH):  # without dropout, too; torch's is the rival
            return attention(q, k, v, causal=True, softmax_scale=shape.d**-0.5, dropout_p=p, dropout_key=1)

    def torchs(p: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    names = {"tempo": ours, "sdpa": torchs}
    functions = {f"{name}, p {p:g}": functools.partial(run, p) for name, run in names.items() for p in (0.1, 0.0)}
    return compare(functions, [torch.randn(shape, device=device).bfloat16() for _ in range(3)])


def measure_head(device: str, shape: HeadShape) -> dict[str, Any]:
    """Compares the loss head."""
    hidden = torch.randn(shape.s, shape.b, shape.h, device=device).bfloat16()
    weight = (torch.randn(shape.v, shape.h, device=device) * shape.h**-0.5).bfloat16()
    return compare(list_heads(shape, device), [hidden, weight])


def list_heads(shape: HeadShape, device: str) -> dict[str, Function]:
    """Lists who computes the sum of the losses from hidden and weight."""
    labels = torch.randint(shape.v, (shape.b, shape.s), device=device)
    flat, ones = labels.t().reshape(-1), torch.ones(shape.b, shape.s, device=device)

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), flat, reduction="sum")

    def liger(hidden: Tensor, weight: Tensor) -> Tensor:
        functional = importlib.import_module("liger_kernel.transformers.functional")
        found = functional.liger_fused_linear_cross_entropy(hidden.flatten(0, 1), weight, flat, reduction="sum")
        return found[0] if isinstance(found, tuple) else found

    return {
        "eager": plain,
        "compile": _compile(plain),
        "liger": liger,
        "tempo, logits recomputed": lambda *t: linear_cross_entropy(*t, labels).sum(),
        "tempo, gradients in forward": lambda *t: linear_cross_entropy(*t, labels, token_weights=ones)[0],
    }


LARGE = Sizes(s=2048, b=4, h=4096, ffn=16384, gated_ffn=11008, p=0.1, dtype=torch.bfloat16)
TINY = Sizes(s=4, b=2, h=64, ffn=128, gated_ffn=48, p=0.1, dtype=torch.bfloat16)
ATTENTION = [AttentionShape(s, 16384 // s, 2048 // d, d) for s in (2048, 1024, 4096, 8192) for d in (64, 128)]
HEADS = [HeadShape(4096, 4, 4096, 50304), HeadShape(4096, 4, 4096, 128256)]


def list_steps(device: str) -> Iterator[Step]:
    """Yields the steps of operations, most important first."""
    is_gpu = device == "cuda"
    backend = SDPBackend.FLASH_ATTENTION if is_gpu else SDPBackend.MATH
    for shape in ATTENTION if is_gpu else [AttentionShape(64, 2, 2, 32)]:
        run = functools.partial(measure_attention, device, shape, backend)
        yield Step(f"attention, s {shape.s}, d {shape.d}", "fast", 6.0, run)
    for operation in OPERATIONS:
        run = functools.partial(measure_operation, operation, device, LARGE if is_gpu else TINY)
        yield Step(operation.name, "fast", 12.0, run)
    for head in HEADS if is_gpu else [HeadShape(16, 2, 32, 96)]:
        yield Step(f"loss head, v {head.v}", "fast", 15.0, functools.partial(measure_head, device, head))
