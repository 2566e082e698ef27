"""Finds, in what Triton's frontend makes of a launch, whole numbers of 32 bits that the launch's sizes let run over.

An index that passes 2**31 is right only if it is widened before the product. A product that is widened afterwards, or
never, wraps around: a mask is empty, or an address is another one. So each whole number gets a range [low, high], from
those of the launch's arguments, of its grid and of constants, and every number of 32 bits that goes into an address, a
wider number or a signed comparison has to stay within 32 bits.

- A product has to, whatever its factors are: one that is loaded, or that a loop carries on, has any value of its type.
- A sum has to if both its terms are bounded: a loop's counter ends at a number that has 32 bits itself.
- Bits that are only mixed, as Philox does, are compared without a sign, and go into nothing of the above.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import NamedTuple

from ahead_of_time import Launch, list_parameters, source_of
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

Range = tuple[int, int]

_VALUE = r"%[\w$.-]+(?:#\d+)?"
_LINE = re.compile(r'(?:(%[\w$.-]+)(?::(\d+))? = )?"?([a-z_]+\.[a-z_]+)"?(.*)')
_SAME = {f"tt.{name}" for name in "splat broadcast expand_dims reshape trans unsplat".split()} | {"arith.extsi"}
_CHECKED = {"arith.muli", "arith.shli", "arith.addi", "arith.subi"}
# Of two numbers, and in each of them either growing or falling: a range's ends follow from the ends.
_MONOTONE = {
    "arith.addi": operator.add, "arith.subi": operator.sub, "arith.muli": operator.mul, "arith.shli": operator.lshift,
    "arith.shrsi": operator.rshift, "arith.shrui": operator.rshift, "arith.minsi": min, "arith.maxsi": max,
    "arith.divsi": lambda a, b: a // b if a >= 0 else -(-a // b),
}  # fmt: skip
_ROUNDS = 20
"""After so many, a range that a loop still widens has no end."""


class _Operation(NamedTuple):
    results: list[str]
    name: str
    operands: list[str]
    rest: str
    bits: int | None
    """Of the result; None where it is no whole number."""


def _make_ttir(launch: Launch, capability: int = 90) -> str:
    """The text of Triton's first representation, in which all functions are inlined."""
    source, backend = source_of(launch), make_backend(GPUTarget("cuda", capability, 32))
    options, context, stages = backend.parse_options(dict(launch.options)), ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(GPUTarget("cuda", capability, 32), options, functions, modules, context)
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


def find_overflows(launch: Launch) -> list[str]:
    """The operations of a launch whose result, a number of 32 bits, may lie outside of them."""
    function = _Function(launch, _make_ttir(launch))
    ranges = function.find_ranges()
    needed, found = function.find_needed(), []
    for one in function.operations:
        if one.name in _CHECKED and one.bits == 32 and one.results[0] in needed:
            terms = [ranges.get(operand) for operand in one.operands]
            is_bounded = all(term is not None and not _is_open(term, 32) for term in terms)
            if (is_bounded or one.name in ("arith.muli", "arith.shli")) and not _fits(_compute(one, terms), 32):
                found.append(f"{one.results[0]} = {one.name} {', '.join(one.operands)}: {terms}")
    return found


def _limits(bits: int) -> Range:
    return (0, 1) if bits == 1 else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _fits(found: Range | None, bits: int) -> bool:
    low, high = _limits(bits)
    return found is not None and low <= found[0] and found[1] <= high


def _is_open(found: Range, bits: int) -> bool:
    low, high = _limits(bits)
    return found[0] <= low or found[1] >= high


def _hull(*ranges: Range) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _count_bits(rest: str) -> int | None:
    kind = re.search(r"(?:<(?:\d+x)*|[ :>])i(\d+)>?$", rest)
    return int(kind[1]) if kind else None


