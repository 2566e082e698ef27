"""Linears, and attention, that run again in backward: the same losses and gradients, bit by bit, from fewer bytes; and
the MLP a tile of tokens at a time, from its input alone. How many bytes these are says tests/memory/test_formula.py."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import megatron_cpu
import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from formula_cases import count_stack
from gpt import build_gpt, gpt_config, losses
from grid.cases import Case as GridCase
from grid.cases import Layout
from grid.models import LLAMA, Sizes, build_config, build_model, fill_weights, make_batch, read_losses, record_stacks
from grid.run_model import run_model
from megatron.core.tensor_parallel import layers, model_parallel_cuda_manual_seed
from torch.nn import functional as F

from tempo_kernels.attention import cpu as attention_cpu
from tempo_kernels.norm import cpu as norm_cpu
from tempo_megatron import TempoConfig
from tempo_megatron.memory.tape.follower import Follower
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.linear import LinearCall
from tempo_megatron.slots.mlp import TempoTiledMLP

pytestmark = pytest.mark.usefixtures("one_rank")
BASE = TempoConfig(activation="recompute", norm="inplace", dropout="recompute", attention="flash", loss="off")
RECOMPUTE = dataclasses.replace(BASE, norm="recompute")
STOCK = TempoConfig(activation="off", norm="off", dropout="recompute", attention="off", loss="off")
AGAIN: dict[str, dict[str, str]] = {
    "fc1": {"linear_fc1": "recompute"},
    "qkv": {"linear_qkv": "recompute"},
    "attention": {"attention": "recompute"},
    "all": {"linear_fc1": "recompute", "linear_qkv": "recompute", "attention": "recompute"},
}
VALUES = {"": {}, **AGAIN, "tile": {"linear_fc1": "tile"}}
SIZES = Sizes()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of two layers; `tempo` is what the operations are added to."""

    family: str
    tempo: TempoConfig = RECOMPUTE
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `build_config`."""

    again: tuple[str, ...] = ("all",)
    """Of AGAIN."""


_QK_NORM = {"qk_layernorm": True, "normalization": "RMSNorm"}
CASES = {
    "GPT": Case("GPT", again=tuple(AGAIN)),
    "GPT, norms in place": Case("GPT", BASE),
    "GPT, stock": Case("GPT", STOCK, again=("fc1", "qkv")),
    "GPT, tanh": Case("GPT", dataclasses.replace(BASE, activation="off"), {"activation_func": F.tanh}),
    "GPT, softmax": Case("GPT", dataclasses.replace(BASE, attention="softmax"), again=("qkv",)),
    "Llama": Case("Llama", settings=LLAMA),
    "Llama, stock MLP": Case("Llama", dataclasses.replace(STOCK, attention="flash"), LLAMA),
    "Llama, one group, q and k normed": Case("Llama", BASE, {**LLAMA, "num_query_groups": 2, **_QK_NORM}),
    "Llama, q and k normed": Case("Llama", RECOMPUTE, {**LLAMA, **_QK_NORM}),
    "GPT, q and k normed, stock": Case("GPT", STOCK, _QK_NORM, again=("qkv",)),
    "BERT": Case("BERT"),
    "T5": Case("T5"),
    "GPT, core attention recomputed": Case("GPT", settings={"recompute": "core_attn"}, again=("attention", "all")),
    "Llama, core attention recomputed": Case(
        "Llama", dataclasses.replace(STOCK, norm="inplace"), {**LLAMA, "recompute": "core_attn"}, again=("fc1", "qkv")
    ),
    "GPT, MLP recomputed": Case("GPT", settings={"recompute": "mlp", "add_bias_linear": False}, again=("fc1", "all")),
    "GPT, all recomputed": Case("GPT", settings={"recompute": "full"}),
}
# What keeps no more without them.
IS_RECOMPUTED: dict[str, Callable[[str], bool]] = {
    "GPT, MLP recomputed": lambda again: again == "fc1",
    "GPT, core attention recomputed": lambda again: again == "attention",
    "GPT, all recomputed": lambda _: True,
}
EVERY = {name: case.again for name, case in CASES.items()}
# BERT's head has a norm of Megatron's own, which refuses sequence parallelism without Apex.
PARALLEL = {name: again for name, again in EVERY.items() if name != "BERT"}
_FEW = ("GPT", "GPT, norms in place", "GPT, stock", "Llama, q and k normed", "GPT, core attention recomputed")
FEW = {name: EVERY[name] for name in _FEW}
_TILED = ("GPT", "GPT, stock", "Llama, stock MLP", "T5", "GPT, all recomputed")
TILED, TILED_TP = dict.fromkeys(_TILED, ("fc1", "tile")), {"Llama": ("fc1", "tile")}


@dataclasses.dataclass
class Found:
    """What one forward and backward leave."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]
    keys: list[str]
    kept: dict[str, int]
    """Stack -> bytes that its layers keep."""


