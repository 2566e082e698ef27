"""What a mask of dropout has to look like, in the shape that attention draws."""

from __future__ import annotations

import pytest
import torch

from tempo_kernels.philox import derive_key, drop_mask, effective_probability

SAMPLES, HEADS, ROWS, COLUMNS = 2, 8, 256, 512
DIMS = {"sample": 0, "head": 1, "row": 2, "column": 3}


def kept(p, seed=1234, layer=1, first_sample=0):
    """float64 [SAMPLES, HEADS, ROWS, COLUMNS], 1 where an element is kept."""
    mask = drop_mask(
        derive_key(seed, layer, 1),
        p,
        sample=torch.arange(first_sample, first_sample + SAMPLES).view(-1, 1, 1),
        head=torch.arange(HEADS).unsqueeze(-1),
        row=torch.arange(ROWS),
        num_columns=COLUMNS,
    )
    return (~mask).double()


def largest_normal(count):
    """What the largest of `count` normal numbers stays below as surely as one of them stays below four sigma."""
    tail = 1 - (1 - 2 * torch.special.ndtr(torch.tensor(-4.0, dtype=torch.float64))) ** (1 / count)
    return -torch.special.ndtri(tail / 2).item()


def assert_uncorrelated(first, second, p):
    """The mean of the product of two masks' deviations is 0 within four sigma."""
    mean = 1 - effective_probability(p)
    product = ((first - mean) * (second - mean)).mean().item()
    assert abs(product) <= 4 * mean * (1 - mean) / first.numel() ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 1 / 3, 0.5, 0.9, 0.9999])
def test_the_share_of_kept_elements_is_that_of_16_bits_within_four_sigma(p):
    mask, mean = kept(p), 1 - effective_probability(p)
    assert abs(1 - mean - p) <= 2**-16
    assert abs(mask.mean().item() - mean) <= 4 * (mean * (1 - mean) / mask.numel()) ** 0.5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", DIMS)
def test_no_row_column_head_or_sample_is_kept_more_than_chance_has_it(name, p):
    mask, mean = kept(p), 1 - effective_probability(p)
    shares = mask.mean([dim for dim in range(4) if dim != DIMS[name]])
    sigma = (mean * (1 - mean) * shares.numel() / mask.numel()) ** 0.5
    assert (shares - mean).abs().max().item() <= largest_normal(shares.numel()) * sigma
    # Nor less: the shares of 8 heads or 512 columns scatter as they should.
    if shares.numel() > 100:
        assert shares.std().item() == pytest.approx(sigma, rel=4 / (2 * shares.numel()) ** 0.5)


DISTANCES = [("sample", 1), ("head", 1), ("head", 4)]
DISTANCES += [(name, distance) for name in ("row", "column") for distance in (1, 2, 7, 8, 16, 64)]


@pytest.mark.parametrize(("name", "distance"), DISTANCES)
def test_elements_at_any_distance_are_uncorrelated(name, distance):
    mask, dim = kept(0.1), DIMS[name]
    length = mask.size(dim) - distance
    assert_uncorrelated(mask.narrow(dim, 0, length), mask.narrow(dim, distance, length), 0.1)


@pytest.mark.parametrize("other", [{"layer": 2}, {"seed": 1235}, {"first_sample": SAMPLES}], ids=str)
def test_layers_seeds_and_steps_are_uncorrelated(other):
    # The samples of the next step are the next samples.
    assert_uncorrelated(kept(0.1), kept(0.1, **other), 0.1)


def test_the_eight_lanes_of_one_call_are_independent():
    lanes = kept(0.5).view(-1, 8)
    patterns = torch.bincount((lanes * 2 ** torch.arange(8)).sum(1).long(), minlength=256).double()
    expected = lanes.size(0) / 256
    chi_squared = ((patterns - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - 255) <= 4 * (2 * 255) ** 0.5


def test_the_means_are_not_those_of_a_mask_with_8_bits():
    """The test of the share can fail: 26/256 instead of 0.1 is found."""
    mask, mean = kept(26 / 256), 1 - effective_probability(0.1)
    assert abs(mask.mean().item() - mean) > 4 * (mean * (1 - mean) / mask.numel()) ** 0.5
