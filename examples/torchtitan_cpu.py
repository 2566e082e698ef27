"""torchtitan's Llama 3 and DeepSeek-V3, small, with Tempo's overrides, on a CPU: what torchtitan.train does on a GPU.

    python examples/torchtitan_cpu.py                                  # a table for each, stock and Tempo
    torchrun --nproc_per_node 2 examples/torchtitan_cpu.py --fsdp      # the same under FSDP2, with gloo

Needs pip install tempo-megatron torchtitan; downloads nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from typing import Any

import torch
from measured import compare, format_table
from text_bytes import Bytes
from torch import Tensor
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torchtitan.config import derive, override
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

STEPS, BATCH, LENGTH = 3, 2, 256
MODELS = ("llama3", "deepseek_v3")
OVERRIDES = ["torchtitan_tempo.norm", "torchtitan_tempo.feed_forward", "torchtitan_tempo.experts"]
ON_CPU = f"{__name__}.attention_on_cpu"


@override(target=FlexAttention.Config, description="attention that has a backward on a CPU")
def attention_on_cpu(config: FlexAttention.Config) -> Any:
    return derive(config, ScaledDotProductAttention.Config)


def build(name: str, seed: int, *, tempo: bool = False, checkpointing: bool = False, fsdp: bool = False) -> Any:
    module = importlib.import_module(f"torchtitan.models.{name}")
    spec = module.model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[2:]  # of a mixture the first layer is dense
    imports = [*OVERRIDES, ON_CPU] if tempo else [ON_CPU]
    apply_overrides(OverrideConfig(imports=imports), spec)
    torch.manual_seed(seed)
    model = spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    for key, layer in model.layers.items():
        if checkpointing:
            model.layers[key] = layer = checkpoint_wrapper(layer)
        if fsdp:
            fully_shard(layer)
    return fully_shard(model) if fsdp else model


def compute_loss(model: Any, batch: Tensor) -> Tensor:
    logits = model(batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train torchtitan's small models on a CPU, stock and with Tempo.")
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--fsdp", action="store_true", help="divide them by FSDP2 over the processes of torchrun")
    options = parser.parse_args()
    rank = 0
    if options.fsdp:
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
    batches = [each["input_ids"] for each in Bytes(STEPS * BATCH, LENGTH).list_batches(BATCH)]
    for name in options.models:
        rows = compare(functools.partial(build, name, fsdp=options.fsdp), compute_loss, batches)
        if rank == 0:
            print(f"{name}\n\n{format_table(rows)}\n", flush=True)
    if options.fsdp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
