"""Layers with values of their own: each computes and keeps what it does in a model where all are like it. That masks
stay is in test_megatron_lm_layouts.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from gpt import (
    assert_equal_to_stock,
    bert_losses,
    build_bert,
    build_gpt,
    build_t5,
    differentiate,
    gpt_config,
    losses,
    t5_losses,
)  # fmt: skip
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from tempo_megatron import TempoConfig, tempoize, use_cpu
from tempo_megatron.memory.tape.scopes import record_saved
from tempo_megatron.slots.report import report_on

pytestmark = pytest.mark.usefixtures("one_rank")
OFF = TempoConfig.off()
LAYERS = {
    "0": {"activation": "recompute", "attention": "off"},
    "1": {"norm": "recompute", "attention": "softmax"},
    "2": {"activation": "off", "norm": "off", "dropout": "off", "attention": "off"},
}
MIXED = TempoConfig(layers=LAYERS)


def mixed_model(tempo_config: TempoConfig, **settings: Any) -> Any:
    return build_gpt(gpt_config(num_layers=4, **settings), tempo_config)


CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@pytest.mark.parametrize("recomputation", [{}, CORE], ids=["kept", "core attention recomputed"])
def test_loss_and_gradients_equal_stock(recomputation: dict[str, Any]) -> None:
    found = []
    for tempo_config in (MIXED, OFF):
        model = mixed_model(tempo_config, **recomputation)
        found.append(differentiate(model, losses(model, 0, 2, gives_mask=True).mean()))
    assert_equal_to_stock(*found)


def kept_bytes(tempo_config: TempoConfig) -> dict[int, int]:
    """Layer -> bytes that its modules are the first to keep."""
    model = mixed_model(tempo_config, dropout=0.1)
    _, kept = record_saved(model, lambda: losses(model, 0, 2, gives_mask=True))
    found = dict.fromkeys(range(4), 0)
    for saved in kept:
        if saved.operation.startswith("decoder.layers."):
            found[int(saved.operation.split(".")[2])] += saved.num_bytes
    return found


def test_each_layer_keeps_what_it_keeps_where_all_are_like_it() -> None:
    alone = {layer: kept_bytes(MIXED.for_layer(layer))[layer] for layer in range(4)}
    assert kept_bytes(MIXED) == alone
    assert len(set(alone.values())) == 4  # and no two are alike


def classes_by_layer(virtual: int | None) -> dict[str, str]:
    """What this pipeline rank's layers hold, and its report's words."""
    use_cpu()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual
    )
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": virtual}
    config = gpt_config(num_layers=4, **stages, pipeline_dtype=torch.float32)
    tempo_config = TempoConfig(layers={"1-2": {"norm": "recompute"}, "3": {"norm": "off"}})
    found = {}
    for vp_stage in range(virtual) if virtual else [None]:
        block = tempoize(get_gpt_layer_local_spec(), config, tempo_config, vp_stage=vp_stage)
        for index, layer in enumerate(block.layer_specs or []):
            found[str(block.first_layer + index)] = layer.submodules.input_layernorm.__name__
        found |= {slot.where: str(slot.left) for slot in report_on(block).left if slot.slot == "input_layernorm"}
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("virtual", [None, 2], ids=["PP 2", "PP 2, interleaved"])
def test_ranges_go_across_the_border_of_pipeline_stages(virtual: int | None) -> None:
    first, last = run_ranks(classes_by_layer, 2, virtual)
    assert set(first) == ({"0", "2"} if virtual else {"0", "1"})
    assert first | last == {
        "0": "TempoNorm",
        "1": "TempoRecomputeNorm",
        "2": "TempoRecomputeNorm",
        "3": "TorchNorm",
        "decoder.layers.3": "off for layer 3",
    }


def run_bert_or_t5(name: str, tempo_config: TempoConfig) -> Any:
    """Loss and gradients, and the norms in front of the MLPs of each stack."""
    build, run = {"BERT": (build_bert, bert_losses), "T5": (build_t5, t5_losses)}[name]
    model: Any = build(gpt_config(), tempo_config)
    result = differentiate(model, run(model).mean())
    stacks = {stack: getattr(model, stack) for stack in ("encoder", "decoder") if hasattr(model, stack)}
    norms = {
        stack: [type(layer.pre_mlp_layernorm).__name__ for layer in block.layers] for stack, block in stacks.items()
    }
    return result, norms


RECOMPUTES, IN_PLACE = "TempoRecomputeNorm", "TempoNorm"
STACKS = {
    "BERT": ("BERT", {"1": {"norm": "recompute"}}, {"encoder": [IN_PLACE, RECOMPUTES]}),
    "T5, both": ("T5", {"1": {"norm": "recompute"}}, {key: [IN_PLACE, RECOMPUTES] for key in ("encoder", "decoder")}),
    "T5, each": (
        "T5",
        {"encoder 0": {"norm": "recompute"}, "decoder 1-": {"norm": "recompute", "activation": "off"}},
        {"encoder": [RECOMPUTES, IN_PLACE], "decoder": [IN_PLACE, RECOMPUTES]},
    ),
}


@pytest.mark.parametrize(("name", "layers", "expected"), STACKS.values(), ids=STACKS)
def test_stacks_of_bert_and_t5_take_their_ranges_and_equal_stock(name: str, layers: Any, expected: Any) -> None:
    found, norms = run_bert_or_t5(name, TempoConfig(loss="off", layers=layers))
    assert norms == expected
    assert_equal_to_stock(found, run_bert_or_t5(name, OFF)[0])


@pytest.mark.parametrize(
    ("build", "layers", "message"),
    [
        (build_gpt, "1-4", r'tempo.layers\["1-4"\] goes beyond the decoder\'s 2 layers'),
        (build_gpt, "encoder 1", r'tempo.layers\["encoder 1"\] is given, and a GPTModel has no encoder'),
        (build_bert, "decoder 0", r'tempo.layers\["decoder 0"\] is given, and a BertModel has no decoder'),
    ],
)
def test_ranges_that_a_model_does_not_have_are_refused_when_it_is_built(build: Any, layers: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(gpt_config(), TempoConfig(layers={layers: {"norm": "off"}}))
