"""Is it right? Every kernel family, once per code path that a GPU can take, against float64.

A case runs a public function on the device, forward and every gradient, twice. Its error is held to the project's rule:
at most twice the error of the same dtype on the CPU, and one rounding of the largest exact number. Masks of dropout are
functions of position, so the CPU draws the same ones. Sizes are no multiples of a block.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from measurements import ROOT
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.steps import LeftOut, Step, Wrong

sys.path.insert(0, str(ROOT / "tests" / "support"))

from attention_cases import attend_in_parts
from witness import ulp

from tempo_kernels.attention import attention
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


def list_cases(length: int = 200) -> Iterator[Case]:
    """Yields every case, the kernels that most of training runs first; attention has this many keys, and the others
    have rows in proportion."""
    for name, dtype in DTYPES.items():
        for title, shapes, run, *more in [
            *_list_pointwise(37 * length // 200),
            *_list_norms(19 * length // 200),
            *_list_losses(),
        ]:
            yield Case(f"{title}, {name}", dtype, shapes, run, *more)
    for one in ATTENTION:
        for name in DTYPES if one.all_dtypes else ("bf16",):
            yield _make_attention(one, name, length)


def _list_pointwise(rows: int) -> Iterator[tuple[Any, ...]]:
    shapes = {"a bias": [(rows, 3, 1000), (1000,)], "an odd bias": [(5, 3, 1001), (1001,)], "no bias": [(7, 333)]}
    for keep in ("inplace", "recompute"):
        for form in ("none", "tanh"):
            for title, each in shapes.items():
                run = functools.partial(gelu, approximate=form, keep=keep)
                yield f"gelu {form}, {keep}, {title}", each, run
        yield f"squared_relu, {keep}", shapes["a bias"], functools.partial(squared_relu, keep=keep)
    yield "silu", shapes["a bias"], silu
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        yield f"glu {activation}", shapes["a bias"], functools.partial(_glu, activation)
    for p in (0.1, 0.0):
        run = functools.partial(bias_dropout_add, p=p, key=KEY, first_sample=SAMPLE, first_row=5)
        yield f"bias_dropout_add, p {p:g}", [(rows, 3, 1000), (1000,), (rows, 3, 1000)], run
        yield f"bias_dropout_add, p {p:g}, odd", [(rows, 3, 999), (999,), (rows, 3, 999)], run


def _glu(activation: str, x: Tensor, bias: Tensor) -> Tensor:
    return glu(x, bias, activation)


def _list_norms(rows: int) -> Iterator[tuple[Any, ...]]:
    for width in (1000, 20000):  # whole rows, and rows that are read more than once
        for keep in ("inplace", "recompute"):
            for lost in (False, True) if keep == "inplace" else (False,):
                title = f"{keep}, rows of {width}{', lost channels' if lost else ''}"
                shapes = [(rows, 3, width), (width,), (width,)]
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
    queries: float = 1.0
    """As a share of the keys."""
    groups: int = 4
    """Of 4 heads."""
    p: float = 0.1
    causal: bool = True
    window: tuple[int, int] | None = None
    extra: str = ""
    """mask, bias, slopes, sink, softcap, packed or parts."""
    all_dtypes: bool = False


ATTENTION = [
    Attention("causal, d 64", all_dtypes=True),
    Attention("causal, d 128", 128, all_dtypes=True),
    Attention("full, d 64", causal=False),
    Attention("causal, d 96", 96),
    Attention("causal, d 256", 256),
    Attention("causal, d 192 and 128", 192, 128),
    Attention("grouped queries, d 128", 128, groups=2),
    Attention("fewer queries than keys, d 64", queries=0.4),
    Attention("window, d 128", 128, window=(30, 0)),
    *(Attention(f"no dropout, d {d}", d, p=0.0) for d in (64, 128, 256)),
    Attention("no dropout, full, d 64", p=0.0, causal=False),
    *(
        Attention(f"{extra}{', no dropout' if not p else ''}, d 64", p=p, extra=extra, causal=extra != "mask")
        for extra in ("mask", "bias", "slopes", "sink", "softcap", "packed", "parts")
        for p in (0.1, 0.0)
    ),
]


def _make_attention(one: Attention, dtype: str, sk: int) -> Case:
    b, a, sq = 1 if one.extra == "packed" else 2, 4, int(one.queries * sk)
    shapes = [(sq, b, a, one.d), (sk, b, one.groups, one.d), (sk, b, one.groups, one.dv or one.d)]
    if one.extra in ("bias", "sink"):
        shapes.append({"bias": (1, a, sq, sk), "sink": (a,)}[one.extra])
    numbers = {"causal": one.causal, "softmax_scale": one.d**-0.5, "dropout_p": one.p, "dropout_key": KEY}
    numbers |= {"first_sample": SAMPLE, "first_head": HEAD, "window_size": one.window}
    numbers |= {"softcap": 2.0 if one.extra == "softcap" else None}

    def give(device: torch.device) -> dict[str, Any]:
        """The extra that needs no gradient."""
        mask = torch.zeros(b, 1, 1, sk, dtype=torch.bool)
        mask[-1, ..., :9] = True
        documents = [share * sk // 20 for share in (1, 7, 7, 13, 19)]
        found: dict[str, Any] = {
            "mask": {"mask": mask},
            "slopes": {"alibi_slopes": 2.0 ** -torch.arange(1, a + 1)},
            "packed": {"cu_seqlens": torch.tensor(documents, dtype=torch.int32)},
        }.get(one.extra, {})
        return {name: t.to(device) for name, t in found.items()}

    def compute(form: str, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        named = {one.extra: more[0]} if more else give(q.device)
        with sdpa_kernel(WITHOUT_FLASH):
            return attention(q, k, v, form=form, **numbers, **named)

    def compute_parts(*tensors: Tensor) -> Tensor:
        found: Tensor = attend_in_parts(*tensors, SimpleNamespace(**numbers, first_row=0))
        return found

    function = compute_parts if one.extra == "parts" else functools.partial(compute, "flash")
    name = f"attention, {one.name}, {dtype}"
    return Case(name, DTYPES[dtype], shapes, function, functools.partial(compute, "softmax"))


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


def reach_rows_beyond(device: str, limit: int = 2**31) -> dict[str, Any]:
    """Holds the other families over tensors of more than `limit` elements to their last rows alone; raises Wrong."""
    width, num_last = (4096, 64) if limit > 2**20 else (64, 8)
    rows = limit // width + num_last
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 14 * rows * width:
        raise LeftOut(f"needs {14 * rows * width / 2**30:.0f} GiB of free GPU memory")
    x, grad = (torch.randn(rows, 1, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight, bias = torch.ones(width, device=device).bfloat16(), torch.zeros(width, device=device).bfloat16()

    def drop(x: Tensor) -> Tensor:
        return bias_dropout_add(x, bias, x, p=0.1, key=KEY, first_row=rows - x.size(0))

    families: dict[str, Function] = {
        "gelu": gelu,
        "gelu, recompute": functools.partial(gelu, keep="recompute"),
        "silu": silu,
        "squared_relu": squared_relu,
        "glu": functools.partial(glu, bias=None, activation="silu"),
        "layer_norm": lambda x: layer_norm(x, weight, bias),
        "rms_norm": lambda x: rms_norm(x, weight),
        "bias_dropout_add": drop,
    }
    last = slice(rows - num_last, None)
    for name, function in families.items():
        grad_y = grad[..., : width // 2].contiguous() if name == "glu" else grad
        whole = [t[last].clone() for t in run(function, [x], [grad_y])]
        for what, ours, wanted in zip(("y", "grad_x"), whole, run(function, [x[last]], [grad_y[last]]), strict=True):
            if not torch.equal(ours, wanted):
                raise Wrong(
                    f"{name}: {what} of the last {num_last} rows differs from those rows alone, of {list(x.shape)}"
                )
    return {"answer": f"the last rows of {x.numel():,} elements are as they are alone, in {len(families)} families"}


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


def come_late(case: Case) -> dict[str, Any]:
    """Checks a case on a stream of its own, where the inputs are written late: a kernel on another stream would read
    them before."""
    stream = torch.cuda.Stream()

    def run_late(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        torch.cuda._sleep(20_000_000)  # 10 ms, in which forward and backward are launched
        return case.function(*(t * 1 for t in tensors))

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    return check(case._replace(function=run_late, plain=case.plain or case.function), "cuda", around)


def check_families(device: str, kind: str) -> dict[str, Any]:
    """Checks one case of each kernel family "on another stream" or "on a second device"; raises Wrong."""
    if device != "cuda" or (kind == "on a second device" and torch.cuda.device_count() < 2):
        raise LeftOut(f"there is no {'second GPU' if device == 'cuda' else 'GPU'}")
    wrong, cases = [], [case for case in list_cases() if case.name in FAMILIES]
    for case in cases:
        try:
            come_late(case) if kind == "on another stream" else check(case, "cuda:1")
        except Wrong as one:
            wrong.append(f"{case.name}: {one}")
    if wrong:
        raise Wrong(f"{len(wrong)} of {len(cases)} cases; {wrong[0]}")
    return {"answer": f"{len(cases)} cases are right {kind}"}


def replay_layer(device: str) -> dict[str, Any]:
    """Replays a CUDA graph of a whole layer, with dropout, three times with other masks, inputs and gradients; raises
    Wrong unless the results are those of the same steps without a graph. On a CPU a replay is one more step."""
    s, b, h, a = (512, 4, 1024, 16) if device == "cuda" else (16, 2, 64, 2)
    key, sample = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    shapes = [(s, b, h), (h, 3 * h), (h, h), (h,), (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    leaves = [torch.randn(shape, device=device) * shape[0] ** -0.5 for shape in shapes]
    leaves[0] *= s**0.5
    leaves[4] += 1  # gamma
    leaves = [t.bfloat16().requires_grad_() for t in leaves]
    grad = torch.randn(shapes[0], device=device).bfloat16()

    def step() -> list[Tensor]:
        x, qkv, projection, bias, gamma, beta, up, up_bias, down, down_bias = leaves
        q, k, v = (x @ qkv).view(s, b, a, -1).chunk(3, -1)
        where = {"dropout_p": 0.1, "dropout_key": key, "first_sample": sample}
        y = attention(q, k, v, causal=True, softmax_scale=(h // a) ** -0.5, **where).flatten(2)
        x = bias_dropout_add(y @ projection, bias, x, p=0.1, key=key + 1, first_sample=sample)
        y = gelu(layer_norm(x, gamma, beta) @ up, up_bias) @ down
        out = bias_dropout_add(y, down_bias, x, p=0.1, key=key + 2, first_sample=sample)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    replay = capture(step) if device == "cuda" else step
    seen: list[Tensor] = []
    for number in range(3):
        for t in (leaves[0], grad):
            t.detach().copy_(torch.randn_like(t))
        key.fill_(1000 * number + 7)
        sample.fill_(SAMPLE + number)
        found, wanted = [t.clone() for t in replay()], step()
        for place, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            share = float((ours - theirs).abs().max() / ulp(theirs.abs().max().cpu(), ours.dtype))
            if not share <= 4:  # of products that another algorithm sums up
                raise Wrong(f"replay {number}: result {place} is off by {share:.3g} roundings of its largest number")
        if seen and torch.equal(seen[-1], found[0]):
            raise Wrong(f"replay {number} gave the results of the one before")
        seen.append(found[0])
    return {"answer": f"3 replays with other masks and inputs are 3 steps without a graph, {len(leaves) + 1} results"}


def capture(step: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Returns a function that replays `step`, whose results it writes over each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


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


FAMILIES = (
    "gelu none, inplace, a bias, bf16",
    "squared_relu, inplace, bf16",
    "silu, bf16",
    "glu silu, bf16",
    "layer_norm, inplace, rows of 1000, bf16",
    "rms_norm, recompute, rows of 20000, bf16",
    "bias_dropout_add, p 0.1, bf16",
    "loss head, bf16",
    "log probabilities and entropy, soft cap, bf16",
    "attention, causal, d 64, bf16",
)


def run_sanitized() -> None:
    """Runs these cases once on the GPU: what compute-sanitizer watches."""
    for case in list_cases():
        if case.name in FAMILIES:
            run(case.function, [t.to("cuda") for t in make_inputs(case)])
    torch.cuda.synchronize()


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Runs the kernels in Triton's interpreter, where TRITON_INTERPRET=1 was set before triton was imported."""
    import interpreted  # noqa: F401  # it rounds as a GPU does
    import replaced_kernels

    def launch(one: Any) -> None:
        one.kernel[one.grid](**one.arguments, **one.options)

    with replaced_kernels.replace_kernels(launch):
        yield


