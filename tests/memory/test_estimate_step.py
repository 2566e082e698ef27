"""The estimate against whole real steps under DeepSpeed on a CPU, its optimizer's step among them."""

from __future__ import annotations

import pytest
import torch
from covering import exhaustive
from distributed import run_megatron_ranks
from peak_cases import AUTO
from step_cases import MATRIX, Run, estimate_run, measure_runs

pytestmark = pytest.mark.usefixtures("without_compiler")

# Of the matrix, each stage in each dtype once; families, numbers of micro batches and Tempo take turns.
SAMPLE = [
    next(
        run
        for run in MATRIX
        if (run.stage, run.dtype) == (stage, dtype)
        and run.family == ("gpt", "llama", "bert")[(stage + shift) % 3]
        and run.num_micro_batches == (1, 4)[(stage // 2 + shift) % 2]
        and (run.tempo == AUTO) == bool(stage % 2)
    )
    for shift, dtype in enumerate((torch.float32, torch.bfloat16))
    for stage in range(4)
]
RUNS = [
    Run(stage=1, foreach=True),
    Run(stage=2, accumulates_in_float32=True, overlaps=True),
    Run(stage=3, accumulates_in_float32=True, overlaps=True),
]
OTHER_RUNS = [
    Run(stage=1, tempo=AUTO),
    Run(stage=2, dtype=torch.float32, tempo=AUTO),
    Run(stage=0),
    Run(stage=0, dtype=torch.float32, foreach=True),
    Run(stage=1),
    Run(stage=1, accumulates_in_float32=True),
    Run(stage=1, bucket=16 << 20),
    Run(stage=2, bucket=16 << 20),
    Run(stage=1, bucket=16 << 20, is_wide=False),
    Run(stage=3, dtype=torch.float32),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [
        [*SAMPLE, *RUNS],
        *exhaustive(*([[run for run in MATRIX if run.stage == n]] for n in range(4)), [OTHER_RUNS]),
    ],
)
def test_the_peak_of_a_whole_step_under_deepspeed_is_estimated(runs: list[Run]) -> None:
    """No peak is undercut by more than 0.1 %, and none is met worse than by 3 %."""
    measured: list[int] = run_megatron_ranks(measure_runs, 1, 1, runs)[0]
    wrong = {}
    for run, peak in zip(runs, measured, strict=True):
        rank = estimate_run(run)
        # With ZeRO 2 a step of BERT has one gradient of [h, h] more than its estimate.
        unseen = run.dtype.itemsize * run.step.shape.hidden_size**2 if (run.family, run.stage) == ("bert", 2) else 0
        if not 0.999 * peak - unseen <= rank.peak_bytes <= 1.03 * peak:
            parts = {name: value for name, value in rank.parts.items() if value}
            wrong[str(run)] = f"{rank.peak_bytes / peak:.4f}", peak, rank.moment, parts
    assert not wrong, "\n".join(f"{run}: {found}" for run, found in wrong.items())
