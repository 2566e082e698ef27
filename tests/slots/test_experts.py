"""Mixtures of experts: what Tempo's experts compute, and what they keep, beside Megatron's own."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import megatron_cpu
import pytest
import torch
from distributed import run_megatron_ranks, run_ranks
from gpt import assert_equal_to_stock, build_gpt, gpt_config, gradients, losses, run_schedule
from grid.models import name_globally
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_runs import with_sample
from torch import Tensor
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempoize
from tempo_megatron.cpu import use_cpu
from tempo_megatron.memory.tape.scopes import record_saved
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.slot_content import change_slot, find_submodules

SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": False}
FUSED = {**SWIGLU, "bias_activation_fusion": True}
SQUARED = {"activation_func": squared_relu, "add_bias_linear": False}
CLAMPED = {
    "activation_func": quick_gelu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "activation_func_clamp_value": 0.5,
    "glu_linear_offset": 1.0,
}
TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
SHARED = {"moe_shared_expert_intermediate_size": 24}
CAPACITY = {**ALL_TO_ALL, "moe_expert_capacity_factor": 1.0}
PADDED = {**FUSED, **CAPACITY, "moe_pad_expert_input_to_capacity": True}
ON_INPUT = {**SWIGLU, **TOP_1, "moe_apply_probs_on_input": True}
RECOMPUTED = {**SWIGLU, "recompute_granularity": "selective", "recompute_modules": ["moe"]}
HALF = {"bf16": True, "params_dtype": torch.bfloat16}
# Stock's attention is written as such a layer's of Qwen3.
QWEN = {**FUSED, **ALL_TO_ALL, "qk_layernorm": True, "num_query_groups": 2}
ACTIVATION = TempoConfig(activation="recompute", attention="off", dropout="off", norm="off", loss="off")
PERMUTE = dataclasses.replace(ACTIVATION, moe_permute="recompute")
REPEAT = dataclasses.replace(ACTIVATION, moe_permute="repeat", norm="recompute")


class Case(NamedTuple):
    """Settings of the model, what of Tempo it has, and whether its experts are sequential or grouped."""

    settings: dict[str, Any]
    tempo: TempoConfig = ACTIVATION
    kind: str = "sequential"


CASES = {
    "swiglu, top 2, auxiliary losses": Case({**SWIGLU, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}),
    "fused swiglu, top 8 of 16, shared experts": Case(
        {**FUSED, **SHARED, "moe_shared_expert_gate": True, "num_moe_experts": 16, "moe_router_topk": 8}
    ),
    "geglu": Case({"activation_func": F.gelu, "gated_linear_unit": True, "add_bias_linear": False}),
    "clamped quick geglu": Case({**CLAMPED, "bias_activation_fusion": True}),
    "clamped quick geglu, not fused, and a dense layer": Case({**CLAMPED, "moe_layer_freq": [0, 1]}),
    "squared relu, a dense layer, one expert": Case(
        {**SQUARED, **TOP_1, "moe_layer_freq": [0, 1], "num_moe_experts": 1}
    ),
    "probabilities on the input": Case(ON_INPUT),
    "tokens dropped": Case({**SWIGLU, **CAPACITY}),
    "tokens dropped and padded": Case(PADDED),
    "the layer recomputed": Case(RECOMPUTED),
    # Stock's SequentialMLP with biases writes to a view in place, and fails.
    "grouped: fused swiglu, shared experts": Case({**FUSED, **SHARED}, kind="grouped"),
    "grouped: geglu with biases": Case({"activation_func": F.gelu, "gated_linear_unit": True}, kind="grouped"),
    "grouped: probabilities on the input": Case(ON_INPUT, kind="grouped"),
    "permuted: gathered, experts of stock": Case(SWIGLU, dataclasses.replace(PERMUTE, activation="off")),
    "permuted: all-to-all, norms recomputed": Case(
        {**FUSED, **ALL_TO_ALL, **SHARED}, dataclasses.replace(PERMUTE, norm="recompute"), "grouped"
    ),
    "permuted: dropped and padded": Case(PADDED, PERMUTE),
    "permuted: probabilities on the input": Case(ON_INPUT, PERMUTE, "grouped"),
    "permuted: one kernel": Case({**SWIGLU, **HALF, "moe_permute_fusion": True}, PERMUTE, "grouped"),
    # Everything of Tempo's that recomputes.
    "norms of queries and keys": Case(
        QWEN, TempoConfig(activation="recompute", norm="recompute", moe_permute="recompute"), "grouped"
    ),
}


def config_of(*, sequence_parallel: bool = False, dropout: float = 0.0, **settings: Any) -> Any:
    """Two layers of four experts, and two of them for each token."""
    sizes = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    settings = {**sizes, "moe_aux_loss_coeff": 0.01, "normalization": "RMSNorm", **settings}
    return gpt_config(sequence_parallel=sequence_parallel, dropout=dropout, **settings)


def prepare() -> None:
    """What a GPU would have, and Transformer Engine defines: streams, and compiled functions that run as written."""
    megatron_cpu._answer_torch_cuda()
    torch.compiler.set_stance("force_eager")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    torch.distributed.all_to_all_single = megatron_cpu.all_to_all_single


class GroupedLinear(torch.nn.Module):
    """Transformer Engine's GroupedLinear: a weight, and a bias, for each expert. It keeps its input, as views."""

    def __init__(self, num_gemms: int, inner: int, outer: int, *, config: Any, init_method: Any, bias: bool, **_: Any):
        super().__init__()
        self.is_first = not _.get("skip_bias_add")
        for index in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(outer, inner, dtype=config.params_dtype))
            init_method(weight)
            setattr(self, f"weight{index}", weight)
            if bias:
                setattr(self, f"bias{index}", torch.nn.Parameter(torch.full((outer,), 0.1)))
        self.num_gemms, self.use_bias = num_gemms, bias

    def forward(self, x: Tensor, m_splits: list[int]) -> Any:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else None
        out = Grouped.apply(x, m_splits, *weights)
        if biases is not None and self.is_first:
            out = torch.cat([part + bias for part, bias in zip(out.split(m_splits), biases, strict=True)])
            return out, None
        return out, biases


