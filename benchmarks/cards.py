"""Writes cards/CLAIM.md: what is claimed, how to see it, the figures, and what falls short of them.

python benchmarks/cards.py          # from benchmarks/results and docs; runs nothing

A figure comes from a results file or from a block that a script wrote into a document, never from here. Machine, commit
and versions are those of the records; a record without them says so by itself.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import estimated_models
import kept_bytes
import layer_rivals
import roam_tables
from measurements import RESULTS, ROOT, read_records

CARDS = ROOT / "cards"
_GIB = 2**30
Record = dict[str, Any]
Table = list[list[str]]


@dataclasses.dataclass(frozen=True)
class Card:
    """A claim and how it is seen to hold, or not."""

    claim: str
    command: str
    source: Path
    """The results file, or the document with the block that the command writes."""

    figures: Callable[[list[Record]], Table]
    """Of the records, with titles first; an empty list where the source is a document."""

    short: tuple[str, ...] | Callable[[list[Record]], tuple[str, ...]]
    """What falls short, a sentence each."""


def format_table(rows: Table) -> str:
    """Markdown, with all columns but the first at the right."""
    titles, *body = rows
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *body))


def read_block(path: Path, name: str) -> str:
    """What stands between `<!-- NAME: begin -->` and its end."""
    return path.read_text(encoding="utf-8").partition(f"<!-- {name}: begin -->")[2].partition("<!--")[0].strip()


def tabulate_layer(records: list[Record]) -> Table:
    rows = [["", "kept, sbh", "peak, sbh", "time / stock", "gradient error", "of"]]
    for r in records:
        figures = [
            f"{r['kept_sbh']:.2f}",
            f"{r['peak_sbh']:.1f}",
            f"{r['over_stock']:.2f}",
            f"{r['gradient_error']:.1e}",
        ]
        rows.append([r["case"], *figures, f"`{r['worst']}`"])
    return rows


def list_better_layers(records: list[Record]) -> tuple[str, ...]:
    """The rows that keep less than Tempo in place, with their times, and a reason where it is not the last row's."""
    by_case = {record["case"]: record for record in records}
    tempo = by_case["Tempo, in place"]
    found, last = [], ""
    for case, r in by_case.items():
        if r["kept_sbh"] < tempo["kept_sbh"] - 0.01 and not case.startswith("Tempo"):
            reason = explain(case)
            why = "" if reason == last else f": {reason}"
            time = r["over_stock"] / tempo["over_stock"]
            found.append(f"{case} keeps {r['kept_sbh']:.1f} sbh in {time:.2f} times the time{why}.")
            last = reason
    return tuple(found)


def judge_layer(records: list[Record]) -> tuple[str, ...]:
    """How many rows keep less than Tempo in place, and Tempo's that miss stock's time."""
    slower = [r["case"] for r in records if r["case"].startswith("Tempo") and r["over_stock"] > 1]
    return (
        f"{len(list_better_layers(records))} rows keep less than Tempo in place: "
        "[times and reasons](../docs/benchmarks.md#where-something-else-is-better).",
        *([f"Missed: no slower than stock, in {len(slower)} rows."] if slower else []),
        "Stock's gradient error comes from torch's LayerNorm in bf16 on a CPU.",
        f"Planned and offload have {layer_rivals.NUM_STACKED} layers; offload leaves the last one on the device. "
        "Threads copy, so its time says nothing of a GPU.",
        "Not compared: Liger, Apex and Transformer Engine, which do not run on a CPU.",
        "The machine was shared. Not measured on a GPU.",
    )


# Beginning of a case -> why it keeps less.
_REASONS = {
    "stock, full": "forward runs again",
    "checkpoint, saves": "norms, GELU, dropout and every other product run again",
    "checkpoint": "forward runs again",
    "torch.compile": "elementwise operations run again, at low budgets products too",
}


def explain(case: str) -> str:
    return next(reason for beginning, reason in _REASONS.items() if case.startswith(beginning))


