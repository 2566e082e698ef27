"""Draws docs/performance.md from records of static_roofline.py and of the loss head's peaks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from roofline import figures, walks
from roofline.model import CENTRAL, DEVICES, FAST, SLOW, find_share_of_copy, find_time

Records = Mapping[str, Mapping[str, Any]]
"""The last record of each pass, by name, of one Triton for sm_90."""

H100 = DEVICES["H100"]
WAYS = {"one walk": ("forward", "backward"), "two walks": ("forward", "grad_q", "grad_kv")}
SHARE_GOAL = 0.92
HEAD = """<!-- Written by `python benchmarks/static_roofline.py --page`; not to be edited. -->

# How fast the kernels can be

No GPU was at hand: nothing on this page about a GPU was measured. `python benchmarks/static_roofline.py --page` writes
it from the machine code that Triton makes for sm_90 and from the model of `benchmarks/roofline/`, whose files derive
it. `python benchmarks/gpu_suite.py first` measures on a GPU, and its `report` writes the tables between these marks:

<!-- measured on a GPU: begin -->
Nothing yet.
<!-- measured on a GPU: end -->

A figure is the model's, and behind it in brackets its error bar: the same model with a slow and with a fast choice of
what no document says for certain. Rivals have the figures that they published.
"""


class Range(NamedTuple):
    central: float
    least: float
    most: float

    def show(self, form: str = ".0f", factor: float = 1.0) -> str:
        return f"{factor * self.central:{form}} ({factor * self.least:{form}} to {factor * self.most:{form}})"

    def over(self, other: float | Range) -> Range:
        if isinstance(other, Range):
            return Range(self.central / other.central, self.least / other.most, self.most / other.least)
        return Range(*(value / other for value in self))


def draw(
    of_triton: Mapping[str, Records], peaks: Sequence[Mapping[str, Any]], rivals: Sequence[Mapping[str, Any]]
) -> str:
    """The page, from {version of Triton: records}, of which the newest version gives the tables, from the loss head's
    peaks, and from the counts of FlashAttention-2."""
    version = max(of_triton, key=lambda name: [int(part) for part in name.split(".")])
    records = of_triton[version]
    parts = [
        HEAD,
        "## Goals\n",
        _draw_table(("goal", "model", ""), _list_goals(records, of_triton, peaks, rivals)),
        f"## Attention\n\n{_describe_attention(version)}",
        _draw_table(
            (*ATTENTION_COLUMNS, "FlashAttention-2", "its speed without dropout", "FlashAttention-3"),
            _list_attention(records, rivals),
        ),
        _draw_table(("published, H100 SXM", "d", "forward", "causal", "backward", "both"), _list_published()),
        _describe_rivals(records, rivals),
        f"## Everything else\n\n{POINTWISE_NOTE}",
        _draw_table(("pass", "H100, % of a copy", "H200", "bound by", "in the way on an H200"), _list_passes(records)),
        _draw_table(("rival", "kernels", "H100", "source"), figures.POINTWISE),
        FUSION_NOTE,
        *_draw_spills(of_triton),
        f"## The loss head's memory\n\n{PEAK_NOTE}",
        _draw_table(("tokens", "rows of weight", "the head makes", "with its inputs", "SkyRL"), _list_peaks(peaks)),
    ]
    return "\n".join(parts)


def find_range(records: Sequence[Mapping[str, Any]], causal: bool) -> Range:
    """TFLOP/s of attention's passes together."""
    found = walks.find_efficiencies(H100)
    choices = zip((CENTRAL, SLOW, FAST), found, strict=True)
    return Range(*(walks.find_speed(list(records), H100, causal, *choice) for choice in choices))


def find_rival(rivals: Sequence[Mapping[str, Any]], head_dim: int) -> Range:
    """TFLOP/s of FlashAttention-2 with dropout; the most is what it has without, if all of dropout were hidden."""
    with_dropout = (walks.find_speed_with_dropout(rivals, head_dim, H100, chosen) for chosen in (CENTRAL, SLOW))
    return Range(*with_dropout, _find_published("FlashAttention-2", head_dim))


