"""Lists the options of Megatron-LM's training scripts: those that are read, and those that memory does not depend on.

Names, kinds and defaults are those of Megatron-LM 0.19, and the names of 0.16 to main beside them. A field is called as
TransformerConfig calls it. What an option needs, excludes, or gives the run that the estimate does not know stands
with it; `derived` has what several say together.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tempo_megatron.settings.arguments import add_ledger_argument, add_tempo_arguments
from tempo_megatron.words.argument_types import parse_window

VERSION = "0.19"
"""Whose defaults these are. Up to 0.16 --data-parallel-sharding-strategy was no_shard, and NullTokenizer added a token
to --vocab-size; nothing else that memory depends on has had another default since."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option with a value, or a switch where `kind` is bool, which gives the opposite of its default."""

    kind: Callable[[str], Any] = int
    default: Any = None
    field: str | None = None
    """Where the value goes; None is the option's name."""

    choices: tuple[str, ...] | None = None
    nargs: str | int | None = None
    is_size: bool = False
    """Whether it is at least 1."""

    gives: str | None = None
    """What it gives a run that the estimate does not know, or that of a built run does not."""

    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    """Fields that are given beside it, or are not."""


def _size(default: int | None = None, **more: Any) -> Option:
    return Option(default=default, is_size=True, **more)


def _switch(field: str | None = None, default: bool = False, **more: Any) -> Option:
    return Option(bool, default, field, **more)


def _words(default: str | None, *choices: str, **more: Any) -> Option:
    return Option(str, default, choices=choices or None, **more)


def _each(option: Option, names: str) -> dict[str, Option]:
    return dict.fromkeys(names.split(), option)


_FLOAT_TYPES = ("fp32", "bf16", "fp16")
_KINDS: Any = {"field": "heterogeneous_block_specs", "gives": "layers of several kinds"}
_GRAPHS = "CUDA graphs, whose pools keep the memory of each layer"

