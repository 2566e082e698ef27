"""Estimates long sequences: full fine-tuning of a gated GPT with every layer recomputed, under DeepSpeed's ZeRO 3.

Of a step of one sample only three moments can be the highest: the loss, the backward of an MLP, and that of attention.
Each is a sum of terms, so many bytes a token or in all; a term names its tensors and, where that is not plain, their
source. Nothing is fitted. The trainer is `transformers` 4.53 with gradient checkpointing and DeepSpeed 0.17, as
ArcticTraining runs them, or that trainer with pieces in place of parts of it (PIECES). Pieces are counted as kernels
whose tiles are small.

It counts what torch allocates. DeepSpeed gathers weights on a stream of its own and reduces gradients on another, and
torch's allocator gives what one stream has freed to no other: what these two have at most counts at each moment. CUDA's
context, NCCL and what the allocator reserves beyond what it has given (long_allocations.py) come on top. So published
figures of nvidia-smi, which have all that, are higher (docs/estimate.md has them side by side).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tempo_megatron.memory.run import OptimizerSettings
from tempo_megatron.models.shape import ModelShape

PIECES = {
    "liger": "Liger's kernels: fused loss, RMSNorm, SwiGLU and rotary embeddings in place",
    "host_checkpoints": "the input of each layer on the host",
    "tiled_mlp": "the MLP a tile of tokens at a time, forward and backward",
    "tempo": "Tempo's operations: fused loss, RMSNorm and, with dropout or tiled_norms, attention whose backward sums "
    "nothing in float32 on an H100; else torch's attention",
    "host_attention": "attention's output and logsumexp on the host too, so that attention does not run again",
    "tiled_norms": "norms, rotary embeddings and the projection of q, k and v a tile of tokens at a time",
    "one_group": "what is on the host comes back when it is needed, not while the layer behind it runs",
}
"""Name -> what it does."""

_BF16, _FLOAT32, _FLOAT64, _INT64 = 2, 4, 8, 8
_BYTES_OF_STATES = 16
"""Of a parameter whose optimizer is on the host: float32 weight, gradient and Adam's two moments."""
_NORM_ELEMENTS = 250_000_000
"""DeepSpeed takes the norm of so many elements of a gradient at a time."""


@dataclasses.dataclass(frozen=True)
class Term:
    """Something that is alive at a moment."""

    name: str
    bytes_per_token: float = 0.0
    num_bytes: int = 0
    """Beside what grows with the tokens."""
    source: str = ""

    def count(self, num_tokens: int) -> float:
        return self.bytes_per_token * num_tokens + self.num_bytes


