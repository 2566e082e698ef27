"""Plans what each layer keeps, so that every pipeline stage fits into its memory and a step is as short as possible.

A layer may have any values of the operations that its model can have. Megatron's recomputation is the whole model's:
none; `core_attn`, `mlp` or both in every layer (`mla_up_proj` with latent attention, `moe` with experts); or the first
N layers of every stage as a whole (`--recompute-method block`). Where some layers have experts and others not, all
count as layers with experts; the estimate, which knows each, tells by how much a plan is off (`verify`). Within each
of these modes the choice is exact (`solver`). The loss head takes the form that needs less at the peak of the last
stage, because neither form computes a product twice.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tempo_megatron.memory.plan.cost import (
    LayerFlops,
    choose_rows_to_move,
    convert_to_femtoseconds,
    count_layer_flops,
    count_moved_bytes,
    count_recomputed_flops,
    count_weight_bytes,
    count_window_bytes,
)
from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.plan.kept_rows import measure_rows
from tempo_megatron.memory.plan.solver import BareStage, LayerOption, RecomputeMode, Solution, Solver, StageChoice
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS, OFFLOAD, write_layers
from tempo_megatron.words.argument_types import format_bytes

RECOMPUTED = frozenset(("core_attn", "mlp", "moe", "mla_up_proj", "full"))
"""Every name of Megatron's recomputation that the planner knows."""
_FEMTO = 1e15


