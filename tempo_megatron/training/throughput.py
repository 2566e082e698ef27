"""Computes how fast a run trains: tokens, floating-point operations and their share of a GPU's peak."""

from __future__ import annotations

import torch

from tempo_megatron.memory.plan.flops import count_forward_flops, count_model_flops, find_utilisation
from tempo_megatron.memory.plan.gpu import recognise_gpu
from tempo_megatron.training.run.run_config import RunConfig

MFU, TFLOPS = "mfu", "tflops_per_s_per_rank"
"""Keys in the metrics: the share of the GPUs' peak, and 10**12 operations per second of each rank."""


class Throughput:
    """The figures of a run's steps.

    The operations are the model's, by equation 7 of arXiv 2205.05198: what is recomputed does not count. The peak is
    the data sheet's of configs/gpu, for the run's precision; a GPU that has no file there has no MFU, nor has a CPU.

    Args:
        run: its settings.
        padded_vocab_size: rows of the output layer.
        device: of this rank; all ranks have the same.
    """

    def __init__(self, run: RunConfig, padded_vocab_size: int, device: torch.device) -> None:
        self._samples = run.global_batch_size
        self._tokens = run.global_batch_size * (run.model.seq_length + (run.model.decoder_seq_length or 0))
        self._flops = count_model_flops(count_forward_flops(run.model, run.global_batch_size, padded_vocab_size))
        self._world_size, self._peak = run.world_size, None
        if device.type == "cuda" and (gpu := recognise_gpu(torch.cuda.get_device_name(device))):
            self._peak = gpu.matmul_flops_per_second[run.precision]

    def compute(self, step_seconds: float, samples: float) -> dict[str, float]:
        """Returns the figures by their key in the metrics, from the seconds and the samples of one step."""
        full_step_seconds = step_seconds * self._samples / samples
        figures = {
            "tokens_per_s": self._tokens / full_step_seconds,
            "step_ms": step_seconds * 1e3,
            TFLOPS: find_utilisation(self._flops, full_step_seconds, self._world_size, 1e12),
        }
        if self._peak is not None:
            figures[MFU] = find_utilisation(self._flops, full_step_seconds, self._world_size, self._peak)
        return figures
