"""What the examples of the README print, and what it shows."""

from __future__ import annotations

import re
from collections.abc import Callable


def check_operations(output: str) -> None:
    """Tempo's keep fewer bytes and compute the same."""
    torch_bytes, tempo_bytes = (int(text.replace(",", "")) for text in re.findall(r"([\d,]+) bytes kept", output))
    assert tempo_bytes < 0.6 * torch_bytes
    (difference,) = re.findall(r"differ by at most (\S+) of", output)
    assert float(difference) < 1e-4
    assert "have the same masks" in output


def check_megatron_model(output: str) -> None:
    """It learns with Tempo and without."""
    losses = re.findall(r"^(?:stock|Tempo): loss (\S+) at the first step, (\S+) at the last", output, re.MULTILINE)
    assert len(losses) == 2 and losses[0][0] == losses[1][0]
    assert all(float(last) < 0.5 * float(first) for first, last in losses)


def check_deepspeed_run(output: str) -> None:
    """It learns."""
    first, last = map(float, re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE))
    assert last < 0.8 * first


EXAMPLES: dict[str, Callable[[str], None]] = {
    "operations": check_operations,
    "megatron_model": check_megatron_model,
    "deepspeed_run": check_deepspeed_run,
}
