"""benchmarks/static_roofline.py: it reads machine code rightly, and no kernel becomes slower in its model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")

import loss_head
import static_roofline
from measurements import RESULTS, read_records
from roofline import cases, figures, flash_attention, launches, machine_code, model, walks

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
    assert (body.others, body.around, body.waits, body.barriers) == (2, 3, 1, 0)


def test_packing_two_floats_into_16_bits_is_the_alus_work_and_other_conversions_are_not():
    names = ["F2FP.BF16.F32.PACK_AB", "F2F.F64.F32", "I2F.S32", "MUFU.EX2"]
    assert [machine_code.Instruction(0, "", name, "").pipe for name in names] == ["alu", "xu", "xu", "xu"]


def test_a_program_without_a_loop_is_counted_whole():
    straight = LISTING.replace("@P2 BRA 0x20", "MOV R1, R2")
    body = machine_code.find_body(machine_code.parse(straight))
    assert not body.is_loop and body.issued == 9 and body.stored_bytes == 32


def test_a_long_wait_behind_the_programs_end_makes_no_loop():
    """It has more products between it and where it jumps than the loop."""
    product = "HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], R4"
    waiting = LISTING.replace("LDG.E.128 R4, desc[UR4][R2.64]", product).replace("LDC R1, c[0x0][0x28]", product)
    waiting = waiting.replace("BRA 0xb0;", "BRA 0x0 ;")
    assert machine_code.find_body(machine_code.parse(waiting)).instructions[0].address == 0x20


def test_of_loops_around_each_other_the_inner_one_is_counted():
    nested = LISTING.replace("LDG.E.128 R4, desc[UR4][R2.64]", "HGMMA.64x64x16.F32.BF16 R4, gdesc[UR4], R4")
    nested = nested.replace("EXIT ;", "@P3 BRA 0x0 ;", 1)
    assert machine_code.find_body(machine_code.parse(nested)).instructions[0].address == 0x20


def test_a_way_that_ends_the_program_before_its_loop_is_not_on_the_way_to_it():
    """As of a program that only finds lost channels, or adds up sums."""
    other = ["@P3 BRA 0x220", *["LDG.E.128 R4, desc[UR4][R2.64]"] * 9, "EXIT"]
    ahead = [f"        /*{0x170 + 16 * index:04x}*/  {one} ;" for index, one in enumerate(other)]
    moved = re.sub(r"/\*([0-9a-f]{4})\*/", lambda found: f"/*{int(found[1], 16) + 0x220:04x}*/", LISTING)
    moved = re.sub(r"BRA 0x([0-9a-f]+)", lambda found: f"BRA 0x{int(found[1], 16) + 0x220:x}", moved)
    body = machine_code.find_body(machine_code.parse("\n".join([*ahead, moved])))
    assert [one.address - 0x220 for one in body.instructions] == [0x20, 0x30, 0x60, 0x70, 0x80, 0x90]
    assert body.around == 4  # the jump, and what is around the loop without it


@pytest.mark.parametrize(
    ("code", "shadow"),
    [
        # Each HGMMA takes 32 cycles. One instruction, and what is behind a wait, is in no shadow.
        ("HGMMA gsb0;WAIT 0;", 1),
        ("HGMMA;5;HGMMA gsb0;5;WAIT 0;99;", 12),
        ("HGMMA;99;HGMMA gsb0;99;WAIT 0;", 64),
        # The second group is still in flight at the first wait, and through the end of the loop until the second.
        ("3;WAIT 0;HGMMA gsb0;9;WAIT 0;HGMMA gsb0;7;", 8 + 3 + 10),
        ("HGMMA gsb0;9;HGMMA gsb0;9;WAIT 1;99;WAIT 0;", 20 + 32),
        ("HGMMA gsb0;9;HGMMA gsb0;9;WAIT 0;99;", 20),
        # An HMMA of 4 cycles keeps the next one waiting and nothing else.
        ("HMMA;HMMA;HMMA;1;HMMA;9;", 1 + 1 + 2 + 4),
    ],
)
def test_what_a_warp_issues_until_it_waits_for_its_products_is_in_their_shadow(code, shadow):
    instructions = []
    for word in code.split(";")[:-1]:
        name, _, operands = word.partition(" ")
        if name == "WAIT":
            instructions.append(machine_code.Instruction(0, "", "WARPGROUP.DEPBAR.LE", f"gsb0, 0x{operands}"))
        elif name.isdecimal():
            instructions += [machine_code.Instruction(0, "", "FFMA", "R0, R1, R2, R3")] * int(name)
        else:
            shape = {"HGMMA": "64x64x16", "HMMA": "16816"}[name]
            instructions.append(machine_code.Instruction(0, "", f"{name}.{shape}.F32.BF16", f"R24, R88, {operands}"))
    assert machine_code.Body(instructions, True).find_shadow(1024) == shadow


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


COPY_S = 300e-6


def make_pass(device, **changed):
    """One that copies for COPY_S and has next to nothing else to do, in one full round."""
    slots = device.multiprocessors * 4
    given = {"programs": slots, "programs_per_sm": 4, "warps": 4, "trips": 1.0, "around": 0, "cycles": 1.0, "waits": 0}
    given |= {"num_bytes": COPY_S * device.copy_bytes_per_s, "barriers": 0}
    return given | {"tail_launches": 0, "tail_bytes": 0, "last_bytes": 0} | changed


def test_a_pass_is_as_long_as_what_it_waits_for_and_its_tail():
    device, chosen = model.DEVICES["H100"], model.CENTRAL

    def find_share(**changed):
        return model.find_share_of_copy(make_pass(device, **changed), device)

    assert find_share() == pytest.approx(1.0, abs=1e-4)
    # As much of issuing as of copying: longer than either by the factor that model.py states.
    cycles = COPY_S * device.clock_hz / 4
    assert find_share(cycles=cycles) == pytest.approx(2 ** (-1 / 3.3), rel=0.01)
    num_bytes = round(3e-6 * device.copy_bytes_per_s)
    share = find_share(tail_launches=2, tail_bytes=num_bytes)
    assert share == pytest.approx(300 / (300 + 2 * chosen.launch_us + 3), abs=1e-4)
    last_us = chosen.last_us + (1 << 20) / 64 / (device.clock_hz / 1e6)
    assert find_share(last_bytes=1 << 20) == pytest.approx(300 / (300 + last_us), abs=1e-4)


def test_a_last_round_of_one_program_and_barriers_and_waits_in_a_loop_cost_time():
    device = model.DEVICES["H100"]
    slots = device.multiprocessors * 4
    full, ragged = (make_pass(device, programs=n, cycles=2e5) for n in (slots, slots + 1))
    program_s = (model.CENTRAL.start_cycles + model.CENTRAL.latency_cycles + 2e5) / device.clock_hz
    times = [model.find_time(one, device, model.CENTRAL) for one in (full, ragged)]
    assert times[0].memory == COPY_S and times[1].memory == pytest.approx(COPY_S + program_s, rel=0.01)
    assert times[1].latency == pytest.approx(2 * program_s)
    looped = make_pass(device, trips=1000.0, cycles=0.0, waits=1, barriers=2)
    time = model.find_time(looped, device, model.CENTRAL)
    assert time.latency > 1000 * (model.CENTRAL.latency_cycles + 2 * model.CENTRAL.barrier_cycles) / device.clock_hz
    assert time.bound == "latency"
    shares = [model.find_share_of_copy(looped, device, chosen) for chosen in (model.SLOW, model.CENTRAL, model.FAST)]
    assert shares == sorted(shares)


@pytest.mark.parametrize(
    ("name", "tile", "splits", "num_programs"),
    [
        ("forward", (128, 64), 1, 16),
        ("grad_kv", (32, 128), 1, 16),
        ("backward", (64, 64), 1, 1),
        ("backward", (128, 64), 2, 2),
        ("backward", (128, 64), 3, 3),
    ],
)
def test_programs_of_a_causal_walk_have_the_tiles_that_reach_the_diagonal(name, tile, splits, num_programs):
    queries, keys = tile
    found = walks.list_programs(name, tile, splits, True, 3)
    blocks = [(q, k) for q in range(0, walks.LENGTH, queries) for k in range(0, walks.LENGTH, keys)]
    seen = sum(q + queries > k for q, k in blocks)
    across = sum(q + queries > k and k + keys > q + 1 for q, k in blocks)
    assert sum(one.tiles for one in found) == 3 * seen and sum(one.edges for one in found) == 3 * across
    assert sum(one.tiles for one in walks.list_programs(name, tile, splits, False, 1)) == len(blocks)
    assert len(found) == 3 * num_programs
    if name != "backward":
        # Two heads take turns, their longest programs first, and the third follows.
        turns = [one.tiles for one in walks.list_programs(name, tile, splits, True, 3, 2)]
        of_head = [one.tiles for one in found[:num_programs]]
        assert of_head == sorted(of_head, reverse=True) and turns == sorted(2 * of_head, reverse=True) + of_head


def test_the_time_of_a_walk_is_that_of_its_tiles_and_of_what_no_multiprocessor_shares_out():
    device = model.DEVICES["H100"]
    one = {"walk": "forward", "head_dim": 128, "splits": 1, "tile": (128, 64), "warps": 4, "programs_per_sm": 1}
    one |= {"issued": 1000, "shadow": 0, "others": 100, "around": 0, "barriers": 0}
    per_tile = 1000 + 2 * 128 * 64 * 128 * 2 / 4096
    found = walks.find_walk(one, device, True)
    tiles = 128 * sum(range(2, 33, 2))
    assert found.tiles == pytest.approx(tiles * per_tile / 132 / device.clock_hz)
    assert found.tiles < found.total < 1.25 * found.tiles and found.bound == "issue and tensor cores"
    assert walks.find_walk(one, device, True, model.CENTRAL, 0.5).tiles == pytest.approx(2 * found.tiles)
    # A program issues in the shadow of its products, unless there is none.
    choices = (model.CENTRAL, model.SLOW)
    hidden = [walks.find_walk(one | {"shadow": 300}, device, True, chosen).tiles for chosen in choices]
    assert hidden == pytest.approx([found.tiles * (1 - 300 / per_tile), found.tiles])
    # Barriers keep a program waiting that has its multiprocessor for itself.
    waiting = one | {"barriers": 5}
    waited = (walks.find_walk(waiting, device, True).total - found.total) / (tiles * 5 * 30 / 132 / device.clock_hz)
    assert 1.0 < waited < 1.25
    together = [walks.find_walk(each | {"programs_per_sm": 2}, device, True).total for each in (one, waiting)]
    assert together[0] == together[1]


def test_a_walk_for_all_gradients_reads_again_what_the_l2_cache_cannot_hold():
    device = model.DEVICES["H100"]
    one = {"walk": "backward", "head_dim": 128, "splits": 1, "tile": (64, 128), "warps": 8, "programs_per_sm": 1}
    one |= {"issued": 1, "shadow": 0, "others": 0, "around": 0, "barriers": 0}
    # 128 programs of 2048 rows, of which each has 2 x 2 x 128 bytes of q and grad_out and 4 x 128 of sums.
    lost = 1 - 50e6 / (128 * 2048 * 1024)
    num_bytes = 128 * 16 * 2048 * (512 + 2 * 512) * lost
    found = walks.find_walk(one, device, False)
    assert found.memory == pytest.approx(num_bytes / device.copy_bytes_per_s)
    assert found.bound == "memory" and found.total == pytest.approx(found.memory + found.others)
    # Of two splits each reads as much again, but both the same rows.
    assert walks.find_walk(one | {"splits": 2}, device, False).memory < found.memory
    assert walks.find_walk(one, device, True).memory < 0.5 * found.memory
    assert walks.find_reread_bytes(one, 20, 100, False, model.CENTRAL) == 0.0
    assert walks.find_reread_bytes(one, 20, 100, False, model.SLOW) > 0.0


def test_programs_that_share_their_sums_read_them_once_for_all():
    device = model.DEVICES["H100"]
    one = {"walk": "backward", "head_dim": 128, "splits": 16, "tile": (64, 128), "warps": 8, "programs_per_sm": 1}
    one |= {"issued": 1, "shadow": 0, "others": 0, "around": 0, "barriers": 0}
    found = [walks.find_walk(each, device, False) for each in (one, one | {"sums": 1})]
    # Of 16 sums one is left, which is zeroed first; sums of a split's own begin with its first block of keys.
    saved_s = (16 * 4 - 2 * 4) * walks.HEADS * walks.LENGTH / device.copy_bytes_per_s
    assert found[0].others - found[1].others == pytest.approx(saved_s)
    assert found[0].memory > 0.0 and found[1].memory == 0.0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_2_with_dropout_is_its_published_speed_slowed_down_by_what_dropout_issues(head_dim):
    device, counted = model.DEVICES["H100"], read_records(static_roofline.FLASH_ATTENTION)
    published = figures.ATTENTION["FlashAttention-2"][head_dim].both
    without = [one | {"dropout": p} for one in counted if not one["dropout"] for p in (True, False)]
    assert walks.find_speed_with_dropout(without, head_dim, device) == pytest.approx(published)
    # 243 and 282 of 277 and 308; products that take less time leave dropout a larger share of it.
    speeds = [walks.find_speed_with_dropout(counted, head_dim, device, one) for one in (model.CENTRAL, model.SLOW)]
    assert 0.8 * published < speeds[1] < speeds[0] < published
    doubled = [one | {"issued": (1 + one["dropout"]) * one["issued"]} for one in counted]
    assert walks.find_speed_with_dropout(doubled, head_dim, device) < 0.85 * speeds[0]


def test_flash_attention_2_is_counted_in_the_functions_that_its_launchers_choose(monkeypatch):
    loop = LISTING.replace("LDG.E.128 R4, desc[UR4][R2.64]", "HMMA.16816.F32.BF16 R4, R8, R254, R4")
    asked = []

    def run(command, **options):
        asked.extend(command[command.index("-fun") + 1].split(","))
        sections = [f"\t\tFunction : {name}\n{loop}\t\t..........\n" for name in asked[: len(asked) - lost]]
        return subprocess.CompletedProcess(command, 0, "\n".join(sections))

    monkeypatch.setattr(flash_attention.subprocess, "run", run)
    lost = 0
    found = list(flash_attention.count(Path("libtorch_cuda.so")))
    kept = read_records(static_roofline.FLASH_ATTENTION)
    same = ("walk", "head_dim", "dropout", "tile", "warps", "programs_per_sm", "splits", "sums")
    assert [[one[name] for name in same] for one in found] == [[one[name] for name in same] for one in kept]
    assert {one["issued"] for one in found} == {6} and len(set(asked)) == 8
    assert asked[0] == (
        "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi64ELi128ELi128ELi4ELb0ELb0EN7cutlass10bfloat16_t"
        "E19Flash_kernel_traitsILi64ELi128ELi128ELi4ES3_EELb0ELb0ELb0ELb0ELb1ELb1ELb0ELb0EEEvNS_16Flash_fwd_paramsE"
    )
    lost, last = 1, asked[-1]
    asked.clear()
    with pytest.raises(ValueError, match=f"^libtorch_cuda.so has no {last} for sm_90; these are torch 2.11's$"):
        list(flash_attention.count(Path("libtorch_cuda.so")))


def test_the_loss_heads_peaks_are_what_is_followed():
    recorded = read_records(RESULTS / "cpu" / "loss_head_peaks.jsonl")
    assert recorded[0] == loss_head.find_peak(8192, 62080) and len(recorded) == 9


def test_the_page_is_what_the_records_say():
    assert static_roofline.PAGE.read_text(encoding="utf-8") == static_roofline.draw_page()


def test_a_second_launch_adds_up_the_sums_of_a_norms_backward_and_all_that_it_reads_counts():
    found = {one.name: one for one in cases.find_passes() if "norm backward" in one.name}
    assert len(found) == 4 and all(one.tail_launches == 1 for one in found.values())
    num_programs, h = 128, cases.SIZES.h
    for name, num_sums in (("layer_norm backward, keeps output", 2), ("rms_norm backward, keeps input", 1)):
        one = found[name]
        # Partial sums are written and read, and bfloat16 sums are written.
        assert one.tail_bytes == num_sums * h * (2 * 4 * num_programs + 2) and not one.last_bytes
        assert static_roofline.measure_pass(one, 90)["programs"] == num_programs == one.launch.num_programs


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        ({}, ""),
        ({"tail_launches": 12}, "12 launches behind it"),
        ({"last_bytes": 1 << 24}, "its last program"),
        ({"cycles": 1e5}, "issue: 12.0 fma + 8.0 alu + 1.0 xu"),
        ({"trips": 500.0, "barriers": 9, "waits": 1}, "waiting: 500 ways through the loop, 9 barriers each"),
        ({"programs": 529, "around": 1e5}, "its last round of 529 programs"),
    ],
)
def test_what_stands_in_the_way_is_what_costs_most(changed, obstacle):
    device = model.DEVICES["H200"]
    one = make_pass(device, **{"busiest": "issue", "by_pipe": {"alu": 8.0, "fma": 12.0, "xu": 1.0, "control": 0.1}})
    assert static_roofline.find_obstacle(one | changed, device) == obstacle


def test_products_that_wait_for_one_another_are_counted_and_so_is_a_version_of_ptx_that_nothing_compiles():
    with pytest.raises(RuntimeError, match="no ptxas of Triton's compiles its own code: .*version"):
        launches.count_serialised_products(".version 99.9\n.target sm_90a\n.address_size 64\n")
    assert launches.count_serialised_products(".version 8.0\n.target sm_90a\n.address_size 64\n") == 0


def test_words_that_no_pass_has_are_an_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["static_roofline.py", "--only", "relou", "--output", str(tmp_path / "found")])
    with pytest.raises(SystemExit):
        static_roofline.main()
    assert "--only relou: no pass has one of these words" in capsys.readouterr().err
