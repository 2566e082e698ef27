"""Holds the chunks of a model that one pipeline stage has, and names their parameters as the whole model does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tempo_megatron.settings.operations import STACKS

_COPY, _ORIGINAL = "output_layer.weight", "embedding.word_embeddings.weight"


class PipelineStage(torch.nn.Module):
    """The chunks of one stage, each a GPTModel or BertModel, as one module for an optimizer and for checkpoints.

    Megatron numbers the layers of each chunk from 0. Here parameters and state dicts have the names that the whole
    model gives them without a pipeline: `decoder.layers.7.` wherever layer 7 lies. The last stage of a model with tied
    embeddings has a copy of the word embeddings as the weight of its output layer, and it is named as the embedding is.

    Args:
        chunks: in the order of the model. Only one is there without interleaving.
    """

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__()
        self.chunks = torch.nn.ModuleList(chunks)
        self._prefixes = [dict(_list_renamed(chunk)) for chunk in chunks]

    def find_embedding_copy(self) -> torch.nn.Parameter | None:
        """Returns the last stage's copy of the first stage's word embeddings; None on any other stage."""
        last: Any = self.chunks[-1]
        return last.output_layer.weight if _has_copy(last) else None

    def find_tied_weight(self) -> torch.nn.Parameter | None:
        """Returns this stage's copy or original of embeddings that first and last stage share; None if it has none."""
        first: Any = self.chunks[0]
        if first.pre_process and first.share_embeddings_and_output_weights:
            weight: torch.nn.Parameter = first.embedding.word_embeddings.weight
            return weight
        return self.find_embedding_copy()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for chunk, prefixes in zip(self.chunks, self._prefixes, strict=True):
            for name, parameter in chunk.named_parameters("", recurse, remove_duplicate):
                yield f"{prefix}{'.' if prefix else ''}{_rename(name, prefixes)}", parameter

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        options = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **options}
        prefix, destination = options.pop("prefix", ""), options.pop("destination", None)
        found: dict[str, Any] = {} if destination is None else destination
        for chunk, prefixes in zip(self.chunks, self._prefixes, strict=True):
            state = chunk.state_dict(**options)
            found.update({prefix + _rename(name, prefixes): value for name, value in state.items()})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads what state_dict returned; raises RuntimeError for a name that no chunk has, or that is missing."""
        known: set[str] = set()
        for chunk, prefixes in zip(self.chunks, self._prefixes, strict=True):
            names = {name: _rename(name, prefixes) for name in chunk.state_dict()}
            known |= set(names.values())
            own = {name: state_dict[given] for name, given in names.items() if given in state_dict}
            chunk.load_state_dict(own, strict=strict, assign=assign)
        if strict and (unknown := state_dict.keys() - known):
            raise RuntimeError(f"this stage has no {min(unknown)}")
        return torch.nn.modules.module._IncompatibleKeys([], sorted(state_dict.keys() - known))

    def sharded_state_dict(self) -> dict[str, Any]:
        """Returns Megatron's description of how each chunk's parameters are divided, by the number of the chunk."""
        chunks: Any = self.chunks
        return {str(number): chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def list_chunks(model: Any) -> list[Any]:
    """Returns the chunks of a PipelineStage, or the one model that is no stage."""
    return list(model.chunks) if isinstance(model, PipelineStage) else [model]


def _has_copy(chunk: Any) -> bool:
    return bool(chunk.post_process and not chunk.pre_process and chunk.share_embeddings_and_output_weights)


def _list_renamed(chunk: Any) -> Iterator[tuple[str, str]]:
    """Yields the prefixes of names that differ from the whole model's, with the whole model's."""
    for stack in STACKS:
        for place, layer in enumerate(getattr(getattr(chunk, stack, None), "layers", ())):
            yield f"{stack}.layers.{place}.", f"{stack}.layers.{layer.layer_number - 1}."
    if _has_copy(chunk):
        yield _COPY, _ORIGINAL


def _rename(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, whole in prefixes.items():
        if name.startswith(prefix):
            return whole + name[len(prefix) :]
    return name
