"""Searches plans with measured rows, but accepts one only if the estimate says that it fits; also tries micro batches.

Rows give the bytes that each layer keeps, thousands of times a second. The estimate follows a whole step, which takes a
second or more. So it is asked once for what surrounds the layers, and then for the peak of each plan that was found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tempo_megatron.memory.estimate.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.estimate.offload import count_moved
from tempo_megatron.memory.plan.kept_rows import list_values, measure_rows
from tempo_megatron.memory.plan.planner import (
    FixedBytes,
    MemoryPlan,
    PlanProblem,
    PlanRequest,
    count_in_flight,
    find_plan,
    list_modes,
    make_plan,
    plan_alike,
    raise_impossible,
)
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import describe_parts
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import CHOICES
from tempo_megatron.slots.choose import refuse_written

_ROUNDS = 6
_REFERENCE = {"activation": "inplace", "norm": "inplace", "dropout": "recompute", "attention": "flash"}
NoteEstimate = Callable[[], object]


def _ignore() -> None:
    """Note nothing."""


def make_verified_plan(
    problem: PlanProblem, budget: int, estimate_plan: Callable[[MemoryPlan], Sequence[int]]
) -> tuple[MemoryPlan, PlanProblem]:
    """The plan with the shortest step of which the estimate says that each GPU holds at most `budget` bytes.

    Add the difference between estimate and plan to each stage's fixed bytes and plan again, until the plan stops
    changing. Of the plans that fit, take the one with the shortest step.

    Args:
        problem: what is planned.
        budget: bytes of one GPU.
        estimate_plan: returns the peaks of a plan's stages.

    Returns:
        The plan, with the estimated peaks, and the problem with the corrections that lead to it.

    Raises ValueError as `make_plan`, with the figures of the estimate.
    """
    seen: dict[tuple[int, str], tuple[MemoryPlan, PlanProblem]] = {}
    # What an estimate finds of plans that offload corrects plans that do not, too, and may hide the best of these. So
    # they are also sought alone, and first: no plan with the host is slower than the one without it.
    host_limits = sorted({0, problem.host_bytes})
    given = problem.corrections

    def verify(plan: MemoryPlan) -> bool:
        """Note the plan with its estimated peaks, and correct the problem; returns whether the plan is a new one."""
        nonlocal problem
        key = problem.host_bytes, repr((plan.block, plan.megatron_arguments))
        if key in seen:
            return False
        peaks = estimate_plan(plan)
        known = problem.corrections or (0,) * len(peaks)
        stages = zip(known, peaks, plan.stages, strict=True)
        corrections = tuple(before + peak - stage.peak_bytes for before, peak, stage in stages)
        problem = dataclasses.replace(problem, corrections=corrections)
        checked = (dataclasses.replace(stage, peak_bytes=peak) for stage, peak in zip(plan.stages, peaks, strict=True))
        corrected = dataclasses.replace(problem, host_bytes=host_limits[-1])
        seen[key] = dataclasses.replace(plan, stages=tuple(checked)), corrected
        return True

    def get_problem() -> PlanProblem:
        return problem

    def find_smallest() -> MemoryPlan:
        return min((plan for plan, _ in seen.values()), key=lambda plan: plan.peak_bytes)

    for host_bytes in host_limits:
        problem = dataclasses.replace(problem, host_bytes=host_bytes, corrections=given)
        for _ in range(_ROUNDS):
            if not verify(find_plan(problem, budget)):
                break
        if find_smallest().peak_bytes > budget:
            for plan in _descend(get_problem, find_smallest):
                verify(plan)
    fitting = [each for each in seen.values() if each[0].peak_bytes <= budget]
    if not fitting:
        raise_impossible(problem, find_smallest(), budget)
    return min(fitting, key=lambda each: each[0].seconds)


def _descend(get_problem: Callable[[], PlanProblem], find_smallest: Callable[[], MemoryPlan]) -> Iterator[MemoryPlan]:
    """Yields plans to estimate where none fits by the rows, towards the one that needs least by the estimate.

    Rows count what layers keep, but not what an operation's backward makes for itself, which decides once little is
    kept. So try the smallest plan of each of Megatron's modes; then, in the best mode so far and in the last one, each
    attention, whose backward makes most; then, from the best plan on, each value of each other operation.

    Args:
        get_problem: returns the problem with the corrections of all estimates so far.
        find_smallest: returns the plan that needs least of those that were estimated so far.
    """
    yield find_plan(get_problem(), 0)
    values, modes = get_problem().values, list_modes(get_problem())
    for modules in modes:
        yield plan_alike(get_problem(), {}, modules)
    for modules in dict.fromkeys((find_smallest().recompute, modes[-1])):
        for attention in values["attention"]:
            yield plan_alike(get_problem(), {"attention": (attention,)}, modules)
    for operation in sorted(values.keys() - {"attention"}):
        for value in values[operation]:
            best = find_smallest()
            same = {name: (best.block[name],) for name in values}
            if (operation, value, best.block["attention"]) != ("linear_qkv", "recompute", "off"):
                yield plan_alike(get_problem(), {**same, operation: (value,)}, best.recompute)


def plan_memory(
    request: PlanRequest, budget: int, note_estimate: NoteEstimate = _ignore
) -> tuple[MemoryPlan, PlanProblem]:
    """The plan of a request, and the problem that it solves. Where the request has no `fixed_sizes`, it is verified.

    note_estimate: called after each estimate of a step, of which there may be 30.

    Raises ValueError as `make_problem` and `make_plan`.
    """
    problem, estimates = make_problem(request, note_estimate)
    if estimates is None:
        return make_plan(problem, budget), problem
    return make_verified_plan(problem, budget, estimates.estimate_plan)


@dataclasses.dataclass(frozen=True)
class Trial:
    """The best plan for one micro batch size."""

    micro_batch_size: int
    plan: MemoryPlan
    problem: PlanProblem

    @property
    def seconds_per_sample(self) -> float:
        """The time of a step on one data-parallel rank, filling and draining of its pipeline included, per sample."""
        stages = self.problem.run.pipeline_parallel
        num_micro_batches = self.problem.run.num_micro_batches or stages
        return self.plan.seconds * (num_micro_batches + stages - 1) / (num_micro_batches * self.micro_batch_size)


def list_micro_batches(samples_per_rank: int | None) -> Iterator[int]:
    """Ascending sizes: the divisors of a rank's samples per step if they are known, else 1, 2, 3, 4, 6, 8, 12, ..."""
    if samples_per_rank is not None:
        yield from (size for size in range(1, samples_per_rank + 1) if samples_per_rank % size == 0)
        return
    yield 1
    for power in itertools.count(1):
        yield 2**power
        yield 3 * 2 ** (power - 1)