class Grouped(torch.autograd.Function):
    """x_i W_i^T of consecutive rows of x; x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], *weights: Tensor) -> Tensor:
        parts = torch.split(x, splits)
        ctx.save_for_backward(*parts, *weights)
        return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        half = len(ctx.saved_tensors) // 2
        parts, weights = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        grads = grad.split([len(part) for part in parts])
        grad_x = torch.cat([g @ weight for g, weight in zip(grads, weights, strict=True)])
        return grad_x, None, *(g.t() @ part for g, part in zip(grads, parts, strict=True))


def put_grouped(spec: Any) -> Any:
    """A block's spec with Megatron's grouped experts in the mixtures, around products that run on a CPU."""
    # Since 0.18 they have submodules of their own, and the spec is a function.
    submodules = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules)
    linears = submodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    is_function = submodules is not MLPSubmodules
    slot = (functools.partial if is_function else ModuleSpec)(experts.TEGroupedMLP, submodules=linears)
    layers = []
    for layer in spec.layer_specs:
        mlp = layer.submodules.mlp
        if hasattr(find_submodules(mlp), "experts"):
            mlp = change_slot(mlp, experts=slot)
        layers.append(dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, mlp=mlp)))
    return dataclasses.replace(spec, layer_specs=layers)


def build(config: Any, tempo_config: TempoConfig, kind: str) -> GPTModel:
    """kind: sequential or grouped (Transformer Engine's)."""
    spec = None
    if kind != "sequential":
        stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        spec = tempoize(put_grouped(stock), config, tempo_config)
    where = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    return build_gpt(config, tempo_config, spec=spec, position_embedding_type="rope", **where)


def step(model: GPTModel, first_samples: Sequence[int], *, gives_mask: bool) -> float:
    """The mean loss of micro batches of two samples, whose gradients are added up; 0 but on a pipeline's last stage."""
    found = run_schedule(model, lambda first: losses(model, first, 2, gives_mask=gives_mask), first_samples)
    return sum(each.mean().item() for each in found) / len(first_samples)


def measure(settings: dict[str, Any], tempo_config: TempoConfig, kind: str) -> dict[str, Any]:
    """The loss of two micro batches, gradients, and, without a pipeline, the bytes that one's forward keeps."""
    takes_mask = tempo_config.attention == "off" or tempo_config.is_off
    model = build(config_of(**settings), tempo_config, kind)
    if "qk_layernorm" in settings:
        fill(model)
    if "moe_router_enable_expert_bias" in settings:
        for module in model.modules():
            if getattr(module, "expert_bias", None) is not None:
                module.expert_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    found = step(model, (0, 2), gives_mask=takes_mask), gradients(model)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        return {"found": found}
    _, saved = record_saved(model, lambda: losses(model, 0, 2, gives_mask=takes_mask))
    counted = ".self_attention" if "qk_layernorm" in settings else ".mlp"
    return {"found": found, "kept": sum(each.num_bytes for each in saved if counted in each.operation)}


def permute_in_one(tokens: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor]:
    """Stands in for Transformer Engine's permutation; its map is not one of rows."""
    copies, _, index, *_ = moe_utils.permute(tokens, routing_map, num_out_tokens=num_out_tokens)
    return copies, torch.stack([index, index])


def unpermute_in_one(copies: Tensor, rows: Tensor, merging_probs: None, restore_shape: Any) -> Tensor:
    found: Tensor = moe_utils.unpermute(copies, rows[0], restore_shape)
    return found


EP_2 = {"expert_model_parallel_size": 2}
# Both experts of each token are on the first rank.
ONE_SIDED = {**SWIGLU, **ALL_TO_ALL, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
PP_2 = {"pipeline_model_parallel_size": 2}
SPLIT = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
TP_2_EP_2 = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **EP_2}
# Name -> sizes, settings of the model; of every run, and of --exhaustive.
SAMPLE: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "EP 2, all-to-all": (EP_2, {**FUSED, **ALL_TO_ALL, **SHARED}),
    "EP 2, all-to-all, dropped and padded": (EP_2, PADDED),
    "EP 2, all-to-all, a rank without tokens": (EP_2, ONE_SIDED),
    "PP 2, grouped, top 8": (PP_2, {**FUSED, "num_moe_experts": 16, "moe_router_topk": 8}),
    "TP 2, SP, experts split": (SPLIT, SQUARED),
    "TP 2, SP, EP 2, all-to-all": (TP_2_EP_2, {**SQUARED, **SHARED, **ALL_TO_ALL}),
}
LAYOUTS = {
    **SAMPLE,
    "EP 2": (EP_2, {**SWIGLU, **SHARED}),
    "EP 2, all-to-all, recomputed": (EP_2, {**RECOMPUTED, **ALL_TO_ALL}),
    "EP 2, all-to-all, grouped": (EP_2, {**FUSED, **ALL_TO_ALL, **SHARED}),
    "PP 2": (PP_2, {**FUSED, **SHARED, "moe_z_loss_coeff": 0.1}),
    "TP 2, SP, experts split, all-to-all": (SPLIT, {**SQUARED, **ALL_TO_ALL}),
    "TP 2, SP, EP 2": (TP_2_EP_2, {**SQUARED, **SHARED}),
    "TP 2, SP, EP 2, all-to-all, grouped": (TP_2_EP_2, {**SQUARED, **ALL_TO_ALL}),
    "EP 2, PP 2, all-to-all": ({**EP_2, **PP_2}, {**FUSED, **ALL_TO_ALL, **SHARED}),
    "TP 2, SP, EP 2, PP 2": ({**TP_2_EP_2, **PP_2}, {**SQUARED, **SHARED}),
}
OF_CONFIG = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")


