"""Dropout masks are a function of seed, sample, place and call: whoever runs a forward again, in whatever way, and
however the samples are put into batches, draws the same ones."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from collections import OrderedDict

import pytest
import torch
from covering import parametrize_covering
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_models import B, build, loss_and_gradients, make_ids

from tempo_torch import read_step, samples, set_step, tempoize

CHECKPOINTS = {
    "non-reentrant": {"use_reentrant": False},
    "without the generator's state": {"use_reentrant": False, "preserve_rng_state": False},
    "reentrant": {"use_reentrant": True, "preserve_rng_state": False},
}


class Dropouts(nn.Module):
    """Two dropouts of ones, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.25), nn.Dropout(0.25)

    def forward(self, x):
        return self.first(x), self.second(x), self.second(x)


def masks(num_samples=4, first=None, model=None, columns=64):
    model = tempoize(Dropouts(), seed=7) if model is None else model
    if first is None:
        return [out > 0 for out in model(torch.ones(num_samples, columns))]
    with samples(model, first):
        return [out > 0 for out in model(torch.ones(num_samples, columns))]


def equal(a, b):
    return all(map(torch.equal, a, b))


def test_masks_do_not_depend_on_batches():
    whole = masks(8, first=100)
    halves = zip(masks(4, first=100), masks(4, first=104), strict=True)
    assert equal(whole, [torch.cat(pair) for pair in halves])


def test_places_calls_seeds_and_samples_have_masks_of_their_own():
    drawn = [*masks(first=0), *masks(first=4), masks(first=0, model=tempoize(Dropouts(), seed=8))[0]]
    rows = torch.cat(drawn).double() - 0.75
    correlation = (rows @ rows.T / rows.size(1)).fill_diagonal_(0).abs().max()
    assert correlation < 6 * 0.25 * 0.75 / rows.size(1) ** 0.5


def test_as_many_are_dropped_as_asked_for_and_the_others_are_scaled():
    model = tempoize(Dropouts(), seed=1)
    out = model(torch.ones(64, 1000, dtype=torch.float64))[0]
    assert abs((out == 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / out.numel()) ** 0.5
    torch.testing.assert_close(out[out > 0].mean(), torch.tensor(1 / 0.75, dtype=torch.float64), rtol=1e-12, atol=0)


def test_shapes_behind_the_samples_do_not_matter():
    model = tempoize(nn.Sequential(nn.Dropout(0.5)), seed=3)
    found = []
    for shape in ((6, 40), (6, 5, 8), (6, 2, 5, 4)):
        with samples(model, 2):
            found.append(model(torch.ones(shape)).reshape(6, 40))
    assert equal(found[:1] * 2, found[1:])


def test_tokens_laid_side_by_side_belong_to_their_samples():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x.flatten(0, 1)).view(x.shape)

    deep = nn.Sequential()
    deep.add_module("drop", nn.Dropout(0.5))
    flat, deep = tempoize(Flat(), seed=3), tempoize(deep, seed=3)
    assert torch.equal(flat(torch.ones(3, 4, 5)), deep(torch.ones(3, 4, 5)))


def test_forwards_in_training_are_counted():
    model = tempoize(Dropouts(), seed=7)
    first, second = masks(model=model), masks(model=model)
    assert equal(first, masks(first=0)) and equal(second, masks(first=4))
    # A last, smaller batch takes its own numbers; a larger one those that no other step has.
    assert equal(masks(2, model=model), masks(2, first=8))
    larger = masks(6, model=model)
    assert not any(equal(larger[:1], masks(6, first=step)[:1]) for step in range(0, 40, 2))
    set_step(model, 1)
    assert equal(masks(model=model), second)
    assert read_step(model) == (2, 4)


def test_a_run_that_goes_on_with_a_smaller_batch_counts_as_before():
    model = tempoize(Dropouts(), seed=7)
    set_step(model, 3, 4)
    assert equal(masks(2, model=model), masks(2, first=12)) and read_step(model) == (4, 4)
    for wrong in ((-1, None), (0, 0)):
        with pytest.raises(ValueError, match="expected at least"):
            set_step(model, *wrong)


