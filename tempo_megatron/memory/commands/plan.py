"""The plan command: its arguments, its table and its files."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tempo_megatron.memory.commands.arguments import add_plan_arguments
from tempo_megatron.memory.commands.estimate import describe_run, name_asked, print_notes, read_run_of_command
from tempo_megatron.memory.commands.requested_run import read_requested_run, take_command, take_deepspeed
from tempo_megatron.memory.megatron.command import Command, drop_options
from tempo_megatron.memory.megatron.options import parse_options
from tempo_megatron.memory.megatron.read_command import write_command
from tempo_megatron.memory.plan.gpu import Gpu, find_gpu, read_gpu
from tempo_megatron.memory.plan.planner import (
    RECOMPUTED,
    MemoryPlan,
    NothingFitsError,
    Planner,
    PlanRequest,
    try_micro_batches,
)
from tempo_megatron.memory.plan.plots import add_plan
from tempo_megatron.memory.refusals import MEGATRONS, OURS
from tempo_megatron.memory.routing import assume_fullest, set_imbalance
from tempo_megatron.memory.run import Run, read_recomputation
from tempo_megatron.memory.show.plots import open_reports
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.words.argument_types import format_bytes

# Options of a command in whose place a plan's stand, by their beginnings.
_PLANNED = (
    *("--recompute-", "--use-tempo", "--tempo-config", "--tempo-layers", "--tempo-offload"),
    *("--tempo-memory-budget", "--tempo-host-memory"),
    *(operation.argument for operation in OPERATIONS.values()),
)
# Fields of a Run that the planner knows.
_KNOWN = """
model tempo optimizer layout micro_batch_size num_micro_batches dtype recompute recompute_num_layers stock
stock_attention masked_softmax_fusion fuses_activation learns_positions fuses_latent_rope moe_grouped_gemm
moe_permute_fusion moe_shared_expert_gate moe_imbalance fuses_cross_entropy fuses_gradient_accumulation data_has_masks
gpu chip deterministic cublas_workspace_bytes expandable_segments
""".split()
# Of a stage, in the JSON.
_FIGURES = "in_flight peak_bytes kept_bytes moved_bytes host_bytes recomputed_flops seconds added_seconds".split()


def run_plan(args: argparse.Namespace) -> int:
    """Make the plan and print it. Raises ValueError where nothing fits, or the planner does not know the model."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    gpu = read_gpu(args.gpu) if args.gpu else find_gpu(device)
    command = take_command(args, add_plan_arguments)
    title = name_asked(args, command)
    reports = open_reports(args, f"{title} on {gpu.title}, {format_bytes(args.gpu_memory)}")
    given = copy.deepcopy(args)
    warnings: list[str] = []
    if command is None:
        request, samples_per_rank = read_request(args, gpu)
    else:
        (request, warnings), samples_per_rank = _read_request_of_command(args, command, gpu), None
    budget, trials = leave_margin(args), []
    numbers, is_terminal = itertools.count(1), sys.stderr.isatty()

    def note_estimate() -> None:
        if is_terminal:
            print(f"\rplan: {next(numbers)} estimates of a step", end="", file=sys.stderr, flush=True)

    try:
        if args.micro_batch_size == "auto":
            trials = try_micro_batches(request, budget, samples_per_rank, note_estimate)
            planner, plan = min(trials, key=lambda trial: trial[0].compute_sample_seconds(trial[1]))
        else:
            planner = Planner(request, note_estimate)
            plan = planner.plan(budget)
    except NothingFitsError as error:
        raise ValueError(f"{error}; {_name_remedies(given, command, request, error.least_bytes)}") from error
    finally:
        if is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    print_notes(command, warnings)
    table = format_planned(args, title, planner, plan)
    print(table)
    for each, found in trials:
        rate, size = args.dp / each.compute_sample_seconds(found), each.request.run.micro_batch_size
        print(f"b {size}: {rate:.1f} samples/s, peak {format_bytes(found.peak_bytes)}")
    print(f"\n{json.dumps({'tempo': plan.block})}")
    print(" ".join(plan.megatron_arguments) or "without --recompute-granularity")
    if command is not None:
        print(_write_planned_command(args, command, request.run, plan))
    if args.json:
        figures = {
            "tempo": plan.block,
            "megatron_arguments": plan.megatron_arguments,
            "micro_batch_size": planner.request.run.micro_batch_size,
            "gap_seconds": plan.gap_seconds,
            "stages": [
                {"layers": [stage.layers[0], stage.layers[-1]]} | {name: getattr(stage, name) for name in _FIGURES}
                for stage in plan.stages
            ],
            "moe_imbalance": assume_fullest(planner.request.run).moe_imbalance,
            "gpu": dataclasses.asdict(gpu),
            "arguments": vars(args),
        }
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for file, report in reports.items():
        report.add_text(table)
        add_plan(report, planner, plan, budget)
        report.save(file)
    return 0


def leave_margin(args: argparse.Namespace) -> int:
    """What a plan may take of --gpu-memory."""
    return int(args.gpu_memory * (1 - args.margin / 100))


