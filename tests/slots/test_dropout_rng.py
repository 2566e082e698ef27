"""The micro batch among the states of Megatron's RNG tracker, and masks that would be drawn twice."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_graphs import CudaGenerator
from distributed import run_megatron_ranks
from gpt import FULL, build_gpt, gpt_config, losses
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker, random
from megatron.core.transformer import cuda_graphs
from sequence_parts import list_tokens

from tempo_megatron import TempoConfig, set_micro_batch
from tempo_megatron.megatron_lm.patches import begin_micro_batch
from tempo_megatron.slots.dropout import TempoEmbeddingDropout
from tempo_megatron.slots.dropout_rng import STATE_NAME, compute_document_segments, draws_masks, read_micro_batch


def dropped_hidden_states(num_rows):
    """The rows of this rank, as Megatron splits a sequence, and what dropout makes of ones there."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rows = list_tokens(rank, size, (0, num_rows)).chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]
    set_micro_batch(5, 3)
    config = SimpleNamespace(sequence_parallel=tp > 1, context_parallel_size=size)
    return rows, TempoEmbeddingDropout(0.4, config)(torch.ones(len(rows), 2, 40))


def test_context_and_sequence_parallel_ranks_draw_their_rows_of_the_whole_mask():
    ((_, whole),) = run_megatron_ranks(dropped_hidden_states, 1, 1, 48)
    # Three ranks share two chunks, so that one has rows of both; test_masks.py has other layouts.
    for rows, dropped in run_megatron_ranks(dropped_hidden_states, 6, 3, 48, context_parallel_size=2):
        assert torch.equal(dropped, whole[rows])