def tabulate_model(records: list[Record]) -> Table:
    sizes = [str(gib) for gib in estimated_models.MEMORIES_GIB]
    rows = [["largest micro batch", "", *(f"{size} GiB" for size in sizes)]]
    above = ""
    for record in records:
        model, _, choice = record["case"].partition(" | ")
        named = "" if model == above else model
        rows.append([named, choice, *(str(record["largest"][size] or "-") for size in sizes)])
        above = model
    return rows


def list_model_gains(records: list[Record], base: str = "stock") -> dict[str, list[tuple[str, float]]]:
    """Model -> (memory, Tempo's largest batch over that of the base), where the base was estimated and fits."""
    largest = {record["case"]: record["largest"] for record in records}
    gains: dict[str, list[tuple[str, float]]] = {}
    for case, of_tempo in largest.items():
        model, _, choice = case.partition(" | ")
        if choice == "Tempo":
            of_base = largest.get(f"{model} | {base}", {})
            gains[model] = [(gib, batch / of_base[gib]) for gib, batch in of_tempo.items() if of_base.get(gib)]
    return gains


def judge_model(records: list[Record]) -> tuple[str, ...]:
    """In how many cells a twofold batch is missed, and in how many full recomputation fits more."""
    lower = sum(gain < 2 for gains in list_model_gains(records).values() for _, gain in gains)
    largest = {record["case"]: record["largest"] for record in records}
    more = sum(
        batch > largest[case.replace("stock, full", "Tempo")][gib]
        for case, of_full in largest.items()
        if case.endswith("| stock, full")
        for gib, batch in of_full.items()
    )
    return (
        *([f"Missed: twice the batch of stock with fused attention, in {lower} cells."] if lower else []),
        f"Full recomputation fits a larger batch than Tempo in {more} cells: it keeps 2 sbh, and runs forward twice.",
        "Part of Tempo's gain is its loss head, which never has the logits of all tokens; stock has all.",
        "An estimate: no GPU has measured memory or speed.",
    )


def tabulate_scale(records: list[Record]) -> Table:
    choices = list(estimated_models.SCALE_CHOICES)
    rows = [["activations of the fullest rank, GiB", *choices]]
    found = {record["case"]: record["activation_bytes"] for record in records}
    for name in estimated_models.SCALES:
        for length in estimated_models.LENGTHS:
            sizes = [found[f"{name} | {length} | {choice}"] / _GIB for choice in choices]
            rows.append([f"{name}, s {length:,}", *(f"{size:,.1f}" for size in sizes)])
    return rows


def judge_scale(records: list[Record]) -> tuple[str, ...]:
    found = {record["case"]: record["activation_bytes"] for record in records}
    gains = [
        found[f"{n} | 2048 | stock, unfused"] / found[f"{n} | 2048 | SP + selective"] for n in estimated_models.SCALES
    ]
    word = "Met" if min(gains) >= 5 else "Missed"
    cells = [(name, length) for name in estimated_models.SCALES for length in estimated_models.LENGTHS]
    fewer = sum(found[f"{n} | {s} | SP + full"] < found[f"{n} | {s} | SP + Tempo"] for n, s in cells)
    host = [record.get("host_bytes", 0) / _GIB for record in records]
    return (
        f"{word}: a fifth of the activations with SP + selective (arXiv 2205.05198). At s 2,048 stock has "
        f"{', '.join(f'{gain:.1f}' for gain in gains)} times as much from 22B to 1T.",
        f"With offload a rank has up to {max(host):,.0f} GiB on its host; the link's time is not counted.",
        f"SP + full needs less than SP + Tempo in {fewer} of {len(cells)} rows: it runs forward twice.",
        "One micro batch of one sample; without context parallelism the longest sequences fit no GPU.",
    )


def tabulate_step_memory(records: list[Record]) -> Table:
    return [
        ["GPT-2 345M, b 8, s 1024, bf16, dropout 0.1", "peak, GiB", "at"],
        *([r["run"], f"{r['peak_bytes'] / _GIB:.1f}", r["moment"]] for r in records),
    ]


