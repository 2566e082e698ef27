"""Is it right? Every kernel family, once per code path that a GPU can take, against float64.

A case runs a public function on the device, forward and every gradient, twice. Its error is held to the project's rule:
at most twice the error of the same dtype on the CPU, and one rounding of the largest exact number. Masks of dropout are
functions of position, so the CPU draws the same ones. Sizes are no multiples of a block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from measurements import ROOT
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.steps import LeftOut, Step, Wrong

sys.path.insert(0, str(ROOT / "tests" / "support"))

from attention_cases import Ring, reference
from witness import ulp

from tempo_kernels.attention import attention
from tempo_kernels.attention.settings import Settings
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import glu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.silu import silu
from tempo_kernels.squared_relu import squared_relu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KEY, SAMPLE, HEAD = 0xFEDC_BA98_7654_3210, 2**33 + 5, 3
WITHOUT_FLASH = [SDPBackend.MATH]
"""With which attention without dropout runs our kernels, not torch's."""
Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Case(NamedTuple):
    name: str
    dtype: torch.dtype
    shapes: Sequence[tuple[int, ...]]
    function: Function
    """Of tensors of these shapes on any device."""
    plain: Function | None = None
    """The same unfused, for the CPU; where there is none, `function` is the witness there."""
    prepare: Callable[[list[Tensor]], None] = lambda tensors: None
    """Writes into the random inputs what a path needs."""


def list_cases() -> Iterator[Case]:
    """Yields every case, the kernels that most of training runs first."""
    for name, dtype in DTYPES.items():
        for title, shapes, run, *more in [*_list_pointwise(), *_list_norms(), *_list_losses()]:
            yield Case(f"{title}, {name}", dtype, shapes, run, *more)
    for one in ATTENTION:
        for name in DTYPES if one.all_dtypes else ("bf16",):
            yield _make_attention(one, name)


def _list_pointwise() -> Iterator[tuple[Any, ...]]:
    shapes = {"a bias": [(37, 3, 1000), (1000,)], "an odd bias": [(5, 3, 1001), (1001,)], "no bias": [(7, 333)]}
    for keep in ("inplace", "recompute"):
        for form in ("none", "tanh"):
            for title, each in shapes.items():
                run = functools.partial(gelu, approximate=form, keep=keep)
                yield f"gelu {form}, {keep}, {title}", each, run
        yield f"squared_relu, {keep}", shapes["a bias"], functools.partial(squared_relu, keep=keep)
    yield "silu", shapes["a bias"], silu
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        yield f"glu {activation}", [(37, 3, 1000), (1000,)], functools.partial(_glu, activation)
    for p in (0.1, 0.0):
        run = functools.partial(bias_dropout_add, p=p, key=KEY, first_sample=SAMPLE, first_row=5)
        yield f"bias_dropout_add, p {p:g}", [(37, 3, 1000), (1000,), (37, 3, 1000)], run
        yield f"bias_dropout_add, p {p:g}, odd", [(37, 3, 999), (999,), (37, 3, 999)], run


def _glu(activation: str, x: Tensor, bias: Tensor) -> Tensor:
    return glu(x, bias, activation)


def _list_norms() -> Iterator[tuple[Any, ...]]:
    for width in (1000, 20000):  # whole rows, and rows that are read more than once
        for keep in ("inplace", "recompute"):
            for lost in (False, True) if keep == "inplace" else (False,):
                title = f"{keep}, rows of {width}{', lost channels' if lost else ''}"
                shapes = [(19, 3, width), (width,), (width,)]
                prepare = _lose_channels if lost else _center_weight
                yield f"layer_norm, {title}", shapes, functools.partial(layer_norm, keep=keep), None, prepare
                yield f"rms_norm, {title}", shapes[:2], functools.partial(rms_norm, keep=keep), None, prepare


