"""What a resumed run takes from its command line and what from its checkpoint, and what data it accepts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_job import Data, Run, make_data, run, successful, write_unsealed

STAGES = {
    "ZeRO 0": {"zero_optimization": {"stage": 0}},
    "ZeRO 1": {"zero_optimization": {"stage": 1}},
    "ZeRO 2": {"zero_optimization": {"stage": 2}},
    "ZeRO 3": {"zero_optimization": {"stage": 3}},
    "ZeRO 1, bf16": {
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    },
}  # fmt: skip
ZERO1 = STAGES["ZeRO 1"]
STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def saved(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps, stopped after 3, with settings that are not the defaults; ZeRO 1."""
    folder = tmp_path_factory.mktemp("saved")
    successful(first_run(data, folder, ZERO1))
    return folder / "save"


SETTINGS = ["--adam-beta1", "0.8", "--adam-beta2", "0.9", "--adam-eps", "1e-6", "--weight-decay", "0.1"]


def first_run(data: Data, folder: Path, config: dict[str, Any]) -> Run:
    options = [*SETTINGS, "--clip-grad", "0.5", "--lr-decay-style", "cosine", "--min-lr", "1e-5"]
    steps = ["--train-iters", str(STEPS), "--exit-interval", "3", "--save", str(folder / "save")]
    return run(data, folder, *options, *steps, config=config)


def resume(data: Data, folder: Path, saved: Path, *options: str, config: dict[str, Any] = ZERO1) -> Run:
    return run(data, folder, "--train-iters", str(STEPS), "--load", str(saved), *options, config=config)


def in_force(result: Run) -> dict[str, Any]:
    return successful(result).of_kind("run")[-1]["settings"]


KEPT = {"adam_betas": [0.8, 0.9], "adam_eps": 1e-6, "weight_decay": 0.1, "clip_grad": 0.5}


def test_what_is_left_out_is_as_in_the_checkpoint(data: Data, saved: Path, tmp_path: Path) -> None:
    result = resume(data, tmp_path, saved)
    assert in_force(result) == KEPT
    rates = [record["learning_rate"] for record in result.of_kind("train")]
    whole = run(
        data, tmp_path / "whole", *SETTINGS, "--clip-grad", "0.5", "--lr-decay-style", "cosine", "--min-lr", "1e-5",
        "--train-iters", str(STEPS), config=ZERO1,
    )  # fmt: skip
    assert rates == [record["learning_rate"] for record in whole.of_kind("train")][3:]
    assert result.losses_hex == successful(whole).losses_hex[3:]
    assert "betas 0.8 0.9, eps 1e-06, weight decay 0.1, clipping 0.5" in result.output
    assert "then cosine to 1e-05 at step 6" in result.output