def tabulate_kept(records: list[Record]) -> Table:
    lines = kept_bytes.table(records).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def tabulate_order(records: list[Record]) -> Table:
    lines = roam_tables._format_averages(list({r["model"]: r for r in records}.values()))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def tabulate_grid(records: list[Record]) -> Table:
    cases = [record for record in records if "case" in record]
    counts = Counter(record["status"] for record in cases)
    worst = max((record for record in cases if record.get("ratio") is not None), key=lambda record: record["ratio"])
    return [
        ["", ""],
        *([status, str(number)] for status, number in sorted(counts.items())),
        ["largest error, of its limit", f"{worst['ratio']:.2f}"],
    ]


# Architectures that the card shows; docs/huggingface.md has all.
_SHOWN = ("BERT", "GPT-2", "ViT", "Whisper encoder", "Llama", "Qwen3", "Gemma 3", "Mixtral", "T5")


def tabulate_models(records: list[Record]) -> Table:
    measured = [r for r in records if r["tempo_sbh"] is not None]
    share = statistics.median(r["tempo_sbh"] / r["stock_sbh"] for r in measured)
    return [
        ["", "stock, sbh", "Tempo, sbh", "Tempo / stock"],
        *(
            [
                r["architecture"],
                f"{r['stock_sbh']:.1f}",
                f"{r['tempo_sbh']:.1f}",
                f"{r['tempo_sbh'] / r['stock_sbh']:.2f}",
            ]
            for r in measured
            if r["architecture"] in _SHOWN
        ),
        [f"median of [{len(measured)}](../docs/huggingface.md)", "", "", f"{share:.2f}"],
    ]


def tabulate_proof(records: list[Record]) -> Table:
    titles = ["loss on held-out data", "stock, from its first steps", "spread of seeds", "Tempo - stock"]
    rows = [[*titles, "95 % interval", "farthest"]]
    for r in records:
        first = statistics.fmean(curve[0] for curve in r["stock_curves"])
        stock = f"{first:.2f} -> {statistics.fmean(r['stock_losses']):.4f}"
        for form in list_forms(r):
            low, high = r[f"{form}_interval"]
            rows.append(
                [
                    f"{r['case']}, {r['dtype']}, p {r['p']}: {form}, {len(r['seeds'])} seeds, {r['steps']} steps",
                    *(stock, f"{r['stock_spread']:.4f}", f"{r[f'{form}_difference']:+.5f}"),
                    *(f"{low:+.5f} to {high:+.5f}", f"{r[f'{form}_farthest_from_stock']:.5f}"),
                ]
            )
    return rows


def list_forms(record: Record) -> list[str]:
    """Tempo's, of a case of the proof of training."""
    return [form for form in record["forms"] if form != "stock"]


def judge_proof(records: list[Record]) -> tuple[str, ...]:
    missed = [f"{r['case']} ({form})" for r in records for form in list_forms(r) if not r[f"{form}_passed"]]
    worse = [
        f"{r['case']} ({form})" for r in records for form in list_forms(r) if r["p"] and r[f"{form}_difference"] > 0
    ]
    return (
        *([f"Missed: {', '.join(missed)}."] if missed else []),
        f"With dropout the mean is above stock's in {', '.join(worse) or 'no case'}; an interval that contains 0 does "
        "not prove that there is no difference.",
        "Two layers of 64 units and some hundred steps, in which BERT has only begun to learn.",
    )


def tabulate_operations(records: list[Record]) -> Table:
    """The newest record of each operation, shape and dtype with one thread: median over shapes, and extremes."""
    newest = {(r["operation"], r["shape"], r["dtype"]): r for r in records if r["device"].endswith(" 1 threads")}
    rows = [["time / torch's, over shapes and dtypes", "median", "least", "most"]]
    for name in sorted({operation for operation, _, _ in newest}):
        ratios = [r["ours_over_torch"] for (operation, _, _), r in newest.items() if operation == name]
        rows.append([name, *(f"{value:.2f}" for value in (statistics.median(ratios), min(ratios), max(ratios)))])
    return rows


