from __future__ import annotations

import os
import warnings
from pathlib import Path

import megatron.core
import megatron_versions
import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron.slots import megatron_versions as table
from tempo_megatron.slots.choose import find_refusal

FOLDER = os.environ.get("MEGATRON_CORE_VERSIONS", "")
FOUND = megatron_versions.find_versions(Path(FOLDER)) if FOLDER else []
# Masks are a function of seed and place: one loss for each model, whatever the Megatron.
DROPPED = {
    "GPT, in place": 4.189183712005615,
    "GPT, recompute": 4.189183712005615,
    "GPT, SwiGLU and RMSNorm": 4.16011905670166,
    "GPT, linears again": 4.16011905670166,
    "GPT, mlp recomputed": 4.189183712005615,
    "BERT": 4.196408271789551,
    "T5": 4.146276950836182,
}


# What Tempo leaves, and why, is the same too, however Megatron writes it.
LEFT = {
    "experts": ["activation 2 of 2, norm 5 of 5, dropout 4 of 4, attention 2 of 2"],
    "latent attention": [
        "activation 2 of 2, norm 9 of 9, dropout 4 of 4, attention 2 of 2",
    ],
    "multi-token prediction": [
        "activation 1 of 1, norm 5 of 5, dropout 2 of 2, attention 1 of 1",
    ],
    "single layers": [
        "activation 3 of 3, norm 7 of 7, dropout 6 of 6, attention 2 of 3",
        "attention in decoder.layers.1 (self_attention.core_attention): off for layer 1",
    ],
}


def check(root):
    found = megatron_versions.measure(root)
    wrong = {name: case for name, case in found["cases"].items() if not megatron_versions.is_equal(case)}
    assert not wrong
    assert all(case["gradients"] > 10 for case in found["cases"].values())
    assert found["dropped"] == pytest.approx(DROPPED, rel=1e-6)
    assert found["left"] == LEFT
    return found


@pytest.mark.slow
@pytest.mark.skipif(not FOUND, reason="MEGATRON_CORE_VERSIONS names no folder with a megatron-core per version")
@pytest.mark.parametrize("root", FOUND, ids=lambda root: root.name)
def test_tempo_equals_stock_in_this_version(root: Path) -> None:
    found = check(root)
    # Its numbers are those of one processor's matrix products.
    assert f"\n| {found['version']} | " in megatron_versions.TABLE.read_text("utf-8")


# Where no folder is given, test_layer_spec.py, test_layers.py and test_masks.py say the same of this version.
@pytest.mark.slow
@pytest.mark.exhaustive
def test_tempo_equals_stock_in_the_installed_version() -> None:
    found = check(Path(megatron.core.__file__).parent.parent.parent)
    assert found["version"] == megatron.core.__version__


@pytest.mark.parametrize(
    ("version", "is_there"),
    [("0.16.1", False), ("0.17.0.dev0", True), ("0.17.0rc1", True), ("0.17.1", True), ("0.20.0", True)],
)
def test_a_version_counts_from_the_first_pre_release_on(
    version: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    assert table.is_since("0.17") is is_there


@pytest.mark.parametrize(
    ("version", "is_known"),
    [(each, True) for each in ("0.14.0", "0.16.1", "0.19.2", "0.20.0rc0", "0.20.7")]
    + [(each, False) for each in ("0.13.1", "0.21.0", "1.0")],
)
def test_a_version_that_was_compared_with_stock_is_taken_without_a_word_and_another_with_a_warning(
    version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        table.check_megatron()
    expected = f"megatron-core is {version}; Tempo has been compared with 0.14.0 to 0.20"
    assert [expected in str(each.message) for each in told] == ([] if is_known else [True])


@pytest.mark.parametrize(("version", "is_refused"), [("0.14.0", True), ("0.15.0rc1", False)])
def test_attention_with_a_window_is_refused_where_megatrons_own_has_none(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, window_size=(3, 2))
    refusal = find_refusal("attention", "flash", config)
    assert (refusal is not None and "window_size is (3, 2)" in refusal.reason) is is_refused
