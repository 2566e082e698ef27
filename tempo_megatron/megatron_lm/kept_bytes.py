"""Measures, for a run's banner, what one of its layers keeps for backward, stock and with Tempo: by the ledger.

The ledger needs model parallel groups of its own, draws random numbers and lets Megatron's modules run on a CPU, all of
which a process has once. So it runs in a separate process, while the run's model is built.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from tempo_megatron.beside import Beside
from tempo_megatron.memory.megatron.read_run import find_unknown_in_layers, read_run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.mlp import describe_activation

_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class KeptBytes:
    """Bytes that one layer keeps for backward on one rank, in this run's sizes, or why they are unknown. If layers
    differ, their mean."""

    stock: int | None = None
    tempo: int | None = None
    unknown: str | None = None

    def describe(self) -> str:
        """One clause."""
        if self.stock is None or self.tempo is None:
            return f"not measured: {self.unknown}"
        return f"stock {self.stock:,}, Tempo {self.tempo:,}, {self.tempo / self.stock:.3f} of stock"


def start_measuring(
    config: Any, tempo_config: TempoConfig, run: Any, *, has_transformer_engine: bool = False
) -> Callable[[], KeptBytes]:
    """Begin to measure a GPT's layers, with the arguments of `read_layers`. Returns a function that waits for the
    figures; a failed measurement does not stop the run."""
    try:
        if run is None:
            raise ValueError("Megatron's arguments, which say how long samples are, are not initialized in this script")
        layers = read_layers(config, tempo_config, run, has_transformer_engine=has_transformer_engine)
    except ValueError as error:
        unknown = KeptBytes(unknown=str(error))
        return lambda: unknown
    measured = Beside("tempo_megatron.megatron_lm.kept_bytes:measure_layers", layers)

    def wait() -> KeptBytes:
        try:
            found: KeptBytes = measured.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            return KeptBytes(
                unknown=f"it took more than {_SECONDS} seconds; tempo-megatron ledger measures it by itself"
            )
        except (RuntimeError, ValueError) as error:
            return KeptBytes(unknown=str(error).splitlines()[-1])
        return found

    return wait


def read_layers(config: Any, tempo_config: TempoConfig, run: Any, *, has_transformer_engine: bool) -> Any:
    """The memory.run.Run of a GPT's layers, on this process's device.

    Args:
        config: the run's TransformerConfig.
        tempo_config: without "auto".
        run: Megatron's arguments.
        has_transformer_engine: whether the layers have modules of Transformer Engine.

    Raises ValueError for what the estimate does not know.
    """
    # What a context-parallel rank keeps is what its share of the tokens keeps.
    unknown = find_unknown_in_layers("GPTModel", dataclasses.replace(config, context_parallel_size=1))
    if unknown is not None:
        raise ValueError(f"the run has {unknown}")
    ranks = config.context_parallel_size
    # Of the model around the layers.
    arguments = {"vocab_size": 128, "max_sequence_length": run.seq_length, "share_embeddings_and_output_weights": True}
    arguments["position_embedding_type"] = run.position_embedding_type
    on_device = "local" if torch.cuda.is_available() else "cpu"
    stock = "transformer_engine" if has_transformer_engine or config.multi_latent_attention else on_device
    found = read_run(
        "GPTModel", config, arguments, run, tempo_config, activation=describe_activation(config), stock=stock
    )
    model = dataclasses.replace(found.model, seq_length=found.model.seq_length // ranks)
    return dataclasses.replace(found, model=model, layout=dataclasses.replace(found.layout, cp=1))


def measure_layers(run: Any) -> KeptBytes:
    """The figures of a Run that `read_layers` has read."""
    from tempo_megatron.memory.show.ledger import measure_run

    stock, tempo = (measure_run(dataclasses.replace(run, tempo=each)) for each in (TempoConfig.off(), run.tempo))
    return KeptBytes(stock=round(stock.mean_layer_bytes), tempo=round(tempo.mean_layer_bytes))