def test_evaluation_counts_no_step_and_draws_nothing():
    model = tempoize(Dropouts(), seed=7)
    model.eval()
    assert all(mask.all() for mask in masks(model=model))
    model.train()
    assert equal(masks(model=model), masks(first=0))


def test_dropout_in_evaluation_draws_anew_in_every_forward():
    model = tempoize(Dropouts(), seed=7)
    model.eval()
    model.first.train()
    assert not equal(masks(model=model)[:1], masks(model=model)[:1])


def test_forwards_inside_one_context_see_one_batch_after_another():
    model = tempoize(Dropouts(), seed=7)
    with samples(model, 10):
        found = [model(torch.ones(2, 64))[0] > 0 for _ in range(2)]
    assert torch.equal(torch.cat(found), masks(4, first=10)[0])


@dataclasses.dataclass
class Output:
    """What no pytree is."""

    logits: torch.Tensor


RETURNS = {
    "a tensor": lambda logits: logits,
    "a dataclass": Output,
    "an object": lambda logits: types.SimpleNamespace(logits=logits),
    "None": lambda logits: None,
}
REGIONS = ("each layer", "a layer twice", "the whole model")


class Returning(nn.Module):
    """Layers in a model that returns their tensor in some way; `take` finds it, with `region` checkpointed."""

    def __init__(self, returns, shared, region="", checkpoints=None):
        super().__init__()
        self.inner, self.returns, self.found = build(shared=shared, layers=3), returns, []
        self.region, self.settings = region, checkpoints
        if region in REGIONS[:2]:
            self.inner.checkpoints = checkpoints
        if region == REGIONS[1]:
            layer = self.inner.layers[0]
            layer.forward = functools.partial(checkpoint, layer.forward, **checkpoints)

    def forward(self, ids):
        self.found.append(self.inner(ids))
        return self.returns(self.found[-1])

    def take(self, ids):
        def run(ids, start):
            self(ids)
            return self.found.pop() + start

        start = torch.zeros(1, requires_grad=True)
        return run(ids, start) if self.region != REGIONS[2] else checkpoint(run, ids, start, **self.settings)


@parametrize_covering(
    region=REGIONS,
    checkpoints=CHECKPOINTS,
    shared={"own layers": False, "a shared layer": True},
    each={"returns": RETURNS},
)
def test_what_runs_again_draws_the_same_masks(region, checkpoints, returns, shared):
    """After each forward, and after several of them."""
    plain, again = (tempoize(Returning(returns, shared, *more), seed=4) for more in ((), (region, checkpoints)))
    alone, together = [], []
    for model in (plain, again):
        for found, groups in ((alone, [[0], [B]]), (together, [[2 * B, 3 * B, 4 * B]])):
            for group in groups:
                losses = [model.take(make_ids(first=first)).square().mean() for first in group]
                sum(losses).backward()
                found.append([torch.stack(losses).detach(), *(parameter.grad for parameter in model.parameters())])
                model.zero_grad(set_to_none=True)
    assert all(map(equal, alone[:2], alone[2:])) and not equal(alone[0], alone[1])
    for ours, theirs in zip(*together, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_a_second_backward_of_one_graph_draws_the_same_masks():
    model = tempoize(build(shared=True, layers=3), seed=4)
    model.checkpoints = CHECKPOINTS["without the generator's state"]
    loss, parameters = model(make_ids()).square().mean(), list(model.parameters())
    assert equal(*(torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2)))


def test_a_region_that_does_not_tell_its_call_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.5), nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(lambda y: self.linear(self.drop(y * 1)), x, use_reentrant=False)
            return x

    model = tempoize(Twice())
    out = model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"drop is called several times in a forward, and which of its calls runs"):
        out.sum().backward()


def test_a_dropout_outside_of_any_forward_is_refused():
    model = tempoize(Dropouts())
    with pytest.raises(RuntimeError, match="a dropout was called before any forward of the model"):
        model.first(torch.ones(2, 4))


