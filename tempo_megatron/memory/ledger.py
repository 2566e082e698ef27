"""The ledger: every tensor that a GPT keeps for backward, operation by operation, measured on the real modules.

A GPTModel with one transformer layer runs forward on a random micro batch; what autograd then holds is counted over
distinct storages. "sbh" is bytes divided by s * b * h, in full s and h whatever the parallel layout: the unit of
"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), where a stock layer is
34 sbh + 5 a s**2 b.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import cpu
from tempo_megatron.config import TempoConfig
from tempo_megatron.memory.recorder import Recorder, SavedStorage
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.operations import ACTIVATION, LAYER, LEDGER_ROWS, OPERATIONS, SCORES, LedgerRow
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choices import Choices, choose
from tempo_megatron.slots.embedding import tempoize_embedding
from tempo_megatron.slots.layer_spec import tempo_block_spec
from tempo_megatron.slots.loss import tempoize_loss
from tempo_megatron.slots.mlp import describe_activation

_BDA = tuple(name for name in OPERATIONS["dropout"].slots if name != "cross_attn_bda")  # a GPT's
_ROWS = {(row.module, row.is_scores): row for row in LEDGER_ROWS}
_MODULES = {row.module for row in LEDGER_ROWS}
_OUTSIDE = {row.title for row in LEDGER_ROWS if not row.is_in_layer}


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation: the storages that it was the first to save."""

    operation: str
    num_bytes: int
    num_storages: int
    place: int = len(LEDGER_ROWS)
    """Where it stands in the table; an operation that LEDGER_ROWS does not know stands last."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What one layer, and the model around the layers, keep for backward on one rank."""

    rows: tuple[Row, ...]
    seq_length: int
    micro_batch_size: int
    hidden_size: int
    num_layers: int
    choices: Choices
    """What was measured, and why "auto" was less than its first choice."""

    def convert_to_sbh(self, num_bytes: int) -> float:
        """Bytes in units of s * b * h."""
        return num_bytes / (self.seq_length * self.micro_batch_size * self.hidden_size)

    @property
    def layer_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.operation not in _OUTSIDE)

    @property
    def outside_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.operation in _OUTSIDE)

    @property
    def layer_bytes(self) -> int:
        """One transformer layer, s*s tensors included."""
        return sum(row.num_bytes for row in self.layer_rows)

    @property
    def scores_bytes(self) -> int:
        """The part of `layer_bytes` that grows with s**2."""
        return sum(row.num_bytes for row in self.rows if row.operation == SCORES)

    @property
    def layer_sbh(self) -> float:
        """One transformer layer without its s*s tensors, in sbh."""
        return self.convert_to_sbh(self.layer_bytes - self.scores_bytes)

    @property
    def model_bytes(self) -> int:
        """All layers, embedding, final norm, output layer and loss."""
        return self.num_layers * self.layer_bytes + sum(row.num_bytes for row in self.outside_rows)


def measure(
    transformer_config: TransformerConfig,
    tempo_config: TempoConfig,
    *,
    vocab_size: int,
    seq_length: int,
    micro_batch_size: int = 1,
    num_layers: int | None = None,
) -> Ledger:
    """Run one layer's forward in training mode and count what autograd holds.

    Args:
        transformer_config: Megatron's; its `num_layers` is taken as 1 for the run. Model parallelism must be
            initialised (see `tempo_megatron.memory.layout.simulate_layout`) with its sizes.
        tempo_config: `TempoConfig.off()` for stock; "auto" becomes what the configuration allows.
        vocab_size: padded size of the vocabulary, divisible by the tensor parallel size.
        seq_length, micro_batch_size: s and b.
        num_layers: layers of the whole model, for the totals (default: transformer_config.num_layers).

    Returns:
        The ledger of this rank.
    """
    one_layer = dataclasses.replace(transformer_config, num_layers=1)
    choices = choose(one_layer, tempo_config)
    tempo_config = choices.config
    model_parallel_cuda_manual_seed(1234)
    dropout_rng.set_micro_batch(1234, 0)
    model = GPTModel(
        one_layer,
        tempo_block_spec(one_layer, tempo_config),
        vocab_size=vocab_size,
        max_sequence_length=seq_length,
        share_embeddings_and_output_weights=True,
    ).to(one_layer.params_dtype)
    tempoize_embedding(model, tempo_config)
    tempoize_loss(model, tempo_config)
    model.train()
    tokens = torch.randint(vocab_size, (micro_batch_size, seq_length), dtype=torch.int64)
    positions = torch.arange(seq_length, dtype=torch.int64).expand(micro_batch_size, -1).contiguous()
    # The one mask of all layers is the micro batch's own tensor; stock needs it given on a CPU.
    mask = None
    if cpu.is_used() and tempo_config.attention == "off":
        mask = torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool).triu(1)
    recorder = Recorder(model, exclude=(tokens, positions) if mask is None else (tokens, positions, mask))
    layer = model.decoder.layers[0]
    for name in _BDA:
        setattr(layer, name, _scope_bda(recorder, f"{LAYER}.{name}", getattr(layer, name)))
    with recorder.record():
        loss = model(tokens, positions, mask, labels=tokens)
    rows = _sum_rows(recorder.list_saved(), seq_length, describe_activation(one_layer))
    del loss
    return Ledger(
        rows=rows,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        hidden_size=one_layer.hidden_size,
        num_layers=num_layers or transformer_config.num_layers,
        choices=choices,
    )


def build_ledger_config(
    shape: ModelShape, *, sequence_parallel: bool, dtype: torch.dtype, recompute: tuple[str, ...]
) -> TransformerConfig:
    """The model's TransformerConfig under the initialised model parallelism.

    recompute: nothing, or "full", or names of Megatron's recompute modules ("core_attn", "mlp").
    """
    choices: dict[str, Any] = {}
    if "full" in recompute:
        choices = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute:
        choices = {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    return build_transformer_config(
        shape,
        dtype=dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        # The values do not matter here, and drawing them for a large model would take longer than its forward.
        perform_initialization=False,
        **choices,
    )


def _scope_bda(recorder: Recorder, operation: str, get_function: Any) -> Any:
    return lambda training, fused: recorder.scope(operation, get_function(training, fused))


def _find_row(saved: SavedStorage, seq_length: int) -> LedgerRow:
    name = saved.operation
    while name not in _MODULES:
        name = name.rpartition(".")[0]
    is_scores = saved.shape[-2:] == (seq_length, seq_length)
    return _ROWS.get((name, is_scores)) or _ROWS[name, False]


def _sum_rows(saved: list[SavedStorage], seq_length: int, activation: str) -> tuple[Row, ...]:
    totals: dict[LedgerRow, list[int]] = {}
    for storage in saved:
        total = totals.setdefault(_find_row(storage, seq_length), [0, 0])
        total[0] += storage.num_bytes
        total[1] += 1
    return tuple(
        Row(activation if row.title == ACTIVATION else row.title, totals[row][0], totals[row][1], place)
        for place, row in enumerate(LEDGER_ROWS)
        if row in totals
    )
