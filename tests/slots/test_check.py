"""Layers are compared with Megatron's own in the first forward: faults are named, sound layers raise no alarm, and the
run's numbers stay as they are."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from gpt import FULL, build_gpt, gpt_config, gradients, losses
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from tempo_megatron import TempoConfig, set_micro_batch
from tempo_megatron.models.build import DTYPES, build_layer, build_model, build_transformer_config, make_inputs
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.slots.attention import TempoDotProductAttention
from tempo_megatron.slots.block_slots import get_value
from tempo_megatron.slots.check import LayerChecks
from tempo_megatron.slots.mlp import TempoMLP
from tempo_megatron.slots.norm import TempoNorm

MODELS = Path(__file__).parents[2] / "configs" / "model"
pytestmark = pytest.mark.usefixtures("one_rank")
AUTO = TempoConfig()


def watch(model: Any, tempo_config: TempoConfig = AUTO, build: Callable[..., Any] = build_layer) -> list[str]:
    """The lines of a model's comparisons, once it has run."""
    lines: list[str] = []
    LayerChecks(lines.append, build).add(model, tempo_config)
    return lines


def run_gpt(
    tempo_config: TempoConfig = AUTO,
    dtype: torch.dtype = torch.float32,
    build: Callable[..., Any] = build_layer,
    **settings: Any,
) -> list[str]:
    model = build_gpt(gpt_config(params_dtype=dtype, bf16=dtype == torch.bfloat16, **settings), tempo_config)
    lines = watch(model, tempo_config, build)
    losses(model, 0, 2, gives_mask=tempo_config.attention == "off")
    return lines


def drop_bias(layer: Any) -> None:
    for name in ("self_attn_bda", "mlp_bda"):
        choose = getattr(layer, name)
        if get_value("dropout", choose) != "off":
            setattr(layer, name, lambda *how, choose=choose: lambda x, *rest: choose(*how)((x[0], None), *rest))


def take_another_eps(layer: Any) -> None:
    for norm in layer.modules():
        if isinstance(norm, TempoNorm):
            norm.eps *= 10


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 1.1


def make_the_gradient_wrong(layer: Any) -> None:
    if isinstance(layer.mlp, TempoMLP):
        layer.mlp.linear_fc2.register_forward_pre_hook(lambda _, inputs: Wrong.apply(inputs[0]))


def shorten_the_window(layer: Any) -> None:
    attention = layer.self_attention
    if isinstance(attention.core_attention, TempoDotProductAttention):
        config = copy.copy(layer.config)
        config.window_size = (config.window_size[0] - 1, config.window_size[1])
        attention.core_attention = TempoDotProductAttention(config, 1, AttnMaskType.causal, "self")


def transpose_heads(layer: Any) -> None:
    core_attention = layer.self_attention.core_attention
    if isinstance(core_attention, TempoDotProductAttention):
        heads = (core_attention.num_attention_heads_per_partition, -1)
        core_attention.register_forward_hook(lambda _, inputs, out: out.unflatten(-1, heads).flip(2).flatten(2))


def with_faults(*faults: Callable[[Any], None]) -> Callable[..., Any]:
    """Builds the layers that are compared with faults in Tempo's modules."""

    def build(*args: Any, **kwargs: Any) -> Any:
        layer = build_layer(*args, **kwargs)
        for fault in faults:
            fault(layer)
        return layer

    return build


@pytest.mark.parametrize("dtype", [torch.float32, *exhaustive([torch.bfloat16])], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "where", "operation", "settings"),
    [
        (drop_bias, r"tempo\.dropout \"recompute\" \(in self_attn_bda, mlp_bda\)", "dropout", {}),
        (take_another_eps, r"tempo\.norm \"inplace\" \(in input_layernorm, pre_m", "norm", {"layernorm_epsilon": 1e-3}),
        (make_the_gradient_wrong, r"tempo\.activation \"inplace\" \(in mlp\)", "activation", {}),
        (shorten_the_window, r"\(in self_attention\.core_attention\)", "attention", {"window_size": (5, 0)}),
        (transpose_heads, r"tempo\.attention \"flash\"", "attention", {}),
    ],
)
def test_a_fault_stops_the_run_and_names_its_operation(
    fault: Callable[[Any], None], where: str, operation: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=rf"(?s)decoder\.layers\.0 .*{where}.*train with --tempo-{operation} off$"):
        run_gpt(dtype=dtype, build=with_faults(fault), **settings)