def try_micro_batches(
    request: PlanRequest, budget: int, samples_per_rank: int | None = None, note_estimate: NoteEstimate = _ignore
) -> list[Trial]:
    """One plan for each micro batch size that fits, smallest first. Stop at the first size that does not fit: larger
    ones need more.

    Args:
        request: its micro batch size is replaced, and, where `samples_per_rank` is given, their number.
        budget: bytes of one GPU.
        samples_per_rank: samples of a step.
        note_estimate: as in `plan_memory`.

    Raises the ValueError of the smallest size where not even that fits.
    """
    found: list[Trial] = []
    for size in list_micro_batches(samples_per_rank):
        number = request.run.num_micro_batches if samples_per_rank is None else samples_per_rank // size
        run = dataclasses.replace(request.run, micro_batch_size=size, num_micro_batches=number)
        try:
            found.append(Trial(size, *plan_memory(dataclasses.replace(request, run=run), budget, note_estimate)))
        except ValueError:
            if not found:
                raise
            break
    return found


def choose_trial(trials: Iterable[Trial]) -> Trial:
    """The trial with the least time per sample; of equals the one with the smaller micro batch."""
    return min(trials, key=lambda trial: trial.seconds_per_sample)


def make_problem(
    request: PlanRequest, note_estimate: NoteEstimate = _ignore
) -> tuple[PlanProblem, PlanEstimates | None]:
    """The problem of a request, and the estimates that verify its plans; None where the request has `fixed_sizes`.

    Raises ValueError where the planner does not know the model, the layout does not fit it, or it cannot have a value
    that was written.
    """
    run = request.run
    if run.model.family == "t5":
        raise ValueError("the planner does not support T5; give a GPT or a BERT")
    if run.tempo.layers:
        raise ValueError(
            "tempo.layers is given, and a plan gives the layers their values; leave it out, or leave the budget out"
        )
    refuse_written(describe_parts(build_transformer_config(run.model, dtype=run.dtype), run), run.tempo)
    written = {name: getattr(run.tempo, name) for name in CHOICES}
    # Stock comes first: of two values with the same bytes and cost the first is taken.
    values = {name: found if written[name] == "auto" else (written[name],) for name, found in list_values(run).items()}
    if request.fixed_sizes:
        fixed_bytes = dict.fromkeys(values["loss"], _read_fixed_sizes(request.fixed_sizes, run.pipeline_parallel))
        return PlanProblem(**vars(request), fixed_bytes=fixed_bytes, values=values), None
    estimates = PlanEstimates(run, values, note_estimate)
    loss = estimates.choose_loss(values["loss"])
    fixed_bytes = {loss: estimates.count_fixed_bytes(loss)}
    return PlanProblem(**vars(request), fixed_bytes=fixed_bytes, values={**values, "loss": (loss,)}), estimates


