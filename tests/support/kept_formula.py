"""Computes by a formula the bytes that a transformer layer keeps for backward, stock and Tempo, row by row.

The reasoning is that of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198, section 4):
walk through the layer, and count each tensor that some operation needs in its backward once, however many share it.
What is counted are the real modules' tensors, so that the sum is what the ledger measures, to the byte. The paper's
34 sbh + 5 a s**2 b is the case of 16 bits, a byte per dropped element and unfused attention.

Two stacks of stock modules are known:

- "local", Megatron's own modules in plain torch, as they run on a CPU, with unfused softmax. Dropout keeps a mask of
  the tensor's dtype there; a softmax of 16-bit scores is computed, and kept, in float32, unless the configuration says
  otherwise (`softmax_in_fp32`); a window's mask is kept by each layer; torch's LayerNorm keeps its statistics in
  x's dtype; torch's RMSNorm is no operation of its own and keeps two tensors in float32; a gated activation that is not
  fused with its bias adds its offset, which is 0, to one half and so keeps a copy of it.
- "transformer_engine", the modules on a GPU. A dropout keeps one byte per element. LayerNormLinear keeps the norm's
  input, its output and float32 statistics. Attention keeps q, k, v, its output and a float32 logsumexp, no mask and no
  s*s tensor; q, k and v are contiguous there. cuDNN's attention writes its output where the next linear reads it;
  FlashAttention 2 computes [b, s, a, d], and Transformer Engine copies it to [s, b, a * d] for the linear, so that
  both stay. Unfused attention keeps the softmax's output, which its kernel writes in 16 bits, and with dropout what the
  product reads and a byte per score. Megatron's fused bias-and-activation keeps its input.

Tempo's operations keep the same on both. Attention masks are not counted: a micro batch has them anyway.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig

GATED = ("swiglu", "geglu", "reglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One transformer layer on one rank: everything that decides how many bytes it keeps."""

    seq_length: int
    micro_batch_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """The size of a head, d."""

    dtype: torch.dtype = torch.bfloat16
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: str = "gelu"
    normalization: str = "LayerNorm"
    rotary: bool = False
    """Rotary position embeddings, which Megatron computes anew in every layer."""

    has_window: bool = False
    """Whether attention sees a window of tokens only."""

    softmax_in_fp32: bool = True
    """Whether unfused attention computes its softmax in float32: Megatron's attention_softmax_in_fp32, without its
    fused kernel, which keeps the result in 16 bits."""

    bias_activation_fusion: bool = False
    """Megatron's: a local gated activation then keeps its input only."""

    latent: Any = None
    """What has the sizes of Megatron's latent attention, with norms of both latent vectors; Tempo's only."""

    heads_exchanged: int = 1
    """Context-parallel ranks that exchange heads; seq_length is that of one rank."""

    longest_document: int | None = None
    """Tokens of a packed row's longest document; None where rows are not packed."""

    exchanges_rows: bool = False
    """Whether keys and values of other context-parallel ranks pass by."""

    encoder_length: int | None = None
    """Tokens per sample of the encoder that a decoder's cross attention reads; None without cross attention."""

    recompute: frozenset[str] = frozenset()
    """Megatron's recomputation: "full", or any of "core_attn" and "mlp"."""

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Tokens of this rank outside of attention and MLP: with sequence parallelism its part of them."""
        return self.seq_length * self.micro_batch_size // (self.tensor_parallel if self.sequence_parallel else 1)

    @property
    def hidden_bytes(self) -> int:
        """One tensor of hidden states, s b h, as this rank has it."""
        return self.rows * self.hidden_size * self.element_bytes


def _get_query_size(latent: Any) -> int:
    """Of one head."""
    return int(latent.qk_head_dim + latent.qk_pos_emb_head_dim)


@dataclasses.dataclass(frozen=True)
class KeptRow:
    """What one operation is the first to keep; its name is that of the ledger's row."""

    operation: str
    num_bytes: int


def make_layer(run: Run) -> LayerShape:
    """One layer of a run's model on one of its ranks."""
    shape = run.model
    layout = {"tensor_parallel": run.layout.tp, "sequence_parallel": run.layout.sp}
    values: dict[str, Any] = {**vars(shape), **vars(run), **layout, "recompute": frozenset(run.recompute)}
    return LayerShape(
        **{field.name: values[field.name] for field in dataclasses.fields(LayerShape) if field.name in values},
        rotary=shape.position_embedding_type == "rope",
        has_window=shape.window_size is not None,
    )


