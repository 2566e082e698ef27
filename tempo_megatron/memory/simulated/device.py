"""Makes fake tensors allocate as operations of torch, Megatron and Tempo would on a device that is not here.

On a CPU Tempo's operations run block by block, and what they hold inside themselves counts. On a GPU they are kernels
that make nothing inside, except for the loss head's chunks, what attention's backward sums up, and the blocks of its
softmax form, which is plain torch there. What attention holds inside itself has a name, its workspaces: that of stock
modules, too.

Megatron's local modules keep what Transformer Engine's keep, where the two differ. References without another package
are to Transformer Engine 2.20, from transformer_engine/.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from tempo_kernels import attention
from tempo_kernels.linear_cross_entropy import CHUNK_BYTES, OPERATIONS, use_chunk_bytes
from tempo_kernels.norm import rms_norm
from tempo_kernels.opaque import Opaque, simulate
from tempo_kernels.philox import DRAWS
from tempo_megatron.memory.plan.gpu import H100
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.stand_in import DroppedOutput, Made, stand_in
from tempo_megatron.memory.tape.follower import Follower, count_span
from tempo_megatron.slots.attention import TempoNormedSelfAttention, TempoRotarySelfAttention
from tempo_megatron.slots.norm import TorchNorm

_in_stock: list[torch.nn.Module] = []
"""The module that runs and stands for stock attention, whose backward holds other things than Tempo's."""


def choose_attention(run: Run) -> str:
    """ "fused", "flash" or "unfused": what DotProductAttention takes where both of the first two are installed; that of
    Megatron's own modules is unfused.

    FlashAttention goes first before Hopper, cuDNN's from Hopper on (pytorch/attention/dot_product_attention/utils.py:
    1649); on Blackwell that has no deterministic backward with dropout (common/fused_attn/fused_attn.cpp:480-488).
    """
    if run.stock != "transformer_engine":
        return "unfused"
    if run.stock_attention != "fused" or run.gpu is None:
        return run.stock_attention
    is_refused = run.gpu == "gb200" and run.deterministic and run.model.attention_dropout > 0
    return "flash" if run.gpu == "a100" or is_refused else "fused"


@contextlib.contextmanager
def on_device(stock: str, seen: Follower | None = None, run: Run | None = None) -> Iterator[None]:
    """Make the CPU's modules allocate memory as `stock`'s modules would.

    Args:
        stock: as of a `memory.run.Run`.
        seen: counts the bytes; it is entered around this. Without it the CPU's operations only give their results.
        run: says which GPU it is, and what stock attention; None is an H100, and unfused attention.
    """
    if stock == "cpu":
        with contextlib.nullcontext() if seen is None else simulate(functools.partial(_run_on_cpu, seen)):
            yield
        return
    with simulate(_Gpu(seen, run).run), use_chunk_bytes(CHUNK_BYTES["cuda"]), _GpuFunctions():
        yield


def _run_on_cpu(seen: Follower, function: Any, *inputs: Any, **numbers: Any) -> Any:
    """What the function returns; all that it holds inside counts for a moment."""
    start = seen.alive_bytes
    call = function.call if isinstance(function, Opaque) else function
    found, rise = seen.measure(lambda: call(*inputs, **numbers))
    if function in attention.OPERATIONS:
        kept = None if function is attention.OPERATIONS[0] else inputs[2] if inputs[3] is None else inputs[3]
        seen.note_workspaces(start + rise - seen.alive_bytes, kept)
    return found


class _Gpu:
    """What operations make on a GPU."""

    def __init__(self, seen: Follower | None, run: Run | None) -> None:
        self._seen, self._chip = seen, run.chip if run else H100
        self._is_deterministic = run is not None and run.deterministic
        self._stock_attention = choose_attention(run) if run else "unfused"
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
        if function is attention.OPERATIONS[0] and _in_stock:
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
            self._seen.note_workspaces(sum(map(count_span, held)), kept)


