"""Makes fake tensors allocate as torch's and Tempo's operations would on a device that is not here.

On a CPU Tempo's operations run block by block, and what they make inside themselves counts. On fake tensors each block
costs as much time as a whole tensor would, and equal layers call the same operations: what a call makes, and how much
it has alive inside itself, depends on the sizes of its tensors and on its numbers only. Its first call is run and
recorded, those after it are replayed. On a GPU Tempo's operations are kernels that make nothing inside, except for the
loss head's chunks, what attention's backward sums up, and the blocks of its softmax form, which is plain torch there.
What attention holds inside itself has a name, its workspaces: that of stock modules, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tempo_kernels import attention
from tempo_kernels.linear_cross_entropy import CHUNK_BYTES, OPERATIONS, use_chunk_bytes
from tempo_kernels.opaque import Opaque, simulate
from tempo_kernels.philox import DRAWS
from tempo_megatron.memory.chips import H100, Chip
from tempo_megatron.memory.simulated.stand_in import Made, stand_in
from tempo_megatron.memory.tape.follower import Follower, count_span

PLACES = ("key_low", "key_high", "sample", "first_head", "first_row")
"""Arguments of operations that say which random bits are drawn, not how many."""


@contextlib.contextmanager
def on_device(
    stock: str,
    seen: Follower | None = None,
    chip: Chip = H100,
    *,
    is_deterministic: bool = False,
    stock_attention: str = "unfused",
) -> Iterator[None]:
    """Make the CPU's modules allocate memory as `stock`'s modules would.

    Args:
        stock: one of `tempo_megatron.memory.simulated.chunk.STACKS_OF_MODULES`.
        seen: counts the bytes; it is entered around this. Without it the CPU's operations only give their results.
        chip: of the GPU, where there is one.
        is_deterministic: whether torch is to use deterministic algorithms.
        stock_attention: of `memory.simulated.transformer_engine.choose_attention`: whose workspaces modules have that
            stand for stock attention.
    """
    if stock == "cpu":
        with contextlib.nullcontext() if seen is None else simulate(_Replay(seen).run):
            yield
        return
    with (
        simulate(_Gpu(seen, chip, is_deterministic, stock_attention).run),
        use_chunk_bytes(CHUNK_BYTES["cuda"]),
        _GpuFunctions(),
    ):
        yield


class _Gpu:
    """What operations make on a GPU."""

    def __init__(self, seen: Follower | None, chip: Chip, is_deterministic: bool, stock_attention: str) -> None:
        self._seen, self._chip = seen, chip
        self._is_deterministic, self._stock_attention = is_deterministic, stock_attention
        self._replay = None if seen is None else _Replay(seen)
        self._of_stock: set[StorageWeakRef] = set()

    def run(self, function: Any, *inputs: Any, **numbers: Any) -> Any:
        """A kernel makes its results only, and attention's backward what it sums up; one that refills a tensor makes
        nothing. What draws masks for plain torch is not compiled yet when it takes most."""
        if function in OPERATIONS:
            return function.call(*inputs, backend=_HeadKernels)
        if function in DRAWS:
            return DRAWS[1](*inputs, **numbers)
        if function is differentiate_stock_attention:
            grads = function(*inputs)
            self._hold(self._list_of_stock(inputs[0], inputs[1]), inputs[3])
            return grads
        if not isinstance(function, Opaque):
            return None
        if function in attention.OPERATIONS and _is_softmax(function, inputs) and self._replay is not None:
            with attention.use_gpu_blocks():
                return self._replay.run(function, *inputs)
        results = function.trace(*inputs)
        if function is attention.OPERATIONS[0] and _entered:
            self._of_stock.add(StorageWeakRef(results[1].untyped_storage()))
        if function is attention.OPERATIONS[1] and inputs[2] is not None:
            of_gpu = self._chip.major, self._chip.multiprocessors, self._is_deterministic
            is_of_stock = StorageWeakRef(inputs[2].untyped_storage()) in self._of_stock
            sizes = self._list_of_stock(*inputs[4:6]) if is_of_stock else attention.list_gpu_workspaces(inputs, *of_gpu)
            self._hold(sizes, inputs[2])
        return results

    def _list_of_stock(self, q: Tensor, k: Tensor) -> list[int]:
        """The bytes of each tensor that the backward of stock attention holds beside its results.

        cuDNN's has one for the sums that its frontend asks for: of a row's output times its gradient, and of q's
        gradient, unless it is deterministic (include/cudnn_frontend/node/scaled_dot_product_flash_attention.h of
        1.23, CompositeSDPABackwardNode: softmax_sum and dQ_accum). What its engines take themselves is not known.
        """
        if self._stock_attention == "flash":
            splits = self._chip.multiprocessors if self._is_deterministic else 1
            return attention.list_flash_workspaces(q.shape, k.shape, q.dtype, splits)
        rows = math.prod(q.shape[:-1])
        return [4 * rows * (1 if self._is_deterministic else 1 + q.size(-1))]

    def _hold(self, sizes: Iterable[int], kept: Tensor) -> None:
        """Make and free workspaces of so many bytes; `kept` is what the call's forward kept."""
        held = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        if self._seen is not None:
            self._seen.note_workspaces(sum(map(count_span, held)), self._seen.alive_bytes, kept)


