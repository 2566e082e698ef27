"""Makes fake tensors allocate as operations of torch, Megatron and Tempo would on a device that is not here.

On a CPU Tempo's operations run block by block, and what they hold inside themselves counts. On a GPU they are kernels
that make nothing inside, except for the loss head's chunks, what attention's backward sums up, and the blocks of its
softmax form, which is plain torch there. What attention holds inside itself has a name, its workspaces: that of stock
modules, too.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from tempo_kernels import attention
from tempo_kernels.linear_cross_entropy import CHUNK_BYTES, OPERATIONS, use_chunk_bytes
from tempo_kernels.opaque import Opaque, simulate
from tempo_kernels.philox import DRAWS
from tempo_megatron.memory.chips import H100, Chip
from tempo_megatron.memory.simulated.stand_in import Made, stand_in
from tempo_megatron.memory.tape.follower import Follower, count_span


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
        stock: as of a `memory.run.Run`.
        seen: counts the bytes; it is entered around this. Without it the CPU's operations only give their results.
        chip: of the GPU, where there is one.
        is_deterministic: whether torch is to use deterministic algorithms.
        stock_attention: of `memory.simulated.transformer_engine.choose_attention`: whose workspaces modules have that
            stand for stock attention.
    """
    if stock == "cpu":
        with contextlib.nullcontext() if seen is None else simulate(functools.partial(_run_on_cpu, seen)):
            yield
        return
    with (
        simulate(_Gpu(seen, chip, is_deterministic, stock_attention).run),
        use_chunk_bytes(CHUNK_BYTES["cuda"]),
        _GpuFunctions(),
    ):
        yield


def _run_on_cpu(seen: Follower, function: Any, *inputs: Any, **numbers: Any) -> Any:
    """What the function returns; all that it holds inside counts for a moment."""
    start = seen.alive_bytes
    call = function.call if isinstance(function, Opaque) else function
    found, rise = seen.measure(lambda: call(*inputs, **numbers))
    if function in attention.OPERATIONS:
        kept = None if function is attention.OPERATIONS[0] else inputs[2] if inputs[3] is None else inputs[3]
        seen.note_workspaces(start + rise - seen.alive_bytes, start + rise, kept)
    return found


class _Gpu:
    """What operations make on a GPU."""

    def __init__(self, seen: Follower | None, chip: Chip, is_deterministic: bool, stock_attention: str) -> None:
        self._seen, self._chip = seen, chip
        self._is_deterministic, self._stock_attention = is_deterministic, stock_attention
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
        # Of the operands one says whether it is the softmax form.
        is_softmax = function in attention.OPERATIONS and inputs[-1 if function is attention.OPERATIONS[0] else -2]
        if is_softmax and self._seen is not None:
            with attention.use_gpu_blocks():
                return _run_on_cpu(self._seen, function, *inputs)
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

    return stand_in(make, x, weight, bias)


def _drop_on_gpu(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    assert not inplace
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def put_softmax_kernels(model: torch.nn.Module) -> None:
    """Let unfused attention compute its softmax as Megatron's kernel does, which needs a GPU and an extension.

    Of 16-bit scores it makes one tensor of their dtype, in whose place backward puts its gradient. Scores that it does
    not take (megatron.core.fusions.fused_softmax: is_kernel_available) go to the unfused module.
    """
    for module in model.modules():
        if isinstance(module, FusedScaleMaskSoftmax) and getattr(module, "window_size", None) is None:
            module.forward = functools.partial(_compute_softmax, module.forward)


def _compute_softmax(unfused: Callable[..., Tensor], scores: Tensor, mask: Tensor | None, *others: Any) -> Tensor:
    b, heads, num_queries, num_keys = scores.shape
    if not (16 < num_keys <= 4096 and num_queries % 4 == num_keys % 4 == b * heads % 4 == 0):
        return unfused(scores, mask, *others)

    def make(x: Tensor) -> Made:
        output = torch.empty_like(x)
        return output, (output,)

    return stand_in(make, scores, differentiate=lambda _, grad: [grad])


def put_fused_cross_entropy(model: Any) -> None:
    """Let the model compute its loss as with --cross-entropy-loss-fusion and the implementation "native", which
    torch.compile makes of Python and which no fake tensor runs."""
    model.compute_language_model_loss = _compute_loss


def _compute_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """[b, s] of labels [b, s] and logits [s, b, v/t].

    Keeps what the eager one does: the softmax in float32, in the place of the logits' copy, and two index tensors. Its
    backward has one more tensor of that size: it subtracts 1 at the labels in place (fusions/fused_cross_entropy.py:
    calculate_gradients of megatron-core 0.16.1), which compiled code does in a copy.
    """
    labels, dtype = labels.transpose(0, 1).contiguous(), logits.dtype

    def make(logits: Tensor) -> Made:
        softmax = logits.float() if logits.dtype != torch.float32 else logits.clone()
        kept = softmax, torch.empty_like(labels, dtype=torch.bool), labels.flatten().clone()
        return torch.empty_like(labels, dtype=torch.float32), kept

    loss: Tensor = stand_in(make, logits, differentiate=lambda kept, _: [kept[0].clone().to(dtype)])
    return loss.transpose(0, 1).contiguous()


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
