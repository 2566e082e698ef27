"""tempoize(model, offload=...): models of transformers compute the same, and their layers' tensors move."""

from __future__ import annotations

import gc
import random
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
from tempo_kernels.recompute import keep_attention
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


def test_names_move_what_their_modules_keep() -> None:
    model = tempoize(build(), seed=1, offload="mlp.down_proj+input")
    engine = find_engine(model)
    step(model)
    assert engine.moved_bytes == 0, "the product before down_proj is made again"
    restore(model)
    tempoize(model, seed=1, activation="off", offload="mlp.down_proj")
    engine = find_engine(model)
    step(model)
    assert engine.moved_bytes == 3 * 2 * INPUT_BYTES


@pytest.mark.parametrize(
    ("model", "value", "message"),
    [
        (lambda: build(), "mlp.down", 'offload has "mlp.down", which is no module'),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "all", "Sequential has no nn.ModuleList of several"),
    ],
    ids=["a wrong name", "no layers"],
)
def test_what_cannot_move_is_one_sentence(model: Any, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tempoize(model(), offload=value)


class Pair:
    """A model that keeps everything, and one that moves all of it, on a device of its own."""

    def __init__(self, draw: random.Random, recompute: bool | None) -> None:
        self.kept, self.moved = build(), build()
        for model in (self.kept, self.moved) if recompute is not None else ():
            context = {} if recompute else {"context_fn": keep_attention}
            checkpoint_layers(model, use_reentrant=recompute, **context)
        tempoize(self.kept, seed=1)
        tempoize(self.moved, seed=1, offload="all", offload_ahead=draw.choice((0, 1, 2)))
        self.engine = find_engine(self.moved)
        self.engine.debug = draw.random() < 0.3
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = (model(input_ids=tokens, labels=tokens).loss for model in (self.kept, self.moved))
        assert torch.equal(kept, moved)
        return kept, moved

    def backward(self, losses: tuple[Tensor, Tensor]) -> None:
        for loss in losses:
            loss.backward()
        for kept, moved in zip(self.kept.parameters(), self.moved.parameters(), strict=True):
            assert torch.equal(kept.grad, moved.grad)  # type: ignore[arg-type]

    def fail(self, tokens: Tensor, layer: int, name: str, is_backward: bool, error: type[BaseException]) -> None:
        def stop(*_: Any) -> None:
            raise error

        for model in (self.kept, self.moved):
            module = getattr(model.model.layers[layer], name)
            hook = (module.register_full_backward_pre_hook if is_backward else module.register_forward_pre_hook)(stop)
            with pytest.raises(error):
                model(input_ids=tokens, labels=tokens).loss.backward()
            hook.remove()
            model.zero_grad()


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 50)]])
def test_two_models_whatever_comes_between_their_steps(seed: int) -> None:
    """Rows of other lengths, several forwards in flight, forwards without backward, evaluation, and what fails."""
    draw = random.Random(seed)
    recompute = draw.choice((None, True, False))  # nothing, layers reentrantly, or layers but for their attention
    pairs = [Pair(draw, recompute) for _ in range(2)]
    for number in range(14):
        pair, tokens = draw.choice(pairs), torch.randint(0, 96, (draw.choice((1, 2, 3)), draw.choice((8, 16, 32))))
        what = draw.choice(("forward", "forward", "backward", "backward", "drop", "evaluate", "fail"))
        if what == "forward" or number == 0:
            pair.waiting.append(pair.forward(tokens))
        elif what in ("backward", "drop") and pair.waiting:
            losses = pair.waiting.pop(draw.randrange(len(pair.waiting)))
            if what == "backward":
                pair.backward(losses)
        elif what == "evaluate":
            with torch.no_grad():
                pair.forward(tokens)
        elif what == "fail":
            error = draw.choice((torch.OutOfMemoryError, KeyboardInterrupt))
            pair.fail(tokens, draw.randrange(3), draw.choice(("mlp", "input_layernorm")), draw.random() < 0.5, error)
    losses = None  # type: ignore[assignment]
    for pair in pairs:
        pair.waiting.clear()
        pair.backward(pair.forward(TOKENS))
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    for pair in pairs:
        assert pair.engine.moved_bytes > 0 == pair.engine.device_bytes == pair.engine.pool.num_bytes_in_use


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


def test_ahead_0_has_one_layer_less_on_the_device_in_backward() -> None:
    peaks = []
    for ahead in (0, 1):
        model = tempoize(build(), seed=1, offload="all", offload_ahead=ahead)
        engine = find_engine(model)
        step(model)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        engine.peak_device_bytes = 0
        loss.backward()
        peaks.append(engine.peak_device_bytes)
    assert peaks[1] - peaks[0] >= 8 * INPUT_BYTES
    with pytest.raises(ValueError, match="offload_ahead is -1; expected a number of layers"):
        tempoize(build(), offload="all", offload_ahead=-1)
