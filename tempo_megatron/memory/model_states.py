"""What a rank holds from step to step: weights, gradients and optimizer states, by who keeps them and how.

P is the parameters of a rank, e the bytes of one, d the ranks that share optimizer states (data parallel size):

- "none": weights e P, and gradients e P that backward makes and the next step frees; no optimizer.
- "megatron": Megatron's DistributedDataParallel holds gradients in float32 buffers (of float16 in float16). Adam's
  moments are float32, and of 16-bit weights there is a float32 copy. With the distributed optimizer moments and copy
  are divided by d. Gathered weights and reduced gradients use the same buffers.
- "deepspeed": Adam as above, in one of three of its optimizers. Without ZeRO, states are whole on every rank. ZeRO 1 in
  bf16 with "grad_accum_dtype" fp32 is its BF16_Optimizer: gradients in bf16 and float32, and states divided by d. Else
  ZeRO divides the states; ZeRO 1 and 2 have a copy of float32 weights among them. ZeRO 2 divides gradients too, ZeRO 3
  weights too, of which a layer is gathered at a time. ZeRO collects gradients in a buffer of "reduce_bucket_size"
  elements, with "overlap_comm" in two, which is there during backward however small the model is. The optimizer's step
  flattens the gradients and converts them to float32; without ZeRO, and in the BF16_Optimizer, they are flattened to be
  reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

OPTIMIZERS = ("none", "megatron", "deepspeed")
_FLOAT32 = 4
_MOMENTS = 2
_BUCKET_ELEMENTS = 500_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Who steps, and how the states are divided.

    Raises ValueError for a kind or a stage that does not exist.
    """

    kind: str = "megatron"
    """One of OPTIMIZERS."""

    distributed: bool = True
    """Megatron's distributed optimizer."""

    zero_stage: int = 1
    """DeepSpeed's."""

    reduce_bucket_elements: int = _BUCKET_ELEMENTS
    overlaps: bool = False
    """DeepSpeed's "overlap_comm"."""

    accumulates_in_float32: bool = False
    """DeepSpeed's "grad_accum_dtype" of fp32."""

    foreach: bool = False
    """Whether Adam is torch's over lists of tensors, which makes as many square roots; else it is a fused one."""

    offloads: bool = False
    """Whether DeepSpeed keeps the optimizer's states off the device."""

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            raise ValueError(f"the optimizer is {self.kind!r}; expected one of {', '.join(OPTIMIZERS)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO's stage is {self.zero_stage!r}; expected 0, 1, 2 or 3")

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any]) -> OptimizerSettings:
        """What a DeepSpeed JSON says; "auto" and what is missing are DeepSpeed's defaults, stage 0 among them."""
        zero = config.get("zero_optimization", {})

        def read(name: str, default: Any) -> Any:
            value = zero.get(name, default)
            return default if value == "auto" else value

        stage = read("stage", 0)
        adam = (config.get("optimizer") or {}).get("params", {})
        return cls(
            kind="deepspeed",
            zero_stage=stage,
            reduce_bucket_elements=int(read("reduce_bucket_size", _BUCKET_ELEMENTS)),
            overlaps=bool(read("overlap_comm", stage == 3)),
            accumulates_in_float32=(config.get("data_types") or {}).get("grad_accum_dtype") == "fp32",
            foreach=bool(adam.get("torch_adam")) and adam.get("foreach") is not False,
            offloads=(read("offload_optimizer", None) or {}).get("device", "none") != "none",
        )


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer_states: int
    communication_buffers: int
    """That are there all the time; with ZeRO 3 its bucket of gradients and the layer that is gathered."""

    step_transient: int
    """What reducing the gradients and the optimizer's step make beside all this; there is no activation then."""

    backward_buffers: int = 0
    """Buckets of gradients that are there during backward only."""