def differentiate_stock_attention(q: Tensor, k: Tensor, v: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v that stock attention's backward makes, to be called by `run_or_simulate`.

    statistics: what its forward kept of each row.
    """
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


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


def put_kernels(model: torch.nn.Module, run: Run) -> None:
    """Let modules make and keep what a GPU's kernels do, where torch and Megatron compose other operations."""
    has_engine = run.stock == "transformer_engine"
    has_softmax = run.stock != "cpu" and run.masked_softmax_fusion and run.dtype.itemsize == 2
    for module in model.modules():
        if has_softmax and isinstance(module, FusedScaleMaskSoftmax) and getattr(module, "window_size", None) is None:
            module.forward = functools.partial(_compute_softmax, module.forward)
        if has_engine and type(module) is TorchNorm and module.bias is None:
            module.forward = functools.partial(_normalize, module)  # type: ignore[method-assign]
        # Causal has no mask.
        if has_engine and isinstance(module, DotProductAttention) and module.attn_mask_type is not AttnMaskType.causal:
            module.scale_mask_softmax.register_forward_hook(lambda _, __, output: _mask_padding(output))


def _compute_softmax(unfused: Callable[..., Tensor], scores: Tensor, mask: Tensor | None, *others: Any) -> Tensor:
    """Megatron's kernel, which needs a GPU and an extension, makes one tensor of 16-bit scores' dtype, in whose place
    backward puts its gradient. Scores that it does not take (megatron.core.fusions.fused_softmax: is_kernel_available)
    go to the unfused module."""
    b, heads, num_queries, num_keys = scores.shape
    if not (16 < num_keys <= 4096 and num_queries % 4 == num_keys % 4 == b * heads % 4 == 0):
        return unfused(scores, mask, *others)

    def make(x: Tensor) -> Made:
        output = torch.empty_like(x)
        return output, (output,)

    return stand_in(make, scores, differentiate=lambda _, grad: [grad])


def compute_fused_loss(labels: Tensor, logits: Tensor) -> Tensor:
    """[b, s] of labels [b, s] and logits [s, b, v/t], as with --cross-entropy-loss-fusion and the implementation
    "native", which torch.compile makes of Python and which no fake tensor runs.

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


def put_stock_attention(layer: torch.nn.Module, *, copies: bool) -> None:
    """Let a layer whose core attention is Tempo's, in the place of Transformer Engine's, keep for the rest what
    Megatron's attention keeps.

    copies: whether core attention hands out a copy of its output, which the projection then keeps beside the output.
    FlashAttention keeps its output as [b, s, ...], and the projection's input is that of [s, b, ...] in memory of its
    own (pytorch/attention/dot_product_attention/backends.py:1361-1369). With one sample both are one.
    """
    for name in ("self_attention", "cross_attention"):
        holder = getattr(layer, name, None)
        if type(holder) in (TempoRotarySelfAttention, TempoNormedSelfAttention):
            holder.__class__ = SelfAttention
        core = getattr(holder, "core_attention", None)
        if core is not None:
            core.register_forward_pre_hook(lambda module, _: _in_stock.append(module))
            core.register_forward_hook(lambda *_: _in_stock.clear(), always_call=True)
        if copies and core is not None:
            core.register_forward_hook(lambda _, __, output: _hand_out_copy(output))


def _hand_out_copy(output: Tensor) -> Tensor:
    return stand_in(lambda x: (x.clone(), (x,)), output, differentiate=lambda _, grad: [grad])


def _mask_padding(probabilities: Tensor) -> Tensor:
    """Unfused attention that masks padding keeps its mask, [b, 1, s, s] of a byte each, in every layer: each makes its
    own (pytorch/attention/dot_product_attention/utils.py: get_full_mask), with which it sets the probabilities of
    padding to 0 after the softmax (backends.py: UnfusedDotProductAttention)."""
    b, _, num_queries, num_keys = probabilities.shape
    mask = torch.empty((b, 1, num_queries, num_keys), dtype=torch.bool)
    return probabilities.masked_fill(mask, 0)


def _normalize(norm: TorchNorm, x: Tensor) -> Tensor:
    """Keeps its input and one float32 a token, as a kernel does (common/normalization/rmsnorm, and pytorch/module/
    layernorm_linear.py:526-536)."""
    return rms_norm(x, norm.weight, norm.eps, zero_centered=norm.zero_centered_gamma, keep="recompute")


def recompute_norms(model: torch.nn.Module, *, has_latent_attention: bool) -> None:
    """Let Megatron recompute the norms that are modules of their own: those before latent attention and before experts.

    Where a linear follows, norm and linear are one module (core/models/gpt/gpt_layer_specs.py:
    get_gpt_layer_with_transformer_engine_spec of megatron-core 0.16.1), which keeps the norm's output all the same.
    """
    for layer in model.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        if has_latent_attention:
            _recompute_behind(layer.input_layernorm, layer.self_attention)
        if isinstance(layer.mlp, MoELayer):
            _recompute_behind(layer.pre_mlp_layernorm, layer.mlp)


def _recompute_behind(norm: torch.nn.Module, user: torch.nn.Module) -> None:
    """Drop the norm's output when `user`, which has it as its input, is done, as transformer_layer.py does."""
    calls: list[DroppedOutput] = []
    normalize, use = norm.forward, user.forward

    def run_norm(x: Tensor) -> Any:
        calls.append(DroppedOutput())
        return calls[-1].run(normalize, x)

    def run_user(*inputs: Any, **named: Any) -> Any:
        dropped = calls.pop()
        with dropped.use():
            output = use(*inputs, **named)
        dropped.recompute_for(output[0])
        return output

    norm.forward, user.forward = run_norm, run_user


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
