"""What a test changes of the process that runs Megatron-LM; each function takes back its change when the run ends."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any


def use_torch_norms(undo: contextlib.ExitStack) -> None:
    """Stock with torch's norms that know sequence parallelism, where Megatron's wrapper of them refuses it."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from tempo_megatron import TempoConfig, tempoize

    construct = GPTModel.__init__
    signature = inspect.signature(construct)

    def construct_with_torch_norms(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        spec = tempoize(
            given["transformer_layer_spec"], given["config"], TempoConfig.off(), vp_stage=given.get("vp_stage")
        )
        construct(**{**given, "transformer_layer_spec": spec})

    GPTModel.__init__ = construct_with_torch_norms
    undo.callback(setattr, GPTModel, "__init__", construct)
