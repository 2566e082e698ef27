"""A Megatron-core GPT with Tempo in its slots, trained for a few steps on one CPU: python examples/megatron_model.py

Prints what stock, Tempo, and Tempo with Megatron's full recomputation keep for backward, and their losses.

Needs pip install "tempo-megatron[megatron]". On a GPU leave out use_cpu() and use the nccl backend.
"""

from __future__ import annotations

import warnings

import torch

warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")

from measured import compare, format_table
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
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build_model(tempo_config: TempoConfig, seed: int = SEED, *, checkpointing: bool = False) -> GPTModel:
    """The same weights for every TempoConfig: its parameters and their names are Megatron's."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        masked_softmax_fusion=False,
        **(RECOMPUTE if checkpointing else {}),
    )
    model = GPTModel(
        config, tempo_block_spec(config, tempo_config), vocab_size=VOCAB_SIZE, max_sequence_length=SEQ_LENGTH
    )
    tempoize_embedding(model, tempo_config)
    tempoize_loss(model, tempo_config)
    return model


def compute_loss(model: torch.nn.Module, step: int) -> Tensor:
    """Mean loss of one batch, from which the model learns to count: each token is its predecessor plus one."""
    start = torch.randint(VOCAB_SIZE, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (start + torch.arange(SEQ_LENGTH + 1)) % VOCAB_SIZE
    positions = torch.arange(SEQ_LENGTH).expand(BATCH, -1)
    hidden = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    # Tempo's masks depend on the sample's number in the run, so it has to be told. Stock does not ask.
    set_micro_batch(SEED, first_sample=step * BATCH)
    losses: Tensor = model(tokens[:, :-1].contiguous(), positions, hidden, labels=tokens[:, 1:].contiguous())
    return losses.mean()


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
    assert all(map(torch.equal, stock.parameters(), tempo.parameters()))

    def build(seed: int, *, tempo: bool = False, checkpointing: bool = False) -> GPTModel:
        return build_model(TempoConfig() if tempo else TempoConfig.off(), seed, checkpointing=checkpointing)

    print(format_table(compare(build, compute_loss, range(STEPS))))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