def _compute(one: _Operation, terms: list[Range | None]) -> Range | None:
    """The range of an operation's result as if numbers had no end; None where nothing is known of it."""
    name, rest = one.name, one.rest
    if name == "arith.constant":
        number = re.match(r" (?:dense<)?(-?\d+|true|false)>? :", rest)
        if number is None:
            return None
        value = int({"true": "1", "false": "0"}.get(number[1], number[1]))
        return value, value
    if name == "tt.make_range":
        start, end = (int(re.search(rf"{key} = (\d+)", rest)[1]) for key in ("start", "end"))
        return start, end - 1
    if not terms or None in terms:
        return None
    (low, high), *others = terms
    if name in _SAME:
        return low, high
    if name == "arith.trunci":
        return (low, high) if _fits((low, high), one.bits or 0) else None
    if name == "arith.extui":
        source = re.search(r": (?:tensor<[\dx]*)?i(\d+)", rest)
        return (low, high) if low >= 0 else (0, (1 << int(source[1])) - 1)
    if name == "arith.select":
        return _hull(*others)
    if not others:
        return None
    first, last = others[0]
    is_known = {
        "arith.shli": 0 <= first <= last < 64,
        "arith.shrsi": first >= 0,
        "arith.shrui": min(low, first) >= 0,
        "arith.divsi": first > 0,
        "arith.remsi": first > 0,
        "arith.ori": min(low, first) >= 0,
        "arith.xori": min(low, first) >= 0,
        "arith.andi": max(low, first) >= 0,
    }
    if not is_known.get(name, True):
        return None
    if name in _MONOTONE:
        ends = [_MONOTONE[name](a, b) for a in (low, high) for b in (first, last)]
        return min(ends), max(ends)
    if name == "arith.remsi":
        return (0 if low >= 0 else 1 - last), (min(high, last - 1) if low >= 0 else last - 1)
    if name in ("arith.ori", "arith.xori"):
        return 0, (1 << max(high, last).bit_length()) - 1
    if name == "arith.andi":
        return 0, min(part[1] for part in ((low, high), (first, last)) if part[0] >= 0)
    return None


class _Region(NamedTuple):
    """What is between the braces of a loop or a branch; of others, empty."""

    name: str = ""
    results: Sequence[str] = ()
    carried: Sequence[str] = ()
    condition: Sequence[str] = ()
    """What a while loop hands to its body and, at last, to its results."""


