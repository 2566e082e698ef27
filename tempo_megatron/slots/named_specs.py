"""Tempo by the name of a spec, where nothing may be patched: Megatron-LM's `--spec`, Megatron-Bridge and NeMo.

    --spec tempo_megatron.slots.named_specs tempo_layer    # any supported Megatron: a ready spec
    --spec tempo_megatron.slots.named_specs tempo_block    # since 0.19: a function; the final norm is Tempo's too
    provider.transformer_layer_spec = tempo_block          # Megatron-Bridge and NeMo

A spec says nothing of a model's embedding, loss head and micro batches: these stay stock, and so does what draws
dropout masks where dropout is on, because nobody tells Tempo which samples it sees. For other choices name a spec of
your own: `my_layer = make_layer_spec(TempoConfig(norm="recompute", ...))`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.block_slots import TempoBlockSubmodules
from tempo_megatron.slots.choose import Obstacles, Refusal
from tempo_megatron.slots.layer_spec import tempoize
from tempo_megatron.slots.transformer_engine import is_installed

_DEFAULT = TempoConfig()


def tempo_block(config: Any, vp_stage: int | None = None, *, tempo_config: TempoConfig = _DEFAULT) -> Any:
    """The decoder block of a GPT with Tempo in its slots: Transformer Engine's where Megatron has it, else local.

    Args:
        config: a TransformerConfig (Megatron-Bridge's and NeMo's model configurations are ones), or what holds one as
            `transformer`, as Megatron-LM's GPTModelConfig does.
        vp_stage: the virtual pipeline stage.
        tempo_config: which operations; `functools.partial(tempo_block, tempo_config=...)` gives a function to name.

    What would draw masks stays stock where dropout is on.

    Raises ValueError as `tempoize`, and where a value asks for what draws.
    """
    transformer_config = getattr(config, "transformer", config)
    stock = get_gpt_decoder_block_spec(
        transformer_config,
        use_transformer_engine=_uses_transformer_engine(transformer_config),
        normalization=transformer_config.normalization,
        qk_l2_norm=getattr(transformer_config, "qk_l2_norm", False),
        vp_stage=vp_stage,
    )
    return tempoize(
        stock, transformer_config, tempo_config, vp_stage=vp_stage, obstacles=_find_obstacles(transformer_config)
    )


def make_layer_spec(tempo_config: TempoConfig) -> ModuleSpec:
    """A layer spec that every Megatron takes as it is, for each layer of a GPT.

    A ready spec cannot know the configuration; its layer does, and chooses its modules. The final norm is Megatron's.
    """
    # Megatron and its tools look at these; each layer puts its own in their place.
    shown = get_gpt_layer_local_spec().submodules
    return ModuleSpec(module=TempoTransformerLayer, params={"tempo_config": tempo_config}, submodules=shown)


class TempoTransformerLayer(TransformerLayer):  # type: ignore[misc,unused-ignore]
    """Megatron's layer that asks its configuration what its slots hold: layer `layer_number`'s of `tempo_block`."""

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int = 1,
        *args: Any,
        tempo_config: TempoConfig = _DEFAULT,
        **kwargs: Any,
    ) -> None:
        block: TempoBlockSubmodules = tempo_block(config, kwargs.get("vp_stage"), tempo_config=tempo_config)
        assert block.layer_specs is not None
        chosen = block.layer_specs[layer_number - 1].submodules
        super().__init__(config, chosen, layer_number, *args, **kwargs)
        # What was asked for, for `report_on`; the model's own spec says nothing of it.
        self.tempo_block = block


tempo_layer = make_layer_spec(_DEFAULT)
"""Everything that a spec can have, as a ready one."""


def _uses_transformer_engine(transformer_config: Any) -> bool:
    return is_installed() and getattr(transformer_config, "transformer_impl", "transformer_engine") != "local"


def _find_obstacles(transformer_config: Any) -> Obstacles:
    """Why the operations that would draw masks are left out."""
    dropouts = {"dropout": "hidden_dropout", "attention": "attention_dropout"}
    return {
        operation: Refusal(
            f"{name} is {p}, and a spec cannot tell Tempo which samples a micro batch holds",
            "start the run with `tempo-megatron run`",
        )
        for operation, name in dropouts.items()
        if (p := getattr(transformer_config, name)) > 0
    }