def test_two_faults_are_both_named_and_one_that_is_turned_off_or_not_looked_for_does_not_stop_the_run() -> None:
    # In bfloat16, whose bounds are wider.
    with pytest.raises(ValueError, match="train with --tempo-norm off, --tempo-attention off$"):
        run_gpt(dtype=torch.bfloat16, build=with_faults(transpose_heads, take_another_eps), layernorm_epsilon=1e-3)
    build = with_faults(take_another_eps)
    assert [line[:8] for line in run_gpt(TempoConfig(norm="off"), build=build)] == ["checked:"]
    assert run_gpt(TempoConfig(check="off"), build=build) == []


VALUES = (
    AUTO,
    TempoConfig(activation="recompute", norm="recompute", attention="recompute"),
    TempoConfig(attention="softmax", linear_fc1="recompute"),
    TempoConfig(linear_fc1="tile", linear_qkv="recompute"),
)


@pytest.mark.parametrize("values", VALUES)
def test_every_value_is_checked(values: TempoConfig) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        (line,) = run_gpt(values, dtype, dropout=0.1, num_query_groups=2, qk_layernorm=True)
        assert line.startswith("checked: output and 17 gradients of decoder.layers.0 equal stock's within "), line
        assert line.endswith(" on 32 tokens at dropout 0") and " 0 of them" not in line  # of two samples


def test_each_kind_of_layer_is_checked_once() -> None:
    layers = {"1-2": {"norm": "recompute"}, "3": {"attention": "off", "activation": "off"}}
    values = TempoConfig(layers=layers)
    model = build_gpt(gpt_config(num_layers=5), values)
    lines = watch(model, values)
    for sample in (0, 2):
        losses(model, sample, 2, gives_mask=True)
    assert [line.split(" of ")[1].split()[0] for line in lines] == [f"decoder.layers.{n}" for n in (0, 1, 3)]


def shrink(name: str) -> Any:
    """The model of a file with its kinds of layers, small."""
    given = read_shape_file(MODELS / f"{name}.json")
    small: dict[str, Any] = {
        **{"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64},
        **{"num_query_groups": 2, "kv_channels": 8, "seq_length": 80, "max_position_embeddings": 96},
        **{"decoder_seq_length": 48, "window_size": [15, 0], "num_experts": 4, "moe_ffn_hidden_size": 16},
        **{"moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_layer_freq": [0, 1]},
        **{"moe_shared_expert_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_head_dim": 8},
        **{"qk_pos_emb_head_dim": 4, "v_head_dim": 6},
    }
    latent = {"kv_channels"} if given.get("multi_latent_attention") else set()
    return make_shape(**{key: small.get(key, value) for key, value in given.items() if key not in latent})


@pytest.mark.parametrize("precision", ["bf16", *exhaustive(["fp32"])])
@pytest.mark.parametrize(
    ("name", "num_kinds"),
    [
        *(("gpt2_tiny", 1), ("bert_tiny", 1), ("t5_tiny", 2), ("qwen3_0.6b", 1), ("qwen3_30b_a3b", 1)),
        *(("deepseek_v3", 2), *exhaustive(("llama3.2_1b", 1), ("mixtral_8x7b", 1))),
    ],
)
def test_sound_layers_raise_no_alarm(name: str, num_kinds: int, precision: str) -> None:
    shape = shrink(name)
    for values in (AUTO, TempoConfig(activation="recompute", norm="recompute")):
        config = build_transformer_config(shape, dtype=DTYPES[precision])
        model = build_model(shape, config, values, 64).to(DTYPES[precision]).train()
        lines = watch(model, values)
        set_micro_batch(5, 0)
        model(**make_inputs(shape, 64, 2, causal_mask=False))
        assert [line[:8] for line in lines] == ["checked:"] * num_kinds, lines


def read_state(model: Any) -> Any:
    """What a comparison must not change, besides the losses."""
    tracker = {name: bytes(state.tolist()) for name, state in get_cuda_rng_tracker().get_states().items()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    return torch.get_rng_state(), tracker, buffers, sorted(map(str, parallel_state.get_global_memory_buffer().buffer))


def train(check: str, sequence_parallel: bool, settings: dict[str, Any], values: dict[str, str]) -> Any:
    """(The lines, of three steps the losses, gradients, and what else a forward leaves behind)."""
    tempo_config = TempoConfig(check=check, **values)
    model_parallel_cuda_manual_seed(1234)
    model = build_gpt(gpt_config(sequence_parallel=sequence_parallel, dropout=0.1, **settings), tempo_config)
    lines = watch(model, tempo_config)
    found = []
    for step in range(3):
        loss = losses(model, 2 * step, 2, gives_mask=tempo_config.attention == "off")
        state = read_state(model)
        loss.mean().backward()
        found.append((loss.detach(), gradients(model), state))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return lines, found


EXPERTS = {
    "activation_func": F.silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_input_jitter_eps": 0.1,
}
RUNS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "GPT": ({}, {}),
    # Stock dropout draws from Megatron's generators.
    "GPT, stock dropout": ({}, {"dropout": "off", "attention": "off"}),
    "GPT, full recomputation": (FULL, {}),
    "GPT, selective recomputation": ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, {}),
    "experts with auxiliary losses": (EXPERTS, {}),
}


