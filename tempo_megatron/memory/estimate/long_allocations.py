"""Plays what a step of a LongSequence allocates on the stream that computes through torch's caching allocator.

The order is that of the code: transformers' LlamaModel and its decoder layer, CheckpointFunction of torch or, with
host_checkpoints, of ArcticTraining (which copies a layer's input back when its backward begins), Liger's kernels in
place of norms, rotary embeddings, SwiGLU and loss, DeepSpeed's linears (LinearFunctionForZeroStage3, the input's
gradient before the weight's) and TiledMLP, and FlashAttention-3. A weight's gradient is used on DeepSpeed's other
stream too (record_stream in stage3.py), so its memory is free when the host has waited for the GPU: here at the end of
its layer, or when the next layer's input comes from the host. The output layer's is larger than a bucket, so the next
weight's sends it to the host, for which DeepSpeed 0.17 waits (partition_grads). Several GPUs exchange heads as
UlyssesSPAttentionHF does (deepspeed/runtime/sequence_parallel/ulysses_sp.py of 0.19.8), each with its share of the
tokens. Nothing is fitted. What other streams have is not played: the terms of a LongSequence have it.
"""

from __future__ import annotations

from tempo_megatron.memory.estimate.allocator import Block, CachingAllocator, ExpandableAllocator
from tempo_megatron.memory.estimate.long_sequences import LongSequence

_PLAYED = frozenset({"liger", "host_checkpoints", "one_group", "tiled_mlp"})
_BF16, _FLOAT32, _INT64 = 2, 4, 8
_STEPS = 2
"""The first leaves what the second finds."""


def count_reserved(long: LongSequence, num_tokens: int) -> int:
    """Bytes that torch has reserved of all streams, with expandable segments, behind two steps. Raises ValueError for
    pieces whose order is not known."""
    return play_steps(long, num_tokens).reserved + sum(term.num_bytes for term in long.list_standing())


def play_steps(long: LongSequence, num_tokens: int) -> CachingAllocator:
    """The allocator of the stream that computes; raises as count_reserved."""
    if more := sorted(long.pieces - _PLAYED):
        raise ValueError(
            f"--allocator is given with the piece {more[0]}, whose allocations are not followed in their order; "
            f"expected some of {', '.join(sorted(_PLAYED))}; leave --allocator or the piece out"
        )
    step = _Step(long, num_tokens)
    for _ in range(_STEPS):
        step.play()
    return step.allocator


