"""What machine code says of every kernel's speed, without a GPU: instructions per element, occupancy, share of a copy.

python benchmarks/static_roofline.py                          # sm_90; about a minute
python benchmarks/static_roofline.py --capability 80 90 100   # all that are compiled ahead of time
python benchmarks/static_roofline.py --triton 3.6.0           # with another Triton, installed beside this one
python benchmarks/static_roofline.py --page                   # compiles nothing: docs/performance.md from the records
python benchmarks/static_roofline.py --flash-attention LIBRARY  # FlashAttention-2 in torch's libtorch_cuda.so; a minute

Every kernel is compiled with the arguments that its launcher gives it, for 8192 tokens of bfloat16 and h 4096 (MLP
16384, gated 11008, vocabulary 50304), and disassembled. The tables show instructions per element of the main loop (or
of the program, where it has no loop), programs per multiprocessor, and what the model of roofline/model.py makes of
them: the share of the time that a copy of the same bytes takes; where that is below GOAL, what stands in the way.
Attention is in cycles of a multiprocessor for 8192 scores: those that issue instructions and those of the tensor cores.
docs/performance.md has the same with error bars, attention's speed and rivals.

--triton installs that version with pip into a folder (--folder) and runs this script with it; everything else stays.
Tests run with it too: PYTHONPATH=FOLDER python -m pytest tests/kernels/test_kernels_compiled.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from measurements import RESULTS, ROOT, append_records, find_commit, find_version, read_records

PAGE = ROOT / "docs" / "performance.md"
FLASH_ATTENTION = RESULTS / "estimate" / "flash_attention_2.jsonl"
GOAL = 0.92
"""The share of a copy's bandwidth that a pass is to reach."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[90], choices=(80, 90, 100), help="default 90")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="passes whose name has one of these words")
    parser.add_argument("--triton", metavar="VERSION", help="install this version and use it")
    parser.add_argument("--folder", type=Path, help="where --triton installs (default: a temporary one)")
    parser.add_argument("--limits", action="store_true", help="write tests/kernels/kernel_resources.json's limits anew")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "estimate" / "static_roofline.jsonl", help="JSON-lines file"
    )
    parser.add_argument("--page", action="store_true", help="write docs/performance.md from what was recorded")
    parser.add_argument(
        "--flash-attention",
        type=Path,
        metavar="LIBRARY",
        help="count FlashAttention-2's kernels in libtorch_cuda.so anew",
    )
    args = parser.parse_args()
    if args.flash_attention:
        from roofline import flash_attention

        lines = [json.dumps(one) for one in flash_attention.count(args.flash_attention)]
        FLASH_ATTENTION.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))
        return 0
    if args.page:
        from gpu import report

        PAGE.write_text(report.keep_measured(draw_page(args.output), PAGE), encoding="utf-8")
        return 0
    if args.triton and args.triton != find_version("triton"):
        return run_with(args.triton, args.folder or Path(tempfile.gettempdir()) / f"triton-{args.triton}")
    for capability in args.capability:
        records = []
        for one in measure(capability, args.only):
            append_records(args.output, [one])
            records.append(one)
        if not records:
            parser.error(f"--only {' '.join(args.only)}: no pass has one of these words in its name, as gelu, d 64")
        if args.limits and capability == 90:
            write_limits(records)
        print(f"sm_{capability}, triton {find_version('triton')}")
        print(draw_table([one for one in records if one["kind"] == "pass"], PASS_COLUMNS))
        print(draw_table([one for one in records if one["kind"] == "attention"], ATTENTION_COLUMNS))
    return 0


def draw_page(results: Path = RESULTS / "estimate" / "static_roofline.jsonl") -> str:
    """docs/performance.md from the last records of each Triton for sm_90."""
    from roofline import page

    of_triton: dict[str, dict[str, Any]] = {}
    for one in read_records(results):
        if one["capability"] == 90 and "around" in one:
            of_triton.setdefault(one["triton"], {})[one["name"]] = one
    peaks = read_records(RESULTS / "cpu" / "loss_head_peaks.jsonl")
    return page.draw(of_triton, peaks, read_records(FLASH_ATTENTION))