def count_layer_bytes(shape: LayerShape, tempo_config: TempoConfig, **stock: str) -> int:
    """The sum of `list_layer_rows`."""
    return sum(row.num_bytes for row in list_layer_rows(shape, tempo_config, **stock))


def list_layer_rows(
    shape: LayerShape, tempo_config: TempoConfig, *, stock: str = "local", stock_attention: str = "fused"
) -> tuple[KeptRow, ...]:
    """What a layer keeps for backward on one rank, without what its stack keeps once (`count_stack_bytes`).

    Args:
        shape: the layer.
        tempo_config: without "auto", which `tempo_megatron.slots.choose.choose` replaces; `TempoConfig.off()` is
            stock.
        stock: whose modules stock ones are, "local" or "transformer_engine".
        stock_attention: Transformer Engine's, "fused" (cuDNN), "flash" (FlashAttention 2) or "unfused".
    """
    assert "auto" not in (tempo_config.activation, tempo_config.norm, tempo_config.dropout, tempo_config.attention)
    if "full" in shape.recompute:
        return (KeptRow("checkpoint (layer input)", shape.hidden_bytes),)
    if shape.latent is not None and (tempo_config.attention not in ("flash", "recompute") or shape.recompute):
        raise ValueError("latent attention is known as Tempo's alone, without recomputation of modules")
    formula = _Formula(shape, tempo_config, stock == "transformer_engine", stock_attention)
    return tuple(KeptRow(*row) for row in formula.walk() if row[1])


def count_prediction_bytes(shape: LayerShape, tempo_config: TempoConfig, num_depths: int) -> int:
    """What the layers of multi-token prediction keep with Tempo's norms in place. The decoder's final norm keeps what
    the first one reads.

    Each keeps the input of enorm, whose output, like that of hnorm, Megatron copies; the input of eh_proj, which is
    both; a layer; and the output of its final norm, which the next depth's hnorm reads. Full recomputation keeps what
    a depth is given: embeddings, and hidden states of the depth before.
    """
    if "full" in shape.recompute:
        return (2 * num_depths - 1) * shape.hidden_bytes
    num_statistics = 2 if shape.normalization == "LayerNorm" else 1
    norms = shape.hidden_bytes + 2 * 4 * num_statistics * shape.rows
    final = shape.hidden_bytes + 4 * shape.rows + 4 * num_statistics * shape.hidden_size
    return num_depths * (norms + 2 * shape.hidden_bytes + count_layer_bytes(shape, tempo_config) + final)


def count_stack_bytes(shape: LayerShape, tempo_config: TempoConfig) -> int:
    """What the layers of one stack keep together, once: with cross attention the encoder's output, unless the
    encoder's final norm, in place, keeps that anyway; with full recomputation the angles of rotary embeddings."""
    kept = 0
    if shape.encoder_length is not None and tempo_config.norm != "inplace":
        kept += shape.hidden_bytes // shape.seq_length * shape.encoder_length
    if shape.rotary and "full" in shape.recompute:
        kept += 4 * (shape.longest_document or shape.seq_length) * shape.kv_channels
    return kept