def format_planned(args: argparse.Namespace, title: str, planner: Planner, plan: MemoryPlan) -> str:
    """What is planned, what it stands on, and the plan's table."""
    request, run, gpu = planner.request, planner.request.run, planner.request.gpu
    free = format_bytes(args.gpu_memory - leave_margin(args))
    lines = [
        f"{title}, {describe_run(run)}",
        f"of {format_bytes(args.gpu_memory)} a GPU {free} ({args.margin:g} %) stay free for what the estimate misses "
        "(--margin), and the peak is "
        + ("what torch's allocator reserves" if request.counts_reserved else "that of tensors (--allocator: reserved)"),
        f"{gpu.title}: {'measured' if gpu.calibrated else 'data-sheet (uncalibrated)'} rates",
    ]
    num_experts, num_ranks = run.model.num_experts, run.layout.tp * run.layout.dp
    if num_experts is not None and run.assumes_imbalance:
        imbalance = assume_fullest(run).moe_imbalance
        lines.append(f"assumed token imbalance: experts of the fullest rank get {imbalance:.2f} times an equal share")
    if num_experts is not None and run.layout.ep == 1 and num_ranks > 1:
        option = "--ep" if args.model or args.hf else "--expert-model-parallel-size"
        lines.append(
            f"the {num_experts} experts are not divided: each of {num_ranks} ranks has all of them; {option} "
            "divides them"
        )
    lines += ["", format_plan(planner, plan)]
    if request.host_bytes:
        link = gpu.host_link
        assert link is not None
        shared = f", {link.gpus_per_uplink} GPUs share it" if link.gpus_per_uplink > 1 else ""
        moved = ", ".join(format_bytes(stage.moved_bytes) for stage in plan.stages)
        lines.append(
            f"to the host, of each micro batch by stage: {moved}; at most {format_bytes(plan.host_bytes)} a GPU of "
            f"{format_bytes(request.host_bytes)} there, pinned ({link.title}, "
            f"{link.to_host_bytes_per_second / 1e9:g} GB/s out and {link.to_gpu_bytes_per_second / 1e9:g} back{shared})"
        )
    return "\n".join(lines)


