"""Specs with Tempo's modules, for programs that take a spec by name: Megatron-LM's `--spec`, Megatron-Bridge and NeMo.

    --spec tempo_megatron.slots.named_specs tempo_layer    # a ready spec, for any supported Megatron
    --spec tempo_megatron.slots.named_specs tempo_block    # a function, since 0.19; the final norm is Tempo's too
    provider.transformer_layer_spec = tempo_block          # Megatron-Bridge and NeMo

A spec does not describe a model's embedding, loss head and micro batches. Embedding and loss head stay stock. If
dropout is on, so do the operations that draw masks, because nobody tells Tempo which samples it sees. For other choices
name a spec of your own: `my_layer = make_layer_spec(TempoConfig(norm="recompute", ...))`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.block_slots import TempoBlockSubmodules
from tempo_megatron.slots.choose import Refusal
from tempo_megatron.slots.dropout_rng import list_dropouts
from tempo_megatron.slots.layer_spec import get_stock_block_spec, tempoize
from tempo_megatron.slots.transformer_engine import is_installed

_DEFAULT = TempoConfig()


def tempo_block(config: Any, vp_stage: int | None = None, *, tempo_config: TempoConfig = _DEFAULT) -> Any:
    """The decoder block of a GPT with Tempo in its slots: Transformer Engine's if Megatron has it, else the local one.

    Args:
        config: a TransformerConfig, such as Megatron-Bridge's and NeMo's model configurations, or an object that has
            one as `transformer`, such as Megatron-LM's GPTModelConfig.
        vp_stage: the virtual pipeline stage.
        tempo_config: the operations' values; `functools.partial(tempo_block, tempo_config=...)` sets others.

    Operations that draw masks stay stock if dropout is on.

    Raises ValueError as `tempoize`, and for a written value of an operation that would draw masks.
    """
    transformer_config = getattr(config, "transformer", config)
    is_local = getattr(transformer_config, "transformer_impl", "transformer_engine") == "local"
    has_engine = is_installed() and not is_local
    stock = get_stock_block_spec(transformer_config, use_transformer_engine=has_engine, vp_stage=vp_stage)
    obstacles = {
        operation: Refusal(
            f"{name} is {getattr(transformer_config, name)}, and a spec cannot tell Tempo which samples a micro batch "
            "holds",
            "start the run with `tempo-megatron run`",
        )
        for operation, name in list_dropouts(transformer_config).items()
    }
    return tempoize(stock, transformer_config, tempo_config, vp_stage=vp_stage, obstacles=obstacles)


def make_layer_spec(tempo_config: TempoConfig) -> ModuleSpec:
    """A layer spec that every Megatron takes as it is, for each layer of a GPT.

    A ready spec does not know the configuration, so the layer chooses its modules. The final norm is Megatron's.
    """
    # Megatron and its tools read these submodules; each layer replaces them by its own.
    shown = get_gpt_layer_local_spec().submodules
    return ModuleSpec(module=TempoTransformerLayer, params={"tempo_config": tempo_config}, submodules=shown)


class TempoTransformerLayer(TransformerLayer):  # type: ignore[misc,unused-ignore]
    """Megatron's layer with the submodules that `tempo_block` has for its configuration and layer number."""

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
        # For `report_on`: the model's own spec does not say what was asked for.
        self.tempo_block = block


tempo_layer = make_layer_spec(_DEFAULT)
"""Everything that a spec can have, as a ready one."""
