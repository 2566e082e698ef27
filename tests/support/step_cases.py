"""Whole steps under DeepSpeed on the CPU, the bytes that each has alive at most, and what the estimate says of it."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from typing import Any

import torch
from megatron.core import parallel_state
from peak_cases import AUTO, OFF, Step

from tempo_kernels.gelu import make_tables
from tempo_megatron import TempoConfig
from tempo_megatron.memory import run as memory_run
from tempo_megatron.memory.estimate.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.kept.ledger import build_ledger_config
from tempo_megatron.memory.storages import PeakBytes
from tempo_megatron.models.build import build_model, choose_for_model, make_inputs
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

    from tempo_megatron.training.engine import MPU, group_by_decay

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    make_tables()
    # That of a run before has its size, which counts as soon as a tensor of it is made.
    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()
    step, shape = run.step, run.step.shape
    config = build_ledger_config(shape, sequence_parallel=False, dtype=run.dtype, recompute=())
    chosen = choose_for_model(shape, config, run.tempo).config
    takes_mask = shape.family == "gpt" or chosen.loss == "fused"
    assert shape.vocab_size is not None
    vocab_size = -(-shape.vocab_size // 128) * 128
    with PeakBytes() as seen:
        model = build_model(shape, config, step.tempo, vocab_size).to(run.dtype).train()
        for name, parameter in model.named_parameters():
            # Nothing has filled them, and DeepSpeed leaves out a step whose gradients are not finite. Norms begin with
            # ones: Tempo's in place keeps more of channels whose weight is nearly 0.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
            else:
                torch.nn.init.constant_(parameter, float(name.endswith("weight")))
        groups = group_by_decay(model, 0.1)
        adam = torch.optim.AdamW(groups, foreach=run.foreach, fused=not run.foreach)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=run.config, mpu=MPU())

        def train() -> None:
            for _ in range(run.num_micro_batches):
                inputs = make_inputs(shape, vocab_size, step.micro_batch_size, causal_mask=chosen.attention == "off")
                # Tokens and labels of a data set are tensors of their own.
                inputs = {name: value if value is None else value.clone() for name, value in inputs.items()}
                (labels,) = inputs.keys() & {"labels", "lm_labels"}
                mask = torch.ones(inputs[labels].shape)
                dropout_rng.set_micro_batch(5, 0)
                losses = engine(**inputs, **({"loss_mask": mask} if takes_mask else {}))
                losses = losses[0] if isinstance(losses, tuple) else losses
                loss = (losses.float() * mask).sum() / mask.sum()
                del losses
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
    settings = dataclasses.replace(memory_run.OptimizerSettings.from_deepspeed(run.config), foreach=run.foreach)
    asked = memory_run.Run(
        model=run.step.shape,
        tempo=run.tempo,
        optimizer=settings,
        micro_batch_size=run.step.micro_batch_size,
        num_micro_batches=run.num_micro_batches,
        dtype=run.dtype,
        stock="cpu",
    )
    (rank,) = estimate_ranks(asked)
    return rank