def list_slow_operations(records: list[Record]) -> tuple[str, ...]:
    slow = [row for row in tabulate_operations(records)[1:] if float(row[1]) > 1]
    return (
        *([f"Missed: a median no slower than torch, in {len(slow)} rows."] if slow else []),
        "Records are of several commits and machines, some of which were shared.",
    )


def tabulate_context(records: list[Record]) -> Table:
    r = records[-1]
    rows = [["two ranks against one, s 1024, 12 heads of 64", "CPU seconds / one rank's", "kept, MiB a rank"]]
    rows.append(["one rank", "1.00", f"{r['one_rank_kept_bytes'] / 2**20:.2f}"])
    rows += [
        [f"`{k}`", f"{r[k]['over_one_rank']:.2f}", f"{r[k]['kept_bytes'] / 2**20:.2f}"]
        for k in ("p2p", "all_gather", "a2a")
    ]
    return rows


def tabulate_loss_head(records: list[Record]) -> Table:
    r = records[-1]
    rows = [["GPT-2 124M, s 512, b 8", "time / stock", "stock's peak / its own"]]
    rows += [
        [k.replace("_", " "), f"{r['over_stock'][k]:.2f}", f"{r['stock_over_peak'][k]:.2f}"] for k in r["over_stock"]
    ]
    return rows


_ON_A_GPU = "Not measured on a GPU."
CLAIMS: dict[str, Card] = {
    "kept_bytes": Card(
        "A GPT-2 layer keeps 20 instead of 34 bytes per token and hidden unit",
        "python benchmarks/kept_bytes.py",
        kept_bytes.OUTPUT,
        tabulate_kept,
        (
            "Stock on a GPU is a formula, which a test compares with measured layers where both exist.",
            _ON_A_GPU,
        ),
    ),
    "step_memory": Card(
        "The peak of a step falls with what its layers keep",
        "python benchmarks/step_memory.py",
        RESULTS / "estimate" / "step_memory.jsonl",
        tabulate_step_memory,
        ("Tensors only: no optimizer, no allocator's rounding, no workspaces.", _ON_A_GPU),
    ),
    "layer": Card(
        "One layer on a CPU, against its alternatives",
        "python benchmarks/run.py --only layer",
        layer_rivals.OUTPUT,
        tabulate_layer,
        judge_layer,
    ),
    "operations": Card(
        "Operations on a CPU against torch's",
        "python benchmarks/run.py --only operations",
        RESULTS / "cpu" / "operations.jsonl",
        tabulate_operations,
        list_slow_operations,
    ),
    "loss_head": Card(
        "The loss head takes a fifth of stock's memory on a CPU",
        "python benchmarks/loss_head.py",
        RESULTS / "cpu" / "loss_head.jsonl",
        tabulate_loss_head,
        ("The recomputed form takes a third more time: it makes the logits twice.", _ON_A_GPU),
    ),
    "context_parallel": Card(
        "Context parallelism runs on a CPU, and keeps less on each rank",
        "python benchmarks/run.py --only context_parallel",
        RESULTS / "cpu" / "context_parallel.jsonl",
        tabulate_context,
        ("Two ranks together take 1.3 to 1.5 times the seconds of one, mostly because gloo copies.", _ON_A_GPU),
    ),
    "largest_batch": Card(
        "Larger batches fit on one GPU",
        "python benchmarks/run.py --only model",
        estimated_models.OUTPUTS["model"],
        tabulate_model,
        judge_model,
    ),
    "scale": Card(
        "Activations from 22B to 1T parameters",
        "python benchmarks/run.py --only scale",
        estimated_models.OUTPUTS["scale"],
        tabulate_scale,
        judge_scale,
    ),
    "published_peaks": Card(
        "The estimate meets peaks that others measured on GPUs",
        "python benchmarks/published_peaks.py benchmarks/published/megatron.json --write-docs",
        ROOT / "docs" / "published_peaks.md",
        lambda _: [
            ["", ""],
            ["all rows", read_block(ROOT / "docs" / "published_peaks.md", "published").partition(" (without")[0]],
        ],
        ("The document lists rows that cannot be expressed or are farther off, with reasons.",),
    ),
    "compatibility": Card(
        "Tempo agrees with stock in every layout, layer by layer",
        "python benchmarks/compatibility.py --full --write-docs",
        RESULTS / "cpu" / "grid.jsonl",
        tabulate_grid,
        ("Small models, gloo on a CPU, at most 8 processes.", _ON_A_GPU),
    ),
    "huggingface": Card(
        "`tempoize` lowers what models of transformers keep",
        "python benchmarks/huggingface_models.py",
        RESULTS / "cpu" / "huggingface_models.jsonl",
        tabulate_models,
        (
            "Architectures with modules of their own keep more.",
            "Two layers of small models.",
            _ON_A_GPU,
        ),
    ),
    "training": Card(
        "A model learns the same: GPT, BERT and ViT",
        "python benchmarks/run.py --only loss",
        RESULTS / "cpu" / "training_proof.jsonl",
        tabulate_proof,
        judge_proof,
    ),
    "order": Card(
        "An order of a step's operations that needs less memory",
        "python benchmarks/roam_models.py && python benchmarks/roam_tables.py",
        RESULTS / "estimate" / "roam.jsonl",
        tabulate_order,
        ("Missed: the paper's averages (arXiv 2310.19295); [the reasons](../docs/order.md#what-it-gains).",),
    ),
}


