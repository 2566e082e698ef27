"""Plans what each layer keeps, so that every pipeline stage fits into its memory and a step is as short as possible.

A layer may have any values of the operations that its model can have. Megatron's recomputation is the whole model's:
some modules of every layer, or the first N layers of every stage as a whole (`--recompute-method block`). The loss head
takes the form that needs less at the peak of the last stage, because neither form computes a product twice.

The search is greedy. Of the undominated options of a layer (`choices`) it takes two, and gives the one that keeps more
to as many layers of a stage as fit. It tries every two, for all stages alike and for each stage by itself, and takes
the fewest kinds of layers that cost no more than 0.5 % of the step, since a person reads the config. Each plan is then
played by the estimate (`estimate_ranks`); what that finds beyond the search's own figure is added to the fixed bytes,
and the search goes on until the shortest plan that it finds is one that fits.

`MemoryPlan.gap_seconds` bounds what is lost: no choice of any number of kinds is shorter by more, by the same prices
and bytes. The bound is that of fractions of layers, which may have any two options.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tempo_megatron.memory.plan.choices import (
    LayerChoice,
    LayerOption,
    LayerOptions,
    LayerRows,
    Values,
    count_recomputed_flops,
    count_window_bytes,
    list_values,
    measure_rows,
    replace_value,
    write_block,
)
from tempo_megatron.memory.plan.flops import count_head_flops, count_idle_weights
from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.plan.search import Mode, Stage, count_peak
from tempo_megatron.memory.rank.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS
from tempo_megatron.settings.operations import INPUT
from tempo_megatron.words.argument_types import format_bytes

RECOMPUTED = frozenset(("core_attn", "mlp", "moe", "mla_up_proj", "full"))
"""Every name of Megatron's recomputation that the planner knows."""
_MAX_PLAYED = 16
_REFERENCE = {"activation": "inplace", "norm": "inplace", "dropout": "recompute", "attention": "flash"}
NoteEstimate = Callable[[], object]


class NothingFitsError(ValueError):
    """No plan fits into the memory that is given."""

    least_bytes: int
    """What the plan that needs least needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is to be planned. Raises ValueError where the stages cannot have equally many layers."""

    run: Run
    """The values of its `tempo` that are "auto" are planned; the others stay."""
    gpu: Gpu
    recompute: frozenset[str] | None = RECOMPUTED
    """What Megatron may recompute; None: it recomputes what the run says."""
    remedy: str = ""
    """What a user can do where nothing fits."""
    fixed_sizes: tuple[int, ...] = ()
    """What a GPU holds whatever its layers keep, one size or one for each stage; empty: it is estimated."""
    host_bytes: int = 0
    """What the host has for what the layers of one GPU send there; 0: nothing is sent."""
    counts_reserved: bool = False
    """Whether a plan's peak is what torch's caching allocator takes from the device, not the tensors alone."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run", dataclasses.replace(self.run, chip=self.gpu.chip or self.run.chip))
        num_layers, num_stages, sizes = self.run.model.num_layers, self.run.layout.pp, self.fixed_sizes
        if num_layers % num_stages:
            raise ValueError(
                f"{num_stages} pipeline stages do not divide the model's {num_layers} layers; give a divisor"
            )
        if len(sizes) not in (0, 1, num_stages):
            raise ValueError(
                f"--fixed-memory has {len(sizes)} sizes; expected one, or one for each of {num_stages} stages"
            )
        object.__setattr__(self, "fixed_sizes", sizes * num_stages if len(sizes) == 1 else sizes)

    @property
    def layers_of_stage(self) -> int:
        return self.run.model.num_layers // self.run.layout.pp

    @property
    def num_full(self) -> int | None:
        """How many layers of each stage full recomputation takes; None: any number."""
        number = self.run.recompute_num_layers or self.layers_of_stage
        return None if self.recompute is not None else min(number, self.layers_of_stage)

    def list_modes(self) -> list[frozenset[str]]:
        """What Megatron may recompute together in a plan: modules that have one in each layer, or whole layers."""
        if self.recompute is None:
            return [frozenset(self.run.recompute)]
        attention = "mla_up_proj" if self.run.model.multi_latent_attention else "core_attn"
        mlp = "mlp" if self.run.model.num_experts is None else "moe"
        every = ((), (attention,), (mlp,), (attention, mlp), ("full",))
        return [frozenset(each) for each in every if self.recompute.issuperset(each)]


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
    gap_seconds: float = 0.0
    """Of one micro batch on the slowest stage: by no more is any plan shorter that fits, by the planner's figures."""

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


