"""Estimates what models need: the largest micro batch on one GPU of several sizes, and a rank's peak from 22B to 1T.

python benchmarks/estimated_models.py           # what benchmarks/results/estimate/ does not have yet, of both

Stock is Transformer Engine's modules on a GPU with fused attention, or with unfused attention where the paper's
baseline had it (arXiv 2210.10246), and fully recomputed. Adam's states are there, as in training in bf16 with float32
copies: 18 bytes a parameter on one GPU. Of a GPU's memory 1 GiB is left for CUDA's context and fragments. Nothing here
is measured on a GPU, so there are no tokens per second; docs/published_peaks.md says how near
estimates of published runs are.

- model: a case is a model and a choice. Models of more than 2B parameters are four layers of their shape.
- scale: a case is a model of arXiv 2205.05198 (its layout, TP 8, one micro batch), a sequence length and a choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from measurements import RESULTS, ROOT, measure_missing

from tempo_megatron import TempoConfig
from tempo_megatron.memory.rank.estimate import estimate_ranks
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.models.layout import Layout
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file

OUTPUTS = {name: RESULTS / "estimate" / f"{name}.jsonl" for name in ("model", "scale")}
GIB = 2**30
MEMORIES_GIB = (11, 16, 24, 40, 80)
RESERVE_GIB = 1
LARGEST_BATCH = 4096
RECOMPUTED = TempoConfig(activation="recompute", norm="recompute")
# Name -> Tempo's values and fields of a Run.
CHOICES: dict[str, tuple[TempoConfig, dict[str, Any]]] = {
    "stock": (TempoConfig.off(), {}),
    "stock, unfused": (TempoConfig.off(), {"stock_attention": "unfused"}),
    "stock, full": (TempoConfig.off(), {"recompute": ("full",)}),
    "Tempo": (TempoConfig(), {}),
    "Tempo, recompute": (RECOMPUTED, {}),
}
_QWEN3_30B_A3B = {
    "family": "gpt", "num_layers": 4, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32,
    "num_query_groups": 4, "kv_channels": 128, "seq_length": 4096, "max_position_embeddings": 40960,
    "normalization": "RMSNorm", "norm_epsilon": 1e-6, "activation": "swiglu", "position_embedding_type": "rope",
    "rotary_base": 1000000, "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "vocab_size": 151936, "qk_layernorm": True, "untie_embeddings_and_output_weights": True,
    "num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
}  # fmt: skip
# Name -> file of configs/model or fields, changes, choices.
MODELS: dict[str, tuple[Any, dict[str, Any], Sequence[str]]] = {
    "BERT large, s 512": ("bert_large", {}, tuple(CHOICES)),
    "RoBERTa large, s 512": ("roberta_large", {}, tuple(CHOICES)),
    "GPT-2 345M, s 1024": ("gpt2_345m", {}, tuple(CHOICES)),
    "GPT-2 XL, s 1024": ("gpt2_xl_1558m", {}, tuple(CHOICES)),
    "4 layers of Llama 3 8B, s 8192": ("llama3_8b", {"num_layers": 4}, ("stock", "stock, full", "Tempo")),
    "4 layers of Qwen3-30B-A3B, s 4096": (_QWEN3_30B_A3B, {}, ("stock", "stock, full", "Tempo")),
}
# Name -> pipeline stages.
SCALES = {"22b": 1, "175b": 8, "530b": 35, "1t": 64}
LENGTHS = (1024, 2048, 8192, 32768, 131072, 1048576)
SCALE_CHOICES: dict[str, tuple[TempoConfig, dict[str, Any]]] = {
    "stock, unfused": (TempoConfig.off(), {"stock_attention": "unfused"}),
    "SP + selective": (
        TempoConfig.off(),
        {"stock_attention": "unfused", "recompute": ("core_attn",)},
    ),
    "SP, fused attention": (TempoConfig.off(), {}),
    "SP + full": (TempoConfig.off(), {"recompute": ("full",)}),
    "SP + Tempo": (RECOMPUTED, {}),
    "SP + Tempo, offload": (dataclasses.replace(RECOMPUTED, offload="all"), {}),
}


def list_model_cases() -> list[str]:
    return [f"{model} | {choice}" for model, (_, _, choices) in MODELS.items() for choice in choices]


def measure_model(case: str) -> dict[str, Any]:
    """The largest micro batch for every size of memory, and the peak with it."""
    model, _, choice = case.partition(" | ")
    given, changes, _ = MODELS[model]
    fields = read_shape_file(ROOT / f"configs/model/{given}.json") if isinstance(given, str) else given
    shape = make_shape(**{**fields, **changes})
    tempo, settings = CHOICES[choice]
    run = Run(
        model=shape,
        tempo=tempo,
        stock="transformer_engine",
        num_micro_batches=1,
        moe_grouped_gemm=shape.num_experts is not None,
        **settings,
    )
    peaks = dict[int, int]()

    def find_peak(batch: int) -> int:
        if batch not in peaks:
            peaks[batch] = estimate_ranks(dataclasses.replace(run, micro_batch_size=batch))[0].peak_bytes
        return peaks[batch]

    largest = {gib: find_largest(find_peak, (gib - RESERVE_GIB) * GIB) for gib in MEMORIES_GIB}
    return {
        "largest": {str(gib): batch for gib, batch in largest.items()},
        "peak_bytes": {str(gib): peaks[batch] if batch else peaks[1] for gib, batch in largest.items()},
        "num_parameters": estimate_ranks(run)[0].num_parameters,
        "dtype": "bf16",
        "p": shape.hidden_dropout,
        "estimates": len(peaks),
    }


def find_largest(find_peak: Callable[[int], int], limit: int) -> int:
    """The largest batch whose peak is within the limit, by lines through what is known; 0 where none is."""
    if find_peak(1) > limit:
        return 0
    fits, fails = 1, LARGEST_BATCH + 1
    guess = 2
    while fails - fits > 1:
        batch = min(max(guess, fits + 1), fails - 1)
        peak = find_peak(batch)
        if peak <= limit:
            fits = batch
        else:
            fails = batch
        slope = max(1.0, (peak - find_peak(1)) / max(1, batch - 1))
        guess = batch + int((limit - peak) // slope)
        guess += guess == batch  # the line ends where a batch fits: try the next one
    return fits


def list_scale_cases() -> list[str]:
    return [f"{name} | {length} | {choice}" for name in SCALES for length in LENGTHS for choice in SCALE_CHOICES]


def measure_scale(case: str) -> dict[str, Any]:
    """The peak of the fullest rank, and what of it is activations."""
    name, length, choice = case.split(" | ")
    stages = SCALES[name]
    tempo, settings = SCALE_CHOICES[choice]
    fields = read_shape_file(ROOT / f"configs/model/gpt3_{name}.json")
    fields |= {"seq_length": int(length), "max_position_embeddings": int(length)}
    run = Run(
        model=make_shape(**fields),
        tempo=tempo,
        stock="transformer_engine",
        layout=Layout(tp=8, pp=stages, sp=choice.startswith("SP")),
        num_micro_batches=max(stages, 1),
        optimizer=OptimizerSettings(distributed=False),
        **settings,
    )
    fullest = max(estimate_ranks(run), key=lambda rank: rank.peak_bytes)
    states = sum(fullest.parts[part] for part in ("weights", "gradients", "optimizer states"))
    return {
        "peak_bytes": fullest.peak_bytes,
        "activation_bytes": fullest.peak_bytes - states,
        "host_bytes": fullest.host_bytes,
        "rank": fullest.name,
        "gpus": run.layout.world_size,
        "dtype": "bf16",
        "p": run.model.hidden_dropout,
    }


PARTS = {"model": (list_model_cases, measure_model), "scale": (list_scale_cases, measure_scale)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless one is named")
    parser.add_argument("--again", action="store_true", help="estimate what the files have, too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for part in args.part or PARTS:
        if part not in PARTS:
            parser.error(f"{part} is no part; expected {', '.join(PARTS)}")
        list_cases, measure = PARTS[part]
        measure_missing(OUTPUTS[part], list_cases(), measure, again=args.again)


if __name__ == "__main__":
    main()
