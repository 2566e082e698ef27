"""Measures one operation after another; every result is in the file as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gpu import implementations, kept, records, timing
from gpu.implementations import AGREEMENT, AUTOTUNED, Implementation
from gpu.operation import Operation, Sizes

LARGE = Sizes(s=2048, b=4, h=4096, ffn=16384, gated_ffn=11008, p=0.1, dtype=torch.bfloat16)
SMALL = Sizes(s=64, b=4, h=768, ffn=768, gated_ffn=768, p=0.1, dtype=torch.bfloat16)


class Suite:
    """Its public methods are the kinds of steps that there are for an operation."""

    def __init__(
        self, results: records.Results, device: torch.device | str, clock: Any, large: Sizes, small: Sizes
    ) -> None:
        self.results, self.device, self.clock, self.large, self.small = results, device, clock, large, small

    def time(self, operation: Operation) -> None:
        """Forward, backward and refill of every form beside everyone else, and what each keeps."""
        self._agree(operation)
        others = [implementations.eager(operation, self.large)]
        found, left_out = implementations.comparable(operation, self.large, self.device)
        self._time(operation, ("forward", "backward", "refill"), [*others, *found], left_out)
        self._kept(operation, [*others, *found], left_out)

    def autotune(self, operation: Operation) -> None:
        """Forward and backward beside torch.compile at its most thorough."""
        others, left_out = implementations.comparable(operation, self.large, self.device, [AUTOTUNED])
        if left_out:
            print(f"{operation.name}: {left_out}", flush=True)
        else:
            self._time(operation, ("forward", "backward"), others, left_out)

    def host(self, operation: Operation) -> None:
        """Wall-clock time of forward and backward of a small call."""
        others, left_out = implementations.comparable(operation, self.small, self.device)
        others = [implementations.eager(operation, self.small), *others]
        tempo = implementations.tempo(operation, self.small)
        tensors = operation.tensors(self.small, self.device)
        grads = [torch.randn_like(output) for output in tempo[0].outputs(tempo[0].leaves(tensors))]
        us = timing.host_us([*tempo, *others], tensors, grads, self._synchronize)
        for form in tempo:
            self.results.add(
                "host",
                records.goals_of_host(us[form.name]),
                **records.of_operation(operation, self.small, form.name),
                what="small call",
                unit="us",
                tempo=us[form.name],
                others=_of(others, us),
                left_out=left_out,
            )

    def _agree(self, operation: Operation) -> None:
        for keeps, error in implementations.errors_of_tempo(operation, self.large, self.device).items():
            if error > AGREEMENT:
                raise AssertionError(f"keeping {keeps} is off torch eager by {error:.3g} of its norm")

    def _time(
        self, operation: Operation, whats: Sequence[str], others: Sequence[Implementation], left_out: dict[str, str]
    ) -> None:
        tempo = implementations.tempo(operation, self.large)
        first = operation.tensors(self.large, self.device)
        num_sets = timing.num_sets(first, _l2_bytes(self.device))
        sets = [first, *(operation.tensors(self.large, self.device) for _ in range(num_sets - 1))]
        outputs = tempo[0].outputs(tempo[0].leaves(first))
        grads = [[torch.randn_like(output) for output in outputs] for _ in sets]
        del outputs
        makers: dict[str, Callable[[Implementation], timing.Pass]] = {
            "forward": lambda one: timing.forward_pass(one, sets),
            "backward": lambda one: timing.backward_pass(one, sets, grads),
            "refill": lambda one: timing.refill_pass(one, sets),
        }
        width = operation.width_of(self.large)
        for what in whats:
            compared = [] if what == "refill" else others
            traffic = {form.keeps: getattr(form, what) for form in operation.forms}
            ideal_bytes = {keeps: t.num_bytes(self.large, width) for keeps, t in traffic.items() if t is not None}
            copies = [timing.copy_pass(n, num_sets, self.device, f"copy {keeps}") for keeps, n in ideal_bytes.items()]
            ours = [makers[what](one) for one in tempo if one.name in ideal_bytes]
            found = timing.measure([*copies, *ours, *(makers[what](one) for one in compared)], self.clock)
            del copies, ours
            for keeps, num_bytes in ideal_bytes.items():
                self._add_time(operation, what, keeps, num_bytes, found, compared, left_out if compared else {})

    def _add_time(
        self,
        operation: Operation,
        what: str,
        keeps: str,
        ideal_bytes: int,
        found: Mapping[str, timing.Measured],
        others: Sequence[Implementation],
        left_out: dict[str, str],
    ) -> None:
        ours, copy = found[keeps], found[f"copy {keeps}"]
        others_ms = {one.name: found[one.name].ms for one in others}
        self.results.add(
            "time",
            records.goals_of_time(ours.ms, copy.ms, others_ms),
            **records.of_operation(operation, self.large, keeps),
            what=what,
            unit="ms",
            tempo=ours.ms,
            others=others_ms,
            spread={"tempo": ours.spread, "copy": copy.spread, **{one.name: found[one.name].spread for one in others}},
            copy_ms=copy.ms,
            ideal_bytes=ideal_bytes,
            copy_bytes_per_s=1e3 * ideal_bytes / copy.ms,
            left_out=left_out,
            waits_for_gpu=sorted(self.clock.waits & found.keys()),
        )

    def _kept(self, operation: Operation, others: Sequence[Implementation], left_out: dict[str, str]) -> None:
        tensors = operation.tensors(self.large, self.device)
        found = {one.name: kept.measure(operation, one, tensors, drops_output=False) for one in others}
        for form, one in zip(operation.forms, implementations.tempo(operation, self.large), strict=True):
            ours = kept.measure(operation, one, tensors, drops_output=form.refill is not None)
            others_bytes = {name: each.kept_bytes for name, each in found.items()}
            self.results.add(
                "kept",
                records.goals_of_kept(ours.kept_bytes, others_bytes),
                **records.of_operation(operation, self.large, form.keeps),
                what="kept",
                unit="bytes",
                tempo=ours.kept_bytes,
                others=others_bytes,
                allocated_bytes={form.keeps: ours.allocated_bytes, **{n: k.allocated_bytes for n, k in found.items()}},
                peak_bytes={form.keeps: ours.peak_bytes, **{n: k.peak_bytes for n, k in found.items()}},
                left_out=left_out,
            )

    def _synchronize(self) -> None:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)


def _of(others: Sequence[Implementation], found: Mapping[str, float]) -> dict[str, float]:
    return {one.name: found[one.name] for one in others}


def _l2_bytes(device: torch.device | str) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if torch.device(device).type == "cuda" else 0
