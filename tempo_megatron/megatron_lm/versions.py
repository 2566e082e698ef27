"""Lists what Tempo takes hold of in Megatron-LM: the one place that a new version changes.

Every place is a name `module:attribute` that Megatron looks up when it uses it, so that replacing the attribute is all
that it takes and no file changes. An unknown version warns and is tried; a place that is not there is an error that
names it.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import traceback
from typing import Any

FIRST, LAST = "0.14", "0.20"
"""Every version from one to the other has these places."""

ADD_ARGUMENTS = "megatron.training.arguments:add_megatron_arguments"
"""(parser) -> parser, with Megatron's own arguments."""

GET_ARGS = "megatron.training.global_vars:get_args"
"""() -> the parsed arguments."""

BEGIN_MICRO_BATCH = "megatron.core.pipeline_parallel.schedules:set_current_microbatch"
"""(model chunk, index of the micro batch in the step), called before the forward of each micro batch."""

PIPELINES = tuple(
    f"megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_{how}_interleaving"
    for how in ("with", "without")
)
"""The schedules of pipelines, which all ranks of a pipeline begin before one of them waits for another."""

GRAPHS_SINCE = "0.16"
"""The first version in whose CUDA graphs Tempo draws masks."""

FULL_ITERATION = "megatron.core.full_cuda_graph:FullCudaGraphWrapper"
"""Its call runs, captures or replays all micro batches of a step (since 0.16)."""

TRAIN_STEP = "megatron.training.training:train_step"
"""(..., model, ...), with the model chunks of this rank; one step of training."""

MASK_ARGUMENT = "create_attention_mask_in_dataloader"
"""The parsed argument that says whether the data loader makes a [b, 1, s, s] mask."""


class LaunchError(ValueError):
    """What a user has to change; one sentence."""


def is_raised_here(error: BaseException) -> bool:
    """Whether code of this project raised the error, and not what it called: Megatron, or a script's own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").partition(".")[0] in ("tempo_megatron", "tempo_kernels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model class, and what of its constructor holds specs."""

    place: str
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


def find_warning(version: str) -> str | None:
    """What to say where a Megatron-core version is not one of those from FIRST to LAST; None where it is."""
    first, found, last = ([int(number) for number in re.findall(r"\d+", each)[:2]] for each in (FIRST, version, LAST))
    if first <= found <= last:
        return None
    return f"Megatron-core {version} is not among the versions that are known, {FIRST} to {LAST}; it is tried as {LAST}"


def get_hook(place: str, version: str) -> Any:
    """What stands at `module:attribute`.

    Raises LaunchError where it is not there.
    """
    module_name, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module_name.startswith(str(error.name)):
            raise  # a package that Megatron needs
        raise LaunchError(
            f"Megatron-core {version} has no {attribute} in {module_name}, which --use-tempo takes hold of; use a "
            f"version from {FIRST} to {LAST}, or leave --use-tempo out"
        ) from error


def replace_hook(place: str, value: Any) -> None:
    """Put `value` at `module:attribute`."""
    module_name, _, attribute = place.partition(":")
    setattr(importlib.import_module(module_name), attribute, value)
