"""The embedding's dropout: masks by position, nothing kept, and in T5 one for each of the two stacks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5.t5_model import T5Model
from torch import Tensor

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.bias_dropout_add import apply_dropout
from tempo_megatron.slots.choices import choose_operation
from tempo_megatron.slots.dropout_rng import Site, Stack


class TempoEmbeddingDropout(torch.nn.Dropout):
    """The embedding's dropout; in place of `LanguageModelEmbedding.embedding_dropout`. x is [s or s/t, b, h]."""

    def __init__(self, p: float, config: Any, stack: Stack = Stack.DECODER) -> None:
        super().__init__(p)
        self.config = config
        self.stack = stack

    def forward(self, x: Tensor) -> Tensor:
        """dropout(x), the same for any layout of the model over devices."""
        p = self.p if self.training else 0.0
        return apply_dropout(x, None, None, p, self.config, 0, Site.EMBEDDING, self.stack)


class TempoSharedEmbeddingDropout(TempoEmbeddingDropout):
    """The dropout of an embedding that one forward calls once for each stack, as in T5.

    Call begin() first, with the order of the stacks.
    """

    def __init__(self, p: float, config: Any) -> None:
        super().__init__(p, config)
        self._stacks_to_come: list[Stack] = []

    def begin(self, *stacks: Stack) -> None:
        """Say which stacks the forward that begins will embed, in that order."""
        self._stacks_to_come = list(stacks)

    def forward(self, x: Tensor) -> Tensor:
        """dropout(x) with the mask of the next stack.

        Raises RuntimeError where every stack of this forward has had its own: one more mask would be a copy.
        """
        if self.training and self.p > 0:
            if not self._stacks_to_come:
                raise RuntimeError(
                    "the embedding is called once more than T5Model's forward calls it, and Tempo's dropout would draw "
                    "a mask twice; call the model instead of its embedding or of model.forward, or set tempo.dropout "
                    'to "off"'
                )
            self.stack = self._stacks_to_come.pop(0)
        return super().forward(x)


def tempoize_embedding(model: Any, tempo_config: TempoConfig) -> None:
    """Replace the dropout of a built model's embedding by the layout-free one; no spec names that module.

    A model, or pipeline stage, without an embedding stays as it is. The `layers` of `tempo_config` say nothing of it.

    Raises ValueError where `tempo_config.dropout` is "recompute" and cannot be had ("auto" leaves the stock one there),
    and where `layers` speaks of a stack that the model does not have.
    """
    tempo_config.check_stacks(_find_stacks(model), type(model).__name__)
    embedding = getattr(model, "embedding", None)
    if embedding is None or choose_operation("dropout", embedding.config, tempo_config)[0] == "off":
        return
    stock = embedding.embedding_dropout
    if isinstance(stock, TempoEmbeddingDropout):
        return
    if not isinstance(model, T5Model):
        stack = Stack[_find_stacks(model)[0].upper()]
        embedding.embedding_dropout = TempoEmbeddingDropout(stock.p, embedding.config, stack)
        return
    embedding.embedding_dropout = TempoSharedEmbeddingDropout(stock.p, embedding.config)
    model.register_forward_pre_hook(_begin_t5_forward, with_kwargs=True)


def _find_stacks(model: Any) -> tuple[str, ...]:
    if isinstance(model, T5Model):
        return ("encoder", "decoder")
    return ("encoder",) if isinstance(model, BertModel) else ("decoder",)


def _begin_t5_forward(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """T5 embeds the encoder's tokens, where it is not given what the encoder made of them, and then the decoder's."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    has_encoded = given.get("encoder_hidden_states") is not None
    model.embedding.embedding_dropout.begin(*([] if has_encoded else [Stack.ENCODER]), Stack.DECODER)
