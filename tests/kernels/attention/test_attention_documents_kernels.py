"""Attention within the documents of a packed row in the kernels, against cpu.py; see interpreted.py."""

from __future__ import annotations

import pytest
import torch
from attention_kernel_cases import run_inputs, settings
from covering import parametrize_covering
from interpreted import DEVICE, DTYPES, assert_as_specified, kernel_test

from tempo_kernels.attention import attention, cpu
from tempo_kernels.attention import kernel as attention_kernel
from tempo_kernels.attention.settings import Inputs

TOKENS, HEADS, GROUPS, DIM = 100, 2, 1, 32
BOUNDARIES = {
    "one": [0, 100],
    "several": [0, 3, 61, 64, 100],
    "padding around, empty ones": [5, 5, 6, 6, 71, 90],
    "none": [4],
    "many": [0, 1, 2, 3, 5, 8, 13, 100],
    "a block for the keys behind a group's beginning": [6, 69, 100],
}
SEEN = {"causal": (True, None), "all": (False, None), "window": (True, (9, 0)), "both sides": (False, (7, 4))}


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
    each={"boundaries": BOUNDARIES, "value_dim": [DIM, 16], "dtype": DTYPES}, seen=SEEN, p=[0.0, 0.3],
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
