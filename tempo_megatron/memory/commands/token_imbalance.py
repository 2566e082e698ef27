"""Names what an estimate assumes of the experts' tokens, with its figures.

Where tokens go no estimate can know. So the assumption stands beside the table: how many tokens the fullest rank gets,
what that takes more than an even division, what each tenth of an equal share more would take, and the most that a rank
can get.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tempo_megatron.memory.estimate.estimate import RankEstimate, estimate_ranks
from tempo_megatron.memory.routing import assume_routing, find_largest_imbalance, set_imbalance
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.argument_types import format_bytes

_STEP = 0.1


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Of one column of the table, on the rank that needs most."""

    factor: float
    """Tokens of the fullest rank, over an equal share."""

    over_even_bytes: int
    """What the peak is higher than with an even division."""

    next_factor: float
    next_bytes: int
    """What the peak is higher with `next_factor`, one _STEP more than `factor` where a rank can get it."""


@dataclasses.dataclass(frozen=True)
class TokenImbalance:
    """The assumption of a run whose experts are divided over ranks."""

    ranks: int
    share: int
    """Rows of an equal share in a layer with experts: tokens, once for each of their experts on the rank."""

    most: float
    """Of a rank, over an equal share."""

    is_given: bool
    costs: Mapping[str, _Cost]
    """Column of the table -> its cost."""

    def describe(self) -> str:
        source = "given" if self.is_given else "routers at random; --moe-imbalance gives another one"
        factors = {cost.factor for cost in self.costs.values()}
        lines = [
            f"assumed token imbalance: experts of the fullest of {self.ranks} ranks "
            f"get {' and '.join(f'{factor:.2f}' for factor in sorted(factors))} times an equal share of {self.share:,} "
            f"rows a layer ({source}); at most {self.most:.2f} times"
        ]
        for name, cost in self.costs.items():
            more = cost.next_factor - cost.factor
            rest = f"; {100 * more:.0f} % of a share more would take {format_bytes(cost.next_bytes)}" if more else ""
            lines.append(f"{name}: of the peak {format_bytes(cost.over_even_bytes)} are due to it{rest}")
        return "\n".join(lines)

    def list_figures(self) -> dict[str, Any]:
        """As JSON has them."""
        return {
            "ranks": self.ranks,
            "rows_of_an_equal_share": self.share,
            "largest_factor": self.most,
            "is_given": self.is_given,
            **{name.lower(): dataclasses.asdict(cost) for name, cost in self.costs.items()},
        }


def find_token_imbalance(
    run: Run, tempos: Mapping[str, TempoConfig], stages: Mapping[str, tuple[int, RankEstimate]], *, is_given: bool
) -> TokenImbalance:
    """Estimate the rank that needs most with other shares of the tokens.

    Args:
        run: as it was estimated; its experts are divided over ranks.
        tempos: column of the table -> Tempo's values in it.
        stages: column of the table -> the stage that needs most, and its estimate.
        is_given: whether somebody gave the factor of `run`.
    """
    assert run.experts is not None
    most = find_largest_imbalance(run.experts)
    costs = {}
    for name, (stage, rank) in stages.items():
        experts = assume_routing(run, stage).experts
        assert experts is not None
        factor = experts.imbalance or 1.0
        further = min(factor + _STEP, most)
        peaks = {
            other: estimate_ranks(dataclasses.replace(set_imbalance(run, other), tempo=tempos[name]), only=stage)[
                0
            ].peak_bytes
            for other in {1.0, further} - {factor}
        } | {factor: rank.peak_bytes}
        costs[name] = _Cost(factor, rank.peak_bytes - peaks[1.0], further, peaks[further] - rank.peak_bytes)
    tokens = run.micro_batch_size * run.model.seq_length // run.context_parallel
    tokens //= run.tensor_parallel if run.sequence_parallel else 1
    share = tokens * run.experts.tensor_parallel * run.experts.per_token
    return TokenImbalance(run.experts.expert_parallel, share, most, is_given, costs)
