"""The configurations of pretrain_gpt.py in which Tempo is held against stock, at dropout 0."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one configuration, beside those of a small GPT (see megatron_runs.py)."""

    arguments: str
    world_size: int = 1
    tempo: str = ""
    """Arguments beside --use-tempo: choices, and what stock does not end with."""

    stock_norms: str = "megatron's"
    """ "torch's" where Megatron's own refuse, as they do sequence parallelism without Apex and Transformer Engine."""

    limit: float = 3e-5
    """Of a gradient's difference, as a part of the largest gradient of its step."""


_SP = {"stock_norms": "torch's"}
_FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--qk-layernorm --untie-embeddings-and-output-weights --disable-bias-linear"
)
_MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss"
_BLOCKS = [
    {
        "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
        "ffn": {"ffn_mult": mult, "no_op": mult is None, "replace_with_linear": False},
    }
    for mult in (2.0, 1.0, None, 4.0)
]
_BLOCKS[1]["attention"] = {"n_heads_in_group": None, "no_op": True, "replace_with_linear": False}
_HETEROGENEOUS = json.dumps(
    {
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
        "rope_theta": 10000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": _BLOCKS,
    },
    separators=(",", ":"),
)

# Of every run: each kind of model, of recomputation and of parallelism once, and one 16-bit dtype. The others are for
# --exhaustive; plain GPT-2 trains in test_megatron_lm_layouts.py and test_megatron_lm_resume.py.
SAMPLE = (
    "LLaMA",
    "MoE",
    "full, block",
    "mlp with biases",
    "bf16",
    "TP 2 + SP, LLaMA",
    "PP 2, interleaved",
    "DP 2, distributed optimizer",
)
CASES = {
    "GPT-2": Case(""),
    "erf GELU": Case("--no-bias-gelu-fusion"),
    "s 63, micro batch 3": Case("--seq-length 63 --micro-batch-size 3 --global-batch-size 6"),
    "LLaMA": Case(_LLAMA),
    "squared ReLU": Case("--squared-relu --no-bias-gelu-fusion"),
    "windows": Case("--window-size 8,0 --window-attn-skip-freq 2"),
    "MoE": Case(f"{_MOE} --moe-layer-freq 2 --no-bias-gelu-fusion --disable-bias-linear"),
    "heterogeneous layers": Case(
        f"--heterogeneous-layers-config-encoded-json {_HETEROGENEOUS} --swiglu --normalization RMSNorm "
        "--group-query-attention --num-query-groups 2 --position-embedding-type rope --use-rope-scaling "
        "--untie-embeddings-and-output-weights --disable-bias-linear --use-rotary-position-embeddings",
    ),
    "learnable softmax": Case("--softmax-type learnable"),
    "post-norm residual": Case("--apply-residual-connection-post-layernorm"),
    "recompute all": Case("", tempo="--tempo-norm recompute --tempo-activation recompute --tempo-attention softmax"),
    "core_attn": Case(f"{_SELECTIVE} core_attn"),
    "mlp": Case(f"{_SELECTIVE} mlp --disable-bias-linear"),
    # The selective recomputation of an MLP with biases never ends in stock.
    "mlp with biases": Case("", tempo=f"{_SELECTIVE} mlp"),
    "full, uniform": Case(f"{_FULL} uniform"),
    "full, block": Case(f"{_FULL} block"),
    "bf16": Case("--bf16", limit=2e-2),
    "fp16": Case("--fp16 --initial-loss-scale 1024", limit=3e-3),
    "TP 2": Case("--tensor-model-parallel-size 2", 2),
    "TP 2 + SP": Case("--tensor-model-parallel-size 2 --sequence-parallel", 2, **_SP),
    "TP 2, full, distributed": Case(
        f"--tensor-model-parallel-size 2 {_FULL} uniform --distribute-saved-activations", 2
    ),
    "TP 2 + SP, LLaMA": Case(f"--tensor-model-parallel-size 2 --sequence-parallel {_LLAMA}", 2, **_SP),
    "PP 2": Case("--pipeline-model-parallel-size 2", 2),
    "PP 2, uneven": Case("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", 2),
    "PP 2, interleaved": Case("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
    "PP 2, full, block": Case(f"--pipeline-model-parallel-size 2 {_FULL} block", 2),
    "DP 2, overlap": Case("--overlap-grad-reduce", 2),
    # The distributed optimizer takes Adam only, whose usual eps makes a step of the round-off that is all there is of a
    # key bias' gradient.
    "DP 2, distributed optimizer": Case(
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --optimizer adam --adam-eps 0.01", 2
    ),
    "TP 4, 12 heads": Case("--tensor-model-parallel-size 4 --num-attention-heads 12", 4),
    "TP 4 + SP, 12 heads": Case(
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --sequence-parallel", 4, **_SP
    ),
    "PP 4": Case("--pipeline-model-parallel-size 4", 4),
    "TP 2 + SP, PP 2": Case(
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4, **_SP
    ),
    "PP 2, DP 2": Case("--pipeline-model-parallel-size 2 --overlap-grad-reduce", 4),
}
