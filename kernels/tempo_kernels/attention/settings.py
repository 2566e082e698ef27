"""Holds attention's arguments: Inputs are its tensors, Settings its numbers, Kept what backward gets of forward, and
Gradients what it returns. Below them are the groups of arguments that every Triton kernel of attention takes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tempo_kernels.opaque import join_draw, split_draw
from tempo_kernels.philox import effective_probability

MASKED_SCORE = -10000.0
"""What Megatron writes over masked scores; a row whose every key is masked attends to all of them equally."""
MASKED_SCORES = {"uniform": MASKED_SCORE, "added": MASKED_SCORE, "zero": float("-inf")}
"""What a mask writes over scores, by what rows get whose keys it hides all: `attention` says what the words mean."""
HIDING_BIAS = -1e30
"""A bias below this number hides its key: minus infinity does, and the lowest number of float32 and of bfloat16."""
OPERANDS = (
    "bool causal, float softmax_scale, float dropout_p, SymInt key_low, SymInt key_high, SymInt sample, "
    "SymInt first_head, int[]? window_size, SymInt first_row, SymInt? first_column, float? softcap, str hidden_rows, "
    "Tensor? key, Tensor? first_sample"
)


class Inputs(NamedTuple):
    """The tensors, with the shapes and dtypes that `attention` documents."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None

    cu_seqlens: Tensor | None = None
    """Where the documents of a packed row begin and end; None where the row is not packed."""
    cu_seqlens_k: Tensor | None = None
    document_samples: Tensor | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The softmax's: float32, for float64 inputs float64."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def num_documents(self) -> int | None:
        """None where the row is not packed."""
        return None if self.cu_seqlens is None else max(0, self.cu_seqlens.numel() - 1)


class Kept(NamedTuple):
    """Forward's results that backward needs: the logsumexp, or in the softmax form the probabilities, and both where
    there is a sink."""

    out: Tensor | None
    logsumexp: Tensor | None
    probabilities: Tensor | None = None
    is_part: bool = False
    """Whether out and logsumexp are of more keys than are here. Gradients then have the dtype of the softmax."""


