"""torch.compile: no graph breaks, no recompilation per step, the same results, and the same bytes kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from covering import exhaustive
from every_operation import LABELS, OPERATIONS, TOKEN_WEIGHTS, B, H, S, make_inputs
from torch import Tensor
from torch._dynamo.utils import counters
from witness import assert_same

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import swiglu
from tempo_kernels.norm import layer_norm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]

# 64 bits, as derive_key gives them, and signed ones, as a tensor holds them.
KEYS = [5, 2**63 + 17, 2**64 - 1, -4]
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


# What torch compiles around an operation may round otherwise.
assert_close = partial(assert_same, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


# How torch compiles what is around a node does not depend on the operation: one of each form of arguments.
COMPILED = [("attention", "inductor"), ("linear_log_prob with entropy", "inductor")]
# What differs from another in its numbers only.
ALIKE = ["gelu tanh", "gelu of its input", "gelu tanh of its input", "silu", "relu", "glu", "geglu", "reglu"]
ALIKE += ["linear_log_prob"]
COMPILED += [(name, "aot_eager") for name in OPERATIONS if name not in ALIKE]
MORE_COMPILED = [
    (name, backend) for name in OPERATIONS for backend in ("aot_eager", "inductor") if (name, backend) not in COMPILED
]


@pytest.mark.parametrize(("name", "backend"), [*COMPILED, *exhaustive(*MORE_COMPILED)])
def test_one_graph_serves_every_step(name: str, backend: str) -> None:
    function = OPERATIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    graphs = []
    for step, key in enumerate(KEYS):
        inputs = make_inputs(seed=step)
        (found, kept), (wanted, kept_eagerly) = (run(f, inputs, key, 8 * step) for f in (compiled, function))
        assert_close(found, wanted)
        graphs.append(counters["stats"]["unique_graphs"])
        # Products around an operation are the compiler's to keep or not.
        assert kept <= kept_eagerly or name in DRAWING
    # The first number is taken for a constant; the second shows torch that it is none.
    assert graphs[0] == 1 and graphs[1] <= 2 and graphs[1:] == [graphs[1]] * 3


@pytest.mark.parametrize("name", DRAWING)
def test_device_data_is_one_graph_from_the_first_step_on(name: str) -> None:
    function = OPERATIONS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for step, key in enumerate(KEYS):
        numbers = [
            torch.tensor(key - 2**64 if key >= 2**63 else key, dtype=torch.int64),
            torch.tensor(8 * step, dtype=torch.int64),
        ]
        inputs = make_inputs(seed=step)
        found, wanted = run(compiled, inputs, *numbers)[0], run(function, inputs, key, 8 * step)[0]
        assert_close(found, wanted)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_same_tensor_may_come_twice() -> None:
    def twice(x: Tensor) -> Tensor:
        q = x.view(S, B, 2, -1)
        return bias_dropout_add(attention(q, q, q, causal=True, softmax_scale=0.3).view(S, B, H), None, x, p=0.1, key=1)

    x = make_inputs()[:1]
    assert_close(run(torch.compile(twice, fullgraph=True, backend="aot_eager"), x)[0], run(twice, x)[0])


def test_a_size_that_changes_is_one_more_graph() -> None:
    compiled = torch.compile(lambda x: swiglu(gelu(x)), fullgraph=True, backend="aot_eager")
    for rows in (4, 6, 9, 13):
        inputs = [torch.randn(rows, B, H)]
        assert_close(run(compiled, inputs)[0], run(lambda x: swiglu(gelu(x)), inputs)[0])
    assert counters["stats"]["unique_graphs"] == 2


def test_export_has_the_operations_as_nodes() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return swiglu(gelu(x))

    x = torch.randn(S, B, H)
    program = torch.export.export(Block(), (x,))
    assert torch.equal(program.module()(x), Block()(x))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("tempo_kernels.activation.default") == 2


def test_a_compiled_norm_has_no_room_for_lost_channels_and_says_so() -> None:
    x = torch.randn(S, H, requires_grad=True)
    weight, bias = torch.ones(H, dtype=torch.bfloat16), torch.zeros(H, dtype=torch.bfloat16)
    compiled = torch.compile(layer_norm, fullgraph=True, backend="aot_eager")
    assert_close([compiled(x, weight, bias)], [layer_norm(x, weight, bias)])
    weight[3:5] = 0
    with pytest.raises(RuntimeError, match='weight of 2 of 32 channels is too small .* keep="recompute"'):
        compiled(x, weight, bias)
    with torch.no_grad():
        assert_close([compiled(x, weight, bias)], [layer_norm(x, weight, bias)])
