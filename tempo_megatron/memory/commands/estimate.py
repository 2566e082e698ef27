"""The estimate command: its arguments, its table and its figure."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tempo_megatron.memory.commands.arguments import add_estimate_arguments
from tempo_megatron.memory.commands.requested_run import (
    describe_stock,
    read_requested_run,
    take_command,
    take_deepspeed,
)
from tempo_megatron.memory.megatron.command import Command
from tempo_megatron.memory.megatron.options import VERSION
from tempo_megatron.memory.megatron.read_command import read_command, set_gpu, write_command
from tempo_megatron.memory.plan.gpu import list_configs
from tempo_megatron.memory.rank.estimate import PARTS, RankEstimate, estimate_ranks
from tempo_megatron.memory.routing import assume_routing, find_largest_imbalance, set_imbalance
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.memory.show.plots import add_bars, open_reports
from tempo_megatron.memory.show.stand_ins import describe_stand_ins, read_engine
from tempo_megatron.memory.show.tree import format_trees, list_trees
from tempo_megatron.models.build import DTYPES
from tempo_megatron.models.shape_file import name_shape_file
from tempo_megatron.settings.arguments import describe_tempo_arguments, tempo_config_from
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.argument_types import format_bytes

_WIDTH = 38
_SILENT_S = 2.0
_STEP = 0.1
"""Of an equal share of the experts' tokens: what is estimated more of."""


