"""The ledger: measures what a model keeps for backward, operation by operation, on the real modules.

A model with one transformer layer in each stack runs forward on a random micro batch; then the distinct storages that
autograd holds are counted. "sbh" is bytes divided by s * b * h, the whole s and h in any parallel layout. That is the
unit of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), where a stock layer keeps
34 sbh + 5 a s**2 b.
"""

from __future__ import annotations

import dataclasses
import itertools

from tempo_kernels.offload import MIN_BYTES
from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import record_chunk
from tempo_megatron.memory.simulated.chunk_model import (
    build_ledger_config,
    describe_parts,
    leave_out_stand_ins,
    replace_attention,
)
from tempo_megatron.memory.tape.rows import LayerKind, Row, find_row, sum_rows
from tempo_megatron.memory.tape.scopes import SavedStorage
from tempo_megatron.models.build import make_specs
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import read_layers, write_layers
from tempo_megatron.settings.operations import STACKS_OF_FAMILIES, find_offload_row, is_moved
from tempo_megatron.slots.choose import Choices, choose
from tempo_megatron.slots.report import TempoReport, report_on


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What the layers, and the model around them, keep for backward on one rank."""

    layer_kinds: tuple[LayerKind, ...]
    """The layers, those of equal values together."""
    outside_rows: tuple[Row, ...]
    """Embedding, final norm, output layer and loss."""
    sbh_bytes: int
    """s * b * h."""
    choices: Choices
    """What was measured, and why "auto" was less than its first choice."""
    report: TempoReport
    """What became of the slots of all layers."""

    def convert_to_sbh(self, num_bytes: int) -> float:
        """Bytes in units of s * b * h."""
        return num_bytes / self.sbh_bytes

    @property
    def layer_rows(self) -> tuple[Row, ...]:
        """The rows of the first kind of layer."""
        return self.layer_kinds[0].rows

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.layer_rows, *self.outside_rows)

    @property
    def layer_bytes(self) -> int:
        """One layer of the first kind, s*s tensors included; in T5 one of the encoder and one of the decoder."""
        return self.layer_kinds[0].layer_bytes

    @property
    def scores_bytes(self) -> int:
        """The part of `layer_bytes` that grows with s**2."""
        return sum(row.num_bytes for row in self.layer_rows if row.is_scores)

    @property
    def layer_sbh(self) -> float:
        """One layer of the first kind without its s*s tensors, in sbh."""
        return self.convert_to_sbh(self.layer_bytes - self.scores_bytes)

    def count_layer(self, layer: int) -> int:
        """Bytes of one layer, counted from 0."""
        return next(kind.layer_bytes for kind in self.layer_kinds if layer in read_layers(kind.layers))

    @property
    def most_moving_bytes(self) -> int:
        """Of what is sent to the host, what is on the device at once: that of two layers."""
        by_layer = {layer: kind.host_bytes for kind in self.layer_kinds for layer in read_layers(kind.layers)}
        return max(map(sum, itertools.pairwise([0, *(by_layer[layer] for layer in sorted(by_layer))])))

    @property
    def num_layers(self) -> int:
        return sum(kind.num_layers for kind in self.layer_kinds)

    @property
    def mean_layer_bytes(self) -> float:
        """The mean of all layers."""
        return sum(kind.num_layers * kind.layer_bytes for kind in self.layer_kinds) / self.num_layers

    @property
    def model_bytes(self) -> int:
        """All layers, embedding, final norm, output layer and loss."""
        return round(self.num_layers * self.mean_layer_bytes) + sum(row.num_bytes for row in self.outside_rows)


def measure_run(run: Run) -> Ledger:
    """The ledger of a run on rank 0 of a simulated tensor-parallel group: one layer of each kind on fake tensors.

    What is not Tempo's are the modules that `run.stock` names; experts share their tokens as the run says. Tempo's
    in-place norm keeps slightly more than is measured where a gamma is nearly 0, and a 64th of its output on a GPU.

    Raises ValueError as `tempoize`, and for latent attention in other modules than Transformer Engine's.
    """
    if run.model.multi_latent_attention and run.stock != "transformer_engine":
        raise ValueError(
            "the stock modules are Megatron's local ones, whose attention does not take latent attention's values of "
            "another size than keys, so there is no such run; give --stock transformer_engine"
        )
    cpu.use_cpu()
    shape, stacks = run.built_model, STACKS_OF_FAMILIES[run.model.family]
    with simulate_layout(run.layout.tp):
        recompute = leave_out_stand_ins(run.recompute)
        config = build_ledger_config(shape, sequence_parallel=run.layout.sp, dtype=run.dtype, recompute=recompute)
        config = describe_parts(config, run)
        choices = choose(config, run.tempo)
        specs = make_specs(shape, config, choices)
        report = sum((report_on(spec, choices) for spec in specs.values()), TempoReport())
    simulated = choices.config
    if run.model.multi_latent_attention:
        # Stock attention of latent vectors keeps what Tempo's does: q, k, v, the output and a logsumexp.
        simulated = replace_attention(simulated, "flash", "off")
    run = dataclasses.replace(run, tempo=simulated, recompute_num_layers=None)
    mixed = shape.layers_with_experts
    kinds: dict[tuple[bool, tuple[TempoConfig, ...]], list[int]] = {}
    # The first kind is the one that most layers are of, of equally many the first.
    for layer in sorted(range(shape.num_layers), key=lambda layer: sum(mixed) * 2 > len(mixed) and not mixed[layer]):
        values = tuple(simulated.for_layer(layer, stack) for stack in stacks)
        kinds.setdefault((mixed[layer], values), []).append(layer)
    lengths = shape.seq_length, min(shape.seq_length, shape.decoder_seq_length or shape.seq_length)
    measured: list[tuple[Row, ...]] = []
    for (_, values), (layer, *_) in kinds.items():
        by_layer, rest = record_chunk(run, range(layer, layer + 1), has_ends=True)
        saved = [*itertools.chain.from_iterable(by_layer.values()), *rest]
        of_stacks = dict(zip(stacks, values, strict=True))
        measured.append(
            sum_rows((_send_to_host(each, of_stacks, lengths) for each in saved), lengths, shape.activation)
        )
    return Ledger(
        layer_kinds=tuple(
            LayerKind(write_layers(layers), len(layers), tuple(row for row in rows if row.is_in_layer))
            for layers, rows in zip(kinds.values(), measured, strict=True)
        ),
        outside_rows=tuple(row for row in measured[0] if not row.is_in_layer),
        sbh_bytes=shape.seq_length * run.micro_batch_size * shape.hidden_size,
        choices=choices,
        report=report,
    )


def _send_to_host(storage: SavedStorage, values: dict[str, TempoConfig], lengths: tuple[int, ...]) -> SavedStorage:
    """What a layer with these values, by stack, keeps, on the host if they send it there."""
    row = find_row(storage.operation, storage.shape, lengths)
    name, config = find_offload_row(row), values.get(row.stack or "")
    if name is None or config is None or storage.num_bytes < MIN_BYTES:
        return storage
    return dataclasses.replace(storage, is_on_host=is_moved(name, config.offload))
