"""What is replaced, what is left, and why: of specs, and of models with their embedding and loss head."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
from typing import Any

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, build_gpt, differentiate, gpt_config, losses
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.report import ReportedSlot, TempoReport, check_built, report_on

pytestmark = pytest.mark.usefixtures("one_rank")
AUTO = TempoConfig()
MOE = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
MOE |= {"add_bias_linear": False, "moe_layer_freq": [0, 1], "moe_ffn_hidden_size": 64}


EXPERTS = {**MOE, "num_layers": 2}
LINES: dict[str, tuple[TempoConfig, dict[str, Any], str, list[str]]] = {
    "everything": (
        TempoConfig(), {"qk_layernorm": True}, "activation 4 of 4, norm 17 of 17, dropout 8 of 8, attention 4 of 4", [],
    ),
    "off": (
        TempoConfig(norm="off", dropout="off"), {},
        "activation 4 of 4, norm 0 of 9, dropout 0 of 8, attention 4 of 4", [
            "norm in decoder.layers.0-3 (input_layernorm, pre_mlp_layernorm): off",
            "dropout in decoder.layers.0-3 (self_attn_bda, mlp_bda): off",
            "norm in decoder (final_layernorm): off",
        ],
    ),
    "off for layers": (
        TempoConfig(layers={"0-1": {"attention": "off"}, "decoder 3": {"attention": "off", "activation": "off"}}), {},
        "activation 3 of 4, norm 9 of 9, dropout 8 of 8, attention 1 of 4", [
            "attention in decoder.layers.0-1 (self_attention.core_attention): off for layers 0-1",
            "activation in decoder.layers.3 (mlp): off for layer 3",
            "attention in decoder.layers.3 (self_attention.core_attention): off for layer 3",
        ],
    ),
    "auto, and written for a layer": (
        TempoConfig(attention="off", layers={"2-": {"attention": "auto"}}),
        {"hybrid_context_parallel": True, "num_layers": 3},
        "activation 3 of 3, norm 7 of 7, dropout 6 of 6, attention 0 of 3", [
            "attention in decoder.layers.0-1 (self_attention.core_attention): off",
            "attention in decoder.layers.2 (self_attention.core_attention): auto: hybrid_context_parallel is on, which "
            "Tempo's attention does not support",
        ],
    ),
    "experts": (
        TempoConfig(linear_fc1="recompute"), EXPERTS,
        "activation 2 of 2, norm 5 of 5, dropout 4 of 4, attention 2 of 2, linear_fc1 1 of 2",
        ["linear_fc1 in decoder.layers.1 (mlp): mixture of experts"],
    ),
    "linears again": (
        TempoConfig(linear_qkv="recompute", layers={"1": {"linear_fc1": "recompute"}}), {"num_layers": 2},
        "activation 2 of 2, norm 5 of 5, dropout 4 of 4, attention 2 of 2, linear_fc1 1 of 2, linear_qkv 2 of 2",
        ["linear_fc1 in decoder.layers.0 (mlp): off"],
    ),
    "query and key norms without weights": (
        TempoConfig(), {"qk_l2_norm": True, "num_layers": 1},
        "activation 1 of 1, norm 3 of 5, dropout 2 of 2, attention 1 of 1", [
            "norm in decoder.layers.0 (self_attention.q_layernorm, self_attention.k_layernorm): "
            "L2Norm is not a module that Tempo replaces"
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_the_lines_say_what_is_replaced_and_what_is_left_and_why(name: str) -> None:
    tempo_config, settings, counts, left = LINES[name]
    report = report_on(tempo_block_spec(gpt_config(**{"num_layers": 4, **settings}), tempo_config))
    assert (report.describe_counts(), report.describe_left()) == (counts, left)


def predicting_model(tempo_config: TempoConfig) -> Any:
    """Loss, gradients, and the report of a model whose prediction layers were made of Megatron's own spec."""
    config = gpt_config(mtp_num_layers=1)
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    prediction = get_gpt_mtp_block_spec(config, stock, use_transformer_engine=False)
    model = build_gpt(config, tempo_config, mtp_block_spec=prediction)
    return differentiate(model, losses(model, 0, 2, gives_mask=True).mean()), report_on(model)