@pytest.mark.parametrize("first", [-1, 2**47])
def test_samples_out_of_range_are_refused(first):
    with (
        pytest.raises(ValueError, match=rf"first_sample is {first}; expected 0 to 2\*\*47 - 1"),
        samples(tempoize(Dropouts()), first),
    ):
        pass


def hide_outputs(model):
    """With these gains a norm's output does not say its input: less than half of abs(bias), and none to divide by."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.weight[:2] = 1e-3
                if isinstance(module, nn.LayerNorm):
                    module.bias.fill_(0.5)
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(("layers", "shared", "norm"), [(1, False, nn.LayerNorm), (2, True, nn.RMSNorm)])
def test_a_compiled_model_draws_the_same_masks_and_is_compiled_once(layers, shared, norm):
    settings = {"layers": layers, "shared": shared, "norm": lambda: norm(32)}
    plain, other = (tempoize(hide_outputs(build(**settings)), seed=4) for _ in range(2))
    compiled = torch.compile(other, backend="aot_eager")
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    graphs = []
    for step in range(3):
        expected, found = (loss_and_gradients(model, make_ids(first=step)) for model in (plain, compiled))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_layers_compiled_one_by_one_and_checkpointed_draw_the_same_masks():
    plain, other = (tempoize(build(layers=3), seed=4) for _ in range(2))
    other.checkpoints = CHECKPOINTS["without the generator's state"]
    for layer in other.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for step in range(2):
        expected, found = (loss_and_gradients(model, make_ids(first=step)) for model in (plain, other))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class Functional(nn.Module):
    """Drops by a function; `at_start` is called before."""

    def __init__(self):
        super().__init__()
        self.linear, self.at_start = nn.Linear(32, 32), None

    def forward(self, x):
        if self.at_start is not None:
            self.at_start()
        return x + F.dropout(F.gelu(self.linear(x)), 0.25, self.training)


def build_functional(names="ab"):
    torch.manual_seed(0)
    return tempoize(nn.Sequential(OrderedDict((name, Functional()) for name in names)), seed=7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_whole", [False, True])
def test_compiled_functions_draw_the_same_masks(is_whole):
    plain, other = build_functional(), build_functional()
    compiled = torch.compile(other, backend="aot_eager") if is_whole else other
    for layer in () if is_whole else other:
        layer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(4, 32)), plain(torch.ones(4, 32)))


def test_functions_of_models_in_two_threads_draw_at_their_own_places():
    x, first_is_inside, second_is_inside, may_go = torch.ones(4, 32), *(threading.Event() for _ in range(3))
    first, second, *others = (build_functional(name) for name in "abab")
    for model in (first, second, *others):
        model(x)  # watched
    expected, found = [model(x) for model in others], []

    def work():
        first_is_inside.wait(60)
        found.append(second(x))

    def let_the_other_begin():
        first_is_inside.set()
        assert second_is_inside.wait(60)

    second.b.at_start = lambda: (second_is_inside.set(), may_go.wait(60))
    first.a.at_start = let_the_other_begin
    thread = threading.Thread(target=work)
    thread.start()
    outs = [first(x)]
    may_go.set()
    thread.join()
    assert equal([*outs, *found], expected)


def test_two_threads_in_one_model_are_refused():
    model, is_inside, may_go = tempoize(Dropouts(), seed=7), threading.Event(), threading.Event()

    def wait(*_):
        is_inside.set()
        may_go.wait(60)

    hook, found = model.first.register_forward_pre_hook(wait), []
    other = threading.Thread(target=lambda: found.extend(masks(model=model)))
    other.start()
    assert is_inside.wait(60)
    hook.remove()
    with pytest.raises(RuntimeError, match="Dropouts is called while a forward of it runs"):
        masks(model=model)
    may_go.set()
    other.join()
    assert equal(found, masks(first=0)) and equal(masks(model=model), masks(first=4))


def test_an_empty_tensor_does_not_say_how_many_samples_there_are():
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.25)

        def forward(self, prompt, x):
            return self.drop(x)

    model, alone = tempoize(Prompted(), seed=7), tempoize(Prompted(), seed=7)
    x = torch.ones(4, 64)
    assert torch.equal(model(torch.ones(0, 8), x), alone(x, x))
