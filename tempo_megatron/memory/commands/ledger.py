"""The ledger command: its arguments and its table."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from tempo_megatron.html_report import HtmlReport
from tempo_megatron.memory.commands.requested_run import describe_stock, read_requested_run
from tempo_megatron.memory.show.ledger import Ledger, measure_run
from tempo_megatron.memory.show.plots import add_kept, add_timeline, list_parts, plot_kept, plot_timeline
from tempo_megatron.memory.show.timeline import format_timeline, simulate_timeline
from tempo_megatron.memory.show.viewers import write_snapshot, write_trace
from tempo_megatron.memory.tape.rows import format_host, format_size
from tempo_megatron.models.shape_file import name_shape_file
from tempo_megatron.settings.arguments import tempo_config_from
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import read_layers
from tempo_megatron.words.deepspeed_json import read_deepspeed_json

_WIDTH = 34


def run_ledger(args: argparse.Namespace) -> int:
    """Measure stock and Tempo and print one table. Raises ValueError for what cannot be measured."""
    run = read_requested_run(args, _read_tempo_config(args))
    followed = next((name for name in ("timeline", "html", "trace", "snapshot") if getattr(args, name)), None)
    if followed and (run.model.num_experts is not None or run.model.multi_latent_attention):
        raise ValueError(
            f"--{followed} {getattr(args, followed)} is given, and the model has experts or latent attention, which it "
            "does not follow; leave it out: tempo-megatron estimate says what stands at the peak"
        )
    stock, tempo = (measure_run(each) for each in (dataclasses.replace(run, tempo=TempoConfig.off()), run))
    recomputed = f", recompute {' '.join(args.recompute)}" if args.recompute else ""
    hidden, attention = run.model.hidden_dropout, run.model.attention_dropout
    dropout = f"dropout {hidden:g}" + ("" if attention == hidden else f" (attention {attention:g})")
    title = (
        f"{name_shape_file(args.model)}, {args.dtype}, s {run.model.seq_length}, b {run.micro_batch_size}, "
        f"{dropout}, TP {args.tp}{' + SP' if args.sequence_parallel else ''}{recomputed}, "
        f"stock modules: {describe_stock(run)}"
    )
    report = HtmlReport(title) if args.html else None
    print(title)
    print(f"tempo: {tempo.choices.describe()}")
    print("".join(f"left: {line}\n" for line in tempo.report.describe_left()))
    table = format_table(stock, tempo)
    print(table)
    layers, outside = (
        {name: list_parts(getattr(ledger, part)) for name, ledger in (("stock", stock), ("Tempo", tempo))}
        for part in ("layer_rows", "outside_rows")
    )
    if args.plot:
        plot_kept(layers, outside, args.plot, title, stock.sbh_bytes)
    if followed:
        timeline = simulate_timeline(run, title=title)
        found = format_timeline(timeline)
        if run.tempo.offloads:
            found += "\nthe step is followed as if nothing moved to the host; its peak then: tempo-megatron estimate"
        print(found)
        if args.timeline:
            plot_timeline(timeline, args.timeline)
        if args.trace:
            write_trace(timeline, args.trace)
        if args.snapshot:
            write_snapshot(timeline, args.snapshot)
        if report is not None:
            report.add_text(table)
            add_kept(report, layers, outside)
            add_timeline(report, timeline)
            report.add_text(found)
            report.save(args.html)
    if args.json:
        content: dict[str, Any] = {"stock": _list_figures(stock), "tempo": _list_figures(tempo)}
        content |= {"tempo_config": tempo.choices.describe(), "arguments": vars(args)}
        Path(args.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def format_table(stock: Ledger, tempo: Ledger) -> str:
    """Operations down, stock and Tempo across, in bytes and sbh, with the layer's and the model's totals."""
    ledgers = stock, tempo
    by_operation = [{row.operation: row for row in ledger.rows} for ledger in ledgers]
    lines = [
        f"{'kept for backward by':<{_WIDTH}}{'stock':>28}{'Tempo':>28}",
        f"{'':<{_WIDTH}}" + f"{'bytes':>17}{'sbh':>11}" * 2,
    ]
    rule = "-" * len(lines[0])

    def write(name: str, *sizes: int) -> None:
        figures = zip(ledgers, sizes, strict=True)
        cells = (f"{format_size(size):>17}{ledger.convert_to_sbh(size):>11.3f}" for ledger, size in figures)
        lines.append(f"{name:<{_WIDTH}}" + "".join(cells))

    def write_rows(part: str) -> None:
        places = {row.operation: row.place for ledger in ledgers for row in getattr(ledger, part)}
        lines.append(rule)
        for name in sorted(places, key=lambda name: (places[name], name)):
            write(name, *(rows[name].num_bytes if name in rows else 0 for rows in by_operation))
        lines.append(rule)

    write_rows("layer_rows")
    write("one layer without s*s", *(ledger.layer_bytes - ledger.scores_bytes for ledger in ledgers))
    if len(tempo.layer_kinds) < 2:
        write("one layer", stock.layer_bytes, tempo.layer_bytes)
    else:
        for kind in tempo.layer_kinds:
            write(f"each of layers {kind.layers}", stock.count_layer(read_layers(kind.layers)[0]), kind.layer_bytes)
    write_rows("outside_rows")
    write(f"model, {stock.num_layers} layers", stock.model_bytes, tempo.model_bytes)
    lines.append(f"{'Tempo / stock':<{_WIDTH}}{'layer':>28}{tempo.layer_bytes / stock.layer_bytes:>11.3f}")
    lines.append(f"{'':<{_WIDTH}}{'model':>28}{tempo.model_bytes / stock.model_bytes:>11.3f}")
    if on_host := format_host(tempo.layer_kinds, _WIDTH):
        moving = f"{'on the device while it moves':<{_WIDTH}}{format_size(tempo.most_moving_bytes):>17}"
        lines += [rule, *on_host, moving]
    return "\n".join(lines)


def _read_tempo_config(args: argparse.Namespace) -> TempoConfig:
    if args.use_tempo is False:
        raise ValueError("--no-use-tempo is given, but the ledger's second column is Tempo; leave it out")
    block = {}
    if args.deepspeed_config:
        block = read_deepspeed_json(args.deepspeed_config)
        if "tempo" not in block:
            raise ValueError(f'{args.deepspeed_config} has no "tempo" block; add one or leave --deepspeed_config out')
    return tempo_config_from(argparse.Namespace(**{**vars(args), "use_tempo": True}), block)


def _list_figures(ledger: Ledger) -> dict[str, Any]:
    return {
        "layer_bytes": ledger.layer_bytes,
        "layer_sbh_without_scores": ledger.layer_sbh,
        "layer_sbh": ledger.convert_to_sbh(ledger.layer_bytes),
        "layer_kinds": [
            {name: getattr(kind, name) for name in ("layers", "num_layers", "layer_bytes", "host_bytes")}
            | {"rows_on_host": {row.operation: row.host_bytes for row in kind.rows if row.host_bytes}}
            for kind in ledger.layer_kinds
        ],
        "model_bytes": ledger.model_bytes,
        "most_moving_bytes": ledger.most_moving_bytes,
        "rows": {row.operation: row.num_bytes for row in ledger.rows},
    }
