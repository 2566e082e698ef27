"""Attention with dropout beside torch's scaled_dot_product_attention: what dropout costs, here and there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import rivals
from gpu.records import Results
from tempo_kernels.attention import attention, function

P = 0.1
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class Shape(NamedTuple):
    """Causal, bf16, [s, b, a, d]."""

    s: int
    b: int
    a: int
    d: int


SHAPES = [Shape(s, 16384 // s, 2048 // d, d) for d in (64, 128) for s in (1024, 2048, 4096, 8192)]


def measure(
    results: Results, clock: Any, device: torch.device | str, shape: Shape, backends: dict[str, SDPBackend] = BACKENDS
) -> None:
    """One record: forward and backward of everyone, and the share of probabilities that each dropout really keeps."""
    compared = _ours(shape, device) + [
        one for name, backend in backends.items() for p in (P, 0.0) for one in _torchs(shape, device, name, backend, p)
    ]
    found, left_out = rivals.times(compared, clock)
    with_dropout = {name: ms for name, ms in found.items() if name == f"sdpa flash, p {P}"}
    without = {name: ms for name, ms in found.items() if name.startswith("sdpa") and name.endswith("p 0")}
    ours, undropped = found[f"tempo, p {P}"], found["tempo, p 0"]
    goals = {"cost_of_dropout": {"at_most": 1.1, "found": ours / undropped}}
    if with_dropout:
        goals["speed_beside_flash_with_dropout"] = {"at_least": 1.3, "found": min(with_dropout.values()) / ours}
    if without:
        goals["speed_beside_the_fastest_without"] = {"at_least": 0.85, "found": min(without.values()) / ours}
    results.add(
        "attention",
        goals,
        operation="attention",
        keeps="q, k, v, out, logsumexp",
        what="forward + backward",
        unit="ms",
        shape=shape._asdict(),
        dtype="bfloat16",
        p=P,
        tempo=ours,
        others={name: ms for name, ms in found.items() if name != f"tempo, p {P}"},
        keep_rates=_keep_rates(shape, device, backends),
        left_out=left_out,
    )


def _ours(shape: Shape, device: torch.device | str) -> list[rivals.Rival]:
    def of(p: float) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            function.PREFERS_SDPA = False  # our own kernels without dropout too: torch's are rivals of their own
            return attention(q, k, v, causal=True, softmax_scale=shape.d**-0.5, dropout_p=p, dropout_key=1)

        return run

    tensors = [_random((shape.s, shape.b, shape.a, shape.d), device) for _ in range(4)]
    return [rivals.Rival(f"tempo, p {p:g}", of(p), tensors[:3], tensors[3]) for p in (P, 0.0)]


def _torchs(
    shape: Shape, device: torch.device | str, name: str, backend: SDPBackend, p: float
) -> Sequence[rivals.Rival]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    # In its own layout, which is its best.
    tensors = [_random((shape.b, shape.a, shape.s, shape.d), device) for _ in range(4)]
    return [rivals.Rival(f"sdpa {name}, p {p:g}", run, tensors[:3], tensors[3])]


def _keep_rates(shape: Shape, device: torch.device | str, backends: dict[str, SDPBackend]) -> dict[str, float | str]:
    """Where all keys are seen alike and all values are 1, the output's mean is the share kept over the nominal one."""
    rates: dict[str, float | str] = {}
    zeros, ones = (torch.full((1, 16, 1024, shape.d), value, dtype=torch.bfloat16, device=device) for value in (0, 1))
    for name, backend in backends.items():
        try:
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(zeros, zeros, ones, dropout_p=P)
            rates[name] = out.float().mean().item() * (1 - P)
        except RuntimeError as error:
            rates[name] = str(error).partition("\n")[0]
    q, v = (t.permute(2, 0, 1, 3).contiguous() for t in (zeros, ones))
    out = attention(q, q, v, causal=False, softmax_scale=1.0, dropout_p=P, dropout_key=1)
    rates["tempo"] = out.float().mean().item() * (1 - P)
    return rates


def _random(shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)