def _name_remedies(args: argparse.Namespace, command: Command | None, request: PlanRequest, least_bytes: int) -> str:
    """What to give so that a plan fits, or is nearer to it: options that the command takes, each by itself.

    Of a command of Megatron-LM its options are named in place of ours.
    """
    run, names = request.run, OURS if command is None else MEGATRONS
    parts = ("tp", "pp", "ep") if run.model.num_experts else ("tp", "pp")
    # Fixed sizes are those of this layout.
    wanted = {} if request.fixed_sizes else {names[part]: 2 * getattr(run.layout, part) for part in parts}
    wanted["--micro-batch-size"] = 0 if args.micro_batch_size == "auto" else run.micro_batch_size // 2
    size = -(-int(least_bytes / (1 - args.margin / 100) + 1) // 2**20)
    found = [f"--gpu-memory {size}MiB"]
    if set(args.recompute_allowed) != RECOMPUTED:
        found.append(f"--recompute-allowed {' '.join(sorted(RECOMPUTED))}")
    of_command: list[str] = []
    for name, number in wanted.items():
        words = [name, str(number)]
        if name == names["tp"] and run.model.num_experts is not None and not run.layout.sp:
            # Megatron takes experts under tensor parallelism with it only.
            words.append("--sequence-parallel")
        if number and _is_taken(args, command, request.gpu, words):
            (found if command is None else of_command).append(" ".join(words))
    rest = f", or in the command {' or '.join(of_command)}" if of_command else ""
    return f"give {' or '.join(found)}{rest}"


def _is_taken(args: argparse.Namespace, command: Command | None, gpu: Gpu, words: Sequence[str]) -> bool:
    """Whether the plan command takes an option with another number, and perhaps a switch behind them."""
    changed, (name, number, *switches) = copy.deepcopy(args), words
    try:
        if command is None:
            for option, value in ((name, int(number)), *((switch, True) for switch in switches)):
                setattr(changed, option.removeprefix("--").replace("-", "_"), value)
            read_request(changed, gpu)
        else:
            options = (*drop_options(command.options, (name,)), *words)
            _read_request_of_command(changed, dataclasses.replace(command, options=options), gpu)
    except ValueError:
        return False
    return True


def read_request(args: argparse.Namespace, gpu: Gpu) -> tuple[PlanRequest, int | None]:
    """What the arguments ask, and the samples of a step on one data-parallel rank where they say so.

    Raises ValueError where the model does not lie on the GPUs so, or the batch does not divide.
    """
    if args.global_batch_size is not None and args.num_micro_batches is not None:
        raise ValueError("--global-batch-size and --num-micro-batches are both given; leave one of them out")
    config = take_deepspeed(args)
    samples = None if args.global_batch_size is None else args.global_batch_size // args.dp
    if samples is not None and args.micro_batch_size != "auto":
        args.num_micro_batches = samples // args.micro_batch_size
    run = set_imbalance(read_requested_run(args, TempoConfig(), config), args.moe_imbalance)
    _refuse_unknown(run, "the model has")
    return _make_request(args, run, gpu), samples


def _make_request(args: argparse.Namespace, run: Run, gpu: Gpu) -> PlanRequest:
    """The request for a run that has been checked; raises ValueError where options do not go together."""
    if args.allocator and (args.host_memory is not None or args.fixed_memory):
        other = "--fixed-memory" if args.fixed_memory else "--host-memory"
        raise ValueError(f"--allocator does not go with {other}, whose blocks it cannot follow; leave one of them out")
    if args.gpus_per_node is not None and args.host_memory is None:
        raise ValueError(
            f"--gpus-per-node {args.gpus_per_node} is given without --host-memory, which they share; give that too"
        )
    return PlanRequest(
        run=run,
        gpu=gpu,
        recompute=frozenset(args.recompute_allowed),
        fixed_sizes=tuple(args.fixed_memory or ()),
        host_bytes=(args.host_memory or 0) // (args.gpus_per_node or min(8, run.layout.world_size)),
        counts_reserved=args.allocator,
    )


def _refuse_unknown(run: Run, who: str) -> None:
    """Raise ValueError for what the planner does not know, and `who` gives."""
    fields = (each for each in dataclasses.fields(run) if each.name not in _KNOWN)
    given = {each.name: value for each in fields if (value := getattr(run, each.name)) != each.default}
    given |= {"Muon, states": run.optimizer.muon} if run.optimizer.muon else {}
    given |= {"Megatron-FSDP": run.optimizer.fsdp} if run.optimizer.fsdp else {}
    given |= {"chunks of several layers": run.layout.chunks} if run.layout.chunks else {}
    for name, value in given.items():
        value = "" if dataclasses.is_dataclass(value) else f" {value}"
        raise ValueError(
            f"{who} {name.replace('_', ' ')}{value}, which the planner does not know; ask tempo-megatron estimate"
        )


def _read_request_of_command(args: argparse.Namespace, command: Command, gpu: Gpu) -> tuple[PlanRequest, list[str]]:
    """What a command of Megatron-LM asks, whatever it says of recomputation, and warnings."""
    run, _, warnings = read_run_of_command(args, command)
    run = set_imbalance(run, args.moe_imbalance)
    _refuse_unknown(run, "the command gives")
    if run.tempo.is_off:
        raise ValueError("--no-use-tempo is given, and the plan is what Tempo does; leave it out")
    return _make_request(args, dataclasses.replace(run, recompute=(), recompute_num_layers=None), gpu), warnings


def _write_planned_command(args: argparse.Namespace, command: Command, run: Run, plan: MemoryPlan) -> str:
    """The command with the plan in place of what it said of Tempo and of recomputation."""
    # --moe-imbalance stands in no command: its experts are as it says.
    run = dataclasses.replace(run, moe_imbalance=read_run_of_command(args, command)[0].moe_imbalance)
    recomputation = read_recomputation(parse_options(plan.megatron_arguments)[0], model=run.model)
    planned = dataclasses.replace(run, tempo=plan.tempo, **recomputation)
    words = ["--use-tempo"]
    for name, value in plan.block.items():
        if name != "layers":
            words += [OPERATIONS[name].argument if name in OPERATIONS else f"--tempo-{name}", str(value)]
    if "layers" in plan.block:
        words += ["--tempo-layers", json.dumps(plan.block["layers"])]
    options = [*drop_options(command.options, _PLANNED), *plan.megatron_arguments, *words]
    return write_command(command, options, planned, args.vocab_size)


def format_plan(planner: Planner, plan: MemoryPlan) -> str:
    """A line per stage, then what its layers have."""
    lines = [
        f"{'stage':>5}{'layers':>10}{'in flight':>11}{'peak':>12}{'kept/micro batch':>18}"
        f"{'recomputed':>14}{'added ms':>11}{'ms':>10}"
    ]
    lines.append("-" * len(lines[0]))
    for index, stage in enumerate(plan.stages):
        flops = f"{stage.recomputed_flops / 1e12:.3f} TFLOP"
        lines.append(
            f"{index:>5}{f'{stage.layers[0]}-{stage.layers[-1]}':>10}{stage.in_flight:>11}"
            f"{format_bytes(stage.peak_bytes):>12}{format_bytes(stage.kept_bytes):>18}{flops:>14}"
            f"{stage.added_seconds * 1e3:>11.3f}{stage.seconds * 1e3:>10.3f}"
        )
    added = max(stage.added_seconds for stage in plan.stages)
    number, step = planner.num_micro_batches, planner.compute_step_seconds(plan)
    lines.append(
        f"ms of one micro batch, forward and backward; the slowest stage has {plan.seconds * 1e3:.3f} "
        f"({added * 1e3:.3f} at most added), a step of {number} {step * 1e3:.3f}"
    )
    lines.append(f"at most {plan.gap_seconds * 1e3:.3f} ms from the best plan of any kinds of layers, by these figures")
    lines.append(plan.tempo.describe())
    return "\n".join(lines)
