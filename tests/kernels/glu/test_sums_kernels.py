"""The sums over rows that the last program of a strip adds up: see interpreted.py for where the kernels run."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from interpreted import DEVICE, kernel_test

from tempo_kernels import kernel_sums
from tempo_kernels.kernel_sums import add_up, find_counters, is_last, store_sums


@triton.jit
def _sums_kernel(order_ptr, x_ptr, partial_ptr, counters_ptr, out_ptr, num_chunks, num_columns, COLUMNS: tl.constexpr):
    """The program that starts as number i has row order[i] of x."""
    strip = tl.program_id(1)
    chunk = tl.load(order_ptr + tl.program_id(0))
    column = strip * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.load(x_ptr + chunk * num_columns + column, mask=column < num_columns, other=0.0)
    store_sums(partial_ptr, sums, chunk, column, num_columns)
    if is_last(counters_ptr + strip, num_chunks):
        add_up(partial_ptr, out_ptr, column, num_chunks, num_columns, num_columns)


def add_rows(x, order, dtype=torch.float32):
    num_chunks, num_columns = x.shape
    partial, out = torch.full_like(x, torch.nan), torch.full((num_columns,), torch.nan, dtype=dtype, device=DEVICE)
    counters = find_counters(x.device, triton.cdiv(num_columns, 64))
    grid = (num_chunks, triton.cdiv(num_columns, 64))
    _sums_kernel[grid](order, x, partial, counters, out, num_chunks, num_columns, COLUMNS=64)
    assert not counters.any()
    return out


@kernel_test
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (16, 128), (50, 130)], ids=str)
def test_the_order_in_which_programs_arrive_changes_no_bit(shape):
    x = torch.randn(shape, device=DEVICE) * torch.logspace(-3, 3, shape[0], device=DEVICE)[:, None]
    orders = [
        torch.arange(shape[0]),
        torch.arange(shape[0]).flip(0),
        torch.randperm(shape[0]),
        torch.randperm(shape[0]),
    ]
    found = [add_rows(x, order.to(DEVICE)) for order in orders]
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0].double(), x.double().sum(0), rtol=0, atol=1e-6 * x.abs().sum(0).max().item())
    rounded = add_rows(x, orders[0].to(DEVICE), torch.bfloat16)
    assert torch.equal(rounded, found[0].bfloat16())


@kernel_test
def test_counters_are_made_once_and_where_they_are_too_few_for_one_launch(monkeypatch):
    monkeypatch.setattr(kernel_sums, "_counters", {})
    device = torch.device(DEVICE)
    first = find_counters(device, 8)
    assert find_counters(device, 64) is first and first.dtype == torch.int32 and not first.any()
    many = find_counters(device, kernel_sums.NUM_COUNTERS + 1)
    assert many.numel() == kernel_sums.NUM_COUNTERS + 1 and find_counters(device, 8) is first


@pytest.mark.gpu
def test_streams_that_run_at_once_and_a_graph_count_for_themselves():
    x = torch.randn(50, 130, device="cuda")
    order = torch.arange(50, device="cuda")
    expected, streams = add_rows(x, order), [torch.cuda.Stream() for _ in range(4)]
    found = []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(add_rows(x, order))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    partial, out = torch.empty_like(x), torch.empty(130, device="cuda")
    with torch.cuda.graph(graph):
        counters = find_counters(x.device, 3)
        _sums_kernel[(50, 3)](order, x, partial, counters, out, 50, 130, COLUMNS=64)
    assert all(counters is not kept for kept in kernel_sums._counters.values())
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        found.append(out.clone())
    assert all(torch.equal(one, expected) for one in found)
