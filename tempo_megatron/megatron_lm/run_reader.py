"""Reads a Run from a run of Megatron-LM, for the planner and for the report after out-of-memory.

It is read from the model that the run builds, not from its command line: that leaves most sizes out, says nothing of
the model's class, and has several names for one activation.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model

from tempo_megatron.memory.megatron.read_run import find_unknown, find_unknown_in_layers, read_run
from tempo_megatron.memory.plan.gpu import find_chip
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.mlp import describe_activation


def read_configured_run(
    name: str, config: Any, arguments: Mapping[str, Any], run: Any, tempo: TempoConfig, *, layers_only: bool = False
) -> Run:
    """As `tempo_megatron.memory.megatron.read_run.read_run`, of a model on this process's device."""
    is_local = getattr(run, "transformer_impl", "local") == "local"
    stock = ("local" if is_local else "transformer_engine") if torch.cuda.is_available() else "cpu"
    activation = describe_activation(config)
    found = read_run(name, config, arguments, run, tempo, activation=activation, stock=stock, layers_only=layers_only)
    return dataclasses.replace(found, chip=find_chip())


def read_built_run(run: Any) -> Run:
    """The run of this process, whose model is built, or was begun to be.

    run: Megatron's arguments.

    Raises ValueError for what the estimate does not know.
    """
    # A pipeline stage has a model for each of its chunks.
    models = [each for each in gc.get_objects() if issubclass(type(each), (GPTModel, BertModel, T5Model))]
    found = [read_model(model, run) for model in models]
    if not found:
        raise ValueError("no GPTModel, BertModel or T5Model is built")
    if any(other.model != found[0].model for other in found):
        raise ValueError("models of several shapes are built, and the estimate knows one")
    return found[0]


def read_model(model: Any, run: Any, *, layers_only: bool = False) -> Run:
    """The run of one model; see `read_configured_run`.

    Raises ValueError for what the estimate does not know.
    """
    bases = (base.__name__ for base in (GPTModel, BertModel, T5Model) if isinstance(model, base))
    name = next(bases, type(model).__name__)
    unknown = find_unknown_in_layers(name, model.config) if layers_only else find_unknown(name, model.config, run)
    if unknown is not None:
        raise ValueError(f"the run has {unknown}")
    names = ("vocab_size", "max_sequence_length", "position_embedding_type", "share_embeddings_and_output_weights")
    arguments = {name: getattr(model, name) for name in names}
    if name == "BertModel":
        arguments["add_binary_head"] = model.add_binary_head
        # The last stages have no embedding, and there nothing depends on it; a binary head tells two segments apart.
        segments = 2 if model.add_binary_head else 0
        arguments["num_tokentypes"] = getattr(getattr(model, "embedding", None), "num_tokentypes", segments)
    choices = getattr(model.transformer_layer_spec, "choices", None)
    tempo = TempoConfig.off() if choices is None else choices.config
    return read_configured_run(name, model.config, arguments, run, tempo, layers_only=layers_only)
