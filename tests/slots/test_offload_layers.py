"""Megatron's layers with offload: whatever the link's delays, results are bit for bit those without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import (
    LLAMA,
    RECOMPUTE,
    WRITTEN,
    bert_losses,
    build_bert,
    build_gpt,
    build_t5,
    gpt_config,
    losses,
    run_schedule,
    t5_losses,
)
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_runs import with_sample
from slow_links import Careless, SlowLink

from tempo_kernels.offload import Device, Direction
from tempo_megatron import TempoConfig
from tempo_megatron.slots.offload import Offloading, count_in_flight, offload_layers

pytestmark = pytest.mark.usefixtures("one_rank")
OFF = TempoConfig.off()
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
REPEATED = TempoConfig(linear_fc1="recompute", linear_qkv="recompute")
NUM_LAYERS = 4

# Name -> (family, values, what moves, further settings).
CASES: dict[str, tuple[str, TempoConfig, str, dict[str, Any]]] = {
    "in place": ("gpt", WRITTEN, "all", {}),
    "recompute": ("gpt", RECOMPUTE, "all", {}),
    "linears again": ("gpt", REPEATED, "all", {}),
    "llama, rows": ("llama", TempoConfig(), "pre_mlp_layernorm+mlp.linear_fc1+mlp+self_attention", LLAMA),
    "bert": ("bert", WRITTEN, "all", {}),
    "t5": ("t5", WRITTEN, "all", {}),
    "all layers again": ("gpt", WRITTEN, "input", {**FULL, "recompute_num_layers": 1}),
    "two layers again": ("gpt", TempoConfig(), "all", {**FULL, "recompute_method": "block", "recompute_num_layers": 2}),
    "attention again": ("llama", TempoConfig(), "all", LLAMA | CORE),
    # Stock, and families with the other kinds of recomputation: with --exhaustive.
    "stock": ("gpt", OFF, "all", {}),
    "llama": ("llama", TempoConfig(), "all", LLAMA),
    "pairs of layers again": ("gpt", OFF, "all", {**FULL, "recompute_num_layers": 2}),
    "gpt, attention again": ("gpt", WRITTEN, "all", CORE),
    "llama, all layers again": ("llama", TempoConfig(), "all", {**LLAMA, **FULL, "recompute_num_layers": 1}),
    "bert, all layers again": ("bert", WRITTEN, "all", {**FULL, "recompute_num_layers": 1}),
    "bert, attention again": ("bert", WRITTEN, "all", CORE),
}
# A way to forget to wait -> the directions of copies for which nobody waits, and of how many of these.
CONTROLS: dict[str, tuple[tuple[Direction, ...], float]] = {
    "a reload does not wait for the copy out, nor whoever frees what is copied": (("out",), 1.0),
    "backward does not wait for the reload": (("in",), 1.0),
    "one event in three is dropped": (("out", "in"), 1 / 3),
}


class Model:
    """A small model of a case, with what runs a training step of three micro batches on it."""

    def __init__(self, case: str, sequence_parallel: bool) -> None:
        self.family, values, self.moves, settings = CASES[case]
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        if stages > 1:
            settings = {**settings, "pipeline_model_parallel_size": stages, "pipeline_dtype": torch.float32}
        self.config = gpt_config(
            num_layers=NUM_LAYERS, sequence_parallel=sequence_parallel, dropout=0.1, **settings, batch_p2p_sync=False
        )
        where = {
            "pre_process": parallel_state.is_pipeline_first_stage(),
            "post_process": parallel_state.is_pipeline_last_stage(),
        }
        build = {"bert": build_bert, "t5": build_t5}.get(self.family, build_gpt)
        rotary = {"position_embedding_type": "rope"} if self.family == "llama" else {}
        self.model = build(self.config, values, **rotary, **(where if stages > 1 else {}))

    def forward(self, first_sample: int) -> torch.Tensor:
        if self.family == "t5":
            return t5_losses(self.model)
        if self.family == "bert":
            return bert_losses(self.model, first_sample)
        return losses(self.model, first_sample, 2, gives_mask=True)

    def step(self, data: int) -> list[torch.Tensor]:
        """Losses and gradients of a step: 1F1B, or three accumulated micro batches of which two wait at once."""
        self.model.zero_grad()
        # Stock draws its masks from these.
        torch.manual_seed(data)
        model_parallel_cuda_manual_seed(data)
        first_samples = [6 * data + 2 * number for number in range(3)]
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            told = [self.forward(first) for first in first_samples[:2]]
            for loss in reversed(told):
                loss.mean().backward()
            told.append(self.forward(first_samples[2]))
            told[2].mean().backward()
        else:
            told = run_schedule(self.model, self.forward, first_samples)
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [tensor.detach().clone() for tensor in (*told, *grads)]

    def offload(self, device: Device) -> Offloading:
        offloading = Offloading(device, num_in_flight=count_in_flight(3), min_bytes=512)
        offloading.add(self.model, TempoConfig(offload=self.moves))
        return offloading


def run_patterns(cases: list[str], num_patterns: int, sequence_parallel: bool = False) -> int:
    """Holds steps of each case under that many patterns of delays against those without offload; returns how many."""
    for case in cases:
        model = Model(case, sequence_parallel)
        expected = [model.step(data) for data in range(2)]
        device = SlowLink()
        offloading, num_allocations = model.offload(device), set()
        engine = offloading.engine
        for seed in range(num_patterns):
            device.begin_pattern(seed)
            assert all(map(torch.equal, model.step(seed % 2), expected[seed % 2])), f"{case}, pattern {seed}"
            num_allocations.add(engine.pool.num_allocations)
        assert engine.moved_bytes > 0 and engine.device_bytes == engine.pool.num_bytes_in_use == 0
        assert len(num_allocations) == 1, "nothing is allocated after the first step"
    return len(cases) * num_patterns


@pytest.fixture
def num_patterns(request: pytest.FixtureRequest) -> int:
    return 100 if request.config.getoption("--exhaustive") else 3


@pytest.mark.parametrize("case", with_sample(CASES, list(CASES)[:9]))
def test_no_delay_changes_a_bit(case: str, num_patterns: int) -> None:
    assert run_patterns([case], num_patterns) == num_patterns


@pytest.mark.parametrize("case", with_sample(CASES, ["in place"]))
def test_a_wait_that_is_missing_changes_gradients(case: str) -> None:
    """Each way to forget a wait fails one of a hundred patterns."""
    model = Model(case, sequence_parallel=False)
    expected = [model.step(data) for data in range(2)]
    for control, (forgets, share) in CONTROLS.items():
        device = Careless(forgets, share)
        offloading = model.offload(device)

        def is_right(seed: int, device: Careless = device) -> bool:
            device.begin_pattern(seed)
            return all(map(torch.equal, model.step(seed % 2), expected[seed % 2]))

        assert not all(map(is_right, range(100))), control
        offloading.remove()


LAYOUTS = {
    "TP 2 + SP": (2, 1, ["in place", "linears again", "two layers again", "attention again"]),
    "PP 2": (1, 2, ["in place", "llama, rows", "all layers again"]),
    "TP 2 + SP, PP 2": (2, 2, []),
}
"""Name -> TP, PP, the cases that run always."""


def list_cases_of_layout(tp: int, pp: int) -> list[str]:
    """All but for what cannot be: T5 has no pipeline here; the norm of BERT's head refuses sequence parallelism without
    Apex; and the second of two stages has one pair of layers, whose input is another rank's, so that nothing moves
    there."""
    return [
        case
        for case, (family, *_) in CASES.items()
        if family != "t5" and not (tp > 1 and family == "bert") and not (pp > 1 and case == "pairs of layers again")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_sample(LAYOUTS, ["TP 2 + SP", "PP 2"]))
def test_no_delay_changes_a_bit_beside_other_ranks(
    layout: str, num_patterns: int, request: pytest.FixtureRequest
) -> None:
    tp, pp, cases = LAYOUTS[layout]
    if request.config.getoption("--exhaustive"):
        cases = list_cases_of_layout(tp, pp)
    ranks = run_megatron_ranks(
        run_patterns, tp * pp, tp, cases, num_patterns, tp > 1, pipeline_model_parallel_size=pp, timeout_s=1800
    )
    assert ranks == [len(cases) * num_patterns] * tp * pp


def test_as_many_forwards_wait_as_a_schedule_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 4)
    for rank, num_chunks, num_micro_batches, expected in ((0, 1, 8, 4), (3, 1, 8, 1), (0, 1, 2, 2), (1, 2, 16, 8)):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        assert count_in_flight(num_micro_batches, num_chunks) == expected


def test_what_stands_in_the_way_is_refused_by_name() -> None:
    model = Model("stock", False).model
    for name in ("cpu_offloading", "distribute_saved_activations", "enable_cuda_graph"):
        model.config.__dict__[name] = True
        with pytest.raises(ValueError, match=f"tempo.offload is given and {name} is on, .* leave {name} out"):
            offload_layers([model], TempoConfig(layers={"3": {"offload": "mlp"}}))
        assert offload_layers([model], TempoConfig()).num_layers == 0
        model.config.__dict__[name] = False