def compare_layouts(layouts: dict[str, tuple[dict[str, int], dict[str, Any]]]) -> dict[str, Any]:
    """Stock's and Tempo's measurements in each layout, the loss that each rank finds with masks, and that which it
    finds alone."""
    prepare()
    found: dict[str, Any] = {}
    for name, (sizes, settings) in layouts.items():
        initialize(sizes)
        split: dict[str, Any] = {key: sizes[key] for key in OF_CONFIG if key in sizes}
        if "pipeline_model_parallel_size" in sizes:
            split |= {"pipeline_dtype": torch.float32, "batch_p2p_sync": False}
        settings = {**settings, **split, "sequence_parallel": sizes.get("tensor_model_parallel_size", 1) > 1}
        repeats = (REPEAT,) if "all-to-all" in name else ()
        kind = "grouped" if "grouped" in name else "sequential"
        found[name] = {
            "measured": [measure(settings, each, kind) for each in (TempoConfig.off(), ACTIVATION, *repeats)],
            "dropped": find_dropped_loss(settings),
        }
        parallel_state.destroy_model_parallel()
    initialize({})
    for name, (_, settings) in layouts.items():
        found[name]["alone"] = find_dropped_loss(settings)
    return found


def initialize(sizes: dict[str, int]) -> None:
    use_cpu()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1234)


