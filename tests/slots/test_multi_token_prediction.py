"""Multi-token prediction with Tempo: losses, gradients and logs of stock, masks of their own, and no logits kept."""

from __future__ import annotations

import functools

import megatron_wheels
import pytest
from distributed import run_steps
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock
from prediction_cases import BATCH, DEPTHS, FULL, OFF, build, forward, train
from script_ranks import results
from witness import kept_storages

from tempo_megatron import TempoConfig, report_on

ON = TempoConfig()
# A layer has three masks, the decoder two layers and its embedding, and each depth a layer and an embedding.
NUM_MASKS = 2 * 3 + 1 + DEPTHS * (3 + 1)
RECOMPUTE = TempoConfig(activation="recompute", norm="recompute", attention="recompute")
SP = {"sequence_parallel": True}
UNTIED = {"is_tied": False, "gives_loss_mask": False}
PER_TOKEN = {"normalization": "RMSNorm", "calculate_per_token_loss": True}
# By tensor- and context-parallel size, the steps to take: their configuration and settings. Stock is beside p 0.
STEPS = {
    (1, 1): {
        "untied": (ON, UNTIED),
        "stock, untied": (OFF, UNTIED),
        "recompute": (RECOMPUTE, PER_TOKEN),
        "stock, recompute": (OFF, PER_TOKEN),
        "dropped": (ON, {"dropout": 0.1}),
        "dropped, recomputed": (ON, {"dropout": 0.1, **FULL}),
        "dropped, per token": (ON, {"dropout": 0.1, "calculate_per_token_loss": True}),
    },
    (2, 1): {
        "SP": (ON, SP),
        "stock, SP": (OFF, SP),
        "dropped": (ON, {"dropout": 0.1, **SP}),
        "dropped, recomputed": (ON, {"dropout": 0.1, **SP, **FULL}),
    },
    # Without per-token losses Megatron weighs each rank's further tokens by their number on the rank.
    (1, 2): {"dropped, per token": (ON, {"dropout": 0.1, "calculate_per_token_loss": True})},
}


def take_steps(steps):
    return {
        name: train(tempo_config, gives_mask=tempo_config.is_off, **settings)
        for name, (tempo_config, settings) in steps.items()
    }


steps_of = functools.partial(run_steps, take_steps, STEPS)


@pytest.mark.parametrize(("tp", "name"), [(1, "untied"), (1, "recompute"), (2, "SP")])
def test_losses_gradients_and_logs_equal_stock(tp, name):
    for found in steps_of(tp):
        (result, log, _), (stock, stock_log, _) = found[name], found[f"stock, {name}"]
        assert_equal_to_stock(result, stock)
        assert log.keys() == stock_log.keys()
        for key, values in stock_log.items():
            assert log[key] == pytest.approx(values, rel=1e-6) and all(values)


def test_recomputation_draws_the_masks_of_the_first_forward():
    for found in (*steps_of(1), *steps_of(2)):
        plain, again = found["dropped"], found["dropped, recomputed"]
        assert plain[2] == NUM_MASKS and plain[0][0] == again[0][0]
        assert_equal_to_stock(again[0], plain[0])


def test_masks_are_those_of_one_process():
    (alone,) = steps_of(1)
    for found in steps_of(2):
        (loss, gradients), log, _ = found["dropped"]
        assert loss == pytest.approx(alone["dropped"][0][0], rel=1e-6)
        assert log["values"] == pytest.approx(alone["dropped"][1]["values"], rel=1e-6)
        whole = {name: grad for name, grad in alone["dropped"][0][1].items() if grad.shape == gradients[name].shape}
        assert len(whole) > 20
        assert_equal_to_stock((loss, {name: gradients[name] for name in whole}), (loss, whole))
    for found in steps_of(1, 2):
        for result, *_ in found.values():
            assert_equal_to_stock(result, alone["dropped, per token"][0])


@pytest.mark.usefixtures("one_rank")
def test_no_logits_are_kept_and_every_slot_is_replaced():
    found = {}
    for name, tempo_config in (("fused", ON), ("stock", TempoConfig(loss="off"))):
        model = build(tempo_config, is_tied=False)
        kept = kept_storages(lambda model=model: forward(model, gives_mask=False, gives_loss_mask=False)[0])
        found[name] = sum(kept.values())
    report = report_on(model)
    # Stock keeps a softmax in float32 for the decoder and for each depth; the fused head 16 bytes a token.
    assert found["stock"] - found["fused"] >= (1 + DEPTHS) * SEQ_LENGTH * BATCH * (4 * VOCAB_SIZE - 16)
    counts = "activation 4 of 4, norm 15 of 15, dropout 9 of 9, attention 4 of 4, loss 0 of 1"
    assert (report.describe_counts(), report.describe_left()) == (counts, ["loss in model (output_layer): off"])


def test_in_a_megatron_that_numbers_its_layers_from_one_and_repeats_a_layer(tmp_path):
    root = str(megatron_wheels.unpack("megatron-core==0.19.2"))
    (found,) = results((1,), str(tmp_path), root, "prediction_cases.py")[1]
    assert found["version"].startswith("0.19.2")
    for name in ("layers", "repeated, detached"):
        case = found["found"][name]
        assert case["losses"][1] == pytest.approx(case["losses"][0], rel=1e-6)
        assert case["gradient_error_eps"] <= 100 and case["masks"] == NUM_MASKS
        assert case["recomputed"][0] == 0 and case["recomputed"][1] <= 100
        log, tempo_log = case["logs"]
        # The losses of the further tokens, and how many of these were predicted.
        assert log.keys() == tempo_log.keys() == {"loss_values", "correct_values", "total_values"}
        for key, values in log.items():
            assert tempo_log[key] == pytest.approx(values, rel=1e-6) and all(values)
