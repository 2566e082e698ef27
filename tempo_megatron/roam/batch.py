"""A micro batch of any structure as its tensors; what else is in it is compiled into a captured step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tempo_megatron.roam.refusals import differ


class BatchStructure:
    """Where the tensors of a micro batch are, and the values beside them; it holds no tensor."""

    def __init__(self, batch: Sequence[Any]) -> None:
        leaves, self._tree = tree_flatten(tuple(batch))
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._values = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def list_tensors(self, batch: Sequence[Any]) -> list[Tensor]:
        """The tensors of another micro batch in the same order, whatever the order of its keys.

        Raises ValueError where it has another structure, or other numbers or texts.
        """
        try:
            leaves = self._tree.flatten_up_to(tuple(batch))
        except ValueError as error:
            raise ValueError(f"the micro batch has not the structure that was captured: {error}") from error
        tensors = [leaves[place] for place in self._places]
        given = [None if place in self._places else leaf for place, leaf in enumerate(leaves)]
        for value in (t for t in tensors if not isinstance(t, Tensor)):
            raise ValueError(f"the micro batch has {value!r} where the step was captured with a tensor; expected one")
        for value, captured in zip(given, self._values, strict=True):
            if differ(captured, value):
                found = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"the micro batch has {found} where the step was captured with {captured!r}, which is compiled "
                    "in; expected the same, or another step for it"
                )
        return tensors

    def fill(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """The micro batch with these tensors."""
        leaves = list(self._values)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        batch: Sequence[Any] = tree_unflatten(leaves, self._tree)
        return batch
