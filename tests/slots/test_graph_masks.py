"""Dropout masks in CUDA graphs, of which cpu_graphs.py makes CPU ones; the masks are those of ordinary calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import cpu_graphs
import pytest
import torch
from gpt import FULL, build_gpt, gpt_config, run_tokens, tokens_of
from megatron.core import full_cuda_graph
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs

from tempo_megatron import TempoConfig, set_micro_batch
from tempo_megatron.megatron_lm.patches import begin_micro_batch, begin_whole_step
from tempo_megatron.slots.dropout import TempoEmbeddingDropout
from tempo_megatron.slots.dropout_rng import STATE_NAME, Site, find_key_and_sample, forget_graphs

INPLACE = TempoConfig(activation="inplace", norm="inplace", dropout="recompute", attention="flash", loss="off")


def build(**settings: Any) -> Any:
    return build_gpt(gpt_config(num_layers=1, dropout=0.2, **settings), INPLACE)


def step_of(model: Any, tokens: Any) -> list[torch.Tensor]:
    """Losses, and the gradient of their mean by the embedding."""
    found = run_tokens(model, tokens)
    return [found.detach(), *torch.autograd.grad(found.mean(), [model.embedding.word_embeddings.weight])]


def ordinary(model: Any, tokens: Any, sample: int) -> list[torch.Tensor]:
    forget_graphs()
    set_micro_batch(5, sample)
    return step_of(model, tokens)


def capture(function: Any) -> tuple[Any, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return graph, found


@pytest.fixture(autouse=True)
def without_graphs() -> Iterator[None]:
    """Nothing is announced to graphs, before and after."""
    forget_graphs()
    yield
    forget_graphs()


@pytest.fixture
def captures(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torch.cuda captures CPU graphs."""
    cpu_graphs.install(monkeypatch)
    return monkeypatch


def test_replays_of_one_graph_draw_the_masks_of_ordinary_calls(captures: pytest.MonkeyPatch) -> None:
    model, tokens = build(), tokens_of(0, 2)
    set_micro_batch(5, 3, device="cpu")
    step_of(model, tokens)  # as the warm-up of a capture
    set_micro_batch(5, 3, device="cpu")
    graph, results = capture(lambda: step_of(model, tokens))
    found = []
    for sample in range(4, 14):
        set_micro_batch(5, sample)  # still written, because a graph was captured
        graph.replay()
        found.append([each.clone() for each in results])
    with pytest.raises(RuntimeError, match="seed is 6, and a CUDA graph was captured with the keys of seed 5"):
        set_micro_batch(6, 0)
    for sample, ours in enumerate(found, 4):
        assert all(torch.equal(*pair) for pair in zip(ours, ordinary(model, tokens, sample), strict=True))
    assert len({one[0].sum().item() for one in found}) == 10


def test_a_capture_that_would_freeze_its_masks_is_refused(captures: pytest.MonkeyPatch) -> None:
    model, tokens = build(), tokens_of(0, 2)
    set_micro_batch(5, 3)
    remedy = r'call tempo_megatron.set_micro_batch\(seed, first_sample, device="cuda"\) before the capture'
    with pytest.raises(RuntimeError, match=remedy):
        capture(lambda: run_tokens(model, tokens))
    # What the refusal is for.
    set_micro_batch(5, 3)
    with captures.context() as unaware:
        unaware.setattr(torch.cuda, "is_initialized", lambda: False)
        graph, results = capture(lambda: step_of(model, tokens))
    before = results[0].clone()
    set_micro_batch(5, 4)
    graph.replay()
    assert torch.equal(before, results[0])
    # Recomputed in the graph of a backward of its own.
    recomputed = build(**FULL)
    set_micro_batch(5, 3, device="cpu")
    found = run_tokens(recomputed, tokens)
    with pytest.raises(RuntimeError, match="a recomputed forward with dropout is captured in a CUDA graph"):
        capture(lambda: found.mean().backward())


def gradients_of_1f1b(device: str | None) -> Any:
    """Two micro batches, of which the second's forward runs before the first's recomputation."""
    forget_graphs()
    model, tokens = build(**FULL), tokens_of(0, 2)
    found = []
    for sample in (0, 6):
        set_micro_batch(5, sample, device=device)
        found.append(run_tokens(model, tokens).mean())
    for loss in found:
        loss.backward()
    forget_graphs()
    return model.embedding.word_embeddings.weight.grad


