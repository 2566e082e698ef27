"""What the examples of the README print, and what it shows."""

from __future__ import annotations

import math
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
    """Tempo keeps less, with recomputation less still, and it learns with Tempo and without."""
    rows = [line.split("|") for line in output.splitlines() if line.startswith(("| stock", "| Tempo"))]
    stock, tempo, recomputed = ((float(row[2]), [float(loss) for loss in row[6].split(",")]) for row in rows)
    assert recomputed[0] < 0.5 * tempo[0] and tempo[0] < 0.6 * stock[0]
    # At first it is that of guessing among 256 tokens; masks differ from stock's.
    assert tempo[1] == recomputed[1] and all(loss < 0.5 * math.log(256) for loss in (*stock[1], *tempo[1]))


def check_deepspeed_run(output: str) -> None:
    """It learns."""
    first, last = map(float, re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE))
    assert last < 0.8 * first


EXAMPLES: dict[str, Callable[[str], None]] = {
    "operations": check_operations,
    "megatron_model": check_megatron_model,
    "deepspeed_run": check_deepspeed_run,
}
