"""The Triton kernels of attention against their specification: see interpreted.py for where they run."""

from __future__ import annotations

import functools

import pytest
import torch
from attention_cases import (
    CHANGES,
    FIRST_HEAD,
    KEY,
    PLACES,
    SEEN,
    attend_in_parts,
    make_change,
    make_mask,
    ours,
    reference,
)
from attention_kernel_cases import check, dropped_elements, random_inputs, run, run_inputs, settings
from covering import exhaustive, parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test
from torch.utils._python_dispatch import TorchDispatchMode
from witness import assert_within_rule, outputs_and_gradients

from tempo_kernels.attention import attention, cpu, eager, function, function_parts
from tempo_kernels.attention import kernel as attention_kernel
from tempo_kernels.attention.settings import Inputs, Kept
from tempo_kernels.philox import drop_mask


@kernel_test
@parametrize_covering(each={"place": PLACES}, dtype=DTYPES, p=[0.1, 0.0])
def test_attention_does_what_is_specified(place, dtype, p):
    mask = None if place.make_mask is None else place.make_mask().to(DEVICE)
    check(*place.make_inputs(dtype, DEVICE), place.settings(p, first_sample=2**32 - 1), mask)


@kernel_test
@parametrize_covering(
    each={"dtype": DTYPES, "p": [0.0, 0.1], "dv": [32, 16]}, causal=[True, False], window_size=[None, (9, 0), (-1, 2)]
)
def test_parts_of_the_keys_make_the_whole(causal, window_size, dtype, p, dv, monkeypatch):
    monkeypatch.setattr(function_parts, "choose_backend", lambda q, cpu: attention_kernel)
    shapes = (20, 4, 32), (32, 2, 32), (32, 2, dv), (20, 4, dv)
    q, k, v, grad = (torch.randn(s, 2, heads, size, device=DEVICE).to(dtype) for s, heads, size in shapes)
    chosen = settings(causal, p, window_size=window_size, first_row=6, first_column=0)

    def differentiate(function, q, k, v, grad):
        return outputs_and_gradients(lambda *t: function(*t, chosen), [q, k, v], grad, q.dtype)

    found, specified = differentiate(attend_in_parts, q, k, v, grad), functools.partial(differentiate, reference)
    assert_as_specified(found, [q, k, v, grad], specified, "out", "grad_q", "grad_k", "grad_v")


@kernel_test
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e4])
def test_scores_of_any_size_do_what_is_specified(size):
    q, k, v, grad = random_inputs(70, 70, 1, 2, 2, 32, dtype=torch.float32)
    found = run(attention_kernel, q * size, k, v, grad, None, settings())
    assert all(t.isfinite().all() for t in found)
    check(q * min(size, 30.0), k, v, grad, settings())


@kernel_test
def test_attention_takes_any_strides_and_alignment():
    q, k, v, grad = (torch.randn(2, 3, 32, 50, device=DEVICE).permute(3, 0, 1, 2) for _ in range(4))
    check(q, k, v, torch.randn(3, 1, device=DEVICE).expand(50, 2, 3, 32), settings())
    q, k, v, grad = (torch.randn(50 * 2 * 3 * 33 + 1, device=DEVICE)[1:].view(50, 2, 3, 33)[..., :32] for _ in range(4))
    check(q.bfloat16(), k.bfloat16(), v.bfloat16(), grad.bfloat16(), settings())
    check(q, k, v, grad, settings())


@kernel_test
def test_the_logsumexp_is_the_specified_one_in_units_of_the_unscaled_scores():
    q, k, v, _ = random_inputs(70, 70, 2, 4, 2, 32, dtype=torch.float32)
    found = attention_kernel.forward(Inputs(q, k, v), settings())[1] * settings().softmax_scale
    expected = eager.forward(Inputs(*(t.cpu() for t in (q, k, v))), settings())[1]
    assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@kernel_test
def test_gradients_are_the_same_bits_every_time():
    inputs = random_inputs(150, 150, 1, 2, 1, 64, dtype=torch.bfloat16)
    first, second = (run(attention_kernel, *inputs, None, settings()) for _ in range(2))
    assert all(map(torch.equal, first, second))


DRAWS = [(KEY, 2**32 - 1, 0.4), (0x80000000_7FFFFFFF, 2**47, 0.5)]


