"""Changes a Run of the memory estimate, whichever of its parts has the field."""

from __future__ import annotations

import dataclasses
from typing import Any

from tempo_megatron.memory.run import Run
from tempo_megatron.models.shape import NAMES


def change_run(run: Run, **values: Any) -> Run:
    """`run` with these values of its model's fields and of its own."""
    of_model = {name: values.pop(name) for name in [*values] if name in NAMES}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, **of_model), **values)
