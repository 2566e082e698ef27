"""Plans what each layer keeps, so that every pipeline stage fits into its memory and a step is as short as possible.

A layer may have any values of the operations that its model can have. Megatron's recomputation is the whole model's:
none; `core_attn`, `mlp` or both in every layer (`mla_up_proj` with latent attention, `moe` with experts); or the first
N layers of every stage as a whole (`--recompute-method block`). The loss head takes the form that needs less at the
peak of the last stage, because neither form computes a product twice.

The search is greedy. Of the undominated options of a layer (`choices`) it takes two, one that keeps more and one that
costs more, and gives the first to as many layers of a stage as fit. It tries every two, for all stages alike and for
each stage by itself, and takes the fewest kinds of layers that cost no more than 0.5 % of the step, since a person
reads the config. Each plan is then played by the estimate (`estimate_ranks`); what that finds beyond the search's own
figure is added to the fixed bytes, and the search goes on until the shortest plan that it finds is one that fits.

`MemoryPlan.gap_seconds` bounds what is lost: no choice of any number of kinds is shorter by more, by the same prices
and bytes. The bound is that of fractions of layers, which may have any two options.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tempo_megatron.memory.plan.choices import (
    LayerChoice,
    LayerOption,
    LayerPrices,
    Values,
    count_window_bytes,
    list_values,
    make_ladder,
    make_options,
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
        num_layers, num_stages = self.run.model.num_layers, self.run.layout.pp
        if num_layers % num_stages:
            raise ValueError(
                f"{num_stages} pipeline stages do not divide the model's {num_layers} layers; give a divisor"
            )

    @property
    def layers_of_stage(self) -> int:
        return self.run.model.num_layers // self.run.layout.pp

    @property
    def num_full(self) -> int | None:
        """How many layers of each stage full recomputation takes; None: any number."""
        number = self.run.recompute_num_layers or self.layers_of_stage
        return None if self.recompute is not None else min(number, self.layers_of_stage)

    def list_modes(self) -> list[frozenset[str]]:
        """What Megatron may recompute together in a plan."""
        if self.recompute is None:
            return [frozenset(self.run.recompute)]
        return [each for each in list_recomputations(self.run) if self.recompute.issuperset(each)]


def list_recomputations(run: Run) -> list[frozenset[str]]:
    """What Megatron may recompute together in a model: modules that have one in each layer, or whole layers."""
    attention = "mla_up_proj" if run.model.multi_latent_attention else "core_attn"
    mlp = "mlp" if run.model.num_experts is None else "moe"
    return [frozenset(each) for each in ((), (attention,), (mlp,), (attention, mlp), ("full",))]


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

    @property
    def recomputed_flops(self) -> int:
        return sum(stage.recomputed_flops for stage in self.stages)


def make_plan(request: PlanRequest, budget: int, note_estimate: NoteEstimate = lambda: None) -> MemoryPlan:
    """The plan with the shortest step of those in which each GPU holds at most `budget` bytes.

    `note_estimate` is called after each estimate of a step.

    Raises:
        NothingFitsError: says by how much, and names the plan that needs least.
        ValueError: where the planner does not know the model, the layout does not fit it, or it cannot have a value
            that was written.
    """
    return Planner(request, note_estimate).plan(budget)


def make_smallest_plan(request: PlanRequest) -> MemoryPlan:
    """The plan that needs least of those in which all layers are alike. Raises ValueError as `make_plan`."""
    return min(Planner(request).list_smallest(), key=lambda plan: plan.peak_bytes)


def count_in_flight(run: Run, stage: int) -> int:
    """The most micro batches of which a stage holds activations: 1F1B runs one ahead for each stage behind it."""
    return min(run.layout.pp - stage, run.num_micro_batches or run.layout.pp)


class _Pick(NamedTuple):
    """What the search takes in one mode."""

    mode: Mode
    seconds: float
    """Of one micro batch on the slowest stage."""
    num_full: int
    stages: list[list[LayerOption]]


class Planner:
    """Searches the plans of a request, and plays them. Raises ValueError as `make_plan`.

    `tolerance` is the share of a step that fewer kinds of layers may cost.
    """

    def __init__(
        self, request: PlanRequest, note_estimate: NoteEstimate = lambda: None, *, tolerance: float = 0.005
    ) -> None:
        self.request, self._note_estimate, self._tolerance = request, note_estimate, tolerance
        run = request.run
        self.values = list_values(run)
        self._rows = measure_rows(run)
        self._prices = LayerPrices(run, request.gpu)
        self._estimate = functools.cache(self._estimate_once)
        self._loss, self._fixed = self._read_fixed() if request.fixed_sizes else self._estimate_fixed()
        self._modes = [
            self._make_mode(recompute, moves=moves)
            for moves in sorted({False, request.host_bytes > 0})
            for recompute in request.list_modes()
        ]

    @property
    def num_micro_batches(self) -> int:
        """Of a step, on one data-parallel rank."""
        return self.request.run.num_micro_batches or self.request.run.layout.pp

    def compute_step_seconds(self, plan: MemoryPlan) -> float:
        """The time of a step, filling and draining of its pipeline included."""
        return plan.seconds * (self.num_micro_batches + self.request.run.layout.pp - 1)

    def compute_sample_seconds(self, plan: MemoryPlan) -> float:
        """The same, for one of a data-parallel rank's samples."""
        return self.compute_step_seconds(plan) / (self.num_micro_batches * self.request.run.micro_batch_size)

    def plan(self, budget: int) -> MemoryPlan:
        """The plan with the shortest step that fits. Raises NothingFitsError where none does."""
        played: list[MemoryPlan] = []
        seen: set[str] = set()
        rest = list(self._modes)

        def take(mode: Mode, plan: MemoryPlan) -> bool:
            """Play a plan, and correct its mode; returns whether it is a new one."""
            key = repr((plan.block, plan.megatron_arguments))
            if key in seen:
                return False
            seen.add(key)
            peaks = self.play(plan)
            before = mode.corrections or (0,) * len(peaks)
            stages = [*zip(before, peaks, plan.stages, strict=True)]
            mode.corrections = tuple(known + peak - stage.peak_bytes for known, peak, stage in stages)
            checked = [dataclasses.replace(stage, peak_bytes=peak) for _, peak, stage in stages]
            played.append(dataclasses.replace(plan, stages=tuple(checked)))
            return True

        def get_best() -> MemoryPlan | None:
            fitting = [plan for plan in played if plan.peak_bytes <= budget]
            return min(fitting, key=lambda plan: plan.seconds, default=None)

        while rest and len(played) < _MAX_PLAYED:
            pick, best = self._pick_shortest(rest, budget), get_best()
            if pick is None or (best is not None and pick.seconds >= best.seconds):
                break
            if not take(pick.mode, self._describe(pick.mode, pick.num_full, self._prefer_stock(pick.stages))):
                rest.remove(pick.mode)
        if get_best() is None:
            for mode, plan in self._descend(played):
                take(mode, plan)
        best = get_best()
        if best is None:
            least = min(played, key=lambda plan: plan.peak_bytes)
            words = " ".join(least.megatron_arguments) or "no recomputation by Megatron"
            error = NothingFitsError(
                f"{format_bytes(budget)} a GPU may be filled, and the least that fits is "
                f"{format_bytes(least.peak_bytes)}, {format_bytes(least.peak_bytes - budget)} more: "
                f"{least.tempo.describe()}, {words}" + (f"; {self.request.remedy}" if self.request.remedy else "")
            )
            error.least_bytes = least.peak_bytes
            raise error
        bound = min(
            max(mode.bound(stage, budget - stage.fixed_bytes) for stage in self._make_stages(mode))
            for mode in self._modes
        )
        return dataclasses.replace(best, gap_seconds=max(0.0, best.seconds - bound))

    def play(self, plan: MemoryPlan) -> list[int]:
        """The peak of each stage by the estimate; by the search's figures where fixed sizes are given."""
        if self.request.fixed_sizes:
            return [stage.peak_bytes for stage in plan.stages]
        num_layers = plan.num_full if 0 < plan.num_full < self.request.layers_of_stage else None
        ranks = self._estimate(plan.tempo, plan.recompute, num_layers, self.request.counts_reserved)
        return [rank.peak_bytes if rank.reserved_bytes is None else rank.reserved_bytes for rank in ranks]

    def find(self, budget: int) -> MemoryPlan | None:
        """The shortest plan by the search's figures, which nothing has played; None where none fits."""
        pick = self._pick_shortest(self._modes, budget)
        return None if pick is None else self._describe(pick.mode, pick.num_full, pick.stages)

    def _pick_shortest(self, modes: Sequence[Mode], budget: int) -> _Pick | None:
        found = [pick for mode in modes if (pick := self._pick(mode, budget)) is not None]
        return min(found, key=lambda pick: pick.seconds, default=None)

    def _pick(self, mode: Mode, budget: int) -> _Pick | None:
        """The shortest choice of a mode, or one of fewer kinds of layers that costs little more; None: nothing fits."""
        stages = self._make_stages(mode)
        # Seconds of the slowest stage, of all together, kinds of layers, and what they have.
        found: list[tuple[float, float, int, int, Sequence[LayerOption] | None, list[int]]] = []
        for (place, full), num_full in itertools.product(enumerate(mode.fulls), mode.numbers):
            # What layers have that are recomputed as a whole is a kind of its own where it is not what others have.
            more = int(place > 0)
            seconds = np.array([mode.fill(stage, budget - stage.fixed_bytes, num_full, full)[1] for stage in stages])
            slowest, total = seconds.max(axis=0), seconds.sum(axis=0)
            for kinds, which in ((1, mode.is_single), (2, ~mode.is_single)):
                if which.any():
                    pair = min(map(int, np.flatnonzero(which)), key=lambda each: (slowest[each], total[each]))
                    found.append((slowest[pair], total[pair], kinds + more, num_full, full, [pair] * len(stages)))
            least, own = seconds.min(axis=1), seconds.argmin(axis=1).tolist()
            found.append((least.max(), least.sum(), 3 + more, num_full, full, own))
        limit = min(each[0] for each in found) * (1 + self._tolerance)
        if limit == math.inf:
            return None
        allowed = (each for each in found if each[0] <= limit)
        most, _, _, num_full, full, pairs = min(allowed, key=lambda each: (each[2], each[0], each[1]))
        layers = []
        for stage, pair in zip(stages, pairs, strict=True):
            numbers, _ = mode.fill(stage, budget - stage.fixed_bytes, num_full, full)
            number, first, second = int(numbers[pair]), int(mode.first[pair]), int(mode.second[pair])
            others = [mode.options[first]] * number + [mode.options[second]] * (stage.num_layers - num_full - number)
            layers.append([*([full[second]] * num_full if full else []), *others])
        return _Pick(mode, most, num_full, layers)

    def make_alike(self, values: Values, recompute: frozenset[str]) -> MemoryPlan:
        """The plan in which all layers have the same values; "full" recomputes as many of them as it may."""
        mode = next(mode for mode in self._modes if not mode.moves and mode.recompute == recompute)
        num_layers = self.request.layers_of_stage
        number = (self.request.num_full or num_layers) if "full" in recompute else 0
        options = [self._make_option(LayerChoice(values, each)) for each in (recompute, recompute - {"full"})]
        layers = [options[0]] * number + [options[1]] * (num_layers - number)
        return self._describe(mode, number, [layers] * self.request.run.layout.pp)

    def _make_option(self, choice: LayerChoice) -> LayerOption:
        (option,) = make_options(self._rows, self._prices, [choice])
        return option

    def list_smallest(self) -> list[MemoryPlan]:
        """The plan that needs least of each mode, of those in which all layers are alike and none sends anything."""
        found = []
        for mode in self._modes:
            if not mode.moves:
                plans = [self.make_alike(option.choice.values, mode.recompute) for option in mode.options]
                found.append(min(plans, key=lambda plan: (plan.peak_bytes, plan.seconds)))
        return found

    def _descend(self, played: list[MemoryPlan]) -> Iterator[tuple[Mode, MemoryPlan]]:
        """Yields plans to play where none of those `played` until then fits, towards the one that needs least.

        Rows count what layers keep, but not what an operation's backward makes for itself, which decides once little
        is kept. So try the smallest plan of each mode; then, from the best plan on, each value of each operation, that
        of attention first, whose backward makes most.
        """
        modes = {mode.recompute: mode for mode in self._modes if not mode.moves}
        for plan in self.list_smallest():
            yield modes[frozenset(plan.recompute)], plan
        for operation in sorted(LAYER_OPERATIONS, key=lambda name: name != "attention"):
            for value in self.values[operation]:
                best = min(played, key=lambda plan: plan.peak_bytes)
                recompute = frozenset(best.recompute)
                values = replace_value(best.stages[0].choices[-1].values, operation, value)
                if self._rows.is_possible(recompute, values):
                    yield modes[recompute], self.make_alike(values, recompute)

    def _make_mode(self, recompute: frozenset[str], *, moves: bool) -> Mode:
        is_full, window_bytes = "full" in recompute, 0
        if moves:
            window_bytes = count_window_bytes(self.request.gpu, self._prices.seconds(self._prices.flops.total))
        of_others = frozenset() if is_full else recompute
        options = make_ladder(self._rows, self._prices, of_others, self.values, window_bytes)
        if not is_full:
            return Mode(recompute, options, (), (), moves=moves)
        alike = make_options(self._rows, self._prices, [LayerChoice(each.choice.values, recompute) for each in options])
        cheapest = min(alike, key=lambda option: (option.seconds, option.replay_bytes))
        fulls = [alike, [cheapest] * len(alike)]
        moved = self._rows.list_movable(alike[0].choice).get(INPUT, 0)
        if 0 < moved <= window_bytes:
            fulls += [[self._prices.move(option, INPUT, moved) for option in each] for each in fulls]
        given = self.request.num_full
        numbers = range(1, self.request.layers_of_stage + 1) if given is None else (given,)
        return Mode(recompute, options, fulls, numbers, moves=moves)

    def _make_stages(self, mode: Mode) -> list[Stage]:
        """The stages as the search sees them, with what the estimate has corrected."""
        run, flops, num_layers = self.request.run, self._prices.flops, self.request.layers_of_stage
        tokens = run.model.seq_length * run.micro_batch_size // run.layout.cp
        num_idle = count_idle_weights(run)
        found = []
        for index, (in_layers, at_head) in enumerate(self._fixed):
            head_flops = count_head_flops(run) if index == run.layout.pp - 1 else 0
            # The products of a linear are two operations a token and weight.
            num_weights = (num_layers * flops.linears + head_flops) // (2 * tokens) + num_layers * num_idle
            # Forward and backward read each weight, and backward adds its gradient to a float32 sum.
            weight_bytes = num_weights * (2 * run.dtype.itemsize + 2 * 4)
            m = count_in_flight(run, index)
            correction = mode.corrections[index] if mode.corrections else 0
            found.append(
                Stage(
                    num_layers=num_layers,
                    in_flight=m,
                    fixed_bytes=in_layers + correction + m * self._rows.count_stack(mode.recompute),
                    head_bytes=max(0, at_head - in_layers),
                    # Backward computes two products for each of forward's.
                    base_seconds=self._prices.seconds(3 * (num_layers * flops.total + head_flops), weight_bytes),
                    host_bytes=self.request.host_bytes // m if mode.moves else 0,
                )
            )
        return found

    def _prefer_stock(self, stages: Sequence[Sequence[LayerOption]]) -> list[list[LayerOption]]:
        """The same layers, with stock's value wherever all that have another one take and keep as much with it."""
        current = {option: option for options in stages for option in options}
        # Rows that are measured together take less time.
        variants = collections.defaultdict[frozenset[str], list[Values]](list)
        for option, operation in itertools.product(current, LAYER_OPERATIONS):
            values = (replace_value(option.choice.values, operation, each) for each in self.values[operation][:-1])
            variants[option.choice.recompute] += values
        for recompute, choices in variants.items():
            self._rows.count(recompute, choices)
        for place, operation in enumerate(LAYER_OPERATIONS):
            for value in {option.choice.values[place] for option in current.values()}:
                group = {key: option for key, option in current.items() if option.choice.values[place] == value}
                for earlier in self.values[operation][: self.values[operation].index(value)]:
                    found = {key: self._replace(option, operation, earlier) for key, option in group.items()}
                    if all(found.values()):
                        current |= {key: option for key, option in found.items() if option is not None}
                        break
        return [[current[option] for option in options] for options in stages]

    def _replace(self, option: LayerOption, operation: str, value: str) -> LayerOption | None:
        """The option with another value; None where it is not possible, or is in anything worse or another one."""
        values = replace_value(option.choice.values, operation, value)
        choice = dataclasses.replace(option.choice, values=values)
        if not self._rows.is_possible(choice.recompute, values):
            return None
        found = self._make_option(choice)
        if option.moved_bytes:
            if self._rows.list_movable(choice) != self._rows.list_movable(option.choice):
                return None
            found = self._prices.move(found, option.choice.offload, option.moved_bytes)
        is_alike = found.kept_bytes <= option.kept_bytes and found.replay_bytes <= option.replay_bytes
        return found if is_alike and found.seconds <= option.seconds * (1 + 1e-12) else None

    def _describe(self, mode: Mode, num_full: int, stages: Sequence[Sequence[LayerOption]]) -> MemoryPlan:
        recompute = tuple(sorted(mode.recompute))
        words: tuple[str, ...] = ()
        if num_full:
            words = ("full", "--recompute-method", "block", "--recompute-num-layers", str(num_full))
        elif recompute:
            words = ("selective", "--recompute-modules", *recompute)
        of_stages = []
        for number, (stage, layers) in enumerate(zip(self._make_stages(mode), stages, strict=True)):
            # Nothing runs behind the last layer while it would send something.
            options = [*layers[:-1], self._prices.move(layers[-1], "off", 0)]
            moved = sum(option.moved_bytes for option in options)
            added = sum(option.seconds for option in options)
            choices = tuple(option.choice for option in options)
            of_stages.append(
                StagePlan(
                    layers=range(number * stage.num_layers, (number + 1) * stage.num_layers),
                    choices=choices,
                    in_flight=stage.in_flight,
                    peak_bytes=count_peak(stage, options, num_full),
                    kept_bytes=self._rows.count_stack(mode.recompute) + sum(option.kept_bytes for option in options),
                    recomputed_flops=sum(map(self._prices.count_recomputed_flops, choices)),
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

    def _read_fixed(self) -> tuple[str, list[tuple[int, int]]]:
        """As `_estimate_fixed`, of what the request gives: one size, or one for each stage."""
        sizes, num_stages = self.request.fixed_sizes, self.request.run.layout.pp
        if len(sizes) not in (1, num_stages):
            raise ValueError(
                f"--fixed-memory has {len(sizes)} sizes; expected one, or one for each of {num_stages} stages"
            )
        sizes = sizes * num_stages if len(sizes) == 1 else sizes
        return self.values["loss"][0], [(size, size) for size in sizes]

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

        def count_around(recompute: tuple[str, ...]) -> list[int]:
            modules, run = frozenset(recompute), self.request.run
            (of_layer,) = self._rows.count(modules, [values])
            kept = self.request.layers_of_stage * of_layer + self._rows.count_stack(modules)
            ranks = self._estimate(forms[loss], recompute, None, False)
            return [rank.peak_bytes - count_in_flight(run, stage) * kept for stage, rank in enumerate(ranks)]

        (again,) = self._rows.count(frozenset(), [values])
        peaks = zip(count_around(()), count_around(("full",)), strict=True)
        return loss, [(min(plain, full - again), plain) for plain, full in peaks]

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
    """One plan for each micro batch size that fits, smallest first. Stop at the first size that does not fit: larger
    ones need more.

    Args:
        request: its micro batch size is replaced, and, where `samples_per_rank` is given, their number.
        budget: bytes of one GPU.
        samples_per_rank: samples of a step.
        note_estimate: called after each estimate of a step.

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
