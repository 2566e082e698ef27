"""The instructions of a kernel's main loop by the pipe that executes them, read from disassembled machine code."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
PRODUCT = re.compile(r"(HGMMA|HMMA)\.(?:(\d+)x(\d+)x(\d+)|16816|1688)\b")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
TENSOR = ("HMMA", "HGMMA", "QGMMA", "IMMA", "UTCHMMA", "UTCQMMA", "UTCMMA", "OMMA")

# By the beginning of a mnemonic; the first that fits. From NVIDIA's tables of throughput per compute capability. That
# the ALU packs two floats into 16 bits (F2FP) is in the manual of Nsight Compute.
PIPES = (
    ("tensor", TENSOR),
    ("fma", ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2")),
    ("imad", ("IMAD", "IDP", "HFMA2", "HADD2", "HMUL2")),
    ("xu", ("MUFU", "I2F", "F2I", "F2F.", "FRND", "POPC", "FLO")),
    ("memory", ("LDG", "STG", "LD.", "ST.", "LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOM", "RED.", "SHFL", "LDC",
                "UBLKCP", "UTMALDG", "LDTM", "STTM")),
    ("control", ("BRA", "BSSY", "BSYNC", "BAR", "EXIT", "CALL", "RET", "WARPSYNC", "WARPGROUP", "DEPBAR", "LDGDEPBAR",
                 "NOP", "YIELD", "SYNCS", "FENCE", "MEMBAR", "ERRBAR", "CCTL")),
    ("uniform", ("U", "R2UR", "S2UR")),
)  # fmt: skip


class Instruction(NamedTuple):
    address: int
    predicate: str
    name: str
    operands: str

    @property
    def pipe(self) -> str:
        """What is in no list is an operation of the ALU: integers, logic, comparisons, conversions to 16 bits."""
        name = self.name + "."
        return next((pipe for pipe, names in PIPES if name.startswith(names)), "alu")

    @property
    def target(self) -> int | None:
        """Where a jump goes."""
        found = TARGET.search(self.operands) if self.name.startswith("BRA") else None
        return int(found[1], 16) if found else None

    @property
    def is_product(self) -> bool:
        return self.name.startswith(TENSOR)

    @property
    def product_flops(self) -> int:
        """Of a scheduler's tensor core; 0 for what is no product of Ampere or Hopper in 16 bits. An HGMMA is shared out
        to four."""
        found = PRODUCT.match(self.name)
        if found is None:
            return 0
        if found[1] == "HGMMA":
            return 2 * int(found[2]) * int(found[3]) * int(found[4]) // 4
        return 4096 if self.name.startswith("HMMA.16816") else 2048

    @property
    def wide_bytes(self) -> int:
        """Bytes that a thread moves between global memory and itself, or shared memory, if 16 or more at once."""
        if not self.name.startswith(("LDG", "STG")):
            return 0
        return next((size // 8 for size in (256, 128) if f".{size}" in self.name), 0)

    @property
    def work(self) -> tuple[int, int]:
        """What a path through the main loop has as much of as it can have: products, and bytes in wide accesses."""
        return int(self.is_product), self.wide_bytes


class Body(NamedTuple):
    """A path that does a kernel's work once: of its main loop, or of the whole program where there is none."""

    instructions: list[Instruction]
    is_loop: bool
    others: int = 0
    """Instructions of the loop that the path jumps over, as the code for a tile that lies across the diagonal."""
    around: int = 0
    """Instructions that a program executes before and behind the loop."""

    @property
    def barriers(self) -> int:
        """How often the warps of a program wait for one another."""
        return sum(one.name.startswith("BAR") for one in self.instructions)

    @property
    def waits(self) -> int:
        """1 if registers are loaded from global memory, so that each way through waits for it; asynchronous copies to
        shared memory are ahead by a stage or more."""
        return int(any(one.name.startswith("LDG.") for one in self.instructions))

    @property
    def issued(self) -> int:
        return len(self.instructions)

    def find_shadow(self, flops_per_cycle: float) -> float:
        """Cycles of a way through the loop in which a scheduler with one warp issues its instructions while its tensor
        core, which does so much in a cycle, is at work. The products' cycles and one for each instruction, less these,
        are the time of a way through.

        An HGMMA waits in the tensor core for those before it, and the warp goes on until WARPGROUP.DEPBAR waits for all
        but so many of the last groups, each of which ends with "gsb0"; a group may end on the next way through. An HMMA
        waits for the one before it, and the warp behind it for nothing: when its result is there is not looked at.
        """
        now = free = before = 0.0
        done: list[float] = []
        for _ in range(3):  # the first way through finds no products of another
            before = now
            for one in self.instructions:
                if one.product_flops:
                    free = max(free, now) + one.product_flops / flops_per_cycle
                    if "gsb0" in one.operands:
                        done.append(free)
                    if one.name.startswith("HMMA"):
                        now = free - one.product_flops / flops_per_cycle
                elif found := WAIT.match(f"{one.name} {one.operands}"):
                    now = max([now, *done[: max(0, len(done) - int(found[1], 16))]])
                now += 1
        products = sum(one.product_flops for one in self.instructions) / flops_per_cycle
        return self.issued + products - (now - before)

    @property
    def by_pipe(self) -> Counter[str]:
        return Counter(instruction.pipe for instruction in self.instructions)

    @property
    def products(self) -> int:
        return sum(one.is_product for one in self.instructions)

    @property
    def stored_bytes(self) -> int:
        return sum(one.wide_bytes for one in self.instructions if one.name.startswith("STG"))

    @property
    def loaded_bytes(self) -> int:
        return sum(one.wide_bytes for one in self.instructions if one.name.startswith("LDG"))


