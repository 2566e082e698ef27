"""Pseudo-random layers for which the formula of kept bytes is held against the real modules."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import torch
from grid.models import ACTIVATIONS, RECOMPUTE, Sizes, build_config, build_model, make_batch, record_stacks
from kept_formula import (
    LayerShape,
    count_layer_bytes,
    count_prediction_bytes,
    count_stack_bytes,
    list_layer_rows,
)
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.nn import functional as F

from tempo_megatron import TempoConfig, use_cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.tape.rows import find_layer, sum_rows
from tempo_megatron.memory.tape.scopes import SavedStorage
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.mlp import name_activation

MORE_ACTIVATIONS: dict[str, dict[str, Any]] = {
    **ACTIVATIONS,
    "silu": {"activation_func": F.silu},
    "reglu": {"activation_func": F.relu, "gated_linear_unit": True},
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One model of two layers, and the Tempo in it."""

    family: str
    tp: int
    settings: dict[str, Any]
    tempo: TempoConfig
    sizes: Sizes


def draw_layer(seed: int) -> Layer:
    """A layer that Megatron can have, whose sizes, odd ones too, follow from the seed."""
    draw = random.Random(seed)
    family = ("GPT", "BERT", "T5", "Llama")[seed % 4]
    tp = draw.choice((1, 2, 4))
    sequence_parallel = tp > 1 and family != "BERT" and draw.random() < 0.5
    heads = tp * draw.choice((1, 2, 3, 4))
    activation = draw.choice(tuple(MORE_ACTIVATIONS))
    in_place = ("inplace",) if activation in ("gelu", "squared_relu") else ()
    seq_length = tp * draw.choice((3, 5, 8, 11)) if sequence_parallel else draw.choice((7, 16, 21, 33))
    groups = heads
    if family in ("GPT", "Llama") and draw.random() < 0.5:
        groups = draw.choice([g for g in range(tp, heads + 1, tp) if heads % g == 0])
    head_dim = draw.choice((4, 6, 10))
    dropout = draw.choice((0.0, 0.1))
    recompute = draw.choice(tuple(RECOMPUTE))
    settings = {
        **MORE_ACTIVATIONS[activation],
        "dtype": draw.choice((torch.float32, torch.bfloat16, torch.float16)),
        "sequence_parallel": sequence_parallel,
        "hidden_size": draw.choice((heads * head_dim, 24, 40)),
        "ffn_hidden_size": tp * draw.choice((9, 16, 31)),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "hidden_dropout": dropout,
        "attention_dropout": draw.choice((dropout, 0.1)),
        "normalization": draw.choice(("LayerNorm", "RMSNorm")),
        # Stock never ends where it recomputes an MLP with biases; this is only its forward.
        "add_bias_linear": family != "Llama" and draw.random() < 0.7,
        "recompute": recompute,
    }
    tempo = TempoConfig(
        activation=draw.choice(("auto", "off", "recompute", *in_place)),
        norm=draw.choice(("auto", "off", "inplace", "recompute")),
        dropout=draw.choice(("auto", "off", "recompute")),
        attention=draw.choice(("auto", "off", "flash", "softmax")),
        loss="auto",
    )
    if draw.random() < 0.25:
        tempo = TempoConfig.off()
    else:
        tempo = _draw_what_runs_again(draw, tempo, keeps_copies=groups != heads and recompute != "core_attn")
    return Layer(family, tp, settings, tempo, Sizes(seq_length, draw.choice((1, 2, 3)), 8 * tp))


def _draw_what_runs_again(draw: random.Random, tempo: TempoConfig, *, keeps_copies: bool) -> TempoConfig:
    attention = draw.choice((tempo.attention, tempo.attention, "recompute"))
    # Stock attention that keeps copies of keys and values is refused.
    may_drop = attention != "off" or not keeps_copies
    return dataclasses.replace(
        tempo,
        attention=attention,
        linear_fc1=draw.choice(("auto", "off", "recompute")),
        linear_qkv=draw.choice(("auto", "recompute")) if may_drop else "off",
    )


