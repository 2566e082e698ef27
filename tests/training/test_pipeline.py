"""Pipeline stages: the same masks, losses and gradient norms as without them, and checkpoints that fit any layout."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_job import Data, MaskedData, Run, run, successful

from tempo_megatron.training.checkpoint_files.folder import read_description
from tempo_megatron.training.checkpoint_files.saved_state import SavedState
from tempo_megatron.training.checkpoint_files.sharding import MOMENTS, Box, Cut

pytestmark = pytest.mark.slow

STEPS = 4
# Four layers and four micro batches. The first step is trained without a pipeline, so that all begin with its weights.
SIZES = [
    *("--num-layers", "4", "--hidden-size", "32", "--seq-length", "32", "--global-batch-size", "8"),
    *("--train-iters", str(STEPS + 1), "--clip-grad", "0.5", "--weight-decay", "0.1", "--log-params-norm"),
]
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]  # stock draws other masks in another layout


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies over ranks; with TP there is SP."""

    pp: int = 1
    tp: int = 1
    zero: int = 0
    interleaves: bool = False
    tempo: bool = True
    dp: int = 1
    unties: bool = False
    more: tuple[str, ...] = ()
    cut: str | None = None

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    def arguments(self) -> list[str]:
        words = ["--pipeline-model-parallel-size", str(self.pp), "--tensor-model-parallel-size", str(self.tp)]
        words += ["--sequence-parallel"] if self.tp > 1 else []
        if self.cut is not None:
            words += ["--pipeline-model-parallel-layout", self.cut]
        elif self.interleaves:  # of four layers on four stages nothing is left to interleave
            layers = 8 if self.pp == 4 else 4
            words += ["--num-layers-per-virtual-pipeline-stage", str(layers // self.pp // 2)]
        return [*words, *([] if self.tempo else NO_DROPOUT), *self.more]

    def json(self) -> dict[str, Any]:
        tempo = {} if self.tempo else {"tempo": {"enabled": False}}
        return {"zero_optimization": {"stage": self.zero}, **tempo}


@dataclasses.dataclass(frozen=True)
class Begun:
    """A checkpoint of one step and, with Tempo and stock, the whole run that goes on from it without a pipeline."""

    data: Data | MaskedData
    save: Path
    folder: Path
    layers: tuple[str, ...]
    wholes: dict[bool, Run] = dataclasses.field(default_factory=dict)

    def go_on(self, layout: Layout, folder: Path, *extra: str, load: Path | None = None, **options: Any) -> Run:
        words = [*SIZES, *self.layers, "--load", str(load or self.save), *layout.arguments(), *extra]
        return run(self.data, folder, *words, world_size=layout.world_size, config=layout.json(), **options)

    def whole(self, tempo: bool) -> Run:
        if tempo not in self.wholes:
            folder = self.folder / f"whole_{tempo}"
            options = {"before": Record(folder)} if tempo else {}
            self.wholes[tempo] = successful(self.go_on(Layout(tempo=tempo), folder, *EVAL, **options))
        return self.wholes[tempo]


@dataclasses.dataclass(frozen=True)
class Record:
    """Writes which masks each rank draws: seed, sample, stack, layer and site of every forward, recomputed ones too."""

    folder: Path

    def __call__(self) -> None:
        from tempo_megatron.slots import dropout_rng

        derive: Callable[..., int] = dropout_rng.derive_site_key
        stream = open(self.folder / f"drawn_{os.environ['RANK']}", "w", buffering=1, encoding="utf-8")  # noqa: SIM115

        def derive_and_write(*place: Any) -> int:
            _, sample = dropout_rng.read_micro_batch()
            stream.write(f"{sample} {' '.join(str(int(part)) for part in place)}\n")
            return derive(*place)

        dropout_rng.derive_site_key = derive_and_write  # type: ignore[assignment]

    def read(self) -> list[set[str]]:
        return [set(path.read_text().splitlines()) for path in sorted(self.folder.glob("drawn_*"))]


@pytest.fixture(scope="module")
def begun(data: Data, bert_data: MaskedData, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Begun]:
    found: dict[tuple[str, int, bool], Begun] = {}

    def begin(family: str, num_layers: int = 4, unties: bool = False) -> Begun:
        if (family, num_layers, unties) not in found:
            folder, own = tmp_path_factory.mktemp(family), data if family == "gpt" else bert_data
            layers = ("--num-layers", str(num_layers), *(["--untie-embeddings-and-output-weights"] * unties))
            words = [*SIZES, *layers, "--use-tempo", "--exit-interval", "1"]
            successful(run(own, folder / "first", *words, "--save", str(folder / "save")))
            found[family, num_layers, unties] = Begun(own, folder / "save", folder, layers)
        return found[family, num_layers, unties]

    return begin


def check_same(found: Run, wanted: Run) -> None:
    """The losses of all steps to 1e-4 of themselves, the norms of gradients and parameters, and the validation."""
    assert len(found.losses) == STEPS
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-4, atol=0)
    for name, limit in (("grad_norm", 1e-3), ("params_norm", 1e-5), ("lm_loss", 1e-3), ("sop_loss", 1e-3)):
        ours, theirs = ([step[name] for step in each.of_kind("train") if name in step] for each in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=0)
    for ours, theirs in zip(found.of_kind("validation"), wanted.of_kind("validation"), strict=False):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


FULL = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
EVAL = ("--eval-iters", "1", "--eval-interval", "4")
OFTEN = [
    ("gpt", Layout(pp=2)),
    ("gpt", Layout(pp=2, tp=2, zero=1, interleaves=True, more=FULL, cut="Et|t*2|t|L")),
    ("bert", Layout(pp=2, interleaves=True, more=(*EVAL, "--recompute-activations"))),
]
GRID = [
    ("gpt", Layout(pp, tp, zero, interleaves, tempo))
    for pp, tp, zero, interleaves, tempo in itertools.product((2, 4), (1, 2), (0, 1), (False, True), (True, False))
]
RARELY = [
    ("gpt", Layout(pp=2, dp=2, zero=1, tempo=False, more=EVAL)),
    *(case for case in GRID if case not in OFTEN),
    *(("bert", layout) for _, layout in GRID if layout.pp == 2 and layout.tp == layout.zero + 1),
    ("gpt", Layout(pp=2, unties=True)),
    *((family, Layout(pp=2, cut="Ettt|tL")) for family in ("gpt", "bert")),
]


@pytest.mark.parametrize(
    ("family", "layout"),
    [*OFTEN, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in RARELY)],
    ids=lambda value: value if isinstance(value, str) else repr(dataclasses.astuple(value)[:7]),
)
def test_a_pipeline_trains_as_one_stage_does(
    begun: Callable[..., Begun], tmp_path: Path, family: str, layout: Layout
) -> None:
    start = begun(family, 8 if layout.pp == 4 and layout.interleaves else 4, layout.unties)
    whole = start.whole(layout.tempo)
    record = Record(tmp_path)
    found = successful(start.go_on(layout, tmp_path, before=record))
    check_same(found, whole)
    banner = f"PP {layout.pp}{' x 2 chunks' if layout.interleaves else ''}, DP {layout.dp}"
    assert banner in found.output
    for kind in ("parameters", "slots"):
        assert found.of_kind("run")[0][kind] == whole.of_kind("run")[0][kind]
    if layout.tempo:
        (wanted,) = Record(start.folder / "whole_True").read()
        drawn = record.read()
        assert set().union(*drawn) == wanted and len(wanted) > STEPS * 4 * 4
        per_stage = [
            set().union(*drawn[n : n + layout.tp * layout.dp]) for n in range(0, len(drawn), layout.tp * layout.dp)
        ]
        assert sum(map(len, per_stage)) == len(wanted)  # each mask on one stage


