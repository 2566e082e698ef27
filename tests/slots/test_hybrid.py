"""HybridModels of megatron-core 0.19.2 with Tempo in the layers of their patterns; see hybrid_cases.py."""

from __future__ import annotations

import re
from typing import Any

import megatron_wheels
import pytest
from megatron_versions import is_equal
from script_ranks import results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = str(megatron_wheels.unpack("megatron-core==0.19.2"))
    return results((1,), str(tmp_path_factory.mktemp("hybrid")), root, "hybrid_cases.py")[1][0]


@pytest.mark.parametrize("name", ["norms in place", "recompute, swiglu and RMSNorm"])
def test_without_dropout_every_layer_of_a_pattern_equals_stocks(found: Any, name: str) -> None:
    case = found["cases"][name]
    assert is_equal(case) and case["gradients"] > 20, case


def test_a_gpt_read_as_a_hybrid_and_back_keeps_its_dropout_masks(found: Any) -> None:
    assert len(set(found["gpt"]["before"])) == 3
    gpt, hybrid, again = found["gpt"]["after"]
    assert gpt == hybrid == again


def test_recomputed_layers_draw_their_masks_again(found: Any) -> None:
    assert found["masks of a full recomputation"] == pytest.approx(found["masks"], rel=1e-6)


def test_a_pipeline_stage_numbers_layers_and_masks_over_the_whole_pattern(found: Any) -> None:
    layers, mask_layer, where = found["stage"]
    # Its attention is the second of `M*|-*E`.
    assert (layers, mask_layer) == ([3, 4, 5], 2)
    assert where == ["decoder", "decoder.layers.2", "decoder.layers.3", "decoder.layers.4"]


def test_the_launcher_replaces_the_slots_of_a_pattern_and_says_what_is_left(found: Any) -> None:
    told = found["launcher"]
    assert told["counts"] == {
        "activation": [2, 2], "norm": [5, 6], "dropout": [6, 6], "attention": [1, 1], "loss": [1, 1],
    }  # fmt: skip
    assert told["left"] == ["norm in decoder.layers.2 (mlp.linear_fc1): off for layer 2"]
    assert told["draws"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tempoize", "the spec is one of HybridStack; .*tempoize_hybrid for the spec of a HybridModel"),
        ("no pattern", "the model has no hybrid_layer_pattern"),
        ("a GPT's spec", "the spec is one of TransformerLayer; expected that of a HybridStack"),
        ("symbol", "the layer pattern is .-X, which has X; expected symbols of M G"),
        ("prediction", 'multi-token prediction embeds tokens again, .*set tempo.dropout to "off"'),
    ],
)
def test_what_a_pattern_cannot_have_is_refused(found: Any, name: str, said: str) -> None:
    assert re.search(said, found["refusals"][name])


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive)])
def test_masks_do_not_depend_on_tensor_and_sequence_parallelism(found: Any, ranks: int, tmp_path: Any) -> None:
    root = str(megatron_wheels.unpack("megatron-core==0.19.2"))
    for rank in results((ranks,), str(tmp_path), root, "hybrid_cases.py")[ranks]:
        assert rank["masks"][0] == pytest.approx(found["masks"][0], rel=1e-5)
