from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tempo_megatron.data.prepare_data import main


@pytest.fixture
def fail(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs prepare_data, checks that it ends with one sentence, with `message` in it, and returns that."""

    def run(message: str, *command: str, **sizes: int) -> str:
        assert main(list(command), **sizes) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1 and error.startswith("prepare_data: ")
        return error

    return run


@pytest.fixture
def refuse(tmp_path: Path, fail: Callable[..., str]) -> Callable[..., None]:
    """Does so, and checks that no file with the prefix `out` is left."""

    def run(message: str, *arguments: object, **sizes: int) -> None:
        command = [str(argument) for argument in arguments]
        if "--output-prefix" not in command:
            command += ["--output-prefix", str(tmp_path / "out")]
        fail(message, *command, "--workers", "1", **sizes)
        assert not list(tmp_path.glob("out*"))

    return run