def _find_published(rival: str, head_dim: int) -> float:
    speed = figures.ATTENTION[rival][head_dim].both
    assert speed is not None
    return speed


def _find_ways(records: Records) -> Iterator[tuple[int, float, str, list[Mapping[str, Any]]]]:
    for head_dim in (64, 128):
        for p in (0.1, 0.0):
            for way, names in WAYS.items():
                passes = [records[f"attention {name}, d {head_dim}, p {p:g}"] for name in names]
                yield head_dim, p, way, passes


def _list_goals(
    records: Records,
    of_triton: Mapping[str, Records],
    peaks: Sequence[Mapping[str, Any]],
    rivals: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, ...]]:
    for head_dim, p, way, passes in _find_ways(records):
        if way == "one walk" and p:
            speed = find_range(passes, False)
            found, without = speed.over(find_rival(rivals, head_dim)), _find_published("FlashAttention-2", head_dim)
            shown = f"{found.show('.2f')}; of its published speed without dropout {speed.central / without:.2f}"
            goal = f"attention, d {head_dim}, p {p:g}: at least 1.3x FlashAttention-2 with dropout"
            yield goal, shown, _judge(found.central >= 1.3)
        elif way == "one walk":
            found = find_range(passes, False).over(_find_published("FlashAttention-3", head_dim))
            goal = f"attention, d {head_dim}, p {p:g}: at least 0.8x FlashAttention-3 (the published speed)"
            yield goal, found.show(".2f"), _judge(found.central >= 0.8)
    spilling = sum(one["spilled_bytes"] > 0 for found in of_triton.values() for one in found.values())
    yield "no kernel spills registers", f"{spilling} of {sum(map(len, of_triton.values()))} spill", _judge(not spilling)
    for name, one in records.items():
        if "norm backward" in name:
            shares = {device: _find_shares(one, device) for device in ("H100", "H200")}
            shown = ", ".join(f"{device} {share.show(factor=100)} %" for device, share in shares.items())
            yield f"{name}: 92 % of a copy, tails included", shown, _judge(shares["H200"].central >= SHARE_GOAL)
    for one in peaks:
        if one["tokens"] == 262144 and one["rows"] == 62080:
            goal = "loss head at SkyRL's shape: makes at most 2.5 GB"
            yield goal, f"{one['made_bytes'] / 1e9:.2f} GB", _judge(one["made_bytes"] <= 2.5e9)