def measure_and_count(layer: Layer) -> dict[str, tuple[int, int]]:
    """Stack -> (bytes that its layers keep, measured; the formula's)."""
    stacks, config, chosen = _measure(layer)
    measured = {stack: sum(saved.num_bytes for saved in kept) for stack, kept in stacks.items()}
    return {
        stack: (measured[stack], count_stack(layer.family, stack, config, chosen, layer.sizes)) for stack in measured
    }


def list_ledger_and_formula(layer: Layer) -> tuple[dict[str, int], dict[str, int]]:
    """Row -> bytes of the decoder's first layer, in the ledger and in the formula."""
    stacks, config, chosen = _measure(layer)
    saved = [each for each in stacks["decoder"] if find_layer(each.operation) == ("decoder", 0)]
    activation = name_activation(config)
    assert activation is not None
    shape = _make_shape(layer.family, "decoder", config, layer.sizes)
    formula: Counter[str] = Counter()
    for row in list_layer_rows(shape, chosen):
        formula[row.operation] += row.num_bytes
    ledger = {row.operation: row.num_bytes for row in sum_rows(saved, [layer.sizes.seq_length], activation)}
    return ledger, dict(formula)


def _measure(layer: Layer) -> tuple[dict[str, list[SavedStorage]], Any, TempoConfig]:
    """(stack -> what its layers keep, the configuration, what was chosen)."""
    use_cpu()
    MTPLossLoggingHelper.tracker.clear()  # sized by the first model of a process
    # Megatron has squared ReLU compiled, for each shape anew; what it keeps is the same.
    with torch.compiler.set_stance("force_eager"), simulate_layout(layer.tp):
        config = build_config(**layer.settings)
        chosen = choose(config, layer.tempo).config
        model_parallel_cuda_manual_seed(1)
        dropout_rng.set_micro_batch(5, 0)
        model = build_model(layer.family, config, layer.tempo, layer.sizes)
        args, kwargs = make_batch(layer.family, 0, layer.sizes, gives_mask=chosen.attention == "off")
        _, stacks = record_stacks(model, lambda: model(*args, **kwargs))
    return stacks, config, chosen


def count_stack(
    family: str,
    stack: str,
    config: Any,
    chosen: TempoConfig,
    sizes: Sizes,
    *,
    longest_document: int | None = None,
) -> int:
    """What the formula says of one stack of one chunk of the model on this rank."""
    shape = _make_shape(family, stack, config, sizes, longest_document)
    if stack == "mtp":
        return count_prediction_bytes(shape, chosen, config.mtp_num_layers)
    num_chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    num_layers = config.num_layers // num_chunks
    return num_layers * count_layer_bytes(shape, chosen) + count_stack_bytes(shape, chosen)


def _make_shape(family: str, stack: str, config: Any, sizes: Sizes, longest_document: int | None = None) -> LayerShape:
    activation = name_activation(config)
    assert activation is not None
    recompute = {"full": {"full"}, "selective": set(config.recompute_modules or ())}
    heads_exchanged = _count_ranks_of_heads(config)
    fields = (field.name for field in dataclasses.fields(LayerShape))
    values: dict[str, Any] = {
        **{name: getattr(config, name) for name in fields if hasattr(config, name)},
        "seq_length": sizes.seq_length // config.context_parallel_size,
        "heads_exchanged": heads_exchanged,
        "exchanges_rows": config.context_parallel_size > heads_exchanged,
        "longest_document": longest_document,
        "latent": config if config.multi_latent_attention else None,
        "micro_batch_size": sizes.micro_batch_size,
        "dtype": config.params_dtype,
        "tensor_parallel": config.tensor_model_parallel_size,
        "activation": activation,
        "rotary": family == "Llama",
        "has_window": config.window_size is not None,
        "softmax_in_fp32": config.attention_softmax_in_fp32 and not config.masked_softmax_fusion,
        "encoder_length": sizes.seq_length if (family, stack) == ("T5", "decoder") else None,
        "recompute": frozenset(recompute.get(config.recompute_granularity, ())),
    }
    return LayerShape(**values)


def _count_ranks_of_heads(config: Any) -> int:
    """How many context-parallel ranks exchange heads."""
    if config.context_parallel_size == 1 or config.cp_comm_type not in ("a2a", "a2a+p2p"):
        return 1
    if config.cp_comm_type == "a2a":
        return int(config.context_parallel_size)
    return int(parallel_state.get_hierarchical_context_parallel_groups()[0].size())
