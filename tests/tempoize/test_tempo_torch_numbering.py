"""Which samples a forward sees: after one was interrupted, in a restored random state, and in a copy of the model."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading

import pytest
import torch
from covering import parametrize_covering
from drawn_masks import recorded_draws
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states
from torch_models import B, build, loss_and_gradients, make_ids

from tempo_torch import read_step, restore, samples, set_step, tempoize

CHECKPOINT = {"use_reentrant": False, "preserve_rng_state": False}


class Stop(BaseException):
    """No Exception."""


INTERRUPTS = [KeyboardInterrupt, SystemExit, GeneratorExit, Stop, RuntimeError]


def interrupt(module, error, at=1):
    """Lets the at-th call of a module raise `error`, once."""
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == at:
            hook.remove()
            raise error

    hook = module.register_forward_pre_hook(stop)


def equal(a, b):
    return all(map(torch.equal, a, b))


def draw(model, ids=None):
    """The (key, sample, head, row) of what a forward draws."""
    with recorded_draws() as drawn:
        model(make_ids() if ids is None else ids)
    return set(drawn)


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


@pytest.mark.parametrize("error", INTERRUPTS)
def test_samples_are_heard_after_an_interrupt(error):
    ours, stock = (tempoize(build(), seed=4) for _ in range(2))
    interrupt(ours.layers[0], error)
    with samples(ours, 7), pytest.raises(error):
        ours(make_ids())
    found = []
    for model in (ours, stock):
        with samples(model, 30):
            found.append(draw(model))
    assert found[0] == found[1]


def test_a_thread_whose_forward_was_interrupted_lets_others_in():
    model = tempoize(build(), seed=4)
    interrupt(model.layers[0], SystemExit)
    ended, may_go = threading.Event(), threading.Event()

    def work():
        with contextlib.suppress(SystemExit):
            model(make_ids())
        ended.set()
        may_go.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert ended.wait(60)
    model(make_ids())
    may_go.set()
    thread.join()


@pytest.mark.parametrize("error", INTERRUPTS)
def test_the_second_of_two_backwards_finds_its_forward_after_the_first_was_interrupted(error):
    class Hidden(nn.Module):
        """Returns nothing, so that no hook on an output tells whose backward runs."""

        def __init__(self):
            super().__init__()
            self.inner, self.found = build(layers=2), []
            self.inner.checkpoints = CHECKPOINT

        def forward(self, ids):
            self.found.append(self.inner(ids))

    ours, stock = tempoize(Hidden(), seed=4), tempoize(Hidden(), seed=4)
    for model in (ours, stock):
        for first in (0, 1):
            model(make_ids(first=first))
    interrupt(ours.inner.layers[0].drop1, error)  # after the other layer's has run again
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
    class Last(nn.Module):
        def __init__(self, is_checkpointed):
            super().__init__()
            torch.manual_seed(0)
            self.drop, self.linear, self.is_checkpointed = nn.Dropout(0.5), nn.Linear(16, 16), is_checkpointed

        def forward(self, x):
            region = nn.Sequential(self.drop, self.linear)
            if not self.is_checkpointed:
                return region(x)
            return checkpoint(region, x, use_reentrant=reentrant, preserve_rng_state=False)

    found, x = [], torch.randn(4, 16, requires_grad=True)
    for model in (tempoize(Last(False), seed=4), tempoize(Last(True), seed=4)):
        out = model(x)
        with torch.set_grad_enabled(has_gradient):
            model(x)
        out.sum().backward()
        found.append(model.linear.weight.grad)
    assert torch.equal(*found)


class RandomState:
    """What sentence-transformers, GC-DPR and GradCache save of torch's generators before a forward, and restore."""

    def __init__(self, *tensors):
        self.cpu, (self.devices, self.states) = torch.get_rng_state(), get_device_states(*tensors)

    @contextlib.contextmanager
    def restored(self):
        with torch.random.fork_rng(self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.states)
            yield


def contrast(embeddings):
    return F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)).roll(1))


def cache_gradients(model, batches, others, is_in_backward=False, context=contextlib.nullcontext):
    """One step with a loss over all batches, as the libraries above make it: (embeddings of the first forwards, of the
    second ones, gradients). sentence-transformers runs the second ones in a hook of the loss."""
    first, states, second = [], [], []
    with torch.no_grad(), context():
        for ids in batches:
            states.append(RandomState(ids))
            first.append(model(ids).mean(1))
            others()
    leaves = [each.clone().requires_grad_() for each in first]
    loss = contrast(torch.cat(leaves))
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True)

    def run_again(*_):
        with torch.enable_grad(), context():
            for ids, state, gradient in zip(batches, states, gradients, strict=True):
                with state.restored():
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


def test_training_under_a_gradient_advances_no_generator():
    model = tempoize(build(), seed=4)
    state = torch.get_rng_state()
    loss_and_gradients(model, make_ids())
    with samples(model, 3):
        loss_and_gradients(model, make_ids())
    model.eval()
    with torch.no_grad():
        model(make_ids())
    assert torch.equal(state, torch.get_rng_state())


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


def average(model):
    return AveragedModel(model).module


@pytest.mark.parametrize("copied", [copy.deepcopy, average])
def test_a_copy_draws_next_what_its_model_draws_next(copied):
    model = tempoize(build(shared=True), seed=4)
    for step in range(3):
        twin = copied(model)
        assert read_step(twin) == read_step(model)
        for _ in range(2):
            ids = make_ids(first=step)
            assert equal(loss_and_gradients(twin, ids), loss_and_gradients(model, ids))


@pytest.mark.parametrize("copied", [copy.deepcopy, average, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_from_inside_of_samples_counts(copied):
    model = tempoize(build(), seed=4)
    with samples(model, 20):
        twin = copied(model)
    assert draw(twin) == draw(model)
