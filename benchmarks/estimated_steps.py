"""Measures whole steps under DeepSpeed on a CPU, and writes the estimate's error in each into docs/estimate.md.

python benchmarks/estimated_steps.py    # minutes
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from measurements import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))

from distributed import run_megatron_ranks
from peak_cases import OFF
from step_cases import MATRIX, estimate_run, measure_runs

DOCUMENT = ROOT / "docs" / "estimate.md"
BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"


def format_rows(errors: list[float]) -> Iterator[str]:
    """Yields a row for each family, dtype and number of micro batches with an error that two digits show."""
    yield "| model | micro batches | | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |"
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: |"
    rows: dict[tuple[str, int, str], list[str]] = {}
    for run, error in zip(MATRIX, errors, strict=True):
        name = f"{run.family}, {str(run.dtype)[6:]}"
        key = (name, run.num_micro_batches, "stock" if run.tempo == OFF else "Tempo")
        rows.setdefault(key, []).append(f"{error:+.2f} %")
    for (name, count, tempo), row in sorted(rows.items()):
        if {text[1:] for text in row} != {"0.00 %"}:
            yield f"| {name} | {count} | {tempo} | {' | '.join(row)} |"


def main() -> None:
    # What Inductor's own code makes, no dispatcher sees.
    os.environ["CXX"] = "no-compiler"
    peaks: list[int] = run_megatron_ranks(measure_runs, 1, 1, MATRIX, timeout_s=3600.0)[0]
    errors = [100.0 * (estimate_run(run).peak_bytes / peak - 1.0) for run, peak in zip(MATRIX, peaks, strict=True)]
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join(format_rows(errors))
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    print(f"{len(errors)} runs, errors from {min(errors):+.2f} to {max(errors):+.2f} %")


if __name__ == "__main__":
    main()
