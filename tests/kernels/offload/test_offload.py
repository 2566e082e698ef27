"""The engine by itself: what moves and what does not, how much is on the device, and what is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from slow_links import SlowLink
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tempo_kernels.offload import INPUT, Direction, Engine, Offload, engine, move_all, move_nothing

TOKENS, WIDTH, NUM_LAYERS = 16, 32, 4
ACTIVATION = TOKENS * WIDTH * 4
"""Bytes of one."""


class Layer(nn.Module):
    """Keeps its input, one buffer in three views, a softmax of another argument, and its output (tanh keeps it)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        q, k, v = self.wide(x).chunk(3, -1)
        return torch.tanh(self.narrow(q * k * v * shared))


class Stack(nn.Module):
    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.shared = nn.Parameter(torch.ones(WIDTH))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared.expand(TOKENS, WIDTH) * 2
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, shared)
            else:
                x = checkpoint(layer, x, shared, use_reentrant=self.recompute)
        return x.sum(0)


@pytest.fixture
def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def make_input() -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x * 1).square().sum(), [*model.parameters(), x]))


def offload(model: Stack, moves: Any = move_all, **settings: Any) -> Engine:
    found = Engine(SlowLink())
    Offload(model, dict.fromkeys(model.layers, moves), found, min_bytes=0, **settings)
    return found


def test_each_storage_moves_once_and_arguments_and_weights_never(stack: Stack) -> None:
    x = make_input()
    expected = gradients(stack, x)
    found = offload(stack)
    assert all(map(torch.equal, gradients(stack, x), expected))
    # Its input, q with k and v (of which autograd keeps the buffer, whole), q * k, q * k * v, the linear's input.
    # The last layer's output stays: it would be the next one's input.
    per_layer = ACTIVATION * (1 + 3 + 1 + 1 + 1)
    assert found.moved_bytes == NUM_LAYERS * per_layer
    # In backward a layer's tanh still needs the input of the layer after it.
    assert found.peak_device_bytes == 2 * per_layer + ACTIVATION and found.device_bytes == 0 == found.num_stalls


class LastPart(Layer):
    """Keeps the end of a storage alone."""

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return torch.tanh(self.narrow(self.wide(x).chunk(3, -1)[2] * shared))


def test_a_part_of_a_storage_comes_back_in_its_place(stack: Stack) -> None:
    stack.layers = nn.ModuleList(LastPart() for _ in range(NUM_LAYERS))
    x = make_input()
    expected = gradients(stack, x)
    assert offload(stack).moved_bytes == 0
    assert all(map(torch.equal, gradients(stack, x), expected))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_ahead_is_how_many_layers_more_are_on_the_device_in_backward(stack: Stack, ahead: int) -> None:
    found = offload(stack, ahead=ahead)
    loss = stack(make_input() * 1).sum()
    forward = found.peak_device_bytes
    found.peak_device_bytes = 0
    loss.backward()
    assert found.peak_device_bytes == (1 + ahead) * forward // 2 + ACTIVATION and found.num_stalls == 0


def test_names_choose_and_a_layer_between_may_keep_everything(stack: Stack) -> None:
    x = make_input()
    expected = gradients(stack, x)
    found = Engine(SlowLink())
    layers = {layer: {1: move_nothing, 2: lambda name: name == "wide"}.get(n, lambda name: name == "")
              for n, layer in enumerate(stack.layers)}  # fmt: skip
    Offload(stack, layers, found, min_bytes=0)
    assert all(map(torch.equal, gradients(stack, x), expected))
    # `wide` saves the layer's input first; the layer itself all that lies between its modules.
    assert found.moved_bytes == ACTIVATION * (2 * (3 + 1 + 1) + 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_inputs_of_checkpoints_move_and_nothing_of_their_second_run(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Stack(reentrant)
    x = make_input()
    loss = model(x * 1).square().sum()
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    found = offload(model, lambda name: name == INPUT)
    model(x * 1).square().sum().backward()
    assert all(map(torch.equal, [parameter.grad for parameter in model.parameters()], expected))
    assert found.moved_bytes == NUM_LAYERS * ACTIVATION and found.device_bytes == 0


def test_a_graph_may_run_twice_or_never_and_gives_everything_back(stack: Stack) -> None:
    x = make_input()
    expected = gradients(stack, x)
    found = offload(stack)
    abandoned = stack(x * 1)
    loss = stack(x * 1).square().sum()
    inputs = [*stack.parameters(), x]
    for retain in (True, False):
        grads = torch.autograd.grad(loss, inputs, retain_graph=retain)
        assert all(map(torch.equal, grads, expected))
    del abandoned
    assert found.device_bytes == found.pool.num_bytes_in_use == 0
    with torch.no_grad():
        stack(x)
    assert found.moved_bytes == 2 * NUM_LAYERS * 7 * ACTIVATION


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["before a layer", "in a layer", "in backward"])
def test_an_exception_leaves_nothing_behind(stack: Stack, error: type[BaseException], where: str) -> None:
    x = make_input()
    expected = gradients(stack, x)
    found = offload(stack)

    def fail(*_: Any) -> None:
        raise error

    layer = stack.layers[2]
    if where == "in backward":
        broken = layer.narrow.register_full_backward_pre_hook(fail)
    else:
        broken = (layer if where == "before a layer" else layer.narrow).register_forward_pre_hook(fail)
    with pytest.raises(error):
        gradients(stack, x)
    broken.remove()
    gc.collect()  # of the exception's frames
    found.moved_bytes = 0
    assert all(map(torch.equal, gradients(stack, x), expected))
    assert found.moved_bytes == found.pool.num_bytes == NUM_LAYERS * 7 * ACTIVATION
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert found.device_bytes == found.pool.num_bytes_in_use == 0


@pytest.mark.parametrize("when", ["before its layer ends", "while it leaves"])
def test_what_was_written_to_since_is_refused(stack: Stack, when: str) -> None:
    found = offload(stack)
    module = stack.layers[2] if when == "while it leaves" else stack.layers[1].narrow
    kept: list[Tensor] = []
    stack.layers[1].wide.register_forward_pre_hook(lambda _, args: kept.append(args[0]))

    def write(*_: Any) -> None:
        with torch.no_grad():
            kept[0].add_(1)

    module.register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match="modified by an inplace operation|was written to in place since"):
        stack(make_input() * 1).sum().backward()
    kept.clear()
    gc.collect()
    assert found.device_bytes == found.pool.num_bytes_in_use == 0