def _judge(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def _describe_attention(version: str) -> str:
    mean, least, most = walks.find_efficiencies(H100)
    scale = f"{mean:.2f} ({least:.2f} to {most:.2f})"
    shape = f"{walks.LENGTH} tokens, {walks.HEADS} / d heads times samples"
    return f"""bfloat16, {shape}, triton {version}, an H100 SXM at 1.83 GHz.
TFLOP/s are those of forward and backward together and count 2 products of forward and 5 of backward, as the published
figures do. The model counts the tiles of every program, with the half of the diagonal that is for nothing, the order in
which multiprocessors take programs, waits before a program's first tile and at barriers, additions in the L2 cache,
what one walk reads again because that cache cannot hold it, and launches around the walk. A tile takes
the cycles of its products and those that issue its instructions, less what its warps issue while their own products
are executed; the slow end of the error bar has none of that. All is scaled by
{scale}: what was measured of Triton's tutorial, over what the same model says of its machine code.
Three or four stages gain nothing in it: a tile takes longer than the wait for the next. A persistent grid would take
0.5 to 1.3 % off forward at d 128 by the starts of programs, 1.3 to 2.9 % if it loaded its next queries ahead, too, and
is not built; heads that take turns have most of what its order would gain under a causal limit.
On sm_90 the faster of both is chosen, one walk with as many programs to a head as make it fastest (`choose_splits` in
attention/walks.py). On sm_80 and sm_100 two walks run. There one walk compiles without spills at d 64 and p 0.1, on
sm_80 with tiles of 32 x 64 and one stage: 2656 + 2560 cycles (issue + tensor cores) of 8192 scores where two walks have
3082 + 3584. But each block of 64 keys goes through q, grad_out and the sums again, so that this model gives it 0.86 to
1.26 of their time on an A100, by its splits; at d 128 it spills. On sm_100 it has 4786 + 640, and they have 3146 + 896.
"""


def _list_attention(records: Records, rivals: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for head_dim, p, way, passes in _find_ways(records):
        speed, causal = find_range(passes, False), find_range(passes, True)
        efficiency = walks.find_efficiencies(H100)[0]
        found = [(one["walk"], walks.find_walk(one, H100, False, CENTRAL, efficiency)) for one in passes]
        longest, walk = max(found, key=lambda pair: pair[1].total)
        second, third = (_find_published(name, head_dim) for name in ("FlashAttention-2", "FlashAttention-3"))
        both = (find_rival(rivals, head_dim).central if p else second, second, third)
        ratios = (f"{speed.central / other:.2f}x" for other in both)
        yield f"{head_dim}, {p:g}, {way}", speed.show(), causal.show(), f"{walk.bound} ({longest})", *ratios


def _list_published() -> Iterator[tuple[str, ...]]:
    for name, of_dim in figures.ATTENTION.items():
        for head_dim, speeds in of_dim.items():
            both = "" if speeds.both is None else f"{speeds.both:.0f}"
            yield name, str(head_dim), str(speeds.forward), str(speeds.causal_forward), str(speeds.backward or ""), both


def _describe_rivals(records: Records, rivals: Sequence[Mapping[str, Any]]) -> str:
    counted, lengthened = [], []
    for head_dim, measured in figures.MEASURED_DROPOUT.items():
        passes = [records[f"attention {name}, d {head_dim}, p 0.1"] for name in WAYS["one walk"]]
        ours = sum(one["issue_cycles"] for one in passes)
        issued = [_find_issue_cycles(rivals, head_dim, dropout) for dropout in (True, False)]
        counted.append(f"{ours} beside {issued[0]:.0f} at d {head_dim} ({issued[1]:.0f} without dropout)")
        speed = find_rival(rivals, head_dim)
        longer = Range(*(100 * (speed.most / one - 1) for one in speed))
        shown = f"{longer.central:.0f} % ({longer.most:.0f} to {longer.least:.0f})"
        lengthened.append(f"{shown} at d {head_dim}, {speed.show()} TFLOP/s, where {measured} % was measured")
    lines = [f"Source: {figures.FLASH_ATTENTION_3}. No causal backward is published there. On a B200, TFLOP/s:"]
    lines += [f"{name}: {causal} causal, {full} not;" for name, (causal, full) in figures.BLACKWELL.items()]
    lines += ["pull request 2280 of Dao-AILab/flash-attention; " + figures.BLACKWELL_BEST + "."]
    lines += ["Our kernels for sm_100 are compiled, and not modelled.\n"]
    engine = {name: figures.TRANSFORMER_ENGINE_FLOPS / ms / 1e9 for name, ms in figures.TRANSFORMER_ENGINE.items()}
    lines += [
        "Transformer Engine's attention, forward and backward, d 128, causal, 2048 tokens x 2, 16 heads, TFLOP/s:"
    ]
    lines += ["; ".join(f"{name} {speed:.0f}" for name, speed in engine.items()) + ". Few heads: 32, where ours above"]
    lines += ["has 128. Source: docs/examples/attention/attention.ipynb of NVIDIA/TransformerEngine at 0f60e599.\n"]
    lines += [f"{RIVAL_NOTE}Dropout lengthens its forward and backward by", ";\n".join(lengthened) + "."]
    lines += ["Cycles that issue instructions for 8192 scores, p 0.1, one walk, ours beside its:"]
    return "\n".join([*lines, "; ".join(counted) + ".\n"])


def _find_issue_cycles(rivals: Sequence[Mapping[str, Any]], head_dim: int, dropout: bool) -> float:
    found = [one for one in rivals if one["head_dim"] == head_dim and one["dropout"] == dropout]
    return sum(one["issued"] * one["warps"] / 4 * walks.SCORES / math.prod(one["tile"]) for one in found)


ATTENTION_COLUMNS = ("head dim, dropout, backward", "TFLOP/s", "causal", "bound by")
RIVAL_NOTE = """FlashAttention-2's speed with dropout is published by nobody. Here each pass takes as many times longer
than the published one without as this model says of the machine code of both in torch 2.11 (`--flash-attention`). What
a warp issues while the tensor core is at its product is counted in its favour. At most it is as fast as without, if
other work hides all of dropout; at least, with products as fast as ours and nothing beside them. Beside it
stands what somebody measured of the kernels for sm_120, which take the same instruction for products, on a GB10 (pull
request 2439 of Dao-AILab/flash-attention, 2048 tokens).
"""
POINTWISE_NOTE = """8192 tokens, bfloat16, h 4096, MLP 16384, gated 11008, vocabulary 50304. What bounds a pass is the
largest of its bytes, its instructions and its rounds of waiting programs. In the way is what keeps it under 92 % of a
copy. Behind a norm's backward a second launch adds up the sums over rows, and what both take is in the figure.
"""
FUSION_NOTE = """By hand, fusing the residual's addition with the norm behind it, as Liger and QuACK do, would save 6 of
the 26 bytes that each element of both takes forward and backward: 0.13 ms of a layer at h 4096 and 8192 tokens, whose
matrix products take about 17 ms at 60 % of the peak. It is not built: Megatron calls the two as modules with one tensor
between them, and half of these pairs lie in two layers, between which checkpoints, offload and pipeline stages cut.
"""
SPILL_NOTE = """Bytes that a thread keeps in memory, and how many of the main loop's instructions load or store them.
Others are of numbers from before the loop that are needed behind it, or in the code for a tile across the diagonal.
"""
PEAK_NOTE = """Followed on tensors without memory, as `tempo-megatron estimate` does: hidden states of 2048, bfloat16,
forward and backward, one GPU's rows of the vocabulary, in GB. SkyRL's figures are those of its fused head, from pull
request 1841 of NovaSky-AI/SkyRL; they grow with the tokens as if they held the inputs, too.
"""
SKYRL = {(8192, 62080): 2.1, (262144, 62080): 4.0}


def _find_shares(one: Mapping[str, Any], device: str) -> Range:
    return Range(*(find_share_of_copy(one, DEVICES[device], chosen) for chosen in (CENTRAL, SLOW, FAST)))


def _list_passes(records: Records) -> Iterator[tuple[str, ...]]:
    for name, one in records.items():
        if one["kind"] == "pass":
            shares = (_find_shares(one, device).show(factor=100) for device in ("H100", "H200"))
            yield name, *shares, find_time(one, DEVICES["H200"], CENTRAL).bound, one["obstacle"]


def _draw_spills(of_triton: Mapping[str, Records]) -> list[str]:
    spills = list(_list_spills(of_triton))
    columns = ("attention", *(f"triton {name}" for name in of_triton))
    return [f"## Spilled registers\n\n{SPILL_NOTE}", _draw_table(columns, spills)] if spills else []


def _list_spills(of_triton: Mapping[str, Records]) -> Iterator[tuple[str, ...]]:
    names = dict.fromkeys(name for records in of_triton.values() for name, one in records.items())
    for name in names:
        if any(records[name]["spilled_bytes"] for records in of_triton.values()):
            yield name.removeprefix("attention "), *map(_show_spills, (of[name] for of in of_triton.values()))


def _show_spills(one: Mapping[str, Any]) -> str:
    return f"{one['spilled_bytes']} B, {one['spills_in_loop']} of {one['issued']}"


def _list_peaks(peaks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for one in peaks:
        made, inputs = one["made_bytes"] / 1e9, one["input_bytes"] / 1e9
        skyrl = SKYRL.get((one["tokens"], one["rows"]))
        yield (
            str(one["tokens"]),
            str(one["rows"]),
            f"{made:.2f}",
            f"{made + inputs:.2f}",
            "" if skyrl is None else str(skyrl),
        )


def _draw_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