CUTS = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    "pipeline_model_parallel_layout",
)
"""Fields of what cuts the layers of a pipeline's stage into chunks."""

ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Of what counts as a layer there."""

READ: dict[str, Option] = {
    # Plain ones, by kind.
    **_each(
        _switch(),
        "group-query-attention use-rotary-position-embeddings swiglu add-qkv-bias qk-layernorm "
        "untie-embeddings-and-output-weights cross-entropy-loss-fusion deterministic-mode sequence-parallel "
        "tp-comm-overlap defer-embedding-wgrad-compute bf16 recompute-activations use-distributed-optimizer "
        "overlap-grad-reduce accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 first-last-layers-bf16 "
        "moe-shared-expert-gate moe-shared-expert-overlap moe-router-pre-softmax moe-router-enable-expert-bias "
        "moe-router-padding-for-quantization moe-router-force-load-balancing moe-grouped-gemm moe-permute-fusion "
        "moe-pad-expert-input-to-capacity moe-layer-recompute moe-apply-probs-on-input moe-paged-stash "
        "use-fused-weighted-squared-relu overlap-moe-expert-parallel-comm multi-latent-attention "
        "mtp-use-repeated-layer is-hybrid-model",
    ),
    **_each(
        _switch(default=True),
        "no-pad-vocab-size disable-pad-vocab-size no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion "
        "no-position-embedding no-gradient-accumulation-fusion no-create-attention-mask-in-dataloader "
        "no-use-layer-wise-param-layout",
    ),
    **_each(
        _size(),
        "num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels seq-length decoder-seq-length "
        "max-position-embeddings vocab-size padded-vocab-size num-layers-per-virtual-pipeline-stage micro-batch-size "
        "global-batch-size recompute-num-layers ddp-bucket-size suggested-communication-unit-size q-lora-rank "
        "mamba-num-heads",
    ),
    **_each(_size(1), "num-query-groups tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size"),
    "mamba-num-groups": _size(8),
    "kv-lora-rank": _size(32),
    **_each(_size(64), "qk-pos-emb-head-dim mamba-head-dim"),
    **_each(_size(128), "qk-head-dim v-head-dim mamba-state-dim make-vocab-size-divisible-by"),
    **_each(
        Option(),
        "decoder-num-layers moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-latent-size "
        "moe-router-num-groups moe-router-group-topk expert-tensor-parallel-size",
    ),
    **_each(Option(default=0), "vocab-extra-ids wgrad-deferral-limit"),
    **_each(Option(default=1), "num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 expert-model-parallel-size"),
    **_each(
        Option(float), "activation-func-clamp-value moe-z-loss-coeff moe-input-jitter-eps moe-expert-capacity-factor"
    ),
    **_each(Option(float, 0.1), "attention-dropout hidden-dropout"),
    **_each(_words(None), "vocab-file tokenizer-type tokenizer-model"),
    **_each(_words("auto", *_FLOAT_TYPES, "auto"), "megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype"),
    # The model.
    "encoder-num-layers": _size(excludes=("num_layers",)),
    "encoder-seq-length": Option(excludes=("seq_length",)),
    "position-embedding-type": _words(
        "learned_absolute", "learned_absolute", "rope", "yarn", "mrope", "relative", "none"
    ),
    "normalization": _words("LayerNorm", "LayerNorm", "RMSNorm"),
    "squared-relu": _switch(excludes=("swiglu",)),
    "quick-geglu": _switch(excludes=("swiglu", "squared_relu")),
    "openai-gelu": _switch(gives="OpenAI's GELU"),
    "disable-bias-linear": _switch("add_bias_linear", True),
    "qk-l2-norm": _switch(gives="an L2 norm of queries and keys"),
    **_each(_switch(gives="the largest logits of attention"), "qk-clip log-max-attention-logit"),
    "window-size": Option(parse_window),
    "window-attn-skip-freq": Option(gives="layers with and without a window"),
    "softmax-type": _words("vanilla", "vanilla", "off-by-one", "learnable"),
    "attention-output-gate": _switch(gives="gates on attention's output"),
    "experimental-attention-variant": _words(None, gives="an experimental attention"),
    "apply-residual-connection-post-layernorm": _switch(gives="a residual stream behind the norms"),
    "fp32-residual-connection": _switch(gives="a float32 residual stream"),
    "bert-no-binary-head": _switch("bert_binary_head", True),
    "heterogeneous-layers-config-path": _words(None, **_KINDS),
    "heterogeneous-layers-config-encoded-json": _words(None, **_KINDS),
    "spec": Option(str, nargs="*"),
    "yaml-cfg": _words(None, gives="a configuration in a file of its own"),
    "use-legacy-models": _switch(gives="models from before Megatron-core"),
    "freeze-all-layers": _switch(gives="frozen layers"),
    "perform-rl-step": _switch(gives="reinforcement learning"),
    "skip-train": _switch(gives="no training"),
    "sft": _switch(gives="sequences that are packed for fine-tuning"),
    "post-self-attn-layernorm": _switch(gives="a norm behind attention"),
    "post-mlp-layernorm": _switch(gives="a norm behind the MLP"),
    "linear-attention-type": _words(None, gives="linear attention"),
    "dsv4-mode": _switch(gives="an experimental attention"),
    "no-rope-freq": _words(None, gives="layers with and without rotary embeddings"),
    "rotary-percent": Option(float, 1.0),
    # Dropout and kernels.
    "transformer-impl": _words("transformer_engine", "local", "transformer_engine", "inference_optimized"),
    "attention-backend": _words("auto", "flash", "fused", "unfused", "local", "auto"),
    "no-rope-fusion": _switch("apply_rope_fusion", True),
    "use-te-activation-func": _switch(gives="Transformer Engine's activation"),
    "use-transformer-engine-op-fuser": _switch(gives="Transformer Engine's fused operations"),
    "use-grouped-gemm-for-dense-mlp": _switch(gives="an MLP through grouped matrix products"),
    "fused-residual-rmsnorm": _switch(gives="a norm that is fused with the residual stream"),
    "mlp-chunks-for-training": Option(default=1, gives="an MLP that runs in chunks"),
    "batch-invariant-mode": _switch(gives="batch-invariant kernels"),
    "use-kitchen-attention": _switch(gives="Kitchen's attention"),
    "cross-entropy-fusion-impl": _words("native", "native", "te", "linear"),
    "fp16-lm-cross-entropy": _switch(gives="a cross entropy in float16"),
    "cuda-graph-impl": _words("none", "none", "local", "transformer_engine", "full_iteration", gives=_GRAPHS),
    **_each(_switch("cuda_graph_impl_deprecated", gives=_GRAPHS), "enable-cuda-graph external-cuda-graph"),
    "logits-save-dir": _words(None, gives="logits that are saved"),
    "logits-load-dir": _words(None, gives="distillation"),
    # The layout.
    "num-virtual-stages-per-pipeline-rank": _size(excludes=("num_layers_per_virtual_pipeline_stage",)),
    "microbatch-group-size-per-virtual-pipeline-stage": Option(field="microbatch_group_size_per_vp_stage"),
    "decoder-first-pipeline-num-layers": Option(field="num_layers_in_first_pipeline_stage"),
    "decoder-last-pipeline-num-layers": Option(field="num_layers_in_last_pipeline_stage"),
    "pipeline-model-parallel-layout": _words(None, gives="a pipeline layout of its own", excludes=CUTS[:2]),
    "account-for-embedding-in-pipeline-split": _switch(gives="an embedding that counts as a layer of its stage"),
    "account-for-loss-in-pipeline-split": _switch(gives="a loss that counts as a layer of its stage"),
    "tensor-parallel-num-weight-shards": Option(gives="weights sharded beside tensor parallelism"),
    "delay-wgrad-compute": _switch(needs=("overlap_moe_expert_parallel_comm",)),
    "hybrid-context-parallel": _switch(gives="context parallelism"),
    # The step.
    "rampup-batch-size": Option(nargs=3),
    "step-batch-size-schedule": _words(None, excludes=("global_batch_size", "rampup_batch_size")),
    "fp16": _switch(excludes=("bf16",)),
    "recompute-granularity": _words(None, "full", "selective"),
    "recompute-method": _words(None, "uniform", "block"),
    "recompute-modules": Option(str, nargs="+"),
    "distribute-saved-activations": _switch(gives="saved activations that tensor-parallel ranks share"),
    "cpu-offloading-num-layers": Option(default=0, field="cpu_offloading", gives="activations on the host"),
    "fine-grained-activation-offloading": _switch(gives="activations on the host (tempo.offload is known)"),
    # Gradients and states.
    "optimizer": _words(
        *("adam", "adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
        gives="another optimizer than Adam",
    ),
    "muon-scalar-optimizer": _words("adam", "adam", "lion"),
    "num-distributed-optimizer-instances": _size(default=1, needs=("use_distributed_optimizer",)),
    "overlap-param-gather": _switch(needs=("use_distributed_optimizer", "overlap_grad_reduce")),
    "ddp-num-buckets": _size(excludes=("ddp_bucket_size",)),
    "ddp-param-name-patterns-for-fp32-local-accumulation": Option(
        str, (), nargs="+", gives="gradients of several dtypes"
    ),
    "ddp-reduce-scatter-with-fp32-accumulation": _switch(gives="gradients that are reduced through all-to-all"),
    "use-precision-aware-optimizer": _switch(needs=("use_distributed_optimizer",)),
    "main-grads-dtype": _words(
        *("fp32", "fp32", "bf16"),
        needs=("use_precision_aware_optimizer",),
        excludes=("accumulate_allreduce_grads_in_fp32",),
    ),
    "main-params-dtype": _words("fp32", "fp32", "fp16", needs=("use_precision_aware_optimizer",)),
    "exp-avg-dtype": _words("fp32", *_FLOAT_TYPES, "fp8", needs=("use_precision_aware_optimizer",)),
    "exp-avg-sq-dtype": _words("fp32", *_FLOAT_TYPES, "fp8", needs=("use_precision_aware_optimizer",)),
    **_each(_switch(gives="optimizer states on the host"), "optimizer-cpu-offload offload-optimizer-states"),
    "use-nccl-ub": _switch("nccl_ub", gives="buffers that NCCL registers"),
    "use-torch-fsdp2": _switch(gives="weights sharded by torch's FSDP (--use-megatron-fsdp is known)"),
    "use-megatron-fsdp": _switch(needs=("use_distributed_optimizer",)),
    "data-parallel-sharding-strategy": _words(
        "optim_grads_params", "no_shard", "optim", "optim_grads", "optim_grads_params"
    ),
    "outer-dp-sharding-strategy": _words("no_shard", "no_shard", "optim"),
    "megatron-fsdp-main-params-dtype": _words("fp32", *_FLOAT_TYPES, "auto"),
    "megatron-fsdp-version": Option(default=1, gives="another version of Megatron-FSDP"),
    "fsdp-double-buffer": _switch(gives="buffers of Megatron-FSDP that stay"),
    # Eight bits and fewer.
    "fp8-format": _words(None, "e4m3", "hybrid", field="fp8", gives="float8"),
    "fp8-recipe": _words("delayed", "tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "fp8-param-gather": _switch(needs=("fp8", "use_distributed_optimizer")),
    "fp8-output-proj": _switch(gives="an output layer in float8"),
    "keep-fp8-transpose-cache": _switch(gives="transposed weights in float8 that stay"),
    "fp4-format": _words(None, "e2m1", field="fp4", gives="float4"),
    "fp4-param-gather": _switch(gives="weights in float4"),
    "te-precision-config-file": _words(None, gives="precisions by a file"),
    # Experts.
    "num-experts": Option(field="num_moe_experts"),
    "moe-layer-freq": Option(str, "1"),
    "moe-router-topk": Option(default=2),
    "moe-router-load-balancing-type": Option(str, ("aux_loss",), nargs="+"),
    "moe-aux-loss-coeff": Option(float, (0.0,), nargs="+"),
    "moe-router-score-function": _words("softmax", "softmax", "sigmoid", "sqrtsoftplus"),
    "moe-router-dtype": _words(None, "fp32", "fp64"),
    "moe-router-padding-for-fp8": _switch("moe_router_padding_for_quantization"),
    "moe-token-dispatcher-type": _words("allgather", "allgather", "alltoall", "flex"),
    "mla-down-proj-fusion": _switch(gives="down projections that are one"),
    "rope-type": _words(None, "rope", "yarn"),
    # Further heads, and layers that are no transformer's.
    "mtp-num-layers": _size(gives="multi-token prediction"),
    "mtp-standalone": _switch(gives="multi-token prediction in a stage of its own"),
    "hybrid-layer-pattern": _words(None, excludes=(*CUTS, *ACCOUNTS)),
    "hybrid-override-pattern": _words(None, field="hybrid_layer_pattern"),
    "disable-mamba-mem-eff-path": _switch(default=True, gives="a scan that keeps what it could compute again"),
}
"""Option without its dashes -> what it takes."""

KNOWN_IN_COMMANDS = (*("mtp_num_layers", "pipeline_model_parallel_layout", "fp8", "window_attn_skip_freq"), *ACCOUNTS)
"""Of the fields that give a run something, those that the estimate of a command knows, and the plan of a built run
does not."""

UNKNOWN_IN_LAYERS = (
    *("heterogeneous_block_specs", "fp8", "fp4", "fp32_residual_connection", "attention_output_gate"),
    *("experimental_attention_variant", "window_attn_skip_freq"),
)
"""Of a TransformerConfig, what changes what a layer keeps, in ways that no Run can say."""

UNKNOWN_IN_RUNS = (
    *("mtp_num_layers", "cpu_offloading", "fine_grained_activation_offloading", "distribute_saved_activations"),
    *("pipeline_model_parallel_layout", *ACCOUNTS),
)
"""Likewise, what changes what a step holds beside its layers."""


# What memory does not depend on, whatever stands behind it, without no- and disable-: families by how their names
# begin, and single options.
_IGNORED_FAMILIES = """
adam- adlr- align- app-tag- async- biencoder- check- ckpt- clone- dataloader- decoupled- dino- dist-ckpt-
distributed-timeout- dsa- dsv4- embedding- error-injection- eval- exit- fault-injector- fim- flight-recorder- fp8-amax-
grpo- high-priority- ict- img- indexer- inference- init-method- inprocess- iter kitchen- langrl- linear- lion- load
log- logits- loss-scale lr- mamba- manual-gc mask- moe-enable- moe-flex-dispatcher- moe-hybridep- moe-ncclep-
moe-paged-stash- moe-routing-trace- moe-single-grouped- mscale muon- mup- nccl- non-persistent- null-tokenizer-
one-logger- override- persist pin-cpu- profile pytorch-profiler- qk-clip- relative-attention- replication reset-
retriever- rl- rotary-s save start- straggler- strict- symmetric tensorboard- test- tiktoken- timing- tokenizer-
tp-comm-b tp-comm-overlap- tp-comm-split- train- true-on-policy- use-checkpoint- vision- wandb- weight-decay yarn-
"""
_IGNORED = """
activation-func-clamp-shared-expert activation-offload-fraction allow-ambiguous-pad-tokens apply-layernorm-1p
apply-query-key-layer-scaling apply-wd-to-qk-layernorm attention-softmax-in-fp32 auto-detect-ckpt-format
barrier-with-level-1-timing bert-embedder-type bert-load beta-fast beta-slow bf16-reduced-precision-matmul
bias-dropout-fusion block-data-path cache-mla-latents calc-ft-timeouts calculate-per-token-loss chat-template
chunked-prefill classes-fraction clip-grad config-logger-dir cp-comm-type cpu-offloading-retain-pinned-cpu-buffers
create-all-gather-group cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps data-args-path data-cache-path
data-parallel-random-init data-path data-per-class-fraction data-sharding ddp-average-in-collective
ddp-pad-buckets-for-high-nccl-busbw decode-only-cuda-graphs decrease-batch-size-if-needed
delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks distrib-optim-fully-reshardable-mem-efficient
distributed-backend dump-param-to-param-group-map empty-unused-memory-level enable-chunked-prefill enable-experimental
enable-ft-package enable-full-sharding-in-hsdp enable-msc end-weight-decay eod-mask-loss
ep-overlap-early-attn-memory-release evidence-data-path expert-tensor-parallel-num-weight-shards fake-process-group
fallback-to-eager-attn fine-grained-offloading-max-inflight-offloads finetune flash-attention-version flash-decode
fp4-quantizer-factory fp4-recipe fp8-interval fp8-margin fp8-quantizer-factory fp8-wgrad freeze-e-score-correction-bias
fsdp-db-use-persist-buf-on-alloc-fail fsdp-manual-registration ft-num-warmup-iters full-validation gloo-process-groups
glu-linear-offset gpu-sniff-test-interval gradient-reduce-div-fusion head-lr-mult hierarchical-context-parallel-sizes
hysteresis init-model-with-meta-device initial-loss-scale initialization jit-fuser lazy-mpu-init legacy-tokenizer
local-rank logging-level low-memory-resume lr max-seqlen-per-dp-cp-rank max-tokens-to-oom
megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer memory-snapshot-path merge-file
mid-level-dataset-surplus min-loss-scale min-lr min-offloaded-tensor-size mlp-chunks-for-prefill mmap-bin-files
mock-data moe-activation-in-fp32 moe-combine-in-fp32 moe-deepep-num-sms moe-expert-rank-capacity-factor moe-extended-tp
moe-mlp-glu-interleave-size moe-pad-experts-for-cuda-graph-inference moe-per-layer-logging
moe-permute-fusion-into-hybridep moe-router-bias-update-rate moe-router-force-biased moe-router-freeze-gate
moe-router-fusion moe-router-quantile-balancing-ema moe-router-topk-scaling-factor
moe-shared-expert-glu-interleave-size moe-token-drop-policy moe-upcycling-granularity moe-use-legacy-grouped-gemm
moe-use-upcycling mrope-section msc mtp-detach-heads mtp-loss-scaling-factor multiple-validation-sets norm-epsilon
num-channels num-classes num-dataset-builder-threads num-speculative-tokens num-workers nvtx-ranges
object-storage-cache-path offload-modules one-logger onnx-safe optimizer-cuda-graph optimizer-offload-fraction
original-max-position-embeddings output-bert-embeddings overlap-cpu-optimizer-d2h-h2d
overlap-dispatch-backward-with-experts-wgrad overlap-p2p-communication overlap-p2p-communication-warmup-flush
overlap-param-gather-with-optimizer-step patch-dim per-dataset-sequences-path per-split-data-args-path
phase-transition-iterations pipeline-model-parallel-comm-backend pretrained-checkpoint query-in-block-prob
record-memory-history record-shapes refit-method rerun-mode result-rejected-tracker-filename
reuse-grad-buf-for-mxfp8-param-ag rope-scaling-factor rotary-base rotary-interleaved run-workload-inspector-server
sample-rate scatter-gather-tensors-in-pipeline seed sft-tokenizer-prompt-format sgd-momentum sharp-enabled-group
short-seq-prob split stream-ckpt-dequant swin-backbone-type te-rng-tracker titles-data-path
torch-fsdp2-no-reshard-after-forward trust-remote-code use-cpu-initialization use-dist-ckpt use-flash-attn
use-grouped-gemm-for-shared-expert use-legacy-static-engine use-mcore-models use-mp-args-from-checkpoint-args use-mup
use-one-sent-docs use-persistent-ckpt-worker use-pytorch-profiler use-ring-exchange-p2p use-rope-scaling
use-same-sampling-seed-across-dp-ranks use-sharp use-tokenizer-model-from-checkpoint-args
use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping valid-data-path validation-set-names verify-integrity
"""
GONE = {
    "batch-size": "--micro-batch-size",
    "model-parallel-size": "--tensor-model-parallel-size",
    "warmup": "--lr-warmup-fraction",
    "checkpoint-activations": "--recompute-granularity and --recompute-method",
    **dict.fromkeys(("hybrid-attention-ratio", "hybrid-mlp-ratio"), "--hybrid-layer-pattern"),
    "mtp-hybrid-override-pattern": "--hybrid-layer-pattern with the pattern behind it, after a / for each layer",
}


class RaisingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What a script of Megatron-LM is given, `--use-tempo` and its like among it, and warnings for a user.

    The last of two values wins, `--name=value` is `--name value`, and names are not abbreviated, as in Megatron-LM.

    Raises ValueError for a value that the option cannot have, a word that belongs to no option, and an option that
    looks like a known one.
    """
    parser = _make_parser()
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    read, warnings, is_read = [], [], True
    for word in words:
        if re.match(r"-[^\d.]", word):
            typed = word.partition("=")[0]
            is_read = typed in known
            if not is_read and (warning := _judge(typed, known)) is not None:
                warnings.append(warning)
        if is_read:
            read.append(word)
    args, rest = parser.parse_known_args(read)
    if rest:
        raise ValueError(f"{rest[0]!r} belongs to no option; leave it out, or write it behind its option")
    for name, option in READ.items():
        value = getattr(args, get_field(name))
        if value == [] and option.nargs is None:
            # What argparse makes of --name=--.
            raise ValueError(f"--{name} has no value; give one")
        if option.is_size and value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; expected a positive number")
    return args, warnings


