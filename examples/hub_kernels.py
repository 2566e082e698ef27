"""Tempo's layers as a kernel package of Hugging Face: norms and gated MLPs of a Llama that keep less, without tempoize.

    python examples/hub_kernels.py

Needs pip install tempo-megatron transformers kernels; downloads nothing.
"""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

import torch
from measured import compare, format_table
from text_bytes import VOCAB_SIZE, Bytes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping

STEPS, BATCH, LENGTH = 12, 4, 128
BUILD = Path(__file__).parent.parent / "kernels" / "hub" / "build.py"


def build_stock(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, **sizes, **ids))


def compute_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(BUILD))["build"](Path(folder))
        # transformers registers its norms itself where its version fits that of kernels; its MLPs it does not.
        replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")
        replace_kernel_forward_from_hub(LlamaMLP, "GatedMLP")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mapping = {
            name: {device: LocalLayerRepository(repo_path=Path(folder), layer_name=name)}
            for name in ("RMSNorm", "GatedMLP")
        }

        def build(seed: int, *, tempo: bool = False, checkpointing: bool = False) -> Any:
            model = build_stock(seed)
            if tempo:
                with use_kernel_mapping(mapping, inherit_mapping=False):
                    kernelize(model, mode=Mode.TRAINING, device=device)
            if checkpointing:
                model.gradient_checkpointing_enable()
            return model

        print(format_table(compare(build, compute_loss, Bytes(STEPS * BATCH, LENGTH).list_batches(BATCH))))


if __name__ == "__main__":
    main()
