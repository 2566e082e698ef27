"""LoRA with dropout on a Llama with random weights: what a step keeps, stock and Tempo, and that it learns.

    python examples/lora.py

Needs pip install tempo-megatron transformers peft; downloads nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from text_bytes import VOCAB_SIZE, Bytes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tempo_kernels.recompute import find_saved_tensors
from tempo_torch import tempoize

STEPS, BATCH, LENGTH = 30, 4, 128
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build(is_tempo: bool) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, **sizes, **ids))
    model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules=LINEARS))
    # The adapters are there: now the dropouts in front of them are replaced too.
    return tempoize(model, seed=1) if is_tempo else model


def run_step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The loss, and the bytes of the distinct storages that autograd keeps for it, the weights' aside."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    out = model(**batch)
    kept, pending, seen = {}, [out.loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(parent for parent, _ in node.next_functions)
        for _, tensor in find_saved_tensors(node):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
    return out.loss, sum(kept.values())


def main() -> None:
    data = Bytes(STEPS * BATCH, LENGTH)
    for name in ("stock", "Tempo"):
        model = build(name == "Tempo").train()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=5e-3)
        for step in range(STEPS):
            samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
            loss, kept = run_step(model, {key: torch.stack([s[key] for s in samples]) for key in samples[0]})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (0, STEPS - 1):
                print(f"{name}: step {step + 1}, loss {loss.item():.3f}, {kept:,} bytes kept")


if __name__ == "__main__":
    main()