def test_sizes_may_change_and_the_pool_is_no_more_than_the_largest_step_needs(stack: Stack) -> None:
    twin = copy.deepcopy(stack)
    found = offload(stack)
    allocations = []
    for samples in (4, 4, 5, 6, 1, 6, 3):
        x = make_input().detach().expand(samples, TOKENS, WIDTH).clone().requires_grad_()
        assert all(map(torch.equal, gradients(stack, x), gradients(twin, x)))
        allocations.append(found.pool.num_allocations // NUM_LAYERS)
    assert allocations == [1, 1, 2, 3, 3, 3, 3], "what is too small makes place; an odd batch takes what is there"
    assert found.pool.num_bytes == NUM_LAYERS * 6 * 7 * ACTIVATION == found.pool.peak_bytes_in_use


class Watched(SlowLink):
    """Notes for which copies somebody waits, and what is lent."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[Any, Direction] = {}
        self.waited: set[Any] = set()
        self.num_lent = 0

    def copy(self, direction: Direction, source: Tensor, target: Tensor, after: Sequence[Any]) -> Any:
        event = super().copy(direction, source, target, after)
        self.copies[event] = direction
        return event

    def wait(self, stream: None, event: Any) -> None:
        super().wait(stream, event)
        self.waited.add(event)

    def lend(self, tensor: Tensor, stream: None) -> None:
        self.num_lent += 1


@pytest.mark.parametrize("where", ["of the input", "fails"])
def test_memory_is_let_go_behind_its_copies(stack: Stack, where: str) -> None:
    """Also where backward never asks for what has begun to come back: it fails, or no weight has a gradient."""
    x, device = make_input(), Watched()
    (expected,) = torch.autograd.grad(stack(x * 1).square().sum(), x)
    found = Engine(device)
    Offload(stack, dict.fromkeys(stack.layers, move_all), found, min_bytes=0)
    if where == "fails":
        stack.layers[1].narrow.register_full_backward_pre_hook(lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            stack(x * 1).square().sum().backward()
    else:
        (grad,) = torch.autograd.grad(stack(x * 1).square().sum(), x)
        assert torch.equal(grad, expected)
    gc.collect()
    assert found.device_bytes == found.pool.num_bytes_in_use == 0 and set(device.copies.values()) == {"out", "in"}
    assert device.waited == set(device.copies)
    # Another stream may own what leaves, and would not wait.
    assert device.num_lent == list(device.copies.values()).count("out")


def test_layers_on_two_devices_are_refused(stack: Stack) -> None:
    offload(stack)
    stack(make_input() * 1)
    with pytest.raises(ValueError, match="input lies on meta, and offload moves what is on cpu; expected one device"):
        stack.to("meta")(make_input().detach().to("meta"))


def test_a_copy_of_the_model_moves_by_itself(stack: Stack) -> None:
    x = make_input()
    expected = gradients(stack, x)
    found = offload(stack)
    twin = copy.deepcopy(stack)
    assert all(map(torch.equal, gradients(twin, x), expected))
    assert found.moved_bytes == 0


def test_too_little_host_memory_is_one_sentence_before_anything_moves(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "get_free_host_bytes", lambda: 2**16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = offload(stack)
    found.num_groups = NUM_LAYERS
    with pytest.raises(ValueError, match=r"offloads 0\.01 MiB, so 4 layers .* need 0\.05 MiB .* each of its 2 ranks"):
        stack(make_input() * 1)
    assert found.pool.num_bytes == 0


def test_a_layer_of_another_model_is_refused(stack: Stack) -> None:
    with pytest.raises(ValueError, match="is not in the model"):
        Offload(stack, {Layer(): move_all}, Engine())