class _Function:
    """A kernel's operations in the order of the text, and what its loops and branches hand on."""

    def __init__(self, launch: Launch, text: str) -> None:
        self.operations: list[_Operation] = []
        self.makers: dict[str, _Operation] = {}
        self.handed: dict[str, list[str]] = {}
        """Of each number that a loop carries, or that comes out of a loop or a branch: all that it may be."""
        self.bits: dict[str, int] = {}
        self.given: dict[str, Range] = {}
        self.counters: dict[str, tuple[str, str]] = {}
        self.grid = (*launch.grid, 1, 1)
        # A name that is used in one region may be that of another number in the next one.
        self.scopes: list[dict[str, str]] = [{}]
        self.regions: list[_Region] = []
        for line in text.splitlines():
            line = re.sub(r" loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)", "", line).strip()
            if "tt.func public" in line:
                # Arguments stand in the launch's order, those of tuples one after the other.
                for (name, kind), value in zip(
                    re.findall(r"(%[\w.]+): ([^ ,)]+)", line), list_parameters(launch), strict=True
                ):
                    if re.fullmatch(r"i\d+", kind):
                        self.given[self._define(name)] = (int(value),) * 2
            elif line.startswith("}"):
                if len(self.scopes) > 1:
                    self.scopes.pop()
                    self.scopes += [dict(self.scopes[-1])] * line.endswith("{")
                    self.regions = self.regions if line.endswith("{") else self.regions[:-1]
            elif line.startswith("^bb0") and self.regions and self.regions[-1].name == "scf.while":
                arguments = re.findall(rf"({_VALUE}): (\S+?)[,)]", line)
                for (name, kind), source in zip(arguments, self.regions[-1].condition, strict=True):
                    self._hand(self._define(name), kind, [source])
            elif (found := _LINE.match(line)) and "tt.func" not in line:
                self._read(*found.groups())

    def _define(self, name: str) -> str:
        self.scopes[-1][name] = f"{name}@{len(self.handed)}.{len(self.operations)}"
        return self.scopes[-1][name]

    def _find(self, text: str) -> list[str]:
        """The numbers that are named before the types."""
        text = re.sub(r"\{.*?\}|\".*?\"", "", text).split(" : ")[0]
        return [self.scopes[-1].get(name, name) for name in re.findall(_VALUE, text)]

    def _hand(self, value: str, kind: str, sources: list[str]) -> None:
        self.handed.setdefault(value, []).extend(sources)
        bits = _count_bits(f" {kind}")
        if bits is not None:
            self.bits[value] = bits

    def _read(self, result: str | None, count: str | None, name: str, rest: str) -> None:
        operands, results = self._find(rest), []
        if name in ("scf.for", "scf.while", "scf.if"):
            pairs = re.findall(
                rf"({_VALUE}) = ({_VALUE})", rest.partition("iter_args" if name == "scf.for" else " ")[2]
            )
            kinds = re.findall(r"[(,]\s*(tensor<[^()]*?>+|![\w.]+<[^()]*?>|\w+)(?=[,)])", rest.partition("-> ")[2])
            outers = [self.scopes[-1].get(outer, outer) for _, outer in pairs]
            names = [f"{result}#{i}" for i in range(int(count))] if count else [result] * (result is not None)
            results = [self._define(each) for each in names if each]
            self.scopes.append(dict(self.scopes[-1]))
            if name == "scf.for":
                counter = self._define(re.findall(_VALUE, rest)[0])
                self.counters[counter] = (operands[1], operands[2])
            carried = [self._define(inner) for inner, _ in pairs]
            assert len(kinds) == len(results) and len(outers) in (0, len(kinds)), rest
            for value, kind, outer in zip(carried, kinds, outers, strict=False):
                self._hand(value, kind, [outer])
            for place, (value, kind) in enumerate(zip(results, kinds, strict=True)):
                self._hand(value, kind, [carried[place]] if name == "scf.for" else [])
            self.regions.append(_Region(name, results, carried))
        elif name == "scf.condition":
            self.regions[-1] = self.regions[-1]._replace(condition=operands[1:])
            for value, source in zip(self.regions[-1].results, operands[1:], strict=True):
                self.handed[value].append(source)
        elif name == "scf.yield":
            region = self.regions[-1]
            values = region.results if region.name == "scf.if" else region.carried
            for value, source in zip(values, operands, strict=True):
                self.handed[value].append(source)
        else:
            if result is not None:
                results = [self._define(result)]
            bits = _count_bits(rest)
            self.operations.append(_Operation(results, name, operands, rest, bits))
            self.makers |= dict.fromkeys(results, self.operations[-1])
            if rest.endswith("{"):
                self.scopes.append(dict(self.scopes[-1]))
                self.regions.append(_Region())

    def find_ranges(self) -> dict[str, Range]:
        """The range of each whole number."""
        handed: dict[str, Range] = {}
        for number in range(100):
            ranges = self._pass(handed)
            now = {}
            for value, sources in self.handed.items():
                known = [ranges[source] for source in sources if source in ranges]
                if value not in self.bits or not known:
                    continue
                now[value] = _hull(*known, *([handed[value]] if value in handed else []))
                if number >= _ROUNDS and value in handed:
                    (low, high), (old_low, old_high), ends = now[value], handed[value], _limits(self.bits[value])
                    now[value] = ends[0] if low < old_low else low, ends[1] if high > old_high else high
            if now == handed:
                return ranges
            handed = now
        raise AssertionError("ranges do not settle")

    def _pass(self, handed: dict[str, Range]) -> dict[str, Range]:
        ranges, unknown = {**self.given, **handed}, (self.handed.keys() & self.bits.keys()) - handed.keys()
        for one in self.operations:
            if one.bits is None or not one.results:
                continue
            for operand in self.counters.keys() & set(one.operands) - ranges.keys():
                low, high = (ranges.get(bound, _limits(32)) for bound in self.counters[operand])
                ranges[operand] = low[0], max(low[0], high[1] - 1)
            if unknown & set(one.operands):
                unknown.add(one.results[0])  # until the loop's first round is known
                continue
            if one.name in ("tt.get_program_id", "tt.get_num_programs"):
                size = self.grid["xyz".index(one.rest.split()[0])]
                found: Range | None = (0, size - 1) if one.name == "tt.get_program_id" else (size, size)
            else:
                found = self._cancel(one, ranges) or _compute(one, [ranges.get(operand) for operand in one.operands])
            ranges[one.results[0]] = found if found and _fits(found, one.bits) else _limits(one.bits)
        return ranges

    def _cancel(self, one: _Operation, ranges: dict[str, Range]) -> Range | None:
        """(a + b) - a = b."""
        if one.name == "arith.subi":
            whole, part = (self._strip(operand) for operand in one.operands)
            terms = self.makers[whole].operands if whole in self.makers else []
            rest = [term for term in terms if self._strip(term) != part]
            if len(rest) == 1 and self.makers[whole].name == "arith.addi":
                return ranges.get(rest[0])
        return None

    def _strip(self, value: str) -> str:
        """The number itself, whatever its shape."""
        while value in self.makers and self.makers[value].name in _SAME - {"arith.extsi"}:
            value = self.makers[value].operands[0]
        return value

    def find_needed(self) -> set[str]:
        """The numbers that go into an address, a wider number or a comparison with a sign."""
        needed: set[str] = set()
        pending: list[str] = []
        for one in self.operations:
            is_signed = one.name == "arith.cmpi" and re.match(r" s[lg][te]", one.rest)
            if one.name in ("tt.addptr", "arith.extsi") or is_signed:
                pending += one.operands
        while pending:
            value = pending.pop()
            if value in needed:
                continue
            needed.add(value)
            pending += self.handed.get(value, [])
            if value in self.makers and self.makers[value].bits == 32 and self.makers[value].name != "arith.trunci":
                pending += self.makers[value].operands
        return needed