@kernel_test
@pytest.mark.parametrize(
    ("key", "first_sample", "p"), [*DRAWS, *exhaustive((0, 0, 0.1), (2**64 - 1, 2**32 - 2, 0.9))], ids=str
)
def test_every_pass_drops_the_specified_elements_bit_for_bit(first_sample, p, key):
    sq, sk, b, a = 70, 75, 2, 1
    chosen = settings(False, p, key, first_sample=first_sample)
    expected = drop_mask(
        key,
        p,
        sample=torch.arange(first_sample, first_sample + b).view(-1, 1, 1),
        head=torch.arange(FIRST_HEAD, FIRST_HEAD + a).unsqueeze(-1),
        row=torch.arange(sq),
        num_columns=sk,
    )
    for name, found in zip(("forward", "grad_q", "grad_v"), dropped_elements(chosen, sq, sk, b, a), strict=True):
        assert torch.equal(found.cpu(), expected), name


@kernel_test
def test_draws_from_device_data_are_the_same_bit_for_bit():
    inputs = random_inputs(40, 40, 1, 2, 2, 32, dtype=torch.float32)
    expected = run(attention_kernel, *inputs, None, settings(key=2**64 - 5, first_sample=7))
    key, first_sample = torch.tensor(-5, device=DEVICE), torch.tensor(7, device=DEVICE)
    for form in [(key, first_sample), (2**64 - 5, first_sample), (key, 7)]:
        found = run(attention_kernel, *inputs, None, settings(key=form[0], first_sample=form[1]))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_workspaces_are_counted_as_backward_makes_them(dtype, monkeypatch):
    monkeypatch.setattr(attention_kernel, "launch", lambda *arguments: None)
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if "empty" in func.name():
                made.append(found.untyped_storage().nbytes())
            return found

    q, k = torch.empty(130, 2, 6, 80, dtype=dtype), torch.empty(130, 2, 3, 80, dtype=dtype)
    chosen, kept = settings(), Kept(torch.empty_like(q), torch.empty(2, 6, 130))
    with Watch():
        attention_kernel.backward(kept.out, Inputs(q, k, k), kept, chosen)
    operands = (kept.out, *kept[:3], *Inputs(q, k, k), *chosen.operands, False, False)
    gradients = [t.untyped_storage().nbytes() for t in (q, k, k)]
    assert made == [*gradients, *function.list_gpu_workspaces(operands, 9, 132)]


@pytest.mark.gpu
@pytest.mark.parametrize(("b", "is_slice"), [(1, True), (2, False)])
def test_without_dropout_torchs_own_kernel_runs_and_its_output_is_one_that_the_next_linear_keeps(b, is_slice):
    chosen = settings(p=0.0)
    mixed = torch.randn(256, b, 4, 192, device="cuda").bfloat16()
    q, k, v = (t if is_slice else t.contiguous() for t in mixed.split(64, dim=-1))
    backends = [function.get_backend(Inputs(q, k, v), each) for each in (chosen, settings())]
    assert backends == ["sdpa", "triton"]
    out = ours(q, k, v, chosen)
    assert out.is_contiguous()
    specified = [reference(*(t.cpu().to(dtype) for t in (q, k, v)), chosen) for dtype in (q.dtype, torch.float64)]
    assert_within_rule("out", out.cpu(), *specified)


BATCH, HEADS, SQ, SK = 2, 2, 40, 70


@kernel_test
@parametrize_covering(each={"change": CHANGES, "dtype": DTYPES}, seen=SEEN, p=[0.0, 0.1])
def test_changed_scores_are_as_specified(change, seen, dtype, p):
    causal, window_size, has_mask, hidden_rows = seen
    sink, bias, softcap, slopes = make_change(change, BATCH, HEADS, SQ, SK)
    mask = make_mask(BATCH, SQ, SK).to(DEVICE) if has_mask else None
    given = {"sink": sink, "bias": bias}
    given = {name: t if t is None else t.to(DEVICE, dtype) for name, t in given.items()}
    chosen = settings(causal, p, window_size=window_size, softcap=softcap, hidden_rows=hidden_rows)
    slopes = slopes if slopes is None else slopes.to(DEVICE)
    check(*random_inputs(SQ, SK, BATCH, HEADS, 1, 32, dtype=dtype), chosen, mask, alibi_slopes=slopes, **given)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sinks_no_larger_than_a_masked_score_share_a_row_whose_keys_are_all_masked(dtype):
    inputs = random_inputs(20, 20, 1, 4, 2, 32, dtype=dtype)
    mask = torch.rand(1, 1, 20, 20) < 0.3
    mask[0, 0, 5:9] = True
    sink = torch.tensor([-10000.0, -10008.0, -9984.0, float("-inf")], device=DEVICE).to(dtype)
    check(*inputs, settings(False, 0.1), mask.to(DEVICE), sink=sink)


