"""Writes docs/benchmarks.md with its plots, and the cards, from what benchmarks/run.py measured.

python benchmarks/report.py
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import estimated_models
import layer_rivals
import training_proof
from measurements import ROOT, read_records

import cards
from cards import CLAIMS, Record, format_table

PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
PLOTS = {name: IMAGES / f"benchmark_{name}.png" for name in ("layer", "model", "scale", "loss")}
_FAMILIES = {
    "stock": "#777777",
    "torch.compile": "#0072B2",
    "checkpoint": "#009E73",
    "the paper": "#CC79A7",
    "Tempo": "#D55E00",
}
# Of points that lie close together: where a label stands, in points.
_LABELS = {
    "torch.compile, budget 0.4": (-6, 5),
    "torch.compile, budget 0.6": (6, -9),
    "checkpoint, saves every second product": (6, -10),
    "torch.compile, budget 1.0": (-2, 6),
    "Tempo, in place": (6, -11),
    "torch.compile, budget 0.8": (6, 6),
    "Tempo, recompute + linear_fc1": (-6, -10),
}


class Goal(NamedTuple):
    """What should hold, what is found, and the card that has it."""

    text: str
    found: str
    is_met: bool
    card: str


def read(card: str) -> list[Record]:
    return read_records(CLAIMS[card].source)


def list_goals() -> list[Goal]:
    """Every goal, in the order of the cards."""
    layer = {record["case"]: record for record in read("layer")}
    stock = layer[layer_rivals.BASE]
    goals = []
    for name, most in (("Tempo, in place", 20.6), ("Tempo, recompute", 20.1)):
        kept = layer[name]["kept_sbh"]
        goals.append(Goal(f"{name}: a layer keeps at most {most} sbh", f"{kept:.2f}", kept <= most, "layer"))
    for name in (case for case in layer if case.startswith("Tempo")):
        ratio = layer[name]["over_stock"]
        goals.append(Goal(f"{name}: at most stock's CPU time", f"{ratio:.2f}", ratio <= 1, "layer"))
        error, limit = layer[name]["gradient_error"], 2 * stock["gradient_error"]
        goals.append(
            Goal(
                f"{name}: gradients at most twice as wrong as stock's",
                f"{error / limit:.2f} of that",
                error <= limit,
                "layer",
            )
        )
    for row in cards.tabulate_operations(read("operations"))[1:]:
        goals.append(Goal(f"{row[0]}: at most torch's CPU time", row[1], float(row[1]) <= 1, "operations"))
    for base, title in (("stock, unfused", " with unfused attention"), ("stock", "")):
        for model, gains in cards.list_model_gains(read("largest_batch"), base).items():
            for memory, gain in gains:
                text = f"{model}, {memory} GiB: twice stock's batch{title}"
                goals.append(Goal(text, f"{gain:.2f}", gain >= 2, "largest_batch"))
    found = {record["case"]: record["activation_bytes"] for record in read("scale")}
    for name in estimated_models.SCALES:
        gain = found[f"{name} | 2048 | stock, unfused"] / found[f"{name} | 2048 | SP + selective"]
        goals.append(Goal(f"{name}: SP + selective keeps a fifth", f"1 / {gain:.1f}", gain >= 5, "scale"))
    paper, ours = cards.tabulate_order(read("order"))[1:3]
    for column, title in ((2, "eager"), (3, "eager with fragmentation"), (4, "LESCEA + LLFB")):
        wanted, got = (float(row[column].rstrip(" %")) for row in (paper, ours))
        goals.append(Goal(f"order: {wanted:g} % below {title}", f"{got:g} %", got >= wanted, "order"))
    for record in read("training"):
        for form in cards.list_forms(record):
            text, found = (
                "the loss within the spread of stock's seeds",
                (f"{record[f'{form}_farthest_from_stock'] / record['stock_spread']:.3f} of it"),
            )
            if record["p"]:
                low, high = record[f"{form}_interval"]
                text, found = "the interval of Tempo - stock does not lie above 0", f"{low:+.4f} to {high:+.4f}"
            goals.append(Goal(f"{record['case']}, {form}: {text}", found, record[f"{form}_passed"], "training"))
    return goals


def list_papers() -> list[list[str]]:
    """The papers' headline figures and ours."""
    unfused, fused = (
        dict(cards.list_model_gains(read("largest_batch"), base)["BERT large, s 512"])["11"]
        for base in ("stock, unfused", "stock")
    )
    found = {record["case"]: record["activation_bytes"] for record in read("scale")}
    selective, flash, tempo = (
        found["175b | 2048 | stock, unfused"] / found[f"175b | 2048 | {name}"]
        for name in ("SP + selective", "SP, fused attention", "SP + Tempo")
    )
    paper, ours = cards.tabulate_order(read("order"))[1:3]
    return [
        ["paper", "published", "ours", "card"],
        [
            "Tempo, arXiv 2210.10246",
            "up to twice the batch: BERT large, s 512, 11 GB; 16 to 26 % more samples a second",
            f"in 11 GiB, bf16, by the estimate: {unfused:.1f} times stock's batch with unfused attention, "
            f"{fused:.1f} times with fused attention; speed not measured",
            link("largest_batch"),
        ],
        [
            "sequence parallelism, arXiv 2205.05198",
            "a fifth of the activations; nine tenths of recomputation's time gone",
            f"175B, s 2,048: 1 / {selective:.1f} with SP + selective, 1 / {flash:.1f} with SP and fused attention, "
            f"1 / {tempo:.1f} with SP and Tempo; time not measured",
            link("scale"),
        ],
        [
            "ROAM, arXiv 2310.19295",
            f"{paper[2]} below eager mode by order, {paper[3]} with fragmentation, {paper[4]} below heuristics",
            f"{ours[2]}, {ours[3]} and {ours[4]}, of the same 14 cases ([why](order.md#what-it-gains))",
            link("order"),
        ],
    ]