def test_multi_token_prediction_whose_spec_was_not_given_to_tempo_stays_as_it_is() -> None:
    (found, report), (stock, _) = predicting_model(AUTO), predicting_model(TempoConfig.off())
    assert_equal_to_stock(found, stock)
    assert report.counts["activation"] == (2, 3) and report.counts["attention"] == (2, 3)
    assert "activation in mtp.layers.0 (mlp): the slot was filled without Tempo" in report.describe_left()
    assert {slot.slot for slot in report.left if slot.operation == "norm"} == {
        "input_layernorm", "pre_mlp_layernorm", "enorm", "hnorm", "final_layernorm"
    }  # fmt: skip
    assert report.counts["loss"] == (1, 1)


def test_the_embedding_and_the_loss_head_of_a_model_are_in_it() -> None:
    report = report_on(build_gpt(gpt_config(), AUTO))
    assert report.describe_counts() == "activation 2 of 2, norm 5 of 5, dropout 5 of 5, attention 2 of 2, loss 1 of 1"
    assert report.left == ()
    written = TempoConfig(dropout="off", loss="off", layers={"0": {"dropout": "recompute"}})
    report = report_on(build_gpt(gpt_config(), written))
    assert report.counts["dropout"] == (2, 5)
    assert report.describe_left() == [
        "dropout in decoder.layers.1 (self_attn_bda, mlp_bda): off",
        "dropout in embedding (embedding_dropout): off",
        "loss in model (output_layer): off",
    ]


def build_of(layer: Any, config: Any) -> Any:
    """A model of a layer's spec, with Megatron's embedding and loss head."""
    return GPTModel(config, layer, VOCAB_SIZE, SEQ_LENGTH)


def test_what_was_not_asked_is_said() -> None:
    config, stock = gpt_config(activation_func=F.silu, gated_linear_unit=True), get_gpt_layer_local_spec()
    for subject in (get_gpt_decoder_block_spec(config, use_transformer_engine=False), build_of(stock, config)):
        with pytest.raises(
            ValueError, match="that Tempo has not made; expected what tempoize or tempo_block_spec returned"
        ):
            report_on(subject)
    report = report_on(build_of(tempoize(stock, config, AUTO), config))
    assert report.describe_left() == [
        "dropout in embedding (embedding_dropout): the slot was filled without Tempo",
        "loss in model (output_layer): the slot was filled without Tempo",
    ]
    choices = choose(config, AUTO)
    assert report_on(build_of(tempoize(stock, config, choices.config), config), choices) == report


class OwnNorm(torch.nn.LayerNorm):
    """A user's."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


def test_a_users_own_module_is_left_and_the_spec_can_be_handed_around() -> None:
    layer = get_gpt_layer_local_spec()
    layer = dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, pre_mlp_layernorm=OwnNorm))
    block = tempoize(layer, gpt_config(), AUTO)
    report = report_on(block)
    assert report.describe_left() == [
        "norm in decoder.layers.0-1 (pre_mlp_layernorm): OwnNorm is not a module that Tempo replaces"
    ]
    assert report_on(copy.deepcopy(block)).counts == report.counts
    pickled = pickle.loads(pickle.dumps(dataclasses.replace(block, layer_specs=[])))
    assert report_on(pickled).counts == {"norm": (1, 1)}


class StubbornLayer(TransformerLayer):  # type: ignore[misc,unused-ignore]
    """A layer that builds Megatron's modules whatever its spec says."""

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, get_gpt_layer_local_spec().submodules, *args, **kwargs)


