"""Dropout masks are a function of seed, sample, place and call: whoever runs a forward again, in whatever way, and
however the samples are put into batches, draws the same ones; also after an interrupt, in a restored random state, and
in a copy of the model."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import threading
import types
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from covering import exhaustive, parametrize_covering
from dropout_masks import recorded_draws
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch_models import B, build, loss_and_gradients, make_ids

from tempo_torch import read_step, restore, samples, set_step, tempoize

CHECKPOINTS = {
    "non-reentrant": {"use_reentrant": False},
    "without the generator's state": {"use_reentrant": False, "preserve_rng_state": False},
    "reentrant": {"use_reentrant": True, "preserve_rng_state": False},
}
CHECKPOINT = CHECKPOINTS["without the generator's state"]


class Runs(nn.Module):
    """Runs a function of itself and its inputs, with these modules."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args):
        return self.function(self, *args)


def run_dropouts(self, x):
    return self.first(x), self.second(x), self.second(x)


def make_dropouts(seed=7):
    """Two dropouts of ones, one of them called twice."""
    return tempoize(Runs(run_dropouts, first=nn.Dropout(0.25), second=nn.Dropout(0.25)), seed=seed)


def masks(num_samples=4, first=None, model=None):
    model = make_dropouts() if model is None else model
    with contextlib.nullcontext() if first is None else samples(model, first):
        return [out > 0 for out in model(torch.ones(num_samples, 64))]


def equal(a, b):
    return all(map(torch.equal, a, b))


def draw(model, ids=None):
    """The (key, sample, head, row) of what a forward draws."""
    with recorded_draws() as drawn:
        model(make_ids() if ids is None else ids)
    return set(drawn)


def test_masks_do_not_depend_on_batches():
    whole, model = masks(8, first=100), make_dropouts()
    for halves in ([masks(4, first=100), masks(4, first=104)], []):
        with samples(model, 100):  # sees one batch after another
            halves = halves or [masks(4, model=model) for _ in range(2)]
        assert equal(whole, [torch.cat(pair) for pair in zip(*halves, strict=True)])


def test_places_calls_seeds_and_samples_have_masks_of_their_own():
    drawn = [*masks(first=0), *masks(first=4), masks(first=0, model=make_dropouts(8))[0]]
    rows = torch.cat(drawn).double() - 0.75
    correlation = (rows @ rows.T / rows.size(1)).fill_diagonal_(0).abs().max()
    assert correlation < 6 * 0.25 * 0.75 / rows.size(1) ** 0.5