def link(card: str) -> str:
    return f"[card](../cards/{card}.md)"


def write_page() -> str:
    """The text of docs/benchmarks.md."""
    goals = list_goals()
    missed = [goal for goal in goals if not goal.is_met]
    rows = [["goal", "found"], *([goal.text, f"[{goal.found}](../cards/{goal.card}.md)"] for goal in missed)]
    better = [*cards.list_better_layers(read("layer"))]
    better += [line for line in cards.judge_model(read("largest_batch")) if line.startswith("Full recomputation")]
    better += [line for line in cards.judge_scale(read("scale")) if line.startswith("SP + full")]
    return "\n".join(
        [
            "<!-- Written by `python benchmarks/report.py`; not to be edited. -->",
            "",
            "# Benchmarks",
            "",
            "`python benchmarks/run.py` measures, `python benchmarks/report.py` writes this page and the",
            "[cards](../cards/README.md). Both sides of a comparison alternate in one process; a figure is the ratio",
            "of medians. Nothing was measured on a GPU; `--suite gpu` does that.",
            "",
            "## A layer",
            "",
            "![Kept bytes against time](images/benchmark_layer.png)",
            "",
            f"On a CPU, in bf16; lower left is better: {link('layer')}.",
            "",
            "## Models",
            "",
            "![Largest micro batch over stock's](images/benchmark_model.png)",
            "",
            "Largest micro batch that fits, by the estimate, over stock's with fused attention; stock with unfused",
            f"attention and with full recomputation: {link('largest_batch')}.",
            "",
            "## Scale",
            "",
            "![Activations over the sequence length](images/benchmark_scale.png)",
            "",
            f"The fullest rank of GPT-3 175B, TP 8, PP 8; other sizes: {link('scale')}.",
            "",
            "## Loss",
            "",
            "![Training losses](images/benchmark_loss.png)",
            "",
            f"Dropout 0.1, mean and range of five seeds. Held-out data, and no dropout: {link('training')}.",
            "",
            "## Against the papers",
            "",
            format_table(list_papers()).replace("---:", "---"),
            "",
            "## Where something else is better",
            "",
            "Layers that keep less than Tempo in place, with their time over its own. torch.compile's memory budget",
            "does not work inside Megatron's tensor-parallel layers.",
            "",
            *(f"- {line}" for line in better),
            "",
            "## Goals",
            "",
            f"{len(goals) - len(missed)} of {len(goals)} are met. Missed, with a link to the card:",
            "",
            format_table(rows).replace("---:", "---"),
            "",
        ]
    )


