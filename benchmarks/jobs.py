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
}
"""Names of tables -> the document that each is in, and the example that prints it."""


def run_example(words: list[str]) -> str:
    """Returns the tables that an example prints, each below its title."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / words[0]), *words[1:]]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept = [line for line in output.splitlines() if re.match(r"\||[a-z0-9_]+$", line) or not line]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


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