def test_a_models_report_is_of_its_modules_and_not_of_its_spec() -> None:
    config = gpt_config()
    model = build_gpt(config, AUTO)
    check_built(model)
    model.decoder.layers[1].input_layernorm = torch.nn.LayerNorm(32)
    assert report_on(model).describe_left() == [
        "norm in decoder.layers.1 (input_layernorm): LayerNorm is not a module that Tempo replaces"
    ]
    layer = dataclasses.replace(get_gpt_layer_local_spec(), module=StubbornLayer)
    stubborn = build_of(tempoize(layer, config, AUTO), config)
    counts = {"activation": (0, 2), "norm": (1, 5), "dropout": (0, 5), "attention": (0, 2), "loss": (0, 1)}
    assert report_on(stubborn).counts == counts
    for each, holds, more in (
        (model, "TransformerLayer 1 holds LayerNorm in input_layernorm (norm off)", " expected layers"),
        (stubborn, "StubbornLayer 0 holds MLP in mlp (activation off)", ""),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{holds}, where its spec says inplace;{more}")):
            check_built(each)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            TempoConfig(norm="off", linear_fc1="recompute"),
            'input_layernorm of decoder.layers.0 holds TempoRecomputeNorm already, by tempo.norm "recompute", and '
            'now "off" is asked for; give a spec without Tempo\'s modules (leave --spec out), or set tempo.norm to '
            '"recompute"',
        ),
        (
            TempoConfig(norm="recompute", linear_fc1="recompute", layers={"1": {"norm": "inplace"}}),
            'input_layernorm of decoder.layers.1 holds TempoRecomputeNorm already, by tempo.norm "recompute", and '
            'now "inplace" is asked for',
        ),
        (
            TempoConfig(norm="recompute"),
            "mlp of decoder.layers.0 holds TempoLinearRecomputeMLP already, by tempo.activation",
        ),
        (
            TempoConfig(norm="recompute", linear_fc1="recompute", attention="softmax"),
            "self_attention.core_attention of decoder.layers.0 holds TempoDotProductAttention already",
        ),
    ],
    ids=["norm", "a layer's norm", "the first linear", "attention"],
)
def test_a_value_that_another_value_of_the_given_spec_stands_against_is_refused(asked: Any, message: str) -> None:
    config = gpt_config()
    given = tempo_block_spec(config, TempoConfig(norm="recompute", activation="recompute", linear_fc1="recompute"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tempoize(given, config, asked)
    assert "linear_fc1=recompute" in given.choices.describe()
    # The same values, or those that leave the MLP to its first linear, are no others.
    tempoize(given, config, TempoConfig(norm="recompute", linear_fc1="recompute"))


def test_reports_are_added_and_written_as_json() -> None:
    mine = ReportedSlot(operation="norm", where="encoder.layers.0", slot="input_layernorm")
    left = ReportedSlot(operation="norm", where="decoder.layers.0", slot="input_layernorm", left="off")
    report = TempoReport(slots=(mine,)) + TempoReport(slots=(left,))
    assert report.replaced == {"norm": 1} and report.counts == {"norm": (1, 2)}
    written = json.loads(json.dumps(report.as_dict()))
    assert written == {"slots": {"norm": {"tempo": 1, "all": 2}}, "left": [dataclasses.asdict(left)]}
    assert TempoReport().describe_counts() == "none"
    assert hash(report) == hash(TempoReport(slots=(mine, left)))


def last_stage() -> list[str]:
    config = gpt_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = build_gpt(config, AUTO, pre_process=is_first, post_process=is_last)
    return [f"{slot.where} {slot.slot}" for slot in report_on(model).slots if slot.operation in ("norm", "loss")]


def test_a_pipeline_stage_reports_what_it_has() -> None:
    first, last = run_megatron_ranks(last_stage, 2, 1, pipeline_model_parallel_size=2)
    assert first == ["decoder.layers.0 input_layernorm", "decoder.layers.0 pre_mlp_layernorm"]
    assert last == [
        "decoder.layers.1 input_layernorm",
        "decoder.layers.1 pre_mlp_layernorm",
        "decoder final_layernorm",
        "model output_layer",
    ]
