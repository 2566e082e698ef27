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

from tempo_megatron.memory.run import Experts, Run

_EULER = 0.5772156649
_POINTS = 10_000


def assume_routing(run: Run, stage: int) -> Run:
    """`run` with a factor for the experts of a stage, where it has experts and says none."""
    experts = run.experts
    if experts is None or experts.imbalance is not None or experts.pads_to_capacity:
        return run
    num_layers = sum(experts.layers[layer] for chunk in run.list_chunks(stage) for layer in chunk)
    imbalance = find_largest_imbalance(experts)
    if experts.expert_parallel > 1:
        imbalance = expect_imbalance(experts, run.padded_vocab_size, num_layers)
    return dataclasses.replace(run, experts=dataclasses.replace(experts, imbalance=imbalance))


def set_imbalance(run: Run, factor: float | str | None) -> Run:
    """`run` whose fullest rank gets `factor` times an equal share; "max" is all that it can get, None as `run` says.

    Raises ValueError where there are no experts, and for a factor that no rank could have.
    """
    if factor is None:
        return run
    if run.experts is None:
        raise ValueError("--moe-imbalance is given, and the run has no experts; leave it out")
    most = find_largest_imbalance(run.experts)
    if isinstance(factor, str):
        factor = most
    if run.experts.pads_to_capacity:
        raise ValueError(
            "--moe-imbalance is given, and experts are padded to their capacity, so that each rank gets as much; leave "
            "one of them out"
        )
    if factor < min(1, most):
        raise ValueError(
            f"--moe-imbalance is {factor:g}; expected at least 1: the fullest rank has an equal share or more"
        )
    if factor > most:
        raise ValueError(
            f"--moe-imbalance is {factor:g}, and the fullest of {run.experts.expert_parallel} ranks gets at most "
            f"{most:g} times an equal share; expected 1 to {most:g}, or max"
        )
    return dataclasses.replace(run, experts=dataclasses.replace(run.experts, imbalance=factor))


def find_largest_imbalance(experts: Experts) -> float:
    """Tokens of the fullest rank, over an equal share, where every token of every rank chooses its experts.

    A token goes to k different experts, of which the rank has E / R. The R ranks have k tokens for each of their own.
    Of a capacity each expert takes that share of its own at most.
    """
    ranks = experts.expert_parallel
    found = ranks * min(experts.per_token, experts.num_experts // ranks) / experts.per_token
    return found if experts.capacity_factor is None else min(found, experts.capacity_factor)


def assume_fullest(run: Run) -> Run:
    """`run` with the factor of the stage where it is largest, where it has experts and says none."""
    factors = (assume_routing(run, stage).experts for stage in range(run.pipeline_parallel))
    largest = max((each.imbalance or 1.0 for each in factors if each is not None), default=1.0)
    if run.experts is None or run.experts.pads_to_capacity:
        return run
    return set_imbalance(run, largest)


def expect_imbalance(experts: Experts, vocab_size: int, num_layers: int) -> float:
    """Tokens of the fullest rank, over an equal share; 1 where Sinkhorn's routing balances, or nothing is divided.

    Args:
        experts: as they lie over ranks.
        vocab_size: V.
        num_layers: L, of a stage's layers those with experts.
    """
    ranks = experts.expert_parallel
    if ranks == 1 or num_layers == 0 or experts.routing == "sinkhorn":
        return min(1.0, find_largest_imbalance(experts))
    repeated = math.pi**2 / 6 / (math.log(vocab_size) + _EULER) ** 2
    variance = repeated * _find_relative_variance(experts) / num_layers * ranks / (ranks - 1)
    return min(1 + _expect_maximum(ranks) * math.sqrt(variance), find_largest_imbalance(experts))


def _find_relative_variance(experts: Experts) -> float:
    """Of how many of one token's experts are a rank's, over the square of their mean.

    A token chooses among the experts of `group_topk` of `num_groups` groups.
    """
    groups, chosen = experts.num_groups or 1, experts.group_topk or 1
    per_group, local = experts.num_experts // groups, experts.num_experts // experts.expert_parallel
    of_rank, in_each = max(1, local // per_group), min(local, per_group)
    candidates, k = chosen * per_group, experts.per_token
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
