"""Bytes that a layer of models of transformers keeps, stock, Tempo and floor: python benchmarks/huggingface_kept.py

Measures on a CPU and writes the table of docs/huggingface.md and benchmarks/results/huggingface_kept.jsonl.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from transformers_cases import CASES, measure  # noqa: E402

DOCUMENT, RESULTS = ROOT / "docs/huggingface.md", ROOT / "benchmarks/results/huggingface_kept.jsonl"


def make_table(records: list[dict]) -> str:
    """The table in Markdown."""
    lines = ["| | stock | Tempo | floor | Tempo / stock |", "| --- | ---: | ---: | ---: | ---: |"]
    for record in records:
        stock, tempo, floor = (record[name] for name in ("stock_sbh", "tempo_sbh", "floor_sbh"))
        lines.append(f"| {record['architecture']} | {stock:.2f} | {tempo:.2f} | {floor:.2f} | {tempo / stock:.2f} |")
    return "\n".join(lines)


def main() -> None:
    environment = {"torch": torch.__version__, "transformers": transformers.__version__, "device": platform.machine()}
    records = [
        {"architecture": name, **measure(case), "dtype": "bfloat16", "p": 0.1, **environment}
        for name, case in CASES.items()
    ]
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    before, rest = DOCUMENT.read_text(encoding="utf-8").split("<!-- huggingface kept: begin -->\n")
    after = rest.split("<!-- huggingface kept: end -->")[1]
    table = f"<!-- huggingface kept: begin -->\n{make_table(records)}\n<!-- huggingface kept: end -->"
    DOCUMENT.write_text(before + table + after, encoding="utf-8")
    print(make_table(records))


if __name__ == "__main__":
    main()
