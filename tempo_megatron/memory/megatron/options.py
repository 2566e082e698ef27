"""Lists the options of Megatron-LM's training scripts: those that are read, and those that memory does not depend on.

Names, kinds and defaults are those of Megatron-LM 0.19, and the names of 0.16 to main beside them. A field is called as
TransformerConfig calls it. What is read and cannot be estimated stands in `memory.refusals`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tempo_megatron.settings.arguments import add_ledger_argument, add_tempo_arguments

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


def _size(default: int | None = None, field: str | None = None) -> Option:
    """A whole number of at least 1."""
    return Option(default=default, field=field, is_size=True)


def _switch(field: str | None = None, default: bool = False) -> Option:
    return Option(bool, default, field)


def _words(default: str | None, *choices: str, field: str | None = None) -> Option:
    return Option(str, default, field, choices or None)


def _parse_window(text: str) -> tuple[int, ...]:
    """`128,0`, also in brackets."""
    return tuple(int(part) for part in text.strip("()[] ").split(","))


_FLOAT_TYPES = ("fp32", "bf16", "fp16")

READ: dict[str, Option] = {
    # The model.
    "num-layers": _size(),
    "encoder-num-layers": _size(),
    "decoder-num-layers": Option(),
    "hidden-size": _size(),
    "ffn-hidden-size": _size(),
    "num-attention-heads": _size(),
    "group-query-attention": _switch(),
    "num-query-groups": _size(default=1),
    "kv-channels": _size(),
    "seq-length": _size(),
    "encoder-seq-length": Option(),
    "decoder-seq-length": _size(),
    "max-position-embeddings": _size(),
    "position-embedding-type": _words(
        "learned_absolute", "learned_absolute", "rope", "yarn", "mrope", "relative", "none"
    ),
    "use-rotary-position-embeddings": _switch(),
    "no-position-embedding": _switch("add_position_embedding", True),
    "normalization": _words("LayerNorm", "LayerNorm", "RMSNorm"),
    "swiglu": _switch(),
    "squared-relu": _switch(),
    "quick-geglu": _switch(),
    "openai-gelu": _switch(),
    "activation-func-clamp-value": Option(float),
    "disable-bias-linear": _switch("add_bias_linear", True),
    "add-qkv-bias": _switch(),
    "qk-layernorm": _switch(),
    "qk-l2-norm": _switch(),
    "qk-clip": _switch(),
    "log-max-attention-logit": _switch(),
    "window-size": Option(_parse_window),
    "window-attn-skip-freq": Option(),
    "softmax-type": _words("vanilla", "vanilla", "off-by-one", "learnable"),
    "attention-output-gate": _switch(),
    "experimental-attention-variant": _words(None),
    "apply-residual-connection-post-layernorm": _switch(),
    "fp32-residual-connection": _switch(),
    "untie-embeddings-and-output-weights": _switch(),
    "bert-no-binary-head": _switch("bert_binary_head", True),
    "heterogeneous-layers-config-path": _words(None, field="heterogeneous_block_specs"),
    "heterogeneous-layers-config-encoded-json": _words(None, field="heterogeneous_block_specs"),
    "spec": Option(str, nargs="*"),
    "yaml-cfg": _words(None),
    "use-legacy-models": _switch(),
    "freeze-all-layers": _switch(),
    "perform-rl-step": _switch(),
    "skip-train": _switch(),
    "sft": _switch(),
    "post-self-attn-layernorm": _switch(),
    "post-mlp-layernorm": _switch(),
    "linear-attention-type": _words(None),
    "dsv4-mode": _switch(),
    "no-rope-freq": _words(None),
    "rotary-percent": Option(float, 1.0),
    # The vocabulary.
    "vocab-size": _size(),
    "padded-vocab-size": _size(),
    "make-vocab-size-divisible-by": _size(default=128),
    "vocab-extra-ids": Option(default=0),
    "vocab-file": _words(None),
    "no-pad-vocab-size": _switch("pad_vocab_size", True),
    "disable-pad-vocab-size": _switch("pad_vocab_size", True),
    "tokenizer-type": _words(None),
    "tokenizer-model": _words(None),
    # Dropout and kernels.
    "attention-dropout": Option(float, 0.1),
    "hidden-dropout": Option(float, 0.1),
    "transformer-impl": _words("transformer_engine", "local", "transformer_engine", "inference_optimized"),
    "attention-backend": _words("auto", "flash", "fused", "unfused", "local", "auto"),
    "attention-softmax-in-fp32": _switch(),
    "apply-query-key-layer-scaling": _switch(),
    "no-masked-softmax-fusion": _switch("masked_softmax_fusion", True),
    "no-bias-gelu-fusion": _switch("bias_gelu_fusion", True),
    "no-bias-swiglu-fusion": _switch("bias_swiglu_fusion", True),
    "no-bias-dropout-fusion": _switch("bias_dropout_fusion", True),
    "no-rope-fusion": _switch("apply_rope_fusion", True),
    "no-gradient-accumulation-fusion": _switch("gradient_accumulation_fusion", True),
    "use-te-activation-func": _switch(),
    "use-transformer-engine-op-fuser": _switch(),
    "use-grouped-gemm-for-dense-mlp": _switch(),
    "fused-residual-rmsnorm": _switch(),
    "mlp-chunks-for-training": Option(default=1),
    "batch-invariant-mode": _switch(),
    "use-kitchen-attention": _switch(),
    "cross-entropy-loss-fusion": _switch(),
    "cross-entropy-fusion-impl": _words("native", "native", "te", "linear"),
    "fp16-lm-cross-entropy": _switch(),
    "cuda-graph-impl": _words("none", "none", "local", "transformer_engine", "full_iteration"),
    "enable-cuda-graph": _switch("cuda_graph_impl_deprecated"),
    "external-cuda-graph": _switch("cuda_graph_impl_deprecated"),
    "no-create-attention-mask-in-dataloader": _switch("create_attention_mask_in_dataloader", True),
    "deterministic-mode": _switch(),
    "logits-save-dir": _words(None),
    "logits-load-dir": _words(None),
    # The layout.
    "tensor-model-parallel-size": _size(default=1),
    "pipeline-model-parallel-size": _size(default=1),
    "num-layers-per-virtual-pipeline-stage": _size(),
    "num-virtual-stages-per-pipeline-rank": _size(),
    "microbatch-group-size-per-virtual-pipeline-stage": Option(field="microbatch_group_size_per_vp_stage"),
    "overlap-p2p-communication-warmup-flush": _switch(),
    "decoder-first-pipeline-num-layers": Option(field="num_layers_in_first_pipeline_stage"),
    "decoder-last-pipeline-num-layers": Option(field="num_layers_in_last_pipeline_stage"),
    "pipeline-model-parallel-layout": _words(None),
    "account-for-embedding-in-pipeline-split": _switch(),
    "account-for-loss-in-pipeline-split": _switch(),
    "sequence-parallel": _switch(),
    "tp-comm-overlap": _switch(),
    "tensor-parallel-num-weight-shards": Option(),
    "defer-embedding-wgrad-compute": _switch(),
    "wgrad-deferral-limit": Option(default=0),
    "delay-wgrad-compute": _switch(),
    "context-parallel-size": _size(default=1),
    "cp-comm-type": Option(str, ("p2p",), nargs="+"),
    "hierarchical-context-parallel-sizes": Option(nargs="+"),
    "hybrid-context-parallel": _switch(),
    # The step.
    "micro-batch-size": _size(),
    "global-batch-size": _size(),
    "rampup-batch-size": Option(nargs=3),
    "step-batch-size-schedule": Option(str),
    "bf16": _switch(),
    "fp16": _switch(),
    "recompute-activations": _switch(),
    "recompute-granularity": _words(None, "full", "selective"),
    "recompute-method": _words(None, "uniform", "block"),
    "recompute-num-layers": _size(),
    "recompute-modules": Option(str, nargs="+"),
    "distribute-saved-activations": _switch(),
    "cpu-offloading-num-layers": Option(default=0, field="cpu_offloading"),
    "fine-grained-activation-offloading": _switch(),
    "offload-modules": Option(str, (), nargs="+"),
    "min-offloaded-tensor-size": Option(default=1048576),
    "activation-offload-fraction": Option(float, 1.0),
    "delta-offload-bytes-across-pp-ranks": Option(default=0),
    # Gradients and states.
    "optimizer": _words("adam", "adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
    "muon-scalar-optimizer": _words("adam", "adam", "lion"),
    "no-use-layer-wise-param-layout": _switch("use_layer_wise_param_layout", True),
    "use-distributed-optimizer": _switch(),
    "num-distributed-optimizer-instances": _size(default=1),
    "overlap-grad-reduce": _switch(),
    "overlap-param-gather": _switch(),
    "overlap-param-gather-with-optimizer-step": _switch(),
    "ddp-bucket-size": _size(),
    "ddp-num-buckets": _size(),
    "ddp-pad-buckets-for-high-nccl-busbw": _switch(),
    "ddp-param-name-patterns-for-fp32-local-accumulation": Option(str, (), nargs="+"),
    "accumulate-allreduce-grads-in-fp32": _switch(),
    "grad-reduce-in-bf16": _switch(),
    "ddp-reduce-scatter-with-fp32-accumulation": _switch(),
    "use-precision-aware-optimizer": _switch(),
    "main-grads-dtype": _words("fp32", "fp32", "bf16"),
    "main-params-dtype": _words("fp32", "fp32", "fp16"),
    "exp-avg-dtype": _words("fp32", *_FLOAT_TYPES, "fp8"),
    "exp-avg-sq-dtype": _words("fp32", *_FLOAT_TYPES, "fp8"),
    "optimizer-cpu-offload": _switch(),
    "optimizer-offload-fraction": Option(float, 1.0),
    "offload-optimizer-states": _switch(),
    "use-nccl-ub": _switch("nccl_ub"),
    "use-torch-fsdp2": _switch(),
    "torch-fsdp2-no-reshard-after-forward": _switch("torch_fsdp2_reshard_after_forward", True),
    "use-cpu-initialization": Option(bool),
    "init-model-with-meta-device": _switch(),
    "use-megatron-fsdp": _switch(),
    "data-parallel-sharding-strategy": _words(
        "optim_grads_params", "no_shard", "optim", "optim_grads", "optim_grads_params"
    ),
    "outer-dp-sharding-strategy": _words("no_shard", "no_shard", "optim"),
    "megatron-fsdp-main-params-dtype": _words("fp32", *_FLOAT_TYPES, "auto"),
    "megatron-fsdp-main-grads-dtype": _words("auto", *_FLOAT_TYPES, "auto"),
    "megatron-fsdp-grad-comm-dtype": _words("auto", *_FLOAT_TYPES, "auto"),
    "megatron-fsdp-version": Option(default=1),
    "fsdp-double-buffer": _switch(),
    "suggested-communication-unit-size": _size(),
    # Eight bits and fewer.
    "fp8-format": _words(None, "e4m3", "hybrid", field="fp8"),
    "fp8-recipe": _words("delayed", "tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "fp8-param-gather": _switch(),
    "fp8-output-proj": _switch(),
    "reuse-grad-buf-for-mxfp8-param-ag": _switch(),
    "keep-fp8-transpose-cache": _switch(),
    "first-last-layers-bf16": _switch(),
    "num-layers-at-start-in-bf16": Option(default=1),
    "num-layers-at-end-in-bf16": Option(default=1),
    "fp4-format": _words(None, "e2m1", field="fp4"),
    "fp4-param-gather": _switch(),
    "te-precision-config-file": _words(None),
    # Experts.
    "num-experts": Option(field="num_moe_experts"),
    "moe-layer-freq": Option(str, "1"),
    "moe-ffn-hidden-size": Option(),
    "moe-shared-expert-intermediate-size": Option(),
    "moe-shared-expert-gate": _switch(),
    "moe-shared-expert-overlap": _switch(),
    "moe-latent-size": Option(),
    "moe-router-topk": Option(default=2),
    "moe-router-num-groups": Option(),
    "moe-router-group-topk": Option(),
    "moe-router-load-balancing-type": Option(str, ("aux_loss",), nargs="+"),
    "moe-aux-loss-coeff": Option(float, (0.0,), nargs="+"),
    "moe-z-loss-coeff": Option(float),
    "moe-router-score-function": _words("softmax", "softmax", "sigmoid", "sqrtsoftplus"),
    "moe-router-pre-softmax": _switch(),
    "moe-router-dtype": _words(None, "fp32", "fp64"),
    "moe-router-enable-expert-bias": _switch(),
    "moe-router-fusion": _switch(),
    "moe-router-padding-for-fp8": _switch("moe_router_padding_for_quantization"),
    "moe-router-padding-for-quantization": _switch(),
    "moe-router-force-load-balancing": _switch(),
    "moe-input-jitter-eps": Option(float),
    "moe-grouped-gemm": _switch(),
    "moe-use-legacy-grouped-gemm": _switch(),
    "moe-token-dispatcher-type": _words("allgather", "allgather", "alltoall", "flex"),
    "moe-flex-dispatcher-backend": _words("deepep", "deepep", "hybridep", "ncclep"),
    "moe-enable-deepep": _switch(),
    "moe-permute-fusion": _switch(),
    "moe-permute-fusion-into-hybridep": _switch(),
    "moe-expert-capacity-factor": Option(float),
    "moe-expert-rank-capacity-factor": Option(float),
    "moe-pad-expert-input-to-capacity": _switch(),
    "moe-token-drop-policy": _words("probs", "probs", "position"),
    "moe-layer-recompute": _switch(),
    "moe-apply-probs-on-input": _switch(),
    "moe-paged-stash": _switch(),
    "use-fused-weighted-squared-relu": _switch(),
    "expert-model-parallel-size": Option(default=1),
    "expert-tensor-parallel-size": Option(),
    "overlap-moe-expert-parallel-comm": _switch(),
    # Latent attention.
    "multi-latent-attention": _switch(),
    "q-lora-rank": _size(),
    "kv-lora-rank": _size(default=32),
    "qk-head-dim": _size(default=128),
    "qk-pos-emb-head-dim": _size(default=64),
    "v-head-dim": _size(default=128),
    "mla-down-proj-fusion": _switch(),
    "cache-mla-latents": _switch(),
    "rope-type": _words(None, "rope", "yarn"),
    # Further heads, and layers that are no transformer's.
    "mtp-num-layers": _size(),
    "mtp-use-repeated-layer": _switch(),
    "mtp-standalone": _switch(),
    "mtp-hybrid-override-pattern": _words(None),
    "is-hybrid-model": _switch(),
    "hybrid-layer-pattern": _words(None),
    "hybrid-override-pattern": _words(None, field="hybrid_layer_pattern"),
    "hybrid-attention-ratio": Option(float),
    "hybrid-mlp-ratio": Option(float),
    "mamba-state-dim": _size(default=128),
    "mamba-head-dim": _size(default=64),
    "mamba-num-groups": _size(default=8),
    "mamba-num-heads": _size(),
    "disable-mamba-mem-eff-path": _switch("use_mamba_mem_eff_path", True),
}
"""Option without its dashes -> what it takes."""


# What memory does not depend on: switches, options with one value, options with several, and whole families.
_BARE = """
allow-ambiguous-pad-tokens apply-layernorm-1p apply-wd-to-qk-layernorm auto-detect-ckpt-format
biencoder-shared-query-context-model calc-ft-timeouts calculate-per-token-loss check-for-large-grads
check-for-spiky-loss cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group data-parallel-random-init
dataloader-defer-npy-index-mmap dataloader-fast-cache-load dataloader-inter-document-masking ddp-average-in-collective
decode-only-cuda-graphs decrease-batch-size-if-needed delay-offload-until-cuda-graph
disable-activation-func-clamp-shared-expert disable-align-grad-reduce disable-bf16-reduced-precision-matmul
disable-chunked-prefill disable-clone-scatter-output-in-embedding disable-fp8-wgrad disable-gloo-process-groups
disable-jit-fuser disable-manual-gc-eval disable-msc disable-stream-ckpt-dequant disable-strict-fsdp-dtensor-load
disable-symmetric-registration disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag
disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
disable-use-tokenizer-model-from-checkpoint-args distrib-optim-fully-reshardable-mem-efficient enable-chunked-prefill
enable-experimental enable-ft-package enable-full-sharding-in-hsdp enable-msc eod-mask-loss
ep-overlap-early-attn-memory-release exit-on-missing-checkpoint exit-signal-handler exit-signal-handler-for-dataloader
exit-signal-handler-for-training fake-process-group fallback-to-eager-attn finetune flash-decode
freeze-e-score-correction-bias fsdp-db-use-persist-buf-on-alloc-fail fsdp-manual-registration full-validation
high-priority-a2a-comm-stream init-method-xavier-uniform lazy-mpu-init legacy-tokenizer
load-main-params-from-ckpt low-memory-resume manual-gc megatron-fsdp-enable-fine-grained-param-gather
megatron-fsdp-max-pool-double-buffer mock-data moe-activation-in-fp32 moe-combine-in-fp32 moe-enable-routing-replay
moe-extended-tp moe-pad-experts-for-cuda-graph-inference moe-per-layer-logging moe-router-freeze-gate
moe-single-grouped-bias moe-single-grouped-weight moe-use-upcycling mtp-detach-heads multiple-validation-sets
nccl-all-reduce-for-prefill no-activation-func-clamp-shared-expert no-align-grad-reduce no-align-param-gather
no-barrier-with-level-1-timing no-check-for-nan-in-loss-and-grad no-clone-scatter-output-in-embedding no-data-sharding
no-fp8-wgrad no-gradient-reduce-div-fusion no-initialization no-load-optim no-load-rng no-manual-gc-eval
no-mmap-bin-files no-one-logger no-overlap-p2p-communication no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params
no-save-optim no-save-rng no-scatter-gather-tensors-in-pipeline no-stream-ckpt-dequant no-strict-fsdp-dtensor-load
no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag
no-tp-comm-split-rs no-use-tokenizer-model-from-checkpoint-args nvtx-ranges
optimizer-cuda-graph output-bert-embeddings overlap-cpu-optimizer-d2h-h2d overlap-dispatch-backward-with-experts-wgrad
override-opt-param-scheduler override-opt_param-scheduler profile record-memory-history record-shapes
reset-attention-mask reset-position-ids rotary-interleaved run-workload-inspector-server te-rng-tracker test-mode
tp-comm-overlap-rs-dgrad trust-remote-code use-checkpoint-args
use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler use-dist-ckpt
use-flash-attn use-grouped-gemm-for-shared-expert use-legacy-static-engine use-mcore-models
use-mp-args-from-checkpoint-args use-mup use-one-sent-docs use-persistent-ckpt-worker use-pytorch-profiler
use-ring-exchange-p2p use-rope-scaling use-same-sampling-seed-across-dp-ranks use-sharp
use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping verify-integrity vision-pretraining
"""
_ONE = """
adam-beta1 adam-beta2 adam-eps bert-embedder-type bert-load beta-fast beta-slow biencoder-projection-dim
block-data-path chat-template check-weight-hash-across-dp-replicas-interval classes-fraction clip-grad
config-logger-dir cuda-graph-warmup-steps data-args-path data-cache-path data-per-class-fraction dataloader-type
decoupled-lr decoupled-min-lr distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
dump-param-to-param-group-map embedding-init-method-std embedding-path empty-unused-memory-level end-weight-decay
error-injection-rate error-injection-type eval-global-batch-size eval-interval eval-iters eval-micro-batch-size
evidence-data-path exit-duration-in-mins exit-interval exit-signal expert-tensor-parallel-num-weight-shards
fine-grained-offloading-max-inflight-offloads flash-attention-version fp4-quantizer-factory fp4-recipe
fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin fp8-quantizer-factory ft-num-warmup-iters
glu-linear-offset gpu-sniff-test-interval head-lr-mult hysteresis ict-head-size ict-load img-h img-w
indexer-batch-size indexer-log-interval init-method-std initial-loss-scale iter-per-epoch load local-rank
logging-level loss-scale loss-scale-window lr manual-gc-interval mask-factor mask-prob mask-type
max-seqlen-per-dp-cp-rank max-tokens-to-oom memory-snapshot-path merge-file mid-level-dataset-surplus min-loss-scale
min-lr mlp-chunks-for-prefill moe-deepep-num-sms moe-flex-dispatcher-num-sms moe-mlp-glu-interleave-size
moe-router-bias-update-rate moe-router-force-biased moe-router-quantile-balancing-ema moe-router-topk-scaling-factor
moe-shared-expert-glu-interleave-size moe-upcycling-granularity mscale mscale-all-dim mtp-loss-scaling-factor
nccl-communicator-config-path no-weight-decay-cond-type norm-epsilon null-tokenizer-eod-id null-tokenizer-pad-id
num-channels num-classes num-dataset-builder-threads num-speculative-tokens num-workers object-storage-cache-path
onnx-safe original-max-position-embeddings override-ckpt-iteration patch-dim per-dataset-sequences-path
per-split-data-args-path persistent-save-interval phase-transition-iterations pipeline-model-parallel-comm-backend
pretrained-checkpoint profile-step-end profile-step-start qk-clip-alpha qk-clip-threshold query-in-block-prob
refit-method relative-attention-max-distance relative-attention-num-buckets rerun-mode
result-rejected-tracker-filename rope-scaling-factor rotary-base rotary-scaling-factor
rotary-seq-len-interpolation-factor sample-rate save save-activations-interval save-dgrads-interval save-interval
save-params-interval save-retain-interval save-tokens-per-expert-interval save-wgrads-interval seed
sft-tokenizer-prompt-format sgd-momentum sharp-enabled-group short-seq-prob split start-eval-at-iter
start-weight-decay swin-backbone-type symmetric-ar-type timing-log-level
timing-log-option titles-data-path tp-comm-bootstrap-backend tp-comm-overlap-cfg train-iters train-samples
train-sync-interval true-on-policy-contract true-on-policy-vocab-size vision-backbone-type vision-pretraining-type
weight-decay weight-decay-incr-style
"""
_MANY = """
cuda-graph-modules cuda-graph-scope data-path high-priority-stream-groups iterations-to-skip mrope-section
profile-ranks test-data-path train-data-path valid-data-path validation-set-names
"""
_PREFIXES = """
adlr- app-tag- async- ckpt- dino- dist-ckpt- dsa- dsv4- fault-injector- fim- flight-recorder- grpo- inference-
inprocess- kitchen- langrl- linear- lion- log- logits- lr- mamba- moe-hybridep- moe-ncclep- moe-paged-stash-
moe-routing-trace- muon- mup- non-persistent- one-logger- pytorch-profiler- replication retriever- rl- straggler-
tensorboard- tiktoken- tokenizer- wandb- yarn-
"""
_GONE = {
    "batch-size": "--micro-batch-size",
    "model-parallel-size": "--tensor-model-parallel-size",
    "warmup": "--lr-warmup-fraction",
    "checkpoint-activations": "--recompute-granularity and --recompute-method",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_options(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What a script of Megatron-LM is given, `--use-tempo` and its like among it, and warnings for a user.

    The last of two values wins, `--name=value` is `--name value`, and names are not abbreviated, as in Megatron-LM.

    Raises ValueError for a value that the option cannot have, a word that belongs to no option, and an option that
    looks like a known one.
    """
    parser = _make_parser()
    args, rest = parser.parse_known_args(list(words))
    for name, option in READ.items():
        value = getattr(args, _find_field(name))
        if value == [] and option.nargs is None:
            # What argparse makes of --name=--.
            raise ValueError(f"--{name} has no value; give one")
        if option.is_size and value is not None and value < 1:
            raise ValueError(f"--{name} is {value}; expected a positive number")
    warnings = []
    owner = None
    for word in rest:
        if not word.startswith("-") or _is_number(word):
            if owner is None:
                raise ValueError(f"{word!r} belongs to no option; leave it out, or write it behind its option")
            continue
        owner = word.partition("=")[0]
        if (warning := _judge(owner, parser)) is not None:
            warnings.append(warning)
    return args, warnings