def steps_of_megatrons_graph(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """Losses and gradients of four steps of two micro batches, by Megatron's graph of a whole step, and without it."""
    monkeypatch.setattr(torch, "Generator", cpu_graphs.CudaGenerator)
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", {"model-parallel-rng": cpu_graphs.CudaGenerator()})
    monkeypatch.setattr(full_cuda_graph, "get_all_rng_states", lambda: get_cuda_rng_tracker().states_)
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_rank", lambda: 0)
    model = build(**settings)
    args = SimpleNamespace(seed=5, consumed_train_samples=0, micro_batch_size=2, data_parallel_size=1)
    report: Any = SimpleNamespace(
        models=[SimpleNamespace(draws_masks=True)], publish_once=lambda: None, say_what_moves=lambda: None
    )
    begin = functools.partial(begin_micro_batch, report, lambda: args, lambda model, index: None)
    model.zero_grad()
    weight = model.embedding.word_embeddings.weight
    weight.grad = torch.zeros_like(weight)

    def schedule(**given: Any) -> Any:
        (batches,) = given["data_iterator"]
        weight.grad.zero_()
        found = []
        for index in range(given["num_microbatches"]):
            begin(model, index)
            loss = run_tokens(model, next(batches)["tokens"])
            loss.mean().backward()
            found.append(loss.detach())
        return found

    def train(step: Any) -> list[torch.Tensor]:
        told = []
        for number in range(4):
            args.consumed_train_samples = 4 * number
            data = iter([{"tokens": tokens_of(4 * number, 2)}, {"tokens": tokens_of(4 * number + 2, 2)}])
            sizes = {"num_microbatches": 2, "seq_length": 16, "forward_only": False}
            found = step(model=[model], data_iterator=data, **sizes)
            told += [*(each.clone() for each in found), weight.grad.clone()]
        return told

    wrapper = full_cuda_graph.FullCudaGraphWrapper
    announce, call = functools.partial(begin_whole_step, report, lambda: args), wrapper.__call__
    monkeypatch.setattr(wrapper, "__call__", lambda self, *given, **more: announce(call, self, *given, **more))
    found = train(wrapper(schedule, cuda_graph_warmup_steps=1))
    graph = wrapper.cuda_graph["training"]
    states = len(graph.registered)
    wrapper.curr_iteration["training"], wrapper.cuda_graph["training"] = 0, None
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", {"rng": torch.zeros(16, dtype=torch.uint8)})
    forget_graphs()
    wanted = train(lambda data_iterator, **given: schedule(data_iterator=[data_iterator], **given))
    return states, found, wanted


def test_recomputation_outside_of_graphs_finds_its_own_micro_batch(captures: pytest.MonkeyPatch) -> None:
    assert torch.equal(gradients_of_1f1b("cpu"), gradients_of_1f1b(None))


@pytest.mark.parametrize("settings", [{}, FULL], ids=["as it is", "recomputed"])
def test_megatrons_graph_of_a_whole_step_draws_the_masks_of_its_micro_batches(
    captures: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    states, found, wanted = steps_of_megatrons_graph(captures, **settings)
    assert states == 2  # Megatron's own and Tempo's
    assert len(found) == len(wanted) == 12
    for ours, ordinary_ones in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, ordinary_ones, rtol=0, atol=0)


@pytest.mark.gpu
def test_replays_on_a_gpu_draw_the_masks_of_ordinary_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", {})
    dropout = TempoEmbeddingDropout(0.3, SimpleNamespace(sequence_parallel=False, context_parallel_size=1))
    x = torch.ones(64, 2, 256, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        set_micro_batch(5, 3, device="cuda")
        dropout(x)
    side.synchronize()
    graph, out = capture(lambda: dropout(x))
    found = []
    for sample in range(10):
        set_micro_batch(5, sample)
        graph.replay()
        found.append(out.clone())
    forget_graphs()
    for sample, each in enumerate(found):
        set_micro_batch(5, sample)
        assert torch.equal(each, dropout(x))
        assert not any(torch.equal(each, other) for other in found[:sample])


def test_forwards_that_megatron_repeats_to_capture_a_graph_draw_one_mask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_cuda_rng_tracker(), "states_", {})
    set_micro_batch(5, 7, device="cpu")
    place = (3, Site.MLP_OUTPUT)
    key, sample = find_key_and_sample(*place)
    for flag in ("_IS_GRAPH_WARMUP", "_IS_GRAPH_CAPTURING"):
        monkeypatch.setattr(cuda_graphs, flag, True)
        assert find_key_and_sample(*place) == (key, sample)
        monkeypatch.setattr(cuda_graphs, flag, False)
    with pytest.raises(RuntimeError, match="would draw one mask twice"):
        find_key_and_sample(*place)
    set_micro_batch(5, 8)
    assert isinstance(find_key_and_sample(*place)[1], int)
    assert STATE_NAME in get_cuda_rng_tracker().states_