def _center_weight(tensors: list[Tensor]) -> None:
    """Gives parameters as training leaves them: weights near 1, biases near 0."""
    tensors[1].mul_(0.1).add_(1)
    for bias in tensors[2:]:
        bias.mul_(0.1)


def _lose_channels(tensors: list[Tensor]) -> None:
    """Every two hundredth gamma is 0, and every two hundredth so small that y does not carry x-hat."""
    _center_weight(tensors)
    tensors[1][::200] = 0
    tensors[1][1::200] *= 1e-4


def _list_losses() -> Iterator[tuple[Any, ...]]:
    shapes = [(37, 3, 72), (1003, 72), (1003,)]

    def head(more: dict[str, Any], hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        device = hidden.device
        labels = (torch.arange(111) * 7 % 1000).view(3, 37)
        labels[1, ::5] = -100
        if more.pop("weighted", False):
            more["token_weights"] = torch.linspace(0, 1, 111).view(3, 37).to(device)
        found = linear_cross_entropy(hidden, weight, labels.to(device), bias=bias, chunk_tokens=40, **more)
        return found[0] if "token_weights" in more else found

    for title, more in {
        "loss head": {},
        "loss head, smoothed, z loss": {"label_smoothing": 0.1, "z_loss": 1e-3, "vocab_size": 1000},
        "loss head, gradients in forward": {"weighted": True},
    }.items():
        yield title, shapes, lambda *tensors, more=more: head(dict(more), *tensors), None, _scale_weight

    def log_prob(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        labels = (torch.arange(111) * 7 % 1000).view(3, 37).to(hidden.device)
        return linear_log_prob(hidden, weight, labels, 0.7, 30.0, True, bias=bias, chunk_tokens=40)

    yield "log probabilities and entropy, soft cap", shapes, log_prob, None, _scale_weight


def _scale_weight(tensors: list[Tensor]) -> None:
    tensors[1].mul_(tensors[1].size(1) ** -0.5)


class Attention(NamedTuple):
    name: str
    d: int = 64
    dv: int | None = None
    sq: int = 200
    groups: int = 4
    """Of 4 heads."""
    p: float = 0.1
    causal: bool = True
    window: tuple[int, int] | None = None
    extra: str = ""
    """mask, lengths, bias, slopes, sink, softcap, packed or parts."""
    all_dtypes: bool = False


ATTENTION = [
    Attention("causal, d 64", all_dtypes=True),
    Attention("causal, d 128", 128, all_dtypes=True),
    Attention("full, d 64", causal=False),
    Attention("causal, d 96", 96),
    Attention("causal, d 256", 256),
    Attention("causal, d 192 and 128", 192, 128),
    Attention("grouped queries, d 128", 128, groups=2),
    Attention("fewer queries than keys, d 64", sq=77),
    Attention("window, d 128", 128, window=(30, 0)),
    *(Attention(f"no dropout, d {d}", d, p=0.0) for d in (64, 128, 256)),
    Attention("no dropout, full, d 64", p=0.0, causal=False),
    *(
        Attention(f"{extra}{', no dropout' if not p else ''}, d 64", p=p, extra=extra, causal=extra != "mask")
        for extra in ("mask", "lengths", "bias", "slopes", "sink", "softcap", "packed", "parts")
        for p in (0.1, 0.0)
    ),
]
_DOCUMENTS = (3, 70, 70, 133, 190)


def _make_attention(one: Attention, dtype: str) -> Case:
    sk, b, a = 200, 1 if one.extra == "packed" else 2, 4
    shapes = [(one.sq, b, a, one.d), (sk, b, one.groups, one.d), (sk, b, one.groups, one.dv or one.d)]
    if one.extra in ("bias", "sink"):
        shapes.append({"bias": (1, a, one.sq, sk), "sink": (a,)}[one.extra])
    chosen = Settings(
        one.causal, one.d**-0.5, one.p, KEY, SAMPLE, HEAD, one.window, softcap=2.0 if one.extra == "softcap" else None
    )

    def give(device: torch.device) -> dict[str, Any]:
        """The extra that needs no gradient."""
        mask = torch.zeros(b, 1, 1, sk, dtype=torch.bool)
        mask[-1, ..., :9] = True
        found: dict[str, Any] = {
            "mask": {"mask": mask},
            "lengths": {"key_lengths": torch.tensor([sk - 51, sk])},
            "slopes": {"alibi_slopes": 2.0 ** -torch.arange(1, a + 1)},
            "packed": {"cu_seqlens": torch.tensor(_DOCUMENTS, dtype=torch.int32)},
        }.get(one.extra, {})
        return {name: t.to(device) for name, t in found.items()}

    def ours(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        if one.extra == "parts":
            found: Tensor = Ring.apply(q, k, v, chosen)
            return found
        named = {one.extra: more[0]} if more else give(q.device)
        with sdpa_kernel(WITHOUT_FLASH):
            return attention(q, k, v, **vars(chosen), **named)

    def plain(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        if one.extra == "packed":
            parts = [q.new_zeros(_DOCUMENTS[0], b, a, v.size(3))]
            for first, last in zip(_DOCUMENTS, _DOCUMENTS[1:], strict=False):
                at = dataclasses.replace(chosen, first_row=first, first_column=first)
                if last > first:
                    parts.append(reference(q[first:last], k[first:last], v[first:last], at))
            parts.append(q.new_zeros(sk - _DOCUMENTS[-1], b, a, v.size(3)))
            return torch.cat(parts)
        return reference(q, k, v, chosen, **({one.extra: more[0]} if more else give(q.device)))

    return Case(f"attention, {one.name}, {dtype}", DTYPES[dtype], shapes, ours, plain)


def make_inputs(case: Case) -> list[Tensor]:
    """Makes a case's inputs on the CPU, in its dtype: the same numbers each time."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in case.shapes]
    case.prepare(tensors)
    return [t.to(case.dtype) for t in tensors]


def run(run_case: Function, tensors: Sequence[Tensor], grads: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Returns the outputs and the gradient of every input; gradients of the outputs are made where none are given."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = run_case(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    grads = make_grads(outputs) if grads is None else [g.to(y) for g, y in zip(grads, outputs, strict=True)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, list(grads))]


def make_grads(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y) for y in outputs]


def check(case: Case, device: str, around: Callable[[], Any] = contextlib.nullcontext) -> dict[str, Any]:
    """Runs a case; raises Wrong.

    Args:
        around: a context in which the device's runs are made.
    """
    tensors = make_inputs(case)
    on_device = [t.to(device) for t in tensors]
    with around():
        first, again = run(case.function, on_device), run(case.function, on_device)
    if not all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(first, again, strict=True)):
        raise Wrong("two runs differ in their bits")
    plain = case.plain or case.function
    same = run(plain, tensors)
    grads = make_grads(same[: len(same) - len(tensors)])
    exact = run(plain, [t.double() for t in tensors], grads)
    ratios = []
    for ours, witness, truth in zip(first, same, exact, strict=True):
        error, allowed = ((t.double().cpu() - truth).abs().max() for t in (ours, witness))
        ratio = error / (2 * allowed + ulp(truth.abs().max(), ours.dtype))
        ratios.append(float(ratio.nan_to_num(nan=float("inf"))))  # no number is worse than any
    worst, shapes = max(ratios), " x ".join(str(list(shape)) for shape in case.shapes)
    if worst > 1.0:
        place = ratios.index(worst) - len(ratios) + len(tensors)
        name = f"the gradient of input {place}" if place >= 0 else "the output"
        raise Wrong(f"{name} is off by {worst:.3g} of its bound, of {shapes}")
    return {"answer": f"off by {worst:.2f} of the bound at most", "share_of_bound": worst, "shapes": shapes}


def compare_masks(device: str) -> dict[str, Any]:
    """Draws masks on the device and on the CPU; raises Wrong unless they are equal bit for bit."""
    shape, p, places = (129, 3, 1000), 0.3, {"first_sample": SAMPLE, "first_row": 2**20 - 7}
    drawn = [
        bias_dropout_add(torch.ones(shape, device=d), None, torch.zeros(shape, device=d), p=p, key=KEY, **places).cpu()
        for d in (device, "cpu")
    ]
    # All scores are equal, so that an output is 0 where its key, a column of the unit matrix, is dropped.
    sq, d = 300, 128
    zeros, unit = torch.zeros(sq, 2, 4, d), torch.eye(sq, d).view(sq, 1, 1, d).expand(sq, 2, 4, d)
    where = {"dropout_p": p, "dropout_key": KEY, "first_sample": SAMPLE, "first_head": HEAD, "softmax_scale": 1.0}
    seen = [
        attention(*(t.to(each).bfloat16() for t in (zeros, zeros, unit)), causal=False, **where).cpu() == 0
        for each in (device, "cpu")
    ]
    for name, (ours, wanted) in {"bias_dropout_add": drawn, "attention": seen}.items():
        if not torch.equal(ours, wanted):
            raise Wrong(f"{name}: {int((ours != wanted).sum())} of {wanted.numel()} elements have another mask")
    return {"answer": f"equal over {drawn[1].numel() + seen[1].numel():,} elements"}


def reach_beyond(device: str, limit: int = 2**31) -> dict[str, Any]:
    """Holds attention over tensors of more than `limit` elements to its last sample alone; raises Wrong."""
    s, a, d = (2048, 32, 128) if limit > 2**20 else (64, 2, 32)
    b = limit // (s * a * d) + 1
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 9 * 2 * b * s * a * d:
        raise LeftOut(f"needs {9 * 2 * b * s * a * d / 2**30:.0f} GiB of free GPU memory")
    q, k, v, grad = (torch.randn(s, b, a, d, device=device, dtype=torch.bfloat16) for _ in range(4))
    draw = {"causal": True, "softmax_scale": d**-0.5, "dropout_p": 0.1, "dropout_key": KEY}

    def grads(first_sample: int, *tensors: Tensor) -> list[Tensor]:
        return run(functools.partial(attention, **draw, first_sample=first_sample), tensors[:3], tensors[3:])

    last = [t[:, -1:].contiguous() for t in (q, k, v, grad)]
    whole, alone = grads(7, q, k, v, grad), grads(7 + b - 1, *last)
    for name, ours, wanted in zip(("out", "grad_q", "grad_k", "grad_v"), whole, alone, strict=True):
        if not torch.equal(ours[:, -1:], wanted):
            raise Wrong(f"{name} of the last sample differs from that of the sample alone, of {list(q.shape)}")
    return {"answer": f"the last of {b} samples is as it is alone: {q.numel():,} elements"}


def overlap(device: str) -> dict[str, Any]:
    """Runs the norms' backwards on two streams at once, again and again; raises Wrong unless they keep their bits."""
    shape = (512, 4, 4096) if device == "cuda" else (8, 2, 64)
    tensors = [
        torch.randn(shape, device=device, dtype=torch.bfloat16),
        *torch.ones(2, shape[-1], device=device).bfloat16(),
    ]
    wanted = run(layer_norm, tensors)
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else [None, None]
    found = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(layer_norm, tensors))
    if device == "cuda":
        torch.cuda.synchronize()
    wrong = sum(not torch.equal(a, b) for each in found for a, b in zip(each, wanted, strict=True))
    if wrong:
        raise Wrong(f"{wrong} of {len(found) * len(wanted)} results differ where two streams run at once")
    return {"answer": f"{len(found)} backwards on two streams at once have the bits of one alone"}


def offload(device: str) -> dict[str, Any]:
    """Trains with offload while the streams are delayed at random; raises Wrong unless gradients keep their bits."""
    from torch import nn

    from tempo_kernels.offload import Engine, Offload, move_all

    width, layers = (2048, 6) if device == "cuda" else (64, 6)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(layers))
    )
    model.to(device)
    x = torch.randn(width, width, device=device)
    delays = torch.randint(0, 2_000_000, (200,), generator=torch.Generator().manual_seed(0)).tolist()

    def delay(*_: Any) -> None:
        if device == "cuda":
            torch.cuda._sleep(delays.pop())

    def train() -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))

    wanted = train()
    handles = [layer.register_forward_hook(delay) for layer in model]
    moved = Offload(model, dict.fromkeys(model, move_all), Engine(num_groups=layers))
    for number in range(3):
        for index, (ours, theirs) in enumerate(zip(train(), wanted, strict=True)):
            if not torch.equal(ours, theirs):
                raise Wrong(f"step {number}: gradient {index} differs from that without offload")
    moved.remove()
    for handle in handles:
        handle.remove()
    return {"answer": f"3 steps of {layers} layers have the gradients of a run without it"}


