"""Plans for each layer what it keeps, so that every pipeline stage fits and a step is shortest.

A layer may have any values of the operations that its model can have. Megatron's recomputation is the whole model's:
none; `core_attn`, `mlp` or both in every layer; or the first N layers of every stage as a whole (`--recompute-method
block`), N being one number. Within each of these the choice is exact (`solver`). The loss head takes the form that
needs less at the peak of the last stage: neither computes a product twice.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from tempo_megatron.memory.plan.cost import (
    LayerFlops,
    convert_to_femtoseconds,
    count_layer_flops,
    count_moved_bytes,
    count_recomputed_flops,
    count_weight_bytes,
)
from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.plan.kept_rows import KeptRows, measure_rows
from tempo_megatron.memory.plan.solver import BareStage, LayerOption, RecomputeMode, Solution, Solver, prune
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS, write_layers
from tempo_megatron.words.argument_types import format_bytes

RECOMPUTED = frozenset(("core_attn", "mlp", "full"))
"""All of Megatron's recomputation that the planner knows."""
RECOMPUTE_MODES = ((), ("core_attn",), ("mlp",), ("core_attn", "mlp"), ("full",))
_FEMTO = 1e15


@dataclasses.dataclass(frozen=True)
class FixedBytes:
    """What a rank of a pipeline stage holds whatever its layers keep: weights, gradients, optimizer states, buffers,
    embedding, and what runs at the moment makes for itself."""

    in_layers: int
    """While a layer's backward runs, without what its recomputation makes again."""
    at_head: int
    """At the highest moment before any layer's backward."""


