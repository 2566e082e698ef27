"""Measures for many models how much memory the order of operations saves: benchmarks/results/estimate/roam.jsonl.

Each model takes one training step on fake tensors: nothing is downloaded, and no weight has a value. Models that fit
into this machine's memory can also run. It needs torchvision and transformers.

    python benchmarks/roam_models.py CASE...          # a line for each is appended; all without names
    python benchmarks/roam_models.py --run CASE...    # real steps on a CPU
    python benchmarks/roam_tables.py                  # writes the tables of docs/order.md
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from allocated import measure_allocated
from inductor_orders import count_inductor_peak
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F

from tempo_megatron.memory.commands.arguments import add_order_arguments
from tempo_megatron.memory.commands.requested_run import read_requested_shape
from tempo_megatron.memory.rank.allocator import CachingAllocator
from tempo_megatron.roam.arena import ArenaStep
from tempo_megatron.roam.capture import CapturedStep, capture_step
from tempo_megatron.roam.command import capture_megatron_step
from tempo_megatron.roam.execute import OrderedStep
from tempo_megatron.roam.graph import StepGraph
from tempo_megatron.roam.order import find_order, list_by_memory
from tempo_megatron.roam.placement import Rectangle, find_arena, list_rectangles
from tempo_megatron.settings.arguments import tempo_config_from

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "benchmarks/results/cpu/roam_runs.jsonl"
RESULTS = ROOT / "benchmarks/results/estimate/roam.jsonl"
_ALIGNMENT = 64

Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]


# A torchvision built for another torch has no operators. Its models need none, but its import needs this one.
_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    for operator in ("nms", "qnms"):
        _TORCHVISION.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def make_vision(name: str, batch: int) -> Made:
    import torchvision

    with unset_fake_temporarily():  # the initialisation of ViT reads numbers
        model = getattr(torchvision.models, name)(weights=None)
    images, labels = torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.int64)
    return model, lambda model, x, y: F.cross_entropy(model(x), y), (images, labels)


def make_text(name: str, batch: int, length: int) -> Made:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if name == "bert":
        model = BertForMaskedLM(BertConfig(attn_implementation="eager"))
    else:
        config = GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False, attn_implementation="eager")
        model = GPT2LMHeadModel(config)
    tokens = torch.zeros(batch, length, dtype=torch.int64)

    def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return model, compute_loss, (tokens,)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_VISION = "alexnet vgg11 resnet50 mnasnet0_5 mobilenet_v2 efficientnet_b0 vit_b_16".split()
_MODELS: dict[str, Callable[[], Made]] = {
    **{f"{name} {batch}": functools.partial(make_vision, name, batch) for name in _VISION for batch in (1, 32)},
    "bert 1": lambda: make_text("bert", 1, 128),
    "bert 32": lambda: make_text("bert", 32, 128),
    "gpt2-xl 1 x 128": lambda: make_text("gpt2-xl", 1, 128),
    "gpt2-xl 1": lambda: make_text("gpt2-xl", 1, 1024),
    "gpt2-xl 4": lambda: make_text("gpt2-xl", 4, 1024),
}
# Megatron-core's GPT of 12 layers and h 768, with 1024 tokens.
_GPT = {f"gpt2-124m {kind} {batch}": (kind, batch) for kind in ("stock", "tempo") for batch in (1, 32)}
CASES = [f"{model} {dtype}" for dtype in DTYPES for model in (*_MODELS, *_GPT)]


def capture(case: str) -> CapturedStep:
    """Captures the step of a case with Adam, on fake tensors."""
    name, _, dtype = case.rpartition(" ")
    if name in _GPT:
        kind, batch = _GPT[name]
        parser = argparse.ArgumentParser()
        add_order_arguments(parser)
        model = str(ROOT / "configs/model/gpt2_124m.json")
        given = ["--model", model, "--dtype", dtype, "--micro-batch-size", str(batch)]
        args = parser.parse_args([*given, "--use-tempo"] if kind == "tempo" else given)
        return capture_megatron_step(read_requested_shape(args), tempo_config_from(args, {}), args)
    with FakeTensorMode(allow_non_fake_inputs=True), use_dtype(dtype):
        model, compute_loss, batch = _MODELS[name]()
        optimizer = torch.optim.Adam(model.train().parameters(), weight_decay=1e-4)
        return capture_step(model, compute_loss, batch, optimizer)


@contextlib.contextmanager
def use_dtype(name: str) -> Iterator[None]:
    """Makes this the default dtype inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[name])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def simulate_reserved(graph: StepGraph, order: Sequence[int]) -> int:
    """Simulates what torch's CUDA allocator reserves on the device in two steps, fragmentation included."""
    allocator = CachingAllocator()
    for storage in sorted(graph.standing):
        allocator.allocate(graph.sizes[storage])
    begins, ends = collections.defaultdict[int, list[int]](list), collections.defaultdict[int, list[int]](list)
    for made, rectangle in zip(*list_rectangles(graph, order), strict=True):
        if made in graph.makers:
            begins[rectangle.first].append(made)
            ends[rectangle.last].append(made)
    for _ in range(2):
        blocks = {}
        for step, place in enumerate(order):
            blocks |= {storage: allocator.allocate(graph.sizes[storage]) for storage in begins[step]}
            allocator.free(allocator.allocate(graph.operations[place].scratch_bytes))
            for storage in ends[step]:
                allocator.free(blocks.pop(storage))
    return allocator.reserved