def is_ignored(option: str) -> bool:
    """Whether an option is one of Megatron-LM's on which memory does not depend."""
    name = option.removeprefix("--")
    if name in {*_BARE.split(), *_ONE.split(), *_MANY.split()}:
        return True
    return name.removeprefix("no-").removeprefix("disable-").startswith(tuple(_PREFIXES.split()))


def find_default(field: str) -> Any:
    """What a field of `parse_options` is where nothing is given."""
    return next(option.default for name, option in READ.items() if _find_field(name) == field)


def list_options(field: str) -> list[str]:
    """The options that fill a field."""
    return [f"--{name}" for name in READ if _find_field(name) == field]


def _find_field(name: str) -> str:
    return READ[name].field or name.replace("-", "_")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name, option in READ.items():
        settings: dict[str, Any] = {"dest": _find_field(name), "default": option.default}
        if option.kind is bool:
            settings["action"] = "store_false" if option.default else "store_true"
        else:
            settings |= {"type": option.kind, "choices": option.choices, "nargs": option.nargs}
        parser.add_argument(f"--{name}", **settings)
    kinds: dict[str, dict[str, Any]] = {_BARE: {"action": "store_true"}, _ONE: {}, _MANY: {"nargs": "*"}}
    for names, ignored in kinds.items():
        for name in names.split():
            parser.add_argument(f"--{name}", dest="_ignored", default=argparse.SUPPRESS, **ignored)
    add_tempo_arguments(parser)
    for name in ("--deepspeed_config", "--tempo-config", "--tempo-report"):
        parser.add_argument(name, metavar="FILE")
    add_ledger_argument(parser)
    return parser


def _judge(option: str, parser: argparse.ArgumentParser) -> str | None:
    """A warning for an option that is not in the tables, or None where it is of a family that does not matter.

    Raises ValueError where it looks like one that matters, or is gone.
    """
    name = option.lstrip("-")
    if name in _GONE:
        raise ValueError(f"Megatron-LM takes {option} no longer; give {_GONE[name]}")
    if is_ignored(option):
        return None
    known = [word for word in parser._option_string_actions if word.startswith("--")]
    near = [word for word in known if word.startswith(option)]
    near = near or difflib.get_close_matches(option.replace("_", "-"), known, n=1, cutoff=0.85)
    if near:
        raise ValueError(
            f"{option} is no option of Megatron-LM; the nearest is {near[0]}, and names are not abbreviated"
        )
    return f"{option} is no option of Megatron-LM that is known here; the estimate leaves it out"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
