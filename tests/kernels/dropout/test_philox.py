from __future__ import annotations

import itertools

import pytest
import torch
from covering import compiles

from tempo_kernels import compiled
from tempo_kernels.philox import cpu, derive_key, drop_mask, eager, effective_probability, philox4x32

PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
# Random123's published answers: rounds, counter, key, output.
KNOWN_ANSWERS = [
    (7, [0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    (7, [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    (7, *PI, [0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A]),
    (10, [0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    (10, [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (10, *PI, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
]


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


@pytest.mark.parametrize(("sample", "head", "row"), [(2**32 + 5, 9, 100), (5, 0, 2**32 - 1), (0, 2**16 - 1, 0)])
def test_every_element_is_read_from_its_own_counter_and_lane(sample, head, row):
    key, p = derive_key(1234, 7, 2), 0.3
    place = {name: torch.tensor(index) for name, index in (("sample", sample), ("head", head), ("row", row))}
    found = []
    for column in range(80):
        counter = column // 8, row, head + (sample >> 32 << 16), sample & 0xFFFFFFFF
        word = philox4x32(counter, key)[column % 8 // 2]
        found.append((word >> 16 if column % 2 else word & 0xFFFF) < round(p * 65536))
    assert drop_mask(key, p, **place, num_columns=80).tolist() == found


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "chunk"), [(7, 5, 10), (7, 5, 35), (3, 40, 8), (0, 4, 8), (4, 0, 8), (1, 1, 1)]
)
def test_chunks_of_a_mask_have_the_bits_of_the_specification(num_rows, num_groups, chunk):
    words = torch.randint(2**32, (4, max(num_rows, num_groups)))
    words[:, :2] = torch.tensor([0, 2**32 - 1])[: words.size(1)]
    counter = words[0, :num_groups], *words[1:, :num_rows]
    for limit, k0, k1 in ((0, 0, 0), (1, 2**32 - 1, 2**31), (6554, 1, 2), (32768, 3, 4), (65535, 5, 2**32 - 1)):
        found = cpu.draw_bits(*counter, k0, k1, limit, chunk_per_thread=chunk)
        assert torch.equal(found, eager.draw_bits(*counter, k0, k1, limit))


@compiles
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_compiled_masks_have_the_bits_of_the_specification(num_rows):
    for num_groups in (1, 2, 3, 7, 8, 9, 63, 64, 65, 200):
        words = torch.randint(2**32, (4, max(num_rows, num_groups)))
        counter = words[0, :num_groups], *words[1:, :num_rows]
        for limit, k0, k1 in ((1, 2**32 - 1, 2**31), (6554, 1, 2**32 - 1), (65535, 2**31, 0)):
            found = cpu.draw_bits(*counter, k0, k1, limit, compiled_from=0)
            assert torch.equal(found, eager.draw_bits(*counter, k0, k1, limit))
    assert compiled.get_obstacle() is None


def test_a_part_of_the_mask_equals_the_same_part_of_the_whole():
    whole = mask_of()
    assert torch.equal(mask_of(samples=(1, 2), heads=(1, 3), rows=(16, 48)), whole[1:2, 1:3, 16:48])
    assert torch.equal(mask_of(num_columns=101), whole[..., :101])


def test_keys_differ_by_seed_and_by_every_step_of_a_path_and_by_its_length():
    keys = {derive_key(seed, layer, site) for seed in (0, 1, -1, 2**63) for layer in range(20) for site in range(5)}
    assert len(keys) == 4 * 20 * 5
    paths = [path for length in range(4) for path in itertools.product(range(3), repeat=length)]
    assert len({derive_key(5, *path) for path in paths}) == len(paths) == 1 + 3 + 9 + 27


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_0_and_1_is_refused(p):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        effective_probability(p)


def test_a_path_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at most three"):
        derive_key(1, 2, 3, 4, 5)


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


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 1 / 3, 0.5, 0.9, 0.9999])
def test_the_share_of_kept_elements_is_that_of_16_bits_within_four_sigma(p):
    mask, mean = (~mask_of(p=p, rows=(0, 512))).double(), 1 - effective_probability(p)
    assert abs(1 - mean - p) <= 2**-16
    assert abs(mask.mean().item() - mean) <= 4 * (mean * (1 - mean) / mask.numel()) ** 0.5
