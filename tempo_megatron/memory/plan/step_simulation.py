"""Simulates a step of GPUs that send activations to their host, event by event: a model, not a measurement.

Each GPU has three engines that work beside each other: one computes, one copies to the host and one copies back. They
follow the rules of `tempo_kernels.offload`: the copy of what layer n sends is asked for when its forward ends, and the
forward of layer n + 1 does not end before it; the copy back is asked for when the backward of layer n + 1 begins, and
the backward of layer n does not begin before it. GPUs behind one switch share its uplink: in each direction the copies
under way get equal parts of it.

It is the planner's witness. The planner says of each layer whether its copies fit beside one other layer; here nothing
is said, copies take what they take and whoever has to wait waits. What is not modelled: latencies, the memory bandwidth
that copies take from kernels (the planner counts it as time of the layers), collectives, and other stages of the
pipeline, which never let this one wait.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

from tempo_megatron.memory.estimate.offload import count_moved
from tempo_megatron.memory.estimate.schedule import list_events
from tempo_megatron.memory.plan.cost import (
    convert_to_femtoseconds,
    count_moved_bytes,
    count_recomputed_flops,
    count_window_bytes,
)
from tempo_megatron.memory.plan.gpu import HostLink
from tempo_megatron.memory.plan.kept_rows import measure_rows
from tempo_megatron.memory.plan.planner import PlanProblem, StagePlan

# Of a second: shorter rests are those of rounding.
_ROUNDING = 1e-12
# Bytes of a copy: a part of a byte is a rest of rounding.
_REST = 1e-3


@dataclasses.dataclass(frozen=True)
class SimulatedLayer:
    """What a layer does for one micro batch."""

    forward_seconds: float
    backward_seconds: float
    """What is computed again included."""
    kept_bytes: int
    """On the device from forward to backward."""
    moved_bytes: int = 0
    """On the host meanwhile. The last layer of a stage has none."""
    replay_bytes: int = 0
    """Made again when its backward begins."""


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """What the GPU that ends last did."""

    seconds: float
    waiting_seconds: float
    """Of them, those in which computing waits for copies."""
    device_bytes: int
    """What is kept for backward on the device at most, what leaves and what comes back included."""
    host_bytes: int
    """At most, of the host's memory, for one GPU."""
    to_host_seconds: float
    """In which a copy to the host is under way."""
    to_gpu_seconds: float
    copies: tuple[tuple[bool, int, int], ...]
    """(Goes to the host, micro batch, layer), in the order in which they were asked for."""


@dataclasses.dataclass(eq=False)
class _Copy:
    rest: float
    is_done: bool = False


@dataclasses.dataclass(frozen=True)
class _Task:
    """A layer's forward or backward of one micro batch."""

    is_forward: bool
    micro_batch: int
    layer: int


class _Device:
    """One GPU: what it computes, its two queues of copies, and what lies where."""

    def __init__(self, layers: Sequence[SimulatedLayer], tasks: Sequence[_Task], start: float) -> None:
        self._layers, self._tasks = layers, collections.deque(tasks)
        self._out, self._back = dict[tuple[int, int], _Copy](), dict[tuple[int, int], _Copy]()
        self.copies: list[tuple[bool, int, int]] = []
        self.queues = collections.deque[_Copy](), collections.deque[_Copy]()
        self.busy = [0.0, 0.0]
        self.waited, self.end, self._device, self._host = 0.0, 0.0, 0, 0
        self.device_bytes = self.host_bytes = 0
        # Of the task that runs; None: it waits to begin. 0: it is over but for a copy.
        self.rest: float | None = start or None
        self._is_idle_at_first = start > 0

    @property
    def is_over(self) -> bool:
        return not self._tasks

    def _hold(self, num_bytes: int, more: int = 0) -> None:
        self._device += num_bytes
        self.device_bytes = max(self.device_bytes, self._device + more)

    def _copy(self, direction: int, copies: dict[tuple[int, int], _Copy], key: tuple[int, int]) -> None:
        moved = self._layers[key[1]].moved_bytes
        if moved:
            copies[key] = _Copy(float(moved))
            self.copies.append((not direction, *key))
            self.queues[direction].append(copies[key])

    def settle(self, now: float) -> None:
        """Begin and end tasks until the next one has to wait or compute."""
        while self._tasks:
            if self._is_idle_at_first:
                if self.rest:
                    return
                self._is_idle_at_first, self.rest = False, None
            task = self._tasks[0]
            layer, key = self._layers[task.layer], (task.micro_batch, task.layer)
            before = task.micro_batch, task.layer - 1
            if self.rest is None:
                if not task.is_forward:
                    if key in self._back and not self._back[key].is_done:
                        return
                    if key in self._back:
                        self._host -= layer.moved_bytes
                        del self._back[key]
                    if task.layer:
                        self._copy(1, self._back, before)
                        self._hold(self._layers[task.layer - 1].moved_bytes)
                    self._hold(0, layer.replay_bytes)
                self.rest = layer.forward_seconds if task.is_forward else layer.backward_seconds
            if self.rest > 0:
                return
            if task.is_forward:
                if before in self._out and not self._out[before].is_done:
                    # What it makes is there already.
                    self.device_bytes = max(self.device_bytes, self._device + layer.kept_bytes + layer.moved_bytes)
                    return
                self._hold(layer.kept_bytes + layer.moved_bytes)
                if self._out.pop(before, None) is not None:
                    self._device -= self._layers[before[1]].moved_bytes
                self._copy(0, self._out, key)
                self._host += layer.moved_bytes
                self.host_bytes = max(self.host_bytes, self._host)
            else:
                self._device -= layer.kept_bytes + layer.moved_bytes
            self._tasks.popleft()
            self.rest, self.end = None, now


