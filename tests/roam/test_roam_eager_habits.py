"""What eager mode does beside its operations: a captured step does it, too, or is refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tempo_megatron.roam.arena import ArenaStep
from tempo_megatron.roam.capture import ELEMENTWISE, capture_step
from tempo_megatron.roam.execute import OrderedStep
from tempo_megatron.roam.order import find_order

ComputeLoss = Callable[..., Tensor]


class Applies(nn.Module):
    """A linear map, then what a test wants."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function
        self.calls, self.carried, self.table = 0, None, torch.ones(8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def build_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def draw(step: int, *shape: int) -> Tensor:
    return torch.randn(shape or (4, 8), generator=torch.Generator().manual_seed(step))


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def capture(model: nn.Module, compute_loss: ComputeLoss = compute_loss, batch: Tensor | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture_step(model, compute_loss, (draw(0) if batch is None else batch,), optimizer)


def check_steps_of_eager_mode(
    model: nn.Module,
    step_of: type[OrderedStep],
    compute_loss: ComputeLoss,
    batches: list[Tensor],
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **settings: Any,
) -> None:
    eager = copy.deepcopy(model)
    optimizers = [make_optimizer(each.parameters(), lr=0.01, **settings) for each in (eager, model)]
    captured = capture_step(model, compute_loss, batches[:1], optimizers[1])
    step = step_of(captured, model, find_order(captured.graph).order)
    for batch in batches:
        optimizers[0].zero_grad()
        loss = compute_loss(eager, batch)
        loss.backward()
        optimizers[0].step()
        assert torch.equal(step(batch), loss.detach())
    for ours, theirs in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def set_attribute(module: Any, y: Tensor) -> Tensor:
    if module.carried is not None:
        y = y + module.carried
    module.carried = y.detach()
    return y


def count_calls(module: Any, y: Tensor) -> Tensor:
    module.calls += 1
    return y * module.calls


def replace_buffer(module: Any, y: Tensor) -> Tensor:
    module.count = module.count + 1
    return y


@torch.library.custom_op("roam_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (
            lambda _, y: y[y[:, 0] > 0],
            "aten.nonzero.default in module inner makes a tensor whose shape depends",
        ),
        (lambda _, y: y if y.sum() > 0 else -y, "in module inner reads a number out of a tensor"),
        (lambda _, y: double(y), "roam_tests::double in module inner has no fake kernel"),
        (replace_buffer, "buffer inner.count is another tensor after the forward than before"),
        (set_attribute, "module inner sets its attribute carried while it runs, which a traced step would not do"),
        (count_calls, "module inner sets its attribute calls while it runs"),
        (lambda module, y: y * module.table, "aten.mul in module inner is given a tensor that is neither parameter"),
        (lambda module, y: y + torch.from_numpy(y.detach().numpy()), "in module inner takes numbers out of a tensor"),
        (lambda module, y: torch.compile(torch.sin)(y), "in module inner is compiled by torch.compile; expected a"),
    ],
)
def test_what_cannot_be_captured_or_a_trace_would_miss_is_named_in_one_sentence(
    function: Callable[[Any, Tensor], Tensor], sentence: str
) -> None:
    model = nn.Sequential()
    model.add_module("inner", Applies(function))
    before = dict(vars(model.inner))
    with pytest.raises(ValueError, match=sentence) as caught:
        capture(model)
    assert "\n" not in str(caught.value)
    assert all(value is before[name] for name, value in vars(model.inner).items())


def test_hooks_on_gradients_and_on_an_optimizers_step_are_refused() -> None:
    class DistributedDataParallel(nn.Sequential):
        pass

    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = build_mlp()
        getattr(model[2].weight, register)(lambda _: None)
        with pytest.raises(ValueError, match=r"parameter 2\.weight has a hook on its gradient"):
            capture(model)
    with pytest.raises(ValueError, match="the model is DistributedDataParallel, which reduces gradients in hooks"):
        capture(DistributedDataParallel(build_mlp()))
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the optimizer has a hook on its step, which would be called once per param"):
        capture_step(model, compute_loss, (draw(0),), optimizer)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_sparse_gradients_and_recurrent_layers_of_mkldnn_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo; expected torch\.strided ones only"):
        capture(nn.Embedding(9, 8, sparse=True), lambda model, x: model(x).sum(), torch.arange(9))
    if torch.backends.mkldnn.is_available():
        recurrent = nn.LSTM(8, 8)
        with pytest.raises(ValueError, match="mkldnn_rnn_layer keeps a workspace of which a trace sees nothing"):
            capture(recurrent, lambda model, x: model(x)[0].sum())
        with torch.backends.mkldnn.flags(enabled=False):
            check_steps_of_eager_mode(
                recurrent, OrderedStep, lambda model, x: model(x)[0].square().mean(), [draw(0), draw(1)]
            )


