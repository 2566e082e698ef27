"""Whole training steps of small models on the CPU, and the peak of each by Follower, beside the estimate's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from runs import build_run
from torch import Tensor

from tempo_kernels.gelu import make_tables
from tempo_megatron import TempoConfig
from tempo_megatron.memory.rank.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.memory.simulated.chunk_model import build_ledger_config
from tempo_megatron.memory.tape.follower import Follower, count_storage_bytes
from tempo_megatron.models.build import build_model, make_inputs
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import choose

OFF, AUTO = TempoConfig.off(), TempoConfig()
RECOMPUTE = TempoConfig(activation="recompute", norm="recompute")
INPLACE_STOCK_HEAD = dataclasses.replace(AUTO, loss="off")
FUSED_ONLY = dataclasses.replace(OFF, loss="fused")

# Many tokens or many weights: what a layer keeps is then several times what it weighs, or the other way round.
TOKENS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 256,
    "vocab_size": 1000,
}
WEIGHTS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "seq_length": 32,
    "vocab_size": 8000,
}
LLAMA: dict[str, Any] = {
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
BERT: dict[str, Any] = {"family": "bert", "num_tokentypes": 2, "add_binary_head": True}
T5: dict[str, Any] = {"family": "t5", "decoder_seq_length": 64}
GQA = {**LLAMA, "num_attention_heads": 8, "num_query_groups": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}
FAMILIES = {"gpt": {}, "llama": LLAMA, "gqa": GQA, "bert": BERT, "t5": T5}


@dataclasses.dataclass(frozen=True)
class Step:
    """One configuration."""

    family: str
    is_wide: bool
    """Whether weights dominate, not tokens."""
    tempo: TempoConfig
    dtype: torch.dtype = torch.bfloat16
    tp: int = 1
    sp: bool = False
    recompute: tuple[str, ...] = ()
    num_full: int | None = None
    """The first layers that full recomputation is for; None is all of them."""

    def __str__(self) -> str:
        tempo = {
            OFF: "off",
            AUTO: "auto",
            RECOMPUTE: "recompute",
            INPLACE_STOCK_HEAD: "stock-head",
            FUSED_ONLY: "fused",
        }
        words = [self.family, "weights" if self.is_wide else "tokens", tempo[self.tempo], str(self.dtype)[6:]]
        words += [f"tp{self.tp}{'sp' if self.sp else ''}", *self.recompute]
        words += [] if self.num_full is None else [str(self.num_full)]
        return "-".join(words)

    @property
    def shape(self) -> ModelShape:
        return make_shape(**{**(WEIGHTS if self.is_wide else TOKENS), **FAMILIES[self.family]})

    @property
    def micro_batch_size(self) -> int:
        return 1 if self.is_wide else 2


Batch = tuple[dict[str, Any], Tensor]
"""A model's arguments, and the loss mask, which is among them where the model takes it."""


def build(step: Step, device: str = "cpu") -> tuple[torch.nn.Module, Callable[[], Batch]]:
    """The step's model with random weights, in model parallelism that is initialised, and what makes a micro batch."""
    shape = step.shape
    config = build_ledger_config(shape, sequence_parallel=step.sp, dtype=step.dtype, recompute=step.recompute)
    if step.num_full is not None:
        config = dataclasses.replace(config, recompute_method="block", recompute_num_layers=step.num_full)
    chosen = choose(config, step.tempo).config
    assert shape.vocab_size is not None
    vocab_size = -(-shape.vocab_size // (128 * step.tp)) * 128 * step.tp
    dropout_rng.set_micro_batch(5, 0)
    model = build_model(shape, config, step.tempo, vocab_size).to(device, step.dtype).train()
    for name, parameter in model.named_parameters():
        # Nothing has filled them, and DeepSpeed leaves out a step whose gradients are not finite. Norms begin with
        # ones: Tempo's in place keeps more of channels whose weight is nearly 0.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.constant_(parameter, float(name.endswith("weight")))

    def make_batch() -> Batch:
        inputs = make_inputs(shape, vocab_size, step.micro_batch_size, causal_mask=chosen.attention == "off")
        # Tokens and labels of a data set are tensors of their own.
        inputs = {name: value if value is None else value.to(device, copy=True) for name, value in inputs.items()}
        (labels,) = inputs.keys() & {"labels", "lm_labels"}
        mask = torch.ones(inputs[labels].shape, device=device)
        takes_mask = shape.family == "gpt" or chosen.loss == "fused"
        return {**inputs, **({"loss_mask": mask} if takes_mask else {})}, mask

    return model, make_batch


def find_loss(model: Callable[..., Any], inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """The mean of a micro batch's losses."""
    losses = model(**inputs)
    losses = losses[0] if isinstance(losses, tuple) else losses
    return (losses.float() * mask).sum() / mask.sum()


@dataclasses.dataclass(frozen=True)
class ReadyStep:
    """A model and a micro batch on a device."""

    forward: Callable[[], Tensor]
    """The loss."""
    there: Sequence[Tensor]
    """What is there before and after: weights and the micro batch."""
    buffers: Sequence[Tensor]


def make_step(step: Step, device: str) -> ReadyStep:
    model, make_batch = build(step, device)
    inputs, mask = make_batch()
    there = {id(t): t for t in (*model.parameters(), *inputs.values(), mask) if t is not None}
    return ReadyStep(lambda: find_loss(model, inputs, mask), list(there.values()), list(model.buffers()))


def start_anew() -> None:
    """Megatron's memory for what sequence parallelism gathers grows and stays: a step before may have left more."""
    make_tables()
    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()


def measure_step(step: Step) -> int:
    """Bytes on the CPU of weights, micro batch and everything that forward and backward make, at most."""
    start_anew()
    ready = make_step(step, "cpu")
    with Follower(*ready.there, *ready.buffers) as seen:
        ready.forward().backward()
    return seen.peak + count_storage_bytes(ready.there)


def make_run(step: Step, **settings: Any) -> Run:
    """The step as a run without an optimizer, of one micro batch; `settings` are other fields of Run."""
    usual = {
        "model": step.shape,
        "tempo": step.tempo,
        "optimizer": OptimizerSettings(kind="none"),
        "tp": step.tp,
        "sp": step.sp,
        "micro_batch_size": step.micro_batch_size,
        "num_micro_batches": 1,
        "dtype": step.dtype,
        "recompute": step.recompute,
        "recompute_num_layers": step.num_full,
        "stock": "cpu",
    }
    return build_run(**{**usual, **settings})


def estimate_step(step: Step, *, simulates_allocator: bool = False, **settings: Any) -> RankEstimate:
    """What the estimate says of it."""
    (rank,) = estimate_ranks(make_run(step, **settings), simulates_allocator=simulates_allocator)
    return rank
