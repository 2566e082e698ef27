"""Plans with offload and of experts: writes the tables of docs/plan.md.

All figures are estimates, on rates of data sheets; none is measured.

python benchmarks/offload_tables.py                     # all
python benchmarks/offload_tables.py "expert plans"      # one
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurements import ROOT

from tempo_megatron.cli import main as run_command
from tempo_megatron.memory.commands.arguments import add_plan_arguments
from tempo_megatron.memory.commands.plan import read_request
from tempo_megatron.memory.plan.flops import count_layer_flops
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner, PlanRequest
from tempo_megatron.settings.config import TempoConfig

MODELS = ("gpt3_22b", "llama3_8b")
GIB = 2**30
NUM_BUDGETS = 6

# GiB, what the command of docs/plan.md allows beside, and what is written at its end.
OF_EXPERTS = (
    (57, "", ""),
    (54, "", ""),
    (52, "", ""),
    (48, "", "--moe-token-dispatcher-type alltoall --tempo-moe-permute repeat"),
    (43, "full", ""),
)


def read(model: str, *words: str) -> PlanRequest:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    path = ROOT / "configs" / "model" / f"{model}.json"
    options = f"--model={path} --seq-length=8192 --tp=8 --sequence-parallel --gpu-memory=80GB".split()
    return read_request(parser.parse_args([*options, *words]), read_gpu("h100"))[0]


def write_plans() -> Iterator[str]:
    """A row for each budget between the least that fits without the host and what keeps everything."""
    yield "| | budget, GiB | keep or recompute, ms | again, % | or the host, ms | again, % | sent, GiB |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for model in MODELS:
        alone = Planner(read(model))
        planner = Planner(dataclasses.replace(alone.request, host_bytes=128 * GIB))
        flops = count_layer_flops(alone.request.run).total * alone.request.run.model.num_layers
        least, most = alone.make_smallest().peak_bytes, alone.plan(10**15).peak_bytes
        for size in (least + (most - least) * part // (NUM_BUDGETS - 1) for part in range(NUM_BUDGETS)):
            without, plan = alone.plan(size), planner.plan(size)
            yield (
                f"| {model} | {size / GIB:.2f} | {without.seconds * 1e3:.1f} | {_share(without, flops)} | "
                f"{plan.seconds * 1e3:.1f} | {_share(plan, flops)} | {plan.stages[0].moved_bytes / GIB:.2f} |"
            )


def write_expert_plans() -> Iterator[str]:
    """The plans of the command with experts that docs/plan.md shows, for several budgets."""
    yield "| memory | written or allowed beside | peak, GiB | the plan | longer by |"
    yield "| --- | --- | ---: | --- | ---: |"
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = (line for line in page.splitlines() if "--num-experts" in line and line.startswith("tempo-megatron plan"))
    _, options = line.split(" -- ")
    everywhere = "--tempo-attention flash --tempo-norm recompute"
    estimated = _run(f"estimate --gpu h100 -- {options} {everywhere}")
    for name, words in (("stock", ""), ("tempo", f"`{everywhere}` in all layers")):
        peak = max(rank["peak_bytes"] for rank in estimated[name])
        yield f"| {name if name == 'stock' else 'any'} | {words} | {peak / GIB:.2f} | no plan | |"
    for size, allowed, more in OF_EXPERTS:
        found = _run(
            f"plan --gpu h100 --gpu-memory {size}GiB --margin 0 --recompute-allowed {allowed} -- {options} {more}"
        )
        (stage,) = found["stages"]
        longer = stage["added_seconds"] / (stage["seconds"] - stage["added_seconds"])
        chosen = " ".join([TempoConfig.from_dict(found["tempo"]).describe(), *found["megatron_arguments"]])
        beside = " ".join(filter(None, [allowed and f"--recompute-allowed {allowed}", more]))
        yield (
            f"| {size} GiB | {beside and f'`{beside}`'} | {stage['peak_bytes'] / GIB:.2f} | `{chosen}` | "
            f"{100 * longer:.1f} % |"
        )


def _run(words: str) -> Any:
    """What a command of tempo-megatron writes for --json."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "found.json"
        command, *rest = shlex.split(words)
        status = run_command([command, "--json", str(file), *rest])
        assert status == 0, words
        return json.loads(file.read_text(encoding="utf-8"))


def _share(plan: MemoryPlan, flops: int) -> str:
    return f"{100 * sum(stage.recomputed_flops for stage in plan.stages) / flops:.1f}"


def replace(document: str, name: str, lines: Iterator[str]) -> None:
    """Put lines between the marks of this name. Raises ValueError where the document has none."""
    path = ROOT / "docs" / document
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- {name}: begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    if not (begin and end):
        raise ValueError(f"{path} has no <!-- {name}: begin --> and <!-- {name}: end -->")
    path.write_text(before + begin + "\n".join(lines) + "\n" + end + after, encoding="utf-8")


TABLES = {
    "offload plans": ("plan.md", write_plans),
    "expert plans": ("plan.md", write_expert_plans),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="which to write; default all")
    for name in parser.parse_args().tables or TABLES:
        document, write = TABLES[name]
        replace(document, name, write())


if __name__ == "__main__":
    main()