def run_estimate(args: argparse.Namespace) -> int:
    """Estimate stock and, where it is on, Tempo, and print one table. The exit status is 1 where the last does not fit.

    Raises ValueError for what cannot be estimated.
    """
    own: TempoConfig | None = None
    command = take_command(args, add_estimate_arguments)
    if command is None:
        config = take_deepspeed(args)
        run = read_requested_run(args, tempo_config_from(args, config or {}), config)
        is_asked, warnings = True, list[str]()
    else:
        own = None if describe_tempo_arguments(args) == "none" else tempo_config_from(args, {})
        run, is_asked, warnings = read_run_of_command(args, command, own)
    run = set_gpu(run, args.gpu or (None if command is None else "h100"))
    # What is asked here stands in no command of Megatron-LM.
    estimated = set_imbalance(run, args.moe_imbalance)
    if args.kept_bytes and run.stock != "transformer_engine":
        raise ValueError(
            f"--kept-bytes {args.kept_bytes} is of Transformer Engine's modules, and stock modules are {run.stock}; "
            "leave it out, or give --stock transformer_engine"
        )
    runs = {"stock": dataclasses.replace(estimated, tempo=TempoConfig.off())}
    if not run.tempo.is_off:
        runs["Tempo"] = estimated
    found = {}
    for name, of_column in runs.items():
        try:
            with _say_that_it_takes_time(f"estimating {name} ..."):
                found[name] = estimate_ranks(of_column, simulates_allocator=args.allocator)
        except ValueError as error:
            if name == "stock" or is_asked:
                raise
            warnings.append(f"Tempo cannot have this run: {error}")
    print_notes(command, warnings)
    title = f"{name_asked(args, command)}, {describe_run(run)}"
    reports = open_reports(args, title)
    table = format_estimates(found, shows_all=args.all_ranks)
    print(title)
    print(table)
    if args.kept_bytes:
        print(describe_stand_ins(read_engine(args.kept_bytes), list_configs("model")))
    largest = {name: max(enumerate(ranks), key=lambda each: _count_needed(each[1])) for name, ranks in found.items()}
    assumptions = {}
    if estimated.model.num_experts is not None and estimated.assumes_imbalance:
        is_given = args.moe_imbalance is not None
        with _say_that_it_takes_time("estimating other shares of the experts' tokens ..."):
            imbalance = _compute_token_imbalance(runs, largest, is_given=is_given)
        assumptions["token_imbalance"] = imbalance
        print(_describe_token_imbalance(imbalance))
    trees = {}
    for name, ranks in found.items() if args.tree else ():
        trees[name] = [list_trees(runs[name], stage) for stage in range(len(ranks))]
        for stage in range(len(ranks)) if args.all_ranks else [largest[name][0]]:
            print(format_trees(f"{name}, {ranks[stage].name}, by the module that made it", trees[name][stage]))
    fits = True
    if args.gpu_memory is not None:
        fits = [_print_fit(name, rank, args.gpu_memory) for name, (_, rank) in largest.items()][-1]
    if args.json:
        figures = {
            name.lower(): [{"stage": stage, **_list_figures(rank)} for stage, rank in enumerate(ranks)]
            for name, ranks in found.items()
        }
        for name, stages in trees.items():
            for row, chunks in zip(figures[name.lower()], stages, strict=True):
                row["modules"] = [dataclasses.asdict(tree) for tree in chunks]
        content = {"stock": figures["stock"], "tempo": figures.get("tempo", []), "assumptions": assumptions}
        content |= {"arguments": vars(args)}
        Path(args.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    columns = list_columns(found, shows_all=False)
    bars = {f"{rank.name}\n{label}": {part: rank.parts[part] for part in PARTS} for label, rank in columns}
    limit = None if args.gpu_memory is None else ("memory of a device", args.gpu_memory)
    for file, report in reports.items():
        report.add_text(table)
        add_bars(report, "at the peak", bars, "GiB", limit)
        report.save(file)
    if command is not None and "Tempo" in found:
        # The command's options, with what our own arguments say of Tempo.
        options = [*command.options, *([] if own is None else shlex.split(describe_tempo_arguments(args)))]
        if "--use-tempo" not in options:
            options.insert(len(command.options), "--use-tempo")
        print(f"with Tempo: {write_command(command, options, run, args.vocab_size)}")
    return 0 if fits else 1


def read_run_of_command(
    args: argparse.Namespace, command: Command, tempo: TempoConfig | None = None
) -> tuple[Run, bool, list[str]]:
    """The run of a command of Megatron-LM, whether somebody said anything of Tempo, and warnings.

    It is with Tempo, unless that is switched off: what it would change is what is asked. `tempo` is what our own
    arguments say of it; None is what the command says.
    """
    run, warnings = read_command(command, tempo, world_size=args.world_size, vocab_size=args.vocab_size)
    if tempo is None and run.tempo.is_off and "--no-use-tempo" not in command.options:
        return dataclasses.replace(run, tempo=TempoConfig()), False, warnings
    return run, True, warnings


def print_notes(command: Command | None, warnings: Sequence[str]) -> None:
    """What stands above a table: warnings, and of a command whose defaults are taken."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if command is not None:
        print(f"defaults are those of Megatron-LM {VERSION}")


def name_asked(args: argparse.Namespace, command: Command | None) -> str:
    """The name of --model, of --hf or of the command's script."""
    return Path(command.script).name if command else name_shape_file(args.hf if args.model is None else args.model)


def describe_run(run: Run) -> str:
    """One clause for people: precision, sizes, every part of the layout, optimizer, modules, recomputation, offload."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == run.dtype)
    recomputed = " ".join(run.recompute)
    if run.recompute_num_layers is not None:
        recomputed += f" of {run.recompute_num_layers} layers a chunk"
    num_chunks = len(run.list_chunks(0))
    experts = "" if run.model.num_experts is None else f", EP {run.layout.ep}"
    if run.model.num_experts is not None and run.layout.etp != run.layout.tp:
        experts += f", ETP {run.layout.etp}"
    return (
        f"{dtype}{'' if run.float8 is None else f' and fp8 {run.float8}'}, s {run.model.seq_length}, "
        f"b {run.micro_batch_size}, TP {run.layout.tp}{' + SP' if run.layout.sp else ''}"
        f"{'' if run.layout.cp == 1 else f', CP {run.layout.cp}'}{experts}, PP {run.layout.pp}"
        f"{f' in {num_chunks} chunks each' if num_chunks > 1 else ''}, DP {run.layout.dp}: "
        f"{run.layout.world_size:,} rank{'s' if run.layout.world_size > 1 else ''}, "
        f"{_describe_optimizer(run.optimizer)}, "
        f"stock modules: {describe_stock(run)}{f', recompute {recomputed}' if recomputed else ''}"
        f"{f', {run.tempo.describe_offload()}' if run.tempo.offloads else ''}"
    )


@contextlib.contextmanager
def _say_that_it_takes_time(text: str) -> Iterator[None]:
    timer = threading.Timer(_SILENT_S, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def list_columns(found: Mapping[str, Sequence[RankEstimate]], *, shows_all: bool) -> list[tuple[str, RankEstimate]]:
    """The first stage, the largest of those in the middle and the last one, or all; of each, stock and then Tempo."""
    chosen = []
    for name, ranks in found.items():
        middle = ranks[1:-1] if shows_all else sorted(ranks[1:-1], key=lambda rank: -rank.peak_bytes)[:1]
        chosen.append([(name, rank) for rank in (*ranks[:1], *middle, *ranks[1:][-1:])])
    return [column for of_stage in zip(*chosen, strict=True) for column in of_stage]


def format_estimates(found: dict[str, tuple[RankEstimate, ...]], *, shows_all: bool = False) -> str:
    """Parts down; kinds of ranks, or all of them, and within each stock and Tempo, across."""
    columns = list_columns(found, shows_all=shows_all)
    found_ranks = [rank for _, rank in columns]

    def write(title: str, values: Iterable[object], form: str = "") -> None:
        lines.append((f"{title:<{_WIDTH}}" + "".join(f"{value:>16{form}}" for value in values)).rstrip())

    def write_gib(title: str, values: Iterable[int]) -> None:
        write(title, (value / 2**30 for value in values), ".3f")

    lines: list[str] = []
    write("GiB at the peak", (rank.name for rank in found_ranks))
    write("", (name for name, _ in columns))
    rule = "-" * len(lines[0])
    if len(found["stock"]) > 1:
        largest = {name: max(ranks, key=_count_needed) for name, ranks in found.items()}
        write("", ("largest" if rank is largest[name] else "" for name, rank in columns))
    lines.append(rule)
    for part in PARTS:
        if any(rank.parts[part] for rank in found_ranks):
            write_gib(PARTS[part], (rank.parts[part] for rank in found_ranks))
    lines.append(rule)
    write_gib("peak", (rank.peak_bytes for rank in found_ranks))
    write_gib("between steps", (rank.at_rest_bytes for rank in found_ranks))
    for title, name in (("allocated, rounded", "rounded_bytes"), ("reserved by the allocator", "reserved_bytes")):
        if all(getattr(rank, name) is not None for rank in found_ranks):
            write_gib(title, (getattr(rank, name) for rank in found_ranks))
    write("parameters", (rank.num_parameters for rank in found_ranks), ",")
    if any(rank.host_bytes for rank in found_ranks):
        write_gib("on the host", (rank.host_bytes for rank in found_ranks))
    lines += [f"{name}, {rank.name}: the peak is in the {rank.moment}" for name, rank in columns]
    return "\n".join(lines)


def _print_fit(name: str, rank: RankEstimate, memory: int) -> bool:
    spare = memory - _count_needed(rank)
    counted = "counting tensors, not what the allocator reserves"
    if rank.reserved_bytes is not None:
        above = _count_needed(rank) - rank.peak_bytes
        counted = f"by what the allocator reserves, {format_bytes(above)} above its tensors"
    if spare >= 0:
        print(f"{name} fits {format_bytes(memory)} with {format_bytes(spare)} to spare ({rank.name}), {counted}")
    else:
        print(f"{name} does not fit {format_bytes(memory)}: {rank.name} needs {format_bytes(-spare)} more, {counted}")
    return spare >= 0


def _count_needed(rank: RankEstimate) -> int:
    """What the allocator reserves, where that is known, or the peak: it follows micro batches, not the optimizer."""
    return max(rank.peak_bytes, rank.reserved_bytes or 0)


def _describe_optimizer(optimizer: OptimizerSettings) -> str:
    if optimizer.kind == "deepspeed":
        on_host = " and ".join(["states"] * optimizer.offloads + ["weights"] * optimizer.offloads_weights)
        return f"DeepSpeed ZeRO {optimizer.zero_stage}{f' with {on_host} on the host' if on_host else ''}"
    if optimizer.kind == "none":
        return "no optimizer"
    if optimizer.fsdp is not None:
        return "Megatron-FSDP"
    if optimizer.muon is not None:
        return f"Megatron's Muon{'' if optimizer.muon == 'whole' else f', states {optimizer.muon}'}"
    instances = f" in {optimizer.instances} instances" if optimizer.instances > 1 else ""
    return f"Megatron's {'distributed ' if optimizer.distributed else ''}optimizer{instances}"


def _list_figures(rank: RankEstimate) -> dict[str, Any]:
    """As JSON has them: every part by its name, in bytes."""
    names = "name num_parameters moment at_rest_bytes peak_bytes rounded_bytes reserved_bytes host_bytes".split()
    parts = {PARTS[part]: rank.parts[part] for part in PARTS}
    return {**{name: getattr(rank, name) for name in names}, "bytes_at_the_peak": parts}


def _compute_token_imbalance(
    runs: Mapping[str, Run], stages: Mapping[str, tuple[int, RankEstimate]], *, is_given: bool
) -> dict[str, Any]:
    """What the estimate assumes of the experts' tokens, as JSON has it; where they go no estimate can know.

    Where somebody gave the share, its price is there too: what the rank that needs most takes more than with an even
    division, and what it would take with a tenth of an equal share more. Each is an estimate again. By the column of
    the table `stages` are those that need most, and their estimates.
    """
    run = runs["stock"]
    most = find_largest_imbalance(run)
    tokens = run.micro_batch_size * run.model.seq_length // run.layout.cp
    tokens //= run.layout.tp if run.layout.sp else 1
    figures: dict[str, Any] = {
        "ranks": run.layout.ep,
        # Tokens, once for each of their experts on the rank.
        "rows_of_an_equal_share": tokens * run.layout.etp * run.model.moe_router_topk,
        "largest_factor": most,
        "is_given": is_given,
    }
    for name, (stage, rank) in stages.items():
        factor = assume_routing(run, stage).moe_imbalance or 1.0
        figures[name.lower()] = {"factor": factor}
        if is_given:
            further = min(factor + _STEP, most)
            peaks = {factor: rank.peak_bytes}
            for other in {1.0, further} - peaks.keys():
                peaks[other] = estimate_ranks(set_imbalance(runs[name], other), only=stage)[0].peak_bytes
            figures[name.lower()] |= {
                "over_even_bytes": rank.peak_bytes - peaks[1.0],
                "next_factor": further,
                "next_bytes": peaks[further] - rank.peak_bytes,
            }
    return figures


def _describe_token_imbalance(figures: Mapping[str, Any]) -> str:
    """A line for people, and one for each column where the factor was given."""
    columns = {name: figures[name.lower()] for name in ("stock", "Tempo") if name.lower() in figures}
    factors = sorted({column["factor"] for column in columns.values()})
    source = (
        "given" if figures["is_given"] else f"routers at random; --moe-imbalance {factors[-1]:.2f} says what it takes"
    )
    lines = [
        f"assumed token imbalance: experts of the fullest of {figures['ranks']} ranks "
        f"get {' and '.join(f'{factor:.2f}' for factor in factors)} times an equal share of "
        f"{figures['rows_of_an_equal_share']:,} rows a layer ({source}); at most {figures['largest_factor']:.2f} times"
    ]
    for name, column in columns.items() if figures["is_given"] else ():
        more, rest = column["next_factor"] - column["factor"], ""
        if more:
            rest = f"; {100 * more:.0f} % of a share more would take {format_bytes(column['next_bytes'])}"
        lines.append(f"{name}: of the peak {format_bytes(column['over_even_bytes'])} are due to it{rest}")
    return "\n".join(lines)
