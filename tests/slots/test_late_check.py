"""What a GPU finds is told in words by a later call on the host, which waits for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tempo_megatron.slots import loss
from tempo_megatron.slots.loss import LateCheck


class Flag:
    """A flag on a device of which this machine has none."""

    device = torch.device("cuda")

    def __init__(self, value: bool) -> None:
        self.value = torch.tensor(value)


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each copy that was started is there by now."""
    there: list[bool] = []

    def copy_to_host(flag: Flag) -> tuple[Tensor, object]:
        index = len(there)
        there.append(False)
        return flag.value, lambda: there[index]

    monkeypatch.setattr(loss, "copy_to_host", copy_to_host)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return there


def test_a_flag_is_told_when_it_has_arrived_and_once(arrived: list[bool]) -> None:
    check = LateCheck("it is wrong; mend it")
    check.note(Flag(False))
    check.note(Flag(True))
    check.raise_if_noted()  # neither is there
    arrived[0] = True
    check.raise_if_noted()
    arrived[1] = True
    with pytest.raises(RuntimeError, match="it is wrong; mend it"):
        check.raise_if_noted()
    check.raise_if_noted()


def test_what_arrived_and_was_right_is_let_go(arrived: list[bool]) -> None:
    check = LateCheck("it is wrong")
    for step in range(100):
        check.note(Flag(False))
        if step:
            arrived[step - 1] = True
        check.raise_if_noted()
    assert len(check._under_way) == 1


def test_inside_of_a_capture_nothing_is_started(arrived: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    LateCheck("it is wrong").note(Flag(True))
    assert not arrived


def test_on_a_cpu_it_is_told_at_once() -> None:
    check = LateCheck("it is wrong")
    check.note(torch.tensor(False))
    with pytest.raises(RuntimeError, match="it is wrong"):
        check.note(torch.tensor(True))


def test_the_fused_loss_tells_it_when_the_model_is_next_called() -> None:
    loss._IS_MULTIPLE._under_way.append((torch.tensor(True), lambda: True))
    with pytest.raises(RuntimeError, match="not a number times loss_mask"):
        loss.forward_output_layer(object(), torch.zeros(1))
    assert not loss._IS_MULTIPLE._under_way