class CountFixedBytes(Protocol):
    """The FixedBytes of a problem."""

    def __call__(self, stage: int, loss: str) -> FixedBytes:
        """Of `stage`, with the loss head "off" or "fused"."""


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """One way to run a layer."""

    values: tuple[str, ...]
    """Of LAYER_OPERATIONS."""
    recompute: frozenset[str]
    """Megatron's."""

    def list_values(self) -> dict[str, str]:
        return dict(zip(LAYER_OPERATIONS, self.values, strict=True))

    def make_config(self) -> TempoConfig:
        return TempoConfig.from_dict({**self.list_values(), "loss": "off"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned. Raises ValueError where stages cannot share the layers."""

    run: Run
    """What of its `tempo` is "auto" is planned, and any other value stays."""
    gpu: Gpu
    recompute: frozenset[str] | None = RECOMPUTED
    """What Megatron may recompute; None is what the run says, no more and no less."""
    remedy: str = "raise --gpu-memory, --tp or --pp, or lower --micro-batch-size"
    """What a user can do where nothing fits."""
    fixed_sizes: tuple[int, ...] = ()
    """What the GPUs hold whatever the layers keep, of all stages or of each; empty is to be estimated."""

    def __post_init__(self) -> None:
        num_layers, num_stages = self.run.model.num_layers, self.run.pipeline_parallel
        if num_layers % num_stages:
            raise ValueError(f"--pp {num_stages} does not divide the model's {num_layers} layers; give a divisor")

    @property
    def layers_of_stage(self) -> int:
        return self.run.model.num_layers // self.run.pipeline_parallel

    @property
    def num_full(self) -> int | None:
        """Of full recomputation: how many layers of each stage; None is any number."""
        number = self.run.recompute_num_layers or self.layers_of_stage
        return None if self.recompute is not None else min(number, self.layers_of_stage)

    def may_recompute(self, modules: Iterable[str]) -> bool:
        """Whether Megatron may recompute these modules, or "full", whole layers."""
        return frozenset(self.run.recompute if self.recompute is None else self.recompute).issuperset(modules)

    def measure_rows(self, recompute: Iterable[str]) -> KeptRows:
        """What a layer keeps with Megatron's recomputation."""
        return measure_rows(self.run, recompute)

    @property
    def flops(self) -> LayerFlops:
        """Of one layer's forward."""
        run = self.run
        skips_masked = run.stock == "transformer_engine" and run.stock_attention != "unfused"
        return count_layer_flops(run, is_causal=run.model.family == "gpt", skips_masked=skips_masked)

    @property
    def head_flops(self) -> int:
        """Of the output layer's forward, on one rank."""
        run = self.run
        tokens = run.model.seq_length * run.micro_batch_size
        return 2 * tokens * run.model.hidden_size * run.padded_vocab_size // run.tensor_parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(PlanRequest):
    """A request, and what a plan of it is sought with."""

    count_fixed_bytes: CountFixedBytes
    values: Mapping[str, Sequence[str]]
    """Operation -> the values that the model can have, "off" first and the loss's too; without "auto"."""
    corrections: tuple[int, ...] = ()
    """Bytes of each stage, on top of its FixedBytes; empty is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline stage of a plan, of one micro batch where nothing else is said."""

    layers: range
    choices: tuple[LayerChoice, ...]
    in_flight: int
    """Micro batches whose kept bytes are there at the peak."""
    peak_bytes: int
    kept_bytes: int
    """What the layers keep."""
    recomputed_flops: int
    seconds: float
    """Products of forward and backward at the GPU's rate, and what the choices add."""
    added_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to write into the JSON and on the command line, and what it comes to."""

    recompute: frozenset[str]
    """What Megatron recomputes: some modules of every layer, or "full", whole layers."""
    num_full: int
    """The first layers of every stage that are recomputed as a whole."""

    block: dict[str, Any]
    """The "tempo" block."""
    megatron_arguments: tuple[str, ...]
    """Words for the command line: Megatron's recomputation."""
    stages: tuple[StagePlan, ...]

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Of the slowest stage and one micro batch."""
        return max(stage.seconds for stage in self.stages)

    @property
    def recomputed_flops(self) -> int:
        return sum(stage.recomputed_flops for stage in self.stages)


def make_plan(problem: Problem, budget: int) -> Plan:
    """The plan of the shortest step in which each GPU holds at most `budget` bytes.

    Raises ValueError, which says by how much it misses and names the nearest plan that fits, where none does.
    """
    plan = find_plan(problem, budget)
    if plan.peak_bytes > budget:
        raise_impossible(problem, plan, budget)
    return plan


def find_plan(problem: Problem, budget: int) -> Plan:
    """As `make_plan`; where nothing fits, the shortest step of those that need least."""
    planner = Planner(problem)
    solution = planner.solver.solve(budget)
    return planner.make_smallest() if solution is None else planner.describe(solution)


def raise_impossible(problem: Problem, smallest: Plan, budget: int) -> NoReturn:
    """Raise ValueError: by how much the plan that needs least misses the budget, and what it is."""
    words = " ".join(smallest.megatron_arguments) or "no recomputation by Megatron"
    raise ValueError(
        f"{format_bytes(budget)} a GPU are given, and the least that fits is {format_bytes(smallest.peak_bytes)}, "
        f"{format_bytes(smallest.peak_bytes - budget)} more: {TempoConfig.from_dict(smallest.block).describe()}, "
        f"{words}; {problem.remedy}"
    )


def make_smallest_plan(problem: Problem) -> Plan:
    """Among the plans with the lowest peak, the one with the shortest step."""
    return Planner(problem).make_smallest()


def plan_alike(problem: Problem, values: Mapping[str, Sequence[str]], modules: Sequence[str]) -> Plan:
    """The plan that needs least of those in which all layers are alike.

    Args:
        problem: the model, and the values of operations that `values` does not name.
        values: operation -> the values to choose from.
        modules: what Megatron recomputes, in every layer; "full" is all layers, or as many as the run says.
    """
    alike = dataclasses.replace(
        problem,
        values={**problem.values, **values},
        run=dataclasses.replace(problem.run, recompute=tuple(modules), recompute_num_layers=problem.num_full),
        recompute=None,
    )
    return make_smallest_plan(alike)


def list_modes(problem: Problem) -> list[tuple[str, ...]]:
    """What of Megatron's recomputation a plan may take together."""
    if problem.recompute is None:
        return [tuple(sorted(problem.run.recompute))]
    return [each for each in RECOMPUTE_MODES if problem.may_recompute(each)]


class Planner:
    """A problem in the solver's terms, and its solution as a plan."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._flops = problem, problem.flops
        last = problem.run.pipeline_parallel - 1
        self._loss = min(problem.values["loss"], key=lambda form: problem.count_fixed_bytes(last, form).at_head)
        self.modes = [self._make_mode(frozenset(each)) for each in list_modes(problem)]
        self.solver = Solver(self.modes)

    def make_smallest(self) -> Plan:
        """Among the plans with the lowest peak, the one with the shortest step."""
        solution = self.solver.solve(self.solver.find_smallest().peak_bytes)
        assert solution is not None
        return self.describe(solution)

    def describe(self, solution: Solution[LayerChoice]) -> Plan:
        """The plan that a solution is."""
        modules = self.modes[solution.mode].kinds[0].name.recompute
        words: tuple[str, ...] = ()
        if solution.num_full:
            words = ("full", "--recompute-method", "block", "--recompute-num-layers", str(solution.num_full))
        elif modules:
            words = ("selective", "--recompute-modules", *sorted(modules))
        layers = [choice for stage in solution.stages for choice in stage.names]
        return Plan(
            recompute=frozenset(("full",)) if solution.num_full else modules,
            num_full=solution.num_full,
            block=_write_block(layers, self._loss),
            megatron_arguments=("--recompute-granularity", *words) if words else (),
            stages=tuple(self._describe_stages(solution)),
        )

    def _describe_stages(self, solution: Solution[LayerChoice]) -> Iterator[StagePlan]:
        mode = self.modes[solution.mode]
        kept = {kind.name: kind.kept_bytes for kind in (*mode.kinds, *mode.full_kinds)}
        recompute = frozenset(("full",)) if mode.full_kinds else mode.kinds[0].name.recompute
        of_stack = self._problem.measure_rows(recompute).stack_bytes
        for index, (stage, found) in enumerate(zip(mode.stages, solution.stages, strict=True)):
            yield StagePlan(
                layers=range(index * stage.num_layers, (index + 1) * stage.num_layers),
                choices=found.names,
                in_flight=stage.in_flight,
                peak_bytes=found.peak_bytes,
                kept_bytes=of_stack + sum(kept[choice] for choice in found.names),
                recomputed_flops=sum(
                    count_recomputed_flops(self._flops, each.recompute, each.make_config()) for each in found.names
                ),
                seconds=found.cost / _FEMTO,
                added_seconds=(found.cost - stage.base_cost) / _FEMTO,
            )

    def _make_mode(self, recompute: frozenset[str]) -> RecomputeMode[LayerChoice]:
        stages = tuple(self._make_stage(index, recompute) for index in range(self._problem.run.pipeline_parallel))
        if "full" in recompute:
            return RecomputeMode(
                self._list_kinds(frozenset()), stages, self._list_kinds(recompute), self._problem.num_full
            )
        return RecomputeMode(self._list_kinds(recompute), stages)

    def _make_stage(self, index: int, recompute: frozenset[str]) -> BareStage:
        problem = self._problem
        num_layers, num_stages = problem.layers_of_stage, problem.run.pipeline_parallel
        head_flops = problem.head_flops if index == num_stages - 1 else 0
        # Backward computes two products for each of forward's.
        flops = 3 * (num_layers * self._flops.total + head_flops)
        # The products of a linear are two operations a token and weight.
        tokens = problem.run.model.seq_length * problem.run.micro_batch_size
        num_weights = (num_layers * self._flops.linears + head_flops) // (2 * tokens)
        # 1F1B: a stage is as many micro batches ahead as there are stages behind it.
        in_flight = min(num_stages - index, problem.run.num_micro_batches or num_stages)
        fixed = problem.count_fixed_bytes(index, self._loss)
        correction = problem.corrections[index] if problem.corrections else 0
        return BareStage(
            num_layers=num_layers,
            in_flight=in_flight,
            fixed_bytes=fixed.in_layers + correction + in_flight * problem.measure_rows(recompute).stack_bytes,
            base_cost=convert_to_femtoseconds(
                problem.gpu,
                problem.run.dtype,
                flops=flops,
                moved_bytes=count_weight_bytes(num_weights, problem.run.dtype.itemsize),
            ),
            head_bytes=max(0, fixed.at_head - fixed.in_layers),
        )

    def _list_kinds(self, recompute: frozenset[str]) -> tuple[LayerOption[LayerChoice], ...]:
        values = (self._problem.values.get(name, ("off",)) for name in LAYER_OPERATIONS)
        possible = self._problem.measure_rows(recompute).rows
        choices = (each for each in itertools.product(*values) if each in possible)
        return prune([self._make_kind(LayerChoice(each, recompute)) for each in choices])

    def _make_kind(self, choice: LayerChoice) -> LayerOption[LayerChoice]:
        problem, config = self._problem, choice.make_config()
        is_full, rows = "full" in choice.recompute, problem.measure_rows(())
        kept = problem.measure_rows(choice.recompute).count(config)
        # What runs again in backward: the MLP's linear first, attention when the MLP is through. Inside of a layer that
        # Megatron recomputes, neither.
        attention = "flash" if config.attention == "recompute" else config.attention
        with_mlp = dataclasses.replace(config, linear_fc1="off")
        with_attention = dataclasses.replace(with_mlp if is_full else config, linear_qkv="off", attention=attention)
        without = max(rows.count(each) for each in (with_mlp, with_attention))
        cost = convert_to_femtoseconds(
            problem.gpu,
            problem.run.dtype,
            flops=count_recomputed_flops(self._flops, choice.recompute, config),
            moved_bytes=count_moved_bytes(problem.run, config, choice.recompute),
        )
        return LayerOption(choice, kept, cost, without if is_full else max(0, without - kept))


def _write_block(layers: Sequence[LayerChoice], loss: str) -> dict[str, Any]:
    """The "tempo" block: what most layers that keep something have as its values, and ranges of the others."""
    # The final norm and the embedding have these values too, and no recomputation drops what they keep.
    kept = [choice for choice in layers if "full" not in choice.recompute] or layers
    counts = collections.Counter(choice.values for choice in kept)
    common = dict(zip(LAYER_OPERATIONS, counts.most_common(1)[0][0], strict=True))
    block: dict[str, Any] = {**common, "loss": loss}
    ranges = {}
    for values, group in itertools.groupby(enumerate(layers), key=lambda each: each[1].list_values()):
        others = {name: value for name, value in values.items() if value != common[name]}
        if others:
            ranges[write_layers([layer for layer, _ in group])] = others
    return {**block, "layers": ranges} if ranges else block
