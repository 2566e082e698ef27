"""Plans the launches of attention's passes: all launch arguments that follow from shapes, strides and settings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from tempo_kernels.attention import kernel_heads as whole_heads
from tempo_kernels.attention.kernel_tile import DRAWN
from tempo_kernels.attention.settings import MASKED_SCORES, Settings
from tempo_kernels.attention.walks import Shape, Splits, group_heads, round_up, shape_statistics, shape_sums
from tempo_kernels.kernel_launch import Plan, cache_plans
from tempo_kernels.philox import effective_probability

PIPELINES_BRANCHES = not triton.__version__.startswith("3.2.")  # triton 3.2 cannot order loads around branches

Strides = tuple[int, ...]

_NO_LIMIT = -(1 << 30)  # an offset that no row reaches


class Form(NamedTuple):
    """All that a call's launches depend on, apart from its tensors and the numbers that DRAWN names."""

    q_shape: torch.Size
    k_shape: torch.Size
    v_shape: torch.Size
    strides: tuple[Strides, ...]
    """Of q, k, v and, in backward, grad_out."""
    mask_strides: Strides | None
    has_lengths: bool
    loads_key: bool
    loads_sample: bool
    is_precise: bool
    causal: bool
    softmax_scale: float
    dropout_p: float
    window_size: tuple[int, int] | None
    first_row: int
    first_column: int | None
    softcap: float | None
    hidden_rows: str
    bias_strides: Strides | None
    has_slopes: bool
    has_sink: bool
    num_documents: int | None
    """None where the row is not packed."""
    loads_samples: bool


class WalkPlans(NamedTuple):
    """The plans of backward in two walks."""

    statistics_shape: tuple[int, ...]
    grad_q: Plan
    grad_kv: Plan


class HeadsPlans(NamedTuple):
    """The plans of backward in one walk."""

    statistics_shape: tuple[int, ...]
    sums_shape: tuple[int, ...]
    launches: whole_heads.HeadPlans


