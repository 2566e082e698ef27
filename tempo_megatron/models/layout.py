"""Layout: how a model lies over devices, which of them can share its layers, and its vocabulary for them."""

from __future__ import annotations

import dataclasses

from tempo_megatron.models.shape import ModelShape, name_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies over devices: the sizes of its parallel groups, by Megatron's letters."""

    tp: int = 1
    """Ranks that share a layer (tensor)."""

    pp: int = 1
    """Stages (pipeline)."""

    dp: int = 1
    """Ranks with samples of their own (data)."""

    cp: int = 1
    """Ranks that share the tokens of a sample (context)."""

    sp: bool = False
    """Whether tensor-parallel ranks share the tokens outside of attention and MLP (sequence)."""

    ep: int = 1
    """Ranks that share the experts of a layer."""

    etp: int = 1
    """Ranks that share one expert."""

    chunks: tuple[int, ...] | None = None
    """How many layers each chunk of the pipeline has, in the order of the model: stage 0 has the first, and in turn one
    of each `pp` of the rest. None is one chunk for each stage, all alike."""

    dispatcher: str = "allgather"
    """What brings tokens to experts: Megatron's "allgather", "alltoall" or "flex"."""

    overlaps: bool = False
    """Whether one micro batch's forward runs during another's backward (--overlap-moe-expert-parallel-comm)."""

    @property
    def world_size(self) -> int:
        return self.pp * self.ranks_of_stage

    @property
    def ranks_of_stage(self) -> int:
        """Devices of one pipeline stage."""
        return self.tp * self.cp * self.dp


def check_layout(shape: ModelShape, layout: Layout, option: str = "--tensor-model-parallel-size") -> None:
    """Raise ValueError, which calls tensor parallelism by `option`, where this many devices cannot share a layer."""
    tp = layout.tp
    sharing = {
        **{"num_attention_heads": tp, "ffn_hidden_size": tp, "moe_ffn_hidden_size": layout.etp},
        "moe_shared_expert_intermediate_size": tp,
    }
    for name, number in sharing.items():
        if (value := getattr(shape, name)) is not None and value % number:
            raise ValueError(f"{name_field(name)} {value} is not a multiple of {option} {number}; change one of them")
    groups = shape.num_query_groups
    if groups % tp and tp % groups:
        raise ValueError(f"--num-query-groups {groups} and {option} {tp} do not divide one another; change one of them")
    if not layout.sp:
        return
    if tp == 1:
        raise ValueError(f"--sequence-parallel needs {option} of at least 2; remove it or raise that")
    for name in ("seq_length", "decoder_seq_length"):
        if (length := getattr(shape, name)) is not None and length % tp:
            raise ValueError(
                f"{name_field(name)} {length} is not a multiple of {option} {tp}, as --sequence-parallel needs; "
                "change one of them"
            )


def pad_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tp: int) -> int:
    """The smallest multiple of make_vocab_size_divisible_by * tp that holds vocab_size tokens.

    Raises: ValueError where one of the three is below 1.
    """
    if min(vocab_size, make_vocab_size_divisible_by, tp) < 1:
        raise ValueError(
            f"vocab_size {vocab_size}, make_vocab_size_divisible_by {make_vocab_size_divisible_by} and tensor parallel "
            f"size {tp} are given; expected at least 1 for each, correct the one below"
        )
    multiple = make_vocab_size_divisible_by * tp
    return -(-vocab_size // multiple) * multiple
