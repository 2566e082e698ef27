from __future__ import annotations

import pytest
import torch
from philox_vectors import KNOWN_ANSWERS

from tempo_kernels.philox import derive_key, drop_mask, effective_probability, philox4x32


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN_ANSWERS)
def test_matches_the_published_vectors_in_ints_and_tensors(rounds, counter, key, expected):
    packed = key[0] | key[1] << 32
    assert list(philox4x32(tuple(counter), packed, rounds)) == expected
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), packed, rounds)
    assert [word.item() for word in words] == expected


def mask_of(key=3, p=0.1, samples=(0, 2), heads=(0, 3), rows=(0, 64), num_columns=256):
    sample = torch.arange(*samples).view(-1, 1, 1)
    head = torch.arange(*heads).view(-1, 1)
    return drop_mask(key, p, sample=sample, head=head, row=torch.arange(*rows), num_columns=num_columns)


def test_an_element_is_read_from_its_own_counter_and_lane():
    key, p = derive_key(1234, 7, 2), 0.3
    sample, head, row, column = 2**32 + 5, 9, 100, 77
    mask = drop_mask(
        key, p, sample=torch.tensor(sample), head=torch.tensor(head), row=torch.tensor(row), num_columns=80
    )
    word = philox4x32((column // 8, row, head + (1 << 16), 5), key)[column % 8 // 2]
    lane = word >> 16 if column % 2 else word & 0xFFFF
    assert mask[column].item() == (lane < round(p * 65536))


def test_a_part_of_the_mask_equals_the_same_part_of_the_whole():
    whole = mask_of()
    assert torch.equal(mask_of(samples=(1, 2), heads=(1, 3), rows=(16, 48)), whole[1:2, 1:3, 16:48])
    assert torch.equal(mask_of(num_columns=101), whole[..., :101])


def test_keys_differ_by_seed_and_by_every_step_of_the_path():
    keys = {derive_key(seed, layer, site) for seed in (0, 1, -1, 2**63) for layer in range(20) for site in range(5)}
    assert len(keys) == 4 * 20 * 5


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_0_and_1_is_refused(p):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        effective_probability(p)


def test_a_path_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at most three"):
        derive_key(1, 2, 3, 4, 5)


def test_paths_of_different_lengths_have_different_keys():
    paths = [
        (),
        (0,),
        (1,),
        (2,),
        (1, 0),
        (2, 0),
        (1, 0, 0),
        (2, 0, 0),
        (1, 2),
        (1, 2, 0),
        (1, 2, 1),
        (0, 0),
        (0, 0, 0),
    ]
    assert len({derive_key(5, *path) for path in paths}) == len(paths)


def test_the_keys_of_two_numbers_are_those_of_all_masks_before():
    assert [derive_key(1234, 7, 2), derive_key(-1, 0, 0)] == [0xD476100602F93AC9, 0x7F8BD2B0AA288EDC]


BEYOND = {
    "head": ({"head": 1 << 16}, r"head 65536 to 65536; expected 0 to 65535"),
    "sample": ({"sample": 1 << 48}, r"sample 281474976710656 .*expected 0 to 281474976710655"),
    "row": ({"row": 1 << 32}, r"row 4294967296 .*expected 0 to 4294967295"),
    "negative": ({"row": -1}, r"row -1 to -1; expected 0"),
}


@pytest.mark.parametrize(("index", "message"), BEYOND.values(), ids=BEYOND)
def test_an_index_that_would_draw_another_places_mask_is_refused(index, message):
    places = {"sample": 0, "head": 0, "row": 0, **index}
    tensors = {name: torch.tensor([place]) for name, place in places.items()}
    with pytest.raises(ValueError, match=message):
        drop_mask(3, 0.5, **tensors, num_columns=8)


def test_the_last_index_of_each_kind_is_a_place_of_its_own():
    ends = [{"sample": (1 << 48) - 1}, {"head": (1 << 16) - 1}, {"row": (1 << 32) - 1}, {}]
    masks = []
    for end in ends:
        places = {name: torch.tensor([place]) for name, place in {"sample": 0, "head": 0, "row": 0, **end}.items()}
        masks.append(drop_mask(3, 0.5, **places, num_columns=64))
    assert len({bytes(mask.flatten().tolist()) for mask in masks}) == len(ends)
