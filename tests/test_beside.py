"""A call in another process returns its value, or says how it ended."""

from __future__ import annotations

import subprocess

import pytest

from tempo_megatron.beside import Beside


def test_a_value_a_sentence_and_every_other_end_come_back() -> None:
    calls = [
        Beside("operator:add", [1], [2]),
        Beside("tempo_megatron.models.shape:make_shape"),
        Beside("operator:add", 1, "a"),
        Beside("os:_exit", 3),
    ]
    assert calls[0].wait() == [1, 2]
    with pytest.raises(ValueError, match="^--num-layers is missing; give it"):
        calls[1].wait()
    with pytest.raises(RuntimeError, match=r"^operator:add ended with exit code 1\n(?s:.*)\nTypeError: unsupported"):
        calls[2].wait()
    with pytest.raises(RuntimeError, match="^os:_exit ended with exit code 3$"):
        calls[3].wait()


def test_a_call_that_takes_too_long_is_ended() -> None:
    call = Beside("time:sleep", 600)
    with pytest.raises(subprocess.TimeoutExpired):
        call.wait(0.1)
    assert call._process.returncode == -9