def place_longest_first(rectangles: Sequence[Rectangle]) -> int:
    """The height of "long-lived first, best fit" (LLFB), with which the paper compares: each in the narrowest gap."""
    placed: list[tuple[int, int, Rectangle]] = []
    for each in sorted(rectangles, key=lambda r: (r.first - r.last, -r.size)):
        beside = [other for other in placed if other[2].first <= each.last and each.first <= other[2].last]
        gaps, below = [], 0
        for low, high, _ in sorted(beside, key=lambda other: other[:2]):
            gaps.append((low - below, below))
            below = max(below, high)
        _, offset = min((gap for gap in gaps if gap[0] >= each.size), default=(0, below))
        if each.size:
            placed.append((offset, offset + each.size, each))
    return max((high for _, high, _ in placed), default=0)


def measure(case: str) -> dict[str, Any]:
    """Measures one line of the results. Its seconds are processor time, because others may use the machine."""
    start = time.process_time()
    captured = capture(case)
    captured_at = time.process_time()
    plan = find_order(captured.graph)
    ordered_at = time.process_time()
    order, arena = find_arena(captured.graph, plan.order, alignment=_ALIGNMENT)
    placed_at = time.process_time()
    listed = list_by_memory(captured.graph)
    heuristic_arena = place_longest_first(list_rectangles(captured.graph, listed)[1])
    given = range(len(plan.order))
    return {
        "model": case,
        "operations": len(plan.order),
        "standing_bytes": captured.graph.standing_bytes,
        "eager_bytes": max(captured.count_eager_bytes()),
        "eager_reserved_bytes": simulate_reserved(captured.make_eager_graph(), given),
        "inductor_bytes": count_inductor_peak(captured.graph),
        "lescea_bytes": captured.graph.count_peak(listed),
        "lescea_llfb_bytes": captured.graph.standing_bytes + heuristic_arena,
        "plan_bytes": plan.peak_bytes,
        "plan_reserved_bytes": simulate_reserved(captured.graph, order),
        "lower_bound": plan.lower_bound,
        "plan_arena_bytes": captured.graph.standing_bytes + arena.height,
        "arena_lower_bound": captured.graph.standing_bytes + arena.lower_bound,
        "capture_s": round(captured_at - start, 2),
        "order_s": round(ordered_at - captured_at, 2),
        "layout_s": round(placed_at - ordered_at, 2),
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }


_KINDS = ("eager", "ordered", "arena")


def run(case: str) -> dict[str, Any]:
    """Measures what real steps allocate on this machine's CPU: in eager mode, in the found order, and in an arena."""
    name, _, dtype = case.rpartition(" ")
    torch.manual_seed(0)
    with use_dtype(dtype):
        made, compute_loss, batch = _MODELS[name]()
    # Give the weights defined values, instead of uninitialized memory.
    batch = tuple(torch.randn_like(t) if t.is_floating_point() else t for t in batch)
    models = {kind: copy.deepcopy(made).train() for kind in _KINDS}
    optimizers = {kind: torch.optim.Adam(m.parameters(), weight_decay=1e-4) for kind, m in models.items()}

    def step_eagerly(*batch: Tensor) -> Tensor:
        optimizers["eager"].zero_grad()
        loss = compute_loss(models["eager"], *batch)
        loss.backward()
        optimizers["eager"].step()
        return loss.detach()

    captured = {
        kind: capture_step(models[kind], compute_loss, batch, optimizers[kind]) for kind in ("ordered", "arena")
    }
    plan = find_order(captured["ordered"].graph)
    in_arena = ArenaStep(captured["arena"], models["arena"], plan.order)
    ordered = OrderedStep(captured["ordered"], models["ordered"], plan.order)
    steps: dict[str, Callable[..., Tensor]] = {"eager": step_eagerly, "ordered": ordered, "arena": in_arena}
    losses, seconds = collections.defaultdict[str, list[Tensor]](list), collections.defaultdict[str, list[float]](list)
    for number in range(4):
        for kind, step in steps.items():
            torch.manual_seed(number)
            start = time.perf_counter()
            losses[kind].append(step(*batch))
            seconds[kind].append(time.perf_counter() - start)
    peaks = {}
    for kind, step in steps.items():
        optimizers[kind].zero_grad()
        torch.manual_seed(4)
        loss, peaks[kind] = measure_allocated(functools.partial(step, *batch))
        losses[kind].append(loss)
    standing = captured["ordered"].graph.standing_bytes
    return {
        "model": case,
        "is_bit_identical": all(
            torch.equal(torch.stack(losses["eager"]), torch.stack(losses[kind])) for kind in ("ordered", "arena")
        ),
        "standing_bytes": standing,
        "planned_bytes": plan.peak_bytes - standing,
        "measured_bytes": peaks["ordered"],
        "eager_bytes": max(captured["ordered"].count_eager_bytes()) - standing,
        "measured_eager_bytes": peaks["eager"],
        "arena_bytes": in_arena.arena_bytes,
        "measured_arena_bytes": in_arena.arena_bytes + peaks["arena"],
        # The first step makes the optimizer's states.
        **{f"{kind}_s": round(min(found[1:]), 3) for kind, found in seconds.items()},
        "torch": torch.__version__,
    }


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    names = "cases:\n  " + "\n  ".join(CASES)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=names, formatter_class=formatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help='one of those below, in quotes: "alexnet 1 fp32"')
    parser.add_argument("--run", action="store_true", help="run real steps, and measure")
    args = parser.parse_args()
    for name in args.cases:
        if name not in CASES:
            parser.error(f'"{name}" is no case; expected one of those that --help lists, in quotes')
    sys.setrecursionlimit(100_000)  # Inductor's depth-first schedule goes as deep as the graph
    for name in args.cases or CASES:
        line = json.dumps(run(name) if args.run else measure(name))
        print(line, flush=True)
        with (RUNS if args.run else RESULTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
