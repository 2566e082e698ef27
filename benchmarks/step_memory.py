"""Draws the memory of one training step, stock beside Tempo: the README's figure.

Follows forward and backward of a GPT-2 on tensors without memory, with Megatron's local modules: stock with unfused
attention, stock with selective recomputation (`--recompute-activations`), which keeps as much as stock with fused
attention does, and Tempo. Counted are all tensors that are alive, weights included; there is no optimizer, and an
allocator's rounding is left out.

python benchmarks/step_memory.py           # benchmarks/results/estimate/step_memory.jsonl and step_memory.png
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import pyplot
from measurements import RESULTS, ROOT, append_records, describe_cpu_run, read_records

from tempo_megatron import TempoConfig
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.timeline import simulate_timeline
from tempo_megatron.models.shape import make_shape
from tempo_megatron.models.shape_file import read_shape_file

OUTPUT = RESULTS / "estimate" / "step_memory.jsonl"
FIGURE = OUTPUT.with_suffix(".png")
MODEL = "configs/model/gpt2_345m.json"
MICRO_BATCH_SIZE = 8
# Name, Tempo's values, Megatron's recomputation, colour.
RUNS: tuple[tuple[str, TempoConfig, tuple[str, ...], str], ...] = (
    ("stock, unfused attention", TempoConfig.off(), (), "#999999"),
    ("stock, attention recomputed", TempoConfig.off(), ("core_attn",), "#56B4E9"),
    ("Tempo", TempoConfig(), (), "#D55E00"),
)
NUM_POINTS = 400


def measure() -> Iterator[dict[str, Any]]:
    """One record per run: its peak, what ran there, and the bytes alive at the height of each stretch of the step."""
    shape = make_shape(**read_shape_file(ROOT / MODEL), attention_dropout=0.1, hidden_dropout=0.1)
    for name, tempo, recompute, _ in RUNS:
        timeline = simulate_timeline(
            Run(model=shape, tempo=tempo, micro_batch_size=MICRO_BATCH_SIZE, recompute=recompute), title=name
        )
        alive = np.sum(list(timeline.levels.values()), axis=0)
        yield {
            "run": name,
            "model": MODEL,
            "micro_batch_size": MICRO_BATCH_SIZE,
            "seq_length": shape.seq_length,
            "dtype": "bf16",
            "p": 0.1,
            "peak_bytes": timeline.peak_bytes,
            "moment": timeline.moment,
            "num_events": len(alive),
            "alive_bytes": [int(stretch.max()) for stretch in np.array_split(alive, NUM_POINTS)],
            **describe_cpu_run(),
        }


def plot(records: list[dict[str, Any]]) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    colours = {name: colour for name, _, _, colour in RUNS}
    for record in records:
        gib = np.array(record["alive_bytes"]) / 2**30
        share = np.linspace(0, 100, len(gib))
        label = f"{record['run']}: {record['peak_bytes'] / 2**30:.1f} GiB"
        axes.fill_between(share, gib, color=colours[record["run"]], alpha=0.25, linewidth=0)
        axes.plot(share, gib, color=colours[record["run"]], linewidth=1.6, label=label)
    first = records[0]
    axes.set_title(
        f"Tensors alive in one step of GPT-2 345M, micro batch {first['micro_batch_size']} x {first['seq_length']} "
        "tokens, bf16, dropout 0.1",
        loc="left",
        fontsize=11,
    )
    axes.set_xlabel("share of the step's operations, forward and backward (%)")
    axes.set_ylabel("GiB")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(FIGURE, dpi=110)
    pyplot.close(figure)


def main() -> None:
    records = list(measure())
    OUTPUT.unlink(missing_ok=True)
    append_records(OUTPUT, records)
    plot(read_records(OUTPUT))
    for record in records:
        print(f"{record['run']:<30}{record['peak_bytes'] / 2**30:>8.2f} GiB at the {record['moment']}")


if __name__ == "__main__":
    main()