@kernel_test
@pytest.mark.parametrize("value", [float("-inf"), torch.finfo(torch.float32).min])
def test_a_bias_hides_keys_and_a_query_that_sees_none_gets_zeros(value):
    q, k, v, grad = random_inputs(20, 20, 1, 2, 2, 32, dtype=torch.float32)
    bias = torch.zeros(1, 1, 20, 20, device=DEVICE)
    bias[..., 12:], bias[:, :, 3] = value, value
    whole = run(attention_kernel, q, k, v, grad, None, settings(False, 0.0), bias=bias)
    assert all(t.isfinite().all() for t in whole) and not whole[4][..., 12:].any()
    assert not whole[0][3].any() and not whole[1][3].any() and not whole[2][12:].any() and not whole[3][12:].any()
    seen = [row for row in range(20) if row != 3]
    part = run(attention_kernel, q[seen], k[:12], v[:12], grad[seen], None, settings(False, 0.0))
    for found, expected, rows in zip(whole[:4], part, (seen, seen, slice(12), slice(12)), strict=True):
        torch.testing.assert_close(found[rows], expected, rtol=1e-5, atol=1e-6)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_bias_of_keys_alone_sums_over_samples_heads_and_queries(dtype):
    inputs = random_inputs(40, 40, 2, 2, 1, 32, dtype=dtype)
    bias = torch.randn(1, 1, 1, 40, device=DEVICE).to(dtype)
    check(*inputs, settings(False, 0.1), bias=bias)
    first, again = (run(attention_kernel, *inputs, None, settings(False), bias=bias) for _ in range(2))
    assert all(map(torch.equal, first, again))


def make_far_bias():
    return torch.empty(3 * 2**23 + 4, dtype=torch.bfloat16, device=DEVICE).as_strided((1, 1, 4, 4), (0, 0, 2**23, 1))


REFUSED = {
    "first column": (torch.float32, 16, None, "first_column is 12; expected a multiple of 8 on a GPU"),
    "float64": (torch.float64, 264, None, "head_dim 264; expected float32, float16 or bfloat16 with at most 256"),
    "head_dim": (torch.bfloat16, 264, None, "head_dim 264; expected float32, float16 or bfloat16 with at most 256"),
    "a bias of float64": (torch.float32, 16, lambda: torch.zeros(1, 1, 1, 4, dtype=torch.float64, device=DEVICE),
                          "bias is torch.float64; expected float32, float16 or bfloat16 on a GPU"),
    "a bias of far rows": (torch.float32, 16, make_far_bias, "bias has strides .* expected fewer than 8388608"),
}  # fmt: skip