def run(case: Case, again: str, dtype: torch.dtype, dropout: float, sequence_parallel: bool) -> Found:
    """Two micro batches, both forwards before both backwards."""
    layout = {"perform_initialization": True, "sequence_parallel": sequence_parallel}
    config = build_config(dtype=dtype, dropout=dropout, **layout, **case.settings)
    tempo = dataclasses.replace(case.tempo, **VALUES[again])
    gives_mask = choose(config, tempo).config.attention == "off"
    model_parallel_cuda_manual_seed(1234)
    model = build_model(case.family, config, tempo, SIZES)
    fill_weights(model)
    forwards = []
    for sample in (0, SIZES.micro_batch_size):
        args, kwargs = make_batch(case.family, sample, SIZES, gives_mask=gives_mask)
        forwards.append(functools.partial(model, *args, **kwargs))
    dropout_rng.set_micro_batch(5, 0)
    output, stacks = record_stacks(model, forwards[0])
    dropout_rng.set_micro_batch(5, SIZES.micro_batch_size)
    losses = [read_losses(case.family, each) for each in (output, forwards[1]())]
    for each in losses:
        each.float().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    kept = {stack: sum(saved.num_bytes for saved in found) for stack, found in stacks.items()}
    return Found(torch.cat(losses).detach(), gradients, sorted(model.state_dict()), kept)


def run_all(cases: dict[str, tuple[str, ...]], *how: Any) -> dict[str, dict[str, Found]]:
    """By case, the run without anything that runs again, and each run with."""
    # Three tiles of 16 rows of 2 samples: 6, 6 and 4; on two ranks with sequence parallelism 3, 3 and 2 of 8.
    with mock.patch.object(TempoTiledMLP, "count_tile_tokens", lambda _: 12):
        return {name: {again: run(CASES[name], again, *how) for again in ("", *more)} for name, more in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases", "dtype", "dropout", "sequence_parallel"),
    [
        (1, EVERY, torch.bfloat16, 0.1, False),
        (1, TILED, torch.float32, 0.1, False),
        (2, FEW | TILED_TP, torch.float32, 0.1, True),
        *exhaustive(
            (1, EVERY, torch.float32, 0.0, False),
            (1, EVERY, torch.float32, 0.1, False),
            (2, PARALLEL, torch.float32, 0.1, False),
            (2, PARALLEL, torch.bfloat16, 0.1, True),
            (2, TILED_TP, torch.float32, 0.1, False),
        ),
    ],
    ids=["all", "tiles", "SP, few", "float32, p 0", "float32", "TP", "SP", "TP, tiles"],
)
def test_losses_gradients_and_keys_are_those_of_the_run_without(
    ranks: int, cases: dict[str, tuple[str, ...]], dtype: torch.dtype, dropout: float, sequence_parallel: bool
) -> None:
    for found in run_megatron_ranks(run_all, ranks, ranks, cases, dtype, dropout, sequence_parallel):
        for name, runs in found.items():
            for again, ours in runs.items():
                check(name, again, ours, runs["fc1" if again == "tile" else ""])


def check(name: str, again: str, ours: Found, plain: Found) -> None:
    """A tile's products are sums in another order; all else has the same bits."""
    assert ours.keys == plain.keys and ours.gradients.keys() == plain.gradients.keys()
    limit = 1e-6 if again == "tile" else 0.0
    torch.testing.assert_close(ours.losses, plain.losses, rtol=limit, atol=limit)
    for key, expected in plain.gradients.items():
        error = (ours.gradients[key] - expected).abs().max() / expected.abs().max()
        assert error <= 10 * limit, (name, again, key, error)
    if again in ("", "tile") or IS_RECOMPUTED.get(name, lambda _: False)(again):
        assert ours.kept == plain.kept, (name, again)
    else:
        assert ours.kept.keys() == plain.kept.keys()
        assert all(ours.kept[stack] < kept for stack, kept in plain.kept.items()), (name, again)


