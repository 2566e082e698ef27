"""benchmarks/megatron_lm.py: what it would run, and what it reads in Megatron's log. The runs themselves need a GPU."""

from __future__ import annotations

from pathlib import Path

import megatron_lm
import pytest

_LINE = (
    " [2026-03-16 10:00:00.123456] iteration {step:8d}/      50 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): {ms:.1f} | learning rate: 1.500000E-04 | global batch size:     8 | lm loss: {loss:.6E} | loss "
    "scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
_MEMORY = (
    "[Rank 0] (after 1 iterations) memory (MB) | allocated: 6000.0 | max allocated: {:.2f} | reserved: 1.0 | "
    "max reserved: 9999.0\n"
)


def make_checkout(tmp_path: Path) -> Path:
    (tmp_path / "pretrain_gpt.py").touch()
    return tmp_path


def test_four_runs_differ_in_dropout_and_tempo_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatron_lm.main([str(make_checkout(tmp_path)), "--dry-run", "--gpus", "2"]) == 0
    commands = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len(commands) == 4
    for stock, tempo in (commands[:2], commands[2:]):
        assert [word for word in tempo if word != "--use-tempo" and not word.endswith("run_megatron.py")] == stock
        assert tempo[-1] == "--use-tempo"
    assert {command[command.index("--hidden-dropout") + 1] for command in commands[:2]} == {"0.0"}
    assert {command[command.index("--attention-dropout") + 1] for command in commands[2:]} == {"0.1"}
    assert commands[0][commands[0].index("--global-batch-size") + 1] == "16"


def test_losses_times_and_memory_are_read_from_the_log() -> None:
    slow_start = [500.0] * 10 + [100.0, 102.0, 101.0]
    lines = [_LINE.format(step=i + 1, samples=8 * (i + 1), ms=ms, loss=10 - i / 10) for i, ms in enumerate(slow_start)]
    found = megatron_lm.parse_log(lines[0] + _MEMORY.format(7000.5) + "".join(lines[1:]) + _MEMORY.format(7100.25))
    assert found["steps"] == 13 and found["step_ms"] == 101.0 and found["max_allocated_mib"] == 7100.25
    assert found["losses"][:2] == [10.0, 9.9]


def test_a_run_that_ended_early_has_no_time() -> None:
    found = megatron_lm.parse_log(_LINE.format(step=1, samples=8, ms=3.0, loss=1.5) + "Traceback\n")
    assert found == {"steps": 1, "losses": [1.5], "step_ms": None, "max_allocated_mib": None}


def test_ratios_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        {"p": 0.0, "side": side, "step_ms": ms, "max_allocated_mib": mib, "losses": [loss]}
        for side, ms, mib, loss in (("stock", 200.0, 1000.0, 10.0), ("tempo", 190.0, 600.0, 10.001))
    ]
    megatron_lm.print_comparison(records)
    assert capsys.readouterr().out == (
        "dropout 0; 190.0 / 200.0 ms = 0.950; 600.0 / 1000.0 MiB = 0.600; "
        "largest relative difference of the loss 1.0e-04\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/nowhere"], "holds no pretrain_gpt.py; expected a Megatron-LM checkout"),
        (["ROOT", "--steps", "5"], "expected more than the 10 that are not timed"),
        (["ROOT", "--gpus", "0"], "torch sees no GPU"),
    ],
)
def test_what_it_cannot_run_is_said_first(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(make_checkout(tmp_path))
    with pytest.raises(SystemExit):
        megatron_lm.main([root if word == "ROOT" else word for word in arguments])
    assert sentence in capsys.readouterr().err
