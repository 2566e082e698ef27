"""Makes fake tensors allocate as torch's and Tempo's operations would on a device that is not here.

On a CPU Tempo's operations run block by block, and what they make inside themselves counts. A loop over blocks is cut
short: its first round, the second, which those after it are like, and its last. On a GPU Tempo's operations are kernels
that make nothing inside, but for the loss head's chunks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from tempo_kernels.gelu import gelu
from tempo_kernels.opaque import Opaque
from tempo_megatron.memory.simulated.replay import Replay
from tempo_megatron.memory.storages import PeakBytes

philox = pkgutil.resolve_name("tempo_kernels.philox.eager")
draw_bits = philox._keep_bits
# The loss head's own files: only here does it matter how it computes.
head_checks, head_chunks, head_on_cpu, head_shards = (
    pkgutil.resolve_name(f"tempo_kernels.linear_cross_entropy.{name}") for name in ("checks", "chunks", "cpu", "shards")
)
attention_on_cpu = pkgutil.resolve_name("tempo_kernels.attention.cpu")
norm_on_cpu = pkgutil.resolve_name("tempo_kernels.norm.cpu")
OperationOfInput = pkgutil.resolve_name("tempo_kernels.pointwise.function:OperationOfInput")
refill_norm, refill_operation = norm_on_cpu.refill, OperationOfInput.refill
_Round = TypeVar("_Round")
# Of a loop: the first round, one after another that is like it, and the last.
_NUM_ROUNDS = 3


def make_gelu_tables() -> None:
    """Let the in-place GELU of 16 bits make the tables that it makes once in a process, and that outlive a step."""
    for dtype, approximate in itertools.product((torch.bfloat16, torch.float16), ("none", "tanh")):
        gelu(torch.zeros(1, dtype=dtype, requires_grad=True), approximate=approximate).sum().backward()


@contextlib.contextmanager
def on_device(stock: str) -> Iterator[None]:
    """Make the CPU's modules allocate memory as `stock`'s modules would."""
    if stock == "cpu":
        with (
            mock.patch.object(head_shards.Shards, "gather", _gather_some_chunks),
            mock.patch.object(head_on_cpu, "_cut_into_blocks", _cut_into_some_blocks),
            mock.patch.object(attention_on_cpu, "_cut", _make_cut_of_some_samples()),
        ):
            yield
        return
    with (
        mock.patch.object(Opaque, "__call__", _call_on_gpu),
        mock.patch.object(head_shards.Shards, "gather", _gather_some_chunks),
        mock.patch.dict(head_checks.CHUNK_BYTES, cpu=head_checks.CHUNK_BYTES["cuda"]),
        mock.patch.object(head_chunks, "CPU_BLOCK_COLUMNS", sys.maxsize),
        mock.patch.multiple(head_on_cpu, find_statistics=_find_statistics_on_gpu, write_gradient_=lambda *_: None),
        mock.patch.object(torch.nn.functional, "dropout", _drop_on_gpu),
        # On a GPU the output buffer already exists, so refilling allocates nothing.
        mock.patch.object(norm_on_cpu, "refill", lambda *_: None),
        mock.patch.object(OperationOfInput, "refill", lambda *_: None),
    ):
        yield


_call_operator = Opaque.__call__


def _call_on_gpu(operation: Opaque, first: Tensor, *others: Any) -> Sequence[Tensor]:
    """Only the loss head is more than one kernel."""
    return (operation.call if "linear_cross_entropy" in operation.name else _call_operator.__get__(operation))(
        first, *others
    )


def put_softmax_kernels(model: torch.nn.Module) -> None:
    """Let unfused attention compute its softmax as Megatron's kernel does, which needs a GPU and an extension."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, FusedScaleMaskSoftmax) and getattr(child, "window_size", None) is None:
                setattr(module, name, _SoftmaxKernel(child))


class _SoftmaxKernel(torch.nn.Module):
    """What the kernel makes of 16-bit scores: one tensor of their dtype, in whose place backward puts its gradient.

    Scores that it does not take (megatron.core.fusions.fused_softmax: is_kernel_available) go to the unfused module.
    """

    def __init__(self, unfused: torch.nn.Module) -> None:
        super().__init__()
        self._unfused = unfused

    def forward(self, scores: Tensor, mask: Tensor | None, *others: Any) -> Tensor:
        b, heads, num_queries, num_keys = scores.shape
        if 16 < num_keys <= 4096 and num_queries % 4 == num_keys % 4 == b * heads % 4 == 0:
            found: Tensor = _KeepOutput.apply(scores)
        else:
            found = self._unfused(scores, mask, *others)
        return found


