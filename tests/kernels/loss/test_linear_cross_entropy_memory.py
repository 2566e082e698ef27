"""What the loss head allocates, its gradients made in forward, main_grad, and its errors."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from loss_head_inputs import HEADS, B, H, S, V, head_inputs, random_labels, reference
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tempo_kernels.linear_cross_entropy import linear_cross_entropy, use_chunk_bytes
from tempo_kernels.linear_cross_entropy.chunks import Gradients, Head
from tempo_kernels.linear_cross_entropy.settings import Settings, Shards
from tempo_kernels.opaque import use_blocks


class Allocations(TorchDispatchMode):
    """Every tensor that operations make inside: the largest one, and how many bytes of them are alive at most."""

    def __init__(self, *known):
        super().__init__()
        self.largest_bytes = self.peak_bytes = 0
        self._known = {t.untyped_storage()._cdata for t in known}
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self._known:
                storage = t.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
                self.largest_bytes = max(self.largest_bytes, storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return out


ONE_CHUNK = {
    "losses": (HEADS["losses"], {}),
    "weighted losses": (HEADS["losses"], {"token_weights": torch.ones(2, 64)}),
    "log_prob": (HEADS["log_probs"], {"return_entropy": False}),
    "scaled log_prob and entropy": (HEADS["log_probs"], {"temperature": 0.7, "softcap": 30.0}),
}


@parametrize_covering(case=ONE_CHUNK, dtype=[torch.float32, torch.bfloat16])
def test_at_most_one_chunk_of_logits_is_alive(case, dtype):
    (head, more), (s, b, h, v, chunk_tokens) = case, (64, 2, 8, 3000, 32)
    hidden, weight = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((s, b, h), (v, h)))
    labels = torch.randint(v, (b, s))

    def run():
        found = head.ours(hidden, weight, None, labels, chunk_tokens=chunk_tokens, **more)
        return found[0] if "token_weights" in more else found.sum()

    chunk_bytes, weight_bytes = chunk_tokens * v * dtype.itemsize, v * h * 4
    # A row in float32, and what eager.py makes of it.
    block_bytes = (3 if head is HEADS["losses"] else 8) * 4 * v
    tokens_bytes = s * b * (h * 4 + 24 * 8)
    with torch.no_grad(), use_blocks(linear_cross_entropy=v), Allocations(hidden, weight, labels) as seen:
        run()
    assert seen.largest_bytes == chunk_bytes and seen.peak_bytes <= chunk_bytes + block_bytes + tokens_bytes
    with use_blocks(linear_cross_entropy=v), Allocations(hidden, weight, labels) as seen:
        run().backward()
    assert seen.largest_bytes == max(chunk_bytes, weight_bytes)
    # Of a 16-bit weight's gradient there is, beside the sum in float32, a part of it or the result.
    weight_bytes *= 1 if dtype == torch.float32 else 2
    peak = chunk_bytes + block_bytes + weight_bytes + tokens_bytes
    assert seen.peak_bytes <= peak < s * b * v * dtype.itemsize


def measure_peak(run, *inputs):
    for t in inputs:
        t.grad = None
    with Allocations(*inputs) as seen:
        run().backward()
    return seen.peak_bytes


@parametrize_covering(
    each={"has_weights": [False, True], "tokens": [16, 64, 256, 1024], "sizes": [(32, 500), (256, 500), (64, 2000)]}
)
def test_the_head_never_takes_more_than_the_logits_that_it_saves(has_weights, tokens, sizes):
    """Nor more than in chunks of the default size, whose sum in float32 costs more than the logits of few tokens."""
    h, v = sizes
    hidden = torch.randn(tokens, 1, h).bfloat16().requires_grad_()
    weight = (torch.randn(v, h) / h**0.5).bfloat16().requires_grad_()
    labels = torch.randint(v, (1, tokens))
    token_weights = torch.full((1, tokens), 1.0 / tokens)

    def run(**keywords):
        if has_weights:
            return linear_cross_entropy(hidden, weight, labels, token_weights=token_weights, **keywords)[0]
        return (linear_cross_entropy(hidden, weight, labels, **keywords) * token_weights).sum()

    def run_stock():
        logits = torch.matmul(hidden, weight.t()).float()
        return torch.nn.functional.cross_entropy(logits.view(tokens, v), labels[0])

    inputs = (hidden, weight, labels)
    with use_chunk_bytes(32 * v * 2), use_blocks(linear_cross_entropy=v):
        ours, chunked, stock = (measure_peak(each, *inputs) for each in (run, lambda: run(chunk_tokens=32), run_stock))
    small = 64 * tokens * 8 + 3 * 4 * v + 16 * tokens * h
    assert (ours <= chunked + small) and (ours <= stock + small), (ours, chunked, stock, small)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chunk_tokens", [4, 1000])
def test_a_factor_of_the_loss_is_not_rounded_to_16_bits(chunk_tokens, fused, device):
    """A loss scale of any bits: a factor rounded to bf16 would be a relative error of every gradient alike."""
    factor = 1.002
    torch.manual_seed(0)
    labels = random_labels().to(device)
    hidden, weight, _ = (t.to(device).bfloat16().requires_grad_() for t in head_inputs())
    found = []
    for grad_total in (1.0, factor):
        hidden.grad = weight.grad = None
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        more = {"token_weights": torch.ones(B, S, device=device), "chunk_tokens": chunk_tokens}
        total, _ = linear_cross_entropy(hidden, weight, labels, gradient_accumulation_fusion=fused, **more)
        (grad_total * total).backward()
        found.append((hidden.grad, weight.main_grad if fused else weight.grad))
    (grad_hidden, grad_weight), scaled = found
    torch.testing.assert_close(scaled[0], (grad_hidden.double() * factor).bfloat16(), rtol=0, atol=0)
    if fused or chunk_tokens > B * S:
        expected = (grad_weight.double() * factor).to(grad_weight.dtype)
        torch.testing.assert_close(scaled[1], expected, rtol=1e-6 if fused else 0, atol=0)


def made_in_forward(token_weights, dtype, grad_total=1.0):
    """The total, the losses, and the gradients of hidden, weight and bias."""
    torch.manual_seed(5)
    labels = random_labels()
    hidden, weight, bias = leaves = [t.to(dtype).requires_grad_() for t in head_inputs()]
    more = {"bias": bias, "chunk_tokens": 8, "token_weights": token_weights}
    total, losses = linear_cross_entropy(hidden, weight, labels, **more)
    assert not losses.requires_grad
    (grad_total * total).backward()
    return [total.detach(), losses, *(leaf.grad for leaf in leaves)]


def test_weights_of_one_by_the_number_of_tokens_do_not_underflow_in_float16():
    # Of the recomputed logits' gradient nothing would be left: 1e-7 / 101 is below float16's range.
    in_forward, exact = (made_in_forward(torch.full((B, S), 1e-7), t, 1e7) for t in (torch.float16, torch.float64))
    for found, expected in zip(in_forward[2:], exact[2:], strict=True):
        error = (found.double() - expected).abs().max()
        assert expected.abs().max() > 0.1 and error < 0.05 * expected.abs().max()


def test_token_weights_of_nothing_but_zeros_give_zeros():
    in_forward = made_in_forward(torch.zeros(B, S), torch.float32)
    assert in_forward[0] == 0 and in_forward[1].any() and not any(grad.any() for grad in in_forward[2:])


def test_gradients_made_in_forward_are_given_once():
    hidden, weight, _ = head_inputs(False)
    total, _ = linear_cross_entropy(
        hidden.requires_grad_(), weight, random_labels(), token_weights=torch.ones(B, S), chunk_tokens=8
    )
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="leave token_weights out to run backward again"):
        total.backward()


def test_recomputed_logits_give_the_same_gradients_again():
    hidden, weight, _ = head_inputs(False)
    total = linear_cross_entropy(hidden.requires_grad_(), weight, random_labels()).sum()
    first, second = (torch.autograd.grad(total, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_without_grad_mode_no_gradient_is_made():
    hidden, weight, _ = (t if t is None else t.requires_grad_() for t in head_inputs(False))
    labels, token_weights = random_labels(), torch.rand(B, S)
    with torch.no_grad(), Allocations(hidden, weight) as seen:
        total, losses = linear_cross_entropy(hidden, weight, labels, token_weights=token_weights, chunk_tokens=4)
    assert not total.requires_grad and seen.largest_bytes < V * H * 4
    torch.testing.assert_close(total, (token_weights * losses).sum())


ADDING = {
    "losses": (HEADS["losses"], {}), "weighted losses": (HEADS["losses"], {"token_weights": torch.ones(B, S)}),
    "log_probs": (HEADS["log_probs"], {}),
}  # fmt: skip


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head", "more"), ADDING.values(), ids=ADDING)
def test_the_weights_gradient_is_added_to_main_grad_as_by_megatrons_linears(head, more, main_dtype):
    hidden, weight, _ = (t if t is None else t.bfloat16().requires_grad_() for t in head_inputs(False))
    labels, before = random_labels(), torch.randn(V, H).to(main_dtype)
    (expected,) = torch.autograd.grad(head.reference(hidden, weight, None, labels).sum(), weight)
    for flags, stand_in in (({}, None), ({"grad_added_to_main_grad": False, "zero_out_wgrad": True}, 0)):
        weight.grad, weight.main_grad = None, before.clone()
        for name, value in flags.items():
            setattr(weight, name, value)
        out = head.ours(hidden, weight, None, labels, gradient_accumulation_fusion=True, **more)
        (out[0] if more else out.sum()).backward()
        torch.testing.assert_close(weight.main_grad.float(), before.float() + expected.float(), rtol=0.02, atol=0.05)
        assert (weight.grad is None) if stand_in is None else not weight.grad.any()
        assert getattr(weight, "grad_added_to_main_grad", None) is (None if stand_in is None else True)


def test_a_float32_main_grad_holds_the_sum_of_the_chunks_without_rounding_it():
    hidden, weight, _ = (t if t is None else t.bfloat16() for t in head_inputs(False))
    labels = random_labels()
    weight.requires_grad_()
    weight.main_grad = torch.zeros(V, H)
    linear_cross_entropy(hidden, weight, labels, gradient_accumulation_fusion=True, chunk_tokens=4).sum().backward()
    assert (weight.main_grad != weight.main_grad.bfloat16()).any()


def test_fusion_without_main_grad_is_refused():
    (hidden, weight, _), labels = head_inputs(False), random_labels()
    weight.requires_grad_()
    with pytest.raises(ValueError, match="weight has no main_grad; expected one of weight's shape; wrap"):
        linear_cross_entropy(hidden, weight, labels, gradient_accumulation_fusion=True)
    with torch.no_grad():
        losses = linear_cross_entropy(hidden, weight, labels, gradient_accumulation_fusion=True)
    torch.testing.assert_close(losses, reference(hidden, weight, None, labels))


class Products(TorchDispatchMode):
    """The (name, beta) of each product, none of which is carried out."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in func.name():
            self.seen.append((func.name(), kwargs.get("beta", 1)))
            return kwargs["out"]
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(torch.ops.aten.addmm, "dtype_out"), reason="this torch has no such product")
def test_on_a_gpu_each_chunks_product_of_16_bits_is_added_to_the_weights_gradient_in_float32():
    with FakeTensorMode(), torch.device("cuda"):
        hidden, weight = (torch.empty(size, H, dtype=torch.bfloat16) for size in (64, V))
        settings = Settings(Shards(None, False), V, 0, -100, chunk_rows=16)
        gradients = Gradients(Head(hidden, weight, None, hidden), (False, True, False), None, settings)
        tokens, grad_logits = (torch.empty(16, size, dtype=torch.bfloat16) for size in (H, V))
        with Products() as products:
            for start in range(0, 64, 16):
                gradients.add(slice(start, start + 16), tokens, grad_logits)
    assert gradients.weight.dtype == torch.float32
    assert products.seen == [("aten::addmm.dtype_out", beta) for beta in (0, 1, 1, 1)]
