"""Measures what one GPT-2 layer keeps for backward, stock and with Tempo, and writes the README's table.

The measured figures are those of Megatron's own modules on a CPU, where softmax is unfused and a mask has the tensor's
dtype. Stock's figures on a GPU, with Transformer Engine's modules and fused or unfused attention, come from the formula
and are marked so.

python benchmarks/kept_bytes.py            # benchmarks/results/estimate/kept_bytes.jsonl and README.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from measurements import RESULTS, ROOT, append_records, describe_cpu_run

from tempo_megatron import TempoConfig
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.show.ledger import Ledger, measure_run
from tempo_megatron.models.layout import Layout
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.models.shape_file import read_shape_file

sys.path.insert(0, str(ROOT / "tests" / "support"))

from kept_formula import LayerShape, count_layer_bytes

OUTPUT = RESULTS / "estimate" / "kept_bytes.jsonl"
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
    """Yields one record per layout."""
    shape = make_shape(**read_shape_file(ROOT / MODEL), attention_dropout=DROPOUT, hidden_dropout=DROPOUT)
    for name, tp, sequence_parallel, recomputed in LAYOUTS:
        stock, tempo, recompute = (
            measure_run(
                Run(
                    model=shape,
                    tempo=config,
                    layout=Layout(tp=tp, sp=sequence_parallel),
                    recompute=recomputed,
                    stock="cpu",
                )
            )
            for config in CONFIGS
        )
        yield {
            "layout": name,
            "model": MODEL,
            "shape": {"s": shape.seq_length, "b": 1, "h": shape.hidden_size},
            "dtype": "bf16",
            "p": DROPOUT,
            "stock": _figures(stock),
            "stock_on_gpu": _figures_on_gpu(shape, tp, sequence_parallel, recomputed, "fused"),
            "stock_unfused_on_gpu": _figures_on_gpu(shape, tp, sequence_parallel, recomputed, "unfused"),
            "tempo": _figures(tempo),
            "recompute": _figures(recompute),
            **describe_cpu_run(),
        }


def _figures(ledger: Ledger) -> dict[str, float]:
    scores = ledger.convert_to_sbh(ledger.scores_bytes)
    return {"sbh": round(ledger.layer_sbh, 3), "scores_sbh": round(scores, 3), "layer_bytes": ledger.layer_bytes}


def _figures_on_gpu(
    shape: ModelShape, tp: int, sequence_parallel: bool, recomputed: tuple[str, ...], attention: str
) -> dict[str, float | str]:
    """Computes the figures of stock with Transformer Engine's modules by the formula."""
    layer = LayerShape(
        seq_length=shape.seq_length,
        micro_batch_size=1,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        dtype=torch.bfloat16,
        tensor_parallel=tp,
        sequence_parallel=sequence_parallel,
        hidden_dropout=DROPOUT,
        attention_dropout=DROPOUT,
        recompute=frozenset(recomputed),
    )
    layer_bytes = count_layer_bytes(layer, TempoConfig.off(), stock="transformer_engine", stock_attention=attention)
    sbh = layer_bytes / (shape.seq_length * shape.hidden_size)
    return {"sbh": round(sbh, 3), "layer_bytes": layer_bytes, "from": "formula"}


def table(records: list[dict[str, Any]]) -> str:
    """Formats the records as the README's Markdown table."""
    lines = [
        "| GPT-2 124M, s 1024, bf16, dropout 0.1 | stock on a GPU | Tempo | Tempo / stock | Tempo, recompute | "
        "stock, unfused attention | Tempo / stock |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        names = ("stock_on_gpu", "stock_unfused_on_gpu", "tempo", "recompute")
        gpu, unfused, tempo, recompute = (record[name] for name in names)
        lines.append(
            f"| {record['layout']} | {gpu['sbh']:.2f} | {tempo['sbh'] + tempo['scores_sbh']:.2f} | "
            f"{tempo['layer_bytes'] / gpu['layer_bytes']:.2f} | {recompute['sbh'] + recompute['scores_sbh']:.2f} | "
            f"{unfused['sbh']:.2f} | {tempo['layer_bytes'] / unfused['layer_bytes']:.2f} |"
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
