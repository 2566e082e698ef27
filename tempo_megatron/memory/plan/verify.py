"""Searches plans with measured rows, but accepts one only if the estimate says that it fits; finds the micro batch size
with the least time per sample among those for which one fits.

A plan is sought with the bytes that measured rows give for each layer, thousands of times a second. The estimate, which
follows the whole step and takes a second or more, gives what stands around the layers, once, and then the peak of the
plan that was found.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tempo_megatron.memory.estimate.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.plan.kept_rows import count_second_output, list_values, measure_rows
from tempo_megatron.memory.plan.planner import (
    CountFixedBytes,
    FixedBytes,
    LayerChoice,
    Plan,
    PlanRequest,
    Problem,
    find_plan,
    list_modes,
    make_plan,
    plan_alike,
    raise_impossible,
)
from tempo_megatron.memory.run import Run
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
    problem: Problem, budget: int, estimate_plan: Callable[[Plan], Sequence[int]]
) -> tuple[Plan, Problem]:
    """The plan of the shortest step of which the estimate says that each GPU holds at most `budget` bytes.

    Add the difference between estimate and plan to each stage's fixed bytes and plan again, until the plan stops
    changing. Of the plans that fit, take the one with the shortest step.

    Args:
        problem: what is asked.
        budget: bytes of one GPU.
        estimate_plan: the peaks of a plan's stages.

    Returns:
        The plan, whose peaks are estimated ones, and the problem with the corrections that lead to it.

    Raises ValueError as `make_plan`; the nearest plan and by how much it misses are the estimate's too.
    """
    seen: dict[str, tuple[Plan, Problem]] = {}

    def verify(plan: Plan) -> bool:
        """Note the plan with its estimated peaks, and what corrects the problem; whether the plan is a new one."""
        nonlocal problem
        key = repr((plan.block, plan.megatron_arguments))
        if key in seen:
            return False
        peaks = estimate_plan(plan)
        problem = _correct(problem, [peak - stage.peak_bytes for peak, stage in zip(peaks, plan.stages, strict=True)])
        stages = (dataclasses.replace(stage, peak_bytes=peak) for stage, peak in zip(plan.stages, peaks, strict=True))
        seen[key] = dataclasses.replace(plan, stages=tuple(stages)), problem
        return True

    for _ in range(_ROUNDS):
        if not verify(find_plan(problem, budget)):
            break
    fitting = [each for each in seen.values() if each[0].peak_bytes <= budget]
    if not fitting:
        for plan in _descend(lambda: problem, lambda: min((plan for plan, _ in seen.values()), key=_peak)):
            verify(plan)
        fitting = [each for each in seen.values() if each[0].peak_bytes <= budget]
    if not fitting:
        raise_impossible(problem, min((plan for plan, _ in seen.values()), key=_peak), budget)
    return min(fitting, key=lambda each: each[0].seconds)


def _peak(plan: Plan) -> int:
    return plan.peak_bytes


def _descend(get_problem: Callable[[], Problem], get_best: Callable[[], Plan]) -> Iterator[Plan]:
    """Plans to estimate where none fits by the rows: towards the one that needs least by the estimate.

    Rows tell what layers keep, and not what an operation's backward makes for itself, which decides once little
    is kept. So each of Megatron's modes is tried with what needs least by the rows; in the best of them, and where
    whole layers are recomputed, each attention, whose backward makes most; and from the best of all on, each value of
    each other operation, in all layers.

    Args:
        get_problem: the problem with the corrections of all estimates so far.
        get_best: of the plans that were estimated so far the one that needs least.
    """
    yield find_plan(get_problem(), 0)
    values, modes = get_problem().values, list_modes(get_problem())
    for modules in modes:
        yield plan_alike(get_problem(), {}, modules)
    for modules in dict.fromkeys((tuple(sorted(get_best().recompute)), modes[-1])):
        for attention in values["attention"]:
            yield plan_alike(get_problem(), {"attention": (attention,)}, modules)
    for operation in sorted(values.keys() - {"attention"}):
        for value in values[operation]:
            best = get_best()
            same = {name: (best.block[name],) for name in values}
            if (operation, value, best.block["attention"]) != ("linear_qkv", "recompute", "off"):
                yield plan_alike(get_problem(), {**same, operation: (value,)}, sorted(best.recompute))


def answer(request: PlanRequest, budget: int, note_estimate: NoteEstimate = _ignore) -> tuple[Plan, Problem]:
    """The plan of a request, verified unless what the GPUs hold anyway was given, and the problem that it solves.

    note_estimate: called after each estimate of a step, of which there may be 30.

    Raises ValueError as `make_problem` and `make_plan`.
    """
    problem, estimates = make_problem(request, note_estimate)
    if estimates is None:
        return make_plan(problem, budget), problem
    return make_verified_plan(problem, budget, estimates.estimate_plan)


def _correct(problem: Problem, errors: Sequence[int]) -> Problem:
    known = problem.corrections or (0,) * problem.run.pipeline_parallel
    return dataclasses.replace(problem, corrections=tuple(map(sum, zip(known, errors, strict=True))))


@dataclasses.dataclass(frozen=True)
class Trial:
    """The best plan of one micro batch."""

    micro_batch_size: int
    plan: Plan
    problem: Problem

    @property
    def seconds_per_sample(self) -> float:
        """Of a step on one data-parallel rank, with the time in which its pipeline fills and drains."""
        stages = self.problem.run.pipeline_parallel
        num_micro_batches = self.problem.run.num_micro_batches or stages
        return self.plan.seconds * (num_micro_batches + stages - 1) / (num_micro_batches * self.micro_batch_size)


def list_micro_batches(samples_per_rank: int | None) -> Iterator[int]:
    """Sizes in ascending order: the divisors of a rank's samples of a step, else 1, 2, 3, 4, 6, 8, 12, and so on."""
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
        request: its micro batch, and where `samples_per_rank` is given the number of them, are replaced.
        budget: bytes of one GPU.
        samples_per_rank: of a step.
        note_estimate: as `answer` takes it.

    Raises ValueError where none fits: that of the smallest.
    """
    found: list[Trial] = []
    for size in list_micro_batches(samples_per_rank):
        number = request.run.num_micro_batches if samples_per_rank is None else samples_per_rank // size
        run = dataclasses.replace(request.run, micro_batch_size=size, num_micro_batches=number)
        try:
            found.append(Trial(size, *answer(dataclasses.replace(request, run=run), budget, note_estimate)))
        except ValueError:
            if not found:
                raise
            break
    return found


def choose_trial(trials: Iterable[Trial]) -> Trial:
    """The one of least time a sample; of equals the smaller micro batch."""
    return min(trials, key=lambda trial: trial.seconds_per_sample)


def make_problem(request: PlanRequest, note_estimate: NoteEstimate = _ignore) -> tuple[Problem, PlanEstimates | None]:
    """The request with what a plan of it is sought with, and the estimates; None where `fixed_sizes` take their place.

    Raises ValueError where the planner does not know the model, the layout does not go with it, or it cannot have a
    written value.
    """
    run = request.run
    _check(run)
    values = _list_values(run)
    estimates = None
    if request.fixed_sizes:
        count_fixed_bytes = read_fixed_bytes(request.fixed_sizes, run.pipeline_parallel)
    else:
        estimates = PlanEstimates(run, values, note_estimate)
        count_fixed_bytes = estimates.count_fixed_bytes
        values["loss"] = (estimates.choose_loss(values["loss"]),)
    return Problem(**vars(request), count_fixed_bytes=count_fixed_bytes, values=values), estimates


def _check(run: Run) -> None:
    shape, tempo = run.model, run.tempo
    if shape.family == "t5":
        raise ValueError("the planner does not support T5; give a GPT or a BERT")
    if tempo.layers:
        raise ValueError(
            "tempo.layers is given, and a plan gives the layers their values; leave it out, or leave the budget out"
        )


def _list_values(run: Run) -> dict[str, tuple[str, ...]]:
    """Operation -> the values that the model may have, stock first: of two that cost and keep the same it stays.

    Raises ValueError where it cannot have a written one.
    """
    refuse_written(build_transformer_config(run.model, dtype=run.dtype), run.tempo)
    written = {name: getattr(run.tempo, name) for name in CHOICES}
    return {name: values if written[name] == "auto" else (written[name],) for name, values in list_values(run).items()}


def read_fixed_bytes(sizes: Sequence[int], pipeline_parallel: int) -> CountFixedBytes:
    """What --fixed-memory says. Raises ValueError unless there is one size, or one for each stage."""
    if len(sizes) not in (1, pipeline_parallel):
        raise ValueError(
            f"--fixed-memory has {len(sizes)} sizes; expected one, or one for each of --pp {pipeline_parallel}"
        )

    def count_fixed_bytes(stage: int, loss: str) -> FixedBytes:
        size = sizes[stage if len(sizes) > 1 else 0]
        return FixedBytes(size, size)

    return count_fixed_bytes


class PlanEstimates:
    """The estimates of one model and layout.

    Args:
        run: whose recomputation is left out of account.
        values: operation -> the values that the model can have.
        note_estimate: called after each estimate.
    """

    def __init__(self, run: Run, values: Mapping[str, Sequence[str]], note_estimate: NoteEstimate = _ignore) -> None:
        self._run, self._note_estimate = run, note_estimate
        known: dict[str, Any] = {name: value for name, value in _REFERENCE.items() if value in values[name]}
        self._reference = dataclasses.replace(TempoConfig.off(), **known)
        self.estimate = functools.cache(self._estimate)

    def choose_loss(self, forms: Sequence[str]) -> str:
        """The form of the loss head with which the last stage needs less; of equals the first."""
        return min(forms, key=lambda form: self._estimate_reference(form, ())[-1].peak_bytes)

    def count_fixed_bytes(self, stage: int, loss: str) -> FixedBytes:
        """What the estimates of the model in Tempo's forms have beyond what its layers keep.

        Both estimates, without recomputation and with all layers recomputed as a whole, are the higher of two moments:
        in the loss head, and in a layer's backward, where the recomputed layer is there once more.
        """
        plain, full = (
            self._estimate_reference(loss, recompute)[stage].peak_bytes - self._count_kept(stage, recompute)
            for recompute in ((), ("full",))
        )
        again = measure_rows(self._run, ()).count(self._reference)
        return FixedBytes(in_layers=min(plain, full - again), at_head=plain)

    def estimate_plan(self, plan: Plan) -> list[int]:
        """The peak of each stage of a plan, or a bound that is no lower.

        The estimate knows layers that are all recomputed as a whole, or none. Where a plan recomputes the first N of a
        stage, each moment of its step is one of these two: before the backward of the first N begins it is that of the
        step without recomputation, less what the N do not keep; after it, that of the step in which all are recomputed,
        with what the others keep of the micro batches that wait. The higher of the two peaks is no lower than the
        plan's.
        """
        config, per_stage = TempoConfig.from_dict(plan.block), len(plan.stages[0].layers)
        recompute = () if plan.num_full else tuple(sorted(plan.recompute))
        peaks = [each.peak_bytes for each in self.estimate(config, recompute)] if plan.num_full < per_stage else None
        full = [each.peak_bytes for each in self.estimate(config, ("full",))] if plan.num_full else None
        found = []
        for index, stage in enumerate(plan.stages):
            kept = [measure_rows(self._run, choice.recompute).count(choice.make_config()) for choice in stage.choices]
            plain = [measure_rows(self._run, ()).count(choice.make_config()) for choice in stage.choices]
            candidates = []
            of_full, angles = slice(plan.num_full), measure_rows(self._run, plan.recompute).stack_bytes
            if peaks is not None:
                saved = sum(plain[of_full]) - sum(kept[of_full]) - (angles if plan.num_full else 0)
                candidates.append(peaks[index] - stage.in_flight * saved)
            if full is not None:
                # With all of its layers recomputed a stage keeps as much of each as of its first.
                more = sum(kept[plan.num_full :]) - len(kept[plan.num_full :]) * kept[0]
                candidates.append(full[index] + (stage.in_flight - 1) * more)
            found.append(max(candidates) + stage.in_flight * self._count_unseen(stage.choices))
        return found

    def _count_unseen(self, choices: Sequence[LayerChoice]) -> int:
        """What FlashAttention 2 keeps twice, of which the estimate does not know."""
        return sum(count_second_output(self._run, choice.values, choice.recompute) for choice in choices)

    def _estimate_reference(self, loss: str, recompute: tuple[str, ...]) -> tuple[RankEstimate, ...]:
        return self.estimate(dataclasses.replace(self._reference, loss=loss), recompute)

    def _estimate(self, config: TempoConfig, recompute: tuple[str, ...]) -> tuple[RankEstimate, ...]:
        run = dataclasses.replace(self._run, tempo=config, recompute=recompute, recompute_num_layers=None)
        found = estimate_ranks(run)
        self._note_estimate()
        return found

    def _count_kept(self, stage: int, recompute: tuple[str, ...]) -> int:
        """What the reference's layers keep of all micro batches in flight."""
        stages, rows = self._run.pipeline_parallel, measure_rows(self._run, recompute)
        in_flight = min(stages - stage, self._run.num_micro_batches or stages)
        return in_flight * (self._run.model.num_layers // stages * rows.count(self._reference) + rows.stack_bytes)
