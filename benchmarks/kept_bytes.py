"""What one GPT-2 layer keeps for backward, stock and with Tempo: measures it and writes the README's table.

python benchmarks/kept_bytes.py            # benchmarks/results/kept_bytes.jsonl and README.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from measurements import RESULTS, ROOT, append_records, describe_cpu_run

from tempo_megatron import TempoConfig
from tempo_megatron.memory.ledger import Ledger
from tempo_megatron.memory.ledger_command import measure_ledger
from tempo_megatron.models.shape import make_shape, read_shape_file

OUTPUT = RESULTS / "kept_bytes.jsonl"
README = ROOT / "README.md"
BEGIN, END = "<!-- kept bytes: begin -->", "<!-- kept bytes: end -->"
MODEL = "configs/model/gpt2_124m.json"
DROPOUT = 0.1
CONFIGS = (TempoConfig.off(), TempoConfig(), TempoConfig(activation="recompute", norm="recompute"))
# Name, tensor parallel size, sequence parallelism, Megatron's recomputation.
LAYOUTS: tuple[tuple[str, int, bool, tuple[str, ...]], ...] = (
    ("TP 1", 1, False, ()),
    ("TP 1, `core_attn` recomputed", 1, False, ("core_attn",)),
    ("TP 2 + SP, on each rank", 2, True, ()),
)


def measure() -> Iterator[dict[str, Any]]:
    """One record per layout."""
    shape = make_shape(**read_shape_file(ROOT / MODEL), attention_dropout=DROPOUT, hidden_dropout=DROPOUT)
    for name, tp, sequence_parallel, recomputed in LAYOUTS:
        arguments = argparse.Namespace(
            tp=tp, sequence_parallel=sequence_parallel, recompute=recomputed, dtype="bf16", micro_batch_size=1
        )  # fmt: skip
        stock, tempo, recompute = (measure_ledger(shape, config, arguments) for config in CONFIGS)
        yield {
            "layout": name,
            "model": MODEL,
            "shape": {"s": stock.seq_length, "b": stock.micro_batch_size, "h": stock.hidden_size},
            "dtype": "bf16",
            "p": DROPOUT,
            "stock": _figures(stock),
            "tempo": _figures(tempo),
            "recompute": _figures(recompute),
            **describe_cpu_run(),
        }


def _figures(ledger: Ledger) -> dict[str, float]:
    scores = ledger.convert_to_sbh(ledger.scores_bytes)
    return {"sbh": round(ledger.layer_sbh, 3), "scores_sbh": round(scores, 3), "layer_bytes": ledger.layer_bytes}


def table(records: list[dict[str, Any]]) -> str:
    """The records as the README's Markdown table."""
    lines = [
        "| GPT-2 124M, s 1024, bf16, dropout 0.1 | stock | of it s\\*s | Tempo | Tempo / stock | Tempo, recompute |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        stock, tempo, recompute = record["stock"], record["tempo"], record["recompute"]
        lines.append(
            f"| {record['layout']} | {stock['sbh'] + stock['scores_sbh']:.2f} | {stock['scores_sbh']:.2f} | "
            f"{tempo['sbh'] + tempo['scores_sbh']:.2f} | {tempo['layer_bytes'] / stock['layer_bytes']:.2f} | "
            f"{recompute['sbh'] + recompute['scores_sbh']:.2f} |"
        )
    return "\n".join(lines)


def table_in_readme() -> str:
    return README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    records = list(measure())
    OUTPUT.unlink(missing_ok=True)
    append_records(OUTPUT, records)
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{table(records)}\n{END}{after}", encoding="utf-8")
    print(table(records))


if __name__ == "__main__":
    main()
