"""A Megatron-core GPT under DeepSpeed's engine, with the "tempo" block in DeepSpeed's own configuration.

    python examples/deepspeed_run.py

Needs pip install "tempo-megatron[train]". This is your own loop on one CPU; launch/pretrain_gpt.py is a whole trainer.
"""

from __future__ import annotations

import os
from typing import Any

import torch

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}  # before deepspeed is imported

import deepspeed
from megatron_model import BATCH, build_model, compute_loss, start_one_process

from tempo_megatron import TempoConfig

STEPS = 10
# DeepSpeed leaves keys that it does not know alone, so Tempo's choices can stand beside its own.
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": False},
    "gradient_clipping": 1.0,
    "tempo": {"norm": "recompute", "dropout": "recompute", "attention": "flash", "loss": "fused"},
}


def main() -> None:
    start_one_process()
    # On a CPU DeepSpeed would otherwise compile, for a minute or more, an operation that only its inference uses, and
    # call compilers for a second to know which others it could compile.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    model = build_model(TempoConfig.from_dict(CONFIG["tempo"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    for step in range(STEPS):
        loss = compute_loss(engine, step)
        engine.backward(loss)
        engine.step()
        if step in (0, STEPS - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