class _Formula:
    """A walk through the layer in the order of its forward."""

    def __init__(self, shape: LayerShape, config: TempoConfig, is_te: bool, te_attention: str) -> None:
        self._shape, self._config, self._is_te = shape, config, is_te
        self._has_fused_attention = is_te and te_attention != "unfused"
        self._is_flash = is_te and te_attention == "flash"
        # Outside of norms and dropout every rank of a tensor-parallel group has all tokens.
        self._tokens = shape.seq_length * shape.micro_batch_size
        self._head_bytes = shape.kv_channels * shape.element_bytes
        self._heads = shape.num_attention_heads // shape.tensor_parallel
        self._groups = shape.num_query_groups // shape.tensor_parallel
        # Of fewer groups than ranks that exchange heads each rank gets a copy; a rank has all its ranks' tokens.
        self._kept_groups = max(self._groups, shape.heads_exchanged)

    def walk(self) -> Iterator[tuple[str, int]]:
        shape = self._shape
        yield from self._norm("input_layernorm", "linear_qkv")
        yield from self._attention(shape.seq_length, is_cross=False)
        yield "self_attn_bda", self._dropout()
        if shape.encoder_length is not None:
            yield from self._norm("pre_cross_attn_layernorm", "cross_attention.linear_q")
            yield from self._attention(shape.encoder_length, is_cross=True)
            yield "cross_attn_bda", self._dropout()
        is_recomputed = "mlp" in shape.recompute
        yield from self._norm(
            "pre_mlp_layernorm", "transformer layer" if is_recomputed else "linear_fc1", is_recomputed
        )
        if not is_recomputed:
            yield from self._mlp()
        yield "mlp_bda", self._dropout()

    def _norm(
        self, name: str, reader: str, is_held: bool = False, size: int | None = None
    ) -> Iterator[tuple[str, int]]:
        """The norm, and its output where the linear that reads it keeps it.

        is_held: whether a recomputed region takes the output, which then stays whatever the norm could do.
        size: of the normalised vectors, if not hidden_size."""
        shape, choice = self._shape, self._config.norm
        size = shape.hidden_size if size is None else size
        x = y = shape.rows * size * shape.element_bytes
        num_statistics = 2 if shape.normalization == "LayerNorm" else 1
        if choice == "inplace":
            # y, rstd, and gamma and beta of this call.
            yield name, y + 4 * shape.rows + 4 * num_statistics * size
        elif choice == "recompute":
            yield name, x + 4 * num_statistics * shape.rows
            yield reader, y if is_held else 0
        else:
            yield name, self._count_stock_norm(x, num_statistics)
            yield reader, y

    def _count_stock_norm(self, x: int, num_statistics: int) -> int:
        shape = self._shape
        if self._is_te:
            return x + 4 * num_statistics * shape.rows
        if shape.normalization == "LayerNorm":
            return x + num_statistics * shape.element_bytes * shape.rows
        # In float32: x, the normalised x, and rstd.
        return 4 * (2 * shape.hidden_size + 1) * shape.rows

    def _attention(self, kv_length: int, *, is_cross: bool) -> Iterator[tuple[str, int]]:
        shape, prefix = self._shape, "cross_attention." if is_cross else ""
        is_recomputed = "core_attn" in shape.recompute
        num_heads = shape.micro_batch_size * self._heads
        if shape.latent is not None:
            if shape.latent.q_lora_rank is not None:
                yield from self._norm("q_layernorm", "linear_q_up_proj", size=shape.latent.q_lora_rank)
            yield from self._norm("kv_layernorm", "linear_kv_up_proj", size=shape.latent.kv_lora_rank)
            # Cosines and sines, of queries and of keys.
            angles = shape.seq_length * shape.latent.qk_pos_emb_head_dim * shape.element_bytes
            yield "self_attention (q, k, v)", 4 * angles
        config = self._config
        if shape.rotary and not self._is_te and config.attention == "off" and config.linear_qkv != "recompute":
            # Cosines and sines, of q and of k.
            yield f"{prefix}self_attention (q, k, v)", 4 * shape.seq_length * self._head_bytes
        is_made_again = not is_cross and self._config.linear_qkv == "recompute" and self._may_drop_operands()
        operands = 0 if is_made_again else self._count_operands(kv_length, is_recomputed, is_cross)
        if is_recomputed:
            # And the kind of mask, one int32.
            yield f"{prefix}self_attention (q, k, v)", operands + 4
        else:
            logsumexp = 4 * num_heads * shape.seq_length
            choice = self._config.attention
            has_logsumexp = choice == "flash" or (choice == "off" and self._has_fused_attention)
            yield f"{prefix}core_attention", operands + (logsumexp if has_logsumexp else 0)
            scores = num_heads * shape.seq_length * kv_length * self._count_per_score()
            if shape.has_window and choice == "off" and not self._is_te:
                scores += shape.seq_length * kv_length
            yield f"{prefix}core_attention (s*s)", scores
        value_bytes = self._head_bytes if shape.latent is None else shape.latent.v_head_dim * shape.element_bytes
        context = self._tokens * self._heads * value_bytes
        copies = 1
        if shape.heads_exchanged > 1 and self._keeps_out() and not is_recomputed:
            copies = 2  # before heads move back, and behind
        if not is_recomputed and self._config.attention == "recompute":
            copies = 0
        elif not is_recomputed and self._config.attention == "off" and self._is_flash:
            copies = 2
        yield f"{prefix}linear_proj", copies * context

    def _keeps_out(self) -> bool:
        """Whether attention on a CPU keeps its output, with dropout or without."""
        shape = self._shape
        is_torchs = shape.attention_dropout == 0 and shape.element_bytes == 2
        has_one_size = shape.latent is None or _get_query_size(shape.latent) == shape.latent.v_head_dim
        is_torchs &= has_one_size or shape.longest_document is not None
        return shape.exchanges_rows or is_torchs

    def _may_drop_operands(self) -> bool:
        """Whether core attention keeps q, k and v as they are, and no copies; where it may not, such a layer is
        refused."""
        is_stock = self._config.attention == "off" and "core_attn" not in self._shape.recompute
        return not is_stock or not (self._is_te or self._groups != self._heads)

    def _count_operands(self, kv_length: int, is_recomputed: bool, is_cross: bool) -> int:
        """q, k and v: as attention reads them, or as they are given to a recomputed region."""
        shape = self._shape
        kv_tokens = kv_length * shape.micro_batch_size
        q = self._tokens * self._heads * self._head_bytes
        kv = 2 * kv_tokens * self._groups * self._head_bytes
        is_grouped = self._groups != self._heads
        if is_cross:
            return q + kv
        if shape.latent is not None:
            latent, elements = shape.latent, self._tokens * self._heads * shape.element_bytes
            return elements * (2 * _get_query_size(latent) + latent.v_head_dim)
        if is_recomputed:
            # k and v are views of the whole projection, except that rotary embeddings make q and k anew; of several
            # groups with several heads each, q is a copy.
            copies = q + kv // 2 if shape.rotary else q if is_grouped and self._groups > 1 else 0
            return copies + q + kv
        if self._config.attention != "off" or self._has_fused_attention:
            return q + kv * self._kept_groups // self._groups
        if self._is_te:
            # Keys and values are repeated for each head.
            return 3 * q
        if is_grouped:
            # k and v are repeated for each head; q of one group and one sample is a view of the projection still.
            is_view = self._groups == 1 and shape.micro_batch_size == 1 and not shape.rotary
            return 3 * q + (kv if is_view else 0)
        return q + kv + (q + kv // 2 if shape.rotary else 0)

    def _count_per_score(self) -> int:
        """Bytes per element of [b, a, s, s]."""
        choice, e = self._config.attention, self._shape.element_bytes
        if choice == "softmax":
            return e
        if choice in ("flash", "recompute") or self._has_fused_attention:
            return 0
        # The softmax's output; what the product with v reads, where dropout or a cast made it another tensor;
        # dropout's mask.
        has_dropout = self._shape.attention_dropout > 0
        softmax = 4 if self._shape.softmax_in_fp32 and not self._is_te else e
        mask = 1 if self._is_te else e
        return softmax + (e if has_dropout or e < softmax else 0) + (mask if has_dropout else 0)

    def _dropout(self) -> int:
        shape = self._shape
        if self._config.dropout != "off" or shape.hidden_dropout == 0:
            return 0
        return shape.rows * shape.hidden_size if self._is_te else shape.hidden_bytes

    def _mlp(self) -> Iterator[tuple[str, int]]:
        shape, choice = self._shape, self._config.activation
        num_elements = self._tokens * shape.ffn_hidden_size // shape.tensor_parallel
        y = num_elements * shape.element_bytes
        is_gated = shape.activation in GATED
        x = 2 * y if is_gated else y
        if self._config.linear_fc1 in ("recompute", "tile"):
            return  # keeps only its input, which the norm's row counts
        if choice == "recompute":
            yield shape.activation, x
        elif choice == "inplace":
            yield shape.activation, y + (-(-num_elements // 8) if shape.activation == "gelu" else 0)
        else:
            if is_gated and not self._is_te and not shape.bias_activation_fusion:
                # Both factors; of reglu's gate the first one is enough.
                x = (0 if shape.activation == "reglu" else x) + 2 * y
            yield shape.activation, x
            yield "linear_fc2", y
