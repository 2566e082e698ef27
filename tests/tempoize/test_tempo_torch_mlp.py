"""MLPs of transformers a tile of tokens at a time: the loss and gradients of stock, and nothing wide is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import exhaustive
from distributed import run_ranks
from tiny_models import Step, assert_equal_step, assert_same_step, build, list_reasons, step
from torch import Tensor, nn
from transformers_cases import checkpoint_layers

from tempo_kernels.recompute import drop, keep_attention, recompute, recompute_in_tiles
from tempo_megatron.memory.tape.scopes import Scopes, record_saved
from tempo_torch import restore, samples, tempoize

IDS = torch.arange(2 * 40).view(2, 40) * 7 % 64
SIZES = {"intermediate_size": 96, "num_hidden_layers": 3}
LAYER = {"intermediate_size": 96, "num_hidden_layers": 1}
TILES = {"mlp": "tile"}


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["Llama", *exhaustive(["Qwen2"]), "GPTNeoX"])
def test_tiles_give_the_loss_and_gradients_of_stock(kind: str, is_checkpointed: bool) -> None:
    steps, calls = [], [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    for mlp in ("off", "tile"):
        model = tempoize(build(kind, **SIZES, num_key_value_heads=2), mlp=mlp)
        if is_checkpointed:
            checkpoint_layers(model, use_reentrant=False)
        names = [name for name, _ in model.named_modules() if name.endswith((".down_proj", ".dense_4h_to_h"))]
        for name in names:
            model.get_submodule(name).register_forward_hook(count)
        calls[0] = 0
        steps.append(step(model, IDS))
    # 80 tokens are three tiles of 32: once in forward, once in backward, and no third time in a checkpoint.
    assert calls[0] == 3 * 2 * len(names) and list_reasons(model, "mlp") == {"tile"}
    assert_same_step(steps[1], steps[0], rtol=2e-6)
    mlp, stock = (
        each.get_submodule(names[0].rpartition(".")[0])
        for each in (restore(model), build(kind, **SIZES, num_key_value_heads=2))
    )
    assert type(mlp) is type(stock) and not hasattr(mlp, "_z3_leaf")


def test_of_an_mlp_its_input_is_kept_and_not_that_if_the_norm_can_make_it_again() -> None:
    kept = {}
    for norm in ("inplace", "recompute"):
        model = tempoize(build("Llama", **SIZES), mlp="tile", norm=norm)
        _, found = record_saved(model, lambda model=model: model(input_ids=IDS, labels=IDS).loss)
        kept[norm] = sum(saved.num_bytes for saved in found if ".mlp" in saved.operation)
    assert kept == {"inplace": 0, "recompute": 0}


def test_gradients_in_16_bits_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(16, 16).bfloat16()
    x = torch.randn(4096, 16).bfloat16()
    exact = torch.ones(4096, 16).double().T @ x.double()
    found = {}
    for num_rows in (4096, 8):
        linear.zero_grad()
        recompute_in_tiles(linear, x, parameters=linear.parameters(), num_rows=num_rows).sum().backward()
        found[num_rows] = (linear.weight.grad.double() - exact).abs().max() / exact.abs().max()
    # 512 sums in bfloat16 would lose ten times as much.
    assert found[8] < 2 * found[4096] + 2**-9


def test_linears_that_add_to_main_grad_themselves_do_so_for_each_tile() -> None:
    """As Megatron's with gradient_accumulation_fusion: they return a gradient without meaning."""
    weight = nn.Parameter(torch.randn(8, 8))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(8, 8), False  # type: ignore[attr-defined]

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            ctx.weight.main_grad += grad.T @ ctx.saved_tensors[0]
            ctx.weight.grad_added_to_main_grad = True
            return grad @ ctx.weight, torch.full_like(ctx.weight, torch.nan)

    x, seen = torch.randn(20, 8, requires_grad=True), []
    weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad_added_to_main_grad))
    recompute_in_tiles(
        lambda tile: Fused.apply(tile, weight), x, parameters=[weight], num_rows=6
    ).square().sum().backward()
    expected = 2 * (x @ weight.T).T @ x
    assert seen == [True]
    torch.testing.assert_close(weight.main_grad, expected.detach())  # type: ignore[attr-defined]


def test_a_promise_takes_the_place_of_the_input() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 8), torch.randn(20, 8, requires_grad=True)
    y = recompute(torch.tanh, x)
    address = y.untyped_storage()._cdata
    out = recompute_in_tiles(linear, y, parameters=linear.parameters(), num_rows=6)
    drop(y, after=out)
    del y
    kept = out.grad_fn.keeper._raw_saved_tensors  # type: ignore[union-attr]
    assert all(getattr(one.data, "_cdata", None) != address for one in kept)
    out.sum().backward()
    expected = torch.autograd.grad(linear(torch.tanh(x)).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x + torch.rand(8), "a function that runs in tiles draws random numbers"),
        (nn.Linear(8, 8), "uses a tensor of shape .* that needs a gradient and is not among `parameters`"),
    ],
)
def test_what_cannot_run_in_tiles_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recompute_in_tiles(function, torch.ones(20, 8, requires_grad=True), parameters=[], num_rows=6).sum().backward()
    with pytest.raises(ValueError, match='mlp is "tile", but it has dropout 0.1 in dropout, .*; set it to "off"'):
        tempoize(build("GPT2"), mlp="tile")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_checkpointed", [False, *exhaustive([True])])
