"""The passes of every operation at the shapes of the tables, as launches and what torch launches behind them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu.operation import VECTORS, Operation, Sizes, Traffic
from gpu.operations import OPERATIONS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roofline.launches import Launch, record_launches
from roofline.walks import PRODUCTS
from tempo_kernels import kernel_sums
from tempo_kernels.activation import kernel as pointwise
from tempo_kernels.attention import kernel as attention_kernel
from tempo_kernels.attention import kernel_columns, kernel_heads, kernel_rows
from tempo_kernels.attention.settings import Inputs, Kept, Settings
from tempo_kernels.dropout_add import kernel as dropout_add
from tempo_kernels.gelu import kernel as gelu
from tempo_kernels.glu import kernel as glu
from tempo_kernels.linear_cross_entropy import kernel as loss_head
from tempo_kernels.linear_cross_entropy.settings import Rows, Shares
from tempo_kernels.norm import kernel_long_rows, kernel_lost_channels, kernel_whole_rows, reserve
from tempo_kernels.norm import kernel_rows as norm_rows
from tempo_kernels.squared_relu import kernel as squared_relu

SIZES = Sizes(s=2048, b=4, h=4096, ffn=16384, gated_ffn=11008, p=0.1, dtype=torch.bfloat16)
POINTWISE = [dropout_add, gelu, glu, pointwise, squared_relu, kernel_sums]
POINTWISE += [norm_rows, kernel_whole_rows, kernel_long_rows, kernel_lost_channels]
VOCABULARY, CHUNK_ROWS = 50304, 4096


class Pass(NamedTuple):
    name: str
    launch: Launch
    """The one that computes; the others are in the tail."""
    num_elements: int
    num_bytes: int
    """The fewest that the pass must move."""
    stored_bytes: int
    """For each element; loaded ones where nothing is stored."""
    tail_launches: int = 0
    tail_bytes: int = 0
    """What the tail reads and writes, and the partial sums that the pass writes for it."""
    last_bytes: int = 0
    """Of partial sums that the last program of a strip reads, where it adds them up; 0 where a launch does."""


class AttentionPass(NamedTuple):
    name: str
    walk: str
    """One of walks.PRODUCTS."""
    launch: Launch
    head_dim: int
    p: float
    tile: tuple[int, int]
    """Queries by keys."""


class Tail(TorchDispatchMode):
    """Counts what torch would launch on a GPU, and its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and "empty" not in name and name not in ("detach", "_unsafe_view"):
            self.launches += 1
            self.num_bytes += sum(_bytes_of(t) for t in (*args, found) if isinstance(t, Tensor))
        return found


def find_passes() -> Iterator[Pass]:
    """Of every operation in every form, and of the loss head's kernels."""
    for operation in OPERATIONS:
        for form in operation.forms:
            yield from _record(operation, form.factory(SIZES.p), form.keeps, form.forward, form.backward)
    yield from _find_loss_passes()


def find_attention_passes(capability: int, head_dim: int, p: float) -> Iterator[AttentionPass]:
    """Causal, bfloat16, queries, keys and values that are slices of one tensor: forward, backward in two walks (grad_q,
    grad_kv), and backward in one where the kernels have that."""
    s, b, a = SIZES.s, SIZES.b, SIZES.h // head_dim
    q, k, v = torch.empty(s, b, a, 3 * head_dim, dtype=torch.bfloat16).split(head_dim, dim=-1)
    out, logsumexp = torch.empty(s, b, a, head_dim, dtype=torch.bfloat16), torch.empty(b, a, s)
    chosen = {"causal": True, "softmax_scale": head_dim**-0.5, "dropout_p": p, "dropout_key": 2**64 - 1}
    settings = Settings(**chosen, first_sample=0, first_head=0)
    inputs, kept = Inputs(q, k, v, None, None), Kept(out, logsumexp)

    def record(run: Callable[[], Any], **replaced: Any) -> list[Launch]:
        with mock.patch.multiple(attention_kernel, find_architecture=lambda device: capability, **replaced):
            return record_launches(run, [kernel_rows, kernel_columns, kernel_heads])

    found = dict(zip(PRODUCTS, record(lambda: attention_kernel.forward(inputs, settings)), strict=False))
    back = partial(attention_kernel.backward, out, inputs, kept, settings)
    found |= zip(("grad_q", "grad_kv"), record(back, choose_splits=lambda inputs: None), strict=True)
    chosen_way = record(back)
    if any(one.kernel in vars(kernel_heads).values() for one in chosen_way):
        _, found["backward"], _ = chosen_way
    for name, launch in found.items():
        tile = (launch.arguments["BLOCK_QUERIES"], launch.arguments["BLOCK_KEYS"])
        yield AttentionPass(f"attention {name}, d {head_dim}, p {p:g}", name, launch, head_dim, p, tile)


