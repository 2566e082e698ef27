"""Defines `keep_attention`, by which torch.utils.checkpoint keeps attention's output and logsumexp.

What is recomputed then makes q, k and v again by their products, and takes the rest from what was kept: attention,
which is nearly all the work of a long sequence, runs once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tempo_kernels.saved import Kept, keeping, note_held

_OPERATORS = frozenset(
    (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",
        "tempo_kernels::attention",
    )
)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the two contexts of a checkpoint that keeps what attention makes: the `context_fn` of
    torch.utils.checkpoint with use_reentrant=False, and of transformers' gradient checkpointing.

        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep_attention})

    Keeps for backward the checkpoint's input, and output and logsumexp of torch's fused attention, of
        FlashAttention's operator and of Tempo's attention. Offload moves them to the host.
    Error: none; q, k, v and attention's dropout masks are those of the first run.
    """
    kept: list[tuple[Any, list[Any]]] = []
    return _Mode(kept, is_again=False), _Mode(kept, is_again=True)


class _Mode(TorchDispatchMode):
    """Keeps what attention makes, or, with is_again, gives it back in the same order."""

    def __init__(self, kept: list[tuple[Any, list[Any]]], *, is_again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._is_again = kept, is_again

    def __enter__(self) -> Any:
        self._next = 0  # a retained graph may be run again any number of times
        keeping.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        keeping.remove(self)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in _OPERATORS:
            return func(*args, **(kwargs or {}))
        if self._is_again:
            structure, held = self._kept[self._next]
            self._next += 1
            # New tensors: autograd gives them a graph.
            leaves = [each.unpack().detach() if isinstance(each, Kept) else each for each in held]
            return pytree.tree_unflatten(leaves, structure)
        result = func(*args, **(kwargs or {}))
        leaves, structure = pytree.tree_flatten(result)
        held = [Kept(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for each in held:
            if isinstance(each, Kept):
                note_held(each)
        self._kept.append((structure, held))
        return result