def test_a_row_that_context_parallel_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="document 0 of a row has 14 tokens, and 2 .*multiple of 4; pad each document"):
        compute_document_segments((0, 14), 1, 2)


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> CudaGenerator:
    """The default generator of a device whose generators are CudaGenerators."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    generator = CudaGenerator()

    def get_state(device: int = -1, clone: bool = False, graph_safe: bool = False) -> Any:
        if graph_safe:
            return generator.clone_state() if clone else generator.graphsafe_get_state()
        return generator.get_state()

    def set_state(state: Any, device: int = -1, graph_safe: bool = False) -> None:
        (generator.graphsafe_set_state if graph_safe else generator.set_state)(state)

    monkeypatch.setattr(random, "_get_cuda_rng_state", get_state)
    monkeypatch.setattr(random, "_set_cuda_rng_state", set_state)
    monkeypatch.setattr(torch, "Generator", CudaGenerator)
    return generator


def put_beside(state: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    states = {"model-parallel-rng": state}
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", states)
    return states


MICRO_BATCHES = pytest.mark.parametrize(
    ("seed", "sample"), [(1234, 0), (2**63 - 1, 5), (2**64 - 1, 2**48 - 1), (-3, 77)]
)


@MICRO_BATCHES
def test_beside_states_as_bytes_it_is_one_that_megatron_can_load_and_convert(
    seed: int, sample: int, default: CudaGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = put_beside(default.get_state(), monkeypatch)
    set_micro_batch(seed, sample)
    default.set_state(states[STATE_NAME])
    assert read_micro_batch() == (seed % 2**64, sample)
    # As Megatron's checkpoints do where the run that goes on has a tracker for CUDA graphs.
    saved = get_cuda_rng_tracker().get_states()
    converted = {name: random.convert_cuda_rng_state(state, to_graphable=True) for name, state in saved.items()}
    get_cuda_rng_tracker().set_states(converted)
    assert isinstance(converted[STATE_NAME], CudaGenerator) and read_micro_batch() == (seed % 2**64, sample)


@MICRO_BATCHES
def test_beside_states_for_cuda_graphs_it_is_a_generator_of_its_own(
    seed: int, sample: int, default: CudaGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = put_beside(default.clone_state(), monkeypatch)
    set_micro_batch(seed, sample)
    kept = dict(states)
    # What Megatron calls on every state that it registers with a graph; 0.14 and 0.15 register it as it is.
    make_safe = getattr(cuda_graphs, "_ensure_generator_state_is_cudagraph_safe", CudaGenerator.get_state)
    make_safe(states[STATE_NAME])
    assert read_micro_batch() == (seed % 2**64, sample)
    set_micro_batch(seed, 1)
    # Recomputation holds on to the states of its own micro batch.
    get_cuda_rng_tracker().set_states(kept)
    assert read_micro_batch() == (seed % 2**64, sample)
    bytes_of_it = random.convert_cuda_rng_state(kept[STATE_NAME], to_graphable=False)
    assert bytes_of_it.dtype == torch.uint8 and bytes_of_it.numel() == 16


def test_without_dropout_the_tracker_has_megatrons_own_states_only(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(seed=7, consumed_train_samples=24, micro_batch_size=3, data_parallel_size=1)
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_rank", lambda: 0)
    states = put_beside(torch.zeros(16, dtype=torch.uint8), monkeypatch)
    built = SimpleNamespace(draws_masks=False)
    report = SimpleNamespace(models=[built], publish_once=lambda: None)
    begin = functools.partial(begin_micro_batch, report, lambda: run, lambda model, index: (model, index))
    assert begin("chunk", 2) == ("chunk", 2)
    assert list(states) == ["model-parallel-rng"]
    built.draws_masks = True
    begin("chunk", 2)
    assert read_micro_batch() == (7, 24 + 2 * 3)


@pytest.mark.parametrize(
    ("hidden", "attention", "tempo_config", "is_drawn"),
    [
        (0.0, 0.0, TempoConfig(), False),
        (0.1, 0.1, TempoConfig.off(), False),
        (0.1, 0.0, TempoConfig(dropout="off"), False),
        (0.0, 0.1, TempoConfig(attention="off", layers={"3": {"attention": "flash"}}), True),
        (0.1, 0.0, TempoConfig(attention="off"), True),
    ],
)
def test_a_model_draws_where_dropout_is_on_and_tempos(
    hidden: float, attention: float, tempo_config: TempoConfig, is_drawn: bool
) -> None:
    config = SimpleNamespace(hidden_dropout=hidden, attention_dropout=attention)
    assert draws_masks(config, tempo_config) is is_drawn


class RDropModel(GPTModel):  # type: ignore[misc,unused-ignore]
    """Its forward runs the model twice, for two masks of the same samples."""

    second_seed: int | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = super().forward(*args, **kwargs)
        if self.second_seed is not None:
            set_micro_batch(self.second_seed, read_micro_batch()[1])
        return torch.stack([first, super().forward(*args, **kwargs)])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("dropouts", "place"),
    [
        ({"dropout": 0.2}, "EMBEDDING of DECODER layer 0"),
        ({"hidden_dropout": 0.0, "attention_dropout": 0.2}, "ATTENTION of DECODER layer 1"),
    ],
)
def test_a_forward_that_runs_the_model_twice_is_refused_until_it_announces_the_second(
    dropouts: dict[str, float], place: str
) -> None:
    model = build_gpt(gpt_config(**FULL, **dropouts), TempoConfig())
    model.__class__ = RDropModel
    reason = f"^dropout at {place} would draw one mask twice: a second forward in training mode runs.*"
    remedy = r"call tempo_megatron.set_micro_batch\(seed, first_sample\) before each forward"
    with pytest.raises(RuntimeError, match=reason + remedy):
        losses(model, 0, 2, gives_mask=False)
    model.second_seed = 6
    found = losses(model, 0, 2, gives_mask=False)
    found.mean().backward()  # recomputes both, each with its own masks
    assert not torch.equal(*found)
    model.eval().second_seed = None
    assert torch.equal(*losses(model, 0, 2, gives_mask=False))
