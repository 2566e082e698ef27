"""Is it fast? Operations, attention and the loss head beside torch eager, torch.compile and Liger.

Operations run at 8192 tokens and h 4096 in bfloat16, beside a copy of the fewest bytes that both passes must move.
Attention with dropout stands beside torch's flash attention: what dropout costs, here and there. The loss head, from
hidden states to their gradient and the weight's, and log-probabilities stand beside torch, torch.compile and Liger.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import timing
from gpu.operations import OPERATIONS, Operation, Sizes
from gpu.right import WITHOUT_FLASH
from gpu.steps import Step
from tempo_kernels.attention import attention
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob

EAGER, COMPILE, LIGER = "eager", "compile", "liger"
# Two roundings of bfloat16 in a row are off by less, a gate taken for an up or a wrong bias by much more.
AGREEMENT = 0.02


class Implementation(NamedTuple):
    name: str
    function: Callable[..., Any]

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What function takes, requiring gradients: copies, since some write over their inputs."""
        return [t.clone().requires_grad_() for t in tensors]

    def outputs(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        found = self.function(*leaves)
        return found if isinstance(found, tuple) else (found,)

    def time(self, sets: Sequence[Sequence[Tensor]]) -> timing.Pass:
        """Forward and backward of each set; those that write over inputs or gradients go on with what they wrote."""
        leaves = [self.leaves(tensors) for tensors in sets]
        grads = [[torch.randn_like(y) for y in self.outputs(each)] for each in leaves]

        def run() -> object:
            return [torch.autograd.grad(self.outputs(x), x, g) for x, g in zip(leaves, grads, strict=True)]

        return timing.Pass(self.name, run, len(sets))


def tempo(operation: Operation, sizes: Sizes) -> list[Implementation]:
    """One for each form, named after what it keeps."""
    return [Implementation(form.keeps, form.factory(sizes.p)) for form in operation.forms]


def count_bytes(one: Implementation, tensors: Sequence[Tensor]) -> int:
    """Counts what forward and backward must move: each input and what was kept read once, each result written once."""
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    leaves = one.leaves(tensors)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        outputs = one.outputs(leaves)
    of_forward = {t.untyped_storage().data_ptr(): t.nbytes for t in (*leaves, *outputs)}
    grads = [torch.randn_like(y) for y in outputs]
    found = {t.data_ptr(): t.nbytes for t in torch.autograd.grad(outputs, leaves, grads)}
    of_backward = found | {t.data_ptr(): t.nbytes for t in grads}
    return sum((kept | of_forward).values()) + sum(kept.values()) + sum(of_backward.values())


def eager(operation: Operation, sizes: Sizes) -> Implementation:
    return Implementation(EAGER, operation.plain(sizes.p))


def compiled(operation: Operation, sizes: Sizes) -> Implementation:
    # Backward runs many times over one graph, so what is saved may not be given away.
    torch._functorch.config.donated_buffer = False
    return Implementation(COMPILE, torch.compile(operation.plain(sizes.p), dynamic=False, fullgraph=True))


def results(implementation: Implementation, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradient of each tensor; `grads` are copied, since some write over them."""
    leaves = implementation.leaves(tensors)
    outputs = implementation.outputs(leaves)
    gradients = torch.autograd.grad(outputs, leaves, [grad.clone() for grad in grads])
    return [*(output.detach() for output in outputs), *gradients]


def disagreement(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest norm(found - expected) / norm(expected) over the results; NaN counts as infinite."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        largest = max(largest, error.nan_to_num(float("inf")).item())
    return largest


def comparable(operation: Operation, sizes: Sizes, device: str) -> tuple[list[Implementation], dict[str, str]]:
    """torch.compile and Liger, where they run here and agree with torch eager, and why each other one is left out.

    They are other people's: whatever one raises is a reason to leave it out, and none to stop.
    """
    plain, tensors = eager(operation, sizes), operation.tensors(sizes, device)
    grads = [torch.randn_like(output) for output in plain.outputs(plain.leaves(tensors))]
    expected = results(plain, tensors, grads)
    found, left_out = [], {}
    makers = {COMPILE: lambda: compiled(operation, sizes)}
    if operation.liger is not None:
        makers[LIGER] = lambda: Implementation(LIGER, operation.liger)  # type: ignore[arg-type]
    for name, make in makers.items():
        try:
            implementation = make()
            error = disagreement(results(implementation, tensors, grads), expected)
        except Exception as reason:
            left_out[name] = f"{type(reason).__name__}: {reason}".partition("\n")[0]
            continue
        # What draws is torch's own formula, which there is nothing to hold against.
        if error > AGREEMENT and not operation.draws:
            left_out[name] = f"disagrees with torch eager by {error:.3g} of its norm"
        else:
            found.append(implementation)
    return found, left_out


P, TEMPERATURE = 0.1, 0.7
Function = Callable[..., Tensor]


class AttentionShape(NamedTuple):
    """Causal, bf16, [s, b, a, d]."""

    s: int
    b: int
    a: int
    d: int


class HeadShape(NamedTuple):
    """bf16; hidden [s, b, h] and weight [v, h]; with log_probs log-probabilities and their entropy, soft cap 30."""

    s: int
    b: int
    h: int
    v: int
    log_probs: bool = False


ATTENTION = [AttentionShape(s, 16384 // s, 2048 // d, d) for s in (2048, 1024, 4096, 8192) for d in (64, 128)]
HEADS = [HeadShape(4096, 4, 4096, 50304), HeadShape(4096, 4, 4096, 128256), HeadShape(4096, 2, 4096, 128256, True)]


def compare(functions: Mapping[str, Function], tensors: Sequence[Tensor], clock: Any) -> dict[str, Any]:
    """Times those that run, in turn, forward and backward, and says of the others why they do not."""
    passes, left_out, peaks = [], {}, {}
    for name, each in functions.items():
        try:
            one = Implementation(name, each).time([tensors])
            one.run()
        except (RuntimeError, ImportError, LookupError, TypeError) as error:
            left_out[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        passes.append(one)
        peaks[name] = _count_peak(one.run) if tensors[0].is_cuda else 0
    ms = {name: found.ms for name, found in timing.measure(passes, clock).items()}
    ours = min(value for name, value in ms.items() if name.startswith("tempo"))
    text = f"{ours:.3f} ms; {', '.join(f'{name} {value / ours:.2f}' for name, value in ms.items())}"
    return {"answer": text, "ms": ms, "peak_bytes": peaks, "left_out": left_out}


def _count_peak(run: Callable[[], object]) -> int:
    """What a call allocates at its highest, its gradients included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_attention(
    clock: Any, device: str, shape: AttentionShape, backend: SDPBackend = SDPBackend.FLASH_ATTENTION
) -> dict[str, Any]:
    """Compares attention on q, k and v [s, b, a, d], which torch takes as views."""

    def ours(p: float) -> Function:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(WITHOUT_FLASH):  # without dropout, too; torch's is the rival
                return attention(q, k, v, causal=True, softmax_scale=shape.d**-0.5, dropout_p=p, dropout_key=1)

        return run

    def torchs(p: float) -> Function:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

        return run

    functions = {f"{name}, p {p:g}": make(p) for name, make in (("tempo", ours), ("sdpa", torchs)) for p in (P, 0.0)}
    return compare(functions, [torch.randn(shape, device=device).bfloat16() for _ in range(3)], clock)


def measure_head(clock: Any, device: str, shape: HeadShape) -> dict[str, Any]:
    """Compares the loss head, or log-probabilities."""
    hidden = torch.randn(shape.s, shape.b, shape.h, device=device).bfloat16()
    weight = (torch.randn(shape.v, shape.h, device=device) * shape.h**-0.5).bfloat16()
    return compare(list_heads(shape, device), [hidden, weight], clock)


def list_heads(shape: HeadShape, device: str) -> dict[str, Function]:
    """Lists who computes the loss head of hidden and weight, or log-probabilities and entropies; all add them up."""
    labels = torch.randint(shape.v, (shape.b, shape.s), device=device)
    flat, ones = labels.t().reshape(-1), torch.ones(shape.b, shape.s, device=device)

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1).float(), flat, reduction="sum")

    def liger(hidden: Tensor, weight: Tensor) -> Tensor:
        functional = importlib.import_module("liger_kernel.transformers.functional")
        found = functional.liger_fused_linear_cross_entropy(hidden.flatten(0, 1), weight, flat, reduction="sum")
        return found[0] if isinstance(found, tuple) else found

    def plain_log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = (F.linear(hidden, weight).float() / 30.0).tanh() * 30.0
        found = F.log_softmax(logits / TEMPERATURE, -1)
        return found.gather(-1, labels.t().unsqueeze(-1)).sum() - (found.exp() * found).sum()

    functions: dict[str, Function] = {
        "tempo, logits recomputed": lambda hidden, weight: linear_cross_entropy(hidden, weight, labels).sum(),
        "tempo, gradients in forward": lambda hidden, weight: linear_cross_entropy(
            hidden, weight, labels, token_weights=ones
        )[0],
        "eager": plain,
        "compile": torch.compile(plain, dynamic=False),
        "liger": liger,
    }
    if shape.log_probs:
        functions = {
            "tempo": lambda hidden, weight: sum(
                each.sum() for each in linear_log_prob(hidden, weight, labels, TEMPERATURE, 30.0, True)
            ),
            "eager": plain_log_probs,
            "compile": torch.compile(plain_log_probs, dynamic=False),
        }
    return functions