def train_twice(sequence_parallel: bool, names: tuple[str, ...]) -> Any:
    return {name: [train(check, sequence_parallel, *RUNS[name]) for check in ("auto", "off")] for name in names}


def assert_alike(runs: dict[str, Any]) -> None:
    for name, ((lines, checked), (silent, plain)) in runs.items():
        assert [line[:8] for line in lines] == ["checked:"] and silent == [], (name, lines)
        (ours, structure), (theirs, same) = tree_flatten(checked), tree_flatten(plain)
        assert structure == same, name
        for found, expected in zip(ours, theirs, strict=True):
            assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected, name


@pytest.mark.parametrize("name", RUNS)
def test_losses_gradients_and_states_are_bit_for_bit_those_without_the_check(name: str) -> None:
    assert_alike(train_twice(False, (name,)))


@pytest.mark.slow
def test_tensor_parallel_ranks_are_checked_alike_and_change_nothing() -> None:
    for runs in run_megatron_ranks(train_twice, 2, 2, True, ("GPT", "GPT, full recomputation")):
        assert_alike(runs)


def plant_on_a_rank(rank: int) -> str:
    """The error of a run in which one tensor-parallel rank alone has a fault."""
    faults = [make_the_gradient_wrong] if parallel_state.get_tensor_model_parallel_rank() == rank else []
    with pytest.raises(ValueError) as caught:
        run_gpt(sequence_parallel=True, build=with_faults(*faults))
    return str(caught.value)


@pytest.mark.slow
def test_a_fault_of_one_tensor_parallel_rank_stops_both() -> None:
    for sentence in run_megatron_ranks(plant_on_a_rank, 2, 2, 1):
        assert sentence.endswith("train with --tempo-activation off")


def test_what_cannot_be_compared_is_said_with_its_reason() -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this device")

    assert run_gpt(build=refuse) == ["not checked: decoder.layers.0: RuntimeError: no kernel for this device"]
    model = build_gpt(gpt_config(), AUTO)
    for name, value, reason in (
        ("cuda_graph_impl", "local", "CUDA graphs are on, whose replays run no hook"),
        ("context_parallel_size", 2, "context_parallel_size is 2, which cuts the sequence"),
        ("fp8", "e4m3", "fp8 is on, whose scales belong to the model's layers"),
    ):
        stock = getattr(model.config, name, None)
        setattr(model.config, name, value)
        lines = watch(model)
        setattr(model.config, name, stock)
        losses(model, 0, 2, gives_mask=False)
        assert lines == [f"not checked: {reason}"]


def test_what_a_run_binds_to_the_configuration_is_not_copied_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # 0.16 defines it with Transformer Engine
    settings = {**EXPERTS, "moe_shared_expert_intermediate_size": 24}
    model = build_gpt(gpt_config(**settings), AUTO)
    model.config.finalize_model_grads_func = functools.partial(print, threading.Lock())
    (lines, _) = watch(model), losses(model, 0, 2, gives_mask=False)
    assert [line[:8] for line in lines] == ["checked:"]


def test_partitioned_weights_and_evaluation_are_not_compared() -> None:
    model = build_gpt(gpt_config(), AUTO)
    lines = watch(model)
    losses(model.eval(), 0, 2, gives_mask=False)
    assert lines == []
    model.decoder.layers[0].mlp.linear_fc1.weight.ds_id = 0
    losses(model.train(), 0, 2, gives_mask=False)
    assert lines == ["not checked: decoder.layers.0: ZeRO-3 partitions the weights"]
