from __future__ import annotations

import pytest
import torch
from loss_head_inputs import CASES, B, H, S, V, head_inputs, random_labels, reference
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from witness import assert_three_witnesses, assert_within_rule, kept_storages, outputs_and_gradients, ulp

from tempo_kernels.linear_cross_entropy import cpu, linear_cross_entropy

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_and_gradients_are_right_by_the_three_witnesses(case, dtype, chunk_tokens):
    labels = random_labels(v=90)
    for has_bias in (False, True):
        inputs = head_inputs(has_bias)
        assert_three_witnesses(
            lambda *t: linear_cross_entropy(t[0], t[1], labels, bias=t[2], chunk_tokens=chunk_tokens, **case),
            lambda *t: reference(*t, labels, **case),
            inputs,
            torch.rand(B, S) + 0.1,
            dtype,
        )


@pytest.mark.parametrize("chunk_tokens", [1, 4, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_made_in_forward_are_right_by_the_three_witnesses(case, dtype, chunk_tokens):
    labels, token_weights = random_labels(v=90), torch.rand(B, S)
    token_weights[1] = 0

    def total(function, *t):
        sum_of_losses, losses = function(*t, labels, token_weights=token_weights, chunk_tokens=chunk_tokens, **case)
        assert losses.shape == (B, S)
        return sum_of_losses

    def ours(hidden, weight, bias, labels, **settings):
        return linear_cross_entropy(hidden, weight, labels, bias=bias, **settings)

    assert_three_witnesses(
        lambda *t: total(ours, *t), lambda *t: total(reference, *t), head_inputs(), torch.tensor(3.0), dtype
    )


@pytest.mark.parametrize("smoothing", [0.01, 0.1, 0.5])
def test_of_few_tokens_and_columns_the_float32_error_is_what_is_documented(smoothing):
    # Of so few numbers torch's own error may be next to nothing: then 8 ulp of the largest value are the measure.
    for seed in range(30):
        torch.manual_seed(seed)
        s, b, v = 1 + seed % 7, 1 + seed % 2, 5 + 6 * (seed % 3)
        inputs, labels, grad = head_inputs(s=s, b=b, v=v, scale=0.02), torch.randint(v, (b, s)), torch.randn(b, s)
        settings = {"label_smoothing": smoothing, "z_loss": 1e-3 * (seed % 2)}
        ours, same, exact = (
            outputs_and_gradients(lambda *t, f=function: f(*t, labels, **settings), inputs, grad, dtype)  # noqa: B023
            for function, dtype in (
                (lambda h, w, bias, y, **more: linear_cross_entropy(h, w, y, bias=bias, **more), torch.float32),
                (reference, torch.float32),
                (reference, torch.float64),
            )
        )
        for found, theirs, truth in zip(ours, same, exact, strict=True):
            allowed = 2 * (theirs.double() - truth).abs().max() + 8 * ulp(truth.abs().max(), torch.float32)
            assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradcheck(case):
    hidden, weight, bias = (t.double().requires_grad_() for t in head_inputs(s=3, b=2, v=11))
    labels = random_labels(3, 2, 9, ignored=(1,))
    case = {**case, **({"vocab_size": 9} if "vocab_size" in case else {})}
    assert torch.autograd.gradcheck(
        lambda *t: linear_cross_entropy(t[0], t[1], labels, bias=t[2], chunk_tokens=4, **case), (hidden, weight, bias)
    )


def test_the_size_of_chunks_changes_nothing_but_the_order_of_sums():
    inputs, labels = head_inputs(), random_labels()
    losses = [linear_cross_entropy(inputs[0], inputs[1], labels, bias=inputs[2], chunk_tokens=n) for n in (1, 5, 99)]
    exact = reference(*(t.double() for t in inputs), labels)
    for found in losses:
        assert_within_rule("losses", found, losses[0], exact)


def gradients_of(losses, *leaves):
    losses.sum().backward()
    return [leaf.grad for leaf in leaves]


def test_tokens_that_are_all_ignored_have_no_loss_and_no_gradient():
    hidden, weight, bias = (t.requires_grad_() for t in head_inputs())
    labels = torch.full((B, S), 7)
    losses = linear_cross_entropy(hidden, weight, labels, bias=bias, ignore_index=7, z_loss=0.1, label_smoothing=0.1)
    assert not losses.any()
    assert not any(grad.any() for grad in gradients_of(losses, hidden, weight, bias))


def test_an_ignored_token_may_hold_logits_beyond_the_range_of_float16():
    hidden, weight, _ = (t if t is None else t.half() for t in head_inputs(False))
    hidden[2, 1] = 6e4
    hidden.requires_grad_()
    labels = random_labels()
    labels[1, 2] = -100
    losses = linear_cross_entropy(hidden, weight, labels)
    assert losses.isfinite().all()
    losses.sum().backward()
    assert hidden.grad.isfinite().all() and not hidden.grad[2, 1].any() and hidden.grad[3, 1].any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (0, 2), (2, 0)], ids=str)
