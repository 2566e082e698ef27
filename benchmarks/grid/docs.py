"""docs/compatibility.md from the grid's results: a table per family of models, layouts down, the rest across."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from grid.cases import CHOICES, LAYOUTS, RULES, Case, find_rule, list_cases, list_product
from grid.judge import DRAWS
from grid.models import FAMILIES, RECOMPUTE

_HEAD = """<!-- Written by `python benchmarks/compatibility.py --write-docs`; not to be edited. -->

# What Tempo is held against, layout by layout

Each number is of cases that hold: dropout 0 and 0.1, float32 and bfloat16 are the four of one field. The models are
small, the modules Megatron's own, and the processes gloo's on a CPU, 1, 2 or 4; pipelines run Megatron's schedules,
1F1B and interleaved. A case holds where all of this does:

- Losses of all tokens and the gradient of every parameter: error(ours) <= 2 x error(witness) + 1 ulp of the largest
  exact value. At dropout 0 exact is stock Megatron in float64 on one process, and the witness is stock of the same
  dtype in the same layout, without recomputation. At dropout 0.1 exact is Tempo in float64 on one process without
  recomputation, and the witness is the same choice and dtype on one process, or, for what only a layout rounds, stock
  in that layout at dropout 0. GELU in place has its floor beside that: 5.1e-5 (float32) or 1.6e-2 (bfloat16) of the
  largest exact value; and the weight of a norm in place, in float32, half of its round-off times the sum over tokens of
  abs(dy * normalised x), because the x that y carries is off by as much. The models are so small that the largest
  error is a matter of luck: a case that is over its limit with one draw of the weights is held to the rule over
  {draws} draws, the sum of its errors to the sum of their limits.
- Every row of every dropout mask is, bit for bit, that of one process.
- What the layers keep for backward is within 1 % of the formula of `tests/support/kept_formula.py`.

`off` is stock Megatron; at dropout 0.1 its masks depend on the layout, so that there it is only run, and its bytes are
held against the formula. GPT has LayerNorm, GELU, biases, learned positions and tied weights, Llama RMSNorm, SwiGLU,
grouped queries, rotary positions, no biases and weights of its own in the output layer.
"""


def write_docs(path: Path, results: dict[str, dict[str, Any]], versions: dict[str, str]) -> None:
    """Write the table; what was not run says so."""
    path.write_text(format_docs(results, versions), encoding="utf-8")


def format_docs(results: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    """The whole text."""
    lines = [_HEAD.format(draws=DRAWS), *_summarise(results, versions), "", *_explain()]
    for family in FAMILIES:
        lines += ["", f"## {family}", "", *_format_table(family, results)]
    failed = {key: result for key, result in results.items() if result["status"] == "failed"}
    if failed:
        lines += [
            "",
            "## Failed",
            "",
            *(f"- {key}: {_first_line(result['message'])}" for key, result in failed.items()),
        ]
    return "\n".join(lines) + "\n"


def _first_line(message: str) -> str:
    lines = message.strip().splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def _summarise(results: dict[str, dict[str, Any]], versions: dict[str, str]) -> list[str]:
    cases = list_cases()
    statuses = Counter(results[case.key]["status"] if case.key in results else "not run" for case in cases)
    words = ", ".join(f"{count} {name}" for name, count in sorted(statuses.items()))
    passed = [result for case in cases if (result := results.get(case.key)) and result["status"] == "passed"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"Of {len(list_product())} combinations {len(cases)} can be: {words}. {software}; no Apex and no "]
    lines[0] += "Transformer Engine."
    if passed:
        worst = max(passed, key=lambda result: result.get("ratio", 0.0))
        off = max(result.get("bytes_off", 0.0) for result in passed)
        lines.append(
            f"The largest error is {worst['ratio']:.2f} of its limit ({worst['worst']}); kept bytes and formula differ "
            f"by {100 * off:.2g} % at most."
        )
        lines.append(f"{sum('draws' in result for result in passed)} cases were judged by {DRAWS} draws.")
    return lines


def _explain() -> list[str]:
    lines = ["| | |", "| --- | --- |"]
    lines.append("| 4 | as many of the field's four cases hold |")
    lines.append("| R | Tempo refuses at the start, in one sentence: in place exists for GELU and squared ReLU only |")
    lines.append("| F | at least one case fails |")
    lines.append("| . | not run |")
    lines += [f"| {rule.name} | {rule.reason} |" for rule in RULES]
    return lines


def _format_table(family: str, results: dict[str, dict[str, Any]]) -> list[str]:
    columns = [(recompute, choice) for recompute in RECOMPUTE for choice in CHOICES]
    head = [f"{recompute}: {choice}" if choice == CHOICES[0] else choice for recompute, choice in columns]
    lines = ["| | " + " | ".join(head) + " |", "| --- |" + " :-: |" * len(columns)]
    for layout in LAYOUTS:
        fields = [
            _format_field([c for c in _product_of(family, layout) if (c.recompute, c.choice) == column], results)
            for column in columns
        ]
        lines.append(f"| {layout} | " + " | ".join(fields) + " |")
    return lines


def _product_of(family: str, layout: Any) -> list[Case]:
    return [case for case in list_product() if case.family == family and case.layout == layout]


def _format_field(cases: list[Case], results: dict[str, dict[str, Any]]) -> str:
    rule = find_rule(cases[0])
    if rule is not None:
        return rule.name
    statuses = [results[case.key]["status"] for case in cases if case.key in results]
    if "failed" in statuses:
        return "F"
    if not statuses:
        return "."
    return "R" if "refused" in statuses else str(len(statuses))
