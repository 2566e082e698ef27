"""Tempo for Megatron-core: transformer layers that keep less for backward.

The public names are imported when they are first asked for: Megatron-core takes seconds to import, and the
data preparation and every `--help` do without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tempo_megatron.arguments import add_tempo_arguments
    from tempo_megatron.config import TempoConfig
    from tempo_megatron.embedding import tempoize_embedding
    from tempo_megatron.layer_spec import tempo_block_spec, tempoize
    from tempo_megatron.loss import tempoize_loss

__all__ = ["TempoConfig", "add_tempo_arguments", "tempo_block_spec", "tempoize", "tempoize_embedding", "tempoize_loss"]

_HOMES = {
    "TempoConfig": "config",
    "add_tempo_arguments": "arguments",
    "tempo_block_spec": "layer_spec",
    "tempoize": "layer_spec",
    "tempoize_embedding": "embedding",
    "tempoize_loss": "loss",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