def build(again: dict[str, str], **settings: Any) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A GPT, and its forward."""
    config = build_config(**settings)
    model = build_model("GPT", config, dataclasses.replace(RECOMPUTE, **again), SIZES)
    fill_weights(model)
    dropout_rng.set_micro_batch(5, 0)
    args, kwargs = make_batch("GPT", 0, SIZES, gives_mask=False)
    return model, functools.partial(model, *args, **kwargs)


def count_alive(again: dict[str, str]) -> tuple[int, int]:
    """(bytes of all tensors that are alive after a forward and were not before it, what the formula counts)."""
    model, forward = build(again, dtype=torch.bfloat16, dropout=0.1, num_layers=4)
    with Follower(*model.parameters(), *model.buffers()) as counter:
        output = forward()
        gc.collect()
        alive = counter.alive_bytes
    del output
    return alive, count_stack("GPT", "decoder", model.config, dataclasses.replace(RECOMPUTE, **again), SIZES)


def test_nobody_else_holds_what_is_dropped() -> None:
    alive, counted = count_alive({})
    for name, again in AGAIN.items():
        alive_again, counted_again = count_alive(again)
        assert alive - alive_again == pytest.approx(counted - counted_again, rel=0.01), name


def count_calls(again: dict[str, str]) -> Counter[str]:
    """What a forward and backward of one layer call, and how often: products by their weight, norms, attention."""
    model, forward = build(again, num_layers=1)
    names = {id(p): name.rpartition("layers.0.")[2] for name, p in model.named_parameters()}
    calls: Counter[str] = Counter()

    def counted(function: Any, name_call: Callable[..., str]) -> Any:
        return lambda *args, **kwargs: (calls.update([name_call(*args)]), function(*args, **kwargs))[1]

    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    multiply = counted(linear.forward, lambda ctx, x, weight, *_: names[id(weight)])
    with (
        mock.patch.object(linear, "forward", multiply),
        mock.patch.object(attention_cpu, "forward", counted(attention_cpu.forward, lambda *_: "attention")),
        mock.patch.object(norm_cpu, "refill", counted(norm_cpu.refill, lambda *_: "norm made again")),
    ):
        forward().mean().backward()
    return calls


def test_each_linear_and_attention_runs_once_more_and_a_norm_is_made_again_once() -> None:
    once = count_calls({})
    fc1, qkv = "mlp.linear_fc1.weight", "self_attention.linear_qkv.weight"
    assert once[fc1] == once["attention"] == 1 and once["norm made again"] == 2
    more = {name: dict(count_calls(again) - once) for name, again in AGAIN.items()}
    assert more["fc1"] == {fc1: 1} and more["qkv"] == {qkv: 1} and more["attention"] == {"attention": 1}
    assert more["all"] == {fc1: 1, qkv: 1, "attention": 1}


@dataclasses.dataclass(frozen=True)
class Stages(GridCase):
    """A case of the grid whose TempoConfig is another."""

    again: str = ""

    @property
    def tempo(self) -> TempoConfig:
        return dataclasses.replace(RECOMPUTE, loss="fused", **VALUES[self.again])


def run_stages(layout: Layout) -> dict[str, tuple[Any, Any, Any]]:
    megatron_cpu.install()
    found = {}
    for again in ("", *AGAIN):
        run = run_model(Stages("Llama", layout, "none", "", 0.1, "fp32", again=again))
        found[again] = (run.losses, run.gradients, run.masks)
    return found


@pytest.mark.slow
def test_with_pipeline_stages_losses_gradients_and_masks_are_those_of_the_run_without() -> None:
    for rank in run_megatron_ranks(run_stages, 2, 1, Layout(1, False, 2), pipeline_model_parallel_size=2):
        plain = rank.pop("")
        assert list(rank) == list(AGAIN)
        for ours in rank.values():
            torch.testing.assert_close(ours[:2], plain[:2], rtol=0, atol=0)
            assert ours[2].keys() == plain[2].keys()
            assert all((mask == plain[2][place]).all() for place, mask in ours[2].items())


def test_queries_that_were_written_to_inside_of_attention_are_refused() -> None:
    # Grouped queries are no view of the projection.
    model = build_gpt(gpt_config(num_query_groups=2), TempoConfig(linear_qkv="recompute"))
    core_attention = model.decoder.layers[0].self_attention.core_attention
    core_attention.register_forward_pre_hook(lambda _, args: args[0].detach().zero_() is None or None)
    with pytest.raises(ValueError, match=r"queries, keys or values were written to .* set tempo.linear_qkv to \"off\""):
        losses(model, 0, 2, gives_mask=False)


def test_weights_that_zero_3_partitions_are_refused() -> None:
    linear = torch.nn.Linear(4, 4)
    linear.weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the weight of a Linear is partitioned by ZeRO-3, .* expected ZeRO 0, 1 or 2"):
        LinearCall(linear)(torch.ones(2, 4))
