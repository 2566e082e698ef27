"""Tempo for Megatron-core: transformer layers that keep less for backward.

The public names are imported when they are first asked for: Megatron-core takes seconds to import, and the
data preparation and every `--help` do without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tempo_kernels import __version__
from tempo_megatron.extras import check_installed

if TYPE_CHECKING:
    from tempo_megatron.cpu import use_cpu
    from tempo_megatron.deepspeed_initialize import initialize
    from tempo_megatron.settings.arguments import add_tempo_arguments
    from tempo_megatron.settings.config import TempoConfig
    from tempo_megatron.slots.dropout import tempoize_embedding
    from tempo_megatron.slots.dropout_rng import set_micro_batch
    from tempo_megatron.slots.hybrid import tempoize_hybrid
    from tempo_megatron.slots.layer_spec import tempo_block_spec, tempoize
    from tempo_megatron.slots.loss import (
        TempoBertModel,
        TempoGPTModel,
        TempoT5Model,
        fused_bert_class,
        fused_gpt_class,
        fused_t5_class,
        log_probs,
        tempoize_loss,
    )
    from tempo_megatron.slots.offload import offload_layers
    from tempo_megatron.slots.report import TempoReport, report_on

__all__ = [
    "TempoBertModel",
    "TempoConfig",
    "TempoGPTModel",
    "TempoReport",
    "TempoT5Model",
    "__version__",
    "add_tempo_arguments",
    "fused_bert_class",
    "fused_gpt_class",
    "fused_t5_class",
    "initialize",
    "log_probs",
    "offload_layers",
    "report_on",
    "set_micro_batch",
    "tempo_block_spec",
    "tempoize",
    "tempoize_embedding",
    "tempoize_hybrid",
    "tempoize_loss",
    "use_cpu",
]

# Public name -> its file. Those of _NEED_MEGATRON import Megatron-core.
_HOMES = {
    "TempoBertModel": "slots.loss",
    "TempoConfig": "settings.config",
    "TempoGPTModel": "slots.loss",
    "TempoReport": "slots.report",
    "TempoT5Model": "slots.loss",
    "add_tempo_arguments": "settings.arguments",
    "fused_bert_class": "slots.loss",
    "fused_gpt_class": "slots.loss",
    "fused_t5_class": "slots.loss",
    "initialize": "deepspeed_initialize",
    "log_probs": "slots.loss",
    "offload_layers": "slots.offload",
    "report_on": "slots.report",
    "set_micro_batch": "slots.dropout_rng",
    "tempo_block_spec": "slots.layer_spec",
    "tempoize": "slots.layer_spec",
    "tempoize_embedding": "slots.dropout",
    "tempoize_hybrid": "slots.hybrid",
    "tempoize_loss": "slots.loss",
    "use_cpu": "cpu",
}
_NEED_MEGATRON = _HOMES.keys() - {"TempoConfig", "add_tempo_arguments", "initialize"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEED_MEGATRON:
        check_installed(name, "megatron", "megatron.core")
    if name == "initialize":
        check_installed(name, "deepspeed", "deepspeed")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