TYPED = {
    "--adam-beta1": ("0.5", {"adam_betas": [0.5, 0.9]}),
    "--adam-beta2": ("0.5", {"adam_betas": [0.8, 0.5]}),
    "--adam-eps": ("1e-2", {"adam_eps": 1e-2}),
    "--weight-decay": ("3", {"weight_decay": 3.0}),
    "--clip-grad": ("0.01", {"clip_grad": 0.01}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value", "changed"), [(name, *case) for name, case in TYPED.items()], ids=TYPED)
def test_what_is_typed_takes_effect(
    data: Data, saved: Path, tmp_path: Path, option: str, value: str, changed: dict[str, Any]
) -> None:
    as_before = successful(resume(data, tmp_path / "before", saved))
    result = resume(data, tmp_path / "typed", saved, option, value)
    assert in_force(result) == {**KEPT, **changed}
    assert result.losses_hex[0] == as_before.losses_hex[0]  # before the first update with it
    assert all(ours != theirs for ours, theirs in zip(result.losses_hex[1:], as_before.losses_hex[1:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("config", STAGES.values(), ids=STAGES)
def test_every_optimizer_takes_what_is_typed(data: Data, tmp_path: Path, config: dict[str, Any]) -> None:
    successful(first_run(data, tmp_path / "first", config))
    save = tmp_path / "first" / "save"
    as_before = successful(resume(data, tmp_path / "before", save, config=config))
    options = [word for name, (value, _) in TYPED.items() for word in (name, value)]
    result = resume(data, tmp_path / "typed", save, *options, config=config)
    assert in_force(result) == {
        "adam_betas": [0.5, 0.5], "adam_eps": 1e-2, "weight_decay": 3.0, "clip_grad": 0.01,
    }  # fmt: skip
    moved = [abs(ours - theirs) for ours, theirs in zip(result.losses[1:], as_before.losses[1:], strict=True)]
    assert result.losses_hex[0] == as_before.losses_hex[0] and min(moved) > 0


def test_the_json_counts_as_typed(data: Data, saved: Path, tmp_path: Path) -> None:
    result = resume(data, tmp_path, saved, config={**ZERO1, "gradient_clipping": 0.02})
    assert in_force(result) == {**KEPT, "clip_grad": 0.02}


REFUSED = {
    "--lr": (["--lr", "2e-3"], "--lr is 0.002, but the schedule of"),
    "--min-lr": (["--min-lr", "1e-4"], "--min-lr is 0.0001, but the schedule of"),
    "--lr-decay-style": (["--lr-decay-style", "linear"], "has cosine; leave --lr-decay-style out, or take this run's"),
    "--lr-decay-iters": (["--lr-decay-iters", "9"], "has 6; leave --lr-decay-iters out"),
    "--lr-warmup-iters": (["--lr-warmup-iters", "1"], "has 0; leave --lr-warmup-iters out"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_another_schedule_is_refused(data: Data, saved: Path, tmp_path: Path, options: list[str], words: str) -> None:
    result = resume(data, tmp_path, saved, *options)
    assert result.exit_codes == [1] and words in result.output and "Traceback" not in result.output


@pytest.fixture(scope="module")
def finished(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("finished")
    return folder / "save", successful(run(data, folder, "--train-iters", "4", "--save", str(folder / "save")))


@pytest.mark.slow
def test_a_finished_run_is_extended(data: Data, finished: tuple[Path, Run], tmp_path: Path) -> None:
    load = ["--load", str(finished[0]), "--train-iters", "8"]
    zero = run(data, tmp_path / "zero", *load)
    assert zero.exit_codes == [1]
    assert "--train-iters 8 goes beyond the 4 steps of the checkpoint's schedule, after which its" in zero.output
    assert "give --lr-decay-iters 8 with --override-opt-param-scheduler" in zero.output
    typed = successful(run(data, tmp_path / "typed", *load, "--lr-decay-iters", "4"))
    assert [record["learning_rate"] for record in typed.of_kind("train")] == [0.0] * 4
    new = successful(run(data, tmp_path / "new", *load, "--lr-decay-iters", "8", "--override-opt-param-scheduler"))
    assert [record["iteration"] for record in new.of_kind("train")] == [5, 6, 7, 8]
    assert [record["learning_rate"] for record in new.of_kind("train")] == pytest.approx(
        [5e-4, 3.75e-4, 2.5e-4, 1.25e-4]
    )


@pytest.mark.slow
def test_an_extended_run_keeps_the_order_of_its_samples(data: Data, tmp_path: Path) -> None:
    """One document of a few hundred samples: a run that was begun for one epoch goes on for several."""
    constant = [
        "--split",
        "1,11",
        "--lr-decay-style",
        "constant",
        "--global-batch-size",
        "16",
        "--micro-batch-size",
        "16",
    ]
    planned = successful(run(data, tmp_path / "planned", *constant, "--train-iters", "6"))
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save")]
    successful(run(data, tmp_path / "parts", *constant, "--train-iters", "6", "--exit-interval", "2", *save))
    options = [*constant, *save, "--train-iters", "200"]
    longer = successful(run(data, tmp_path / "parts", *options, "--exit-interval", "6"))
    assert longer.losses_hex == planned.losses_hex
    afresh = successful(run(data, tmp_path / "afresh", *constant, "--train-iters", "200", "--exit-interval", "6"))
    assert afresh.losses_hex != planned.losses_hex  # Megatron's order depends on the number of epochs
    parts = json.loads((tmp_path / "save" / "iter_0000006" / "run.json").read_text())["sample_parts"]
    assert parts[0] == 96 and len(parts) == 2
    shorter = successful(run(data, tmp_path / "parts", *constant, *save, "--train-iters", "8"))
    assert shorter.losses_hex[:6] == planned.losses_hex and len(shorter.losses) == 8


def copied(data: Data, folder: Path) -> Data:
    folder.mkdir()
    for path in Path(data.prefix).parent.glob("*.*"):
        shutil.copy(path, folder)
    return Data(str(folder / "text"), str(folder / "vocab.json"), str(folder / "merges.txt"))


def test_a_data_set_that_was_moved_is_the_same(data: Data, saved: Path, tmp_path: Path) -> None:
    moved = resume(copied(data, tmp_path / "moved"), tmp_path / "a", saved)
    assert successful(moved).losses_hex == successful(resume(data, tmp_path / "b", saved)).losses_hex


def test_other_data_of_the_same_sizes_is_refused(data: Data, saved: Path, tmp_path: Path) -> None:
    other = copied(data, tmp_path / "other")
    tokens = np.fromfile(other.prefix + ".bin", np.uint16)
    tokens[len(tokens) // 2] ^= 1
    tokens.tofile(other.prefix + ".bin")
    result = resume(other, tmp_path, saved)
    assert result.exit_codes == [1] and "Traceback" not in result.output
    assert f"was trained on {data.prefix}, and {other.prefix} has another content; change --data-path" in result.output


def test_another_tokenizer_of_the_same_size_is_refused(data: Data, saved: Path, tmp_path: Path) -> None:
    other = copied(data, tmp_path / "other")
    vocab = json.loads(Path(other.vocab_file).read_text())
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    Path(other.vocab_file).write_text(json.dumps(vocab))
    result = resume(other, tmp_path, saved)
    assert result.exit_codes == [1] and "Traceback" not in result.output
    assert "has another tokenizer; change --vocab-file and --merge-file" in result.output


def test_a_checkpoint_of_another_format_is_refused(data: Data, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "old")
    write_unsealed(tmp_path / "old" / "iter_0000003", format=1)
    result = resume(data, tmp_path, tmp_path / "old")
    assert result.exit_codes == [1] and "run.json has format 1, expected 3" in result.output


def test_the_metrics_of_an_earlier_run_are_set_aside(data: Data, tmp_path: Path) -> None:
    first = successful(run(data, tmp_path, "--train-iters", "2"))
    second = successful(run(data, tmp_path, "--train-iters", "2"))
    assert second.losses_hex == first.losses_hex and len(second.of_kind("run")) == 1
    assert f"the metrics of an earlier run are now in {tmp_path / 'metrics.jsonl.1'}" in second.output