def _is_softmax(function: Any, inputs: Sequence[Any]) -> bool:
    """Of the operands of one of attention's operations."""
    return bool(inputs[-1 if function is attention.OPERATIONS[0] else -2])


def differentiate_stock_attention(q: Tensor, k: Tensor, v: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v that stock attention's backward makes, to be called by `run_or_simulate`.

    statistics: what its forward kept of each row.
    """
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_entered: list[torch.nn.Module] = []


def mark_as_stock(module: torch.nn.Module) -> None:
    """Say that a module stands for stock attention, whose backward holds other things than Tempo's."""
    module.register_forward_pre_hook(lambda *_: _entered.append(module))
    module.register_forward_hook(lambda *_: _leave(), always_call=True)


def _leave() -> None:
    _entered.pop()


class _HeadKernels:
    """What the loss head's kernels make of a chunk's logits."""

    @staticmethod
    def compute_statistics(logits: Tensor, columns: Tensor, shares: Any) -> Tensor:
        return logits.new_empty(shares.num_statistics, logits.size(0), dtype=torch.float32)

    @staticmethod
    def write_gradient_(logits: Tensor, rows: Any, shares: Any) -> None:
        """It writes over the logits."""


class _GpuFunctions(TorchFunctionMode):
    """torch's dropout with the mask that a GPU keeps, a byte per element, and its LayerNorm with statistics in float32,
    which a CPU keeps in the dtype of its input."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.dropout:
            return _drop_on_gpu(*args, **kwargs)
        if func is torch.nn.functional.layer_norm:
            return _normalize_on_gpu(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _normalize_on_gpu(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    def make(*inputs: Tensor) -> Made:
        statistics = [x.new_empty(*x.shape[:-1], 1, dtype=torch.float32) for _ in range(2)]
        return torch.empty_like(x), (*inputs, *statistics)

    found: Tensor = stand_in(make, x, weight, bias)
    return found


def _drop_on_gpu(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    assert not inplace
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


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
            found: Tensor = stand_in(_keep_output, scores, differentiate=lambda _, grad: [grad])
        else:
            found = self._unfused(scores, mask, *others)
        return found


def _keep_output(x: Tensor) -> Made:
    output = torch.empty_like(x)
    return output, (output,)


class LastingBuffer(GlobalMemoryBuffer):  # type: ignore[misc]
    """Megatron's global memory buffer, which `seen` does not count.

    A process has one (for tokens that sequence parallelism gathers, and unfused attention's scores). It grows in the
    first micro batch and stays: no micro batch has one of its own.

    Args:
        seen: counts all other memory.
        is_used: says whether what runs now uses the buffer; Transformer Engine's modules take memory anew instead.
    """

    def __init__(self, seen: Follower, is_used: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._seen, self._is_used = seen, is_used

    def get_tensor(self, tensor_shape: Any, dtype: torch.dtype, *args: Any, **keywords: Any) -> Tensor:
        if not self._is_used():
            if isinstance(tensor_shape, tuple):
                # Of scores (core/transformer/dot_product_attention.py; sizes of gathered tokens are lists). Transformer
                # Engine calls the product by this tensor's name, so that it is free when the softmax is made
                # (backends.py: UnfusedDotProductAttention).
                return torch.empty((), dtype=dtype).expand(tensor_shape)
            return torch.empty(tensor_shape, dtype=dtype)
        return self.lend(tensor_shape, dtype, *args, **keywords)

    def lend(self, tensor_shape: Any, dtype: torch.dtype, *args: Any, **keywords: Any) -> Tensor:
        """A tensor in the buffer, whoever's module asks."""
        args = (tensor_shape, dtype, *args)
        return self._seen.make_known(lambda: GlobalMemoryBuffer.get_tensor(self, *args, **keywords))

    def count_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.buffer.values())


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call did: its new tensors, and the bytes alive inside at most beyond those that were there, or that it
    left."""

    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    structure: Any
    rise: int
    held: int


class _Replay:
    """Runs functions under a Follower, and replays the calls that it has recorded."""

    def __init__(self, seen: Follower) -> None:
        self._seen = seen
        self._calls: dict[Hashable, _Call | None] = {}

    def run(self, function: Any, *inputs: Any, **numbers: Any) -> Any:
        """What the function returns; no size depends on `numbers`, nor on an operation's PLACES."""
        if not isinstance(function, Opaque):
            return self._call((function, *inputs), lambda: function(*inputs, **numbers))[0]
        arguments = getattr(torch.ops.tempo_kernels, function.name).default._schema.arguments
        key = (None if each.name in PLACES else value for each, value in zip(arguments, inputs, strict=True))
        found, level, held = self._call((function, *key), lambda: function.call(*inputs))
        if function in attention.OPERATIONS:
            kept = None if function is attention.OPERATIONS[0] else inputs[2] if inputs[3] is None else inputs[3]
            self._seen.note_workspaces(held, level, kept)
        return found

    def _call(self, key: Iterable[Any], function: Callable[[], Any]) -> tuple[Any, int, int]:
        """What function returns, the most bytes alive inside, and how many of them it did not leave.

        A function that returns anything but new tensors, or leaves anything else behind, is run each time.

        Args:
            key: names it and has everything on which sizes in it depend.
            function: without arguments.
        """
        key = tuple(describe_sizes(value) for value in key)
        call, start = self._calls.get(key), self._seen.alive_bytes
        if call is None:
            known = key in self._calls
            found, rise = self._seen.measure(function)
            growth = self._seen.alive_bytes - start
            if not known:
                self._calls[key] = self._note(found, rise, growth)
            return found, start + rise, rise - growth
        self._seen.note_rise(call.rise)
        results = [torch.empty_strided(size, stride, dtype=dtype) for size, stride, dtype in call.results]
        return tree_unflatten(results, call.structure), start + call.rise, call.held

    @staticmethod
    def _note(found: Any, rise: int, growth: int) -> _Call | None:
        tensors, structure = tree_flatten(() if found is None else found)
        if not all(isinstance(t, Tensor) and not t.requires_grad for t in tensors):
            return None
        results = [(t.shape, t.stride(), t.dtype) for t in tensors]
        # Storages of their own, each no larger than its tensor.
        if growth != sum(t.untyped_storage().nbytes() for t in tensors) or growth != sum(map(count_span, tensors)):
            return None
        return _Call(results, structure, rise, rise - growth)


def describe_sizes(value: Any) -> Hashable:
    """What sizes depend on: of a tensor, of those in a list, or a number itself."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset() == 0
    return tuple(map(describe_sizes, value)) if isinstance(value, (list, tuple)) else value
