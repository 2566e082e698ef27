"""Measures, for a run's banner, what one of its layers keeps for backward, stock and with Tempo.

A layer of Megatron's local modules is built as the run's configuration says, and measured by the ledger. Layers with
experts, latent attention or Transformer Engine's modules are measured as the estimate simulates them. Both need model
parallel groups of their own and draw random numbers, so they run in a separate process on the CPU, while the run's
model is built.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import pickle
import subprocess
from collections.abc import Callable
from typing import Any

from tempo_megatron.beside import Beside
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS

_SECONDS = 60

# Fields of a TransformerConfig that describe the run rather than its layers, or that need a GPU.
_OVERRIDES: dict[str, Any] = {
    "num_layers": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "tp_comm_overlap": False,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
}


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
    """Begin to measure a GPT's layer of this TransformerConfig. Returns a function that waits for the figures.

    Args:
        config: the run's TransformerConfig.
        tempo_config: without "auto".
        run: Megatron's arguments, or None.
        has_transformer_engine: whether the layers have modules of Transformer Engine.
    """
    if run is None:
        unknown = "Megatron's arguments, which say how long samples are, are not initialized in this script"
        return lambda: KeptBytes(unknown=unknown)
    if has_transformer_engine or config.num_moe_experts or config.multi_latent_attention:
        try:
            layers = _read_layers(config, tempo_config, run, has_transformer_engine)
        except ValueError as error:
            unknown = str(error)
            return lambda: KeptBytes(unknown=unknown)
        simulated = Beside("tempo_megatron.megatron_lm.kept_bytes:measure_layers", layers)
        return lambda: _wait(simulated)
    obstacle = _find_obstacle(config)
    if obstacle is not None:
        return lambda: KeptBytes(unknown=obstacle)
    order = {
        "config": _portable_fields(config),
        "tempo": dataclasses.asdict(tempo_config),
        "num_layers": config.num_layers,
        "seq_length": run.seq_length,
        "micro_batch_size": run.micro_batch_size,
    }
    measured = Beside("tempo_megatron.megatron_lm.kept_bytes:measure_kept_bytes", order)
    return lambda: _wait(measured)


def _wait(measured: Beside) -> KeptBytes:
    """The figures; a failed measurement must not stop the run."""
    try:
        found: KeptBytes = measured.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        return KeptBytes(unknown=f"it took more than {_SECONDS} seconds; tempo-megatron ledger measures it by itself")
    except (RuntimeError, ValueError) as error:
        return KeptBytes(unknown=str(error).splitlines()[-1])
    return found


def _find_obstacle(config: Any) -> str | None:
    """Why the ledger, which measures one layer of a dense GPT, does not know this run's layers."""
    if type(config).__name__ != "TransformerConfig":
        return f"layers of a {type(config).__name__} are not alike or not known to the ledger"
    if config.context_parallel_size > 1:
        return "the ledger does not know context parallelism"
    if not _is_portable(config.activation_func):
        return "the activation is a function that another process cannot be given"
    return None


def _read_layers(config: Any, tempo_config: TempoConfig, run: Any, has_transformer_engine: bool) -> Any:
    """The Run of these layers, as on a GPU. Raises ValueError for what the estimate does not know."""
    from tempo_megatron.memory.megatron.read_run import find_unknown_in_layers, read_run
    from tempo_megatron.slots.mlp import describe_activation

    ranks = config.context_parallel_size
    unknown = find_unknown_in_layers("GPTModel", dataclasses.replace(config, context_parallel_size=1))
    if unknown is not None:
        raise ValueError(f"the run has {unknown}")
    if config.multi_latent_attention and tempo_config.values_of("attention") <= {"off", "flash"}:
        # Both keep what Transformer Engine's attention keeps, the only one of latent vectors that is simulated.
        of_layers = {key: {**values, "attention": "off"} for key, values in tempo_config.layers.items()}
        tempo_config = dataclasses.replace(tempo_config, attention="off", layers=of_layers)
    arguments = {
        # Of the model around the layers.
        **{"vocab_size": 128, "max_sequence_length": run.seq_length, "share_embeddings_and_output_weights": True},
        "position_embedding_type": run.position_embedding_type,
    }
    is_engine = has_transformer_engine or config.multi_latent_attention
    found = read_run(
        "GPTModel",
        config,
        arguments,
        run,
        tempo_config,
        activation=describe_activation(config),
        stock="transformer_engine" if is_engine else "local",
    )
    model = dataclasses.replace(found.model, seq_length=found.model.seq_length // ranks)
    return dataclasses.replace(found, model=model, context_parallel=1)


def _is_portable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _portable_fields(config: Any) -> dict[str, Any]:
    """The fields that can be pickled for another process; functions that draw weights cannot, and do not matter."""
    fields = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_function = callable(value) and field.name != "activation_func"
        if field.init and not is_function and _is_portable(value):
            fields[field.name] = value
    return {**fields, **{name: value for name, value in _OVERRIDES.items() if name in fields}}


def measure_layers(run: Any) -> KeptBytes:
    """The figures of a Run whose layers `start_measuring` has read."""
    from tempo_megatron.memory.simulated.chunk import record_chunk

    has_experts = run.experts.layers if run.experts else (False,) * run.model.num_layers

    def count(tempo_config: TempoConfig) -> float:
        kinds = collections.Counter(
            (tempo_config.for_layer(layer, "decoder"), has) for layer, has in enumerate(has_experts)
        )
        values = {
            str(place): {name: getattr(config, name) for name in LAYER_OPERATIONS}
            for place, (config, _) in enumerate(kinds)
        }
        one_each = dataclasses.replace(
            run,
            model=dataclasses.replace(run.model, num_layers=len(kinds)),
            tempo=dataclasses.replace(tempo_config, layers=values),
            experts=run.experts and dataclasses.replace(run.experts, layers=tuple(has for _, has in kinds)),
            recompute_num_layers=None,
        )
        by_layer, _ = record_chunk(one_each)
        saved = [sum(each.num_bytes for each in by_layer["decoder", place]) for place in range(len(kinds))]
        total: int = sum(map(operator.mul, saved, kinds.values()))
        return total / len(has_experts)

    return KeptBytes(stock=round(count(TempoConfig.off())), tempo=round(count(run.tempo)))


def measure_kept_bytes(order: dict[str, Any]) -> KeptBytes:
    """The figures of a run, from the sizes that `start_measuring` has collected."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tempo_megatron import cpu
    from tempo_megatron.memory.fake_tensors import simulate_layout
    from tempo_megatron.memory.kept.ledger import measure

    cpu.use_cpu()
    tp = order["config"].get("tensor_model_parallel_size", 1)
    sizes = {name: order[name] for name in ("num_layers", "seq_length", "micro_batch_size") if name in order}
    with simulate_layout(tp):
        config = TransformerConfig(**order["config"])
        choices = {"stock": TempoConfig.off(), "tempo": TempoConfig(**order["tempo"])}
        found = {
            name: measure(config, choice, vocab_size=128 * tp, on_fake_tensors=True, **sizes).mean_layer_bytes
            for name, choice in choices.items()
        }
    return KeptBytes(stock=round(found["stock"]), tempo=round(found["tempo"]))
