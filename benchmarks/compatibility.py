"""Runs the grid of models x layouts x Megatron's recomputation x Tempo's choices x dropout x dtype on gloo processes,
and a second one of context parallelism and packed rows.

    python benchmarks/compatibility.py --pairwise      # a subset in which every pair of values meets: minutes
    python benchmarks/compatibility.py --full          # all that can be: an hour on 4 cores; goes on where it ended
    python benchmarks/compatibility.py --write-docs    # docs/compatibility.md from the results

grid/judge.py says what a case must meet, grid/cases.py which cases are impossible and why. Each result becomes a line
of benchmarks/results/cpu/grid.jsonl as soon as it is known. The first line names the versions: a run with others does
not add to the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

# Modules that import torch and Megatron are imported after the command line is read, so that --help comes at once.
if TYPE_CHECKING:
    from grid.cases import Case

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "grid.jsonl"
_SECONDS_BETWEEN_LINES = 30.0


def describe_versions() -> dict[str, str]:
    """Lists the versions on which the results depend, beside this tree."""
    import torch
    from megatron.core import __version__ as megatron_version

    return {"torch": torch.__version__.partition("+")[0], "megatron-core": megatron_version}


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Reads {key of a case: its result}, without a line that a killed run left unfinished.

    Raises ValueError if the results are of other versions.
    """
    if not path.exists():
        return {}
    header, *lines = path.read_text(encoding="utf-8").splitlines() or ["{}"]
    versions = json.loads(header).get("versions")
    if versions != describe_versions():
        raise ValueError(
            f"{path} holds results of {versions}; expected {describe_versions()}; give another --output or delete it"
        )
    found = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[record.pop("case")] = record
    return found


class Results:
    """The file of results, to which each result is added as it comes."""

    def __init__(self, path: Path) -> None:
        self.known = read_results(path)
        if not self.known:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"versions": describe_versions()}) + "\n", encoding="utf-8")
        elif not path.read_text(encoding="utf-8").endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")
        self._path = path
        self._lock = threading.Lock()

    def add(self, case: Case, result: dict[str, Any]) -> None:
        """Adds a result here and to the file."""
        compact = {name: _round(value) for name, value in result.items() if value not in ("", None)}
        with self._lock:
            self.known[case.key] = compact
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case.key, **compact}) + "\n")


def _round(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


class _Progress:
    """Shows a bar on a terminal, and elsewhere a line now and then."""

    def __init__(self, total: int) -> None:
        self._counts: Counter[str] = Counter()
        self._total, self._started, self._printed = total, time.monotonic(), 0.0
        self._bar = tqdm(total=total, unit="case") if sys.stderr.isatty() else None

    def note(self, status: str) -> None:
        self._counts[status] += 1
        words = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()))
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
            return
        seconds, done = time.monotonic() - self._started, self._counts.total()
        if done == self._total or seconds - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = seconds
            left = (self._total - done) * seconds / done
            print(f"grid: {done} of {self._total}, {words}, {left:.0f} s left", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def run(cases: list[Case], path: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """Runs the cases that have not passed yet in `jobs` pools of processes; returns the results of all cases."""
    from grid.pool import run_cases

    results = Results(path)
    done = {key for key, result in results.known.items() if result["status"] != "failed"}
    waiting = [case for case in cases if case.key not in done]
    progress = _Progress(len(waiting))

    def report(case: Case, result: dict[str, Any]) -> None:
        results.add(case, result)
        progress.note(result["status"])

    errors: list[BaseException] = []

    def work(share: list[Case]) -> None:
        try:
            run_cases(share, report)
        except BaseException as error:
            errors.append(error)

    pools = [threading.Thread(target=work, args=(waiting[i::jobs],), daemon=True) for i in range(jobs)]
    for pool in pools:
        pool.start()
    for pool in pools:
        pool.join()
    progress.close()
    if errors:
        raise errors[0]
    return {case.key: results.known[case.key] for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--full", action="store_true", help="every case that has no result yet")
    what.add_argument("--pairwise", action="store_true", help="the subset that runs with the tests")
    what.add_argument("--write-docs", action="store_true", help="write docs/compatibility.md from the results")
    parser.add_argument("--only", default="", metavar="TEXT", help="of these, the cases whose name holds TEXT")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="pools of four or eight processes (default 1)")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="JSONL", help=f"default {RESULTS.name}")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; expected 1 or more")
    from grid.cases import choose_pairwise, choose_sequences, list_cases, list_sequence_cases
    from grid.docs import write_docs

    if args.write_docs:
        write_docs(ROOT / "docs" / "compatibility.md", read_results(args.output), describe_versions())
        return 0
    chosen = (choose_pairwise, choose_sequences) if args.pairwise else (list_cases, list_sequence_cases)
    cases = {case.key: case for list_part in chosen for case in list_part() if args.only in case.key}
    try:
        results = run([*cases.values()], args.output, args.jobs)
    except ValueError as error:
        parser.error(str(error))
    failed = {key: result for key, result in results.items() if result["status"] == "failed"}
    for key, result in failed.items():
        print(f"{key}: {result['message']}", file=sys.stderr)
    print(f"{len(results)} cases, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
