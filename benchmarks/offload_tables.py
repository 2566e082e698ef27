"""Plans with offload and of experts: writes the tables of docs/plan.md.

All figures are estimates and simulations, on rates of data sheets; none is measured.

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
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import MemoryPlan, Planner, PlanProblem
from tempo_megatron.memory.plan.step_simulation import simulate_stage
from tempo_megatron.memory.plan.verify import make_problem
from tempo_megatron.settings.config import TempoConfig

MODELS = ("gpt3_22b", "llama3_8b")
GIB = 2**30
NUM_BUDGETS = 6
SHARED = (2, 4)
"""GPUs that share an uplink."""

# GiB, what the command of docs/plan.md allows beside, and what is written at its end.
OF_EXPERTS = (
    (57, "", ""),
    (54, "", ""),
    (52, "", ""),
    (48, "", "--moe-token-dispatcher-type alltoall --tempo-moe-permute repeat"),
    (43, "full", ""),
)


def read_problem(model: str, *words: str) -> PlanProblem:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    path = ROOT / "configs" / "model" / f"{model}.json"
    options = f"--model={path} --seq-length=8192 --tp=8 --sequence-parallel --gpu-memory=80GB".split()
    return make_problem(read_request(parser.parse_args([*options, *words]), read_gpu("h100"))[0])[0]


def write_plans() -> Iterator[str]:
    """A row for each budget between the least of a plan without the host and what keeps everything."""
    yield "| | budget, GiB | keep or recompute, ms | again, % | or the host, ms | again, % | sent, GiB | waits, ms |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for model in MODELS:
        problem = read_problem(model)
        with_host = share_link(problem, 1)
        alone, planner = Planner(problem), Planner(with_host)
        sizes = [planner.find_smallest().peak_bytes, *list_budgets(alone)]
        flops = problem.flops.total * problem.run.model.num_layers
        for size in sizes:
            without, plan = alone.find(size), planner.find(size)
            assert plan is not None
            stage = plan.stages[0]
            waits = simulate_stage(with_host, 0, stage).waiting_seconds
            assert without is None or plan.seconds <= without.seconds
            old = ("none", "") if without is None else (f"{without.seconds * 1e3:.1f}", _share(without, flops))
            yield (
                f"| {model} | {size / GIB:.2f} | {old[0]} | {old[1]} | {plan.seconds * 1e3:.1f} | "
                f"{_share(plan, flops)} | {stage.moved_bytes / GIB:.2f} | {waits * 1e3:.1f} |"
            )


def share_link(problem: PlanProblem, gpus_per_uplink: int) -> PlanProblem:
    """The problem with 128 GiB of the host for each GPU, so many of which share an uplink to it."""
    assert problem.gpu.host_link is not None
    link = dataclasses.replace(problem.gpu.host_link, gpus_per_uplink=gpus_per_uplink)
    return dataclasses.replace(problem, host_bytes=128 * GIB, gpu=dataclasses.replace(problem.gpu, host_link=link))


def list_budgets(planner: Planner) -> list[int]:
    """From the least that a plan needs to what keeps everything."""
    least, all_kept = planner.find_smallest().peak_bytes, planner.find(10**15)
    assert all_kept is not None
    return [least + (all_kept.peak_bytes - least) * part // (NUM_BUDGETS - 1) for part in range(NUM_BUDGETS)]


def write_shared() -> Iterator[str]:
    """The same budgets where GPUs behind one switch share its uplink."""
    names = " | ".join(f"{number} GPUs, ms | again, % | waits, ms" for number in SHARED)
    yield f"| | budget, GiB | keep or recompute, ms | alone, ms | {names} | 4 GPUs, the plan of one alone: waits, ms |"
    yield "| --- | ---: | ---: | ---: |" + " ---: | ---: | ---: |" * len(SHARED) + " ---: |"
    for model in MODELS:
        problem = read_problem(model)
        alone, unshared = Planner(problem), Planner(share_link(problem, 1))
        problems = {number: share_link(problem, number) for number in SHARED}
        planners = {number: Planner(each) for number, each in problems.items()}
        flops = problem.flops.total * problem.run.model.num_layers
        for size in list_budgets(alone):
            without, own = alone.find(size), unshared.find(size)
            assert without is not None and own is not None
            cells = []
            for number, planner in planners.items():
                plan = planner.find(size)
                assert plan is not None and own.seconds <= plan.seconds <= without.seconds
                waits = simulate_stage(problems[number], 0, plan.stages[0]).waiting_seconds
                cells.append(f"{plan.seconds * 1e3:.1f} | {_share(plan, flops)} | {waits * 1e3:.1f}")
            careless = simulate_stage(problems[SHARED[-1]], 0, own.stages[0]).waiting_seconds
            yield (
                f"| {model} | {size / GIB:.2f} | {without.seconds * 1e3:.1f} | {own.seconds * 1e3:.1f} | "
                f"{' | '.join(cells)} | {careless * 1e3:.1f} |"
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
        found = _run(f"plan --gpu h100 --gpu-memory {size}GiB --recompute-allowed {allowed} -- {options} {more}")
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
    return f"{100 * plan.recomputed_flops / flops:.1f}"


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
    "shared uplinks": ("plan.md", write_shared),
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
