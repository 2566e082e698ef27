"""Names what an estimate assumes of the experts' tokens, with its figures.

Where tokens go no estimate can know. So the assumption stands beside the table: how many tokens the fullest rank gets,
and the most that a rank can get. Where somebody gave the share, its price stands there, too: what it takes more than an
even division, and what a tenth of an equal share more would take. Each price is an estimate again, and takes seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tempo_megatron.memory.rank.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.routing import assume_routing, find_largest_imbalance, set_imbalance
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.argument_types import format_bytes

_STEP = 0.1


def compute_token_imbalance(
    run: Run, tempos: Mapping[str, TempoConfig], stages: Mapping[str, tuple[int, RankEstimate]], *, is_given: bool
) -> dict[str, Any]:
    """The assumption, as JSON has it; where it was given, with other shares on the rank that needs most.

    Args:
        run: as it was estimated; its experts are divided over ranks.
        tempos: column of the table -> Tempo's values in it.
        stages: column of the table -> the stage that needs most, and its estimate.
        is_given: whether somebody gave the factor of `run`.
    """
    most = find_largest_imbalance(run)
    tokens = run.micro_batch_size * run.model.seq_length // run.layout.cp
    tokens //= run.layout.tp if run.layout.sp else 1
    figures: dict[str, Any] = {
        "ranks": run.layout.ep,
        # Tokens, once for each of their experts on the rank.
        "rows_of_an_equal_share": tokens * run.layout.etp * run.model.moe_router_topk,
        "largest_factor": most,
        "is_given": is_given,
    }
    for name, (stage, rank) in stages.items():
        factor = assume_routing(run, stage).moe_imbalance or 1.0
        figures[name.lower()] = {"factor": factor}
        if is_given:
            further = min(factor + _STEP, most)
            peaks = {factor: rank.peak_bytes}
            for other in {1.0, further} - peaks.keys():
                other_run = dataclasses.replace(set_imbalance(run, other), tempo=tempos[name])
                peaks[other] = estimate_ranks(other_run, only=stage)[0].peak_bytes
            figures[name.lower()] |= {
                "over_even_bytes": rank.peak_bytes - peaks[1.0],
                "next_factor": further,
                "next_bytes": peaks[further] - rank.peak_bytes,
            }
    return figures


def describe_token_imbalance(figures: Mapping[str, Any]) -> str:
    """A line for people, and one for each column where the factor was given."""
    columns = {name: figures[name.lower()] for name in ("stock", "Tempo") if name.lower() in figures}
    factors = sorted({column["factor"] for column in columns.values()})
    source = (
        "given" if figures["is_given"] else f"routers at random; --moe-imbalance {factors[-1]:.2f} says what it takes"
    )
    lines = [
        f"assumed token imbalance: experts of the fullest of {figures['ranks']} ranks "
        f"get {' and '.join(f'{factor:.2f}' for factor in factors)} times an equal share of "
        f"{figures['rows_of_an_equal_share']:,} rows a layer ({source}); at most {figures['largest_factor']:.2f} times"
    ]
    for name, column in columns.items() if figures["is_given"] else ():
        more, rest = column["next_factor"] - column["factor"], ""
        if more:
            rest = f"; {100 * more:.0f} % of a share more would take {format_bytes(column['next_bytes'])}"
        lines.append(f"{name}: of the peak {format_bytes(column['over_even_bytes'])} are due to it{rest}")
    return "\n".join(lines)