class _Step:
    """One step after another. A method makes, and names, the tensors that its code makes, and frees what that frees."""

    def __init__(self, long: LongSequence, num_tokens: int) -> None:
        m, self.pieces = long.model, long.pieces
        self.allocator = ExpandableAllocator()
        self._blocks: dict[str, Block | None] = {}
        self._gradients: list[Block | None] = []
        """Of weights, which another stream may still use."""
        self.tokens, self.num_layers, self.has_liger = num_tokens, m.num_layers, "liger" in long.pieces
        self.vocab, self.hidden, self.ffn = m.vocab_size or 0, m.hidden_size, m.ffn_hidden_size
        self.columns_of_q, self.columns_of_k = m.num_attention_heads * m.kv_channels, m.num_query_groups * m.kv_channels
        self.head, self.num_heads = m.kv_channels, m.num_attention_heads
        # Bytes of [tokens, ...].
        self.x, self.q, self.k = (_BF16 * num_tokens * n for n in (self.hidden, self.columns_of_q, self.columns_of_k))
        # Of q, k and v behind their all-to-all: with fewer groups than GPUs each has a copy of one.
        self.num_gpus = long.num_gpus
        self.local_heads = m.num_attention_heads // long.num_gpus, max(1, m.num_query_groups // long.num_gpus)
        self.k_all = self.k // m.num_query_groups * max(m.num_query_groups, long.num_gpus)
        self.wide, self.of_token = _BF16 * num_tokens * self.ffn, _FLOAT32 * num_tokens
        self.sums = round(long.count_float32_sums() * num_tokens)

    def make(self, **sizes: int) -> None:
        for name, num_bytes in sizes.items():
            assert name not in self._blocks, name
            self._blocks[name] = self.allocator.allocate(num_bytes)

    def free(self, *names: str) -> None:
        for name in names:
            self.allocator.free(self._blocks.pop(name))

    def rename(self, old: str, new: str) -> None:
        self._blocks[new] = self._blocks.pop(old)

    def make_gradient(self, num_elements: int) -> None:
        self._gradients.append(self.allocator.allocate(_BF16 * num_elements))

    def free_gradients(self) -> None:
        for block in self._gradients:
            self.allocator.free(block)
        self._gradients.clear()

    def play(self) -> None:
        on_host, ahead = "host_checkpoints" in self.pieces, "one_group" not in self.pieces
        ids = _INT64 * self.tokens
        self.make(ids=ids, labels=ids, positions=ids, input_0=self.x)
        self.embed_positions()
        for layer in range(self.num_layers):
            self.run_layer(f"input_{layer}", f"input_{layer + 1}", keeps=False)
            if on_host:
                self.free(f"input_{layer}")
        self.train_head(f"input_{self.num_layers}")
        if on_host and ahead:
            self.make(**{f"input_{self.num_layers - 1}": self.x})
        for layer in reversed(range(self.num_layers)):
            if on_host and (layer or not ahead):
                self.make(**{f"input_{layer - ahead}": self.x})
            if on_host:
                self.free_gradients()
            self.run_layer(f"input_{layer}", "output", keeps=True)
            self.run_backward(f"input_{layer}")
        self.make_gradient(self.vocab * self.hidden)
        self.free_gradients()
        self.free("gradient", "cosine", "sine", "ids", "labels", "positions")
        assert not self._blocks, self._blocks.keys()

    def embed_positions(self) -> None:
        """LlamaRotaryEmbedding, in float32."""
        width = _FLOAT32 * self.head * self.tokens
        self.make(frequencies=width // 2, both=width)
        for name in ("cosine", "sine"):
            self.make(**{f"{name}_32": width, f"{name}_scaled": width})
            self.free(f"{name}_32")
        self.free("frequencies", "both")
        self.make(cosine=width // 2, sine=width // 2)
        self.free("cosine_scaled", "sine_scaled")

    def run_layer(self, given: str, output: str, *, keeps: bool) -> None:
        """Without `keeps` only the output is left."""
        self.run_norm("first", keeps)
        self.make(q=self.q, k=self.k, v=self.k)
        self.rotate()
        if self.num_gpus > 1:
            self.attend_together(keeps)
        else:
            self.make(attended=self.q, logsumexp=self.of_token * self.num_heads)
        self.make(projected=self.x)
        if not keeps and self.num_gpus > 1:
            self.free("joined", "first")
        elif not keeps:
            self.free("q", "k", "v", "attended", "logsumexp", "first")
        self.make(middle=self.x)
        self.free("projected")
        self.run_norm("second", keeps)
        self.run_tiles() if "tiled_mlp" in self.pieces else self.run_mlp(keeps)
        if not keeps:
            self.free("second")
        self.make(**{output: self.x})
        self.free("mlp")
        if not (keeps and self.has_liger):  # whose norm keeps its input
            self.free("middle")

    def run_norm(self, name: str, keeps: bool) -> None:
        """LigerRMSNorm, or LlamaRMSNorm, which computes in float32 and keeps the bf16 factor of its weight."""
        kept = [f"{name}_scale"]
        if self.has_liger:
            self.make(**{name: self.x, kept[0]: self.of_token})
        else:
            kept += [f"{name}_32", f"{name}_normalised"]
            self.make(**{kept[1]: 2 * self.x, "square": 2 * self.x, kept[0]: self.of_token})
            self.free("square")
            self.make(product=2 * self.x, **{kept[2]: self.x})
            self.free("product")
            self.make(**{name: self.x})
        if not keeps:
            self.free(*kept)

    def run_norm_backward(self, name: str, gradient: str) -> None:
        """The gradient of the norm's output becomes that of its input: in place with Liger."""
        if self.has_liger:
            self.free(name, f"{name}_scale")
            return
        self.make(weighted=self.x)
        self.free(gradient, name)
        self.make(gradient_32=2 * self.x)
        self.free("weighted", f"{name}_normalised")
        self.make(direct=2 * self.x, of_scale=2 * self.x)
        self.free("gradient_32")
        self.make(of_square=2 * self.x)
        self.free("of_scale", "of_square", f"{name}_32", f"{name}_scale")
        self.make(**{gradient: self.x})
        self.free("direct")

    def rotate(self) -> None:
        """Liger's kernel works in place; apply_rotary_pos_emb makes x cos + rotate_half(x) sin."""
        for name, size in (("q", self.q), ("k", self.k)) if not self.has_liger else ():
            self.make(**{f"{name}_cosine": size}, half=size // 2, rotated=size)
            self.free("half")
            self.make(product=size)
            self.free("rotated")
            self.make(**{f"{name}_rotated": size})
            self.free(f"{name}_cosine", "product")
        if not self.has_liger:
            self.free("q", "k")
            self.rename("q_rotated", "q")
            self.rename("k_rotated", "k")

    def attend_together(self, keeps: bool) -> None:
        """UlyssesSPAttentionHF: a copy of each of q, k and v in the order of ranks is sent, what arrives is copied into
        that of heads, unless there is one, and attention's output goes back; `joined` is what the projection gets."""
        ids = _INT64 * self.tokens * self.num_gpus
        self.make(positions_of_ranks=ids, positions_of_all=ids)
        sizes = {"q": self.q, "k": self.k_all, "v": self.k_all}
        # Where groups are repeated, that copy has gone before what arrives is there.
        for name, size in sizes.items():
            self.make(sent=size, **{f"{name}_received": size})
            self.free("sent")
        for (name, size), heads in zip(sizes.items(), (self.local_heads[0], *[self.local_heads[1]] * 2), strict=True):
            if heads > 1:
                self.make(**{f"{name}_all": size})
                self.free(f"{name}_received")
            else:
                self.rename(f"{name}_received", f"{name}_all")
        self.make(attended=self.q, logsumexp=self.of_token * self.num_heads)
        self.make(returned=self.q, joined=self.q)
        self.free("returned", "positions_of_ranks", "positions_of_all", "q", "k", "v")
        for name in sizes:
            self.rename(f"{name}_all", name)
        if not keeps:
            self.free("q", "k", "v", "attended", "logsumexp")

    def send_gradient(self, name: str, size: int) -> None:
        """Through an all-to-all, of a copy in the order of ranks."""
        self.make(sent=size, received=size)
        self.free("sent", name)
        self.rename("received", name)

    def run_mlp(self, keeps: bool) -> None:
        self.make(gate=self.wide)
        if not self.has_liger:
            self.make(activated=self.wide)
            if not keeps:
                self.free("gate")
        self.make(up=self.wide, product=self.wide)
        if not keeps:
            self.free("up", "gate" if self.has_liger else "activated")
        self.make(mlp=self.x)
        if not keeps:
            self.free("product")

    def run_mlp_backward(self) -> None:
        """Leaves the gradient of the MLP's input. Liger's SwiGLU writes the gradients of gate and up over them."""
        weight = self.hidden * self.ffn
        self.make(of_product=self.wide)
        self.make_gradient(weight)
        self.free("product")
        if not self.has_liger:
            self.make(of_up=self.wide, of_activated=self.wide)
            self.free("of_product", "activated", "up")
            self.make(of_gate=self.wide)
            self.free("of_activated", "gate")
            self.rename("of_up", "up")
            self.rename("of_gate", "gate")
        else:
            self.free("of_product")
        self.make(of_second=self.x)
        self.make_gradient(weight)
        self.free("up")
        self.make(another=self.x)
        self.make_gradient(weight)
        self.free("gate", "another")

    def list_tiles(self) -> list[int]:
        """Tokens of each: as many tiles as the hidden size goes into the tokens, rounded up, each of as many tokens."""
        size = -(-self.tokens // -(-self.tokens // self.hidden))
        return [min(size, self.tokens - first) for first in range(0, self.tokens, size)]

    def run_tiles(self) -> None:
        names = []
        for number, tokens in enumerate(self.list_tiles()):
            width = _BF16 * tokens * self.ffn
            names.append(f"tile_{number}")
            self.make(gate=width, up=width, product=width)
            self.free("gate", "up")
            self.make(**{names[-1]: _BF16 * tokens * self.hidden})
            self.free("product")
        self.make(mlp=self.x)  # of torch.cat
        self.free(*names)

    def run_tiles_backward(self) -> None:
        weight = self.hidden * self.ffn
        self.make(of_second=self.x)
        for number, tokens in enumerate(self.list_tiles()):
            width, narrow = _BF16 * tokens * self.ffn, _BF16 * tokens * self.hidden
            self.make(gate=width, up=width, product=width, tile=narrow)
            for made, size, freed in (
                ("of_product", width, ("product", "of_product")),
                ("of_tile", narrow, ("up",)),
                ("another", narrow, ("gate", "another", "of_tile", "tile")),
            ):
                self.make(**{made: size})
                self.make_gradient(weight)
                if number:  # added to that of the first tile
                    self.allocator.free(self._gradients.pop())
                self.free(*freed)

    def run_backward(self, given: str) -> None:
        """`gradient` becomes that of the layer's input."""
        self.run_tiles_backward() if "tiled_mlp" in self.pieces else self.run_mlp_backward()
        self.run_norm_backward("second", "of_second")
        if self.has_liger:
            self.free("middle")
        self.make(of_middle=self.x)
        self.free("of_second")
        self.make(of_attended=self.q)
        self.make_gradient(self.hidden * self.columns_of_q)
        if self.num_gpus > 1:
            self.free("joined")
            self.send_gradient("of_attended", self.q)
        statistics = self.of_token * self.num_heads
        self.make(of_q=self.q, of_k=self.k_all, of_v=self.k_all)
        self.make(dots=statistics, logarithms=statistics, sums=self.sums)
        self.free("dots", "logarithms", "sums", "q", "k", "v", "attended", "logsumexp", "of_attended")
        for name, size in {"of_v": self.k_all, "of_k": self.k_all, "of_q": self.q}.items() if self.num_gpus > 1 else ():
            self.send_gradient(name, size)
            # The projection's backward takes a copy in the order of heads.
            self.make(copied=size)
            self.free(name)
            self.rename("copied", name)
        self.make(of_first=self.x)
        self.make_gradient(self.hidden * self.columns_of_k)
        self.free("of_v")
        for name, columns in (("of_k", self.columns_of_k), ("of_q", self.columns_of_q)):
            self.make(another=self.x)
            self.make_gradient(self.hidden * columns)
            self.free(name, "another")
        self.run_norm_backward("first", "of_first")
        self.free("of_first", given, "output", "gradient")  # added to that of the middle, in place
        self.rename("of_middle", "gradient")
        if "host_checkpoints" not in self.pieces:
            self.free_gradients()

    def train_head(self, given: str) -> None:
        """Norm, output layer and loss, forward and backward; leaves the gradient of the last layer's output."""
        self.run_norm("last", True)
        if self.has_liger:
            self.run_fused_loss()
        else:
            self.run_loss()
        self.run_norm_backward("last", "gradient")
        self.free(given)
        self.free_gradients()

    def run_fused_loss(self) -> None:
        """LigerFusedLinearCrossEntropy: gradients in the forward, of chunks of a power of two of tokens."""
        self.make(gradient=self.x)
        self.make_gradient(self.vocab * self.hidden)
        self.make(losses=self.of_token)
        size = 1
        while size < -(-self.tokens // -(-self.vocab // self.hidden)):
            size *= 2
        for first in range(0, self.tokens, size):
            tokens = min(size, self.tokens - first)
            self.make(logits=_BF16 * tokens * self.vocab, of_chunk=_BF16 * tokens * self.hidden)
            self.free("of_chunk")
            self.make(product=_BF16 * self.vocab * self.hidden)
            self.free("product", "logits")
        self.free("losses")

    def run_loss(self) -> None:
        """ForCausalLMLoss: cross_entropy of float32 logits; nobody holds the logits in backward."""
        logits, ids = _BF16 * self.tokens * self.vocab, _INT64 * self.tokens
        self.make(logits=logits, logits_32=2 * logits, padded=ids + _INT64, shifted=ids)
        self.free("padded")
        self.make(logarithms=2 * logits)
        self.free("logits_32", "logits")
        self.make(of_logarithms=2 * logits, of_logits_32=2 * logits)
        self.free("of_logarithms", "logarithms", "shifted")
        self.make(of_logits=logits)
        self.free("of_logits_32")
        self.make(gradient=self.x)
        self.make_gradient(self.vocab * self.hidden)
        self.free("of_logits")
