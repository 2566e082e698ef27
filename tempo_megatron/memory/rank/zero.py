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
from collections.abc import Iterator, Sequence

import torch

from tempo_megatron.memory.rank.standing import FLOAT32, Born, Buckets, Standing, Tensor, divide_like
from tempo_megatron.memory.run import BUCKET_ELEMENTS, OptimizerSettings
from tempo_megatron.memory.simulated.chunk_memory import Segment

_STATES = 3
"""Two moments, and a copy of the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero(Buckets):
    """Bytes on one rank."""

    weights: int
    optimizer_states: int = 0
    communication_buffers: int = 0
    """That are there all the time: ZeRO 3's bucket of gradients."""

    standing_gradients: int = 0
    """While a micro batch runs, without those that its backward makes and leaves."""

    bucket: int = 0
    """Of gradients, there from the first gradient of a micro batch on; with ZeRO 3 the weights that are gathered."""

    bucket_stays: bool = False
    """Whether it is there in the forward of the next micro batch too."""

    bucket_elements: int = 0
    """How many gradients fit it."""

    reduced_gradients: int = 0
    """Of one micro batch, made when the bucket is full for the first time, or at the end of backward."""

    flush: int = 0
    """What it makes to reduce a full bucket: copies of it, beside the gradient for which there was no room."""

    reduction: int = 0
    gradients: int = 0
    step_transient: int = 0
    """The last three as `Standing` has them; `gradients` are all in the optimizer's step."""

    def list_held(self, segment: Segment) -> dict[str, int]:
        """Bytes of buckets and reduced gradients while a segment runs."""
        has_bucket = segment.num_gradients > 0 or self.bucket_stays
        is_reduced = segment.num_gradients > self.bucket_elements
        return {"bucket": has_bucket * self.bucket, "reduced": is_reduced * self.reduced_gradients}

    def count_flush(self, segment: Segment) -> int:
        """Bytes that a full bucket takes at a segment's end: it is reduced when a gradient is complete."""
        return self.flush if segment.num_gradients > self.bucket_elements else 0

    def stand(self, sizes: Sequence[int]) -> Standing:
        """Its tensors, for parameters of these sizes; ZeRO 3 has its part of each."""
        return Standing(
            tensors=tuple(self._list_tensors(sizes)),
            buckets=self,
            reduction=self.reduction,
            step_gradients=self.gradients,
            step_transient=self.step_transient,
        )

    def _list_tensors(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        yield from (Tensor("weights", size) for size in divide_like(self.weights, sizes))
        for size in divide_like(self.standing_gradients, sizes):
            yield Tensor("gradients", size, Born.MICRO_BATCHES)
        yield from (Tensor("optimizer states", size) for size in divide_like(self.optimizer_states, [1] * _STATES))
        yield Tensor("communication buffers", self.communication_buffers)


def makes_gradients(optimizer: OptimizerSettings, dtype: torch.dtype, accumulates: bool) -> bool:
    """Whether there are no gradients before a backward, which makes them and leaves them.

    accumulates: whether a step has more than one micro batch.
    """
    if accumulates or optimizer.kind == "megatron":
        return False
    if optimizer.kind == "none":
        return True
    # ZeRO 2 and 3 take each gradient away as it comes, and so does ZeRO 1 in fp16 with gradients in float32.
    takes_away = optimizer.accumulates_in_float32 and not _is_bf16_optimizer(optimizer, dtype)
    return optimizer.zero_stage == 0 or (optimizer.zero_stage == 1 and not takes_away)


def count_zero(
    p: int, dtype: torch.dtype, optimizer: OptimizerSettings, *, ranks: int = 1, largest: int = 0, accumulates: bool
) -> Zero:
    """What a rank with `p` parameters holds.

    Args:
        p: parameters.
        dtype: of the weights.
        optimizer: DeepSpeed's.
        ranks: that share optimizer states.
        largest: parameters of its largest layer.
        accumulates: whether a step has more than one micro batch.
    """
    e, d = dtype.itemsize, ranks
    is_16_bit = e < FLOAT32
    states = FLOAT32 * (_STATES - 1 + is_16_bit) * p
    roots = FLOAT32 if optimizer.foreach else 0
    standing = 0 if makes_gradients(optimizer, dtype, accumulates) else e * p
    if optimizer.zero_stage == 0:
        found = Zero(
            weights=e * p,
            optimizer_states=states,
            standing_gradients=standing,
            gradients=e * p,
            step_transient=max(_flatten(p, e), (FLOAT32 * is_16_bit + roots) * p),
        )
    elif _is_bf16_optimizer(optimizer, dtype):
        found = Zero(
            weights=e * p,
            optimizer_states=_divide(states, d),
            # The sums in float32 are there all the time.
            standing_gradients=standing + FLOAT32 * p,
            gradients=(e + FLOAT32) * p,
            # Flattened in float32, and converted to bf16 to be sent.
            step_transient=max(_flatten(p, FLOAT32 + e), _divide(roots * p, d)),
        )
    elif optimizer.zero_stage == 3:
        found = _count_zero_3(p, e, d, optimizer, largest)
    else:
        found = _count_zero_1_and_2(p, e, d, optimizer, largest, accumulates, standing)
    if not optimizer.offloads:
        return found
    found = dataclasses.replace(found, optimizer_states=0, step_transient=0)
    if optimizer.zero_stage != 3:
        return found
    # A rank's part of the gradients is where its states are (deepspeed/runtime/zero/stage3.py:333 and 791 of 0.19.8).
    reduction = found.reduction - found.gradients
    return dataclasses.replace(found, standing_gradients=0, gradients=0, reduction=reduction)


def _is_bf16_optimizer(optimizer: OptimizerSettings, dtype: torch.dtype) -> bool:
    is_asked = optimizer.accumulates_in_float32 and not optimizer.offloads
    return optimizer.zero_stage == 1 and dtype == torch.bfloat16 and is_asked


def _count_zero_1_and_2(
    p: int, e: int, d: int, optimizer: OptimizerSettings, largest: int, accumulates: bool, standing: int
) -> Zero:
    """`standing` is what gradients that nobody divides have before a backward."""
    is_stage_1, in_float32 = optimizer.zero_stage == 1, optimizer.accumulates_in_float32
    bytes_of_gradient = FLOAT32 if in_float32 else e
    # ZeRO 1 reduces what it has accumulated, ZeRO 2 what a micro batch gives.
    bucket = optimizer.reduce_bucket_elements * (bytes_of_gradient if is_stage_1 else e)
    own = _divide(e * p, d)
    if is_stage_1:
        standing, reduced = bytes_of_gradient * p if standing else 0, 0
        # The first bucket's gradients lie in it; those of the others are where they were, or, of other ranks, gone.
        in_bucket = p if p <= optimizer.reduce_bucket_elements else max(0, optimizer.reduce_bucket_elements - largest)
        reduction = bytes_of_gradient * (p - in_bucket) + own
    else:
        # Those of a micro batch are added to what was before when all are there; in float32 as they come.
        reduced = _divide(FLOAT32 * p, d) if in_float32 and not accumulates else 0 if in_float32 else own
        standing = _divide(bytes_of_gradient * p, d) if accumulates else 0
        reduction = standing + reduced
    num_buckets = 2 if optimizer.overlaps else 1
    return Zero(
        weights=e * p,
        # The weights are copied in float32 also where they are in float32.
        optimizer_states=_divide(FLOAT32 * _STATES * p, d),
        standing_gradients=standing,
        bucket=bucket * num_buckets,
        # ZeRO 1 keeps it from the first micro batch of a step to the last one's end.
        bucket_stays=is_stage_1 and accumulates,
        bucket_elements=optimizer.reduce_bucket_elements,
        reduced_gradients=reduced,
        flush=0 if is_stage_1 else min(p, optimizer.reduce_bucket_elements) * e + largest * e,
        # What one rank owns is reduced where it lies; slices of several are copied.
        reduction=reduction + bucket * num_buckets + (min(p * e, bucket) if d > 1 else 0),
        gradients=_divide(bytes_of_gradient * p, d),
        step_transient=_count_step(p, e, d, optimizer, largest),
    )


def _count_zero_3(p: int, e: int, d: int, optimizer: OptimizerSettings, largest: int) -> Zero:
    gradients = _divide((FLOAT32 if optimizer.accumulates_in_float32 else e) * p, d)
    # Reduced gradients are flattened, and their parts are tensors of their own.
    in_bucket, in_largest = min(p, optimizer.reduce_bucket_elements) * e, largest * e
    flush = in_bucket + _divide(in_bucket, d)
    # A gradient that no bucket holds is reduced alone.
    alone = 2 * in_largest + _divide(in_largest, d) if largest > optimizer.reduce_bucket_elements else 0
    # A layer is given back only where it is not needed soon again, and in most models it is.
    is_copied = d > 1 or optimizer.offloads_weights
    return Zero(
        weights=0 if optimizer.offloads_weights else _divide(e * p, d),
        optimizer_states=_divide(FLOAT32 * _STATES * p, d),
        # One bucket, also with "overlap_comm".
        communication_buffers=optimizer.reduce_bucket_elements * e,
        # All weights are given back before the step.
        bucket=max(largest, min(p, optimizer.max_gathered_elements)) * e if is_copied else 0,
        bucket_stays=True,
        standing_gradients=gradients,
        bucket_elements=optimizer.reduce_bucket_elements,
        flush=flush + in_largest,
        reduction=gradients + max(flush, alone),
        gradients=gradients,
        step_transient=_count_step(p, e, d, optimizer, largest),
    )


def _count_step(p: int, e: int, d: int, optimizer: OptimizerSettings, largest: int) -> int:
    """What ZeRO's step makes: gradients flattened and converted to float32, and Adam's square roots."""
    in_float32 = optimizer.accumulates_in_float32
    # ZeRO 2 gathers float32 gradients in one buffer as they come and copies none; their norm is computed in 64 bits.
    flat = 2 * FLOAT32 * largest
    if not (optimizer.zero_stage == 2 and in_float32):
        flat = _divide((FLOAT32 if in_float32 or e == FLOAT32 else e + FLOAT32) * p, d)
    return max(flat, _divide((2 * FLOAT32 if optimizer.foreach else 0) * p, d))


def _flatten(p: int, bytes_of_element: int) -> int:
    """A copy of all gradients, or of as many as DeepSpeed without ZeRO reduces at once."""
    return min(p, BUCKET_ELEMENTS) * bytes_of_element


def _divide(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
