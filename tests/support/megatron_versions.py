"""Tempo beside stock in every megatron-core of a folder, and the table that docs/megatron_versions.md holds.

`python tests/support/megatron_versions.py FOLDER` writes the table; FOLDER holds a checkout, or an unpacked
wheel, per version.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from script_ranks import results

TABLE = Path(__file__).parents[2] / "docs" / "megatron_versions.md"
# Of each gradient's largest element, in float32's round-off: as gpt.assert_equal_to_stock has it.
GRADIENT_LIMIT_EPS = 100
LOSS_LIMIT = 1e-6
DIFFERENCES = "What differs between the versions"
"""The rest of the document begins so; people write it."""
HEAD = """<!-- The first table is written by `python tests/support/megatron_versions.py FOLDER`. -->

Tempo and stock, compared in one layer of each model at dropout 0, on a CPU in float32, without Transformer Engine and
Apex. Losses agree to 1e-6, and every gradient to 100 times float32's round-off of its largest element; the table has
the largest difference of any gradient in that unit. The keys of `state_dict` and `sharded_state_dict` are stock's. At
dropout 0.1 Tempo's losses are the same number in all versions.

"""


def find_versions(folder: Path) -> list[Path]:
    """The folders below that hold a megatron/core."""
    found = (path.parent.parent.parent for path in folder.glob("*/megatron/core/package_info.py"))
    return sorted(found, key=lambda path: path.name)


def measure(root: Path) -> dict[str, Any]:
    """What megatron_version_cases.py finds in the megatron-core under `root`."""
    with tempfile.TemporaryDirectory() as folder:
        return results((1,), folder, str(root), "megatron_version_cases.py")[1][0]


def is_equal(case: dict[str, Any]) -> bool:
    """Whether Tempo is stock in one case."""
    stock, tempo = case["loss"]
    close = abs(stock - tempo) <= LOSS_LIMIT * abs(stock) and case["gradient_error_eps"] <= GRADIENT_LIMIT_EPS
    return close and all(case["same"].values())


def make_table(results: list[dict[str, Any]]) -> str:
    """The whole file, of results in the order of their versions."""
    cases = list(results[0]["cases"])
    lines = [f"| megatron-core | {' | '.join(cases)} |", f"| --- |{' ---: |' * len(cases)}"]
    for result in results:
        found = result["cases"].values()
        cells = (f"{case['gradient_error_eps']:.0f}" if is_equal(case) else "differs" for case in found)
        lines.append(f"| {result['version']} | {' | '.join(cells)} |")
    _, mark, differences = TABLE.read_text("utf-8").partition(DIFFERENCES)
    return HEAD + "\n".join(lines) + "\n\n" + mark + differences


def main() -> None:
    from packaging.version import Version

    results = [measure(root) for root in find_versions(Path(sys.argv[1]))]
    results.sort(key=lambda result: Version(result["version"]))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(make_table(results), encoding="utf-8")
    print(TABLE.read_text("utf-8"))


if __name__ == "__main__":
    main()
