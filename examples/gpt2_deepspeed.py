"""A GPT-2 of transformers with random weights under DeepSpeed: a "tempo" block, and initialize of tempo_megatron.

    python examples/gpt2_deepspeed.py

Needs pip install "tempo-megatron[deepspeed]" transformers; downloads nothing. One CPU is enough.
"""

from __future__ import annotations

import os
from typing import Any

import torch

os.environ |= {
    "DS_ACCELERATOR": "cpu",
    "LOCAL_RANK": "0",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": os.environ.get("MASTER_PORT", "29511"),
}  # before deepspeed is imported

import deepspeed
from text_bytes import VOCAB_SIZE, Bytes
from transformers import GPT2Config, GPT2LMHeadModel

from tempo_megatron import initialize
from tempo_torch import report_on

STEPS, BATCH, LENGTH = 20, 4, 128
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
    "tempo": {"seed": 1, "activation": "recompute", "norm": "inplace", "dropout": "recompute", "loss": "fused"},
}


def main() -> None:
    # On a CPU DeepSpeed would otherwise compile, for a minute or more, an operation that only its inference uses, and
    # call compilers for a second to know which others it could compile.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=CONFIG)
    print(report_on(model))
    data = Bytes(STEPS * BATCH, LENGTH)
    for step in range(STEPS):
        samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        loss = engine(**{name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}).loss
        engine.backward(loss)
        engine.step()
        if step in (0, STEPS - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