def _read_fixed_sizes(sizes: tuple[int, ...], num_stages: int) -> tuple[FixedBytes, ...]:
    """What --fixed-memory gives each stage. Raises ValueError unless there is one size, or one for each stage."""
    if len(sizes) not in (1, num_stages):
        raise ValueError(f"--fixed-memory has {len(sizes)} sizes; expected one, or one for each of {num_stages} stages")
    return tuple(FixedBytes(size, size) for size in (sizes * num_stages if len(sizes) == 1 else sizes))


class PlanEstimates:
    """The estimates of one model and layout.

    Args:
        run: its values and its recomputation do not count.
        values: operation -> the values that the model can have.
        note_estimate: called after each estimate.
    """

    def __init__(self, run: Run, values: Mapping[str, Sequence[str]], note_estimate: NoteEstimate = _ignore) -> None:
        self._run, self._note_estimate = run, note_estimate
        known: dict[str, Any] = {name: value for name, value in _REFERENCE.items() if value in values[name]}
        self._reference = dataclasses.replace(TempoConfig.off(), **known)
        self._measure_rows = functools.cache(functools.partial(measure_rows, run))
        self.estimate = functools.cache(self._estimate)

    def choose_loss(self, forms: Sequence[str]) -> str:
        """The form of the loss head with which the last stage needs less; of equals the first."""
        return min(forms, key=lambda form: self._estimate_reference(form, ())[-1].peak_bytes)

    def count_fixed_bytes(self, loss: str) -> tuple[FixedBytes, ...]:
        """For each stage what the estimates of a reference run count beyond what its layers keep.

        There are two such estimates, without recomputation and with full recomputation. Each peak is the higher of two
        moments: in the loss head, and in a layer's backward, where a recomputed layer exists once more.
        """
        again = self._measure_rows(()).count(self._reference)
        peaks = zip(self._count_around(loss, ()), self._count_around(loss, ("full",)), strict=True)
        return tuple(FixedBytes(in_layers=min(plain, full - again), at_head=plain) for plain, full in peaks)

    def _count_around(self, loss: str, recompute: tuple[str, ...]) -> list[int]:
        """For each stage the reference's peak less what its layers keep of all micro batches in flight."""
        rows, num_layers = self._measure_rows(recompute), self._run.model.num_layers // self._run.pipeline_parallel
        kept = num_layers * rows.count(self._reference) + rows.stack_bytes
        ranks = self._estimate_reference(loss, recompute)
        return [rank.peak_bytes - count_in_flight(self._run, stage) * kept for stage, rank in enumerate(ranks)]

    def estimate_plan(self, plan: MemoryPlan) -> list[int]:
        """The peak of each stage of a plan, or a bound that is no lower.

        The estimate knows recomputation of all layers or of none. Where a plan recomputes the first N layers of a
        stage, two estimates bound its step. Until the backward of the first N begins, each moment is one of the step
        without recomputation, less what the N layers do not keep. From then on, each moment is one of the step that
        recomputes all layers, with what the other layers keep of the micro batches that wait. The higher of both peaks
        is the bound.
        """
        config, num_full = plan.tempo, plan.num_full
        plain_modules = () if num_full else plan.recompute
        plain = self.estimate(config, plain_modules) if num_full < len(plan.stages[0].layers) else None
        full = self.estimate(config, ("full",)) if num_full else None
        together = self._measure_rows(plan.recompute).stack_bytes if num_full else 0
        found = []
        for number, stage in enumerate(plan.stages):
            configs = [choice.make_config() for choice in stage.choices]
            rows = [self._measure_rows(choice.recompute) for choice in stage.choices]
            moved = [
                count_moved(each.list_movable(choice.values), choice.offload)
                for each, choice in zip(rows, stage.choices, strict=True)
            ]
            kept = [each.count(config) - of_host for each, config, of_host in zip(rows, configs, moved, strict=True)]
            peaks = []
            if plain is not None:
                without = sum(self._measure_rows(()).count(each) for each in configs[:num_full])
                # Of what goes to the host the estimate has that of the other layers.
                saved = without - sum(kept[:num_full]) - together
                staging = 2 * max(moved[:num_full], default=0)
                peaks.append(plain[number].peak_bytes - stage.in_flight * saved + staging)
            if full is not None:
                # A stage whose layers are all recomputed keeps as much of each layer as of its first.
                more = sum(kept[num_full:]) - len(kept[num_full:]) * (kept[0] + moved[0])
                peaks.append(full[number].peak_bytes + (stage.in_flight - 1) * more)
            found.append(max(peaks))
        return found

    def _estimate_reference(self, loss: str, recompute: tuple[str, ...]) -> tuple[RankEstimate, ...]:
        return self.estimate(dataclasses.replace(self._reference, loss=loss), recompute)

    def _estimate(self, config: TempoConfig, recompute: tuple[str, ...]) -> tuple[RankEstimate, ...]:
        run = dataclasses.replace(self._run, tempo=config, recompute=recompute, recompute_num_layers=None)
        found = estimate_ranks(run)
        self._note_estimate()
        return found