def test_one_token_and_none(shape):
    s, b = shape
    labels = torch.randint(V, (b, s))
    assert_three_witnesses(
        lambda *t: linear_cross_entropy(t[0], t[1], labels, bias=t[2]),
        lambda *t: reference(*t, labels),
        head_inputs(s=s, b=b),
        torch.ones(b, s),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_logits_as_large_as_ten_thousand_and_around_it(offset, dtype):
    hidden, weight, bias = head_inputs(scale=400.0 if offset == 0 else 1.0)
    labels = random_labels()
    assert F.linear(hidden, weight, bias + offset).abs().max() > 5e3
    assert_three_witnesses(
        lambda *t: linear_cross_entropy(t[0], t[1], labels, bias=t[2], chunk_tokens=8),
        lambda *t: reference(*t, labels),
        [hidden, weight, bias + offset],
        torch.ones(B, S),
        dtype,
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_token_with_nan_or_infinity_has_a_nan_loss_and_its_neighbours_do_not(value):
    hidden, weight, bias = head_inputs()
    labels = random_labels(ignored=())
    clean = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=4)
    hidden[3, 1, 2] = value
    hidden.requires_grad_()
    losses = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=4)
    hurt = torch.zeros(B, S, dtype=torch.bool)
    hurt[1, 3] = True
    assert losses.detach().isnan().equal(hurt) and torch.equal(losses[~hurt], clean[~hurt])
    (grad,) = gradients_of(losses, hidden)
    assert grad.isnan().any(-1).t().equal(hurt)


def test_a_label_outside_of_the_vocabulary_has_an_infinite_loss():
    hidden, weight, _ = head_inputs(False)
    labels = random_labels(ignored=())
    labels[0, 0], labels[1, 1] = V, -1
    losses = linear_cross_entropy(hidden, weight, labels)
    assert losses.isinf().sum() == 2 and losses[0, 0] == losses[1, 1] == torch.inf


def test_any_strides():
    hidden = torch.randn(H, B, S).permute(2, 1, 0)
    weight, bias = torch.randn(H, 2 * V)[:, ::2].t(), torch.randn(2 * V)[::2]
    labels = random_labels(B, S).t()
    assert_three_witnesses(
        lambda *t: linear_cross_entropy(t[0], t[1], labels, bias=t[2], chunk_tokens=8),
        lambda *t: reference(*t, labels),
        [hidden, weight, bias],
        torch.rand(S, B).t(),
        torch.float32,
    )


@pytest.mark.parametrize("has_weights", [False, True])
def test_only_the_gradients_that_are_needed_are_made(has_weights):
    hidden, weight, bias = head_inputs()
    labels = random_labels()
    keywords = {"token_weights": torch.ones(B, S)} if has_weights else {}
    for leaf in (hidden, weight, bias):
        leaf.requires_grad_()
        out = linear_cross_entropy(hidden, weight, labels, bias=bias, **keywords)
        total = out[0] if has_weights else out.sum()
        (expected,) = torch.autograd.grad(reference(hidden, weight, bias, labels).sum(), leaf)
        (grad,) = torch.autograd.grad(total, leaf)
        torch.testing.assert_close(grad, expected)
        leaf.requires_grad_(False)


def test_hidden_states_weight_labels_and_eight_bytes_a_token_are_kept():
    hidden, weight, _ = (t if t is None else t.bfloat16().requires_grad_() for t in head_inputs(False))
    labels = random_labels()
    kept = kept_storages(lambda h, w: linear_cross_entropy(h, w, labels), hidden, weight)
    known = {t.untyped_storage().data_ptr() for t in (hidden, weight, labels)}
    assert known <= kept.keys()
    assert sum(size for pointer, size in kept.items() if pointer not in known) == 8 * S * B


@pytest.mark.parametrize(("chunk_tokens", "weight_bytes"), [(None, 2), (4, 4)])
def test_with_token_weights_the_two_gradients_are_kept_in_place_of_the_hidden_states(chunk_tokens, weight_bytes):
    """The weight's in float32 where several chunks are summed."""
    hidden, weight, _ = (t if t is None else t.bfloat16().requires_grad_() for t in head_inputs(False))
    labels = random_labels()
    keywords = {"token_weights": torch.ones(B, S), "chunk_tokens": chunk_tokens}
    kept = kept_storages(lambda h, w: linear_cross_entropy(h, w, labels, **keywords)[0], hidden, weight)
    assert not {t.untyped_storage().data_ptr() for t in (hidden, weight, labels)} & kept.keys()
    assert sum(kept.values()) == 2 * S * B * H + weight_bytes * V * H + 4


def test_a_second_derivative_raises():
    hidden, weight, _ = (t if t is None else t.requires_grad_() for t in head_inputs(False))
    losses = linear_cross_entropy(hidden, weight, random_labels())
    (grad,) = torch.autograd.grad(losses.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        grad.sum().backward()


class _Operations(TorchDispatchMode):
    """Notes the operations of torch, but for those of the backend."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.names, self._in_backend = [], False
        for name in ("find_statistics", "write_gradient_"):
            monkeypatch.setattr(cpu, name, self._leave_out(getattr(cpu, name)))

    def _leave_out(self, function):
        def call(*args):
            self._in_backend = True
            try:
                return function(*args)
            finally:
                self._in_backend = False

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._in_backend:
            self.names.append(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk_tokens", [None, S * B, S * B + 1])
def test_where_one_chunk_holds_all_rows_nothing_is_cut_or_joined(chunk_tokens, monkeypatch):
    """Each of these operations costs the host as much as the launch of a kernel."""
    hidden, weight, _ = (t if t is None else t.requires_grad_() for t in head_inputs(False))
    labels, grad = random_labels(), torch.ones(B, S)
    with _Operations(monkeypatch) as noted:
        losses = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
        forward, noted.names = noted.names, []
        torch.autograd.grad(losses, (hidden, weight), grad)
    assert not {"slice", "alias", "copy_", "amax", "exp"} & {*forward, *noted.names}
    assert forward.count("mm") == 1 and len(forward) <= 24
    assert len(noted.names) <= 28
