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


@dataclasses.dataclass(frozen=True)
class _Price:
    """Of one column of the table, on the rank that needs most."""

    over_even_bytes: int
    """What the peak is higher than with an even division."""

    next_factor: float
    next_bytes: int
    """What the peak is higher with `next_factor`, one _STEP more than the given one where a rank can get it."""


@dataclasses.dataclass(frozen=True)
class TokenImbalance:
    """The assumption of a run whose experts are divided over ranks."""

    ranks: int
    share: int
    """Rows of an equal share in a layer with experts: tokens, once for each of their experts on the rank."""

    most: float
    """Of a rank, over an equal share."""

    factors: Mapping[str, float]
    """Column of the table -> tokens of the fullest rank, over an equal share."""

    prices: Mapping[str, _Price]
    """Column of the table -> its price; none where nobody gave the factor."""

    def describe(self) -> str:
        factors = sorted(set(self.factors.values()))
        source = "given" if self.prices else f"routers at random; --moe-imbalance {factors[-1]:.2f} says what it takes"
        lines = [
            f"assumed token imbalance: experts of the fullest of {self.ranks} ranks "
            f"get {' and '.join(f'{factor:.2f}' for factor in factors)} times an equal share of {self.share:,} "
            f"rows a layer ({source}); at most {self.most:.2f} times"
        ]
        for name, price in self.prices.items():
            more = price.next_factor - self.factors[name]
            rest = f"; {100 * more:.0f} % of a share more would take {format_bytes(price.next_bytes)}" if more else ""
            lines.append(f"{name}: of the peak {format_bytes(price.over_even_bytes)} are due to it{rest}")
        return "\n".join(lines)

    def list_figures(self) -> dict[str, Any]:
        """As JSON has them."""
        return {
            "ranks": self.ranks,
            "rows_of_an_equal_share": self.share,
            "largest_factor": self.most,
            "is_given": bool(self.prices),
            **{
                name.lower(): {
                    "factor": factor,
                    **(dataclasses.asdict(self.prices[name]) if name in self.prices else {}),
                }
                for name, factor in self.factors.items()
            },
        }


def find_token_imbalance(
    run: Run, tempos: Mapping[str, TempoConfig], stages: Mapping[str, tuple[int, RankEstimate]], *, is_given: bool
) -> TokenImbalance:
    """Names the assumption; where it was given, estimates the rank that needs most with other shares of the tokens.

    Args:
        run: as it was estimated; its experts are divided over ranks.
        tempos: column of the table -> Tempo's values in it.
        stages: column of the table -> the stage that needs most, and its estimate.
        is_given: whether somebody gave the factor of `run`.
    """
    most = find_largest_imbalance(run)
    factors, prices = {}, {}
    for name, (stage, rank) in stages.items():
        factors[name] = assume_routing(run, stage).moe_imbalance or 1.0
        if not is_given:
            continue
        further = min(factors[name] + _STEP, most)
        peaks = {factors[name]: rank.peak_bytes}
        for other in {1.0, further} - peaks.keys():
            other_run = dataclasses.replace(set_imbalance(run, other), tempo=tempos[name])
            peaks[other] = estimate_ranks(other_run, only=stage)[0].peak_bytes
        prices[name] = _Price(rank.peak_bytes - peaks[1.0], further, peaks[further] - rank.peak_bytes)
    tokens = run.micro_batch_size * run.model.seq_length // run.layout.cp
    tokens //= run.layout.tp if run.layout.sp else 1
    share = tokens * run.layout.etp * run.model.moe_router_topk
    return TokenImbalance(run.layout.ep, share, most, factors, prices)