def count_model_states(
    num_parameters: int,
    dtype: torch.dtype,
    optimizer: OptimizerSettings,
    *,
    data_parallel: int = 1,
    largest_layer_parameters: int = 0,
    accumulates: bool = True,
) -> ModelStates:
    """The states of a rank with `num_parameters`; with "none" the gradients are backward's, and 0 here.

    accumulates: whether a step has more than one micro batch.
    """
    p, e, d = num_parameters, dtype.itemsize, data_parallel
    is_16_bit = e < _FLOAT32
    states = _FLOAT32 * (_MOMENTS + is_16_bit) * p
    if optimizer.kind == "none":
        return ModelStates(e * p, 0, 0, 0, 0)
    if optimizer.kind == "megatron":
        gradients = (2 if dtype == torch.float16 else _FLOAT32) * p
        return ModelStates(e * p, gradients, _divide(states, d if optimizer.distributed else 1), 0, 0)
    roots = _FLOAT32 if optimizer.foreach else 0
    if optimizer.zero_stage == 0:
        found = ModelStates(e * p, e * p, states, 0, max(_flatten(p, e), (_FLOAT32 * is_16_bit + roots) * p))
    elif optimizer.zero_stage == 1 and dtype == torch.bfloat16 and _takes_bf16_optimizer(optimizer):
        # Flattened in float32, and converted to bf16 to be sent.
        transient = max(_flatten(p, _FLOAT32 + e), _divide(roots * p, d))
        found = ModelStates(e * p, (e + _FLOAT32) * p, _divide(states, d), 0, transient)
    else:
        found = _count_zero_states(p, e, d, optimizer, largest_layer_parameters, accumulates)
    return dataclasses.replace(found, optimizer_states=0, step_transient=0) if optimizer.offloads else found


def _takes_bf16_optimizer(optimizer: OptimizerSettings) -> bool:
    return optimizer.accumulates_in_float32 and not optimizer.offloads


def _count_zero_states(
    p: int, e: int, d: int, optimizer: OptimizerSettings, largest: int, accumulates: bool
) -> ModelStates:
    stage = optimizer.zero_stage
    bytes_of_gradient = _FLOAT32 if optimizer.accumulates_in_float32 else e
    # ZeRO 1 and 2 copy float32 weights too.
    has_copy = stage < 3 or e < _FLOAT32
    # ZeRO 1 reduces what it has accumulated, the others what a micro batch gives.
    bytes_in_bucket = bytes_of_gradient if stage == 1 else e
    buffers = optimizer.reduce_bucket_elements * bytes_in_bucket * (2 if optimizer.overlaps else 1)
    # ZeRO 2 adds a micro batch's gradients to those before it when all are there; until then they are in the bucket or,
    # where that was full, in memory of their own.
    waits = stage == 2 and accumulates and not optimizer.accumulates_in_float32
    own = _divide(e * p, d) if waits and p > optimizer.reduce_bucket_elements else 0
    # Gradients that are gathered in one buffer as they come need no copy; their norm is computed in 64 bits.
    flat = 2 * _FLOAT32 * largest
    if not (stage >= 2 and optimizer.accumulates_in_float32):
        flat = _divide((_FLOAT32 if bytes_of_gradient == _FLOAT32 else bytes_of_gradient + _FLOAT32) * p, d)
    roots = _divide((2 * _FLOAT32 if optimizer.foreach else 0) * p, d)
    return ModelStates(
        _divide(e * p, d if stage == 3 else 1),
        _divide(bytes_of_gradient * p, d if stage >= 2 else 1),
        _divide(_FLOAT32 * (_MOMENTS + has_copy) * p, d),
        (buffers + (largest * e if d > 1 else 0)) if stage == 3 else 0,
        max(flat, roots),
        0 if stage == 3 else buffers + own,
    )


def _flatten(num_parameters: int, bytes_of_element: int) -> int:
    """A copy of all gradients, or of as many as DeepSpeed without ZeRO reduces at once."""
    return min(num_parameters, _BUCKET_ELEMENTS) * bytes_of_element


def _divide(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
