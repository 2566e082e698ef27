"""Run: what is trained and how, as the estimate, the planner and the report after out-of-memory take it.

Four readers make one: `tempo_megatron.training.model` reads the trainer's RunConfig,
`tempo_megatron.megatron_lm.run_reader` a run of Megatron-LM, `tempo_megatron.memory.megatron.read_command` the
command that would start one, and `tempo_megatron.memory.commands.requested_run` the arguments of our own commands.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from tempo_megatron.memory.plan.gpu import H100, Chip
from tempo_megatron.memory.refusals import MEGATRONS, list_refusals, refuse
from tempo_megatron.models.layout import Layout, check_layout, pad_vocab_size
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.settings.config import TempoConfig

OPTIMIZERS = ("none", "megatron", "deepspeed")
BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's "reduce_bucket_size" where nothing is said; without ZeRO it reduces as many gradients at once."""
_GATHERED_ELEMENTS = 1_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronFsdp:
    """Megatron-FSDP that shards weights, gradients and optimizer states; sizes are bytes of a parameter."""

    main_bytes: int | None
    """Of its main copy; None has none."""
    gradient_bytes: int | None = None
    """Of its accumulated gradient; None is the weight's own, or 2 of a weight in float8."""
    communicated_bytes: int | None = None
    """Of a gradient that is not reduced yet; None is `gradient_bytes`."""
    unit_elements: int = 1_000_000_000
    """How many gradients may wait to be reduced; half as many weights are gathered ahead of their layer
    (--suggested-communication-unit-size)."""
    keeps_outer_weights: bool = True
    """Whether weights outside the layers stay gathered between steps, as since 378d81fbd3 of Megatron-LM (May 2026)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Whose optimizer makes the step, and how it divides gradients and states.

    Raises ValueError for a kind or a stage that does not exist.
    """

    kind: str = "megatron"
    """One of OPTIMIZERS."""
    distributed: bool = True
    """Megatron's distributed optimizer."""
    gradient_bytes: int | None = None
    """Of one gradient in Megatron's buffers; None is 2 in float16 and 4 else."""
    state_bytes: tuple[int, int, int] | None = None
    """Of one parameter's main copy and Adam's two moments with Megatron's --use-precision-aware-optimizer, which reads
    gradients as they are; None is float32 for all, and no copy of float32 weights."""
    muon: str | None = None
    """How Muon's states lie over ranks: "whole" on each, "dealt" out parameter by parameter, or "laid out" in buffers;
    see `memory.rank.standing`. None is Adam."""
    fsdp: MegatronFsdp | None = None
    """None shards no weights; else all above but `kind` is the default."""
    overlaps_reduction: bool = False
    """Whether gradients are reduced while backward runs (--overlap-grad-reduce), and so divided into buckets."""
    bucket_elements: int | None = None
    """After how many such a bucket ends (--ddp-bucket-size); None is 40 million, or a million for each rank."""
    num_buckets: int | None = None
    """How many buckets there are to be (--ddp-num-buckets), in place of that."""
    instances: int = 1
    """Of the distributed optimizer: groups of data-parallel ranks that each have all of its states between them."""
    zero_stage: int = 1
    """DeepSpeed's."""
    reduce_bucket_elements: int = BUCKET_ELEMENTS
    overlaps: bool = False
    """DeepSpeed's "overlap_comm"."""
    max_gathered_elements: int = _GATHERED_ELEMENTS
    """DeepSpeed's "stage3_max_live_parameters"."""
    accumulates_in_float32: bool = False
    """DeepSpeed's "grad_accum_dtype" of fp32."""
    foreach: bool = False
    """Whether Adam is torch's over lists of tensors, which makes as many square roots; else it is a fused one."""
    offloads: bool = False
    """Whether DeepSpeed keeps the optimizer's states off the device."""
    offloads_weights: bool = False
    """Whether ZeRO 3 keeps the weights there too, of which it copies those that are needed ("offload_param")."""

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            raise ValueError(f"the optimizer is {self.kind!r}; expected one of {', '.join(OPTIMIZERS)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO's stage is {self.zero_stage!r}; expected 0, 1, 2 or 3")

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any]) -> OptimizerSettings:
        """What a DeepSpeed JSON says; "auto" and what is missing are DeepSpeed's defaults, stage 0 among them."""
        zero = config.get("zero_optimization", {})

        def read(name: str, default: Any) -> Any:
            value = zero.get(name, default)
            return default if value == "auto" else value

        stage = read("stage", 0)
        adam = (config.get("optimizer") or {}).get("params", {})
        return cls(
            kind="deepspeed",
            zero_stage=stage,
            reduce_bucket_elements=int(read("reduce_bucket_size", BUCKET_ELEMENTS)),
            overlaps=bool(read("overlap_comm", stage == 3)),
            max_gathered_elements=int(read("stage3_max_live_parameters", _GATHERED_ELEMENTS)),
            accumulates_in_float32=(config.get("data_types") or {}).get("grad_accum_dtype") == "fp32",
            foreach=bool(adam.get("torch_adam")) and adam.get("foreach") is not False,
            offloads=(read("offload_optimizer", None) or {}).get("device", "none") != "none",
            offloads_weights=(read("offload_param", None) or {}).get("device", "none") != "none",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Layers that are each a Mamba layer, an attention, an MLP or a mixture of experts, as Megatron's HybridModel has.

    Raises ValueError for another kind.
    """

    pattern: str
    """A letter for each layer: M, *, - or E."""
    mtp_pattern: str = ""
    """Of each layer of multi-token prediction."""
    state_dim: int = 128
    head_dim: int = 64
    num_groups: int = 8
    num_heads: int | None = None
    """Of a Mamba layer; None is as many as make twice the hidden size."""

    def __post_init__(self) -> None:
        if unknown := sorted({*self.pattern} - {*"M*-E"}):
            raise ValueError(
                f"the hybrid layer pattern has {' '.join(unknown)}, which the estimate does not know; it knows M "
                "(Mamba), * (attention), - (MLP) and E (experts)"
            )
        if self.mtp_pattern not in ("", "*-", "*E"):
            raise ValueError(
                f"the hybrid layer pattern has multi-token prediction of {self.mtp_pattern}, and the estimate knows "
                "*- and *E there"
            )

    def find_num_heads(self, hidden_size: int) -> int:
        return self.num_heads or 2 * hidden_size // self.head_dim

    def divides(self, hidden_size: int, tensor_parallel: int, context_parallel: int) -> bool:
        """Whether Mamba's heads divide over ranks (ssm/mamba_mixer.py and ssm/mamba_context_parallel.py of
        megatron-core 0.16.1)."""
        heads, groups = self.find_num_heads(hidden_size), self.num_groups
        of_rank = max(1, groups // tensor_parallel)
        fits = not (heads % groups or groups % tensor_parallel or heads % (tensor_parallel * context_parallel))
        return "M" not in self.pattern or (fits and 0 in (of_rank % context_parallel, context_parallel % of_rank))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A model, how it lies over devices, and what a step of it is."""

    model: ModelShape
    tempo: TempoConfig
    """Perhaps with "auto" and with values of single layers; `TempoConfig.off()` is stock."""
    hybrid: Hybrid | None = None
    optimizer: OptimizerSettings = OptimizerSettings()
    layout: Layout = dataclasses.field(default_factory=Layout)
    micro_batch_group: int | None = None
    """Megatron's --microbatch-group-size-per-virtual-pipeline-stage; None is the number of stages."""
    mtp_num_layers: int = 0
    """Layers of multi-token prediction, behind the last layer."""
    mtp_precedes_head: bool = False
    """Whether they are in the pipeline's chunk before the loss head's, not beside it."""
    mtp_repeats_layer: bool = False
    """Whether they are one layer."""
    micro_batch_size: int = 1
    num_micro_batches: int | None = None
    """Of a step, per data-parallel rank; None is enough to fill the pipeline twice."""
    dtype: torch.dtype = torch.bfloat16
    recompute: tuple[str, ...] = ()
    """Megatron's recomputation: nothing, ("full",), or any of "core_attn" and "mlp", with experts of "moe",
    "shared_experts" and "moe_act", with latent attention of "mla_up_proj", and with either of "layernorm": other norms
    are one with the linear behind them, and are recomputed by none."""
    recompute_num_layers: int | None = None
    """Of "full": the first so many layers of every chunk (--recompute-method block); None is all of them."""
    stock: str = "local"
    """Whose modules stock ones are: "local" (Megatron's, on a GPU), "transformer_engine", or "cpu"."""
    stock_attention: str = "fused"
    """Transformer Engine's: "fused" (cuDNN), "flash" (FlashAttention 2) or "unfused"."""
    fuses_cross_entropy: bool = False
    """Megatron's --cross-entropy-loss-fusion of its "native" kind. That of Transformer Engine makes what the unfused
    one makes (transformer_engine/pytorch/triton/cross_entropy.py at d0067d0d: a float32 gradient)."""
    fuses_activation: bool | None = None
    """Whether a gated activation, or squared ReLU in experts, is Megatron's one operation, which keeps its input alone;
    None of a gated one where the modules are Transformer Engine's."""
    moe_grouped_gemm: bool = False
    """Whether the experts of a rank run in one grouped matrix product."""
    moe_permute_fusion: bool = False
    """Whether a kernel brings the tokens into the experts' order, and back."""
    moe_shared_expert_gate: bool = False
    """Whether a gate weights the shared experts' output."""
    moe_imbalance: float | None = None
    """Tokens that the fullest rank's experts get, over an equal share; None is what `memory.routing` expects."""
    learns_positions: bool = False
    """Whether a model with latent attention has learned positions, too (Megatron's --position-embedding-type)."""
    fuses_latent_rope: bool = False
    """Whether a kernel rotates the queries and keys of latent attention."""
    masked_softmax_fusion: bool = True
    """Whether unfused attention on a GPU has Megatron's softmax kernel, for the 16-bit scores that the kernel takes."""
    gpu: str | None = None
    """"a100", "h100" or "gb200", as whose libraries workspaces are counted; None counts none."""
    chip: Chip = H100
    """The GPU's, by which attention's kernels choose how many programs share a head."""
    deterministic: bool = False
    """Megatron's --deterministic-mode, with the CUBLAS_WORKSPACE_CONFIG=:4096:8 that torch asks for then."""
    cublas_workspace_bytes: int | None = None
    """Of each of torch's handles, as CUBLAS_WORKSPACE_CONFIG says; None is the default of the GPU and the mode."""
    expandable_segments: bool = False
    """Whether torch's allocator has them (PYTORCH_ALLOC_CONF=expandable_segments:True)."""
    fuses_gradient_accumulation: bool = False
    """Megatron's fusion of that name, without --no-gradient-accumulation-fusion."""
    overlaps_tensor_parallel: bool = False
    """Megatron's --tp-comm-overlap, of Transformer Engine's modules."""
    float8: str | None = None
    """Megatron's --fp8-recipe for the layers' products, "tensorwise", "delayed", "blockwise" or "mxfp8"; None is
    without --fp8-format."""
    float8_layers: tuple[bool, ...] | None = None
    """Which layers do so; None is all (--first-last-layers-bf16)."""
    float8_weights: bool = False
    """Whether a layer's weights are in float8 only (--fp8-param-gather)."""
    deferred_head_gradients: int | None = None
    """With Megatron's --defer-embedding-wgrad-compute: of how many micro batches the output layer's gradient waits for
    the step's end (--wgrad-deferral-limit); 0 is all of them."""
    data_has_masks: bool = False
    """Whether a GPT's micro batch brings an attention mask, as without --no-create-attention-mask-in-dataloader."""

    @property
    def tokens_of_sample(self) -> int:
        """That a rank has."""
        return self.model.seq_length // self.layout.cp

    @property
    def num_tokens(self) -> int:
        """Of a micro batch, that a rank has outside of sequence parallelism."""
        return self.micro_batch_size * self.model.seq_length // self.layout.cp

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, of a model with a vocab_size."""
        assert self.model.vocab_size is not None
        return pad_vocab_size(self.model.vocab_size, self.model.make_vocab_size_divisible_by, self.layout.tp)

    @property
    def built_model(self) -> ModelShape:
        """The model whose modules are built before what stands for latent attention takes its place in them."""
        found = self.model.leave_latent_attention()
        if self.learns_positions:
            return dataclasses.replace(found, position_embedding_type="learned_absolute")
        return found

    @property
    def router_dtype(self) -> torch.dtype | None:
        """Of a mixture's scores; None is the layers' dtype."""
        return {None: None, "fp32": torch.float32, "fp64": torch.float64}[self.model.moe_router_dtype]

    @property
    def num_local_experts(self) -> int:
        """Experts on a rank, of each layer that has some; 0 of a model without."""
        return (self.model.num_experts or 0) // self.layout.ep

    @property
    def assumes_imbalance(self) -> bool:
        """Whether what a rank's experts get depends on the tokens, which nobody has."""
        return self.layout.ep > 1 and not self.model.moe_pad_expert_input_to_capacity

    def count_routed(self, num_tokens: int) -> int:
        """Rows that `num_tokens` tokens of a rank are for experts, one for each expert of each token; padded, the
        capacity of every expert, or all tokens (core/transformer/moe/moe_utils.py: apply_router_token_dropping)."""
        model, rows = self.model, num_tokens * self.model.moe_router_topk
        if not model.moe_pad_expert_input_to_capacity or model.num_experts is None:
            return rows
        capacity = math.ceil(rows / model.num_experts * (model.moe_expert_capacity_factor or 1.0))
        return model.num_experts * min(capacity, num_tokens)

    def count_sent(self, num_tokens: int) -> int:
        """Those of them that are not dropped, where every expert of a capacity under its equal share is full."""
        routed = self.count_routed(num_tokens)
        if self.model.moe_pad_expert_input_to_capacity:
            return routed
        return round(routed * min(1.0, self.model.moe_expert_capacity_factor or 1.0))

    def find_recomputed(self, layer: int) -> tuple[str, ...]:
        """What Megatron recomputes of a layer, counted from 0 in its chunk of a stage."""
        number = self.recompute_num_layers
        return () if number is not None and "full" in self.recompute and layer >= number else self.recompute

    def list_chunks(self, stage: int) -> list[range]:
        """The layers of each chunk of a stage, counted from 0 over the whole model; one chunk without interleaving.

        Of a run that `check` lets through.
        """
        stages = self.layout.pp
        sizes = self.layout.chunks or (self.model.num_layers // stages,) * stages
        firsts = [0, *itertools.accumulate(sizes)]
        return [range(firsts[place], firsts[place + 1]) for place in range(stage, len(sizes), stages)]

    def list_ends(self, stage: int) -> list[dict[str, bool]]:
        """What each of the chunks has beside layers, in the words of `memory.simulated.chunk.simulate_chunk`."""
        number = len(self.layout.chunks or range(self.layout.pp))
        last, predicting = number - 1, number - 1 - self.mtp_precedes_head
        return [
            {"pre_process": place == 0, "post_process": place == last, "predicts": place == predicting}
            for place in range(stage, number, self.layout.pp)
        ]

    def check(self, names: Mapping[str, str] = MEGATRONS) -> None:
        """Raises ValueError where the model cannot lie over the devices so, or the estimate does not know it so.

        names: what the user calls the options, `memory.refusals.MEGATRONS` or `OURS`.
        """
        check_layout(self.model, self.layout, option=names["tp"])
        refuse(list_refusals(self, names))


def cut_layers(
    num_layers: int,
    stages: int,
    *,
    per_chunk: int | None = None,
    first: int | None = None,
    last: int | None = None,
    names: Mapping[str, str] = MEGATRONS,
) -> tuple[int, ...] | None:
    """How many layers each chunk of a pipeline has by Megatron's options; None where they do not say it.

    `per_chunk` is --num-layers-per-virtual-pipeline-stage, `first` and `last` are --decoder-first-pipeline-num-layers
    and --decoder-last-pipeline-num-layers, `names` as of `Run.check`. Raises ValueError where layers do not divide so.
    """
    ends = {name: number for name, number in (("first", first), ("last", last)) if number is not None}
    options = " and ".join(f"--decoder-{name}-pipeline-num-layers {number}" for name, number in ends.items())
    rest, others = num_layers - sum(ends.values()), stages - len(ends)
    if ends and stages == 1:
        raise ValueError(f"{options} needs at least 2 stages, and there is 1; leave it out, or raise {names['pp']}")
    if ends and (rest < others or (rest % others if others else rest)):
        raise ValueError(
            f"{options} leaves {rest} of {num_layers} layers for {others} other stages; expected "
            f"{'a positive multiple of them' if others else 'none'}; change one of them"
        )
    if per_chunk is None and not ends:
        return None
    if rest % max(1, others):
        raise ValueError(f"{num_layers} layers are not a multiple of {names['pp']} {stages}; change one of them")
    found = tuple(size for size in (first, *[rest // max(1, others)] * others, last) if size is not None)
    if per_chunk is None:
        return found
    if len({*found}) > 1:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage is {per_chunk} and stages have {min(found)} to {max(found)} "
            "layers; expected stages of equally many; leave one out"
        )
    if stages == 1 or found[0] % per_chunk:
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage is {per_chunk}; expected a divisor of the {found[0]} layers of "
            "one of at least 2 stages; change it or leave it out"
        )
    return (per_chunk,) * (num_layers // per_chunk)


def read_recomputation(config: Any, *, model: ModelShape, fuses_norms: bool = False) -> dict[str, Any]:
    """The fields of a Run for the fields `recompute_*` of a TransformerConfig, or of what has the same;
    `fuses_norms` says whether each norm before attention and MLP is one module with the linear behind it. Raises
    ValueError for what the estimate does not know."""
    if config.recompute_granularity is None:
        return {}
    if config.recompute_granularity == "selective":
        taken, known = tuple(config.recompute_modules or ("core_attn",)), ["core_attn", "mlp"]
        known += ["moe", "shared_experts", "moe_act"] if model.num_experts is not None else []
        known += ["mla_up_proj"] if model.multi_latent_attention else []
        has_norms = len(known) > 2
        known += ["layernorm"] if has_norms or fuses_norms else []
        if unknown := sorted({*taken} - {*known}):
            raise ValueError(
                f"--recompute-modules is {' '.join(unknown)}, and the estimate knows {', '.join(known)} only"
            )
        if not has_norms:
            # No norm is a module of its own, and Megatron recomputes none (core/transformer/transformer_layer.py:384).
            taken = tuple(name for name in taken if name != "layernorm")
        return {"recompute": taken}
    method, num_layers = config.recompute_method, config.recompute_num_layers
    if method == "uniform" and num_layers != 1:
        raise ValueError(
            f"--recompute-method uniform recomputes {num_layers} layers together, and the estimate knows each layer by "
            "itself: --recompute-num-layers 1, or --recompute-method block"
        )
    return {"recompute": ("full",), "recompute_num_layers": num_layers if method == "block" else None}
