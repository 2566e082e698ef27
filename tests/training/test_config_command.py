"""`tempo-megatron config --show`: every setting of a run, and where it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tempo_megatron.training.config_command import main

ROOT = Path(__file__).parents[2]
NEEDED = "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --data-path text".split()


def test_config_show_says_where_each_value_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text('{"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}, "tempo": {"norm": "off"}}')
    model = str(ROOT / "configs/model/gpt2_tiny.json")
    argv = ["--deepspeed_config", str(path), "--model", model, "--num-layers", "2", *NEEDED]
    assert main(["--show", "--world-size", "2", *argv, "--use-tempo", "--tempo-loss", "off"]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["clip_grad"] == ["0.5", "JSON", '"gradient_clipping"']
    assert rows["model.num_layers"] == ["2", "argument", "--num-layers"]
    assert rows["model.hidden_size"] == ["256", "--model", model]
    assert rows["global_batch_size"] == ["4", "default"] and rows["seed"] == ["1234", "default"]
    assert rows["tempo.norm"] == ["off", "JSON"] and rows["tempo.loss"] == ["off", "argument", "--tempo-loss"]
    assert rows["deepspeed.zero_optimization.stage"] == ["1", "JSON"] and rows["data_parallel_size"][1] == "computed"
    with pytest.raises(ValueError, match="the nearest known one is --hidden-size"):
        main(["--show", *argv, "--hiden-size", "8"])
