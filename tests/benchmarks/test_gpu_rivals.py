"""Attention and the loss head in the GPU suite, at a tiny size on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu import attention, loss_head, records, timing
from torch.nn.attention import SDPBackend

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path, monkeypatch):
    for name in ("WARM_UP_MS", "MEASURED_MS"):
        monkeypatch.setattr(timing, name, 0.5)
    return records.Results(tmp_path / "suite.jsonl", {})


def test_attention_is_held_against_torchs_and_keep_rates_are_measured(results):
    backends = {"flash": SDPBackend.MATH}
    attention.measure(results, timing.HostClock(), "cpu", attention.Shape(64, 2, 2, 32), backends)
    [record] = results.records
    assert set(record["others"]) == {"tempo, p 0", "sdpa flash, p 0.1", "sdpa flash, p 0"}
    assert set(record["goals"]) == {
        "cost_of_dropout",
        "speed_beside_flash_with_dropout",
        "speed_beside_the_fastest_without",
    }
    goal = record["goals"]["speed_beside_flash_with_dropout"]
    assert goal["found"] == pytest.approx(record["others"]["sdpa flash, p 0.1"] / record["tempo"])
    assert all(rate == pytest.approx(0.9, abs=2e-3) for rate in record["keep_rates"].values())


def test_a_backend_that_is_not_there_is_left_out_with_its_reason(results):
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION}
    attention.measure(results, timing.HostClock(), "cpu", attention.Shape(64, 1, 2, 32), backends)
    [record] = results.records
    assert set(record["left_out"]) == {"sdpa cudnn, p 0.1", "sdpa cudnn, p 0"} and "tempo" in record["keep_rates"]
    assert set(record["goals"]) == {"cost_of_dropout"}


def test_the_rivals_of_the_loss_head_agree_and_both_forms_are_recorded(results, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    shape = loss_head.Shape(16, 2, 32, 96)
    steps = {one.name: one.step() for one in loss_head._rivals(shape, "cpu") if one.name != "liger"}
    exact = [t.float() for t in steps.pop("eager")]
    for name, found in steps.items():
        for ours, expected in zip(found, exact, strict=True):
            assert (ours.float() - expected).norm() <= 0.02 * expected.norm(), name
    loss_head.measure(results, timing.HostClock(), "cpu", shape)
    assert {record["keeps"] for record in results.records} == {"logits recomputed", "gradients in forward"}
    assert all(set(record["others"]) == {"eager", "compile"} for record in results.records)
    assert all("liger" in record["left_out"] for record in results.records)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_rivals_of_the_log_probabilities_agree_and_are_recorded(results, monkeypatch, softcap, entropy):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    shape = loss_head.LogProbShape(16, 2, 32, 96, softcap, entropy)
    steps = {one.name: one.step() for one in loss_head._rivals_of_log_prob(shape, "cpu")}
    exact = [t.float() for t in steps.pop("eager")]
    for name, found in steps.items():
        for ours, expected in zip(found, exact, strict=True):
            assert (ours.float() - expected).norm() <= 0.02 * expected.norm(), name
    loss_head.measure_log_prob(results, timing.HostClock(), "cpu", shape)
    [record] = results.records
    assert record["operation"] == "linear_log_prob" and record["shape"] == shape._asdict()
    assert set(record["others"]) == {"eager", "compile"} and "time_of_the_fastest" in record["goals"]
