"""Lists what Tempo takes hold of in Megatron-LM, the Patches and the Models: the one place that a new version changes.

Megatron looks every such name up when it uses it, so that replacing the attribute is all that it takes and no file
changes. A place that is not there is an error that names it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

FIRST, LAST = "0.14", "0.20"
"""Every version from one to the other has these places."""

GRAPHS_SINCE = "0.16"
"""The first version in whose CUDA graphs Tempo draws masks."""

MASK_ARGUMENT = "create_attention_mask_in_dataloader"
"""The parsed argument that says whether the data loader makes a [b, 1, s, s] mask."""


@dataclasses.dataclass(frozen=True)
class Patch:
    """A function of Megatron's that Tempo wraps, or calls."""

    place: str
    """`module:attribute`, or `module:Class.attribute`."""
    since: str = FIRST
    """The first version that has it."""


_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
# (parser) -> parser; gets the Tempo group.
ADD_ARGUMENTS = Patch("megatron.training.arguments:add_megatron_arguments")
# () -> the parsed arguments; is called, and stays.
GET_ARGS = Patch("megatron.training.global_vars:get_args")
# (model chunk, micro batch of the step), before each forward; announces the samples to Tempo's dropout.
BEGIN_MICRO_BATCH = Patch(f"{_SCHEDULES}:set_current_microbatch")
# A step of a pipeline, which all of its ranks begin before one waits for another; gathers the banner.
PIPELINES = tuple(Patch(f"{_SCHEDULES}:forward_backward_pipelining_{how}_interleaving") for how in ("with", "without"))
# Runs, captures or replays all micro batches of a step; announces its first sample.
FULL_ITERATION = Patch("megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__", since=GRAPHS_SINCE)
# (..., model, ...); --tempo-ledger watches two steps.
TRAIN_STEP = Patch("megatron.training.training:train_step")


class LaunchError(ValueError):
    """What a user has to change; one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model class, and what of its constructor holds specs."""

    place: str
    """Of its class."""
    specs: dict[str, str]
    """Argument that holds a spec -> argument that holds its TransformerConfig."""

    prediction_spec: str = ""
    """Argument that may hold the spec of multi-token prediction, for the config of the layers."""

    patterns: tuple[str, ...] = ()
    """Arguments of which one holds the pattern of a HybridModel's layers."""

    since: str = FIRST
    """The first version that has it."""

    has_causal_mask: bool = False
    """Whether a mask that hides the future, and nothing else, is all that its layers are given."""

    @property
    def name(self) -> str:
        return self.place.partition(":")[2]

    @property
    def constructor(self) -> Patch:
        return Patch(f"{self.place}.__init__", self.since)


MODELS = (
    Model(
        place="megatron.core.models.gpt.gpt_model:GPTModel",
        specs={"transformer_layer_spec": "config"},
        prediction_spec="mtp_block_spec",
        has_causal_mask=True,
    ),
    Model(place="megatron.core.models.bert.bert_model:BertModel", specs={"transformer_layer_spec": "config"}),
    Model(
        place="megatron.core.models.T5.t5_model:T5Model",
        specs={"transformer_encoder_layer_spec": "encoder_config", "transformer_decoder_layer_spec": "config"},
    ),
    Model(
        place="megatron.core.models.hybrid.hybrid_model:HybridModel",
        specs={"hybrid_stack_spec": "config"},
        patterns=("hybrid_layer_pattern", "hybrid_override_pattern"),
        since="0.18",
        has_causal_mask=True,
    ),
)


def get_hook(patch: Patch, version: str) -> Any:
    """Returns what stands at the place of a patch. Raises LaunchError where it is not there."""
    module_name, _, attribute = patch.place.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module_name.startswith(str(error.name)):
            raise  # a package that Megatron needs
        raise LaunchError(
            f"Megatron-core {version} has no {attribute} in {module_name}, which --use-tempo takes hold of; use a "
            f"version from {FIRST} to {LAST}, or leave --use-tempo out"
        ) from error


def wrap_hook(patch: Patch, version: str, wrapper: Callable[..., Any]) -> None:
    """Has the place of a patch call `wrapper(what stood there, ...)`. Raises LaunchError where there is nothing."""
    get_hook(patch, version)
    module_name, _, attribute = patch.place.partition(":")
    *owners, name = attribute.split(".")
    wrap(functools.reduce(getattr, owners, importlib.import_module(module_name)), name, wrapper)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Has `owner.name(...)` call `wrapper(what stood there, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)
