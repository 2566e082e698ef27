"""Makes and changes a Run of the memory estimate, whichever of its parts has the field."""

from __future__ import annotations

import dataclasses
from typing import Any

from tempo_megatron.memory.run import Run
from tempo_megatron.models.layout import Layout
from tempo_megatron.models.shape import NAMES, ModelShape, make_shape
from tempo_megatron.settings.config import TempoConfig

_OF_LAYOUT = tuple(field.name for field in dataclasses.fields(Layout))

# Of most of the functional tests in NVIDIA/Megatron-LM@d98e8a64dd, tests/functional_tests/test_cases/gpt.
SMALL = {"num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "vocab_size": 50257}


def make_run(sizes: dict[str, Any], **settings: Any) -> Run:
    """A Run as those of the published peaks, without Tempo."""
    usual = {"micro_batch_size": 4, "stock": "transformer_engine", "deterministic": True, "data_has_masks": True}
    return build_run(**{"model": make_shape(**sizes), "tempo": TempoConfig.off(), **usual, **settings})


def build_run(model: ModelShape, tempo: TempoConfig, **values: Any) -> Run:
    """A Run with these values of its layout's fields and of its own."""
    return change_run(Run(model=model, tempo=tempo), **values)


def change_run(run: Run, **values: Any) -> Run:
    """`run` with these values of its model's fields, of its layout's and of its own."""
    model = dataclasses.replace(values.pop("model", run.model), **_take(values, NAMES))
    layout = dataclasses.replace(values.pop("layout", run.layout), **_take(values, _OF_LAYOUT))
    return dataclasses.replace(run, model=model, layout=layout, **values)


def _take(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: values.pop(name) for name in [*values] if name in names}
