"""docs/compatibility.md from the grid's results: tables with layouts down and the rest across."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grid.cases import (
    LAYOUTS,
    RULES,
    SEQUENCE_LAYOUTS,
    SEQUENCE_RULES,
    Case,
    Layout,
    Rule,
    find_rule,
    list_cases,
    list_product,
    list_sequence_cases,
    list_sequence_product,
)
from grid.judge import DRAWS
from grid.models import FAMILIES, SEQUENCE_FAMILIES

_HEAD = """<!-- Written by `python benchmarks/compatibility.py --write-docs`; not to be edited. -->

# What was compared with stock, layout by layout

Small models train on 1 to 8 processes of a CPU, with Megatron's modules and pipeline schedules. A case holds if:

- **Losses of all tokens and every gradient** meet error(ours) <= 2 x error(witness) + 1 ulp of the largest exact value.
  The exact run is in float64 on one process, the witness in the case's dtype; neither recomputes. At dropout 0 both are
  stock Megatron, the witness in the case's layout; at dropout 0.1 both are Tempo on one process.
  `benchmarks/grid/judge.py` says what is allowed besides: to GELU in place (5.1e-5 in float32, 1.6e-2 in bfloat16 of
  the largest exact value), to norms in place and to layouts. A case over its limit is judged by {draws} draws of the
  weights.
- **Every dropout mask** is that of a single process, element by element.
- **Kept bytes** are within 1 % of the formula in `tests/support/kept_formula.py`.

With `off`, which is stock Megatron, only the kept bytes count at dropout 0.1.
"""
_MODELS_HEAD = """## Models

How many of 64 cases hold: Megatron recomputes nothing, `core_attn`, `mlp` or all; Tempo's choice is `inplace`,
`recompute`, `auto` or `off`; dropout is 0 or 0.1; the dtype is float32 or bfloat16. GPT has LayerNorm, GELU, biases,
learned positions and tied weights; Llama has RMSNorm, SwiGLU, grouped queries, rotary positions and untied weights.
"""
_SEQUENCE_HEAD = """## Context parallelism, packed rows, latent attention, multi-token prediction

Four cases of `auto` each, two of them with packed rows (`PackedSeqParams`, thd; documents of 16, 32 and 16 tokens):
dropout 0 in bfloat16, and dropout 0.1 in float32, with TP 2 under full recomputation (not for packed rows of MTP, where
Megatron 0.16.1 ends in a TypeError). MLA is a GPT with latent attention, RMSNorm and heads of 12 and 6; MTP is a GPT
that predicts two further tokens. The reference has one context-parallel rank and each document in a row of its own.
Gradients in bfloat16 are added over ranks in float32. Kept bytes leave out the boundaries and token numbers of packed
rows.
"""


def write_docs(path: Path, results: dict[str, dict[str, Any]], versions: dict[str, str]) -> None:
    """Write the table; what was not run says so."""
    path.write_text(format_docs(results, versions), encoding="utf-8")


def format_docs(results: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    """The whole text."""
    models = _format_table(list_product(), FAMILIES, LAYOUTS, RULES, results)
    sequences = _format_table(list_sequence_product(), SEQUENCE_FAMILIES, SEQUENCE_LAYOUTS, SEQUENCE_RULES, results)
    explained = _explain({letter for line in (*models, *sequences) for letter in re.findall(r" (\S)(?=[ ,])", line)})
    lines = [_HEAD.format(draws=DRAWS), *_summarise(results, versions), "", *explained]
    lines += ["", _MODELS_HEAD, *models, "", _SEQUENCE_HEAD, *sequences]
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
    # Some of the second part are the first part's too.
    cases = {case.key: case for case in (*list_cases(), *list_sequence_cases())}.values()
    product = {case.key for case in (*list_product(), *list_sequence_product())}
    statuses = Counter(results[case.key]["status"] if case.key in results else "not run" for case in cases)
    words = ", ".join(f"{count} {name}" for name, count in sorted(statuses.items()))
    passed = [result for case in cases if (result := results.get(case.key)) and result["status"] == "passed"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [f"Of {len(product)} combinations {len(cases)} can be: {words}. {software}; no Apex and no "]
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


def _explain(letters: set[str]) -> list[str]:
    meanings = {
        "R": "are refused at the start, in one sentence: in place exists for GELU and squared ReLU only",
        "F": "fail",
        "?": "were not run",
    }
    rules = {rule.name: rule.reason for rule in (*RULES, *SEQUENCE_RULES)}
    return [
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {reason} |" for name, reason in (meanings | rules).items() if name in letters),
    ]


def _format_table(
    product: list[Case],
    families: Iterable[str],
    layouts: Iterable[Layout],
    rules: tuple[Rule, ...],
    results: dict[str, dict[str, Any]],
) -> list[str]:
    """Layouts down, those with equal results in one row, and families across; a layout that no family can have is left
    out."""
    families = list(families)
    lines = ["| | " + " | ".join(families) + " |", "| --- |" + " :-: |" * len(families)]
    rows: dict[str, list[str]] = {}
    for layout in layouts:
        here = [case for case in product if case.layout == layout]
        if any(find_rule(case, rules) is None for case in here):
            fields = (_format_field([case for case in here if case.family == f], rules, results) for f in families)
            rows.setdefault(" | ".join(fields), []).append(str(layout))
    return lines + [f"| {'; '.join(names)} | {fields} |" for fields, names in rows.items()]


def _format_field(cases: list[Case], rules: tuple[Rule, ...], results: dict[str, dict[str, Any]]) -> str:
    """How many cases hold, then how many do not, by the letters that `_explain` explains; rules have no number."""
    ruled = {case.key: rule.name for case in cases if (rule := find_rule(case, rules))}
    letters = {"passed": "", "refused": "R", "failed": "F", "": "?"}
    statuses = (results.get(case.key, {"status": ""})["status"] for case in cases if case.key not in ruled)
    counts = Counter(letters[status] for status in statuses)
    parts = [f"{counts[letter]}{letter and ' ' + letter}" for letter in letters.values() if counts[letter]]
    return ", ".join([*parts, *sorted(set(ruled.values()))])
