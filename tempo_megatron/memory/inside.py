"""What Tempo's operations take inside themselves on a CPU and give back: memory that fake tensors do not show.

Each figure is read off the operation's code: tempo_kernels/linear_cross_entropy (chunks.py, cpu.py) and
tempo_kernels/attention (cpu.py). The other operations work in blocks of some hundred kilobytes, which do not count.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_FLOAT32 = 4
_HEAD_BLOCK = 1 << 18
_HEAD_PRODUCT_BYTES = 1 << 25
_ATTENTION_BLOCK, _ATTENTION_ROWS = 1 << 17, 64


def count_inside(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that an operation has alive at most beside its inputs and its results; 0 for those of torch."""
    namespace, _, name = func._schema.name.partition("::")
    return _COUNTERS[name](args) if namespace == "tempo_kernels" and name in _COUNTERS else 0


def _count_head(args: tuple[Any, ...]) -> int:
    """A chunk of logits, and memory for a block of them in float32, in find_losses."""
    return _count_logits(args[0], args[1], args[-1])


def _count_head_backward(args: tuple[Any, ...]) -> int:
    return _count_logits_and_product(args[3], args[4], args[-1])


def _count_weighted_head(args: tuple[Any, ...]) -> int:
    return _count_logits_and_product(args[1], args[2], args[-1])


def _count_logits(hidden: Tensor, weight: Tensor, chunk_rows: int) -> int:
    rows, columns = min(hidden.size(0) * hidden.size(1), chunk_rows), weight.size(0)
    block = min(rows, max(1, _HEAD_BLOCK // columns)) * columns * _FLOAT32
    return rows * columns * weight.element_size() + block


def _count_logits_and_product(hidden: Tensor, weight: Tensor, chunk_rows: int) -> int:
    """In 16 bits the product of a chunk is there beside the sum; the memory for a block is gone by then."""
    rows, (columns, width) = min(hidden.size(0) * hidden.size(1), chunk_rows), weight.shape
    logits = rows * columns * weight.element_size()
    step = max(1, _HEAD_PRODUCT_BYTES // (width * weight.element_size()))
    product = min(columns, step) * width * weight.element_size() if weight.element_size() < _FLOAT32 else 0
    return max(_count_logits(hidden, weight, chunk_rows), logits + product)


def _count_attention(args: tuple[Any, ...]) -> int:
    """Of one sample q, k and v in another order, and a block of scores: in float32, and what the product reads."""
    q, k = args[:2]
    copies = sum(t.numel() // t.size(1) * t.element_size() for t in args[:3])
    return copies + _count_scores(q, k) * (_FLOAT32 + q.element_size())


def _count_attention_backward(args: tuple[Any, ...]) -> int:
    """Of one sample q, k, v and grad_out in another order, grad_q, and per query head grad_k and grad_v in float32;
    of a block probabilities, those that survived, their gradients, and what the products read."""
    q, k = args[3:5]
    copies = sum(t.numel() // t.size(1) * t.element_size() for t in (*args[3:6], args[0], q))
    sums = 2 * k.size(0) * q.size(2) * k.size(3) * _FLOAT32
    return copies + sums + _count_scores(q, k) * (3 * _FLOAT32 + q.element_size())


def _count_scores(q: Tensor, k: Tensor) -> int:
    row = q.size(2) * k.size(0)
    rows = max(_ATTENTION_ROWS, _ATTENTION_BLOCK // max(1, row) // 16 * 16)
    return min(rows, q.size(0)) * row


_COUNTERS = {
    "linear_cross_entropy": _count_head,
    "linear_cross_entropy_backward": _count_head_backward,
    "weighted_linear_cross_entropy": _count_weighted_head,
    "attention": _count_attention,
    "attention_backward": _count_attention_backward,
}