def test_as_many_are_dropped_as_asked_for_and_the_others_are_scaled():
    out = make_dropouts(1)(torch.ones(64, 1000, dtype=torch.float64))[0]
    assert abs((out == 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / out.numel()) ** 0.5
    torch.testing.assert_close(out[out > 0].mean(), torch.tensor(1 / 0.75, dtype=torch.float64), rtol=1e-12, atol=0)


def test_neither_shapes_behind_the_samples_nor_other_inputs_nor_tokens_laid_side_by_side_matter():
    calls = [
        (lambda self, x: self.drop(x), (torch.ones(6, 40),)),
        (lambda self, x: self.drop(x), (torch.ones(6, 5, 8),)),
        (lambda self, x: self.drop(x), (torch.ones(6, 2, 5, 4),)),
        (lambda self, x: self.drop(x.flatten(0, 1)), (torch.ones(6, 5, 8),)),
        (lambda self, prompt, x: self.drop(x), (torch.ones(0, 8), torch.ones(6, 40))),  # says no number of samples
    ]
    found = []
    for function, args in calls:
        model = tempoize(Runs(function, drop=nn.Dropout(0.5)), seed=3)
        with samples(model, 2):
            found.append(model(*args).reshape(6, 40))
    assert equal(found[:1] * 4, found[1:])


def test_forwards_in_training_are_counted():
    model = make_dropouts()
    first, second = masks(model=model), masks(model=model)
    assert equal(first, masks(first=0)) and equal(second, masks(first=4))
    # A last, smaller batch takes its own numbers; a larger one those that no other step has.
    assert equal(masks(2, model=model), masks(2, first=8))
    larger = masks(6, model=model)
    assert not any(equal(larger[:1], masks(6, first=step)[:1]) for step in range(0, 40, 2))
    set_step(model, 1)
    assert equal(masks(model=model), second)
    assert read_step(model) == (2, 4)
    # A run that goes on with a smaller batch counts as before.
    model = make_dropouts()
    set_step(model, 3, 4)
    assert equal(masks(2, model=model), masks(2, first=12)) and read_step(model) == (4, 4)


def test_evaluation_counts_no_step_and_what_drops_in_it_draws_anew_in_every_forward():
    model = make_dropouts()
    model.eval()
    assert all(mask.all() for mask in masks(model=model))
    model.train()
    assert equal(masks(model=model), masks(first=0))
    model.eval()
    model.first.train()
    assert not equal(masks(model=model)[:1], masks(model=model)[:1])


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda model: masks(first=-1, model=model), ValueError, r"first_sample is -1; expected 0 to 2\*\*47 - 1"),
        (lambda model: masks(first=2**47, model=model), ValueError, rf"first_sample is {2**47}; expected 0 to 2"),
        (lambda model: set_step(model, -1), ValueError, "num_forwards is -1; expected at least 0"),
        (lambda model: set_step(model, 0, 0), ValueError, "num_samples is 0; expected at least 1"),
        (lambda model: model.first(torch.ones(2, 4)), RuntimeError, "a dropout was called before any forward of the"),
    ],
)
def test_what_is_out_of_range_or_outside_of_a_forward_is_refused(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(make_dropouts())


RETURNS = {
    "a tensor": lambda logits: logits,
    "what no pytree is": lambda logits: types.SimpleNamespace(logits=logits),
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
    model.checkpoints = CHECKPOINT
    loss, parameters = model(make_ids()).square().mean(), list(model.parameters())
    assert equal(*(torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(2)))


def test_a_region_that_does_not_tell_its_call_is_refused():
    def run(self, x):
        for _ in range(2):
            x = checkpoint(lambda y: self.linear(self.drop(y * 1)), x, use_reentrant=False)
        return x

    out = tempoize(Runs(run, drop=nn.Dropout(0.5), linear=nn.Linear(4, 4)))(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"drop is called several times in a forward, and which of its calls runs"):
        out.sum().backward()


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
    return nn.Sequential(OrderedDict((name, Functional()) for name in names))


COMPILED = [
    (lambda: build(layers=2, shared=True, norm=lambda: nn.RMSNorm(32)), False),
    (build, True),
    (build_functional, False),
]
WHOLE_OR_BY_LAYER = exhaustive((lambda: build(layers=1), False), (build_functional, True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("make", "by_layer"), [*COMPILED, *WHOLE_OR_BY_LAYER])
def test_compiled_models_and_layers_draw_the_same_masks_and_are_compiled_once(make, by_layer):
    plain, other = (tempoize(make(), seed=4) for _ in range(2))
    torch._dynamo.reset()
    for layer in getattr(other, "layers", other) if by_layer else ():
        layer.compile(backend="aot_eager", fullgraph=True)
        other.checkpoints = CHECKPOINT
    compiled, graphs = other if by_layer else torch.compile(other, backend="aot_eager"), set()
    for step in range(3):
        if isinstance(plain, nn.Sequential):
            expected, found = ([model(torch.ones(4, 32))] for model in (plain, compiled))
        else:
            expected, found = (loss_and_gradients(model, make_ids(first=step)) for model in (plain, compiled))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1


def test_functions_of_models_in_two_threads_draw_at_their_own_places():
    x, both = torch.ones(4, 32), threading.Barrier(2, timeout=60)
    models = [tempoize(build_functional(name), seed=7) for name in "abab"]
    for model in models:
        model(x)  # watched
    expected = [model(x) for model in models[2:]]
    for model in models[:2]:
        model[0].at_start = both.wait  # both are inside before either draws
    with ThreadPoolExecutor(2) as threads:
        assert equal([*threads.map(lambda model: model(x), models[:2])], expected)


def test_two_threads_in_one_model_are_refused():
    model, both = make_dropouts(), threading.Barrier(2, timeout=60)
    hook = model.first.register_forward_pre_hook(lambda *_: (both.wait(), both.wait(), None)[2])
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(masks, model=model)
        both.wait()
        hook.remove()
        for _ in range(2):  # a refusal ends nothing
            with pytest.raises(RuntimeError, match="Runs is called while a forward of it runs"):
                masks(model=model)
        both.wait()
    assert equal(found.result(), masks(first=0)) and equal(masks(model=model), masks(first=4))


class Stop(BaseException):
    """No Exception."""


INTERRUPTS = [KeyboardInterrupt, Stop, RuntimeError]


def interrupt(module, error, at=1):
    """Lets the at-th call of a module raise `error`, once."""
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == at:
            hook.remove()
            raise error

    hook = module.register_forward_pre_hook(stop)


@parametrize_covering(
    shared={"own layers": False, "a shared layer": True}, at=["forward", "backward"], each={"error": INTERRUPTS}
)
def test_steps_after_an_interrupt_draw_the_same_masks_in_forward_and_in_backward(error, shared, at):
    ours, stock = (tempoize(build(shared=shared, layers=3), seed=4) for _ in range(2))
    ours.checkpoints = CHECKPOINT
    calls = 3 if shared else 1
    interrupt(ours.layers[0].drop1, error, at=calls if at == "forward" else calls + 1)
    with pytest.raises(error):
        loss_and_gradients(ours, make_ids())
    ours.zero_grad(set_to_none=True)
    set_step(stock, 1, B)
    for step in range(2):
        ids = make_ids(first=step)
        assert equal(loss_and_gradients(ours, ids), loss_and_gradients(stock, ids))
    assert read_step(ours) == read_step(stock) == (3, B)


def test_samples_are_heard_after_an_interrupt():
    ours, stock = (tempoize(build(), seed=4) for _ in range(2))
    interrupt(ours.layers[0], KeyboardInterrupt)
    with samples(ours, 7), pytest.raises(KeyboardInterrupt):
        ours(make_ids())
    with samples(ours, 30), samples(stock, 30):
        assert draw(ours) == draw(stock)


def test_a_thread_whose_forward_was_interrupted_lets_others_in():
    model = tempoize(build(), seed=4)
    interrupt(model.layers[0], SystemExit)
    with ThreadPoolExecutor(1) as thread:  # which lives on
        assert isinstance(thread.submit(model, make_ids()).exception(60), SystemExit)
        model(make_ids())


@pytest.mark.parametrize("error", INTERRUPTS)
def test_the_second_of_two_backwards_finds_its_forward_after_the_first_was_interrupted(error):
    ours, stock = (tempoize(Returning(RETURNS["None"], False, REGIONS[0], CHECKPOINT), seed=4) for _ in range(2))
    for model in (ours, stock):  # whose outputs are in no hook's sight
        for first in (0, 1):
            model(make_ids(first=first))
    interrupt(ours.inner.layers[0].drop1, error)  # after the other layers' have run again
    with pytest.raises(error):
        ours.found[1].sum().backward()
    ours.zero_grad(set_to_none=True)
    for model in (ours, stock):
        model.found[0].sum().backward()
    assert equal(*([parameter.grad for parameter in model.parameters()] for model in (ours, stock)))


def test_a_model_that_is_restored_after_an_interrupt_leaves_no_hooks_on_what_others_save():
    model = tempoize(build(), offload="all")
    interrupt(model.norm, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        model(make_ids())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    restore(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_region_that_ends_a_forward_draws_its_masks_after_another_forward(reentrant, has_gradient):
    def run_again(self, x):
        return checkpoint(run, self, x, use_reentrant=reentrant, preserve_rng_state=False)

    def run(self, x):
        return self.linear(self.drop(x))

    found, x = [], torch.randn(4, 16, requires_grad=True)
    for function in (run, run_again):
        torch.manual_seed(0)
        model = tempoize(Runs(function, drop=nn.Dropout(0.5), linear=nn.Linear(16, 16)), seed=4)
        out = model(x)
        with torch.set_grad_enabled(has_gradient):
            model(x)
        out.sum().backward()
        found.append(model.linear.weight.grad)
    assert torch.equal(*found)


def contrast(embeddings):
    return F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)).roll(1))


def cache_gradients(model, batches, others, is_in_backward=False, context=contextlib.nullcontext):
    """One step with a loss over all batches, as sentence-transformers, GC-DPR and GradCache make it: (embeddings of the
    first forwards, of the second ones, gradients). The first of them runs the second ones in a hook of the loss."""
    first, states, second = [], [], []
    with torch.no_grad(), context():
        for ids in batches:
            states.append(torch.get_rng_state())
            first.append(model(ids).mean(1))
            others()
    leaves = [each.clone().requires_grad_() for each in first]
    loss = contrast(torch.cat(leaves))
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True)

    def run_again(*_):
        with torch.enable_grad(), context():
            for ids, state, gradient in zip(batches, states, gradients, strict=True):
                with torch.random.fork_rng([]):
                    torch.set_rng_state(state)
                    second.append(model(ids).mean(1))
                (second[-1] * gradient).sum().backward()

    if is_in_backward:
        loss.register_hook(run_again)
        loss.backward()
    else:
        run_again()
    return first, second, [parameter.grad for parameter in model.parameters()]


@parametrize_covering(
    is_in_backward={"after backward": False, "in backward": True},
    is_checkpointed={"kept": False, "checkpointed": True},
    says={"counted": False, "said": True},
    others={"nothing draws": lambda: None, "others draw": lambda: torch.rand(3)},
)
def test_gradient_caching_draws_the_same_masks_twice(is_in_backward, is_checkpointed, others, says):
    ours, plain = (tempoize(build(), seed=4) for _ in range(2))
    ours.checkpoints = CHECKPOINT if is_checkpointed else None
    for step in range(2):
        batches = [make_ids(n, first=40 * step + 10 * place) for place, n in enumerate((3, 3, 2, 3))]
        ours.zero_grad(set_to_none=True), plain.zero_grad(set_to_none=True)
        context, other = (
            functools.partial(samples, model, 40 + 11 * step) if says else contextlib.nullcontext
            for model in (ours, plain)
        )
        first, second, found = cache_gradients(ours, batches, others, is_in_backward, context)
        with other():
            embeddings = [plain(ids).mean(1) for ids in batches]
        contrast(torch.cat(embeddings)).backward()
        assert equal(first, second) and equal(first, embeddings)
        for one, parameter in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-5)
    assert read_step(ours) == read_step(plain)