@cache_plans
def plan_forward(form: Form, shape: Shape) -> Plan:
    """Plans `kernel_rows.launch_forward`."""
    num_queries, batch, heads, _ = form.q_shape
    num_keys, _, groups, _ = form.k_shape
    blocks = _count_blocks(form, num_queries, shape.queries)
    numbers = _list_numbers(form, shape) | {"DESCRIBES": False}
    numbers["heads_in_turn"] = _group_kv_heads(form, num_keys) * (heads // groups)
    return Plan((blocks * batch * heads,), DRAWN, **numbers)


@cache_plans
def plan_two_walks(form: Form, shape: Shape, kv_shape: Shape, keeps_apart: bool) -> WalkPlans:
    """Plans `kernel_rows.launch_grad_q` and `kernel_columns.launch_grad_kv`."""
    num_queries, batch, heads, _ = form.q_shape
    num_keys, _, groups, _ = form.k_shape
    blocks, kv_blocks = _count_blocks(form, num_queries, shape.queries), _count_blocks(form, num_keys, kv_shape.keys)
    scale, group_size = form.softmax_scale, heads // groups
    numbers, kv_numbers = _list_numbers(form, shape), _list_numbers(form, kv_shape) | {"KEEPS_APART": keeps_apart}
    numbers["heads_in_turn"] = _group_kv_heads(form, num_keys) * group_size
    kv_numbers["heads_in_turn"] = _group_kv_heads(form, num_queries * group_size)
    return WalkPlans(
        shape_statistics(form.q_shape),
        Plan((blocks * batch * heads,), DRAWN, softmax_scale=scale, **numbers),
        Plan((kv_blocks * batch * groups,), DRAWN, softmax_scale=scale, **kv_numbers),
    )


@cache_plans
def plan_one_walk(form: Form, shape: Shape, splits: Splits) -> HeadsPlans:
    """Plans the three launches of kernel_heads.py."""
    statistics_shape, sums_shape = shape_statistics(form.q_shape), shape_sums(form.q_shape, splits.keys)
    _, batch, heads, padded = statistics_shape
    numbers = _list_numbers(form, shape) | {"DESCRIBES": False}
    numbers |= {"softmax_scale": form.softmax_scale, "KEEPS_APART": True}
    numbers |= {"KEY_SPLITS": splits.keys, "QUERY_SPLITS": splits.queries}
    # A warp has at least 16 columns of grad_q and 8 of its rows; where there are more warps, they share the rows.
    numbers["PARTS"] = max(1, min(shape.warps * 16 // numbers["BLOCK_DIM"], shape.queries // 8))
    num_row_blocks, num_kv_heads = padded // shape.queries * batch * heads, batch * form.k_shape[2]
    return HeadsPlans(
        statistics_shape,
        sums_shape,
        whole_heads.plan_heads(num_row_blocks, num_kv_heads, **numbers),
    )


@cache_plans
def plan_grad_bias(form: Form, shape: Shape, bias_shape: torch.Size) -> Plan:
    """Plans `kernel_bias.launch_grad_bias`."""
    samples, heads, rows, num_keys = bias_shape
    num_queries = form.q_shape[0]
    sums_queries = rows < num_queries
    blocks = -(-num_keys // shape.keys) * (1 if sums_queries else -(-num_queries // shape.queries))
    numbers = {"bias_samples": samples, "bias_heads": heads, "SUMS_QUERIES": sums_queries}
    return Plan((blocks * samples * heads,), DRAWN, **numbers, **_list_numbers(form, shape))


def _count_blocks(form: Form, num_rows: int, block: int) -> int:
    """How many blocks of queries or keys a row has; of a packed row at most, as kernel_documents.py says."""
    return -(-num_rows // block) if form.num_documents is None else num_rows // block + form.num_documents


def _group_kv_heads(form: Form, rows_read: int) -> int:
    """How many key-value heads take turns in a launch whose programs read so many rows of each; one where no block of a
    row takes longer than the next, and where documents have lengths of their own."""
    if not form.causal or form.num_documents is not None:
        return 1
    _, batch, groups, _ = form.k_shape
    return group_heads(batch * groups, rows_read * (form.q_shape[3] + form.v_shape[3]) * 2)


def _list_numbers(form: Form, shape: Shape) -> dict[str, Any]:
    """Lists the launch arguments that all passes share: neither tensors nor numbers of a single call."""
    (num_queries, batch, heads, head_dim), (num_keys, _, groups, _) = form.q_shape, form.k_shape
    value_dim = form.v_shape[3]
    shapes = (form.q_shape, form.k_shape, form.v_shape, form.q_shape)
    steps = {
        f"{name}_{axis}": stride if size > 1 else 0
        for name, sizes, strides in zip("q k v grad".split(), shapes, form.strides, strict=False)
        for axis, size, stride in zip(("row", "sample", "head"), sizes[:3], strides[:3], strict=True)
    }
    # Strides are passed in units of 8 elements where they can be: as varying arguments they are not specialized, and
    # the multiplication by UNIT is how the compiler learns that loads are aligned to 16 bytes.
    unit = 8 if all(step % 8 == 0 for step in steps.values()) else 1
    firsts = (form.first_row, form.first_column)
    limits = Settings(form.causal, form.softmax_scale, form.dropout_p, None, None, 0, form.window_size, *firsts)
    # In a packed row the numbers of queries and keys are those of a document, which adds their difference itself.
    is_packed = form.num_documents is not None
    lengths = (0, 0) if is_packed else (num_queries, num_keys)
    first, last = limits.find_window(*lengths)
    p = effective_probability(form.dropout_p)
    mask_names = ("mask_sample", "mask_head", "mask_row", "mask_column")
    bias_names = ("bias_sample", "bias_head", "bias_row", "bias_column")
    hides_first = is_packed and p > 0 and not form.loads_samples
    return {
        **{name: step // unit for name, step in steps.items()},
        **dict(zip(mask_names, form.mask_strides or (0, 0, 0, 0), strict=True)),
        **dict(zip(bias_names, form.bias_strides or (0, 0, 0, 0), strict=True)),
        "num_queries": num_queries,
        "num_keys": num_keys,
        "batch": batch,
        "num_heads": heads,
        "group_size": heads // groups,
        "first_offset": _NO_LIMIT if first is None and hides_first else first or 0,
        "last_offset": last or 0,
        "first_row": form.first_row,
        "first_column": form.first_column or 0,
        "diagonal": limits.find_diagonal(*lengths),
        "num_documents": form.num_documents or 0,
        "cap": (form.softcap or 0.0) / form.softmax_scale,
        "inverse_scale": 1.0 / form.softmax_scale,
        "scale": form.softmax_scale * math.log2(math.e),
        "masked_score": MASKED_SCORES[form.hidden_rows] / form.softmax_scale,
        "limit": round(p * 65536),
        "keep_scale": 1.0 / (1.0 - p),
        "UNIT": unit,
        "LIMITS_LEFT": first is not None or hides_first,
        "LIMITS_RIGHT": last is not None,
        # 2 where hidden scores get a gradient.
        "HAS_MASK": 2
        if form.mask_strides is not None and form.hidden_rows == "added"
        else form.mask_strides is not None,
        "HAS_LENGTHS": form.has_lengths,
        "DRAWS": p > 0,
        "LOADS_KEY": form.loads_key,
        "LOADS_SAMPLE": form.loads_sample,
        "PRECISE": form.is_precise,
        "IS_PART": any(firsts) or hides_first,
        "HAS_CAP": form.softcap is not None,
        "HAS_BIAS": form.bias_strides is not None,
        "HAS_SLOPES": form.has_slopes,
        "HAS_SINK": form.has_sink,
        "IS_PACKED": is_packed,
        "LOADS_SAMPLES": form.loads_samples,
        "HIDES_FIRST": hides_first,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": round_up(head_dim),
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": round_up(value_dim),
        "BLOCK_QUERIES": shape.queries,
        "BLOCK_KEYS": shape.keys,
        "BRANCHES": shape.branches and PIPELINES_BRANCHES,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
        "enable_fp_fusion": True,
    }
