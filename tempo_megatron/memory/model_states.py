"""What a rank holds from step to step: weights, gradients and optimizer states, by who keeps them and how.

P is the parameters of a rank, e the bytes of one, d the ranks that share optimizer states (data parallel size):

- "none": weights e P, and gradients e P that backward makes and the next step frees; no optimizer.
- "megatron": Megatron's DistributedDataParallel holds gradients in float32 buffers (of float16 in float16). Adam's
  moments are float32, and of 16-bit weights there is a float32 copy. With the distributed optimizer moments and copy
  are divided by d. Gathered weights and reduced gradients use the same buffers.
- "deepspeed": Adam as above. ZeRO 0 in bf16, and ZeRO 1 with gradients accumulated in float32, is DeepSpeed's
  BF16_Optimizer: gradients in bf16 and float32, and states divided by d all the same. ZeRO 1 divides the states, among
  them a copy of float32 weights too, has gradients in "grad_accum_dtype", and a float32 copy of its part of 16-bit
  gradients in the optimizer's step. ZeRO 2 divides gradients too, ZeRO 3 weights too, of which a layer is gathered at a
  time. Gradients are reduced in buckets of "reduce_bucket_size" elements, which ZeRO 1 and 2 make in full; with
  "overlap_comm" there are two.
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
    gradient_bytes: int | None = None
    """Of an element in which DeepSpeed accumulates, "grad_accum_dtype"; None is the weights'."""

    overlaps: bool = False
    """DeepSpeed's "overlap_comm"."""

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
        return cls(
            kind="deepspeed",
            zero_stage=stage,
            reduce_bucket_elements=int(read("reduce_bucket_size", _BUCKET_ELEMENTS)),
            gradient_bytes={"fp32": 4, "bf16": 2, "fp16": 2}.get(
                (config.get("data_types") or {}).get("grad_accum_dtype") or ""
            ),
            overlaps=bool(read("overlap_comm", stage == 3)),
            offloads=(read("offload_optimizer", None) or {}).get("device", "none") != "none",
        )


@dataclasses.dataclass(frozen=True)
class ModelStates:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer_states: int
    communication_buffers: int
    """Buckets of gradients; with ZeRO 3 the layer that is gathered too."""

    step_transient: int
    """What the optimizer's step makes beside all this; there is no activation then."""


def count_model_states(
    num_parameters: int,
    dtype: torch.dtype,
    optimizer: OptimizerSettings,
    *,
    data_parallel: int = 1,
    largest_layer_parameters: int = 0,
) -> ModelStates:
    """The states of a rank with `num_parameters`; with "none" the gradients are backward's, and 0 here."""
    p, e, d = num_parameters, dtype.itemsize, data_parallel
    is_16_bit = e < _FLOAT32
    states = _FLOAT32 * (_MOMENTS + is_16_bit) * p
    if optimizer.kind == "none":
        return ModelStates(e * p, 0, 0, 0, 0)
    if optimizer.kind == "megatron":
        gradients = (2 if dtype == torch.float16 else _FLOAT32) * p
        return ModelStates(e * p, gradients, _divide(states, d if optimizer.distributed else 1), 0, 0)
    stage = optimizer.zero_stage
    accumulates_in_float32 = optimizer.gradient_bytes == _FLOAT32 and not optimizer.offloads
    if stage == 1 and dtype == torch.bfloat16 and accumulates_in_float32:
        # DeepSpeed then takes its BF16_Optimizer.
        stage = 0
    if stage in (1, 2) and not is_16_bit:
        # They clone their part of the weights, whatever its dtype.
        states += _FLOAT32 * p
    is_divided = stage > 0 or dtype == torch.bfloat16
    of_gradient = (optimizer.gradient_bytes or e) if stage == 1 else e
    gradients = _divide(of_gradient * p, d if stage >= 2 else 1)
    if stage == 0 and dtype == torch.bfloat16:
        gradients += _FLOAT32 * p
    buffers = 0
    if stage in (1, 2) or (stage and d > 1):
        # Stages 1 and 2 make a whole bucket in each backward, whatever there is to reduce and with whom.
        elements = optimizer.reduce_bucket_elements
        buffers = (elements if stage < 3 else min(elements, p)) * of_gradient * (2 if optimizer.overlaps else 1)
    if stage == 3 and d > 1:
        buffers += largest_layer_parameters * e
    transient = 0
    if is_16_bit and not (stage == 0 and dtype == torch.bfloat16):
        transient = _divide(_FLOAT32 * p, d if stage else 1)
    return ModelStates(
        _divide(e * p, d if stage == 3 else 1),
        gradients,
        0 if optimizer.offloads else _divide(states, d if is_divided else 1),
        buffers,
        0 if optimizer.offloads else transient,
    )


def _divide(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
