"""Megatron-LM's unmodified pretrain_gpt.py, stock beside --use-tempo at dropout 0: losses and every gradient."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron_runs import EXPERTS, LATENT_ATTENTION, Run, assert_equal_to_stock, list_names, run_all_sizes, with_sample

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one configuration, beside those of a small GPT (see megatron_runs.py)."""

    arguments: str
    world_size: int = 1
    tempo: str = ""
    """Arguments beside --use-tempo: choices, and what stock does not end with."""

    changes: tuple[str, ...] = ()
    """Of stock: where Megatron's own norms refuse sequence parallelism without Apex, torch's stand in them."""

    changes_both: tuple[str, ...] = ()
    """Of stock and Tempo."""

    limit: float = 3e-5
    """Of a gradient's difference, as a part of the largest gradient of its step."""


_SP = {"changes": ("use_torch_norms",)}
_LATENT = {"changes_both": ("take_latent_sizes",)}
_FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_TP_2, _PP_2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
_TP_2_SP = f"{_TP_2} --sequence-parallel"
_LLAMA = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --position-embedding-type rope "
    "--qk-layernorm --untie-embeddings-and-output-weights --disable-bias-linear"
)
_MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type aux_loss"
_SWIGLU = "--swiglu --disable-bias-linear --moe-ffn-hidden-size 24 --moe-token-dispatcher-type"
_MOE_SWIGLU = f"{_MOE} {EXPERTS}"
_TOP_8 = f"--num-experts 16 --moe-router-topk 8 {_SWIGLU} alltoall --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.01"
_CAPACITY = f"{_MOE} {_SWIGLU} alltoall --moe-expert-capacity-factor 1.0"
_PADDED = f"{_CAPACITY} --moe-pad-expert-input-to-capacity"
_EP_2, _EP_2_OF_TP = "--expert-model-parallel-size 2", "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
# Of every run: a kind of model, of recomputation and of parallelism that no other test of Megatron-LM's script has, and
# one 16-bit dtype. The others are for --exhaustive.
SAMPLE = (
    *("EP 2, sent again", "mlp with biases", "bf16"),
    *("TP 2 + SP, LLaMA", "PP 2, interleaved", "DP 2, distributed optimizer"),
)
CASES = {
    "GPT-2": Case(""),
    "erf GELU": Case("--no-bias-gelu-fusion"),
    "s 63, micro batch 3": Case("--seq-length 63 --micro-batch-size 3 --global-batch-size 6"),
    "LLaMA": Case(_LLAMA),
    "squared ReLU": Case("--squared-relu --no-bias-gelu-fusion"),
    "windows": Case("--window-size 8,0 --window-attn-skip-freq 2"),
    "windows to both sides": Case("--window-size 7,3 --window-attn-skip-freq 3"),
    "MoE": Case(f"{_MOE} --moe-layer-freq 2 --no-bias-gelu-fusion --disable-bias-linear"),
    "MoE, top 8": Case(f"{_TOP_8} --moe-router-load-balancing-type seq_aux_loss"),
    "MoE, global auxiliary loss": Case(f"{_TOP_8} --moe-router-load-balancing-type global_aux_loss"),
    "MoE, all-gather": Case(f"{_MOE} {_SWIGLU} allgather"),
    "MoE, capacity": Case(_CAPACITY),
    "MoE, capacity, padded": Case(_PADDED),
    "MLA": Case(LATENT_ATTENTION, **_LATENT),
    "MLA, MoE, up projections": Case(f"{LATENT_ATTENTION} {_MOE_SWIGLU} {_SELECTIVE} mla_up_proj", **_LATENT),
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
    "TP 2": Case(_TP_2, 2),
    "TP 2 + SP": Case(_TP_2_SP, 2, **_SP),
    "TP 2, full, distributed": Case(f"{_TP_2} {_FULL} uniform --distribute-saved-activations", 2),
    "TP 2 + SP, LLaMA": Case(f"{_TP_2_SP} {_LLAMA}", 2, **_SP),
    "PP 2": Case(_PP_2, 2),
    "PP 2, uneven": Case(f"{_PP_2} --decoder-first-pipeline-num-layers 1", 2),
    "PP 2, interleaved": Case(f"{_PP_2} --num-layers-per-virtual-pipeline-stage 1", 2),
    "PP 2, full, block": Case(f"{_PP_2} {_FULL} block", 2),
    "DP 2, overlap": Case("--overlap-grad-reduce", 2),
    # The distributed optimizer takes Adam only, whose usual eps makes a step of the round-off that is all there is of a
    # key bias' gradient.
    "DP 2, distributed optimizer": Case(
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --optimizer adam --adam-eps 0.01", 2
    ),
    "EP 2": Case(f"{_MOE_SWIGLU} {_EP_2}", 2),
    "EP 2, sent again": Case(f"{_MOE_SWIGLU} {_EP_2}", 2, "--tempo-moe-permute repeat --tempo-norm recompute"),
    "TP 2 + SP, MoE": Case(f"{_TP_2_SP} {_MOE_SWIGLU}", 2, **_SP),
    "TP 2 + SP, MoE, top 8": Case(f"{_TP_2_SP} {_TOP_8} --moe-router-load-balancing-type seq_aux_loss", 2, **_SP),
    # Each rank has as many tokens there, without which gloo gathers none.
    "TP 2 + SP, MoE, capacity, padded": Case(f"{_TP_2_SP} {_PADDED}", 2, **_SP),
    "TP 2 + SP, EP 2, capacity": Case(f"{_TP_2_SP} {_CAPACITY} {_EP_2_OF_TP}", 2, **_SP),
    "TP 2 + SP, EP 2": Case(f"{_TP_2_SP} {_MOE_SWIGLU} {_EP_2_OF_TP}", 2, **_SP),
    "PP 2, MoE": Case(f"{_PP_2} {_MOE_SWIGLU}", 2),
    "MLA, TP 2 + SP": Case(f"{LATENT_ATTENTION} {_TP_2_SP}", 2, **_SP, **_LATENT),
    "MLA, EP 2": Case(f"{LATENT_ATTENTION} {_MOE_SWIGLU} {_EP_2}", 2, **_LATENT),
    "TP 4, 12 heads": Case("--tensor-model-parallel-size 4 --num-attention-heads 12", 4),
    "TP 4 + SP, 12 heads": Case(
        "--tensor-model-parallel-size 4 --num-attention-heads 12 --sequence-parallel", 4, **_SP
    ),
    "PP 4": Case("--pipeline-model-parallel-size 4", 4),
    "TP 2 + SP, PP 2": Case(f"{_TP_2_SP} {_PP_2}", 4, **_SP),
    "EP 2, PP 2, MLA": Case(f"{LATENT_ATTENTION} {_MOE_SWIGLU} {_EP_2} {_PP_2}", 4, **_LATENT),
    "TP 2 + SP, EP 2, PP 2": Case(f"{_TP_2_SP} {_MOE_SWIGLU} {_EP_2_OF_TP} {_PP_2}", 4, **_SP),
    "PP 2, DP 2": Case(f"{_PP_2} --overlap-grad-reduce", 4),
}