class Recomputes(nn.Sequential):
    """Of three modules the second is recomputed twice, and the first once more where the layer is used outside, too."""

    def __init__(self, *modules: nn.Module, use_reentrant: bool) -> None:
        super().__init__(*modules)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = self[0](x)
        for module in (self[1], self[1], self[0]):
            y = checkpoint(module, y, use_reentrant=self.use_reentrant)
        return self[2](y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_recomputed_runs_without_dropout_and_is_planned_with_it(use_reentrant: bool) -> None:
    modules = nn.Linear(8, 8), build_mlp(), nn.Linear(8, 8)
    model = Recomputes(*modules, use_reentrant=use_reentrant)
    check_steps_of_eager_mode(model, OrderedStep, compute_loss, [draw(step) for step in range(3)])
    model[1].append(nn.Dropout(0.5))
    captured = capture_step(model, compute_loss, (draw(0),), torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="recomputes what draws random numbers, and a trace draws others"):
        OrderedStep(captured, model)


def test_a_gradient_that_is_there_already_is_refused_before_anything_changes() -> None:
    model = build_mlp()
    captured = capture_step(model, compute_loss, (draw(0),), torch.optim.SGD(model.parameters(), lr=0.1))
    step, before = OrderedStep(captured, model), copy.deepcopy(model.state_dict())
    compute_loss(model, draw(1)).backward()
    with pytest.raises(ValueError, match="a parameter has a gradient before the step"):
        step(draw(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.zero_grad()
    step(draw(0))


@pytest.mark.parametrize("step_of", [OrderedStep, ArenaStep])
def test_a_module_with_two_names_is_traced_and_left_as_it_was(step_of: type[OrderedStep]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2] = model[0]
    before = list(model.parameters())
    check_steps_of_eager_mode(model, step_of, compute_loss, [draw(step) for step in range(3)])
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_a_micro_batch_is_read_by_its_keys_and_keeps_the_numbers_that_were_captured() -> None:
    def compute_loss(model: nn.Module, images: dict[str, Tensor], scale: int, mask: Tensor | None) -> Tensor:
        return F.mse_loss(scale * model(images["x"]), images["y"])

    model, x, y = nn.Linear(8, 8), draw(0), draw(1)
    step = OrderedStep(capture_step(model, compute_loss, ({"x": x, "y": y}, 2, None)), model)
    expected = compute_loss(model, {"x": x, "y": y}, 2, None)
    assert torch.equal(step({"y": y, "x": x}, 2, None), expected)
    with pytest.raises(ValueError, match="has 3 where the step was captured with 2, which is compiled in"):
        step({"x": x, "y": y}, 3, None)
    with pytest.raises(ValueError, match="has a tensor where the step was captured with None"):
        step({"x": x, "y": y}, 2, x)
    with pytest.raises(ValueError, match="has None where the step was captured with a tensor"):
        step({"x": x, "y": None}, 2, None)
    with pytest.raises(ValueError, match="has not the structure that was captured: Node keys mismatch"):
        step({"x": x, "z": y}, 2, None)


@pytest.mark.parametrize(
    ("make_optimizer", "settings"),
    [
        *((each, {}) for each in ELEMENTWISE),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    ],
)
def test_every_optimizer_that_is_taken_makes_the_steps_of_eager_mode(make_optimizer: Any, settings: Any) -> None:
    batches = [draw(step) for step in range(3)]
    check_steps_of_eager_mode(build_mlp(), OrderedStep, compute_loss, batches, make_optimizer, **settings)


def test_gradients_that_the_loss_function_accumulates_are_part_of_the_step() -> None:
    def accumulate(model: nn.Module, x: Tensor) -> Tensor:
        compute_loss(model, x[:2]).backward()
        return compute_loss(model, x[2:])

    torch.manual_seed(1)
    check_steps_of_eager_mode(build_mlp(), OrderedStep, accumulate, [draw(step) for step in range(3)])


def test_an_optimizer_whose_state_is_loaded_later_is_the_one_that_steps() -> None:
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = OrderedStep(capture_step(model, compute_loss, (draw(0),), optimizer), model)
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.0).state_dict())
    before = copy.deepcopy(model.state_dict())
    step(draw(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def compute_gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """mse_loss has another operation behind it, and a gradient is differentiated."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().mean() + 3 * F.mse_loss(model(x), x.detach()) + F.huber_loss(model(x), x.detach())


def test_losses_and_channels_last_lie_where_eager_mode_puts_them() -> None:
    """torch's out= of a reduced loss is resized on the way; of channels-last images fakes and tensors may differ."""
    check_steps_of_eager_mode(build_mlp(), ArenaStep, compute_gradient_penalty, [draw(0), draw(1)])
    images = [draw(step, 2, 3, 8, 8).to(memory_format=torch.channels_last) for step in range(2)]
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    check_steps_of_eager_mode(model, ArenaStep, compute_loss, images)
