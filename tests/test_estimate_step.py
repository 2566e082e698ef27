"""The estimate against whole real steps under DeepSpeed on a CPU, its optimizer's step among them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from distributed import run_megatron_ranks
from peak_cases import AUTO, OFF, Step

from tempo_megatron.memory.estimate import RankLayout, estimate_ranks
from tempo_megatron.memory.ledger import build_ledger_config
from tempo_megatron.memory.model_states import OptimizerSettings
from tempo_megatron.memory.peak_bytes import PeakBytes
from tempo_megatron.memory.simulated_device import make_gelu_tables
from tempo_megatron.models.build import build_model, choose_for_model
from tempo_megatron.slots import dropout_rng

BUCKET = 1 << 20
VOCABULARY = 8064


@dataclasses.dataclass(frozen=True)
class Run:
    stage: int
    dtype: torch.dtype = torch.bfloat16
    accumulates_in_float32: bool = False
    foreach: bool = False
    tempo: Any = OFF
    bucket: int = BUCKET
    overlaps: bool = False

    @property
    def config(self) -> dict[str, Any]:
        zero = {"stage": self.stage, "reduce_bucket_size": self.bucket, "overlap_comm": self.overlaps}
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
        config |= {"gradient_clipping": 1.0, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
        config |= {"data_types": {"grad_accum_dtype": "fp32"}} if self.accumulates_in_float32 else {}
        return config | ({"bf16": {"enabled": True}} if self.dtype == torch.bfloat16 else {})

    @property
    def step(self) -> Step:
        return Step("gpt", True, self.tempo, self.dtype)


RUNS = [
    Run(0, torch.float32),
    Run(0, torch.float32, foreach=True),
    Run(0),
    Run(1, torch.float32),
    Run(1),
    Run(1, tempo=AUTO),
    Run(1, foreach=True),
    Run(1, accumulates_in_float32=True),
    Run(1, bucket=16 << 20),
    Run(2),
    Run(2, torch.float32, tempo=AUTO),
    Run(2, accumulates_in_float32=True),
    Run(2, bucket=16 << 20),
]


def measure_runs(runs: list[Run]) -> list[tuple[int, int]]:
    with torch.compiler.set_stance("force_eager"):
        return [measure_run(run) for run in runs]


def measure_run(run: Run) -> tuple[int, int]:
    """Bytes between two steps, and at most during a step of two micro batches, after two such steps."""
    import deepspeed

    from tempo_megatron.training.engine import MPU, group_by_decay

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    make_gelu_tables()
    step, shape = run.step, run.step.shape
    config = build_ledger_config(shape, sequence_parallel=False, dtype=run.dtype, recompute=())
    hides = choose_for_model(shape, config, run.tempo).config.attention == "off"
    with PeakBytes() as seen:
        model = build_model(shape, config, step.tempo, VOCABULARY).to(run.dtype).train()
        for parameter in model.parameters():
            # Nothing has filled them, and DeepSpeed leaves out a step whose gradients are not finite.
            torch.nn.init.normal_(parameter, std=0.02)
        groups = group_by_decay(model, 0.1)
        adam = torch.optim.AdamW(groups, foreach=run.foreach, fused=not run.foreach)
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=run.config, mpu=MPU())

        def train() -> None:
            for _ in range(2):
                tokens = torch.randint(VOCABULARY, (1, shape.seq_length))
                mask = torch.ones(1, 1, shape.seq_length, shape.seq_length, dtype=torch.bool).triu(1) if hides else None
                dropout_rng.set_micro_batch(5, 0)
                loss_mask = torch.ones(1, shape.seq_length)
                losses = engine(tokens, torch.arange(shape.seq_length)[None], mask, labels=tokens, loss_mask=loss_mask)
                loss = (losses * loss_mask).sum() / loss_mask.sum()
                del losses
                engine.backward(loss)
                engine.step()

        train()
        train()
        between = seen.begin_phase()
        train()
    return between, seen.peak


def test_the_peak_of_a_whole_step_under_deepspeed_is_estimated() -> None:
    measured: list[tuple[int, int]] = run_megatron_ranks(measure_runs, 1, 1, RUNS)[0]
    wrong = {}
    for run, (between, peak) in zip(RUNS, measured, strict=True):
        settings = dataclasses.replace(OptimizerSettings.from_deepspeed(run.config), foreach=run.foreach)
        layout = RankLayout(micro_batch_size=1, num_micro_batches=2, dtype=run.dtype, stock="cpu")
        (rank,) = estimate_ranks(run.step.shape, layout, run.tempo, optimizer=settings)
        ratio = rank.peak_bytes / peak
        if not 0.999 <= ratio <= 1.03:
            parts = {name: round(value / rank.num_parameters, 3) for name, value in rank.parts.items() if value}
            found = [round(value / rank.num_parameters, 3) for value in (between, peak)]
            wrong[str(run)] = f"{ratio:.4f}", rank.moment, parts, found
    assert not wrong, "\n".join(f"{run}: {found}" for run, found in wrong.items())