class _KeepOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        output = torch.empty_like(scores)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


class LastingBuffer(GlobalMemoryBuffer):  # type: ignore[misc]
    """Megatron's global memory buffer, which `seen` does not count.

    A process has one (for tokens that sequence parallelism gathers, and unfused attention's scores). It grows in the
    first micro batch and stays: no micro batch has one of its own.
    """

    def __init__(self, seen: PeakBytes) -> None:
        super().__init__()
        self._seen = seen

    def get_tensor(self, *args: Any, **keywords: Any) -> Tensor:
        return self._seen.make_known(lambda: GlobalMemoryBuffer.get_tensor(self, *args, **keywords))

    def count_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.buffer.values())


@contextlib.contextmanager
def replay_repeated_operations(seen: PeakBytes, stock: str) -> Iterator[None]:
    """With stock="cpu", run each of Tempo's operations once per set of sizes and replay the other calls."""
    if stock != "cpu":
        yield
        return
    replay = Replay(seen)

    def call(operation: Opaque, *inputs: Any) -> Sequence[Tensor]:
        return replay.call_operation(operation, *inputs)

    def draw(*inputs: Any) -> Any:
        return replay.call(("keep_bits", *inputs[:4]), lambda: draw_bits(*inputs))

    def refill(function: Callable[..., None], *inputs: Any) -> None:
        replay.call((function, *inputs), lambda: (function(*inputs), ())[1])  # type: ignore[func-returns-value]

    with (
        mock.patch.object(Opaque, "__call__", call),
        mock.patch.object(philox, "_keep_bits", draw),
        mock.patch.object(norm_on_cpu, "refill", functools.partial(refill, refill_norm)),
        mock.patch.object(OperationOfInput, "refill", functools.partialmethod(_call_first, refill, refill_operation)),
    ):
        yield


def _call_first(room: Any, refill: Callable[..., None], function: Callable[..., None], *inputs: Any) -> None:
    refill(function, room, *inputs)


def _find_statistics_on_gpu(logits: Tensor, _: Tensor, shares: Any) -> Tensor:
    """The result of the loss head's kernel; that of its gradient has none."""
    return logits.new_empty(shares.num_statistics, logits.size(0), dtype=torch.float32)


_gather_chunks = head_shards.Shards.gather


def _gather_some_chunks(shards: Any, hidden: Tensor, chunk_rows: int) -> Iterator[tuple[slice, Tensor]]:
    """The first two chunks and the last one; those between make and free what the second one does."""
    num_rows = hidden.size(0)
    skipped = (-(-num_rows // chunk_rows) - _NUM_ROUNDS) * chunk_rows
    if skipped <= 0:
        yield from _gather_chunks(shards, hidden, chunk_rows)
        return
    for rows, tokens in _gather_chunks(shards, hidden[: num_rows - skipped], chunk_rows):
        shift = skipped if rows.start == (_NUM_ROUNDS - 1) * chunk_rows else 0
        yield slice(rows.start + shift, rows.stop + shift), tokens


_cut_into_blocks, _cut_attention = head_on_cpu._cut_into_blocks, attention_on_cpu._cut


def _cut_into_some_blocks(logits: Tensor, compute_dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """As of the chunks; the memory of all blocks is one."""
    yield from _choose_rounds(list(_cut_into_blocks(logits, compute_dtype)))


def _make_cut_of_some_samples() -> Callable[[int, int], Iterator[slice]]:
    """As of the chunks, of attention's samples. Of each, all blocks of queries are run: they see different keys."""
    is_inside = False

    def cut(size: int, step: int) -> Iterator[slice]:
        nonlocal is_inside
        if is_inside:
            yield from _cut_attention(size, step)
            return
        is_inside = True
        try:
            yield from _choose_rounds(list(_cut_attention(size, step)))
        finally:
            is_inside = False

    return cut


def _choose_rounds(rounds: list[_Round]) -> list[_Round]:
    return rounds if len(rounds) <= _NUM_ROUNDS else [*rounds[: _NUM_ROUNDS - 1], rounds[-1]]


def _drop_on_gpu(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch's dropout with the mask that a GPU keeps, a byte per element."""
    assert not inplace
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x