def find_dropped_loss(settings: dict[str, Any]) -> float:
    """Of two samples with dropout."""
    model = build(config_of(dropout=0.1, **settings), TempoConfig(activation="recompute", norm="inplace"), "sequential")
    fill(model)
    return step(model, (0,), gives_mask=False)


def fill(model: GPTModel) -> None:
    """Weights that do not depend on the layout: parts of matrices, each a function of its name in the whole model."""
    first_expert = parallel_state.get_expert_model_parallel_rank() * (
        model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    )
    for name, parameter in model.named_parameters():
        name = name_globally(model, name)
        stem, is_expert, rest = name.partition(".local_experts.")
        index, _, rest = rest.partition(".")
        name = f"{stem} {int(index) + first_expert} {rest}" if is_expert else name
        if parameter.dim() < 2:
            continue
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        if is_expert:
            size = parallel_state.get_expert_tensor_parallel_world_size()
            rank = parallel_state.get_expert_tensor_parallel_rank()
        shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
        if dim >= 0 and getattr(parameter, "tensor_model_parallel", False):
            shape[dim] *= size
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.empty(shape).normal_(std=0.1, generator=generator)
        if whole.shape != parameter.shape:
            whole = whole.chunk(size, dim)[rank]
        with torch.no_grad():
            parameter.copy_(whole)


