"""benchmarks/static_roofline.py: it reads machine code rightly, and no kernel becomes slower in its model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

import static_roofline
import triton
from covering import exhaustive
from roofline import cases, launches, machine_code, model

RESOURCES = Path(__file__).parents[1] / "kernels" / "kernel_resources.json"
LIMITS = json.loads(RESOURCES.read_text(encoding="utf-8"))["roofline"]

LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/                   STG.E.128 desc[UR4][R2.64], R4 ;      /* a store outside of the loop */
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 BRA 0x60 ;
        /*0040*/                   MUFU.RCP R0, R0 ;
        /*0050*/                   FADD R0, R0, R1 ;
        /*0060*/                   FFMA R4, R4, R5, R6 ;
        /*0070*/                   LOP3.LUT R4, R4, 0x1, RZ, 0xc0, !PT ;
        /*0080*/               @P1 STG.E.128 desc[UR4][R2.64], R4 ;
        /*0090*/               @P2 BRA 0x20 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0;
        /*00c0*/                   NOP;
"""


def test_the_main_loop_is_found_and_its_shortest_way_counted_by_pipe():
    body = machine_code.find_body(machine_code.parse(LISTING))
    assert body.is_loop and [one.address for one in body.instructions] == [0x20, 0x30, 0x60, 0x70, 0x80, 0x90]
    assert body.by_pipe == {"memory": 2, "control": 2, "fma": 1, "alu": 1}
    assert body.stored_bytes == body.loaded_bytes == 16


def test_packing_two_floats_into_16_bits_is_the_alus_work_and_other_conversions_are_not():
    names = ["F2FP.BF16.F32.PACK_AB", "F2F.F64.F32", "I2F.S32", "MUFU.EX2"]
    assert [machine_code.Instruction(0, "", name, "").pipe for name in names] == ["alu", "xu", "xu", "xu"]


def test_a_program_without_a_loop_is_counted_whole():
    straight = LISTING.replace("@P2 BRA 0x20", "MOV R1, R2")
    body = machine_code.find_body(machine_code.parse(straight))
    assert not body.is_loop and body.issued == 9 and body.stored_bytes == 32


def test_of_loops_around_each_other_the_inner_one_is_counted():
    nested = LISTING.replace("LDG.E.128 R4, desc[UR4][R2.64]", "HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], R4")
    nested = nested.replace("EXIT ;", "@P3 BRA 0x0 ;", 1)
    assert machine_code.find_body(machine_code.parse(nested)).instructions[0].address == 0x20


@pytest.mark.parametrize(
    ("registers", "warps", "shared_bytes", "capability", "expected"),
    [
        (32, 4, 0, 90, (16, "registers", 1.0)),
        (24, 4, 0, 90, (16, "warps", 0.75)),
        (80, 4, 512, 90, (6, "registers", 0.9375)),
        (255, 8, 0, 90, (1, "registers", 1.0)),
        (40, 4, 64 << 10, 90, (3, "shared memory", 0.234375)),
        (40, 4, 64 << 10, 80, (2, "shared memory", 0.15625)),
        (16, 1, 0, 100, (32, "programs", 0.25)),
    ],
)
def test_occupancy_is_that_of_the_programming_guide(registers, warps, shared_bytes, capability, expected):
    assert model.find_occupancy(registers, warps, shared_bytes, capability) == expected


def test_a_pass_is_as_long_as_what_it_waits_for_and_its_tail():
    device = model.DEVICES["H100"]
    share = model.find_share_of_copy(0.001, 1 << 20, 1 << 30, device)
    assert share == pytest.approx(1.0, abs=1e-4)
    # 300 us of copying, and as much of issuing: longer than either by the factor that model.py states.
    elements, num_bytes = 1 << 27, round(300e-6 * device.copy_bytes_per_s)
    per_element = 300e-6 * 132 * 128 * device.clock_hz / elements
    assert model.find_share_of_copy(per_element, elements, num_bytes, device) == pytest.approx(2 ** (-1 / 3.3))
    with_tail = model.find_share_of_copy(1e-9, elements, num_bytes, device, 2, round(3e-6 * device.copy_bytes_per_s))
    assert with_tail == pytest.approx(300 / (300 + 2 * model.LAUNCH_US + 3))
    with_last = model.find_share_of_copy(1e-9, elements, num_bytes, device, 0, 0, 1 << 20)
    last_us = model.LAST_US + (1 << 20) / 64 / (device.clock_hz / 1e6)
    assert with_last == pytest.approx(300 / (300 + last_us))


