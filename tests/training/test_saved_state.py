"""What one tensor parallel size wrote is read by another, as the model's own sharded_state_dict cuts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import parametrize_covering
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, WRITTEN, gpt_config, tokens_of
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize_embedding, tempoize_loss
from tempo_megatron.slots import dropout_rng
from tempo_megatron.training.checkpoint_files.files import name_rank_file
from tempo_megatron.training.checkpoint_files.saved_state import SavedState, get_model_file
from tempo_megatron.training.checkpoint_files.sharding import MOMENTS, Box, get_cuts, overlap

OFF = TempoConfig(**dict.fromkeys(("activation", "norm", "dropout", "attention", "loss"), "off"))
LLAMA: dict[str, Any] = {
    "num_query_groups": 2, "gated_linear_unit": True, "activation_func": F.silu, "normalization": "RMSNorm",
    "add_bias_linear": False, "ffn_hidden_size": 40,
}  # fmt: skip
# What TransformerConfig gets, what GPTModel gets.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPT-2": ({}, {"share_embeddings_and_output_weights": True}),
    "Llama, fewer groups than ranks": (
        LLAMA, {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
    ),
    "gated with biases and norms of q and k": (
        {**LLAMA, "num_query_groups": 4, "add_bias_linear": True, "add_qkv_bias": True, "qk_layernorm": True},
        {"share_embeddings_and_output_weights": True},
    ),
}  # fmt: skip


def build(name: str, tempo: TempoConfig, sequence_parallel: bool) -> GPTModel:
    """A model of MODELS whose every element is its own, replicated parameters equal on all ranks."""
    settings, options = MODELS[name]
    config = gpt_config(sequence_parallel=sequence_parallel, **settings)
    model = GPTModel(
        config, tempo_block_spec(config, tempo), vocab_size=VOCAB_SIZE, max_sequence_length=SEQ_LENGTH, **options
    )
    tempoize_embedding(model, tempo)
    tempoize_loss(model, tempo)
    for number, parameter in enumerate(model.parameters()):
        is_divided = getattr(parameter, "tensor_model_parallel", False)
        rank = parallel_state.get_tensor_model_parallel_rank() if is_divided else 0
        generator = torch.Generator().manual_seed(100 * number + rank)
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def compute_loss(model: GPTModel) -> float:
    dropout_rng.set_micro_batch(5, 0)
    tokens = tokens_of(0, 2)
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    hidden = torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1).view(1, 1, SEQ_LENGTH, SEQ_LENGTH)
    with torch.no_grad():
        losses = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:])
    return losses.double().mean().item()


def make_moments(weight: torch.Tensor) -> list[torch.Tensor]:
    return [2 * weight, weight.square()]


def save(folder: str, name: str, tempo: TempoConfig, sequence_parallel: bool) -> float:
    """Write the model as DeepSpeed does without ZeRO, and the trainer's file beside it."""
    model = build(name, tempo, sequence_parallel)
    weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
    states = {
        number: {"step": torch.tensor(3.0), **dict(zip(MOMENTS, make_moments(weight), strict=True))}
        for number, weight in enumerate(weights.values())
    }
    rank = parallel_state.get_tensor_model_parallel_rank()
    torch.save({"module": weights, "optimizer": {"state": states}}, get_model_file(Path(folder), rank, 0))
    fragments = [(key, number, 0, 0, weight.numel()) for number, (key, weight) in enumerate(weights.items())]
    cuts = {key: cut.pack() for key, cut in get_cuts(model).items()}
    layout = {"pp_rank": 0, "tp_rank": rank, "dp_rank": 0, "cuts": cuts, "fragments": fragments}
    torch.save({"layout": layout}, Path(folder) / name_rank_file(rank))
    return compute_loss(model)


def load(folder: str, source_tp: int, name: str, tempo: TempoConfig, sequence_parallel: bool) -> tuple[float, float]:
    """The losses of a model before and after its weights are read, in two ranges each, as data-parallel ranks do."""
    model = build(name, tempo, sequence_parallel)
    before = compute_loss(model)
    tp, tp_rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    saved = {"zero_stage": 0, "tensor_model_parallel_size": source_tp, "data_parallel_size": 1}
    state = SavedState(Path(folder), saved)
    cuts, weights = get_cuts(model), dict(model.named_parameters())
    assert state.find_mismatch(cuts, set(weights), tp) is None
    for key, parameter in weights.items():
        middle = parameter.numel() * 3 // 7
        ranges = [(0, middle), (middle, parameter.numel())]
        weight, *moments = (
            torch.cat([state.read(key, kind, *r, cut=cuts[key], tp=tp, tp_rank=tp_rank) for r in ranges])
            for kind in ("weight", *MOMENTS)
        )
        assert all(map(torch.equal, moments, make_moments(weight))), key
        parameter.data.copy_(weight.view(parameter.shape))
        assert state.read_step(key) == 3
    return before, compute_loss(model)


@parametrize_covering(each={"sizes": [(1, 4), (4, 1), (4, 2), (2, 4)]}, name=list(MODELS))
def test_another_tensor_parallel_size_computes_the_same(tmp_path: Path, name: str, sizes: tuple[int, int]) -> None:
    """Stock modules write, Tempo's read, or the other way round; with sequence parallelism or without."""
    source, target = sizes
    tempos = (OFF, WRITTEN) if source < target else (WRITTEN, OFF)
    if MODELS[name][0]:  # the formula in place is GELU's, and stock's norms refuse sequence parallelism on a CPU
        tempos = (TempoConfig(activation="off", norm="inplace"), TempoConfig(activation="recompute", norm="recompute"))
    saved = run_megatron_ranks(save, source, source, str(tmp_path), name, tempos[0], source == 4)
    for before, loaded in run_megatron_ranks(load, target, target, str(tmp_path), source, name, tempos[1], target == 4):
        assert loaded == pytest.approx(saved[0], rel=1e-6)
        assert before != pytest.approx(saved[0], rel=1e-3)  # it was not equal without the reading


def test_blocks_that_overlap_are_found_where_each_has_them() -> None:
    ours, theirs = Box((0, 0), (4, 0), (4, 6)), Box((2, 0), (6, 3), (9, 9))
    assert overlap(ours, theirs) == (Box((2, 3), (6, 3), (2, 3)), Box((2, 0), (6, 3), (2, 3)))
    assert overlap(ours, Box((0, 0), (8, 0), (1, 1))) is None
    assert ours.take_rows(1, 3) == Box((1, 0), (5, 0), (2, 6))
    assert ours.take_rows(4, 9) is None
