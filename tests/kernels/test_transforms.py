"""vmap, torch.func, forward-mode differentiation and DTensors: every public operation refuses them in one sentence."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import Tensor
from torch.autograd import forward_ad

import tempo_kernels
from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import geglu, glu, reglu, swiglu
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.recompute import recompute
from tempo_kernels.silu import silu
from tempo_kernels.squared_relu import squared_relu

H = 8
LABELS = torch.arange(8).view(2, 4) % 5
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "squared_relu": squared_relu,
    "silu": silu,
    "glu": lambda x: glu(x, None, "silu"),
    "swiglu": swiglu,
    "geglu": geglu,
    "reglu": reglu,
    "layer_norm": lambda x: layer_norm(x, torch.ones(H), torch.zeros(H)),
    "rms_norm": lambda x: rms_norm(x, torch.ones(H), keep="input"),
    "bias_dropout_add": lambda x: bias_dropout_add(x, None, None, p=0.1, key=1),
    "attention": lambda x: attention(x.view(4, 2, 2, 4), *[torch.ones(4, 2, 2, 4)] * 2, causal=True, softmax_scale=0.5),
    "linear_cross_entropy": lambda x: linear_cross_entropy(x, torch.ones(5, H), LABELS),
    "linear_log_prob": lambda x: linear_log_prob(x, torch.ones(5, H), LABELS),
    "recompute": lambda x: recompute(torch.sin, x),
}
SHARED_ROOMS = {"philox", "pointwise"}
BESIDE_OPERATIONS = {"describe", "find_backend", "Draw", "Kept", "Refillable"}
BESIDE_OPERATIONS |= {"adopt", "can_refill", "drop", "find_saved_tensors", "hold"}
# Without autograd: their caller is an operation.
BESIDE_OPERATIONS |= {"attend_block", "differentiate_block", "merge_blocks"}
BESIDE_OPERATIONS |= {"CHUNK_BYTES", "OPERATIONS", "make_tables", "use_chunk_bytes"}


def make_input() -> Tensor:
    return torch.linspace(-2, 2, 4 * 2 * H).view(4, 2, H)


def give_a_tangent(operation: Callable[[Tensor], Tensor]) -> None:
    with forward_ad.dual_level():
        operation(forward_ad.make_dual(make_input(), make_input()))


TRANSFORMED = "called under vmap or a transform of torch.func"
USES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "vmap": (lambda f: torch.vmap(f)(torch.stack([make_input()] * 3)), TRANSFORMED),
    "grad": (lambda f: torch.func.grad(lambda x: f(x).sum())(make_input()), TRANSFORMED),
    "jvp": (lambda f: torch.func.jvp(f, (make_input(),), (make_input(),)), TRANSFORMED),
    "forward mode": (give_a_tangent, "given a tensor with a tangent"),
}


def test_every_public_operation_is_here() -> None:
    rooms = {room.name for room in pkgutil.iter_modules(tempo_kernels.__path__) if room.ispkg} - SHARED_ROOMS
    names = {name for room in rooms for name in importlib.import_module(f"tempo_kernels.{room}").__all__}
    assert names - BESIDE_OPERATIONS == set(OPERATIONS)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_transforms_and_tangents_are_refused_in_one_sentence(name: str, use: str) -> None:
    run, sentence = USES[use]
    with pytest.raises(
        ValueError, match=f"^{name} was .*{sentence.removeprefix('was ')}.*; expected .*; .* use torch's"
    ):
        run(OPERATIONS[name])


@pytest.mark.parametrize("name", OPERATIONS)
def test_tensors_without_a_tangent_are_welcome_where_others_have_one(name: str) -> None:
    x = make_input()
    with forward_ad.dual_level():
        forward_ad.make_dual(x.clone(), x)
        assert torch.equal(OPERATIONS[name](x), OPERATIONS[name](x))


@pytest.mark.parametrize("name", OPERATIONS)
def test_batched_gradients_give_the_right_result_or_one_sentence(name: str) -> None:
    x = make_input().requires_grad_()
    y = OPERATIONS[name](x)
    grads = torch.stack([torch.ones_like(y), torch.linspace(-1, 1, y.numel()).view_as(y)])
    expected = torch.stack([torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads])
    try:
        (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True)
    except ValueError as error:
        assert "was given batched gradients" in str(error)
    else:
        torch.testing.assert_close(found, expected)


def refuse_dtensors() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(make_input(), init_device_mesh("cpu", (1,)), [Shard(1)])
    found = {}
    for name, operation in OPERATIONS.items():
        try:
            found[name] = "right" if torch.equal(operation(x).full_tensor(), operation(make_input())) else "wrong"  # type: ignore[attr-defined]
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_dtensors_are_refused_in_one_sentence() -> None:
    (found,) = run_ranks(refuse_dtensors, 1)
    assert found.pop("recompute") == "right"
    for name, sentence in found.items():
        assert " is a DTensor; expected plain tensors; give each rank's part" in sentence, (name, sentence)
        assert sentence.startswith(f"{name}: ")
