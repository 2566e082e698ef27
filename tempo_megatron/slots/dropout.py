"""Bias-dropout-add for Megatron's bda slots, and the embedding's dropout: masks by position, nothing kept.

T5 calls its embedding once for each of its two stacks, and each stack has its own masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5.t5_model import T5Model
from torch import Tensor

from tempo_kernels.dropout_add import bias_dropout_add
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.choose import choose_operation
from tempo_megatron.slots.dropout_rng import Site, Stack, compute_rows, count_depths, find_key_and_sample
from tempo_megatron.slots.megatron_versions import is_since

XWithBias = tuple[Tensor, Tensor | None]

# Since 0.17 Megatron casts x up to the residual's dtype; before, the residual down to x's.
_RESIDUAL_DECIDES = is_since("0.17")


def tempo_bias_dropout_add(config: Any, layer_number: int, site: Site, stack: Stack) -> Callable[..., Any]:
    """The function that stands in a bda slot of global layer `layer_number` (1-based), with Megatron's signature.

    `f(training, fused)((x, bias), residual, prob) -> out` with x, residual [s, b, h] and bias [h] or None. It is a
    plain function, as the slot expects, and does not write to its inputs.
    """

    def get_tempo_bias_dropout_add(training: bool, fused: bool) -> Callable[[XWithBias, Tensor, float], Tensor]:
        def add(x_with_bias: XWithBias, residual: Tensor, prob: float) -> Tensor:
            x, bias = x_with_bias
            if residual.dtype != x.dtype:
                x, residual = (x.to(residual.dtype), residual) if _RESIDUAL_DECIDES else (x, residual.to(x.dtype))
            return apply_dropout(x, bias, residual, prob if training else 0.0, config, layer_number, site, stack)

        return add

    return get_tempo_bias_dropout_add


def apply_dropout(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    prob: float,
    config: Any,
    layer_number: int,
    site: Site,
    stack: Stack,
) -> Tensor:
    """residual + dropout(x + bias) of this rank's rows of hidden states [s, b, h]; nothing is drawn where prob is 0."""
    if prob == 0.0:
        x = x if bias is None else x + bias
        return x if residual is None else residual + x
    key, first_sample = find_key_and_sample(layer_number, site, stack)
    place = {"first_sample": first_sample, **compute_rows(x, config)}
    return bias_dropout_add(x, bias, residual, p=prob, key=key, **place)


class TempoEmbeddingDropout(torch.nn.Dropout):
    """The embedding's dropout; in place of `LanguageModelEmbedding.embedding_dropout`. x holds this rank's rows
    of [s, b, h]."""

    stacks_to_come: list[Stack] | None = None
    """Which stacks the rest of a forward embeds, in that order, where one embedding is of several, as in T5."""

    def __init__(self, p: float, config: Any, stack: Stack = Stack.DECODER) -> None:
        super().__init__(p)
        self.config = config
        self.stack = stack

    def forward(self, x: Tensor) -> Tensor:
        """dropout(x), the same for any layout of the model over devices.

        Raises RuntimeError where every stack of this forward has had its own mask: one more would be a copy.
        """
        p = self.p if self.training else 0.0
        if p > 0 and self.stacks_to_come is not None:
            if not self.stacks_to_come:
                raise RuntimeError(
                    "the embedding is called more often than T5Model's forward calls it, and Tempo's dropout would "
                    "draw a mask twice; call the model instead of its embedding or of model.forward, or set "
                    'tempo.dropout to "off"'
                )
            self.stack = self.stacks_to_come.pop(0)
        return apply_dropout(x, None, None, p, self.config, 0, Site.EMBEDDING, self.stack)


def tempoize_embedding(model: Any, tempo_config: TempoConfig) -> None:
    """Replace the dropout of a built model's embedding by TempoEmbeddingDropout; no spec names that module.

    Layers of multi-token prediction embed tokens too, and have masks of their own.

    A model, or pipeline stage, without an embedding stays as it is. The `layers` of `tempo_config` do not apply to it.

    Raises ValueError where `tempo_config.dropout` is "recompute" and cannot be had ("auto" leaves the stock one there),
    and where `layers` speaks of a stack that the model does not have.
    """
    stacks = _get_stacks(model)
    tempo_config.check_stacks(stacks, type(model).__name__)
    count_depths(getattr(getattr(model, "mtp", None), "layers", ()))
    embedding = getattr(model, "embedding", None)
    if embedding is None or choose_operation("dropout", embedding.config, tempo_config) == "off":
        return
    stock = embedding.embedding_dropout
    if not isinstance(stock, TempoEmbeddingDropout):
        embedding.embedding_dropout = TempoEmbeddingDropout(stock.p, embedding.config, Stack[stacks[0].upper()])
        if len(stacks) > 1:
            embedding.embedding_dropout.stacks_to_come = []
            model.register_forward_pre_hook(_begin_t5_forward, with_kwargs=True)


def _get_stacks(model: Any) -> tuple[str, ...]:
    if isinstance(model, T5Model):
        return ("encoder", "decoder")
    return ("encoder",) if isinstance(model, BertModel) else ("decoder",)


def _begin_t5_forward(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """T5 embeds the encoder's tokens, unless it is given the encoder's output, and then the decoder's."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    encoder = [Stack.ENCODER] if given.get("encoder_hidden_states") is None else []
    model.embedding.embedding_dropout.stacks_to_come = [*encoder, Stack.DECODER]
