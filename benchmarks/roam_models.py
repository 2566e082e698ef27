"""How much memory the order of operations saves, model by model: benchmarks/results/roam.jsonl and docs/order.md.

Each model takes one training step on fake tensors: nothing is downloaded, and no weight has a value. What it needs is
planned; the small ones can be run too (tests/test_roam_execute.py does). Needs torchvision and transformers.

    python benchmarks/roam_models.py MODEL...     # all without names; a line for each is appended
    python benchmarks/roam_models.py --run MODEL...   # real steps of vision models on a CPU
    python benchmarks/roam_models.py --table      # writes the table of docs/order.md
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional as F

from tempo_megatron.memory.roam.capture import capture_step
from tempo_megatron.memory.roam.execute import OrderedStep
from tempo_megatron.memory.roam.layout import find_layout, list_rectangles, place_longest_first
from tempo_megatron.memory.roam.measure import measure_allocated
from tempo_megatron.memory.roam.order import find_order
from tempo_megatron.memory.roam.problem import make_problem
from tempo_megatron.memory.roam.shift import list_by_memory

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "benchmarks/results/roam_runs.jsonl"
RESULTS = ROOT / "benchmarks/results/roam.jsonl"
DOCS = ROOT / "docs/order.md"
BEGIN, END = "<!-- roam table begins -->", "<!-- roam table ends -->"
_ALIGNMENT = 64

Made = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]


# A torchvision built for another torch has no operators. Its definitions of models need none; its import wants one.
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


_VISION = "alexnet vgg11 resnet50 mnasnet0_5 mobilenet_v2 efficientnet_b0 vit_b_16".split()
CASES: dict[str, Callable[[], Made]] = {
    **{f"{name} {batch}": lambda n=name, b=batch: make_vision(n, b) for name in _VISION for batch in (1, 32)},
    "bert 1": lambda: make_text("bert", 1, 128),
    "bert 32": lambda: make_text("bert", 32, 128),
    "gpt2-xl 1 x 128": lambda: make_text("gpt2-xl", 1, 128),
    "gpt2-xl 1": lambda: make_text("gpt2-xl", 1, 1024),
    "gpt2-xl 4": lambda: make_text("gpt2-xl", 4, 1024),
}


def measure(name: str) -> dict[str, Any]:
    """One line of the results."""
    start = time.perf_counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, compute_loss, batch = CASES[name]()
        model.train()
        captured = capture_step(model, compute_loss, batch, torch.optim.Adam(model.parameters(), weight_decay=1e-4))
    captured_at = time.perf_counter()
    plan = find_order(captured.graph)
    ordered_at = time.perf_counter()
    rectangles = list_rectangles(captured.graph, plan.order)[1]
    layout = find_layout(rectangles, alignment=_ALIGNMENT)
    placed_at = time.perf_counter()
    eager = max(captured.count_eager_bytes())
    listed = list_by_memory(make_problem(captured.graph))
    heuristic_peak = make_problem(captured.graph).count_peak(listed)
    heuristic_arena = place_longest_first(list_rectangles(captured.graph, listed)[1])
    return {
        "model": name,
        "operations": len(plan.order),
        "standing_bytes": captured.standing_bytes,
        "eager_bytes": eager,
        "lescea_bytes": heuristic_peak,
        "lescea_llfb_bytes": captured.standing_bytes + heuristic_arena,
        "plan_bytes": plan.peak_bytes,
        "lower_bound": plan.lower_bound,
        "plan_arena_bytes": captured.standing_bytes + layout.height,
        "capture_s": round(captured_at - start, 2),
        "order_s": round(ordered_at - captured_at, 2),
        "layout_s": round(placed_at - ordered_at, 2),
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
    }


def run(name: str) -> dict[str, Any]:
    """What a real step of a vision model allocates on this machine's CPU, in eager mode and in the planned order."""
    torch.manual_seed(0)
    model, compute_loss, batch = CASES[name]()
    state = copy.deepcopy(model.train())
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=1e-4)
    eager_optimizer = torch.optim.Adam(state.parameters(), weight_decay=1e-4)
    captured = capture_step(model, compute_loss, batch, optimizer)
    plan = find_order(captured.graph)
    ordered = OrderedStep(captured, model, plan.order)

    def step_eagerly() -> Tensor:
        eager_optimizer.zero_grad()
        loss = compute_loss(state, *batch)
        loss.backward()
        eager_optimizer.step()
        return loss.detach()

    losses, peaks, seconds = list[Tensor](), dict[str, int](), dict[str, float]()
    for kind, step in (("eager", step_eagerly), ("ordered", lambda: ordered(*batch))):
        for _ in range(2):
            torch.manual_seed(1)
            start = time.perf_counter()
            loss = step()
            seconds[kind] = time.perf_counter() - start
        torch.manual_seed(2)
        if kind == "eager":
            eager_optimizer.zero_grad()
        last, peaks[kind] = measure_allocated(step)
        losses += [loss, last]
    return {
        "model": name,
        "is_bit_identical": torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[3]),
        "planned_bytes": plan.peak_bytes - captured.standing_bytes,
        "measured_bytes": peaks["ordered"],
        "eager_bytes": max(captured.count_eager_bytes()) - captured.standing_bytes,
        "measured_eager_bytes": peaks["eager"],
        **{f"{kind}_s": round(value, 3) for kind, value in seconds.items()},
        "torch": torch.__version__,
    }


def write_table() -> None:
    """Put a row for the last line of each model into docs/order.md."""
    lines = {line["model"]: line for line in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())}
    rows = [
        "| model, batch | operations | eager | LESCEA | LESCEA + LLFB | this plan | its arena | lower bound | less "
        "than eager | less than LESCEA + LLFB | order s | layout s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, line in lines.items():
        sizes = ("eager_bytes", "lescea_bytes", "lescea_llfb_bytes", "plan_bytes", "plan_arena_bytes", "lower_bound")
        gains = (100 - 100 * line["plan_arena_bytes"] / line[base] for base in ("eager_bytes", "lescea_llfb_bytes"))
        cells = [
            name,
            str(line["operations"]),
            *(f"{line[size] / 2**20:.1f}" for size in sizes),
            *(f"{gain:.1f} %" for gain in gains),
            f"{line['order_s']}",
            f"{line['layout_s']}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    runs = {line["model"]: line for line in map(json.loads, RUNS.read_text(encoding="utf-8").splitlines())}
    rows += [
        "",
        "| run on a CPU | planned | measured | eager, counted | eager, measured | same bits |",
        "|---|---|---|---|---|---|",
    ]
    for name, line in runs.items():
        sizes = ("planned_bytes", "measured_bytes", "eager_bytes", "measured_eager_bytes")
        cells = [name, *(f"{line[size] / 2**20:.1f}" for size in sizes), "yes" if line["is_bit_identical"] else "no"]
        rows.append(f"| {' | '.join(cells)} |")
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(before + BEGIN + "\n" + "\n".join(rows) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--run", action="store_true", help="run real steps of vision models, and measure")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        write_table()
        return
    for name in args.models or CASES:
        line = json.dumps(run(name) if args.run else measure(name))
        print(line, flush=True)
        with (RUNS if args.run else RESULTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
