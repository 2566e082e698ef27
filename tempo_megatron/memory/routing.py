"""Says how many more tokens than an equal share the fullest rank of a pipeline stage gets for its experts.

Where tokens go depends on what is learned and read, which an estimate does not know. What it takes is the routing at
the start of training, from two assumptions. A router's weights are random and independent (moe/router.py of
megatron-core 0.16.1), so that equal tokens go to the same experts and different ones to any of them, in each layer
anew. Tokens are as frequent as Zipf's law says: the i-th most frequent of V has a share q_i = 1 / (i H_V), where H_V is
the V-th harmonic number. The variance of a rank's load in one layer is then sum_i q_i^2 times that of how many of one
token's experts are the rank's, which is drawn without replacement. Over L layers it falls as 1/L, and the loads of R
ranks have a constant sum, so that the fullest is expected at e_R sqrt(R / (R - 1)) deviations above the mean, where e_R
is the expected maximum of R independent normal variables.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from statistics import NormalDist

from tempo_megatron.memory.run import Run

_EULER = 0.5772156649
_POINTS = 10_000


def assume_routing(run: Run, stage: int) -> Run:
    """`run` with a factor for the experts of a stage, where it has experts and says none."""
    model = run.model
    if model.num_experts is None or run.moe_imbalance is not None or model.moe_pad_expert_input_to_capacity:
        return run
    has_experts = model.layers_with_experts
    num_layers = sum(has_experts[layer] for chunk in run.list_chunks(stage) for layer in chunk)
    return dataclasses.replace(run, moe_imbalance=expect_imbalance(run, num_layers))


def set_imbalance(run: Run, factor: float | str | None) -> Run:
    """`run` whose fullest rank gets `factor` times an equal share; "max" is all that it can get, None as `run` says.

    Raises ValueError where there are no experts, and for a factor that no rank could have.
    """
    if factor is None:
        return run
    if run.model.num_experts is None:
        raise ValueError("--moe-imbalance is given, and the run has no experts; leave it out")
    if run.model.moe_pad_expert_input_to_capacity:
        raise ValueError(
            "--moe-imbalance is given, and experts are padded to their capacity, so that each rank gets as much; leave "
            "one of them out"
        )
    most = find_largest_imbalance(run)
    factor = most if isinstance(factor, str) else factor
    if not min(1, most) <= factor <= most:
        raise ValueError(
            f"--moe-imbalance is {factor:g}; expected at least 1, an equal share, and at most {most:g}, which the "
            f"fullest of {run.layout.ep} ranks gets at most, or max"
        )
    return dataclasses.replace(run, moe_imbalance=factor)


def find_largest_imbalance(run: Run) -> float:
    """Tokens of the fullest rank, over an equal share, where every token of every rank chooses its experts.

    A token goes to k different experts, of which the rank has E / R. The R ranks have k tokens for each of their own.
    Of a capacity each expert takes that share of its own at most.
    """
    topk, capacity = run.model.moe_router_topk, run.model.moe_expert_capacity_factor
    found = run.layout.ep * min(topk, run.num_local_experts) / topk
    return found if capacity is None else min(found, capacity)


def assume_fullest(run: Run) -> Run:
    """`run` with the factor of the stage where it is largest, where it has experts and says none."""
    stages = [assume_routing(run, stage) for stage in range(run.layout.pp)]
    return max(stages, key=lambda each: each.moe_imbalance or 1.0)


def expect_imbalance(run: Run, num_layers: int) -> float:
    """Tokens of the fullest rank, over an equal share; 1 where Sinkhorn's routing balances, or nothing is divided.
    num_layers: L, of a stage's layers those with experts."""
    ranks, largest = run.layout.ep, find_largest_imbalance(run)
    if ranks == 1 or num_layers == 0 or run.model.moe_router_load_balancing_type == "sinkhorn":
        return min(1.0, largest)
    repeated = math.pi**2 / 6 / (math.log(run.padded_vocab_size) + _EULER) ** 2
    variance = repeated * _find_relative_variance(run) / num_layers * ranks / (ranks - 1)
    return min(1 + _expect_maximum(ranks) * math.sqrt(variance), largest)


def _find_relative_variance(run: Run) -> float:
    """Of how many of one token's experts are a rank's, over the square of their mean.

    A token chooses among the experts of `moe_router_group_topk` of `moe_router_num_groups` groups.
    """
    groups, chosen = run.model.moe_router_num_groups or 1, run.model.moe_router_group_topk or 1
    per_group, local = run.num_local_experts * run.layout.ep // groups, run.num_local_experts
    of_rank, in_each = max(1, local // per_group), min(local, per_group)
    candidates, k = chosen * per_group, run.model.moe_router_topk
    first = second = 0.0
    for number in range(min(of_rank, chosen) + 1):
        ways = math.comb(of_rank, number) * math.comb(groups - of_rank, chosen - number) / math.comb(groups, chosen)
        share = number * in_each / candidates
        mean = k * share
        spread = mean * (1 - share) * (candidates - k) / (candidates - 1) if candidates > 1 else 0.0
        first, second = first + ways * mean, second + ways * (spread + mean**2)
    return second / first**2 - 1


@functools.cache
def _expect_maximum(number: int) -> float:
    """Of so many independent standard normal variables: the integral of number u^(number - 1) Phi^-1(u)."""
    normal = NormalDist()
    points = ((place + 0.5) / _POINTS for place in range(_POINTS))
    return sum(number * u ** (number - 1) * normal.inv_cdf(u) for u in points) / _POINTS