def test_behind_a_norms_backward_is_one_launch_and_all_that_it_reads_counts():
    found = {one.name: one for one in cases.find_passes() if "norm backward" in one.name}
    assert len(found) == 4 and {one.tail_launches for one in found.values()} == {1}
    num_programs, h = 256, cases.SIZES.h
    for name, num_sums in (("layer_norm backward, keeps output", 2), ("rms_norm backward, keeps input", 1)):
        assert found[name].tail_bytes == num_sums * h * (2 * 4 * num_programs + 2)


@pytest.mark.parametrize(
    ("alone", "with_tail", "launches", "obstacle"),
    [
        (0.97, 0.93, 2, ""),
        (0.97, 0.80, 2, "2 launches behind it"),
        (0.97, 0.90, 0, "its last program"),
        (0.90, 0.89, 0, "issue: 12.0 fma + 8.0 alu + 1.0 xu"),
    ],
)
def test_what_stands_in_the_way_is_what_costs_most(alone, with_tail, launches, obstacle):
    fields = {"busiest": "issue", "instructions": {"alu": 80, "fma": 120, "xu": 10, "control": 1}}
    one = cases.Pass("a pass", None, 1, 1, 1, launches)
    shares = {"H100": {"pass": 0.99, "with_tail": 0.98}, "H200": {"pass": alone, "with_tail": with_tail}}
    assert static_roofline.find_obstacle(one, fields, 10, shares) == obstacle


@pytest.mark.slow
@pytest.mark.parametrize("head_dims", [(128,), *exhaustive([(64, 128)])], ids=str)
def test_no_kernel_takes_more_instructions_or_less_of_a_multiprocessor_than_recorded(head_dims):
    """On sm_90; with a Triton of which nothing is recorded, a quarter more than the most of those that are."""
    known = LIMITS.get(triton.__version__)
    slack = 1.02 if known else 1.25
    found = {one.name: static_roofline.measure_pass(one, 90) for one in cases.find_passes() if is_guarded(one.name)}
    for head_dim in head_dims:
        for one in cases.find_attention_passes(90, head_dim, 0.1):
            found[one.name] = static_roofline.measure_attention(one, 90)
    for name, fields in found.items():
        recorded = [known[name]] if known else [table[name] for table in LIMITS.values()]
        for what in ("per_element", "issue_cycles"):
            if what in fields:
                limit = slack * max(one[what] for one in recorded)
                assert fields[what] <= limit, f"{name}: {what} {fields[what]}, expected at most {limit:.1f}"
        least = min(one["programs_per_sm"] for one in recorded)
        assert fields["programs_per_sm"] >= least, f"{name}: {fields['programs_per_sm']} programs per SM, not {least}"
        # test_attention_compiled.py says how few of them loops read.
        allowed = max(one.get("spilled_bytes", 0) for one in recorded)
        assert fields["spilled_bytes"] <= allowed, f"{name} spills {fields['spilled_bytes']} bytes"
        assert fields["serialised"] <= max(one["serialised"] for one in recorded), f"{name}: products wait for another"


def is_guarded(name: str) -> bool:
    """The forms of a layer's defaults; what is left out is compiled by other tests."""
    return "gelu_tanh" not in name and ("keeps input" not in name or "glu" in name)


def test_products_that_wait_for_one_another_are_counted_and_so_is_a_version_of_ptx_that_nothing_compiles():
    with pytest.raises(RuntimeError, match="no ptxas of Triton's compiles its own code: .*version"):
        launches.count_serialised_products(".version 99.9\n.target sm_90a\n.address_size 64\n")
    assert launches.count_serialised_products(".version 8.0\n.target sm_90a\n.address_size 64\n") == 0


def test_words_that_no_pass_has_are_an_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["static_roofline.py", "--only", "relou", "--output", str(tmp_path / "found")])
    with pytest.raises(SystemExit):
        static_roofline.main()
    assert "--only relou: no pass has one of these words" in capsys.readouterr().err