@kernel_test
@pytest.mark.parametrize(("dtype", "head_dim", "make_bias", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_cannot_do_is_refused(dtype, head_dim, make_bias, message):
    q = torch.zeros(4, 1, 1, head_dim, dtype=dtype, device=DEVICE)
    inputs = Inputs(q, q, q, bias=None if make_bias is None else make_bias())
    if "first_column" in message:
        attention_kernel.forward(inputs, settings(p=0.0, first_column=12))
    with pytest.raises(ValueError, match=message):
        attention_kernel.forward(inputs, settings(first_column=12 if "first_column" in message else None))


# Documents of a packed row.
TOKENS, GROUPS, DIM = 100, 1, 32
BOUNDARIES = {
    "one": [0, 100],
    "several": [0, 3, 61, 64, 100],
    "padding around, empty ones": [5, 5, 6, 6, 71, 90],
    "none": [4],
    "many": [0, 1, 2, 3, 5, 8, 13, 100],
    "a block for the keys behind a group's beginning": [6, 69, 100],
}
WITHIN = {
    "causal": (True, None),
    "all": (False, None),
    "window": (True, (9, 0)),
    "both sides": (False, (7, 4)),
}


def as_int32(numbers):
    return None if numbers is None else torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def pack(q, k, v, boundaries, key_boundaries=None, samples=None, **more):
    packed = {"cu_seqlens": as_int32(boundaries), "cu_seqlens_k": as_int32(key_boundaries), "document_samples": samples}
    return Inputs(q, k, v, **packed, **more)


def check_documents(inputs, grad, chosen):
    """Three witnesses, of which two are cpu.py, in the same dtype and in float64."""
    names = ("out", "grad_q", "grad_k", "grad_v", "sink")[: 4 + (inputs.sink is not None)]
    found = run_inputs(attention_kernel, inputs, grad, chosen)
    assert_as_specified(found, [*inputs, grad], lambda *t: run_inputs(cpu, Inputs(*t[:-1]), t[-1], chosen), *names)


@kernel_test
@parametrize_covering(
    each={"boundaries": BOUNDARIES, "value_dim": [DIM, 16], "dtype": DTYPES}, seen=WITHIN, p=[0.0, 0.3],
    is_announced=[True, False],
)  # fmt: skip
def test_documents_are_as_specified(boundaries, value_dim, seen, dtype, p, is_announced):
    causal, window_size = seen
    sizes = (HEADS, DIM), (GROUPS, DIM), (GROUPS, value_dim), (HEADS, value_dim)
    q, k, v, grad = (torch.randn(TOKENS, 1, *size, device=DEVICE).to(dtype) for size in sizes)
    samples = torch.randint(0, 2**40, (len(boundaries) - 1,)).to(DEVICE) if is_announced else None
    chosen = settings(causal, p, window_size=window_size, first_sample=7)
    check_documents(pack(q, k, v, boundaries, samples=samples), grad, chosen)


@kernel_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_with_keys_of_their_own_and_changed_scores_are_as_specified(dtype):
    q, k, v, grad = (
        torch.randn(s, 1, n, DIM, device=DEVICE).to(dtype) for s, n in ((60, 4), (100, 2), (100, 2), (60, 4))
    )
    samples = torch.tensor([4, 1, 2**35], device=DEVICE)
    more = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0625, 0.3], device=DEVICE)}
    more["sink"] = torch.randn(4, device=DEVICE).to(dtype)
    inputs = pack(q, k, v, [0, 3, 30, 60], [2, 9, 9, 100], samples, **more)
    check_documents(inputs, grad, settings(False, 0.2, softcap=1.5))


@kernel_test
@pytest.mark.parametrize("is_announced", [True, False])
def test_a_document_reads_no_other_documents_keys(is_announced):
    q, k, v, grad = (torch.randn(90, 1, 2, DIM, device=DEVICE) for _ in range(4))
    for t in (q, k, v, grad):
        t[:21], t[60:] = float("nan"), float("nan")
    samples = torch.tensor([1, 2, 3], device=DEVICE) if is_announced else None
    inputs = pack(q, k, v, [0, 21, 60, 90], samples=samples)
    for found in run_inputs(attention_kernel, inputs, grad, settings(True, 0.2)):
        assert found[21:60].isfinite().all() and found[21:60].any()


@pytest.mark.gpu
def test_a_packed_row_on_a_gpu_waits_for_nothing():
    leaves = [torch.randn(90, 1, 2, DIM, device="cuda", requires_grad=True) for _ in range(3)]
    sink = torch.randn(2, device="cuda", requires_grad=True)
    cu_seqlens, samples = as_int32([0, 21, 60, 90]), torch.tensor([5, 1, 2], device="cuda")
    chosen = {"causal": True, "softmax_scale": 0.2, "dropout_p": 0.1, "dropout_key": 3}
    packed = {"cu_seqlens": cu_seqlens, "document_samples": samples}
    attention(*leaves, **chosen, **packed, sink=sink).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*leaves, **chosen, **packed, sink=sink).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@kernel_test
def test_boundaries_outside_of_the_row_count_as_nearest():
    q, k, v, grad = (torch.randn(40, 1, 2, DIM, device=DEVICE) for _ in range(4))
    found, expected = (
        run_inputs(attention_kernel, pack(q, k, v, ends), grad, settings()) for ends in ([-7, 20, 400], [0, 20, 40])
    )
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