@dataclasses.dataclass(frozen=True)
class FixedBytes:
    """What a rank holds whatever its layers keep.

    These are weights, gradients, optimizer states, buffers, the embedding, and the temporary tensors of what runs.
    """

    in_layers: int
    """While a layer's backward runs, without what its recomputation makes again."""
    at_head: int
    """At the highest moment before any layer's backward."""


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """One way to run a layer."""

    values: tuple[str, ...]
    """The value of each of LAYER_OPERATIONS."""
    recompute: frozenset[str]
    """What Megatron recomputes of the layer."""
    offload: str = "off"
    """Which of its rows go to the host: "all", or names of OFFLOAD_ROWS joined by "+"."""

    def list_values(self) -> dict[str, str]:
        return dict(zip(LAYER_OPERATIONS, self.values, strict=True))

    def make_config(self) -> TempoConfig:
        return TempoConfig.from_dict({**self.list_values(), "loss": "off"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned. Raises ValueError where the stages cannot have equally many layers."""

    run: Run
    """The values of its `tempo` that are "auto" are planned; the others stay."""
    gpu: Gpu
    recompute: frozenset[str] | None = RECOMPUTED
    """What Megatron may recompute; None: it recomputes what the run says."""
    remedy: str = "raise --gpu-memory, --tp or --pp, or lower --micro-batch-size"
    """What a user can do where nothing fits."""
    fixed_sizes: tuple[int, ...] = ()
    """What a GPU holds whatever its layers keep, one size or one for each stage; empty: it is estimated."""
    host_bytes: int = 0
    """What the host has for what the layers of one GPU send there; 0: nothing is sent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", dataclasses.replace(self.run, chip=self.gpu.chip or self.run.chip))
        num_layers, num_stages = self.run.model.num_layers, self.run.pipeline_parallel
        if num_layers % num_stages:
            raise ValueError(
                f"{num_stages} pipeline stages do not divide the model's {num_layers} layers; give a divisor"
            )

    @property
    def layers_of_stage(self) -> int:
        return self.run.model.num_layers // self.run.pipeline_parallel

    @property
    def num_full(self) -> int | None:
        """How many layers of each stage full recomputation takes; None: any number."""
        number = self.run.recompute_num_layers or self.layers_of_stage
        return None if self.recompute is not None else min(number, self.layers_of_stage)

    def may_recompute(self, modules: Iterable[str]) -> bool:
        """Whether Megatron may recompute these modules; "full" means whole layers."""
        return frozenset(self.run.recompute if self.recompute is None else self.recompute).issuperset(modules)

    @property
    def flops(self) -> LayerFlops:
        """FLOPs of one layer's forward."""
        run = self.run
        skips_masked = run.stock == "transformer_engine" and run.stock_attention != "unfused"
        return count_layer_flops(run, is_causal=run.model.family == "gpt", skips_masked=skips_masked)

    @property
    def head_flops(self) -> int:
        """FLOPs of the output layer's forward on one rank."""
        run = self.run
        tokens = run.model.seq_length * run.micro_batch_size
        return 2 * tokens * run.model.hidden_size * run.padded_vocab_size // run.tensor_parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanProblem(PlanRequest):
    """A request with everything that its plan depends on."""

    fixed_bytes: Mapping[str, Sequence[FixedBytes]]
    """Form of the loss head ("off" or "fused") -> the fixed bytes of each stage."""
    values: Mapping[str, Sequence[str]]
    """Operation, the loss among them -> the values that the model can have, "off" first; never "auto"."""
    corrections: tuple[int, ...] = ()
    """Bytes to add to the fixed bytes of each stage; empty: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline stage of a plan. Bytes kept, FLOPs and seconds are those of one micro batch."""

    layers: range
    choices: tuple[LayerChoice, ...]
    in_flight: int
    """Micro batches whose activations are alive at the peak."""
    peak_bytes: int
    kept_bytes: int
    """What the layers keep."""
    recomputed_flops: int
    seconds: float
    """The time of all matrix products of forward and backward, and of what the choices add."""
    added_seconds: float
    """What the choices add."""
    moved_bytes: int = 0
    """What the layers send to the host, not among `kept_bytes`."""
    host_bytes: int = 0
    """What of it is there at most, of all micro batches in flight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What to write into the JSON and on the command line, and the memory and time that this takes."""

    recompute: tuple[str, ...]
    """What Megatron recomputes, sorted: some modules of every layer, or "full"."""
    num_full: int
    """How many layers, the first ones of every stage, Megatron recomputes as a whole."""
    block: dict[str, Any]
    """The "tempo" block, without "auto"."""
    megatron_arguments: tuple[str, ...]
    """Megatron's recomputation as words of the command line."""
    stages: tuple[StagePlan, ...]

    @property
    def tempo(self) -> TempoConfig:
        return TempoConfig.from_dict(self.block)

    @property
    def peak_bytes(self) -> int:
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """What the fullest GPU has on its host."""
        return max(stage.host_bytes for stage in self.stages)

    @property
    def seconds(self) -> float:
        """The time of one micro batch on the slowest stage."""
        return max(stage.seconds for stage in self.stages)

    @property
    def recomputed_flops(self) -> int:
        return sum(stage.recomputed_flops for stage in self.stages)


def make_plan(problem: PlanProblem, budget: int) -> MemoryPlan:
    """The plan with the shortest step of those in which each GPU holds at most `budget` bytes.

    Raises ValueError where none fits; it says by how much, and names the plan that needs least.
    """
    plan = find_plan(problem, budget)
    if plan.peak_bytes > budget:
        raise_impossible(problem, plan, budget)
    return plan


def find_plan(problem: PlanProblem, budget: int) -> MemoryPlan:
    """As `make_plan`, but where nothing fits, the plan that needs least."""
    planner = Planner(problem)
    return planner.find(budget) or planner.find_smallest()


def raise_impossible(problem: PlanProblem, smallest: MemoryPlan, budget: int) -> NoReturn:
    """Raise ValueError: by how much `smallest`, the plan that needs least, misses the budget, and what it is."""
    words = " ".join(smallest.megatron_arguments) or "no recomputation by Megatron"
    raise ValueError(
        f"{format_bytes(budget)} a GPU are given, and the least that fits is {format_bytes(smallest.peak_bytes)}, "
        f"{format_bytes(smallest.peak_bytes - budget)} more: {smallest.tempo.describe()}, {words}; {problem.remedy}"
    )


def make_smallest_plan(problem: PlanProblem) -> MemoryPlan:
    """Among the plans with the lowest peak, the one with the shortest step."""
    return Planner(problem).find_smallest()


def plan_alike(problem: PlanProblem, values: Mapping[str, Sequence[str]], modules: Sequence[str]) -> MemoryPlan:
    """The plan that needs least of those in which all layers are alike.

    Args:
        problem: the model, and the values of operations that `values` does not name.
        values: operation -> the values to choose from.
        modules: what Megatron recomputes, in every layer; "full" is all layers, or as many as the run says.
    """
    run = dataclasses.replace(problem.run, recompute=tuple(modules), recompute_num_layers=problem.num_full)
    return make_smallest_plan(
        dataclasses.replace(problem, values={**problem.values, **values}, run=run, recompute=None)
    )


def count_in_flight(run: Run, stage: int) -> int:
    """The most micro batches of which a stage holds activations: 1F1B runs one ahead for each stage behind it."""
    return min(run.pipeline_parallel - stage, run.num_micro_batches or run.pipeline_parallel)


def list_modes(problem: PlanProblem) -> list[tuple[str, ...]]:
    """What Megatron may recompute together in a plan, each time sorted."""
    if problem.recompute is None:
        return [tuple(sorted(problem.run.recompute))]
    return [each for each in list_recomputations(problem.run) if problem.may_recompute(each)]


def list_recomputations(run: Run) -> list[tuple[str, ...]]:
    """What Megatron may recompute together in a model: modules that have one in each layer, or whole layers."""
    attention = "core_attn" if run.latent_attention is None else "mla_up_proj"
    mlp = "mlp" if run.experts is None else "moe"
    return [(), (attention,), (mlp,), (attention, mlp), ("full",)]


class Planner:
    """Hands a problem to the solver and describes the solver's solutions as plans."""

    def __init__(self, problem: PlanProblem) -> None:
        self._problem, self._flops = problem, problem.flops
        self._loss = min(problem.values["loss"], key=lambda form: problem.fixed_bytes[form][-1].at_head)
        self._measure_rows = functools.cache(functools.partial(measure_rows, problem.run))
        self._recomputed = [frozenset(each) for each in list_modes(problem)]
        self._modes = [self._make_mode(each) for each in self._recomputed]
        self._solver = Solver(self._modes)

    def find(self, budget: int) -> MemoryPlan | None:
        """The plan with the shortest step of those that fit into `budget` bytes; None where none does."""
        solution = self._solver.solve(budget)
        return None if solution is None else self._describe(solution)

    def find_smallest(self) -> MemoryPlan:
        """Among the plans with the lowest peak, the one with the shortest step."""
        plan = self.find(self._solver.find_smallest().peak_bytes)
        assert plan is not None
        return plan

    def _describe(self, solution: Solution[LayerChoice]) -> MemoryPlan:
        mode, recompute = self._modes[solution.mode], self._recomputed[solution.mode]
        words: tuple[str, ...] = ()
        if solution.num_full:
            words = ("full", "--recompute-method", "block", "--recompute-num-layers", str(solution.num_full))
        elif recompute:
            words = ("selective", "--recompute-modules", *sorted(recompute))
        pairs = zip(mode.stages, solution.stages, strict=True)
        return MemoryPlan(
            recompute=tuple(sorted(recompute)),
            num_full=solution.num_full,
            block=_write_block([choice for stage in solution.stages for choice in stage.names], self._loss),
            megatron_arguments=("--recompute-granularity", *words) if words else (),
            stages=tuple(self._describe_stage(number, recompute, *pair) for number, pair in enumerate(pairs)),
        )

    def _describe_stage(
        self, number: int, recompute: frozenset[str], stage: BareStage, found: StageChoice[LayerChoice]
    ) -> StagePlan:
        configs = [(choice.recompute, choice.make_config()) for choice in found.names]
        moved = found.host_bytes // stage.in_flight
        return StagePlan(
            layers=range(number * stage.num_layers, (number + 1) * stage.num_layers),
            choices=found.names,
            in_flight=stage.in_flight,
            peak_bytes=found.peak_bytes,
            kept_bytes=self._measure_rows(recompute).stack_bytes
            + sum(self._measure_rows(of_layer).count(config) for of_layer, config in configs)
            - moved,
            recomputed_flops=sum(count_recomputed_flops(self._flops, *each) for each in configs),
            seconds=found.cost / _FEMTO,
            added_seconds=(found.cost - stage.base_cost) / _FEMTO,
            moved_bytes=moved,
            host_bytes=found.host_bytes,
        )

    def _make_mode(self, recompute: frozenset[str]) -> RecomputeMode[LayerChoice]:
        stages = tuple(self._make_stage(index, recompute) for index in range(self._problem.run.pipeline_parallel))
        if "full" in recompute:
            return RecomputeMode(
                self._list_options(frozenset()), stages, self._list_options(recompute), self._problem.num_full
            )
        return RecomputeMode(self._list_options(recompute), stages)

    def _make_stage(self, index: int, recompute: frozenset[str]) -> BareStage:
        problem = self._problem
        num_layers, num_stages = problem.layers_of_stage, problem.run.pipeline_parallel
        head_flops = problem.head_flops if index == num_stages - 1 else 0
        # Backward computes two products for each of forward's.
        flops = 3 * (num_layers * self._flops.total + head_flops)
        # The products of a linear are two operations a token and weight.
        tokens = problem.run.model.seq_length * problem.run.micro_batch_size
        num_weights = (num_layers * self._flops.linears + head_flops) // (2 * tokens)
        num_weights += num_layers * self._flops.more_weights
        in_flight = count_in_flight(problem.run, index)
        fixed = problem.fixed_bytes[self._loss][index]
        correction = problem.corrections[index] if problem.corrections else 0
        return BareStage(
            num_layers=num_layers,
            in_flight=in_flight,
            fixed_bytes=fixed.in_layers + correction + in_flight * self._measure_rows(recompute).stack_bytes,
            base_cost=convert_to_femtoseconds(
                problem.gpu,
                problem.run.dtype,
                flops=flops,
                moved_bytes=count_weight_bytes(num_weights, problem.run.dtype.itemsize),
            ),
            head_bytes=max(0, fixed.at_head - fixed.in_layers),
            host_bytes=problem.host_bytes,
        )

    def _list_options(self, recompute: frozenset[str]) -> tuple[LayerOption[LayerChoice], ...]:
        values = (self._problem.values.get(name, ("off",)) for name in LAYER_OPERATIONS)
        possible = self._measure_rows(recompute).rows
        choices = (each for each in itertools.product(*values) if each in possible)
        return tuple(
            option for each in choices for option in self._add_moving(self._make_option(LayerChoice(each, recompute)))
        )

    def _add_moving(self, option: LayerOption[LayerChoice]) -> Iterator[LayerOption[LayerChoice]]:
        """The option, and the same layer with some of its rows on the host."""
        yield option
        problem, choice = self._problem, option.name
        if not problem.host_bytes:
            return
        window = count_window_bytes(problem.gpu, problem.run.dtype, self._flops.total)
        rows = self._measure_rows(choice.recompute).list_movable(choice.values)
        for offload, num_bytes in choose_rows_to_move(rows, window).items():
            moved = convert_to_femtoseconds(problem.gpu, problem.run.dtype, moved_bytes=2 * num_bytes)
            yield dataclasses.replace(
                option,
                name=dataclasses.replace(choice, offload=offload),
                kept_bytes=option.kept_bytes - num_bytes,
                cost=option.cost + moved,
                moved_bytes=num_bytes,
                resident=option,
            )

    def _make_option(self, choice: LayerChoice) -> LayerOption[LayerChoice]:
        problem, config = self._problem, choice.make_config()
        is_full, rows = "full" in choice.recompute, self._measure_rows(frozenset())
        kept = self._measure_rows(choice.recompute).count(config)
        # Backward runs the MLP's first linear again, and attention when the MLP has been differentiated, so that never
        # both results exist. In a layer that Megatron recomputes Tempo recomputes neither.
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
    """The "tempo" block: its fields are the values of most layers, its "layers" the ranges that differ."""
    # The final norm and the embedding take the fields, too, and no recomputation drops what they keep: so the fields
    # are taken from layers that Megatron does not recompute.
    kept = [choice for choice in layers if "full" not in choice.recompute] or layers
    counts = collections.Counter(choice.values for choice in kept)
    common = dict(zip(LAYER_OPERATIONS, counts.most_common(1)[0][0], strict=True))
    offload = collections.Counter(choice.offload for choice in layers).most_common(1)[0][0]
    block: dict[str, Any] = {**common, "loss": loss}
    if any(choice.offload != "off" for choice in layers):
        block[OFFLOAD] = common[OFFLOAD] = offload
    ranges = {}
    for values, group in itertools.groupby(
        enumerate(layers), key=lambda each: {**each[1].list_values(), OFFLOAD: each[1].offload}
    ):
        others = {name: value for name, value in values.items() if value != common.get(name, "off")}
        if others:
            ranges[write_layers([layer for layer, _ in group])] = others
    return {**block, "layers": ranges} if ranges else block
