"""Turns the results of `gpu_suite.py first` into the tables of README.md and docs/performance.md, and into a list of
what has to be changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measurements import ROOT, read_records

from gpu.models import FORMS
from gpu.steps import FAILED, NOT_ENDED, PASSED

BEGIN, END = "<!-- measured on a GPU: begin -->\n", "<!-- measured on a GPU: end -->"
DOCUMENTS = ("README.md", "docs/performance.md")
OTHERS = ("eager", "compile", "liger", "sdpa", "stock")
GIB = 2**30


def write(folder: Path) -> int:
    """Prints the answers and what has to be changed; writes the tables where results are a GPU's. Returns 0."""
    records = read_records(folder / "first.jsonl")
    print(*summarise(folder), *list_changes(records), sep="\n")
    if any(record["device"] != "cpu" for record in records):
        short, long = "\n".join(make_model_table(records)), "\n".join(make_speed_table(records))
        for name, text in zip(DOCUMENTS, (short, f"{short}\n\n{long}"), strict=True):
            path = ROOT / name
            path.write_text(_put(path.read_text(encoding="utf-8"), f"{text}\n"), encoding="utf-8")
    return 0


def _put(text: str, table: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}"


def summarise(folder: Path) -> Iterator[str]:
    """Yields one line for each of the three questions."""
    records = read_records(folder / "first.jsonl")
    for part, question in {
        "right": "Is it right?",
        "memory": "Is the memory what we say?",
        "fast": "Is it fast?",
    }.items():
        of_part = [record for record in records if record["part"] == part]
        counts = Counter(record["outcome"] for record in of_part)
        yield f"{question} {', '.join(f'{number} {outcome}' for outcome, number in counts.items()) or 'nothing ran'}"
        for record in of_part:
            is_wrong = record["outcome"] in (FAILED, NOT_ENDED)
            if is_wrong or part == "memory" or record["step"].startswith(("steps of", "largest batch of")):
                yield f"  {record['step']}: {record['outcome']}: {record['answer']}"


def list_changes(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields what has to be changed: kernels that failed, predictions that are off, forms that are slower."""
    yield "To be changed:"
    for record in records:
        if record["outcome"] in (FAILED, NOT_ENDED):
            yield f"- {record['step']}: {record['answer']}"
        for form, found in record.get("measured", {}).items():
            for name, value in found.items():
                expected = record["predicted"].get(form, {}).get(name)
                if expected and value and abs(expected / value - 1) > 0.03:
                    yield f"- {record['step']}: {form}'s {name} was predicted {100 * (expected / value - 1):+.1f} % off"
        times = {name: 1e-3 * ms for name, ms in record.get("ms", {}).items() if not name.startswith("copy")}
        steps = {name: 1 / rate for name, rate in record.get("tokens_per_s", {}).items()}
        for group in _group_by_dropout(times | steps):
            others = {name: s for name, s in group.items() if name.startswith(OTHERS)}
            ours = {name: s for name, s in group.items() if name not in others}
            if ours and others and min(ours.values()) > min(others.values()):
                name, best = (min(each, key=each.__getitem__) for each in (others, ours))
                yield f"- {record['step']}: {name} is {ours[best] / others[name]:.2f} times as fast as {best}"


def _group_by_dropout(times: dict[str, float]) -> Iterator[dict[str, float]]:
    """Yields those that compute the same: names end in their dropout, where one step times several."""
    for dropout in sorted({name.partition(", p ")[2] for name in times}):
        yield {name: time for name, time in times.items() if name.partition(", p ")[2] == dropout}


def make_model_table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the rows of the models' steps: memory, tokens/s."""
    found = {record["step"]: record for record in records if record["outcome"] == PASSED}
    device = next((record["device"] for record in records if record["device"] != "cpu"), "")
    yield f"| {device}, bf16 | stock | stock compiled | Tempo | Tempo / best stock |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for step, record in found.items():
        if "measured" in record:
            for name in ("kept_bytes", "peak_bytes"):
                sizes = {form: each[name] / GIB for form, each in record["measured"].items()}
                title = f"{step.removeprefix('memory of ')}, batch {record['batch']}, {name.partition('_')[0]} GiB"
                yield _make_row(title, {form: (size, f"{size:.2f}") for form, size in sizes.items()})
        elif "batch" in record:
            rates = record["tokens_per_s"]
            title = f"{step.removeprefix('steps of ')}, batch {record['batch']}, tokens/s"
            yield _make_row(title, {form: (rate, f"{rate:,.0f}") for form, rate in rates.items()})
    largest: dict[str, dict[str, tuple[float, str]]] = {}
    for record in (each for each in found.values() if "largest_batch" in each):
        form, batch = record["form"], record["largest_batch"]
        rate = record["tokens_per_s"][form]
        largest.setdefault(record["model"], {})[form] = rate, f"{rate:,.0f} ({batch})"
    for model, cells in largest.items():
        yield _make_row(f"{model}, tokens/s (at its own largest batch)", cells)


def _make_row(title: str, cells: dict[str, tuple[float, str]]) -> str:
    """Makes a row of a number and its text for each form, and Tempo's share of the best other one."""
    texts = [cells[form][1] if form in cells else "" for form in FORMS]
    others = [number for form, (number, _) in cells.items() if form != "tempo"]
    share = f"{cells['tempo'][0] / max(others):.3f}" if others and "tempo" in cells else ""
    return f"| {' | '.join([title, *texts, share])} |"


def make_speed_table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a row for every operation that was timed."""
    yield "| operation | measured |"
    yield "| --- | --- |"
    for record in records:
        if "ms" in record and record["outcome"] == PASSED:
            yield f"| {record['step']} | {record['answer']} |"
