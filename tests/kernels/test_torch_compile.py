"""torch.compile: no graph breaks, no recompilation per step, the same results, and the same bytes kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import exhaustive
from torch import Tensor
from torch._dynamo.utils import counters

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, reglu, swiglu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.squared_relu import squared_relu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

S, B, H, V = 12, 2, 32, 50
LABELS = torch.arange(B * S).view(B, S) % V
TOKEN_WEIGHTS = torch.full((B, S), 0.3)
# 64 bits, as derive_key gives them, and signed ones, as a tensor holds them.
KEYS = [5, 2**62 + 1, 2**63 + 17, 2**64 - 1, 77, -4]


def attend(x: Tensor, key: Any, first_sample: Any, form: str = "flash", **more: Any) -> Tensor:
    q, k, v = (x * scale for scale in (1.0, 0.5, 2.0))
    q, k, v = (t.view(*x.shape[:2], 2, -1) for t in (q, k, v))
    chosen = {"causal": True, "softmax_scale": 0.3, "dropout_p": 0.1, "form": form}
    return attention(q, k, v, dropout_key=key, first_sample=first_sample, **chosen, **more)


def losses(x: Tensor, bias: Tensor, weight: Tensor, is_weighted: bool = False) -> Tensor:
    more = {"token_weights": TOKEN_WEIGHTS} if is_weighted else {}
    found = linear_cross_entropy(x, weight, LABELS, bias=bias, label_smoothing=0.1, chunk_tokens=7, **more)
    return found[0] if is_weighted else found


def log_probs(x: Tensor, bias: Tensor, weight: Tensor, form: str) -> Tensor:
    found = linear_log_prob(x, weight, LABELS, 0.7, 30.0, form != "log_prob", bias=bias, chunk_tokens=7)
    return {"log_prob": lambda: found, "entropy": lambda: found[1], "both": lambda: torch.cat(found)}[form]()


# Of x [S, B, H], bias [H], another bias [V], weight [V, H], key and first_sample.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x, b, *_: gelu(x, b),
    "gelu tanh of its input": lambda x, b, *_: gelu(x, b, approximate="tanh", keep="input"),
    "squared_relu": lambda x, b, *_: squared_relu(x, b),
    "squared_relu of its input": lambda x, b, *_: squared_relu(x, b, keep="input"),
    "swiglu": lambda x, b, *_: swiglu(x, b),
    "geglu": lambda x, b, *_: geglu(x, b),
    "reglu": lambda x, b, *_: reglu(x, b),
    "layer_norm": lambda x, b, *_: layer_norm(x, 2 + b.tanh(), b.tanh()),
    "layer_norm of its input": lambda x, b, *_: layer_norm(x, b, x[0, 0], keep="input"),
    "rms_norm": lambda x, b, *_: rms_norm(x, b),
    "rms_norm of its input": lambda x, b, *_: rms_norm(x, b, zero_centered=True, keep="input"),
    "bias_dropout_add": lambda x, b, c, w, key, first: bias_dropout_add(
        x, b, x * 2, p=0.1, key=key, first_sample=first
    ),
    "attention": lambda x, b, c, w, key, first: attend(x, key, first),
    "attention with key_lengths": lambda x, b, c, w, key, first: attend(
        x, key, first, key_lengths=torch.tensor([5, 12], dtype=torch.int64)
    ),
    "attention in documents": lambda x, b, c, w, key, first: attend(
        x.view(S * B, 1, -1), key, first, cu_seqlens=torch.tensor([1, 5, 24], dtype=torch.int32)
    ),
    "attention keeping its softmax": lambda x, b, c, w, key, first: attend(x, key, first, "softmax"),
    "attention with all that changes scores": lambda x, b, c, w, key, first: attend(
        x, key, first, sink=b[:2], softcap=2.0, alibi_slopes=torch.tensor([0.5, 0.25]), bias=b[2:14].view(1, 1, 1, -1)
    ),
    "linear_cross_entropy": lambda x, b, c, w, *_: losses(x, c, w),
    "linear_cross_entropy with token_weights": lambda x, b, c, w, *_: losses(x, c, w, True),
    "linear_log_prob": lambda x, b, c, w, *_: log_probs(x, c, w, "log_prob"),
    "linear_log_prob with entropy": lambda x, b, c, w, *_: log_probs(x, c, w, "both"),
    "the entropy of linear_log_prob": lambda x, b, c, w, *_: log_probs(x, c, w, "entropy"),
}
DRAWING = ["bias_dropout_add", "attention", "attention keeping its softmax"]


def run(function: Callable[..., Tensor], inputs: list[Tensor], *numbers: Any) -> tuple[list[Tensor | None], int]:
    """Output and gradients, and the bytes kept for backward beside the inputs and numbers."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    others = {t.untyped_storage().data_ptr() for t in (*leaves, LABELS, TOKEN_WEIGHTS)}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        if t.dim() and t.untyped_storage().data_ptr() not in others:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function(*leaves, *numbers)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)], sum(kept.values())