def runs_of(name: str) -> Iterator[tuple[int, Run]]:
    case = CASES[name]
    yield case.world_size, Run(f"{name}: stock", case.arguments, changes=(*case.changes_both, *case.changes))
    tempo = f"{case.arguments} --use-tempo {case.tempo}"
    yield case.world_size, Run(f"{name}: Tempo", tempo, changes=case.changes_both)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, megatron_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    runs = [run for name in list_names(request, megatron_root) for run in runs_of(name)]
    return run_all_sizes(megatron_root, runs, tmp_path_factory.mktemp("matrix"))


@pytest.mark.parametrize("name", ["PP 2, interleaved"])
def test_the_banner_is_of_all_stages(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    first, second = (rank["printed"] for rank in results[f"{name}: Tempo"])
    places = [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")]
    assert re.findall(r"^tempo: stage (\d) of 2, chunk (\d):$", first, re.MULTILINE) == places
    assert re.findall(r"slots replaced: .*?norm (\d)", first) == ["2", "2", "2", "3"]
    assert first.count("attention is causal and is given no mask") == 4
    assert "slots replaced" not in second


@pytest.mark.parametrize("name", with_sample(CASES, SAMPLE))
def test_losses_and_every_gradient_equal_stock(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    stock, tempo = results[f"{name}: stock"], results[f"{name}: Tempo"]
    assert "slots replaced" in tempo[0]["printed"] and "slots replaced" not in stock[0]["printed"]
    assert_equal_to_stock(tempo, stock, CASES[name].limit)