def write_limits(records: Sequence[Mapping[str, Any]]) -> None:
    """What tests/benchmarks/test_static_roofline.py holds the installed Triton's code against."""
    path = ROOT / "tests" / "kernels" / "kernel_resources.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    kept = ("per_element", "issue_cycles", "programs_per_sm", "serialised")
    found = {one["name"]: {name: one[name] for name in kept if name in one} for one in records}
    for one in records:
        if one["kind"] == "attention":  # see tests/kernels/attention/test_attention_compiled.py
            found[one["name"]]["spilled_bytes"] = one["spilled_bytes"]
    limits = table["roofline"].setdefault(str(find_version("triton")), {})
    limits |= found
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def run_with(version: str, folder: Path) -> int:
    """This command again, with a Triton from a folder of its own ahead of the installed one."""
    if not (folder / f"triton-{version}.dist-info").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    path = os.pathsep.join([str(folder), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


def measure(capability: int, words: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """A record of every pass, compiled by the installed Triton."""
    from roofline import cases

    environment = {
        "capability": capability,
        "triton": find_version("triton"),
        "torch": find_version("torch"),
        "commit": find_commit(ROOT),
    }

    def is_asked(name: str) -> bool:
        return not words or any(word in name for word in words)

    for one in cases.find_passes():
        if is_asked(one.name):
            yield {"kind": "pass", "name": one.name, **measure_pass(one, capability), **environment}
    for head_dim in (64, 128):
        for p in (0.1, 0.0):
            for found in cases.find_attention_passes(capability, head_dim, p):
                if is_asked(found.name):
                    fields = measure_attention(found, capability)
                    yield {"kind": "attention", "name": found.name, **fields, **environment}


def measure_code(launch: Any, capability: int) -> tuple[dict[str, Any], Any]:
    """What is read in the machine code of one launch; and its main loop."""
    from roofline import launches, machine_code, model

    kernel = launches.compiled(launch, capability)
    usage = launches.resources(kernel.asm["cubin"])
    body = machine_code.find_body(machine_code.parse(launches.read_cubin(kernel.asm["cubin"], "-sass")))
    occupancy = model.find_occupancy(usage["REG"], launch.num_warps, kernel.metadata.shared, capability)
    cycles, busiest = model.find_cycles(body, capability)
    return {
        "kernel": f"{launch.kernel.fn.__module__}.{launch.kernel.__name__}",
        "registers": usage["REG"],
        "spilled_bytes": usage["STACK"] + usage["LOCAL"],
        "spills_in_loop": sum(one.name.startswith(("LDL", "STL")) for one in body.instructions),
        "shared_bytes": kernel.metadata.shared,
        "warps": launch.num_warps,
        "programs": launch.num_programs,
        "programs_per_sm": occupancy.programs,
        "occupancy_limit": occupancy.limit,
        "register_file": round(occupancy.register_share, 3),
        "narrow_accesses": len(launches.narrow_accesses(kernel.asm["ptx"])),
        "serialised": launches.count_serialised_products(kernel.asm["ptx"]) if "wgmma" in kernel.asm["ptx"] else 0,
        "in_loop": body.is_loop,
        "instructions": dict(body.by_pipe),
        "issued": body.issued,
        "shadow": round(body.find_shadow(model.ARCHITECTURES[capability].product_flops / model.SCHEDULERS)),
        "others": body.others,
        "around": body.around,
        "barriers": body.barriers,
        "waits": body.waits,
        "cycles": cycles,
        "busiest": busiest,
    }, body


def measure_pass(one: Any, capability: int) -> dict[str, Any]:
    from roofline import model

    fields, body = measure_code(one.launch, capability)
    elements = model.find_elements(one.launch, body, one.num_elements, one.stored_bytes)
    assert elements > 0, f"{one.name}: its main loop was not found"
    in_program = one.num_elements / (fields["programs"] * fields["warps"] * model.WARP)
    fields |= {
        "trips": max(1.0, in_program / elements),
        "num_bytes": one.num_bytes,
        "tail_launches": one.tail_launches,
        "tail_bytes": one.tail_bytes,
        "last_bytes": one.last_bytes,
        "per_element": round(fields["issued"] / elements, 2),
        "cycles_per_element": round(fields["cycles"] / elements, 2),
        "by_pipe": {pipe: round(number / elements, 1) for pipe, number in fields["instructions"].items()},
    }
    devices = {name: device for name, device in model.DEVICES.items() if device.capability == capability}
    return {
        **fields,
        "share_of_copy": {name: round(model.find_share_of_copy(fields, device), 3) for name, device in devices.items()},
        "obstacle": find_obstacle(fields, max(devices.values(), key=lambda device: device.copy_bytes_per_s)),
    }


def find_obstacle(one: Mapping[str, Any], device: Any) -> str:
    """What keeps a pass below GOAL on the fastest GPU: what is behind it, waiting, or the instructions it issues."""
    from roofline import model

    if model.find_share_of_copy(one, device) >= GOAL:
        return ""
    time = model.find_time(one, device, model.CENTRAL)
    copy_s = one["num_bytes"] / device.copy_bytes_per_s
    if time.tail > time.total - time.tail - copy_s:
        return f"{one['tail_launches']} launches behind it" if one["tail_launches"] else "its last program"
    if time.memory - copy_s > time.total - time.tail - time.memory:
        return f"its last round of {one['programs']} programs"
    if time.latency > time.issue:
        return f"waiting: {one['trips']:.0f} ways through the loop, {one['barriers']} barriers each"
    pipes = sorted(one["by_pipe"].items(), key=lambda pipe: -pipe[1])[:3]
    return f"{one['busiest']}: " + " + ".join(f"{number} {pipe}" for pipe, number in pipes)


def measure_attention(one: Any, capability: int) -> dict[str, Any]:
    """Cycles of a multiprocessor for SCORES scores; a scheduler has a quarter of a program's warps."""
    from roofline import model
    from roofline.walks import PRODUCTS, SCORES

    fields, _ = measure_code(one.launch, capability)
    tiles = SCORES / (one.tile[0] * one.tile[1])
    per_cycle = tiles * one.launch.num_warps / model.SCHEDULERS
    flops = 2 * SCORES * one.head_dim * PRODUCTS[one.walk]
    return {
        **fields,
        "walk": one.walk,
        "head_dim": one.head_dim,
        "p": one.p,
        "splits": one.launch.arguments.get("KEY_SPLITS", 1),
        "heads_in_turn": one.launch.arguments.get("heads_in_turn", 1),
        "tile": list(one.tile),
        "issue_cycles": round(fields["issued"] * per_cycle),
        "pipe_cycles": round(fields["cycles"] * per_cycle),
        "tensor_cycles": round(flops / model.ARCHITECTURES[capability].product_flops),
    }


PASS_COLUMNS = {
    "pass": lambda one: one["name"],
    "instr/element": lambda one: f"{one['per_element']:.1f}",
    "busiest": lambda one: f"{one['busiest']} {one['cycles_per_element']:.1f}",
    "registers": lambda one: f"{one['registers']} x {32 * one['warps']} x {one['programs_per_sm']}",
    "of file": lambda one: f"{one['register_file']:.0%}",
    "limit": lambda one: one["occupancy_limit"],
    "narrow": lambda one: str(one["narrow_accesses"]),
    "% of copy": lambda one: "  ".join(f"{name} {100 * share:.0f}" for name, share in one["share_of_copy"].items()),
    "launches": lambda one: f"+{one['tail_launches']}",
    "in the way": lambda one: one["obstacle"],
    "last reads": lambda one: f"{one['last_bytes'] / 1024:.0f} KiB" if one["last_bytes"] else "",
}
ATTENTION_COLUMNS = {
    "pass": lambda one: one["name"],
    "issue + tensor": lambda one: f"{one['issue_cycles']} + {one['tensor_cycles']}",
    "busiest": lambda one: f"{one['busiest']} {one['pipe_cycles']}",
    "registers": lambda one: f"{one['registers']} x {32 * one['warps']} x {one['programs_per_sm']}",
    "of file": lambda one: f"{one['register_file']:.0%}",
    "limit": lambda one: one["occupancy_limit"],
    "products": lambda one: "serialised" if one["serialised"] else "overlap",
}


def draw_table(records: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]) -> str:
    """A line for each record, in Markdown."""
    rows = [list(columns), ["---"] * len(columns)]
    rows += [[cell(record) for cell in columns.values()] for record in records]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n" if records else ""


if __name__ == "__main__":
    sys.exit(main())