class _Pick(NamedTuple):
    """What the search takes in one mode, and the seconds of one micro batch on the slowest stage."""

    mode: Mode
    seconds: float
    num_full: int
    stages: list[list[LayerOption]]


class Planner:
    """Searches the plans of a request, and plays them.

    Args:
        request: what is planned.
        note_estimate: called after each estimate of a step.
        tolerance: the share of a step that fewer kinds of layers may cost.

    Raises ValueError where the planner does not know the model, the layout does not fit it, or it cannot have a value
    that was written.
    """

    measure: Callable[[Run], LayerRows] = staticmethod(measure_rows)
    """Gives the rows of a run's layers, by which choices are priced."""

    def __init__(
        self, request: PlanRequest, note_estimate: NoteEstimate = lambda: None, *, tolerance: float = 0.005
    ) -> None:
        self.request, self._note_estimate, self._tolerance = request, note_estimate, tolerance
        run, num_stages = request.run, request.run.layout.pp
        self.num_micro_batches = run.num_micro_batches or num_stages
        """Of a step, on one data-parallel rank."""
        self.values = list_values(run)
        self._options = LayerOptions(run, request.gpu, self.measure)
        self._estimate = functools.cache(self._estimate_once)
        # 1F1B runs one ahead for each stage behind.
        self._in_flight = [min(num_stages - stage, self.num_micro_batches) for stage in range(num_stages)]
        self._loss, self._fixed = self.values["loss"][0], [(size, size) for size in request.fixed_sizes]
        if not self._fixed:
            self._loss, self._fixed = self._estimate_fixed()
        self._stages = [self._make_stage(index) for index in range(num_stages)]
        self._columns = Stage(*np.array(self._stages, float).T[:, :, None, None])
        self._plain_modes = {each: self._make_mode(each, 0) for each in request.list_modes()}
        self._modes = [*self._plain_modes.values()]
        if request.host_bytes:
            window_bytes = count_window_bytes(request.gpu, self._options.seconds(self._options.flops.total))
            self._modes += [self._make_mode(each, window_bytes) for each in request.list_modes()]

    def compute_step_seconds(self, plan: MemoryPlan) -> float:
        """The time of a step, filling and draining of its pipeline included."""
        return plan.seconds * (self.num_micro_batches + len(self._stages) - 1)

    def compute_sample_seconds(self, plan: MemoryPlan) -> float:
        """The same, for one of a data-parallel rank's samples."""
        return self.compute_step_seconds(plan) / (self.num_micro_batches * self.request.run.micro_batch_size)

    def plan(self, budget: int) -> MemoryPlan:
        """The plan with the shortest step of those in which each GPU holds at most `budget` bytes.

        Raises NothingFitsError, which says by how much and names the plan that needs least.
        """
        played: dict[str, MemoryPlan] = {}
        rest = list(self._modes)

        def take(mode: Mode, plan: MemoryPlan) -> bool:
            """Play a plan, and correct its mode; returns whether it is a new one."""
            key = repr((plan.block, plan.megatron_arguments))
            if key in played:
                return False
            stages = [*zip(plan.stages, self.play(plan), strict=True)]
            mode.fixed_bytes = mode.fixed_bytes + [peak - stage.peak_bytes for stage, peak in stages]
            checked = (dataclasses.replace(stage, peak_bytes=peak) for stage, peak in stages)
            played[key] = dataclasses.replace(plan, stages=tuple(checked))
            return True

        def get_best() -> MemoryPlan | None:
            fitting = [plan for plan in played.values() if plan.peak_bytes <= budget]
            return min(fitting, key=lambda plan: plan.seconds, default=None)

        while rest and len(played) < _MAX_PLAYED:
            pick, best = self._pick_shortest(rest, budget), get_best()
            if pick is None or (best is not None and pick.seconds >= best.seconds):
                break
            if not take(pick.mode, self._describe(pick.mode, pick.num_full, self._prefer_stock(pick.stages))):
                rest.remove(pick.mode)
        if get_best() is None:
            for plan in self._descend(played):
                take(self._plain_modes[frozenset(plan.recompute)], plan)
        best = get_best()
        if best is None:
            least = min(played.values(), key=lambda plan: plan.peak_bytes)
            words = " ".join(least.megatron_arguments) or "no recomputation by Megatron"
            error = NothingFitsError(
                f"{format_bytes(budget)} a GPU may be filled, and the least that fits is "
                f"{format_bytes(least.peak_bytes)}, {format_bytes(least.peak_bytes - budget)} more: "
                f"{least.tempo.describe()}, {words}" + (f"; {self.request.remedy}" if self.request.remedy else "")
            )
            error.least_bytes = least.peak_bytes
            raise error
        bound = min(mode.bound(self._columns, budget, self.request.layers_of_stage) for mode in self._modes)
        return dataclasses.replace(best, gap_seconds=max(0.0, best.seconds - bound))

    def play(self, plan: MemoryPlan) -> list[int]:
        """The peak of each stage by the estimate; by the search's figures where fixed sizes are given."""
        if self.request.fixed_sizes:
            return [stage.peak_bytes for stage in plan.stages]
        num_layers = plan.num_full if 0 < plan.num_full < self.request.layers_of_stage else None
        ranks = self._estimate(plan.tempo, plan.recompute, num_layers, self.request.counts_reserved)
        return [rank.peak_bytes if rank.reserved_bytes is None else rank.reserved_bytes for rank in ranks]

    def search(self, budget: int) -> MemoryPlan | None:
        """The shortest plan by the search's figures, which nothing has played; None where none fits."""
        pick = self._pick_shortest(self._modes, budget)
        return None if pick is None else self._describe(pick.mode, pick.num_full, pick.stages)

    def _pick_shortest(self, modes: Sequence[Mode], budget: int) -> _Pick | None:
        found = [pick for mode in modes if (pick := self._pick(mode, budget)) is not None]
        return min(found, key=lambda pick: pick.seconds, default=None)

    def _pick(self, mode: Mode, budget: int) -> _Pick | None:
        """The shortest choice of a mode, or one of fewer kinds of layers that costs little more; None: nothing fits."""
        num_layers = self.request.layers_of_stage
        fill = functools.partial(mode.fill, self._columns, budget, self.request.host_bytes, num_layers)
        # For each stage, way to recompute whole layers, and pair of options; behind them each stage's own pair.
        numbers, seconds = (np.stack(each, axis=1) for each in zip(*(fill(*way) for way in mode.ways), strict=True))
        every = np.concatenate((seconds, seconds.min(axis=2, keepdims=True)), axis=2)
        slowest, total = every.max(axis=0), every.sum(axis=0)
        limit = slowest.min() * (1 + self._tolerance)
        if limit == math.inf:
            return None
        # What layers have that are recomputed as a whole is a kind of its own where no others have it.
        others = np.array([full is not mode.ways[0][1] for _, full in mode.ways])[:, None]
        kinds = np.where(slowest <= limit, np.append(2 - mode.is_single, 3) + others, math.inf)
        place = np.lexsort((total.ravel(), slowest.ravel(), kinds.ravel()))[0]
        way, pair = divmod(int(place), len(mode.is_single) + 1)
        pairs = seconds[:, way].argmin(axis=1) if pair == len(mode.is_single) else [pair] * len(self._stages)
        num_full, full = mode.ways[way]
        layers = []
        for stage, each in enumerate(pairs):
            first, second, number = mode.first[each], mode.second[each], int(numbers[stage, way, each])
            of_second = [mode.options[second]] * (num_layers - num_full - number)
            layers.append([full[second]] * num_full + [mode.options[first]] * number + of_second)
        return _Pick(mode, float(slowest[way, pair]), num_full, layers)

    def make_alike(self, values: Values, recompute: frozenset[str]) -> MemoryPlan:
        """The plan in which all layers have the same values; "full" recomputes as many of them as it may."""
        num_layers, layers = self.request.layers_of_stage, []
        number = (self.request.num_full or num_layers) if "full" in recompute else 0
        for each, times in ((recompute, number), (recompute - {"full"}, num_layers - number)):
            layers += self._options.make(each, [values]) * times
        return self._describe(self._plain_modes[recompute], number, [layers] * len(self._stages))

    def list_smallest(self) -> list[MemoryPlan]:
        """The plan that needs least of each mode, of those in which all layers are alike and none sends anything."""
        found = []
        for recompute, mode in self._plain_modes.items():
            plans = [self.make_alike(option.choice.values, recompute) for option in mode.options]
            found.append(min(plans, key=lambda plan: (plan.peak_bytes, plan.seconds)))
        return found

    def make_smallest(self) -> MemoryPlan:
        """The one of these that needs least."""
        return min(self.list_smallest(), key=lambda plan: plan.peak_bytes)

    def _descend(self, played: Mapping[str, MemoryPlan]) -> Iterator[MemoryPlan]:
        """Yields plans to play where none of those `played` until then fits, towards the one that needs least.

        Rows count what layers keep, but not what an operation's backward makes for itself, which decides once little
        is kept. So try the smallest plan of each mode; then, from the best plan on, each value of each operation, that
        of attention first, whose backward makes most.
        """
        yield from self.list_smallest()
        for operation in sorted(LAYER_OPERATIONS, key=lambda name: name != "attention"):
            for value in self.values[operation]:
                best = min(played.values(), key=lambda plan: plan.peak_bytes)
                recompute = frozenset(best.recompute)
                values = replace_value(best.stages[0].choices[-1].values, operation, value)
                if self._options.rows.is_possible(recompute, values):
                    yield self.make_alike(values, recompute)

    def _make_mode(self, recompute: frozenset[str], window_bytes: int) -> Mode:
        """Layers may send so many bytes to the host at a time."""
        is_full, stack_bytes = "full" in recompute, self._options.rows.count_stack(recompute)
        fixed_bytes = [of + m * stack_bytes for (of, _), m in zip(self._fixed, self._in_flight, strict=True)]
        options = self._options.make_ladder(frozenset() if is_full else recompute, self.values, window_bytes)
        if not is_full:
            return Mode(recompute, options, [], [], fixed_bytes)
        alike = self._options.make(recompute, [option.choice.values for option in options])
        cheapest = min(alike, key=lambda option: (option.seconds, option.replay_bytes))
        fulls = [alike, [cheapest] * len(alike)]
        moved = self._options.rows.list_movable(cheapest.choice).get(INPUT, 0)
        if 0 < moved <= window_bytes:
            fulls += [[self._options.move(option, INPUT, moved) for option in each] for each in fulls]
        number = self.request.num_full
        numbers = range(1, self.request.layers_of_stage + 1) if number is None else [number]
        return Mode(recompute, options, fulls, numbers, fixed_bytes)

    def _make_stage(self, index: int) -> Stage:
        """A stage as the search sees it."""
        run, flops, num_layers = self.request.run, self._options.flops, self.request.layers_of_stage
        in_layers, at_head = self._fixed[index]
        head_flops = count_head_flops(run) if index == run.layout.pp - 1 else 0
        # The products of a linear are two operations a token and weight.
        tokens = run.model.seq_length * run.micro_batch_size // run.layout.cp
        num_weights = (num_layers * flops.linears + head_flops) // (2 * tokens) + num_layers * count_idle_weights(run)
        # Forward and backward read each weight, and backward adds its gradient to a float32 sum.
        weight_bytes = num_weights * (2 * run.dtype.itemsize + 2 * 4)
        # Backward computes two products for each of forward's.
        seconds = self._options.seconds(3 * (num_layers * flops.total + head_flops), weight_bytes)
        return Stage(self._in_flight[index], max(0, at_head - in_layers), seconds)

    def _prefer_stock(self, stages: Sequence[Sequence[LayerOption]]) -> list[list[LayerOption]]:
        """The same layers, with stock's value wherever all that have another one take and keep as much with it."""
        current = {option: option for options in stages for option in options}
        for option in current:
            # Rows that are measured together take less time.
            names = [(name, value) for name in LAYER_OPERATIONS for value in self.values[name][:-1]]
            self._options.make(option.choice.recompute, [replace_value(option.choice.values, *each) for each in names])
        for operation in LAYER_OPERATIONS:
            for earlier, value in itertools.combinations(self.values[operation], 2):
                having = [key for key, option in current.items() if option.choice.list_values()[operation] == value]
                found = [self._replace(current[key], operation, earlier) for key in having]
                if None not in found:
                    current |= {key: option for key, option in zip(having, found, strict=True) if option is not None}
        return [[current[option] for option in options] for options in stages]

    def _replace(self, option: LayerOption, operation: str, value: str) -> LayerOption | None:
        """The option with another value; None where it is not possible, or is in anything worse or another one."""
        choice, options = option.choice, self._options
        values = replace_value(choice.values, operation, value)
        if not options.rows.is_possible(choice.recompute, values):
            return None
        (found,) = options.make(choice.recompute, [values])
        if option.moved_bytes:
            if options.rows.list_movable(found.choice) != options.rows.list_movable(choice):
                return None
            found = options.move(found, choice.offload, option.moved_bytes)
        is_alike = found.kept_bytes <= option.kept_bytes and found.replay_bytes <= option.replay_bytes
        return found if is_alike and found.seconds <= option.seconds * (1 + 1e-12) else None

    def _describe(self, mode: Mode, num_full: int, stages: Sequence[Sequence[LayerOption]]) -> MemoryPlan:
        recompute, num_layers = tuple(sorted(mode.recompute)), self.request.layers_of_stage
        words: tuple[str, ...] = ()
        if num_full:
            words = ("full", "--recompute-method", "block", "--recompute-num-layers", str(num_full))
        elif recompute:
            words = ("selective", "--recompute-modules", *recompute)
        of_stages = []
        for index, (stage, layers) in enumerate(zip(self._stages, stages, strict=True)):
            # Nothing runs behind the last layer while it would send something.
            options = [*layers[:-1], layers[-1].keep_all()]
            groups = [(1, option) for option in options]
            peak_bytes = mode.fixed_bytes[index] + count_peak(stage, groups[:num_full], groups[num_full:])
            moved = sum(option.moved_bytes for option in options)
            added = sum(option.seconds for option in options)
            kept_bytes = sum(option.kept_bytes for option in options)
            of_stages.append(
                StagePlan(
                    layers=range(index * num_layers, (index + 1) * num_layers),
                    choices=tuple(option.choice for option in options),
                    in_flight=stage.in_flight,
                    peak_bytes=int(peak_bytes),
                    kept_bytes=self._options.rows.count_stack(mode.recompute) + kept_bytes,
                    recomputed_flops=sum(count_recomputed_flops(self._options.flops, each.choice) for each in options),
                    seconds=stage.base_seconds + added,
                    added_seconds=added,
                    moved_bytes=moved,
                    host_bytes=stage.in_flight * moved,
                )
            )
        return MemoryPlan(
            recompute=recompute,
            num_full=num_full,
            block=write_block([choice for stage in of_stages for choice in stage.choices], self._loss),
            megatron_arguments=("--recompute-granularity", *words) if words else (),
            stages=tuple(of_stages),
        )

    def _estimate_fixed(self) -> tuple[str, list[tuple[int, int]]]:
        """The form of the loss head with which the last stage needs less; and for each stage what the estimates of a
        reference run count beyond what its layers keep, in a layer's backward and in the loss head.

        Each peak is the higher of two moments: in the loss head, and in a layer's backward, where a layer that is
        recomputed exists once more. So there are two estimates, without and with full recomputation.
        """
        known: dict[str, Any] = {name: value for name, value in _REFERENCE.items() if value in self.values[name]}
        reference = dataclasses.replace(TempoConfig.off(), **known)
        values = tuple(getattr(reference, name) for name in LAYER_OPERATIONS)
        forms = {form: dataclasses.replace(reference, loss=form) for form in self.values["loss"]}
        loss = min(forms, key=lambda form: self._estimate(forms[form], (), None, False)[-1].peak_bytes)

        rows, around = self._options.rows, []
        for recompute in ((), ("full",)):
            (of_layer,) = rows.count(frozenset(recompute), [values])
            kept = self.request.layers_of_stage * of_layer + rows.count_stack(frozenset(recompute))
            ranks = self._estimate(forms[loss], recompute, None, False)
            around.append([rank.peak_bytes - m * kept for rank, m in zip(ranks, self._in_flight, strict=True)])
        (again,) = rows.count(frozenset(), [values])
        return loss, [(min(plain, full - again), plain) for plain, full in zip(*around, strict=True)]

    def _estimate_once(
        self, tempo: TempoConfig, recompute: tuple[str, ...], num_layers: int | None, counts_reserved: bool
    ) -> tuple[RankEstimate, ...]:
        run = dataclasses.replace(self.request.run, tempo=tempo, recompute=recompute, recompute_num_layers=num_layers)
        found = estimate_ranks(run, simulates_allocator=counts_reserved)
        self._note_estimate()
        return found


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
    request: PlanRequest, budget: int, samples_per_rank: int | None, note_estimate: NoteEstimate
) -> list[tuple[Planner, MemoryPlan]]:
    """One plan for each micro batch size that fits `budget`, smallest first. Stop at the first size that does not fit:
    larger ones need more. `samples_per_rank` are those of a step, where they are known.

    Raises the NothingFitsError of the smallest size where not even that fits.
    """
    found: list[tuple[Planner, MemoryPlan]] = []
    for size in list_micro_batches(samples_per_rank):
        number = request.run.num_micro_batches if samples_per_rank is None else samples_per_rank // size
        run = dataclasses.replace(request.run, micro_batch_size=size, num_micro_batches=number)
        planner = Planner(dataclasses.replace(request, run=run), note_estimate)
        try:
            found.append((planner, planner.plan(budget)))
        except NothingFitsError:
            if not found:
                raise
            break
    return found
