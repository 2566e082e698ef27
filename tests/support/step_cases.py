"""Whole steps under DeepSpeed on the CPU, the bytes that each has alive at most, and what the estimate says of it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import Any

import torch
from peak_cases import AUTO, OFF, Step, build, estimate_step, find_loss, start_anew

from tempo_megatron import TempoConfig
from tempo_megatron.memory.rank.estimate import RankEstimate
from tempo_megatron.memory.run import OptimizerSettings
from tempo_megatron.memory.tape.follower import Follower
from tempo_megatron.slots import dropout_rng

BUCKET = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One configuration."""

    stage: int
    dtype: torch.dtype = torch.bfloat16
    family: str = "gpt"
    num_micro_batches: int = 2
    is_wide: bool = True
    """Whether weights dominate, not tokens."""
    tempo: TempoConfig = OFF
    accumulates_in_float32: bool = False
    foreach: bool = False
    bucket: int = BUCKET
    overlaps: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed JSON."""
        zero = {"stage": self.stage, "reduce_bucket_size": self.bucket, "overlap_comm": self.overlaps}
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": self.step.micro_batch_size}
        config |= {"gradient_accumulation_steps": self.num_micro_batches, "gradient_clipping": 1.0}
        config |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}} if self.accumulates_in_float32 else {}
        return config | ({"bf16": {"enabled": True}} if self.dtype == torch.bfloat16 else {})

    @property
    def step(self) -> Step:
        return Step(self.family, self.is_wide, self.tempo, self.dtype)

    def __str__(self) -> str:
        words = [str(self.step), f"zero{self.stage}", f"{self.num_micro_batches} micro batches"]
        return " ".join(
            [
                *words,
                *(name for name in ("accumulates_in_float32", "foreach", "overlaps") if getattr(self, name)),
                *([f"bucket {self.bucket}"] if self.bucket != BUCKET else []),
            ]
        )


# A table's worth: every stage, dtype and number of micro batches of every family.
MATRIX = [
    Run(stage=stage, dtype=dtype, family=family, num_micro_batches=count, is_wide=False, tempo=tempo)
    for family, tempo, dtype, count, stage in itertools.product(
        ("gpt", "llama", "bert"), (OFF, AUTO), (torch.float32, torch.bfloat16), (1, 4), range(4)
    )
]


def measure_runs(runs: list[Run]) -> list[int]:
    """The peak of each; for a rank of one process, with model parallelism initialised."""
    with torch.compiler.set_stance("force_eager"):
        return [_measure(run) for run in runs]


def _measure(run: Run) -> int:
    """Bytes alive at most during a step, after two such steps."""
    import deepspeed

    from tempo_megatron.training.engine import group_by_decay
    from tempo_megatron.training.ranks import MPU

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    start_anew()
    with Follower() as seen:
        model, make_batch = build(run.step)
        groups = group_by_decay(model, 0.1)
        adam = torch.optim.AdamW(groups, foreach=run.foreach, fused=not run.foreach)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=run.config, mpu=MPU())

        def train() -> None:
            for _ in range(run.num_micro_batches):
                batch = make_batch()
                dropout_rng.set_micro_batch(5, 0)
                loss = find_loss(engine, *batch)
                engine.backward(loss)
                engine.step()

        train()
        train()
        # DeepSpeed leaves cycles behind, which Python frees at a time of its own.
        gc.collect()
        seen.begin_phase()
        train()
    return seen.peak


def estimate_run(run: Run) -> RankEstimate:
    """What the estimate says of it."""
    settings = dataclasses.replace(OptimizerSettings.from_deepspeed(run.config), foreach=run.foreach)
    return estimate_step(run.step, optimizer=settings, num_micro_batches=run.num_micro_batches)