class Gradients(NamedTuple):
    """The gradients of Inputs' tensors of the same names."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers. Two of them, dropout_key and first_sample, may be 0-dim tensors."""

    causal: bool
    softmax_scale: float
    dropout_p: float = 0.0
    dropout_key: int | Tensor = 0
    first_sample: int | Tensor = 0
    first_head: int = 0
    window_size: tuple[int, int] | None = None
    first_row: int = 0
    first_column: int | None = None
    softcap: float | None = None
    hidden_rows: str = "uniform"

    def is_plain(self, inputs: Inputs) -> bool:
        """Whether scores stay as they are, and there is neither dropout nor a mask."""
        changes = (inputs.mask, inputs.bias, inputs.alibi_slopes, inputs.sink, self.softcap)
        return self.dropout_p == 0 and all(change is None for change in changes)

    @property
    def operands(self) -> tuple[Any, ...]:
        """Returns the flat operands of an operator, in the order of the schema OPERANDS. At the end are dropout_key and
        first_sample where they are tensors, which autograd keeps and checks for changes."""
        window = None if self.window_size is None else list(self.window_size)
        numbers, tensors = split_draw(self.dropout_key, self.first_sample)
        rest = (self.first_row, self.first_column, self.softcap, self.hidden_rows, *tensors)
        return self.causal, self.softmax_scale, self.dropout_p, *numbers, self.first_head, window, *rest

    @classmethod
    def of(cls, *operands: Any) -> Settings:
        """Builds the settings from what `operands` returned."""
        causal, scale, p, low, high, number, first_head, window, *rest, key, first_sample = operands
        draw = join_draw(low, high, number, key, first_sample)
        return cls(causal, scale, p, *draw, first_head, None if window is None else tuple(window), *rest)

    @property
    def keep_scale(self) -> float:
        """1 / (1 - p): the factor of the probabilities that survive dropout."""
        return 1.0 / (1.0 - effective_probability(self.dropout_p))

    def compute_diagonal(self, num_queries: int, num_keys: int) -> int:
        """Returns the number that makes i + diagonal the key at query i's own position."""
        # With fewer queries than keys the last query sees the last key, unless positions are given.
        return num_keys - num_queries if self.first_column is None else self.first_row - self.first_column

    def compute_window(self, num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
        """Returns (first, last): query i sees keys i + first to i + last. None is no limit."""
        diagonal = self.compute_diagonal(num_queries, num_keys)
        left, right = self.window_size or (-1, -1)
        if self.causal:
            right = 0
        return (None if left < 0 else diagonal - left, None if right < 0 else diagonal + right)


class Extras(NamedTuple):
    """Tensors that a call may have; a kernel has no code for one that is None."""

    mask: Tensor | None
    """uint8, broadcast by strides of 0 to [b, a, sq, sk], as the bias is."""
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    key: Tensor | None
    """The dropout key and the first sample, where they are device data."""
    first_sample: Tensor | None
    boundaries: Tensor | None
    """Where the documents of a packed row begin and end among queries and among keys, and the sample of each."""
    key_boundaries: Tensor | None
    samples: Tensor | None


class Step(NamedTuple):
    """Strides from one row, sample and head to the next; 0 where there is one only. They are in units of Call.UNIT
    elements: the kernel's multiplication by UNIT is how the compiler learns that rows are aligned to 16 bytes."""

    row: int
    sample: int
    head: int


class ScoreStep(NamedTuple):
    """Strides, in elements, of what is broadcast to the scores [b, a, sq, sk]."""

    sample: int
    head: int
    row: int
    column: int


class Steps(NamedTuple):
    q: Step
    k: Step
    v: Step
    grad_out: Step
    """Zeros in forward."""
    mask: ScoreStep
    bias: ScoreStep


class Sizes(NamedTuple):
    """How many there are, in a packed row of all documents together."""

    num_queries: int
    num_keys: int
    batch: int
    num_heads: int
    group_size: int
    """Query heads that share a key-value head."""
    num_documents: int


class Places(NamedTuple):
    """Which keys a query sees, and where a part of a row stands in the whole one."""

    first_offset: int | None
    """Query i sees keys i + first_offset to i + last_offset, in a packed row those of a document as long as its keys.
    None is no limit."""
    last_offset: int | None
    diagonal: int
    """The key at query i's own position is i + diagonal."""
    first_row: int | None
    """The global position of the first query and key, by which dropout draws; None is 0."""
    first_column: int | None


class Draw(NamedTuple):
    """How dropout draws; the words of the key and the first sample, which change with every step, are kernel arguments
    of their own."""

    first_head: int
    limit: int | None
    """Dropped are numbers of 16 bits below it; None is no dropout."""
    keep_scale: float
    """1 / (1 - p)."""


class Scores(NamedTuple):
    """What happens to a score. Kernels hold scores unscaled: scale is applied in the exponent."""

    scale: float
    """softmax_scale * log2(e), for powers of two."""
    softmax_scale: float
    inverse_scale: float
    masked_score: float
    """What the mask writes, unscaled."""
    cap: float | None
    """The softcap, unscaled."""


class Call(NamedTuple):
    """The numbers of a call, and in capitals what the code of its kernels depends on: constants of the compiler."""

    steps: Steps
    sizes: Sizes
    places: Places
    draw: Draw
    scores: Scores
    UNIT: Any
    """8 where all steps of q, k, v and grad_out are multiples of 8 elements, else 1."""
    HIDES_FIRST: Any
    """Whether dropout draws by positions in the packed row; see kernel_program._enter_document."""
    ADDS_MASK: Any
    """Whether scores that the mask hides get a gradient (hidden_rows="added")."""
    BRANCHES: Any
    """Whether a tile in which every query sees every key jumps over the masking code. Before sm_90 the compiler would
    lose the layout of the tensor cores there, which the next product needs."""
    KEEPS_APART: Any
    """Whether kernel_scores.keep_apart is needed: on sm_90 with tensor cores."""
    HEAD_DIM: Any
    BLOCK_DIM: Any
    """HEAD_DIM rounded up to a power of two, at least 16."""
    VALUE_DIM: Any
    VALUE_BLOCK: Any
    BLOCK_QUERIES: Any
    BLOCK_KEYS: Any


class BiasSizes(NamedTuple):
    """Of how many samples and heads a bias is, and whether it is of one query (a constant of the compiler)."""

    num_samples: int
    num_heads: int
    SUMS_QUERIES: Any