def run_tests(device: str, path: str) -> dict[str, Any]:
    """Runs the tests for a GPU of one file of tests/; raises Wrong with the first of those that fail."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line", "-rfE"]
    command += ["-m", "gpu" if device == "cuda" else "not gpu and not slow"]
    done = subprocess.run([*command, str(ROOT / "tests" / path)], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    lines = done.stdout.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 5):
        raise Wrong(f"{lines[-1]}; {failed[0] if failed else f'pytest ended with {done.returncode}'}"[:300])
    return {"answer": lines[-1].strip("= ")}


def sanitize(device: str, tool: str) -> dict[str, Any]:
    """Runs one small case of each kernel family under compute-sanitizer; raises Wrong with its first finding."""
    if device != "cuda":
        raise LeftOut("there is no GPU")
    suite = str(ROOT / "benchmarks" / "gpu_suite.py")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, suite, "sanitized"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")]
    wrong = next((line for line in found if "Invalid" in line or "hazard" in line), found[-1] if found else "")
    if done.returncode:
        raise Wrong(f"{tool} ended with {done.returncode}: {wrong}"[:300])
    return {"answer": found[-1].strip("= ") if found else "no finding"}


SANITIZED = (
    "gelu none, inplace, a bias, bf16",
    "glu silu, bf16",
    "layer_norm, inplace, rows of 1000, bf16",
    "rms_norm, recompute, rows of 20000, bf16",
    "bias_dropout_add, p 0.1, bf16",
    "loss head, bf16",
    "attention, causal, d 64, bf16",
)


def run_sanitized() -> None:
    """Runs these cases once on the GPU: what compute-sanitizer watches."""
    for case in list_cases():
        if case.name in SANITIZED:
            run(case.function, [t.to("cuda") for t in make_inputs(case)])
    torch.cuda.synchronize()


def list_steps(device: str) -> Iterator[Step]:
    """Yields the steps of this part, most important first."""
    is_gpu = device == "cuda"
    for case in list_cases():
        yield Step(case.name, "right", 0.3, functools.partial(check, case, device))
    yield Step("masks are those of a CPU", "right", 2.0, functools.partial(compare_masks, device))
    yield Step("two streams", "right", 2.0, functools.partial(overlap, device))
    yield Step("offload", "right", 3.0, functools.partial(offload, device))
    beyond = functools.partial(reach_beyond, device, 2**31 if is_gpu else 2**13)
    yield Step("attention beyond 2**31 elements", "right", 6.0, beyond)
    for path, seconds in (("kernels/test_cuda_graphs.py", 30.0), ("kernels/test_large_tensors.py", 45.0)):
        yield Step(path, "right", seconds, functools.partial(run_tests, device, path))
