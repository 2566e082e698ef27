"""A pytest plugin for Megatron-LM's own unit tests on a CPU: `pytest -p megatron_unit_plugin tests/unit_tests/FILE`.

It makes the CPU answer as a CUDA device (megatron_cpu.py says what that means), puts stand-ins where Megatron looks for
Transformer Engine (te_package.py), and downloads nothing. With TEMPO_SLOTS=1 Tempo's slots stand in what the tests
build: in layers and blocks, in SelfAttention's core attention, in GPTModel, BertModel and
T5Model with embedding and loss head, and TempoMLP and TempoDotProductAttention where a test names the class itself.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import types
from typing import Any

import te_package

te_package.install()  # before megatron.core is imported

import megatron_cpu  # noqa: E402
import pytest  # noqa: E402

megatron_cpu.install()
_DOWNLOADS = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
_DOWNLOADS.download_and_extract_asset = lambda **_: False  # type: ignore[attr-defined]
sys.modules[_DOWNLOADS.__name__] = _DOWNLOADS


def pytest_configure() -> None:
    megatron_cpu.skip_what_is_compiled(os.environ["MEGATRON_LM_ROOT"])
    if os.environ.get("TEMPO_SLOTS") == "1":
        _put_slots_in_place()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TEMPO_SLOTS") != "1":
        return
    from tempo_megatron.slots.attention import TempoDotProductAttention
    from tempo_megatron.slots.mlp import TempoMLP

    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        for name, ours in (("MLP", TempoMLP), ("DotProductAttention", TempoDotProductAttention)):
            if hasattr(module, name):
                setattr(module, name, ours)


def _put_slots_in_place() -> None:
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from tempo_megatron import TempoConfig, set_micro_batch, tempoize, tempoize_embedding, tempoize_loss
    from tempo_megatron.slots.attention import TempoDotProductAttention

    auto = TempoConfig()

    def tempoize_layer(build: Any, layer: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        spec = ModuleSpec(type(layer), submodules=submodules)
        (found,) = tempoize(TransformerBlockSubmodules([spec]), config, auto).layer_specs or ()
        build(layer, config, found.submodules, *args, **kwargs)
        # A trainer would say which samples a micro batch holds. Some tests call forward itself, past hooks.
        set_micro_batch(1234, 0)
        layer.register_forward_pre_hook(lambda *_: set_micro_batch(1234, 0))

    def tempoize_block(build: Any, block: Any, config: Any, spec: Any, *args: Any, **kwargs: Any) -> None:
        build(block, config, tempoize(spec, config, auto, vp_stage=kwargs.get("vp_stage")), *args, **kwargs)

    def tempoize_attention(build: Any, attention: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        if submodules.core_attention is DotProductAttention:
            submodules = dataclasses.replace(submodules, core_attention=TempoDotProductAttention)
        build(attention, config, submodules, *args, **kwargs)
        set_micro_batch(1234, 0)

    def tempoize_model(build: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        set_micro_batch(1234, 0)
        model.register_forward_pre_hook(lambda *_: set_micro_batch(1234, 0))
        tempoize_embedding(model, auto)
        tempoize_loss(model, auto)

    for cls, wrapper in (
        (TransformerLayer, tempoize_layer),
        (TransformerBlock, tempoize_block),
        (SelfAttention, tempoize_attention),
        (GPTModel, tempoize_model),
        (BertModel, tempoize_model),
        (T5Model, tempoize_model),
    ):
        cls.__init__ = _wrap(cls.__init__, wrapper)


def _wrap(original: Any, wrapper: Any) -> Any:
    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> None:
        wrapper(original, *args, **kwargs)

    return build