def plot_all() -> None:
    """Draws what the page shows."""
    from tempo_megatron.plots import COLOURS, INK, import_pyplot, save, tidy

    pyplot = import_pyplot("benchmarks/report.py")
    figure, axes = pyplot.subplots(figsize=(8.5, 5), layout="constrained")
    for record in read("layer"):
        case = record["case"]
        colour = next(colour for family, colour in _FAMILIES.items() if case.startswith(family))
        axes.plot(record["kept_sbh"], record["over_stock"], "o", color=colour, markersize=7)
        label = case.replace("torch.compile, budget ", "compile ").replace("checkpoint, saves", "checkpoint,")
        place, at = (record["kept_sbh"], record["over_stock"]), _LABELS.get(case, (6, 3))
        axes.annotate(label, place, at, textcoords="offset points", fontsize=8, ha="right" if at[0] < 0 else "left")
    axes.set(xlabel="kept for backward, bytes per token and hidden unit", ylabel="CPU time over stock's", xlim=(0, 100))
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    tidy(axes)
    save(figure, PLOTS["layer"])

    figure, axes = pyplot.subplots(figsize=(8.5, 4.2), layout="constrained")
    gains = cards.list_model_gains(read("largest_batch"))
    memories = [str(gib) for gib in estimated_models.MEMORIES_GIB]
    for number, memory in enumerate(memories):
        heights = [dict(of_model).get(memory, 0.0) for of_model in gains.values()]
        places = [place + 0.16 * (number - 2) for place in range(len(gains))]
        axes.bar(places, heights, 0.15, color=COLOURS[number], label=f"{memory} GiB")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xticks(
        range(len(gains)), [name.replace(", s", "\ns").replace(" of ", " of\n") for name in gains], fontsize=8
    )
    axes.set_ylabel("Tempo's batch over stock's")
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)
    save(figure, PLOTS["model"])

    figure, axes = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
    found = {record["case"]: record["activation_bytes"] for record in read("scale")}
    for number, choice in enumerate(estimated_models.SCALE_CHOICES):
        sizes = [found[f"175b | {length} | {choice}"] / 2**30 for length in estimated_models.LENGTHS]
        axes.plot(estimated_models.LENGTHS, sizes, "o-", color=COLOURS[number], label=choice)
    axes.axhline(80, color=INK, linewidth=0.8, linestyle="--", label="80 GiB")
    axes.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="activations of the fullest rank, GiB")
    axes.set_xticks(estimated_models.LENGTHS, ["1K", "2K", "8K", "32K", "128K", "1M"])
    axes.minorticks_off()
    tidy(axes)
    axes.legend(frameon=False, fontsize=8)
    save(figure, PLOTS["scale"])

    records = [record for record in read("training") if record["p"]]
    figure, [panels] = pyplot.subplots(1, len(records), figsize=(11, 3.6), layout="constrained", squeeze=False)
    for axes, record in zip(panels, records, strict=True):
        for number, (form, label) in enumerate((("stock", "stock"), ("inplace", "Tempo"))):
            by_step = list(zip(*record[f"{form}_curves"], strict=True))
            steps = [training_proof.WINDOW * (place + 1) for place in range(len(by_step))]
            style = (0, (4, 2)) if number else "solid"
            means = [statistics.fmean(losses) for losses in by_step]
            axes.plot(steps, means, color=COLOURS[number], linestyle=style, label=label)
            ends = list(map(min, by_step)), list(map(max, by_step))
            axes.fill_between(steps, *ends, color=COLOURS[number], alpha=0.15, linewidth=0)
        axes.set_xlabel("step")
        tidy(axes, record["case"].partition(",")[0])
    panels[0].set_ylabel("training loss, nats")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, PLOTS["loss"])


def main() -> None:
    PAGE.write_text(write_page(), encoding="utf-8")
    plot_all()
    cards.main()
    print(*(f"missed: {goal.text}: {goal.found}" for goal in list_goals() if not goal.is_met), sep="\n")


if __name__ == "__main__":
    main()
