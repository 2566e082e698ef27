from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tempo_megatron.data.prepare_data import main


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs prepare_data and checks that it says `message` and leaves no file with the prefix `out`."""

    def run(message: str, *arguments: object) -> None:
        command = [str(argument) for argument in arguments]
        if "--output-prefix" not in command:
            command += ["--output-prefix", str(tmp_path / "out")]
        assert main([*command, "--workers", "1"]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1 and error.startswith("prepare_data: ")
        assert not list(tmp_path.glob("out*"))

    return run
