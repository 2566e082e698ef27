"""Measures what it takes to run a gated MLP, or its first linear alone, again in backward.

python benchmarks/recomputed_mlp.py    # appends to benchmarks/results/cpu/recomputed_mlp.jsonl

Megatron's layer with Tempo's operations, shaped as Llama 3 8B's at a quarter of its width, alternates with itself under
Megatron's `--recompute-modules mlp`, and with `linear_fc1` "recompute"; time is CPU seconds of forward and backward in
float32. With it stands what the planner's price (tempo_megatron/memory/plan/choices.py) says of the whole width in
bf16 on an H100: a model's, which no GPU has measured. Both are ratios to the layer that runs no product again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from measurements import RESULTS, describe_cpu_run, record_measurement
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock

from tempo_megatron import TempoConfig, cpu, tempo_block_spec
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.plan.choices import LayerChoice, LayerOptions, count_moved_bytes, count_recomputed_flops
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.run import Run
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS

CONFIG = {"activation": "recompute", "norm": "recompute", "attention": "flash"}
# Tempo's values, and Megatron's recompute modules.
FORMS: dict[str, tuple[TempoConfig, frozenset[str]]] = {
    "nothing": (TempoConfig(**CONFIG), frozenset()),
    "linear_fc1": (TempoConfig(**CONFIG, linear_fc1="recompute"), frozenset()),
    "mlp": (TempoConfig(**CONFIG), frozenset({"mlp"})),
}
CHANNELS = 128


def make_layer_shape(hidden_size: int, seq_length: int) -> ModelShape:
    """One layer of Llama 3 8B's proportions."""
    return make_shape(
        num_layers=1, hidden_size=hidden_size, ffn_hidden_size=hidden_size * 7 // 2, seq_length=seq_length,
        num_attention_heads=hidden_size // CHANNELS, num_query_groups=hidden_size // CHANNELS // 4,
        normalization="RMSNorm", activation="swiglu", position_embedding_type="rope", add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, vocab_size=128,
    )  # fmt: skip


def model_ms(form: str, seq_length: int) -> float:
    """Forward and backward of a layer at the whole width on an H100, by the planner's price."""
    tempo_config, recompute = FORMS[form]
    shape = make_layer_shape(4096, seq_length)
    run = Run(model=shape, tempo=tempo_config, recompute=tuple(recompute), stock="transformer_engine")
    options = LayerOptions(run, read_gpu("h100"))
    choice = LayerChoice(tuple(getattr(tempo_config, name) for name in LAYER_OPERATIONS), recompute)
    flops = options.flops
    products = 3 * flops.total + count_recomputed_flops(flops, choice)
    # A linear's FLOPs are two for each weight and token. Each weight is read twice, and its gradient added in float32.
    moved = (2 * 2 + 2 * 4) * (flops.linears // (2 * seq_length)) + count_moved_bytes(run, choice)
    return options.seconds(products, moved) * 1e3


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The ratios of the medians."""
    torch.set_num_threads(1)
    cpu.use_cpu()
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    with simulate_layout(1):
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        layers = {form: _build(form, args) for form in FORMS}
        angles = RotaryEmbedding(CHANNELS, rotary_percent=1.0, use_cpu_initialization=True)(args.seq_length)
        for number in range(-2, args.rounds):
            for form, layer in layers.items():
                x = torch.randn(args.seq_length, 1, args.hidden_size, requires_grad=True)
                start = time.process_time()
                out = layer(x, attention_mask=None, rotary_pos_emb=angles)[0]
                out.backward(torch.ones_like(out))
                if number >= 0:
                    seconds[form].append(time.process_time() - start)
                layer.zero_grad()
    medians = {form: statistics.median(found) for form, found in seconds.items()}
    return {
        "hidden_size": args.hidden_size,
        "seq_length": args.seq_length,
        "rounds": args.rounds,
        "cpu_ratio": {form: round(median / medians["nothing"], 3) for form, median in medians.items()},
        "model_h100_ratio": {
            s: {form: round(model_ms(form, s) / model_ms("nothing", s), 3) for form in FORMS} for s in (2048, 8192)
        },
        **describe_cpu_run(),
    }


def _build(form: str, args: argparse.Namespace) -> Any:
    tempo_config, recompute = FORMS[form]
    selective = {"recompute_granularity": "selective", "recompute_modules": [*recompute]} if recompute else {}
    config = build_transformer_config(make_layer_shape(args.hidden_size, args.seq_length), **selective)
    torch.manual_seed(1234)
    (layer,) = TransformerBlock(config, tempo_block_spec(config, tempo_config)).train().layers
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--seq-length", type=int, default=512, help="default %(default)s")
    record_measurement(parser, measure, RESULTS / "cpu" / "recomputed_mlp.jsonl", rounds=12)


if __name__ == "__main__":
    main()