def is_ignored(option: str) -> bool:
    """Whether an option is one of Megatron-LM's on which memory does not depend."""
    name = _strip(option.removeprefix("--"))
    return name in _IGNORED.split() or name.startswith(tuple(_IGNORED_FAMILIES.split()))


def _strip(name: str) -> str:
    return name.removeprefix("no-").removeprefix("disable-")


def get_field(name: str) -> str:
    """Where an option's value goes; that of --no-masked-softmax-fusion to masked_softmax_fusion."""
    return READ[name].field or _strip(name).replace("-", "_")


def list_options(field: str) -> dict[str, Option]:
    """The options that fill a field, as they are typed, and what they take."""
    return {f"--{name}": option for name, option in READ.items() if get_field(name) == field}


def _make_parser() -> argparse.ArgumentParser:
    parser = RaisingParser(add_help=False, allow_abbrev=False)
    for name, option in READ.items():
        settings: dict[str, Any] = {"dest": get_field(name), "default": option.default}
        if option.kind is bool:
            settings["action"] = "store_false" if option.default else "store_true"
        else:
            settings |= {"type": option.kind, "choices": option.choices, "nargs": option.nargs}
        parser.add_argument(f"--{name}", **settings)
    add_tempo_arguments(parser)
    for name in ("--deepspeed_config", "--tempo-config", "--tempo-report"):
        parser.add_argument(name, metavar="FILE")
    add_ledger_argument(parser)
    return parser


def _judge(option: str, known: Sequence[str]) -> str | None:
    """A warning for an option that is not in the tables, or None where memory does not depend on it."""
    if (name := option.lstrip("-")) in GONE:
        raise ValueError(f"{option} is an option of former versions of Megatron-LM; give {GONE[name]}")
    if is_ignored(option):
        return None
    near = [word for word in known if word.startswith(option)]
    near = near or difflib.get_close_matches(option.replace("_", "-"), known, n=1, cutoff=0.85)
    if near:
        raise ValueError(
            f"{option} is no option of Megatron-LM; the nearest is {near[0]}, and names are not abbreviated"
        )
    return f"{option} is no option of Megatron-LM that is known here; the estimate leaves it out"