def _record(
    operation: Operation, function: Callable[..., Any], keeps: str, forward: Traffic, backward: Traffic
) -> Iterator[Pass]:
    """Forward and backward as autograd runs them, on tensors without numbers."""
    width = operation.width_of(SIZES)
    tensors = [_make_tensor(name, width) for name in operation.inputs]
    elements, itemsize = SIZES.tokens * width, SIZES.dtype.itemsize
    with _use_kernels():
        record_launches(lambda: function(*tensors), POINTWISE)  # the first call of a norm counts its channels
        outputs: list[Tensor] = []
        with Tail() as tail:
            launches = record_launches(lambda: outputs.append(function(*tensors)), POINTWISE)
        name, num_bytes = f"{operation.name} forward, keeps {keeps}", forward.num_bytes(SIZES, width)
        yield _join(name, launches, elements, num_bytes, itemsize, tail)
        # A whole model's backward pass reads its norms' counts once; what that takes is not one norm's.
        reserve._written.clear()
        grads = [torch.empty_like(output) for output in outputs]
        with Tail() as tail:
            launches = record_launches(lambda: torch.autograd.grad(outputs, tensors, grads), POINTWISE)
        name, num_bytes = f"{operation.name} backward, keeps {keeps}", backward.num_bytes(SIZES, width)
        stored = itemsize * (2 if operation.inputs[0] == "x_gated" else 1)
        yield _join(name, launches, elements, num_bytes, stored, tail)


def _join(name: str, launches: list[Launch], elements: int, num_bytes: int, stored_bytes: int, tail: Tail) -> Pass:
    main, *others = launches
    partial = main.arguments.get("partial_ptr")
    written = 0 if partial is None else _bytes_of(partial)
    in_others = sum(_bytes_of(t) for one in others for t in one.arguments.values() if isinstance(t, Tensor))
    tail_launches, tail_bytes = tail.launches + len(others), tail.num_bytes + in_others + written
    last_bytes = _find_last_bytes(main) if main.arguments.get("counters_ptr") is not None else 0
    return Pass(name, main, elements, num_bytes, stored_bytes, tail_launches, tail_bytes, last_bytes)


def _find_last_bytes(launch: Launch) -> int:
    """A strip of all rows of partial; a gated unit has two strips."""
    num_chunks, num_columns = launch.arguments["partial_ptr"].shape
    num_programs = launch.num_programs
    assert num_programs % num_chunks == 0
    return 4 * num_chunks * -(-num_columns // (num_programs // num_chunks))


def _find_loss_passes() -> Iterator[Pass]:
    logits, columns = torch.empty(CHUNK_ROWS, VOCABULARY, dtype=SIZES.dtype), torch.zeros(CHUNK_ROWS, dtype=torch.int64)
    vectors, shares = torch.ones(3, CHUNK_ROWS), Shares(1.0, 0.0, VOCABULARY)
    [statistics] = record_launches(lambda: loss_head.compute_statistics(logits, columns, shares), [loss_head])
    rows = Rows(columns, *vectors)
    [gradient] = record_launches(lambda: loss_head.write_gradient_(logits, rows, shares), [loss_head])
    yield Pass("loss statistics", statistics, logits.numel(), _bytes_of(logits), 2)
    yield Pass("loss gradient", gradient, logits.numel(), 2 * _bytes_of(logits), 2)


def _make_tensor(name: str, width: int) -> Tensor:
    """Memory that nobody reads, except of parameters: a norm counts its lost channels."""
    if name in VECTORS:
        t = (torch.ones if name == "weight" else torch.zeros)(width, dtype=SIZES.dtype)
    else:
        t = torch.empty(SIZES.s, SIZES.b, width * (2 if name == "x_gated" else 1), dtype=SIZES.dtype)
    return t.requires_grad_()


@contextlib.contextmanager
def _use_kernels() -> Iterator[None]:
    """Operations take their kernels for tensors of the CPU too."""

    def choose_kernel(x: Tensor, cpu: ModuleType) -> Any:
        return import_module(f"{cpu.__package__}.kernel")

    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("tempo_kernels.") and hasattr(module, "choose_backend"):
                patches.enter_context(mock.patch.object(module, "choose_backend", choose_kernel))
        yield


def _bytes_of(t: Tensor) -> int:
    return t.numel() * t.element_size()
