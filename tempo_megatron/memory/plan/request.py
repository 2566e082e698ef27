"""Builds the planner's request from a model, its layout and the allowed choices, and estimates around it.

A plan is sought with the bytes that measured rows give for each layer, thousands of times a second. The estimate, which
follows the whole step and takes a second or more, gives what stands around the layers, once, and then the peak of the
plan that was found (`tempo_megatron.memory.plan.verify`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tempo_megatron.memory.estimate.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.plan.kept_rows import count_second_output, list_values, measure_rows
from tempo_megatron.memory.plan.planner import CountFixedBytes, FixedBytes, LayerChoice, Plan, PlanRequest
from tempo_megatron.memory.run import Run
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import CHOICES
from tempo_megatron.slots.choose import refuse_written

_REFERENCE = {"activation": "inplace", "norm": "inplace", "dropout": "recompute", "attention": "flash"}


RECOMPUTED = frozenset(("core_attn", "mlp", "full"))
"""All of Megatron's recomputation that the planner knows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be planned."""

    run: Run
    """What of its `tempo` is "auto" is planned, and any other value stays."""
    gpu: Gpu
    recompute: frozenset[str] | None = RECOMPUTED
    """What Megatron may recompute; None is what the run says, no more and no less."""
    remedy: str = PlanRequest.remedy
    """What a user can do where nothing fits."""
    fixed_sizes: tuple[int, ...] = ()
    """What the GPUs hold whatever the layers keep, of all stages or of each; empty is to be estimated."""


def make_plan_request(question: Question) -> tuple[PlanRequest, PlanEstimates | None]:
    """What the planner is asked, and the estimates; None where `fixed_sizes` take their place.

    Raises ValueError where the planner does not know the model, the layout does not go with it, or it cannot have a
    written value.
    """
    run = question.run
    _check(run)
    values = _list_values(run)
    estimates = None
    if question.fixed_sizes:
        count_fixed_bytes = read_fixed_bytes(question.fixed_sizes, run.pipeline_parallel)
    else:
        estimates = PlanEstimates(run, values)
        count_fixed_bytes = estimates.count_fixed_bytes
        values["loss"] = (estimates.choose_loss(values["loss"]),)
    request = PlanRequest(
        run=run,
        gpu=question.gpu,
        count_fixed_bytes=count_fixed_bytes,
        values=values,
        recompute=frozenset(run.recompute) if question.recompute is None else question.recompute,
        keeps_recompute=question.recompute is None,
        num_full=_count_full(run) if question.recompute is None else None,
        remedy=question.remedy,
    )
    return request, estimates


def _count_full(run: Run) -> int | None:
    """How many layers of each stage a run recomputes as a whole; None where it recomputes none so."""
    if "full" not in run.recompute:
        return None
    per_stage = run.model.num_layers // run.pipeline_parallel
    return per_stage if run.recompute_num_layers is None else min(run.recompute_num_layers, per_stage)


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
    """

    def __init__(self, run: Run, values: Mapping[str, Sequence[str]]) -> None:
        self._run = run
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
        return estimate_ranks(run)

    def _count_kept(self, stage: int, recompute: tuple[str, ...]) -> int:
        """What the reference's layers keep of all micro batches in flight."""
        stages, rows = self._run.pipeline_parallel, measure_rows(self._run, recompute)
        in_flight = min(stages - stage, self._run.num_micro_batches or stages)
        return in_flight * (self._run.model.num_layers // stages * rows.count(self._reference) + rows.stack_bytes)