@dataclasses.dataclass(frozen=True)
class LongSequence:
    """A model, its trainer and its GPUs."""

    model: ModelShape
    optimizer: OptimizerSettings
    """ZeRO 3."""
    pieces: frozenset[str] = frozenset()
    num_gpus: int = 1
    """Ranks of Ulysses, which split the tokens of a sample, and attention's heads."""

    document_tokens: int | None = None
    """Of each of the documents that are packed into the sample; None is one document."""

    def __post_init__(self) -> None:
        if unknown := sorted(self.pieces - set(PIECES)):
            raise ValueError(f"{unknown[0]} is no piece of a long sequence; expected some of {', '.join(PIECES)}")
        if self.optimizer.kind != "deepspeed" or self.optimizer.zero_stage != 3:
            raise ValueError(
                "long sequences are estimated with DeepSpeed's ZeRO 3 only; give --deepspeed_config a JSON whose "
                '"zero_optimization" has "stage": 3'
            )
        if not self.model.is_gated or self.model.normalization != "RMSNorm" or self.model.family != "gpt":
            raise ValueError(
                "long sequences are estimated for models with RMSNorm and a gated MLP, such as Llama's; this one has "
                f"{self.model.normalization} and {self.model.activation}"
            )
        needs = {"host_attention": "host_checkpoints", "one_group": "host_checkpoints"}
        for name, needed in needs.items():
            if name in self.pieces and needed not in self.pieces:
                raise ValueError(f"{name} is asked for without {needed}, on which it rests; give that too")
        if self.document_tokens is not None and "tempo" in self.pieces:
            raise ValueError(
                "--document-tokens is given with the tempo piece, whose attention takes one document in a row; leave "
                "one of them out"
            )
        if self.model.num_attention_heads % self.num_gpus:
            raise ValueError(
                f"Ulysses divides attention heads over its ranks, and {self.model.num_attention_heads} are not a "
                f"multiple of {self.num_gpus}; change --dp"
            )

    @property
    def _has_tempos_attention(self) -> bool:
        # `tempoize` leaves attention without dropout to torch's, unless it makes q, k and v again for it.
        return "tempo" in self.pieces and ("tiled_norms" in self.pieces or self.model.attention_dropout > 0)

    @property
    def num_parameters(self) -> int:
        return self._layer_parameters * self.model.num_layers + 2 * self._embedding_parameters + self.model.hidden_size

    @property
    def _embedding_parameters(self) -> int:
        return (self.model.vocab_size or 0) * self.model.hidden_size

    @property
    def _mlp_weight(self) -> int:
        return self.model.hidden_size * self.model.ffn_hidden_size

    @property
    def _layer_parameters(self) -> int:
        m = self.model
        projections = (2 * m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels * m.hidden_size
        return projections + 3 * self._mlp_weight + 2 * m.hidden_size

    def list_moments(self) -> dict[str, list[Term]]:
        """Moment -> what is alive, of tokens of one GPU."""
        standing = list(self.list_standing())
        return {
            "loss": [*standing, *self._list_of_loss()],
            "backward of an MLP": [*standing, *self._list_of_mlp()],
            "backward of attention": [*standing, *self._list_of_attention()],
        }

    def find_peak(self, num_tokens: int) -> tuple[str, list[Term], int]:
        """(Moment, its terms, bytes) of the highest moment, for `num_tokens` on one GPU."""
        name, terms = max(self.list_moments().items(), key=lambda each: _count(each[1], num_tokens))
        return name, terms, round(_count(terms, num_tokens))

    def find_most_tokens(self, budget: int) -> int:
        """The most tokens of one GPU, in thousands, that need at most `budget` bytes."""
        found = []
        for terms in self.list_moments().values():
            fixed, slope = _count(terms, 0), sum(term.bytes_per_token for term in terms)
            found.append(int((budget - fixed) / slope) // 1000 * 1000)
        return max(0, min(found))

    def count_host_bytes(self, num_tokens: int) -> int:
        """What a GPU has on its host: what layers send there for so many tokens of it, and DeepSpeed's states."""
        per_token = sum(term.bytes_per_token for term in self._list_group())
        found = round(per_token * self.model.num_layers * num_tokens)
        if self.optimizer.offloads:
            found += _BYTES_OF_STATES * self.num_parameters // self.num_gpus
        if self.optimizer.offloads_weights:
            found += _BF16 * self.num_parameters // self.num_gpus
        return found

    def _list_group(self) -> Iterator[Term]:
        """What one layer has on the host."""
        if "host_checkpoints" in self.pieces:
            yield Term("a layer's input", _BF16 * self.model.hidden_size)
        if "host_attention" in self.pieces:
            m = self.model
            yield Term("attention's output", _BF16 * m.num_attention_heads * m.kv_channels)
            yield Term("attention's logsumexp", _FLOAT32 * m.num_attention_heads)

    def list_standing(self) -> Iterator[Term]:
        """What is alive at each of the moments."""
        m, optimizer, pieces = self.model, self.optimizer, self.pieces
        if "host_checkpoints" not in pieces:
            yield Term(
                "inputs of the layers",
                _BF16 * m.num_layers * m.hidden_size,
                source="torch/utils/checkpoint.py: CheckpointFunction saves its arguments",
            )
        yield Term(
            "rotary cosine and sine",
            2 * _BF16 * m.kv_channels,
            source="transformers/models/llama/modeling_llama.py: LlamaModel makes them once for all layers",
        )
        yield Term(
            "token ids, labels, positions, mask, shifted labels",
            5 * _INT64,
            source="transformers/loss/loss_utils.py: ForCausalLMLoss; the batch",
        )
        if not optimizer.offloads_weights:
            yield Term("weights, divided", num_bytes=_BF16 * self.num_parameters // self.num_gpus)
        if not optimizer.offloads:
            states = (_BF16 + 3 * _FLOAT32) * self.num_parameters // self.num_gpus
            yield Term("gradients and optimizer states, divided", num_bytes=states)
        # A prefetch asks for the limit before it adds a weight, and the output layer's may be the last one added.
        gathered = min(self.num_parameters, optimizer.max_gathered_elements + self._embedding_parameters)
        yield Term(
            "gathered weights",
            num_bytes=_BF16 * gathered,
            source="deepspeed/runtime/zero/partitioned_param_coordinator.py: fetch_sub_module, "
            "stage3_max_live_parameters",
        )
        yield Term(
            "bucket of gradients",
            num_bytes=_BF16 * optimizer.reduce_bucket_elements,
            source="deepspeed/runtime/zero/stage3.py: ipg_buckets, reduce_bucket_size",
        )
        yield Term(
            "reduction of gradients",
            num_bytes=self._count_reduction(),
            source="deepspeed/runtime/zero/stage3.py: __avg_scatter_grads, partition_grads, _constant_buffered_norm2",
        )

    def _count_reduction(self) -> int:
        """The most that the stream of reductions has: of a full bucket, or of the embedding's gradient.

        Several gradients are put together before they are reduced; one alone, larger than a bucket, is reduced in
        place. Where the optimizer is on the host, a rank's part of each gradient is then copied for itself, in the
        weights' dtype, in float64 for its norm and in float32 for the optimizer, the last two one after the other.
        """
        optimizer = self.optimizer

        def copies(num_elements: int) -> int:
            part = -(-num_elements // self.num_gpus)
            if not optimizer.offloads:
                return 0
            return _BF16 * part + max(_FLOAT64 * min(part, _NORM_ELEMENTS), _FLOAT32 * part)

        bucket = _BF16 * min(self.num_parameters, optimizer.reduce_bucket_elements)
        of_mlp, of_embedding = (copies(n) for n in (self._mlp_weight, self._embedding_parameters))
        if self._embedding_parameters > optimizer.reduce_bucket_elements:
            return max(bucket + of_mlp, of_embedding)
        return bucket + max(of_mlp, of_embedding)

    def _list_gradient(self) -> Iterator[Term]:
        yield Term("gradient of the MLP's weight", num_bytes=_BF16 * self._mlp_weight)

    def _list_of_loss(self) -> Iterator[Term]:
        m, h = self.model, self.model.hidden_size
        vocab = m.vocab_size or 0
        if self.pieces & {"liger", "tempo"}:
            yield Term("last layer's output", _BF16 * h)
            yield Term("normalised hidden states and their gradient", 2 * _BF16 * h)
            yield Term("gradient of the output layer", num_bytes=_FLOAT32 * self._embedding_parameters)
            if "liger" in self.pieces:
                # There are v / h chunks, each a power of two of tokens: up to twice an equal share of s h logits.
                yield Term("logits of a chunk", 2 * _BF16 * h, source="liger_kernel/ops/fused_linear_cross_entropy.py")
            return
        yield Term(
            "hidden states of the last norm: in float32, normalised, and its output",
            (_FLOAT32 + 2 * _BF16) * h,
            source="transformers: LlamaRMSNorm computes in float32; the product with the weight saves x's bf16 copy",
        )
        # Where nobody holds the output, their place is free in backward, and too small for what backward makes.
        yield Term("logits, or their place", _BF16 * vocab, source="transformers: CausalLMOutput; torch's allocator")
        yield Term(
            "logarithm of the softmax",
            _FLOAT32 * vocab,
            source="transformers/loss/loss_utils.py: logits.float(); torch's cross_entropy saves log_softmax's output",
        )
        yield Term(
            "gradients of it and of the float32 logits",
            2 * _FLOAT32 * vocab,
            source="torch: nll_loss_backward and _log_softmax_backward_data each make one",
        )

    def _list_made_again(self) -> Iterator[Term]:
        """Of a layer's recomputed forward, without its MLP and attention."""
        h, has_kernels = self.model.hidden_size, bool(self.pieces & {"liger", "tempo"})
        if "host_checkpoints" in self.pieces:
            # Else it is one of the inputs that stand there.
            yield Term("layer's input", _BF16 * h)
        if not has_kernels:
            yield Term(
                "norms in float32 and normalised",
                2 * (_FLOAT32 + _BF16) * h,
                source="transformers: LlamaRMSNorm",
            )
        if "host_checkpoints" in self.pieces and "one_group" not in self.pieces:
            for term in self._list_group():
                yield dataclasses.replace(term, name=f"{term.name}, of the layer before, which comes back")

    def _list_qkv(self, name: str) -> Iterator[Term]:
        m = self.model
        # With fewer groups than ranks each rank has a copy of one.
        groups = max(m.num_query_groups, self.num_gpus)
        yield Term(name, _BF16 * (m.num_attention_heads + 2 * groups) * m.kv_channels)

    def _list_of_mlp(self) -> Iterator[Term]:
        m, h = self.model, self.model.hidden_size
        yield from self._list_made_again()
        yield from self._list_gradient()
        yield Term("gradient of the layer's output", _BF16 * h)
        yield Term("MLP's input before its norm, and after it", 2 * _BF16 * h)
        if "tiled_norms" not in self.pieces:
            # What runs again has made them before the MLP's backward; from tiles they are made for attention's.
            yield Term("first norm's output", _BF16 * h)
            yield from self._list_qkv("q, k and v")
        yield Term("attention's output", _BF16 * h)
        if self.num_gpus > 1:
            yield Term(
                "attention's output behind its all-to-all",
                _BF16 * h,
                source="deepspeed/runtime/sequence_parallel/ulysses_sp.py: the projection keeps a copy",
            )
        yield Term("attention's logsumexp", _FLOAT32 * m.num_attention_heads)
        if "tiled_mlp" in self.pieces:
            yield Term("gradient of the MLP's input", _BF16 * h)
            # A tile has h tokens, with the tempo piece and in ArcticTraining.
            yield Term(
                "gate, up, their product and the gradients of the three, of a tile",
                num_bytes=6 * _BF16 * h * m.ffn_hidden_size,
            )
            if "tempo" in self.pieces:
                yield Term(
                    "gradients of the MLP's three weights, summed over tiles in float32",
                    num_bytes=3 * _FLOAT32 * h * m.ffn_hidden_size,
                    source="tempo_kernels/recompute/tiles.py",
                )
            return
        yield Term("layer's output", _BF16 * h, source="torch/utils/checkpoint.py: holds what it ran again")
        width = _BF16 * m.ffn_hidden_size
        # The product goes where its linear's backward has read it; an activation in place has no more than that moment.
        if "liger" in self.pieces:
            yield Term("gate, up and their product", 3 * width, source="liger_kernel/ops/swiglu.py writes in place")
        elif "tempo" in self.pieces:
            yield Term("gate, up and their gradients", 4 * width, source="tempo_kernels/glu.py")
        else:
            yield Term("gate, its activation, up, gradients of both", 5 * width, source="transformers: LlamaMLP")
        yield Term("gradient of the product", width)

    def _list_of_attention(self) -> Iterator[Term]:
        m, h = self.model, self.model.hidden_size
        yield from self._list_made_again()
        yield from self._list_gradient()
        if "tiled_norms" not in self.pieces:
            yield Term("first norm's output", _BF16 * h)
        yield Term("attention's output", _BF16 * h)
        yield Term("attention's logsumexp and its sums", 2 * _FLOAT32 * m.num_attention_heads)
        yield from self._list_qkv("q, k and v")
        yield from self._list_qkv("their gradients")
        yield Term("gradient of attention's output", _BF16 * h)
        yield Term("gradient of what attention is added to", _BF16 * h)
        if self.num_gpus > 1:
            yield Term(
                "a gradient on both sides of an all-to-all",
                _BF16 * h,
                source="deepspeed/runtime/sequence_parallel/ulysses_sp.py",
            )
        if "tempo" not in self.pieces:
            yield Term("layer's output and its gradient", 2 * _BF16 * h, source="torch/utils/checkpoint.py")
            # ArcticTraining's runs on an H200 have FlashAttention-3.
            yield Term(
                "float32 sums of the gradients of q, k and v",
                self.count_float32_sums(),
                source="flash-attention, hopper/flash_api.cpp: dq_accum, dk_accum and dv_accum of mha_bwd",
            )
        elif not self._has_tempos_attention:
            width = m.num_attention_heads * m.kv_channels
            source = "torch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: {} of mha_bwd"
            yield Term("float32 sums of q's gradient", _FLOAT32 * width, source=source.format("dq_accum"))
            if m.num_query_groups < m.num_attention_heads:
                yield Term(
                    "gradients of k and v of each head, before a group's are added",
                    2 * _BF16 * width,
                    source=source.format("dk_expanded and dv_expanded"),
                )

    def count_float32_sums(self) -> float:
        """Bytes a token that FlashAttention-3 has in backward; each document has a block of rows of its own beside.

        The blocks are kBlockM_sm90 and kBlockN_sm90 of mha_bwd, causal and without a soft cap.
        """
        m, width = self.model, self.model.kv_channels
        rows_of_q, rows_of_k = 128 if width <= 64 else 64, 128 if width <= 128 else 96 if width <= 192 else 80
        q, k = (1 + (rows / self.document_tokens if self.document_tokens else 0) for rows in (rows_of_q, rows_of_k))
        return _FLOAT32 * width * (m.num_attention_heads * q + 2 * m.num_query_groups * k)


def _count(terms: list[Term], num_tokens: int) -> float:
    return sum(term.count(num_tokens) for term in terms)
