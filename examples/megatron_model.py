"""A Megatron-core GPT with Tempo in its slots, trained for a few steps on one CPU: python examples/megatron_model.py

Needs pip install "tempo-megatron[megatron]". On a GPU leave out use_cpu() and use the nccl backend.
"""

from __future__ import annotations

import warnings

import torch

warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from tempo_megatron import (
    TempoConfig,
    set_micro_batch,
    tempo_block_spec,
    tempoize_embedding,
    tempoize_loss,
    use_cpu,
)

VOCAB_SIZE, SEQ_LENGTH, BATCH, STEPS, SEED = 256, 64, 4, 20, 1234


def build_model(tempo_config: TempoConfig) -> GPTModel:
    """The same weights for every TempoConfig: its parameters and their names are Megatron's."""
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config, tempo_block_spec(config, tempo_config), vocab_size=VOCAB_SIZE, max_sequence_length=SEQ_LENGTH
    )
    tempoize_embedding(model, tempo_config)
    tempoize_loss(model, tempo_config)
    return model


def loss_of(model: torch.nn.Module, step: int) -> Tensor:
    """Mean loss of one batch, from which the model learns to count: each token is its predecessor plus one."""
    start = torch.randint(VOCAB_SIZE, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(SEQ_LENGTH + 1)) % VOCAB_SIZE
    positions = torch.arange(SEQ_LENGTH).expand(BATCH, -1)
    hidden = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    # Tempo's masks depend on the sample's number in the run, so it has to be told. Stock does not ask.
    set_micro_batch(SEED, first_sample=step * BATCH)
    losses: Tensor = model(tokens[:, :-1].contiguous(), positions, hidden, labels=tokens[:, 1:].contiguous())
    return losses.mean()


def train(model: GPTModel) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def start_one_process() -> None:
    """Megatron's process groups on the CPU, for this process alone."""
    use_cpu()
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # public, but torch's types do not say so
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def main() -> None:
    start_one_process()
    stock, tempo = build_model(TempoConfig.off()), build_model(TempoConfig())
    assert set(stock.state_dict()) == set(tempo.state_dict())
    for name, model in (("stock", stock), ("Tempo", tempo)):
        losses = train(model)
        print(f"{name}: loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last of {STEPS}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
