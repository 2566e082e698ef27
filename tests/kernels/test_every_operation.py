"""What holds of every operation: of autocast, a default dtype, second derivatives, and torch's transforms."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import parametrize_covering
from distributed import run_ranks
from every_operation import LABELS, OPERATIONS, TOKEN_WEIGHTS, B, H, S, make_inputs
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from witness import assert_same

import tempo_kernels
from tempo_kernels.activation.cpu import CHUNK_ELEMENTS
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.linear_cross_entropy import linear_cross_entropy
from tempo_kernels.opaque import use_blocks
from tempo_kernels.recompute import recompute

ROOT = Path(__file__).parents[2]
GATED = ["glu", "swiglu", "geglu", "reglu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MASK = (2**63 + 17, 8)  # key and first sample


OTHERS = make_inputs()[1:]


def call(name: str, x: Tensor) -> Tensor:
    """The operation of a float32 x alone; its other inputs have no gradient."""
    return OPERATIONS[name](x, *OTHERS, *MASK)


def outputs_and_gradients(name: str, inputs: list[Tensor], casts: bool, casts_backward: bool) -> list[Tensor | None]:
    leaves = [t.clone().requires_grad_() for t in inputs]
    forward, backward = (
        torch.autocast("cpu", torch.bfloat16) if is_on else nullcontext() for is_on in (casts, casts_backward)
    )
    with forward:
        out = OPERATIONS[name](*leaves, *MASK)
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.device, out.dtype)
    with backward:
        out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@parametrize_covering(
    name=OPERATIONS.keys(),
    dtype=[torch.float32, torch.float16],
    casts_backward={"backward outside": False, "backward inside": True},
)
def test_the_inputs_dtype_decides_and_autocast_changes_no_bit(
    name: str, dtype: torch.dtype, casts_backward: bool
) -> None:
    inputs = make_inputs(dtype)
    assert_same(
        outputs_and_gradients(name, inputs, True, casts_backward), outputs_and_gradients(name, inputs, False, False)
    )


@parametrize_covering(
    each={"name": [name for name in OPERATIONS if name.startswith(("attention", "bias_dropout_add"))]},
    key=[3, 2**64 - 1],
    loaded=["key", "first sample", "both"],
)
def test_a_mask_by_device_data_is_that_of_the_numbers_which_must_not_change_before_backward(
    name: str, key: int, loaded: str
) -> None:
    tensors = torch.tensor(key if key < 2**63 else key - 2**64), torch.tensor(2**32 - 1)
    given = key if loaded == "first sample" else tensors[0], 2**32 - 1 if loaded == "key" else tensors[1]
    x = make_inputs()[0].requires_grad_()
    found, wanted = (OPERATIONS[name](x, *OTHERS, *numbers) for numbers in (given, (key, 2**32 - 1)))
    again = OPERATIONS[name](x, *OTHERS, *given)
    assert_same([found, *torch.autograd.grad(found.sum(), x)], [wanted, *torch.autograd.grad(wanted.sum(), x)])
    tensors[loaded == "first sample"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again.sum().backward()


REFILLED = [name for name in OPERATIONS if name.endswith("of its input") or name in GATED or name in ("silu", "relu")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFILLED)
def test_an_output_that_is_not_kept_is_given_again_bit_for_bit_in_blocks_too(
    name: str, dtype: torch.dtype, nan_poison: None
) -> None:
    x, *others = make_inputs(dtype)
    with use_blocks(norm=4 * H):
        y = OPERATIONS[name](x.mT.contiguous().mT.requires_grad_(), *others, *MASK)
        out = torch.full_like(y, torch.nan, requires_grad=False)
        y.grad_fn.refill(y.grad_fn, out)  # type: ignore[union-attr]
    assert torch.equal(out, y) and not out.requires_grad


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("name", ["gelu of its input", "geglu", "layer_norm of its input", "rms_norm of its input"])
def test_an_output_given_again_is_recorded_in_one_block(name: str, mode: str) -> None:
    def refill(x: Tensor, *others: Tensor) -> Tensor:
        y = OPERATIONS[name](x.requires_grad_(), *others, *MASK)
        out = torch.empty_like(y, requires_grad=False)
        y.grad_fn.refill(y.grad_fn, out)  # type: ignore[union-attr]
        return out

    trace = make_fx(refill, tracing_mode=mode)
    many_rows = 4 * S if "norm" in name else CHUNK_ELEMENTS // H  # one of so many would be compiled
    with use_blocks(norm=H):
        few, many = (len(trace(torch.randn(rows, B, H), *OTHERS).graph.nodes) for rows in (S, many_rows))
    assert few == many


# The sums in a product of matrices have another order where they lie in another way.
@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("linear")])
def test_any_strides_give_the_contiguous_result(name: str) -> None:
    inputs = make_inputs()
    strided = [t.mT.contiguous().mT if t.dim() > 1 else torch.stack((t, t), -1)[..., 0] for t in inputs]
    leaves = [t.clone().requires_grad_() for t in inputs], [t.requires_grad_() for t in strided]
    found, wanted = (OPERATIONS[name](*each, *MASK) for each in leaves)
    grad = torch.randn_like(wanted)
    found.backward(grad.mT.contiguous().mT if grad.dim() > 1 else grad)
    wanted.backward(grad)
    assert found.is_contiguous() == wanted.is_contiguous()
    assert_same([found, *(t.grad for t in leaves[1])], [wanted, *(t.grad for t in leaves[0])])
    assert all(torch.equal(*pair) for pair in zip(leaves[0], inputs, strict=True)), "inputs stay as they are"


# torch's functions that, without a dtype, take the default one for numbers that are not integers.
ALLOCATE = {
    f"torch.{name}" for name in (
        "arange as_tensor empty empty_strided eye full linspace logspace ones rand randint randn randperm range "
        "scalar_tensor tensor zeros"
    ).split()
}  # fmt: skip


def test_every_allocation_names_its_dtype() -> None:
    files = [path for folder in ("kernels/tempo_kernels", "tempo_megatron") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func) in ALLOCATE
            ):
                given = {keyword.arg for keyword in node.keywords}
                assert given & {"dtype", None}, f"{path}, line {node.lineno}: {ast.unparse(node)}"


def results_under(default: torch.dtype, name: str, dtype: torch.dtype) -> list[Tensor | None]:
    inputs, before = make_inputs(dtype), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        return outputs_and_gradients(name, inputs, False, False)
    finally:
        torch.set_default_dtype(before)


@parametrize_covering(
    each={"default": [torch.bfloat16, torch.float16, torch.float64]}, name=OPERATIONS.keys(), dtype=DTYPES
)
def test_a_default_dtype_changes_no_bit(name: str, dtype: torch.dtype, default: torch.dtype) -> None:
    assert_same(results_under(default, name, dtype), results_under(torch.float32, name, dtype))


# With token_weights gradients are given once, and gradcheck asks for them again.
@pytest.mark.parametrize("name", [name for name in OPERATIONS if "token_weights" not in name])
def test_float64_passes_gradcheck(name: str) -> None:
    inputs = [t.requires_grad_() for t in make_inputs(torch.float64)]
    assert torch.autograd.gradcheck(lambda *t: OPERATIONS[name](*t, *MASK), inputs, fast_mode=True)


# bias_dropout_add's derivative does not depend on x.
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "bias_dropout_add"])
def test_no_operation_has_a_second_derivative_and_none_says_that_it_is_0(name: str) -> None:
    x = make_inputs()[0].requires_grad_()
    (first,) = torch.autograd.grad(call(name, x).sum(), x)
    # The log-probabilities are no choice of a TempoConfig.
    advice = "use torch's operation instead$" if "log_prob" in name else r"setting tempo\.\w+ to \"off\""
    for asks_backward in (True, False):
        for is_weighted in (False, True):
            y = call(name, x)
            weight = torch.ones(y.shape, requires_grad=is_weighted)
            (grad_x,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
            assert grad_x.requires_grad and torch.equal(grad_x, first)
            penalised = y.sum() + grad_x.square().sum()
            word = name.split()[0].rstrip(",")
            with pytest.raises(RuntimeError, match=f"{word}.* is not twice differentiable.* {advice}"):
                penalised.backward() if asks_backward else torch.autograd.grad(penalised, x)


def test_every_input_of_the_weighted_loss_raises() -> None:
    x, _, bias, weight = (t.requires_grad_() for t in make_inputs())
    inputs = [x, weight, bias]
    for asked in inputs:
        total, _ = linear_cross_entropy(x, weight, LABELS, bias=bias, token_weights=TOKEN_WEIGHTS)
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        penalised = total + sum(grad.square().sum() for grad in grads)
        with pytest.raises(RuntimeError, match="not twice differentiable"):
            torch.autograd.grad(penalised, asked)


def test_dropout_which_is_linear_counts_as_a_constant_rightly_and_else_raises() -> None:
    x = make_inputs()[0].requires_grad_()
    (grad_x,) = torch.autograd.grad(bias_dropout_add(x, None, None, p=0.25, key=5).sum(), x, create_graph=True)
    assert not grad_x.requires_grad  # as of torch's own dropout: keep / (1 - p), whatever x is
    y = bias_dropout_add(x, None, None, p=0.25, key=5)
    (grad_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r'bias_dropout_add is not twice .* setting tempo.dropout to "off"'):
        grad_x.sum().backward()


# One form of each public operation, of x alone.
PUBLIC: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: (lambda x, name=name: call(name, x)) for name in OPERATIONS if name.isidentifier() and name != "relu"},
    "recompute": lambda x: recompute(torch.sin, x),
}
every_public_operation = pytest.mark.parametrize("name", PUBLIC)
SHARED_ROOMS = {"philox", "activation", "offload"}
BESIDE_OPERATIONS = set(
    "CHUNK_BYTES Draw Kept OPERATIONS Refillable adopt can_refill describe drop find_saved_tensors fits_in_place hold "
    "list_flash_workspaces list_gpu_workspaces make_tables use_chunk_bytes use_gpu_blocks".split()
)
# Take a whole MLP, and a checkpoint.
BESIDE_OPERATIONS |= {"keep_attention", "recompute_in_tiles"}
# Without autograd: their caller is an operation.
BESIDE_OPERATIONS |= {"add_sink", "attend_block", "differentiate_block", "differentiate_sink", "merge_blocks"}


def test_every_public_operation_is_here() -> None:
    rooms = {room.name for room in pkgutil.iter_modules(tempo_kernels.__path__)} - SHARED_ROOMS
    modules = [importlib.import_module(f"tempo_kernels.{room}") for room in rooms if not room.startswith("kernel_")]
    names = {name for module in modules for name in getattr(module, "__all__", ())}
    assert names - BESIDE_OPERATIONS == set(PUBLIC)


def make_input() -> Tensor:
    return make_inputs()[0]


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


@pytest.mark.parametrize("use", USES)
@every_public_operation
def test_transforms_and_tangents_are_refused_in_one_sentence(name: str, use: str) -> None:
    run, sentence = USES[use]
    with pytest.raises(ValueError, match=f"^{name} was .*{sentence}.*; expected .*; .* use torch's"):
        run(PUBLIC[name])


@every_public_operation
def test_tensors_without_a_tangent_are_welcome_where_others_have_one(name: str) -> None:
    x = make_input()
    with forward_ad.dual_level():
        forward_ad.make_dual(x.clone(), x)
        assert torch.equal(PUBLIC[name](x), PUBLIC[name](x))


@every_public_operation
def test_batched_gradients_give_the_right_result_or_one_sentence(name: str) -> None:
    x = make_input().requires_grad_()
    y = PUBLIC[name](x)
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
    for name, operation in PUBLIC.items():
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