def read_all(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and moments of the whole model, by name."""
    state = SavedState(checkpoint, read_description(checkpoint))
    for name in state.list_names():
        shape = state.cuts[0][name].shape
        zeros = (0,) * len(shape)
        cut, size = Cut(shape, shape, (Box(zeros, zeros, shape),)), torch.Size(shape).numel()
        for key in ("weight", *MOMENTS):
            # tp 0 is no layout's, so that the parts are put together
            yield f"{name} {key}", state.read(name, key, 0, size, cut=cut, tp=0, tp_rank=0)


SHORT_CHAIN = [Layout(pp=2, tp=2, zero=1, interleaves=True), Layout(pp=2), Layout()]
CHAIN = [
    *(Layout(pp=2, tp=2, zero=1, interleaves=True), Layout(pp=4), Layout(pp=2, dp=2, zero=1)),
    *(Layout(tp=2, dp=2, zero=3), Layout(pp=2, interleaves=True), Layout(pp=4, zero=1), Layout()),
]


@pytest.mark.parametrize(
    ("family", "chain"),
    [("gpt", SHORT_CHAIN), *(pytest.param(family, CHAIN, marks=pytest.mark.exhaustive) for family in ("gpt", "bert"))],
)
def test_a_checkpoint_passes_through_pipelines_bit_for_bit(
    begun: Callable[..., Begun], tmp_path: Path, family: str, chain: list[Layout]
) -> None:
    start = begun(family)
    load, wanted = start.save, dict(read_all(start.save / "iter_0000001"))
    for number, layout in enumerate(chain):
        save = tmp_path / f"save_{number}"
        saved = start.go_on(layout, tmp_path / f"run_{number}", "--train-iters", "1", "--save", str(save), load=load)
        output = successful(saved).output
        assert "resharding" in output and "no loss curve:" in output
        assert "none of the 1 steps is left to train; raise --train-iters for more" in output
        found = dict(read_all(save / "iter_0000001"))
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), f"{name} in {layout}"
        load = save
    names = SavedState(load / "iter_0000001", read_description(load / "iter_0000001")).list_names()
    layers = {name.split(".")[2] for name in names if ".layers." in name}
    assert layers == {"0", "1", "2", "3"}
    check_same(successful(start.go_on(Layout(), tmp_path / "on", load=load)), start.whole(True))


@pytest.mark.exhaustive
def test_each_stage_has_a_ledger_of_its_own(begun: Callable[..., Begun], tmp_path: Path) -> None:
    ledger = ["--tempo-ledger", str(tmp_path / "ledger"), "--train-iters", "3"]
    found = successful(begun("gpt").go_on(Layout(pp=2, interleaves=True), tmp_path, *ledger))
    assert sorted(path.name for path in tmp_path.glob("ledger*.json")) == [
        f"ledger.stage{stage}{kind}.json" for stage in (0, 1) for kind in ("", ".timeline", ".timeline.trace")
    ]
    assert "stage 0: GPTModel, 4 layers" in found.output and "layers 0,2" in found.output


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["zero", "fp32"])
def test_bf16_adds_up_gradients_as_without_a_pipeline(data: Data, tmp_path: Path, precision: str) -> None:
    """In bf16 two stages round at other places than one, so this is close, not equal."""
    accumulated = {"data_types": {"grad_accum_dtype": "fp32"}} if precision == "fp32" else {}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **accumulated}
    words = [*SIZES, *NO_DROPOUT]
    first = [*words, "--exit-interval", "1", "--save", str(tmp_path / "save")]
    successful(run(data, tmp_path / "first", *first, config=config))
    go_on = [*words, "--load", str(tmp_path / "save")]
    one = successful(run(data, tmp_path / "one", *go_on, config=config))
    pipeline = ["--pipeline-model-parallel-size", "2"]
    two = successful(run(data, tmp_path / "two", *go_on, *pipeline, config=config, world_size=2))
    torch.testing.assert_close(two.losses, one.losses, rtol=2e-3, atol=0)
