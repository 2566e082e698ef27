"""--log-params-norm: the norm of all parameters is that of the whole model, whatever the layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from training_job import Data, Run, run, successful, zero

STEPS = ["--train-iters", "2", "--log-params-norm", "--hidden-dropout", "0", "--attention-dropout", "0"]
LAYOUTS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "TP 2 with sequence parallelism": (2, zero(1), ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "PP 2": (2, zero(0), ["--pipeline-model-parallel-size", "2"]),
    "ZeRO 3": (2, zero(3), ["--micro-batch-size", "1"]),
}


def get_norm(result: Run) -> float:
    step = successful(result).of_kind("train")[-1]
    assert f"params norm {step['params_norm']:.3f}" in result.output
    return float(step["params_norm"])


@pytest.fixture(scope="module")
def whole(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A checkpoint after the first step on one rank, and the norm after the second."""
    folder = tmp_path_factory.mktemp("one")
    save = ["--save", str(folder / "save"), "--save-interval", "1"]
    return folder / "save", get_norm(run(data, folder, *STEPS, *save, config=zero(1)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_of_the_parameters_is_the_same_in_each_layout(
    data: Data, whole: tuple[Path, float], layout: str, tmp_path: Path
) -> None:
    (save, norm), (world_size, config, words) = whole, LAYOUTS[layout]
    (tmp_path / "save").mkdir()
    shutil.copytree(save / "iter_0000001", tmp_path / "save" / "iter_0000001")
    words = ["--log-params-norm", "--load", str(tmp_path / "save"), *words]
    assert get_norm(run(data, tmp_path, *words, *STEPS, world_size=world_size, config=config)) == pytest.approx(
        norm, rel=1e-6
    )


def test_no_norm_is_logged_unless_it_is_asked_for(data: Data, tmp_path: Path) -> None:
    result = successful(run(data, tmp_path, "--train-iters", "1"))
    assert "params_norm" not in result.of_kind("train")[0] and "params norm" not in result.output