def test_one_context_around_both_forwards_of_gradient_caching():
    model = tempoize(build(), seed=4)
    with samples(model, 12):
        first, second, _ = cache_gradients(model, [make_ids(first=n) for n in (0, 5)], lambda: None)
        next_one = draw(model)
    with samples(model, 12 + 2 * B):
        assert equal(first, second) and next_one == draw(model)


def test_a_random_state_that_nobody_restores_asks_for_nothing():
    """Two branches of one batch, of which one has no gradient, or none of which has; and steps after a new seed."""
    model, seen = tempoize(build(), seed=4), []
    for _ in range(2):
        with torch.no_grad():
            seen += [draw(model), draw(model)]
        seen += [draw(model), draw(model)]
    torch.manual_seed(1)
    seen += [draw(model), draw(model)]
    assert len(set().union(*seen)) == sum(map(len, seen))


def test_what_is_restored_repeats_one_forward_and_no_later_one():
    """Whoever seeds anew before training repeats the masks of the first forward, as under stock, and no others."""
    model = tempoize(build(), seed=4)
    torch.manual_seed(1)
    with torch.no_grad():
        first = draw(model)
    torch.manual_seed(1)
    drawn = [draw(model) for _ in range(3)]
    assert drawn[0] == first and len(set().union(*drawn)) == 3 * len(first)
    torch.manual_seed(1)  # of another batch
    assert draw(model, make_ids(B + 1)).isdisjoint(set().union(*drawn))


def load_again(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda model: AveragedModel(model).module, load_again]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "AveragedModel", "torch.save"])
def test_a_copy_draws_next_what_its_model_draws_next_and_one_from_inside_of_samples_counts(copied):
    model = tempoize(build(shared=True), seed=4)
    for step in range(3):
        with samples(model, 20) if step == 1 else contextlib.nullcontext():
            twin = copied(model)
        assert read_step(twin) == read_step(model)
        for _ in range(2):
            ids = make_ids(first=step)
            assert equal(loss_and_gradients(twin, ids), loss_and_gradients(model, ids))