def describe_machine(records: Sequence[Record]) -> list[str]:
    """Commit, machine and versions, as far as records have them; several of one are listed."""

    def collect(values: Iterable[Any]) -> str:
        # "-" is what records of the time before this field say.
        return ", ".join(sorted({str(value) for value in values if value})) or "not recorded"

    versions = {
        f"{name} {version}"
        for record in records
        for name, version in ({"torch": record.get("torch")} | (record.get("versions") or {})).items()
        if version and version != "no"
    }
    return [
        f"commit {collect((record.get('commit') or '')[:12] for record in records)}",
        f"machine {collect(record.get('device') for record in records)}",
        collect(versions),
    ]


def write_card(card: Card) -> str:
    """The text of a card."""
    source = card.source.relative_to(ROOT).as_posix()
    records = read_records(card.source) if card.source.suffix == ".jsonl" else []
    short = card.short(records) if callable(card.short) else card.short
    where = [f"[{source}](../{source})", *(describe_machine(records) if records else [])]
    return "\n".join(
        [
            "<!-- Written by `python benchmarks/cards.py`; not to be edited. -->",
            "",
            f"# {card.claim}",
            "",
            f"`{card.command}` writes {'; '.join(where)}.",
            "",
            format_table(card.figures(records)),
            "",
            "## What falls short",
            "",
            *(f"- {line}" for line in short),
            "",
        ]
    )


def write_index() -> str:
    lines = [
        "<!-- Written by `python benchmarks/cards.py`; not to be edited. -->",
        "",
        "# Cards",
        "",
        "A card is one claim: its command, results, figures, and what falls short.",
        "[docs/benchmarks.md](../docs/benchmarks.md) draws the larger ones.",
        "",
        *(f"- [{card.claim}]({name}.md)" for name, card in CLAIMS.items()),
        "",
    ]
    return "\n".join(lines)


def list_texts() -> dict[Path, str]:
    """File -> text, of all cards and their index."""
    return {CARDS / f"{name}.md": write_card(card) for name, card in CLAIMS.items()} | {
        CARDS / "README.md": write_index()
    }


def main() -> None:
    CARDS.mkdir(exist_ok=True)
    texts = list_texts()
    for old in set(CARDS.glob("*.md")) - texts.keys():
        old.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{len(texts) - 1} cards are in {CARDS}")


if __name__ == "__main__":
    main()
