"""Counts what a rank holds with DeepSpeed, beside its micro batches and while they run.

P is the parameters of a rank, e the bytes of one, d the ranks that share optimizer states (data parallel size). Adam's
moments are float32, and of 16-bit weights there is a float32 copy. It is one of three optimizers. Without ZeRO, states
are whole on every rank. ZeRO 1 in bf16 with "grad_accum_dtype" fp32 is the BF16_Optimizer: gradients in bf16 and
float32, and states divided by d. Else ZeRO divides the states; a copy of float32 weights is among them. ZeRO 2 divides
gradients too, ZeRO 3 weights too, of which up to "stage3_max_live_parameters" stay gathered; with "offload_param" those
are all that is on the device, where one rank copies them too (deepspeed/runtime/zero/partition_parameters.py:
NoGatherCoalescedHandle of 0.19.8).

ZeRO collects gradients in a buffer of "reduce_bucket_size" elements, with "overlap_comm" in two (ZeRO 3 in one),
however small the model is: ZeRO 2 has it from the first gradient to the end of backward, ZeRO 1 from a step's first
gradient to its last, ZeRO 3 always. What is full is copied to be reduced. With one micro batch a step there are no
gradients before its backward. The optimizer's step flattens the gradients and converts them to float32; without ZeRO,
and in the BF16_Optimizer, they are flattened to be reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from tempo_megatron.memory.rank.standing import FLOAT32, Born, Buckets, Standing, Tensor, divide_like
from tempo_megatron.memory.run import BUCKET_ELEMENTS, OptimizerSettings
from tempo_megatron.memory.simulated.chunk_memory import Segment


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroBuckets(Buckets):
    """Bytes on one rank, and what says when they are there."""

    bucket: int
    """Of gradients, there from the first gradient of a micro batch on; with ZeRO 3 the weights that are gathered."""
    stays: bool
    """Whether it is there in the forward of the next micro batch too."""
    num_elements: int
    """How many gradients fit it."""
    reduced: int = 0
    """Gradients of one micro batch, made when the bucket is full for the first time, or at the end of backward."""
    flush: int = 0
    """What it makes to reduce a full bucket: copies of it, beside the gradient for which there was no room."""

    def list_held(self, segment: Segment) -> dict[str, int]:
        has_bucket = segment.num_gradients > 0 or self.stays
        return {"bucket": has_bucket * self.bucket, "reduced": self._is_full(segment) * self.reduced}

    def count_flush(self, segment: Segment) -> int:
        return self._is_full(segment) * self.flush

    def _is_full(self, segment: Segment) -> bool:
        return segment.num_gradients > self.num_elements


def leaves_gradients(optimizer: OptimizerSettings, dtype: torch.dtype) -> bool:
    """Whether gradients that no backward has made before are left where it makes them.

    ZeRO 2 and 3 take each gradient away as it comes, and so does ZeRO 1 in fp16 with gradients in float32.
    """
    takes_away = optimizer.accumulates_in_float32 and not _is_bf16_optimizer(optimizer, dtype)
    return optimizer.zero_stage == 0 or (optimizer.zero_stage == 1 and not takes_away)


def list_zeros(
    sizes: Sequence[int],
    dtype: torch.dtype,
    optimizer: OptimizerSettings,
    *,
    ranks: int = 1,
    largest: int = 0,
    accumulates: bool,
) -> Standing:
    """What stands with DeepSpeed; of ZeRO 3 a part of each parameter.

    `sizes` are elements of each parameter, `largest` those of the largest layer. `ranks` share optimizer states, and
    `accumulates` says that a step has several micro batches.
    """
    p, e, d, stage = sum(sizes), dtype.itemsize, ranks, optimizer.zero_stage
    of_gradient = FLOAT32 if optimizer.accumulates_in_float32 else e
    is_16_bit, roots = e < FLOAT32, FLOAT32 if optimizer.foreach else 0
    # Two moments, and a copy of the weights.
    weights, states, communication, reduction = e * p, _divide(FLOAT32 * 3 * p, d), 0, 0
    standing = e * p if accumulates or not leaves_gradients(optimizer, dtype) else 0
    buckets = Buckets()
    if stage == 0:
        states, gradients = FLOAT32 * (2 + is_16_bit) * p, e * p
        # DeepSpeed without ZeRO flattens as many gradients as it reduces at once, or all.
        transient = max(min(p, BUCKET_ELEMENTS) * e, (FLOAT32 * is_16_bit + roots) * p)
    elif _is_bf16_optimizer(optimizer, dtype):
        # The sums in float32 are there all the time.
        standing, gradients = standing + FLOAT32 * p, (e + FLOAT32) * p
        # Flattened in float32, and converted to bf16 to be sent.
        transient = max(min(p, BUCKET_ELEMENTS) * (FLOAT32 + e), _divide(roots * p, d))
    else:
        gradients = _divide(of_gradient * p, d)
        transient = _count_step(p, e, d, optimizer, largest)
        if stage > 1:
            standing = gradients if accumulates or stage == 3 else 0
        elif standing:
            standing = of_gradient * p
        if stage == 3:
            weights = 0 if optimizer.offloads_weights else _divide(weights, d)
            # One bucket, also with "overlap_comm".
            communication = optimizer.reduce_bucket_elements * e
            buckets, reduction = _gather(p, e, d, optimizer, largest)
        else:
            buckets, reduction = _collect(p, e, d, optimizer, largest, accumulates)
        reduction += standing if stage > 1 else 0
    if optimizer.offloads:
        states = transient = 0
        if stage == 3:
            # A rank's part of the gradients is where its states are (deepspeed/runtime/zero/stage3.py:333 and 791).
            standing, gradients, reduction = 0, 0, reduction - gradients
    tensors = [Tensor("weights", size) for size in divide_like(weights, sizes)]
    tensors += [Tensor("gradients", size, Born.MICRO_BATCHES) for size in divide_like(standing, sizes)]
    tensors += [Tensor("optimizer states", size) for size in divide_like(states, [1] * 3)]
    tensors.append(Tensor("communication buffers", communication))
    return Standing(tuple(tensors), buckets, reduction, step_gradients=gradients, step_transient=transient)


def _is_bf16_optimizer(optimizer: OptimizerSettings, dtype: torch.dtype) -> bool:
    is_asked = optimizer.accumulates_in_float32 and not optimizer.offloads
    return optimizer.zero_stage == 1 and dtype == torch.bfloat16 and is_asked


def _collect(
    p: int, e: int, d: int, optimizer: OptimizerSettings, largest: int, accumulates: bool
) -> tuple[ZeroBuckets, int]:
    """The buckets of ZeRO 1 and 2, and bytes of the reduction beside the gradients that ZeRO 2 has before it."""
    is_stage_1, in_float32 = optimizer.zero_stage == 1, optimizer.accumulates_in_float32
    elements = optimizer.reduce_bucket_elements
    # ZeRO 1 reduces what it has accumulated, ZeRO 2 what a micro batch gives.
    of_gradient = FLOAT32 if is_stage_1 and in_float32 else e
    bucket, reduced, reduction = elements * of_gradient, 0, _divide(e * p, d)
    if is_stage_1:
        # The first bucket's gradients lie in it; those of the others are where they were, or, of other ranks, gone.
        reduction += of_gradient * (p - (p if p <= elements else max(0, elements - largest)))
    else:
        # Those of a micro batch are added to what was before when all are there; in float32 as they come.
        reduction = reduced = reduction if not in_float32 else 0 if accumulates else _divide(FLOAT32 * p, d)
    buckets = ZeroBuckets(
        bucket=bucket * (2 if optimizer.overlaps else 1),
        # ZeRO 1 keeps it from the first micro batch of a step to the last one's end.
        stays=is_stage_1 and accumulates,
        num_elements=elements,
        reduced=reduced,
        flush=0 if is_stage_1 else min(p, elements) * e + largest * e,
    )
    # What one rank owns is reduced where it lies; slices of several are copied.
    return buckets, reduction + buckets.bucket + (min(p * e, bucket) if d > 1 else 0)


def _gather(p: int, e: int, d: int, optimizer: OptimizerSettings, largest: int) -> tuple[ZeroBuckets, int]:
    """The weights and gradients that ZeRO 3 gathers, and bytes of the reduction beside gradients that stand."""
    # Reduced gradients are flattened, and their parts are tensors of their own.
    in_bucket, in_largest = min(p, optimizer.reduce_bucket_elements) * e, largest * e
    flush = in_bucket + _divide(in_bucket, d)
    # A gradient that no bucket holds is reduced alone.
    alone = 2 * in_largest + _divide(in_largest, d) if largest > optimizer.reduce_bucket_elements else 0
    is_copied = d > 1 or optimizer.offloads_weights
    buckets = ZeroBuckets(
        # A layer is given back only where it is not needed soon again, and in most models it is; all before the step.
        bucket=max(largest, min(p, optimizer.max_gathered_elements)) * e if is_copied else 0,
        stays=True,
        num_elements=optimizer.reduce_bucket_elements,
        flush=flush + in_largest,
    )
    return buckets, max(flush, alone)


def _count_step(p: int, e: int, d: int, optimizer: OptimizerSettings, largest: int) -> int:
    """What ZeRO's step makes: gradients flattened and converted to float32, and Adam's square roots."""
    in_float32 = optimizer.accumulates_in_float32
    # ZeRO 2 gathers float32 gradients in one buffer as they come and copies none; their norm is computed in 64 bits.
    flat = 2 * FLOAT32 * largest
    if not (optimizer.zero_stage == 2 and in_float32):
        flat = _divide((FLOAT32 if in_float32 or e == FLOAT32 else e + FLOAT32) * p, d)
    return max(flat, _divide((2 * FLOAT32 if optimizer.foreach else 0) * p, d))


def _divide(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