def parse(listing: str) -> list[Instruction]:
    """What `cuobjdump -sass` prints, without what stands behind the end to fill the memory."""
    found = [Instruction(int(a, 16), p or "", n, o) for a, p, n, o in INSTRUCTION.findall(listing)]
    while found and (found[-1].name == "NOP" or found[-1].target == found[-1].address):
        found.pop()
    return found


def find_body(instructions: list[Instruction]) -> Body:
    """The main loop, or the whole program where its wide stores are outside of loops.

    That is the loop with the most products; without any, the longest of those that store, for a loop over parameters is
    short; and where no loop stores, the one that loads most. Where the code branches, the path with the most work
    counts, and of these the shortest: a tile that lies inside jumps over the code for its borders, and a quotient over
    the one for subnormal numbers.
    """
    # Behind the end lies what runs where a wait takes long; it jumps back and makes no loop.
    end = max((one.address for one in instructions if one.name == "EXIT"), default=instructions[-1].address + 1)
    jumps = [(one.target, one.address) for one in instructions if one.target is not None]
    loops = [(target, address) for target, address in jumps if target < address < end]
    whole = Body(_find_path(instructions, instructions[0].address, None), False)
    bodies = [_make_loop(instructions, start, end) for start, end in loops]
    best = max(bodies, key=_rank, default=whole)
    is_main = best.products or best.stored_bytes or (best.loaded_bytes and not whole.stored_bytes)
    return best if is_main else whole


def _make_loop(instructions: list[Instruction], start: int, end: int) -> Body:
    once = _find_path(instructions, start, end)
    inside = [index for index, one in enumerate(instructions) if start <= one.address <= end]
    before = len(_find_path(instructions, instructions[0].address, start)) - 1
    behind = instructions[inside[-1] + 1 :]
    around = max(0, before) + (len(_find_path(instructions, behind[0].address, None)) if behind else 0)
    return Body(once, True, len(inside) - len(once), around)


def _rank(body: Body) -> tuple[int, int, int]:
    if body.products:  # of loops around each other, the inner one
        return body.products, -body.issued, 0
    return 0, body.issued if body.stored_bytes else 0, body.loaded_bytes


def _find_path(instructions: list[Instruction], start: int, end: int | None) -> list[Instruction]:
    """From start to the jump at `end`, or to any end of the program; jumps backwards are not taken."""
    index_of = {one.address: index for index, one in enumerate(instructions)}
    first, last = index_of[start], len(instructions) - 1 if end is None else index_of[end]

    best: dict[int, tuple[tuple[int, int, int], int | None]] = {}
    for index in range(last, first - 1, -1):
        one = instructions[index]
        follows: list[int | None] = []
        is_exit = one.name == "EXIT" and not one.predicate
        is_end = index == last or (end is None and is_exit)
        if is_end:
            follows.append(None)
        elif is_exit:  # on no path to `end`
            continue
        elif one.name != "BRA" or _is_conditional(one):
            follows.append(index + 1)
        target = one.target
        if not is_end and target is not None and one.address < target and index_of.get(target, last + 1) <= last:
            follows.append(index_of[target])
        reached = [(best[n][0] if n is not None else (0, 0, 0), n) for n in follows if n is None or n in best]
        if reached:
            (products, moved, length), following = max(reached, key=lambda found: found[0])
            best[index] = (products + one.work[0], moved + one.work[1], length - 1), following
    path: list[Instruction] = []
    step: int | None = first if first in best else None
    while step is not None:
        path.append(instructions[step])
        step = best[step][1]
    return path


def _is_conditional(jump: Instruction) -> bool:
    return bool(jump.predicate) or bool(re.match(r"!?U?P\d", jump.operands))
