"""What eager mode does beside its operations: a captured step does it, too, or is refused in one sentence."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from roam_steps import draw_rows, train_both
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from tempo_megatron.roam.arena import ArenaStep
from tempo_megatron.roam.capture import ELEMENTWISE, capture_step
from tempo_megatron.roam.execute import OrderedStep


class Applies(nn.Linear):
    """A linear map, then what a test wants."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(8, 8)
        self.function, self.calls, self.carried, self.table = function, 0, None, torch.ones(8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, super().forward(x))


def build_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def capture(model: nn.Module, compute_loss: Callable[..., Tensor] = compute_loss, *batch: Any) -> None:
    capture_step(model, compute_loss, batch or draw_rows(0), SGD(model.parameters()))


def check_steps(model: nn.Module, compute_loss: Callable[..., Tensor] = compute_loss, **settings: Any) -> None:
    """They are those of eager mode."""
    optimizer = functools.partial(settings.pop("make_optimizer", AdamW), lr=0.01, **settings.pop("settings", {}))
    train_both(functools.partial(copy.deepcopy, model), optimizer, compute_loss, **{"draw": draw_rows, **settings})


def carry(module: Any, y: Tensor) -> Tensor:
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
        (lambda _, y: y[y[:, 0] > 0], "aten.nonzero.default in module inner makes a tensor whose shape depends"),
        (lambda _, y: y if y.sum() > 0 else -y, "in module inner reads a number out of a tensor"),
        (lambda _, y: double(y), "roam_tests::double in module inner has no fake kernel"),
        (replace_buffer, "buffer inner.count is another tensor after the forward than before"),
        (carry, "module inner sets its attribute carried while it runs, which a traced step would not do"),
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
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the optimizer has a hook on its step, which would be called once per param"):
        capture_step(model, compute_loss, draw_rows(0), optimizer)


def test_losses_optimizers_and_models_that_do_not_train_are_refused() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="compute_loss returned no single number"):
        capture(model, lambda model, x: model(x))
    with pytest.raises(ValueError, match="the optimizer is LBFGS, whose updates may depend on one another"):
        capture_step(model, compute_loss, draw_rows(0), torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="no parameter of the model needs a gradient"):
        capture_step(nn.ReLU(), compute_loss, draw_rows(0))


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_sparse_gradients_and_recurrent_layers_of_mkldnn_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo; expected torch\.strided ones only"):
        capture(nn.Embedding(9, 8, sparse=True), lambda model, x: model(x).sum(), torch.arange(9))
    if torch.backends.mkldnn.is_available():
        recurrent = nn.LSTM(8, 8)
        with pytest.raises(ValueError, match="mkldnn_rnn_layer keeps a workspace of which a trace sees nothing"):
            capture(recurrent, lambda model, x: model(x)[0].sum())
        with torch.backends.mkldnn.flags(enabled=False):
            check_steps(recurrent, lambda model, x: model(x)[0].square().mean())


class Recomputes(nn.Sequential):
    """Of three modules the second is recomputed twice, and the first once more where the layer is used outside, too."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        y = self[0](x)
        for module in (self[1], self[1], self[0]):
            y = checkpoint(module, y, use_reentrant=self.use_reentrant)
        return self[2](y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_recomputed_runs_without_dropout_and_is_planned_with_it(use_reentrant: bool) -> None:
    model = Recomputes(nn.Linear(8, 8), build_mlp(), nn.Linear(8, 8))
    model.use_reentrant = use_reentrant
    check_steps(model)
    model[1].append(nn.Dropout(0.5))
    captured = capture_step(model, compute_loss, draw_rows(0), SGD(model.parameters()))
    with pytest.raises(ValueError, match="recomputes what draws random numbers, and a trace draws others"):
        OrderedStep(captured, model)


def test_a_gradient_that_is_there_is_refused_before_anything_changes_and_settings_may_be_loaded() -> None:
    model = build_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    step = OrderedStep(capture_step(model, compute_loss, draw_rows(0), optimizer), model)
    before = copy.deepcopy(model.state_dict())
    compute_loss(model, *draw_rows(1)).backward()
    with pytest.raises(ValueError, match="a parameter has a gradient before the step"):
        step(*draw_rows(0))
    model.zero_grad()
    optimizer.load_state_dict(SGD(model.parameters(), lr=0.0).state_dict())
    step(*draw_rows(0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("step_of", [OrderedStep, ArenaStep])
def test_a_module_with_two_names_is_traced_and_left_as_it_was(step_of: type[OrderedStep]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2] = model[0]
    before = list(model.parameters())
    capture(model)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    check_steps(model, step_of=step_of)


def test_a_micro_batch_is_read_by_its_keys_and_keeps_the_shapes_and_numbers_that_were_captured() -> None:
    def compute_loss(model: nn.Module, images: dict[str, Tensor], scale: int, mask: Tensor | None) -> Tensor:
        return F.mse_loss(scale * model(images["x"]), images["y"])

    model, (x,), (y,) = nn.Linear(8, 8), draw_rows(0), draw_rows(1)
    step = OrderedStep(capture_step(model, compute_loss, ({"x": x, "y": y}, 2, None)), model)
    expected = compute_loss(model, {"x": x, "y": y}, 2, None)
    assert torch.equal(step({"y": y, "x": x}, 2, None), expected)
    for batch, sentence in (
        (({"x": x, "y": y}, 3, None), "has 3 where the step was captured with 2, which is compiled in"),
        (({"x": x, "y": y}, 2, x), r"has TensorOf\(shape=\(4, 8\), .* where the step was captured with None"),
        (({"x": x, "y": None}, 2, None), "has None where the step was captured with TensorOf"),
        (({"x": x[:3], "y": y}, 2, None), r"has TensorOf\(shape=\(3, 8\), .* with TensorOf\(shape=\(4, 8\), .*; exp"),
        (({"x": x, "y": y.double()}, 2, None), r"dtype=torch\.float64\) where .*dtype=torch\.float32\), .*; expected"),
        (({"x": x, "z": y}, 2, None), "has not the structure that was captured: Node keys mismatch"),
    ):
        with pytest.raises(ValueError, match=sentence):
            step(*batch)


@pytest.mark.parametrize(
    ("make_optimizer", "settings"),
    [
        *((each, {}) for each in ELEMENTWISE),
        (AdamW, {"amsgrad": True, "foreach": True}),
        (AdamW, {"fused": True}),
        (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    ],
)
def test_every_optimizer_that_is_taken_makes_the_steps_of_eager_mode(make_optimizer: Any, settings: Any) -> None:
    check_steps(build_mlp(), make_optimizer=make_optimizer, settings=settings)


def test_gradients_that_the_loss_function_accumulates_are_part_of_the_step() -> None:
    def accumulate(model: nn.Module, x: Tensor) -> Tensor:
        compute_loss(model, x[:2]).backward()
        return compute_loss(model, x[2:])

    check_steps(build_mlp(), accumulate)


def compute_gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """mse_loss has another operation behind it, and a gradient is differentiated."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().mean() + 3 * F.mse_loss(model(x), x.detach()) + F.huber_loss(model(x), x.detach())


def test_losses_and_channels_last_lie_where_eager_mode_puts_them() -> None:
    """torch's out= of a reduced loss is resized on the way; of channels-last images fakes and tensors may differ."""
    check_steps(build_mlp(), compute_gradient_penalty, step_of=ArenaStep)

    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
    images = [draw_rows(step, 2, 3, 8, 8)[0].to(memory_format=torch.channels_last) for step in range(3)]
    check_steps(model, step_of=ArenaStep, draw=lambda step: (images[step],))
