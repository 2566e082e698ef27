"""tempoize(model, offload=...): models of transformers compute the same, and their layers' tensors move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow_links import SlowLink
from tiny_models import assert_equal_step
from tiny_models import build as build_tiny
from tiny_models import step as step_on
from torch import Tensor, nn
from transformers_cases import checkpoint_layers

from tempo_kernels.offload import Engine
from tempo_torch import restore, tempoize

MODELS: dict[str, dict[str, Any]] = {"Llama": {"num_key_value_heads": 2}, "Bert": {}}
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
TOKENS, INPUT_BYTES = torch.arange(64).view(2, 32) * 7 % 96, 2 * 32 * 64 * 4


def build(name: str = "Llama") -> Any:
    return build_tiny(name, **SIZES, **MODELS[name])


def step(model: nn.Module) -> Any:
    return step_on(model, TOKENS)


def find_engine(model: nn.Module) -> Engine:
    (offload,) = model.__dict__["tempo"].offloads
    offload.engine._device = SlowLink()
    found: Engine = offload.engine
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["nothing", "layers", "layers, reentrant"])
def test_no_bit_changes_and_layers_move_what_they_keep(name: str, recompute: str) -> None:
    kept, moved = build(name), build(name)
    for model in (kept, moved) if recompute != "nothing" else ():
        checkpoint_layers(model, use_reentrant=recompute != "layers")
    tempoize(kept, seed=1)
    tempoize(moved, seed=1, offload="all")
    engine = find_engine(moved)
    for _ in range(2):
        assert_equal_step(step(moved), step(kept))
    assert engine.num_stalls == engine.device_bytes == 0
    if recompute == "nothing":
        assert engine.moved_bytes >= 2 * 3 * 8 * INPUT_BYTES
    else:
        assert engine.moved_bytes == 2 * 3 * INPUT_BYTES
    before = engine.moved_bytes
    step(restore(moved))
    assert engine.moved_bytes == before


def test_names_move_what_their_modules_keep_and_ahead_is_how_many_layers_come_early() -> None:
    def measure(names: str, **choices: Any) -> tuple[float, int]:
        model = tempoize(build(), seed=1, offload=names, **choices)
        engine = find_engine(model)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        engine.peak_device_bytes = 0
        loss.backward()
        return engine.moved_bytes / INPUT_BYTES, engine.peak_device_bytes

    assert measure("mlp.down_proj+input")[0] == 0, "the product before down_proj is made again"
    inside = "mlp+mlp.gate_proj+mlp.up_proj+mlp.act_fn+mlp.down_proj"
    # A name stands for the modules inside it too.
    (down, _), mlp, also = (measure(names, activation="off") for names in ("mlp.down_proj", "mlp", inside))
    assert down == 3 * 2 < mlp[0] == also[0]
    assert measure("all", offload_ahead=1)[1] - measure("all", offload_ahead=0)[1] >= 8 * INPUT_BYTES


@pytest.mark.parametrize(
    ("model", "value", "ahead", "message"),
    [
        (lambda: build(), "mlp.down", 1, 'offload has "mlp.down", which is no module'),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)),
            "all",
            1,
            "Sequential has no nn.ModuleList of several",
        ),
        (lambda: build(), "all", -1, "offload_ahead is -1; expected a number of layers"),
    ],
    ids=["a wrong name", "no layers", "fewer than none"],
)
def test_what_cannot_move_is_one_sentence(model: Any, value: str, ahead: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tempoize(model(), offload=value, offload_ahead=ahead)


class TwoLists(nn.Module):
    """As a U-Net: one module calls the layers of two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(nn.Linear(64, 64) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.down, *self.up):
            x = layer(x).relu()
        return x


def test_two_lists_of_layers_in_one_module_move_together() -> None:
    torch.manual_seed(0)
    model, x = TwoLists(), torch.randn(128, 64)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    engine = find_engine(tempoize(model, offload="all"))
    assert all(map(torch.equal, torch.autograd.grad(model(x).sum(), list(model.parameters())), expected))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    # The input is a leaf's value like another; between two layers lies what both keep, once.
    assert engine.moved_bytes == 6 * x.nbytes and engine.num_stalls == 0