def compare_all() -> dict[str, Any]:
    """Stock's and Tempo's measurements of each case, in one process."""
    prepare()
    moe_utils.HAVE_TE, moe_utils.fused_permute, moe_utils.fused_unpermute = True, permute_in_one, unpermute_in_one
    # Of the other dispatcher, which the configuration looks for too.
    moe_utils.fused_permute_with_probs = moe_utils.fused_sort_chunks_by_index = permute_in_one
    moe_utils.fused_sort_chunks_by_index_with_probs = permute_in_one
    return {
        name: [measure(case.settings, each, case.kind) for each in (TempoConfig.off(), case.tempo)]
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def measured():
    """Of one rank: case -> what stock and Tempo measure."""
    (found,) = run_megatron_ranks(compare_all, 1, 1)
    return found


@pytest.fixture(scope="module")
def of_layouts(request):
    """Layout -> what each of its two or four ranks finds."""
    is_exhaustive = request.config.getoption("--exhaustive")
    sizes: dict[int, dict] = {}
    for name, layout in (LAYOUTS if is_exhaustive else SAMPLE).items():
        sizes.setdefault(4 if "EP 2" in name and "PP 2" in name else 2, {})[name] = layout
    found = {}
    for size, layouts in sizes.items():
        ranks = run_ranks(compare_layouts, size, layouts)
        found |= {name: [rank[name] for rank in ranks] for name in layouts}
    return found


@pytest.mark.parametrize("case", CASES)
def test_experts_that_keep_less_equal_stock(measured, case):
    stock, tempo = measured[case]
    if "norms" in case:  # which are Tempo's
        return assert_equal_to_stock(tempo["found"], stock["found"])
    assert tempo["found"][0] == stock["found"][0]
    assert tempo["found"][1].keys() == stock["found"][1].keys()
    assert all(torch.equal(tempo["found"][1][name], grad) for name, grad in stock["found"][1].items())


# Two layers of 32 tokens, 16 elements of an expert's activation, 24 of the shared experts'; float32. The router keeps
# logits instead of the auxiliary loss's scores, which are as many, and of each choice no place (int64) and probability.
KEPT = {
    "fused swiglu, top 8 of 16, shared experts": 2 * 32 * ((8 * 16 + 24) * 4 + 8 * 12),
    "grouped: fused swiglu, shared experts": 2 * 32 * ((2 * 16 + 24) * 4 + 2 * 12),
    # Each token's two copies of 32 elements.
    "permuted: dropped and padded": 2 * 32 * 2 * ((16 + 32) * 4 + 12),
    # Two bytes each; stock keeps silu(gate), that times up, that times the probability, and a fourth. Scores are
    # float32, logits are not.
    "permuted: one kernel": 2 * 32 * (2 * (4 * 16 + 32) * 2 + 2 * 12 + 4 * 2),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_the_linears_read_is_not_kept(measured, case):
    stock, tempo = measured[case]
    assert stock["kept"] - tempo["kept"] == KEPT[case]


def test_between_projection_and_attention_the_projections_output_alone_is_kept(measured):
    _, tempo = measured["norms of queries and keys"]
    # Of 32 tokens: q, k and v have 64 elements, the output 32, logsumexp one for each head of q; norms of q and k
    # keep no statistics. Two layers, float32.
    assert tempo["kept"] == 2 * 32 * (64 + 32 + 4) * 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_sample(LAYOUTS, SAMPLE))
def test_layouts_equal_stock_of_the_same_layout_and_draw_the_masks_of_one_rank(of_layouts, layout):
    ranks = of_layouts[layout]
    for rank in ranks:
        stock, *others = (each["found"] for each in rank["measured"])
        for tempo in others:
            assert_equal_to_stock(tempo, stock)
    # The first half of a pipeline's ranks has no loss.
    for rank in ranks[len(ranks) // 2 :] if "PP" in layout else ranks:
        assert rank["dropped"] == pytest.approx(rank["alone"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["EP 2, all-to-all", "EP 2, all-to-all, a rank without tokens"])
def test_tokens_that_are_sent_again_are_not_kept(of_layouts, layout):
    saved = [kept["kept"] - repeated["kept"] for _, kept, repeated in (rank["measured"] for rank in of_layouts[layout])]
    # Of two layers of 32 elements, float32: on each of two ranks the norm's output of 32 tokens, which is dropped too,
    # and of each token two copies, wherever they are.
    assert sum(saved) == 2 * 2 * 32 * (1 + 2) * 32 * 4
    assert "without" not in layout or saved[1] == 2 * 32 * 32 * 4


def plain_config(**settings):
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, **settings}
    return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **experts)


def test_what_experts_cannot_have_is_refused():
    with pytest.raises(
        ValueError, match='probabilities, which may be 0, .* set tempo.activation to "recompute" or "off"'
    ):
        choose(plain_config(), TempoConfig(activation="inplace"))
    assert choose(plain_config(), TempoConfig()).config.activation == "recompute"
    with pytest.raises(ValueError, match='expert_model_parallel_size is 2, .* set tempo.moe_permute to "off"'):
        choose(plain_config(expert_model_parallel_size=2), TempoConfig(moe_permute="recompute"))
    repeat = TempoConfig(moe_permute="repeat")
    for settings, why in (
        ({}, "all experts are on one rank"),
        ({"expert_model_parallel_size": 2}, "moe_token_dispatcher_type is allgather, and Tempo repeats alltoall only"),
        (
            {**ALL_TO_ALL, **SHARED, **EP_2, "moe_shared_expert_overlap": True},
            "moe_shared_expert_overlap is on, which changes the order of backward",
        ),
    ):
        with pytest.raises(ValueError, match=f"{why}.*; set tempo.moe_permute to "):
            choose(plain_config(**settings), repeat)
    with pytest.raises(ValueError, match='the model has no experts .* set tempo.moe_permute to "off"'):
        choose(plain_config(num_moe_experts=None, moe_ffn_hidden_size=None), TempoConfig(moe_permute="recompute"))