def simulate_step(
    layers: Sequence[SimulatedLayer],
    link: HostLink,
    events: Sequence[tuple[bool, int]] = ((True, 0), (False, 0)),
    *,
    num_gpus: int = 1,
    stagger_seconds: float = 0.0,
) -> SimulatedStep:
    """Simulate a step of GPUs with the same layers.

    Args:
        layers: of one pipeline stage, in order; the last one sends nothing.
        link: rates of one GPU that copies alone, and how many GPUs share an uplink that is as fast.
        events: (is a forward, micro batch) in the order of the pipeline's schedule.
        num_gpus: that share the host; each `link.gpus_per_uplink` of them share an uplink.
        stagger_seconds: by how much each GPU begins after the one before it.
    """
    assert not layers[-1].moved_bytes
    tasks = [
        _Task(is_forward, micro_batch, layer)
        for is_forward, micro_batch in events
        for layer in (range(len(layers)) if is_forward else reversed(range(len(layers))))
    ]
    devices = [_Device(layers, tasks, number * stagger_seconds) for number in range(num_gpus)]
    rates = link.to_host_bytes_per_second, link.to_gpu_bytes_per_second
    now = 0.0
    while True:
        for device in devices:
            device.settle(now)
        if all(device.is_over for device in devices):
            break
        under_way = list(_list_under_way(devices, rates, link.gpus_per_uplink))
        computing = [device for device in devices if not device.is_over and device.rest]
        step = min(
            (copy.rest / rate for _, _, copy, rate in under_way),
            default=math.inf,
        )
        step = min([step, *(device.rest for device in computing if device.rest is not None)])
        assert step < math.inf, "nobody copies and nobody computes"
        now += step
        for device in devices:
            if not device.is_over and not device.rest:
                device.waited += step
        for device, direction, copy, rate in under_way:
            copy.rest -= rate * step
            device.busy[direction] += step
            if copy.rest <= _REST:
                copy.is_done = True
                device.queues[direction].popleft()
        for device in computing:
            assert device.rest is not None
            device.rest = 0.0 if device.rest - step <= _ROUNDING else device.rest - step
    last = max(devices, key=lambda device: device.end)
    return SimulatedStep(
        last.end, last.waited, last.device_bytes, last.host_bytes, last.busy[0], last.busy[1], tuple(last.copies)
    )


def _list_under_way(
    devices: Sequence[_Device], rates: tuple[float, float], gpus_per_uplink: int
) -> Iterator[tuple[_Device, int, _Copy, float]]:
    """(GPU, direction, its first copy, bytes per second) of the GPUs that copy."""
    for first in range(0, len(devices), gpus_per_uplink):
        group = devices[first : first + gpus_per_uplink]
        for direction, rate in enumerate(rates):
            copying = [device for device in group if device.queues[direction]]
            for device in copying:
                yield device, direction, device.queues[direction][0], rate / len(copying)


def simulate_stage(problem: PlanProblem, stage: int, plan: StagePlan) -> SimulatedStep:
    """A step of one stage of a plan, on all GPUs that share an uplink, which begin together.

    Raises ValueError where nothing says how fast the link is.
    """
    run, gpu = problem.run, problem.gpu
    count_window_bytes(gpu, run.dtype, problem.flops.total)
    assert gpu.host_link is not None
    events = list_events(stage, run.pipeline_parallel, 1, run.num_micro_batches or run.pipeline_parallel)
    return simulate_step(
        list_layers(problem, plan),
        gpu.host_link,
        [(event.is_forward, event.micro_batch) for event in events],
        num_gpus=gpu.host_link.gpus_per_uplink,
    )


def list_layers(problem: PlanProblem, plan: StagePlan) -> list[SimulatedLayer]:
    """The layers of a stage of a plan, with the planner's times of products and of what choices add."""
    run, flops, found = problem.run, problem.flops, []
    for choice in plan.choices:
        config, rows = choice.make_config(), measure_rows(run, choice.recompute)
        moved = count_moved(rows.list_movable(choice.values), choice.offload)

        def convert(flops: int, moved_bytes: int = 0) -> float:
            return convert_to_femtoseconds(problem.gpu, run.dtype, flops=flops, moved_bytes=moved_bytes) / 1e15

        added = convert(
            count_recomputed_flops(flops, choice.recompute, config),
            count_moved_bytes(run, config, choice.recompute) + moved,
        )
        found.append(
            SimulatedLayer(
                convert(flops.total, moved),
                convert(2 * flops.total) + added,
                rows.count(config) - moved,
                moved,
            )
        )
    return found
