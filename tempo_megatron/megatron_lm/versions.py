"""Lists by version what Tempo takes hold of in Megatron-LM: the one place that a new version changes.

Every place is a name `module:attribute` that Megatron looks up when it uses it, so that replacing the attribute is all
that it takes and no file changes. An unknown version warns and is tried; a place that is not there is an error that
names it.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from packaging.version import Version


class LaunchError(ValueError):
    """What a user has to change; one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model class, and what of its constructor holds specs."""

    place: str
    specs: dict[str, str]
    """Argument that holds a spec -> argument that holds its TransformerConfig."""

    has_causal_mask: bool = False
    """Whether a mask that hides the future, and nothing else, is all that its layers are given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """The places of one version."""

    add_arguments: str = "megatron.training.arguments:add_megatron_arguments"
    """(parser) -> parser, with Megatron's own arguments."""

    get_args: str = "megatron.training.global_vars:get_args"
    """() -> the parsed arguments, of which `mask_argument`, seed, micro_batch_size, consumed_train_samples and
    data_parallel_size are read."""

    begin_micro_batch: str = "megatron.core.pipeline_parallel.schedules:set_current_microbatch"
    """(model chunk, index of the micro batch in the step), called before the forward of each micro batch."""

    train_step: str = "megatron.training.training:train_step"
    """(..., model, ...), with the model chunks of this rank; one step of training."""

    mask_argument: str = "create_attention_mask_in_dataloader"
    """Whether the data loader makes a [b, 1, s, s] mask."""

    models: tuple[Model, ...] = (
        Model(
            place="megatron.core.models.gpt.gpt_model:GPTModel",
            specs={"transformer_layer_spec": "config"},
            has_causal_mask=True,
        ),
        Model(place="megatron.core.models.bert.bert_model:BertModel", specs={"transformer_layer_spec": "config"}),
        Model(
            place="megatron.core.models.T5.t5_model:T5Model",
            specs={
                "transformer_encoder_layer_spec": "encoder_config",
                "transformer_decoder_layer_spec": "config",
            },
        ),
    )


_SINCE_0_14 = Hooks()

# Minor version -> its places. From 0.14 to 0.20 the same attributes are there; what moved between these versions (who
# calls add_megatron_arguments, where pretrain_bert.py lies, who builds a GPTModel) none of them depends on.
VERSIONS = {f"0.{minor}": _SINCE_0_14 for minor in range(14, 21)}


def find_hooks(version: str) -> tuple[Hooks, str | None]:
    """The places of a Megatron-core version, and a warning where the version is none of the table."""
    parsed = Version(version)
    known = VERSIONS.get(f"{parsed.major}.{parsed.minor}")
    if known is not None:
        return known, None
    first, *_, last = VERSIONS
    return _SINCE_0_14, (
        f"Megatron-core {version} is not among the versions that are known, {first} to {last}; it is tried as {last}"
    )


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
            f"version from {next(iter(VERSIONS))} to {list(VERSIONS)[-1]}, or leave --use-tempo out"
        ) from error


def replace_hook(place: str, value: Any) -> None:
    """Put `value` at `module:attribute`."""
    module_name, _, attribute = place.partition(":")
    setattr(importlib.import_module(module_name), attribute, value)