LARGE = Sizes(s=2048, b=4, h=4096, ffn=16384, gated_ffn=11008, p=0.1, dtype=torch.bfloat16)
TINY = Sizes(s=4, b=2, h=64, ffn=128, gated_ffn=48, p=0.1, dtype=torch.bfloat16)


def measure_operation(operation: Operation, clock: Any, device: str, sizes: Sizes) -> dict[str, Any]:
    """Times forward and backward of an operation's forms and of all others, in turn, beside a copy."""
    found, left_out = comparable(operation, sizes, device)
    compared = [*tempo(operation, sizes), eager(operation, sizes), *found]
    tensors = operation.tensors(sizes, device)
    num_sets = timing.count_sets(sum(t.nbytes for t in tensors), device)
    sets = [tensors, *(operation.tensors(sizes, device) for _ in range(num_sets - 1))]
    ideal = {one.name: count_bytes(one, tensors) for one in tempo(operation, sizes)}
    copies = [timing.copy_pass(size, num_sets, device, f"copy {keeps}") for keeps, size in ideal.items()]
    measured = timing.measure([*copies, *(one.time(sets) for one in compared)], clock)
    ms = {name: each.ms for name, each in measured.items()}
    texts = []
    for keeps in ideal:
        others = ", ".join(f"{one.name} {ms[one.name] / ms[keeps]:.2f}" for one in compared if one.name not in ideal)
        texts.append(f"keeping {keeps} {ms[keeps]:.3f} ms, {ms[f'copy {keeps}'] / ms[keeps]:.2f} of copy, {others}")
    return {"answer": "; ".join(texts), "ms": ms, "left_out": left_out, "waits_for_gpu": sorted(clock.waits)}


def list_steps(device: str) -> Iterator[Step]:
    """Yields the steps of operations, most important first."""
    is_gpu = device == "cuda"
    clock: Any = timing.CudaClock() if is_gpu else timing.HostClock()
    for shape in ATTENTION if is_gpu else [AttentionShape(64, 2, 2, 32)]:
        run = functools.partial(measure_attention, clock, device, shape)
        yield Step(f"attention, s {shape.s}, d {shape.d}", "fast", 8.0, run)
    for operation in OPERATIONS:
        run = functools.partial(measure_operation, operation, clock, device, LARGE if is_gpu else TINY)
        yield Step(operation.name, "fast", 15.0, run)
    for head in HEADS if is_gpu else [HeadShape(16, 2, 32, 96)]:
        name = "log probabilities" if head.log_probs else "loss head"
        run = functools.partial(measure_head, clock, device, head)
        yield Step(f"{name}, v {head.v}", "fast", 15.0, run)
