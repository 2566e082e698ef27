"""Says how many samples each step of a run has: always the same number, or first fewer, by --rampup-batch-size."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The global batch sizes of a run's training steps."""

    full: int
    """That of --global-batch-size."""
    ramp: tuple[int, int, int] | None
    """The first size, what is added at a time, and the samples until the full size; None if every step is full."""

    def find(self, consumed_samples: int) -> int:
        """Returns the size of the step that begins after so many samples.

        This is the rule of RampupBatchsizeNumMicroBatchesCalculator in megatron.core.num_microbatches_calculator, its
        float64 quotients included, so that a run has the same steps as under Megatron-LM.
        """
        if self.ramp is None or consumed_samples > self.ramp[2]:
            return self.full
        start, increment, samples = self.ramp
        per_increment = samples / ((self.full - start) // increment)
        return start + increment * int(consumed_samples / per_increment)

    def count_samples(self, steps: int) -> int:
        """Returns the samples of the first `steps` steps of the run."""
        samples = 0
        for done in range(steps):
            size = self.find(samples)
            if size == self.full:  # so are all the steps that follow
                return samples + (steps - done) * size
            samples += size
        return samples