def test_compiled_layers_run_in_tiles_and_keep_what_tiles_keep(is_checkpointed: bool) -> None:
    found = {}
    for how in ("stock", "tile", "stock, compiled", "tile, compiled"):
        mlp = how.split(",")[0].replace("stock", "off")
        model = tempoize(build("Llama", **LAYER, attention_dropout=0.1), mlp=mlp)
        if is_checkpointed:
            checkpoint_layers(model, use_reentrant=False, context_fn=keep_attention)
        for layer in model.model.layers if how.endswith("compiled") else ():
            layer.compile(backend="aot_eager")
        reader = Scopes(model)
        with samples(model, 0):
            kept = sum(saved.num_bytes for saved in reader.list_saved([model(input_ids=IDS, labels=IDS).loss]))
        with samples(model, 0):
            found[how] = kept / (IDS.numel() * 32 * 4), step(model, IDS)
    for _, each in found.values():
        assert_same_step(each, found["stock"][1])
    if not is_checkpointed:
        # 2 of it are the outputs of the layer's norms, which nobody makes again where it is compiled.
        assert found["tile, compiled"][0] == pytest.approx(found["tile"][0] + 2, abs=0.1)
        # The outputs of up_proj and gate_proj are three times as wide as the layer's input.
        assert found["tile, compiled"][0] < found["stock, compiled"][0] - (3 + 3)
        assert_equal_step(found["tile"][1], found["tile, compiled"][1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_one_graph_has_no_room_for_tiles_in_training_and_needs_none_in_evaluation() -> None:
    model = tempoize(build("Llama", **LAYER), **TILES)
    compiled = torch.compile(model.model.layers[0].mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 80, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model.model.layers[0].mlp(x))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_run_in_tiles"):
        compiled(x)


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_tiles_under_autocast_are_as_exact_as_the_whole(is_checkpointed: bool) -> None:
    steps = []
    for choices, is_exact in (({}, True), ({}, False), (TILES, False)):
        model = tempoize(build("Llama", **SIZES, num_key_value_heads=2), norm="recompute", **choices)
        if is_checkpointed:
            checkpoint_layers(model, use_reentrant=False, context_fn=keep_attention)
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_exact):
            steps.append(step(model, IDS))
    (exact, gradients), (whole, gradients_of_whole), (tiled, gradients_of_tiled) = steps
    assert (tiled - exact).abs() <= 2 * (whole - exact).abs() + 1e-3
    for name, expected in gradients.items():
        errors = [(each[name] - expected).abs().max() for each in (gradients_of_tiled, gradients_of_whole)]
        assert errors[0] <= 2 * errors[1] + 2**-9 * expected.abs().max(), name


LORA = {
    "q_proj": ["q_proj"],
    "gate_proj": ["gate_proj"],
    "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("targets", LORA.values(), ids=LORA)
def test_adapters_train_as_in_stock_and_their_dropout_in_an_mlp_is_refused(targets: list[str], dropout: float) -> None:
    """In the documented order: tempoize, peft, tempoize. The input of the first layer needs no gradient."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.LoraConfig(target_modules=targets, r=4, lora_dropout=dropout, init_lora_weights=False)
    found: list[Step] = []
    for choices in ({}, TILES):
        model = tempoize(build("Llama", **SIZES, num_key_value_heads=2), **choices)
        torch.manual_seed(1)
        peft.inject_adapter_in_model(adapted, model)
        if dropout and choices and targets != ["q_proj"]:
            with pytest.raises(ValueError, match='"tile", but it has dropout 0.05 in .*lora_dropout.*expected 0 there'):
                tempoize(model, **choices)
            return
        with samples(tempoize(model, **choices), 0):
            found.append(step(model, IDS))
    assert_same_step(found[1], found[0])
    assert sum(gradient is not None for gradient in found[0][1].values()) == 2 * 3 * len(targets)


def train_under_zero_3(choices: dict[str, str]) -> tuple[list[float], dict[str, Tensor], int]:
    """(Losses, gradients of the last step, parameters that this rank gathered for the last forward and backward.)"""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nobody needs it, and it is compiled
    model = tempoize(build("Llama", **SIZES, num_key_value_heads=2), norm="recompute", **choices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**config, "gradient_clipping": 0.0})
    losses, ids, gathered = [], IDS.chunk(2)[torch.distributed.get_rank()], 0
    gather = next(model.parameters()).all_gather_coalesced  # type: ignore[attr-defined]

    def count(params: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal gathered
        gathered += len(params)
        return gather(params, *args, **kwargs)

    for parameter in model.parameters():
        parameter.all_gather_coalesced = count  # type: ignore[attr-defined]
    for _ in range(3):  # DeepSpeed records the order of the first
        gathered = 0
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        engine.step()
        losses.append(loss.item())
    return losses, found, gathered


def train_under_zero_3_each_way() -> Any:
    return [train_under_zero_3(choices) for choices in ({}, TILES)]


@pytest.mark.slow
def test_zero_3_gathers_weights_once_for_all_tiles_and_gives_the_losses_and_gradients_of_the_whole() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    for whole, tiles in run_ranks(train_under_zero_3_each_way, 2):
        (losses, gradients, gathered), (losses_of_tiles, gradients_of_tiles, gathered_for_tiles) = whole, tiles
        assert losses_of_tiles == pytest.approx(losses, rel=1e-6) and losses[0] > losses[2] + 1e-3
        for name, expected in gradients.items():
            assert (gradients_of_tiles[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name
        assert gathered_for_tiles == gathered > 0