def random_inputs() -> list[Tensor]:
    return [torch.randn(shape) for shape in ((S, B, H), (H,), (V,), (V, H))]


def assert_same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs is None:
            assert ours is None
        else:
            # What torch compiles around an operation may round otherwise.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


# How torch compiles what is around a node does not depend on the operation: one of each form of arguments.
COMPILED = [("gelu", "inductor"), ("layer_norm", "inductor"), ("attention", "inductor")]
COMPILED += [("linear_log_prob with entropy", "inductor"), *((name, "aot_eager") for name in OPERATIONS)]
MORE_COMPILED = [(name, "inductor") for name in OPERATIONS if (name, "inductor") not in COMPILED]


@pytest.mark.parametrize(("name", "backend"), [*COMPILED, *exhaustive(*MORE_COMPILED)])
def test_one_graph_serves_every_step(name: str, backend: str) -> None:
    function = OPERATIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    graphs = []
    for step, key in enumerate(KEYS):
        inputs = random_inputs()
        (found, kept), (wanted, kept_eagerly) = (run(f, inputs, key, 8 * step) for f in (compiled, function))
        assert_same(found, wanted)
        graphs.append(counters["stats"]["unique_graphs"])
        # Products around an operation are the compiler's to keep or not.
        assert kept <= kept_eagerly or name in DRAWING
    # The first number is taken for a constant; the second shows torch that it is none.
    assert graphs[0] == 1 and graphs[1] <= 2 and graphs[1:] == [graphs[1]] * 5


@pytest.mark.parametrize("name", DRAWING)
def test_device_data_is_one_graph_from_the_first_step_on(name: str) -> None:
    function = OPERATIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for step, key in enumerate(KEYS):
        numbers = [
            torch.tensor(key - 2**64 if key >= 2**63 else key, dtype=torch.int64),
            torch.tensor(8 * step, dtype=torch.int64),
        ]
        inputs = random_inputs()
        found, wanted = run(compiled, inputs, *numbers)[0], run(function, inputs, key, 8 * step)[0]
        assert_same(found, wanted)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_gelu_keeps_is_its_output_and_a_bit_per_element(backend: str) -> None:
    kept: list[Tensor] = []
    compiled = torch.compile(gelu, fullgraph=True, backend=backend)
    x = torch.randn(S, B, H, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = compiled(x)
    assert sorted(t.nbytes for t in kept) == [S * B * H // 8, 4 * S * B * H]
    assert y.data_ptr() in {t.data_ptr() for t in kept} and x.data_ptr() not in {t.data_ptr() for t in kept}


def test_the_same_tensor_may_come_twice() -> None:
    def twice(x: Tensor) -> Tensor:
        q = x.view(S, B, 2, -1)
        return bias_dropout_add(attention(q, q, q, causal=True, softmax_scale=0.3).view(S, B, H), None, x, p=0.1, key=1)

    x = random_inputs()[:1]
    assert_same(run(torch.compile(twice, fullgraph=True, backend="aot_eager"), x)[0], run(twice, x)[0])


def test_a_size_that_changes_is_one_more_graph() -> None:
    compiled = torch.compile(lambda x: swiglu(gelu(x)), fullgraph=True, backend="aot_eager")
    for rows in (4, 6, 9, 13):
        inputs = [torch.randn(rows, B, H)]
        assert_same(run(compiled, inputs)[0], run(lambda x: swiglu(gelu(x)), inputs)[0])
    assert counters["stats"]["unique_graphs"] == 2


def test_export_has_the_operations_as_nodes() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return swiglu(gelu(x))

    x = torch.randn(S, B, H)
    program = torch.export.export(Block(), (x,))
    assert torch.equal(program.module()(x), Block()(x))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"tempo_kernels.gelu.default", "tempo_kernels.glu.default"} <= targets


def test_a_compiled_norm_has_no_room_for_lost_channels_and_says_so() -> None:
    x, weight, bias = torch.randn(S, H, requires_grad=True), torch.ones(H), torch.zeros(H)
    compiled = torch.compile(layer_norm, fullgraph=True, backend="aot_eager")
    assert_same([compiled(x, weight, bias)], [layer_norm(x, weight, bias)])
    weight[3:5] = 0
    with pytest.raises(RuntimeError, match='weight of 2 of 32 channels is too small .* keep="input"'):
        compiled(x, weight, bias)
    with torch.no_grad():
        assert_same([compiled(x, weight, bias)], [layer_norm(x, weight, bias)])
