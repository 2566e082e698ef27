"""Runs the examples of other projects' jobs and writes their tables into the documents.

python benchmarks/jobs.py              # minutes on a CPU; needs what the examples name
python benchmarks/jobs.py encoders
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from measurements import ROOT

JOBS = {
    "sft_lora": ("lora.md", ["sft_lora.py"]),
    "encoders": ("encoders.md", ["encoders.py"]),
    "hub_kernels": ("hub_kernels.md", ["hub_kernels.py"]),
    "torchtitan": ("torchtitan.md", ["torchtitan_cpu.py"]),
    "megatron_model": ("first_hour.md", ["megatron_model.py"]),
}
"""Names of tables -> the document that each is in, and the example that prints it."""


_WAYS = ["with Tempo", "and checkpointing"]


def run_example(words: list[str]) -> str:
    """Returns the table that an example prints, or one table of those that it prints below the names of models.

    Raises ValueError where it prints none.
    """
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / words[0]), *words[1:]]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tables = re.findall(r"^(?:(\w+)\n\n)?((?:\|.*\n)+)", output, re.M)
    if not tables:
        raise ValueError(
            f"{words[0]} printed no table, but {output[:200]!r}; expected one, or one below each model's name"
        )
    return tables[0][1].strip() if len(tables) == 1 else join_tables(tables)


def join_tables(tables: list[tuple[str, str]]) -> str:
    """Returns a table with a line for each (model, its table of stock, Tempo, Tempo + checkpointing)."""
    titles = ["", "kept, MiB", *_WAYS, "peak, MiB", *_WAYS, "last loss, seeds 1 to 3", "with Tempo"]
    rows = [titles, ["---", *["---:"] * 6, "---", "---"]]
    for name, table in tables:
        cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()[2:]]
        kept, _, peak, _, losses = zip(*cells, strict=True)
        if losses[1] != losses[2]:
            raise ValueError(f"{name}: checkpointing changes the losses {losses[1]} to {losses[2]}; expected the same")
        rows.append([name, *kept, *peak, *losses[:2]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run examples and write their tables into the documents.")
    parser.add_argument("jobs", nargs="*", default=list(JOBS), help=f"of {', '.join(JOBS)}; all by default")
    for name in parser.parse_args().jobs:
        path, words = ROOT / "docs" / JOBS[name][0], JOBS[name][1]
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        table = run_example(words)
        before, _, rest = path.read_text(encoding="utf-8").partition(begin)
        path.write_text(f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
        print(f"{name}\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
