"""Mixtures of experts with Tempo and without, on CPU ranks: losses, gradients and kept bytes of the same model."""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import megatron_cpu
import torch
from gpt import SEQ_LENGTH, build_gpt, gpt_config, gradients, losses
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempoize
from tempo_megatron.cpu import use_cpu
from tempo_megatron.memory.tape.scopes import record_saved
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
ACTIVATION = TempoConfig(activation="recompute", attention="off", dropout="off", norm="off", loss="off")
CASES: dict[str, dict[str, Any]] = {
    "swiglu, top 2, auxiliary losses": {**SWIGLU, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
    "fused swiglu, top 8 of 16, shared experts": {
        **{**FUSED, **SHARED, "moe_shared_expert_gate": True},
        **{"num_moe_experts": 16, "moe_router_topk": 8},
    },
    "geglu": {"activation_func": F.gelu, "gated_linear_unit": True, "add_bias_linear": False},
    "clamped quick geglu": {**CLAMPED, "bias_activation_fusion": True},
    "clamped quick geglu, not fused, and a dense layer": {**CLAMPED, "moe_layer_freq": [0, 1]},
    "squared relu, a dense layer, one expert": {**SQUARED, **TOP_1, "moe_layer_freq": [0, 1], "num_moe_experts": 1},
    "probabilities on the input": {**SWIGLU, **TOP_1, "moe_apply_probs_on_input": True},
    "tokens dropped": {**SWIGLU, **CAPACITY},
    "tokens dropped and padded": {**FUSED, **CAPACITY, "moe_pad_expert_input_to_capacity": True},
    "the layer recomputed": {**SWIGLU, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
# Stock's SequentialMLP with biases writes to a view in place, and fails.
GROUPED = {
    "fused swiglu, shared experts": {**FUSED, **SHARED},
    "geglu with biases": {"activation_func": F.gelu, "gated_linear_unit": True},
    "probabilities on the input": CASES["probabilities on the input"],
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
    number = len(first_samples)
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        found = []
        for first_sample in first_samples:
            loss = losses(model, first_sample, 2, gives_mask=gives_mask).float().mean()
            (loss / number).backward()
            found.append(loss.item())
        return sum(found) / number

    def run_one(samples: Iterator[int], _: Any) -> Any:
        out = losses(model, next(samples), 2, gives_mask=gives_mask)
        return out, lambda out: (out.mean(), {"loss": out.mean().item()})

    reduced = get_forward_backward_func()(
        forward_step_func=run_one,
        data_iterator=iter(first_samples),
        model=model,
        num_microbatches=number,
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return sum(each["loss"] for each in reduced) / number


def measure(
    settings: dict[str, Any], tempo_config: TempoConfig, kind: str = "sequential", counted: str = ".mlp"
) -> dict[str, Any]:
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
    return {"found": found, "kept": sum(each.num_bytes for each in saved if counted in each.operation)}


HALF = {"bf16": True, "params_dtype": torch.bfloat16}
PERMUTE = dataclasses.replace(ACTIVATION, moe_permute="recompute")
REPEAT = dataclasses.replace(ACTIVATION, moe_permute="repeat", norm="recompute")
PERMUTED: dict[str, tuple[dict[str, Any], TempoConfig, str]] = {
    "gathered, experts of stock": (SWIGLU, dataclasses.replace(PERMUTE, activation="off"), "sequential"),
    "all-to-all, norms recomputed": (
        {**FUSED, **ALL_TO_ALL, **SHARED},
        dataclasses.replace(PERMUTE, norm="recompute"),
        "grouped",
    ),
    "dropped and padded": (CASES["tokens dropped and padded"], PERMUTE, "sequential"),
    "probabilities on the input": (CASES["probabilities on the input"], PERMUTE, "grouped"),
    "one kernel": ({**SWIGLU, **HALF, "moe_permute_fusion": True}, PERMUTE, "grouped"),
}


# Stock's attention is written as such a layer's of Qwen3; everything of Tempo's that recomputes.
QWEN = {**FUSED, **ALL_TO_ALL, "qk_layernorm": True, "num_query_groups": 2}
RECOMPUTED = TempoConfig(activation="recompute", norm="recompute", moe_permute="recompute")


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
    "EP 2, all-to-all, dropped and padded": (EP_2, CASES["tokens dropped and padded"]),
    "EP 2, all-to-all, a rank without tokens": (EP_2, ONE_SIDED),
    "PP 2, grouped, top 8": (PP_2, {**FUSED, "num_moe_experts": 16, "moe_router_topk": 8}),
    "TP 2, SP, experts split": (SPLIT, SQUARED),
    "TP 2, SP, EP 2, all-to-all": (TP_2_EP_2, {**SQUARED, **SHARED, **ALL_TO_ALL}),
}
LAYOUTS = {
    **SAMPLE,
    "EP 2": (EP_2, {**SWIGLU, **SHARED}),
    "EP 2, all-to-all, recomputed": (EP_2, {**CASES["the layer recomputed"], **ALL_TO_ALL}),
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
    # The last layout's, which a step without a schedule leaves in another shape than a schedule expects.
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


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
    first_layer = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        name = re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) + first_layer), name)
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
    found: dict[str, Any] = {}
    for name, settings in CASES.items():
        found[name] = [measure(settings, each) for each in (TempoConfig.off(), ACTIVATION)]
    for name, settings in GROUPED.items():
        found[f"grouped: {name}"] = [measure(settings, each, "grouped") for each in (TempoConfig.off(), ACTIVATION)]
    moe_utils.HAVE_TE, moe_utils.fused_permute, moe_utils.fused_unpermute = True, permute_in_one, unpermute_in_one
    # Of the other dispatcher, which the configuration looks for too.
    moe_utils.fused_permute_with_probs = moe_utils.fused_sort_chunks_by_index = permute_in_one
    moe_utils.fused_sort_chunks_by_index_with_probs = permute_in_one
    both = TempoConfig.off(), RECOMPUTED
    found["norms of queries and keys"] = [measure(QWEN, each, "grouped", ".self_attention") for each in both]
    for name, (settings, tempo_config, kind) in PERMUTED.items():
        found[f"permuted: {name}"] = [measure(settings, each, kind) for each in (TempoConfig.off(), tempo_config)]
    return found