def check_interpreted(case: Case) -> dict[str, Any]:
    """Checks a case whose kernels Triton's interpreter runs; raises LeftOut for what it cannot compute."""
    if case.dtype == torch.bfloat16 and case.name.startswith("attention"):
        raise LeftOut("Triton's interpreter multiplies bfloat16 as integers")
    return check(case, "cpu", interpret)


def list_steps(device: str, is_interpreted: bool = False) -> Iterator[Step]:
    """Yields the steps of this part, most important first."""
    is_gpu = device == "cuda"
    for case in list_cases(40 if is_interpreted else 200):
        run_case = functools.partial(check_interpreted if is_interpreted else check, case)
        yield Step(case.name, "right", 0.3, run_case if is_interpreted else functools.partial(run_case, device))
    yield Step("masks are those of a CPU", "right", 2.0, functools.partial(compare_masks, device))
    yield Step("a CUDA graph of a layer", "right", 4.0, functools.partial(replay_layer, device))
    for kind in ("on another stream", "on a second device"):
        yield Step(f"each family {kind}", "right", 4.0, functools.partial(check_families, device, kind))
    yield Step("two streams", "right", 2.0, functools.partial(overlap, device))
    yield Step("offload", "right", 3.0, functools.partial(offload, device))
    limit = 2**31 if is_gpu else 2**13
    yield Step("attention beyond 2**31 elements", "right", 6.0, functools.partial(reach_beyond, device, limit))
    yield Step("other families beyond 2**31", "right", 6.0, functools.partial(reach_rows_beyond, device, limit))
