"""Which cases of a test run always, and which with --exhaustive only.

Where a test has axes (dtypes, shapes, forms), a fault lies in one value or, seldom, in how two of them meet:
parametrize_covering has a case for every two instead of all products.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Axis = Mapping[str, Any] | Iterable[Any]


def exhaustive(*cases: Sequence[Any]) -> list[Any]:
    """`cases` for pytest.mark.parametrize that run with --exhaustive only."""
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


def compiles(test: Any) -> Any:
    """Marks a test that needs the compiler of C++, and so seconds."""
    from tempo_kernels.compiled import find_compiler

    skip = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler is installed; none is needed")
    return pytest.mark.slow(skip(test))


def cover(lengths: Sequence[int], num_pairing: int) -> list[tuple[int, ...]]:
    """Rows of an index per axis, the same every time: of the first `num_pairing` axes each pair of values occurs, of
    the others each value.

    Greedy: next comes the row with most of what no row has yet; of equal ones that with the rarest values.
    """
    brings = {
        row: {*enumerate(row), *itertools.combinations(enumerate(row[:num_pairing]), 2)}
        for row in itertools.product(*map(range, lengths))
    }
    missing, used, chosen = set().union(*brings.values()), Counter(), []
    while missing:
        row = max(brings, key=lambda row: (len(brings[row] & missing), -sum(used[value] for value in enumerate(row))))
        chosen.append(row)
        used.update(enumerate(row))
        missing -= brings[row]
    return chosen


def parametrize_covering(each: Mapping[str, Axis] | None = None, **axes: Axis) -> pytest.MarkDecorator:
    """As a pytest.mark.parametrize for every axis, but only so many cases that each value meets each of another axis.

    Of an axis in `each`, every value occurs, with whichever others. All products run with --exhaustive. An axis is a
    list of values, or a dict of values by the names that they have in a test's name.
    """
    named = {
        axis: list(values.items()) if isinstance(values, Mapping) else [(str(value), value) for value in values]
        for axis, values in {**axes, **(each or {})}.items()
    }
    lengths = [len(values) for values in named.values()]
    chosen, cases = set(cover(lengths, len(axes))), []
    for row in itertools.product(*map(range, lengths)):
        names, values = zip(*(named[axis][index] for axis, index in zip(named, row, strict=True)), strict=True)
        marks = () if row in chosen else pytest.mark.exhaustive
        cases.append(pytest.param(*values, id="-".join(name.removeprefix("torch.") for name in names), marks=marks))
    return pytest.mark.parametrize(list(named), cases)
