"""The loss head, from hidden states to their gradient and the weight's, beside torch, torch.compile and Liger; and the
log-probabilities of labels beside torch and torch.compile."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu import rivals
from gpu.implementations import liger_version
from gpu.records import Results
from tempo_kernels.linear_cross_entropy import linear_cross_entropy, linear_log_prob


class Shape(NamedTuple):
    """bf16; hidden [s, b, h] and weight [v, h]."""

    s: int
    b: int
    h: int
    v: int


class LogProbShape(NamedTuple):
    """bf16; hidden [s, b, h] and weight [v, h]."""

    s: int
    b: int
    h: int
    v: int
    softcap: float | None
    entropy: bool


SHAPES = [Shape(4096, 4, 4096, v) for v in (50304, 128256)]
LOG_PROB_SHAPES = [
    LogProbShape(4096, 2, 4096, 128256, softcap, entropy) for softcap in (None, 30.0) for entropy in (False, True)
]
TEMPERATURE = 0.7


def measure(results: Results, clock: Any, device: torch.device | str, shape: Shape) -> None:
    """A record for each of our forms: milliseconds and peak memory of forward and backward beside everyone else."""
    _measure(results, clock, "loss head", "linear_cross_entropy", shape, _rivals(shape, device))


def measure_log_prob(results: Results, clock: Any, device: torch.device | str, shape: LogProbShape) -> None:
    """The same of linear_log_prob."""
    _measure(results, clock, "log prob", "linear_log_prob", shape, _rivals_of_log_prob(shape, device))


def _measure(
    results: Results, clock: Any, kind: str, operation: str, shape: Shape | LogProbShape, compared: list[rivals.Rival]
) -> None:
    found, left_out = rivals.times(compared, clock)
    peaks = {one.name: rivals.peak_bytes(one) for one in compared if one.name in found}
    others = {name: ms for name, ms in found.items() if not name.startswith("tempo")}
    other_peaks = {name: num_bytes for name, num_bytes in peaks.items() if name in others}
    for name in found.keys() - others.keys():
        goals = {}
        if others:
            goals["time_of_the_fastest"] = {"at_most": 1.05, "found": found[name] / min(others.values())}
        if lowest := min(other_peaks.values(), default=0):
            goals["bytes_of_the_lowest"] = {"at_most": 1.0, "found": peaks[name] / lowest}
        results.add(
            kind,
            goals,
            operation=operation,
            keeps=name.removeprefix("tempo, "),
            what="forward + backward",
            unit="ms",
            shape=shape._asdict(),
            dtype="bfloat16",
            p=None,
            tempo=found[name],
            others=others,
            peak_bytes=peaks,
            left_out=left_out,
        )


def _rivals(shape: Shape, device: torch.device | str) -> list[rivals.Rival]:
    hidden, weight, labels = _make_tensors(shape, device)
    flat_labels, ones = labels.t().reshape(-1), torch.ones(shape.b, shape.s, device=device)

    def recomputed(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels).sum()

    def in_forward(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, token_weights=ones)[0]

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).flatten(0, 1).float()
        return F.cross_entropy(logits, flat_labels, reduction="sum")

    def liger(hidden: Tensor, weight: Tensor) -> Tensor:
        if liger_version() is None:
            raise LookupError("liger-kernel is not installed")
        functional = importlib.import_module("liger_kernel.transformers.functional")
        found = functional.liger_fused_linear_cross_entropy(hidden.flatten(0, 1), weight, flat_labels, reduction="sum")
        return found[0] if isinstance(found, tuple) else found

    one = torch.ones((), device=device)
    functions = {
        "tempo, logits recomputed": recomputed,
        "tempo, gradients in forward": in_forward,
        "eager": plain,
        "compile": torch.compile(plain, dynamic=False),
        "liger": liger,
    }
    return [rivals.Rival(name, function, [hidden, weight], one) for name, function in functions.items()]


def _rivals_of_log_prob(shape: LogProbShape, device: torch.device | str) -> list[rivals.Rival]:
    hidden, weight, labels = _make_tensors(shape, device)

    def recomputed(hidden: Tensor, weight: Tensor) -> Tensor:
        found = linear_log_prob(hidden, weight, labels, TEMPERATURE, shape.softcap, shape.entropy)
        return found[0].sum() + found[1].sum() if shape.entropy else found.sum()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).float()
        if shape.softcap is not None:
            logits = (logits / shape.softcap).tanh() * shape.softcap
        log_probs = F.log_softmax(logits / TEMPERATURE, -1)
        total = log_probs.gather(-1, labels.t().unsqueeze(-1)).sum()
        return total - (log_probs.exp() * log_probs).sum() if shape.entropy else total

    functions = {
        "tempo, logits recomputed": recomputed,
        "eager": plain,
        "compile": torch.compile(plain, dynamic=False),
    }
    one = torch.ones((), device=device)
    return [rivals.Rival(name, function, [hidden, weight], one) for name, function in functions.items()]


def _make_tensors(shape: Shape | LogProbShape, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and labels [b, s]."""
    hidden = torch.randn(shape.s, shape.b, shape.h, device=device).to(torch.bfloat16)
    weight = (torch.randn(shape.v, shape.h, device=device) * shape.h**-0.5).to(torch.bfloat16)
    return hidden, weight, torch.randint(shape.v, (shape.b, shape.s), device=device)
