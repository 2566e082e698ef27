"""docs/compatibility.md from the grid's results: tables with layouts down and the rest across."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from grid.cases import (
    CHOICES,
    LAYOUTS,
    RULES,
    SEQUENCE_LAYOUTS,
    SEQUENCE_RULES,
    Case,
    Rule,
    find_rule,
    list_cases,
    list_product,
    list_sequence_cases,
    list_sequence_product,
)
from grid.judge import DRAWS
from grid.models import FAMILIES, RECOMPUTE, SEQUENCE_FAMILIES

_HEAD = """<!-- Written by `python benchmarks/compatibility.py --write-docs`; not to be edited. -->

# What Tempo is held against, layout by layout

A 4 says that four cases hold: dropout 0 and 0.1, each in float32 and bfloat16. The models are small, the modules and
the schedules of pipelines Megatron's own. They run on 1, 2 or 4 processes of a CPU, with context parallelism on up to
8. A case holds if all of this does:

- Losses of all tokens and every parameter's gradient: error(ours) <= 2 x error(witness) + 1 ulp of the largest exact
  value. All exact runs are in float64 on one process. At dropout 0 the exact run is stock Megatron, and the witness is
  stock in the case's dtype and layout. At dropout 0.1 the exact run is Tempo, and the witness is Tempo with the same
  choice and dtype on one process, or, for what only a layout rounds, stock in that layout at dropout 0. Exact runs and
  witnesses recompute nothing. Two operations in place have a further allowance: GELU 5.1e-5 (float32) or 1.6e-2
  (bfloat16) of the largest exact value, and the weight of a norm in float32 half its round-off times the sum over
  tokens of abs(dy * normalised x). A case over its limit is repeated with {draws} draws of the weights; then the sum of
  its errors must keep to the sum of their limits.
- Every element of every dropout mask is the one that a single process draws, and the ranks together draw all of them.
- What the layers keep for backward is within 1 % of the formula of `tests/support/kept_formula.py`.

`off` is stock Megatron; at dropout 0.1, where its masks depend on the layout, only its kept bytes are compared. GPT has
LayerNorm, GELU, biases, learned positions and tied weights. Llama has RMSNorm, SwiGLU, grouped queries, rotary
positions, no biases and untied weights.
"""
_SEQUENCE_HEAD = """## Context parallelism, packed rows, latent attention, multi-token prediction

A 2 says that two cases of `auto` hold: dropout 0 in bfloat16, and dropout 0.1 in float32, with TP 2 under full
recomputation (except for packed rows of MTP, where Megatron 0.16.1 ends in a TypeError). MLA is a GPT with latent
attention, RMSNorm and heads of 12 and 6. MTP is a GPT that predicts two further tokens. A packed row
(`PackedSeqParams`, thd) has documents of 16, 32 and 16 tokens, and every stage of a pipeline is told where they begin.
Stock has neither context parallelism nor packed rows on a CPU, so a case is compared with one context-parallel rank
that has each document in a row of its own. In bfloat16 the gradients of context-parallel ranks are added in float32,
as Megatron's optimizers do. The formula leaves out the boundaries and token numbers that packed rows keep.
"""


def write_docs(path: Path, results: dict[str, dict[str, Any]], versions: dict[str, str]) -> None:
    """Write the table; what was not run says so."""
    path.write_text(format_docs(results, versions), encoding="utf-8")


def format_docs(results: dict[str, dict[str, Any]], versions: dict[str, str]) -> str:
    """The whole text."""
    lines = [_HEAD.format(draws=DRAWS), *_summarise(results, versions), "", *_explain()]
    for family in FAMILIES:
        lines += ["", f"## {family}", "", *_format_table(family, results)]
    lines += ["", _SEQUENCE_HEAD, *_format_sequences(results)]
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


def _explain() -> list[str]:
    lines = ["| | |", "| --- | --- |"]
    lines.append("| 4, 2 | as many of the field's cases hold |")
    lines.append("| R | Tempo refuses at the start, in one sentence: in place exists for GELU and squared ReLU only |")
    lines.append("| F | at least one case fails |")
    lines.append("| . | not run |")
    lines += [f"| {rule.name} | {rule.reason} |" for rule in (*RULES, *SEQUENCE_RULES)]
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


def _format_sequences(results: dict[str, dict[str, Any]]) -> list[str]:
    columns = [(family, documents) for family in SEQUENCE_FAMILIES for documents in ("", "packed")]
    lines = ["| | " + " | ".join(documents or family for family, documents in columns) + " |"]
    lines.append("| --- |" + " :-: |" * len(columns))
    product = list_sequence_product()
    for layout in SEQUENCE_LAYOUTS:
        here = [case for case in product if case.layout == layout]
        fields = [
            _format_field([case for case in here if (case.family, case.documents) == column], results, SEQUENCE_RULES)
            for column in columns
        ]
        lines.append(f"| {layout} | " + " | ".join(fields) + " |")
    return lines


def _product_of(family: str, layout: Any) -> list[Case]:
    return [case for case in list_product() if case.family == family and case.layout == layout]


def _format_field(cases: list[Case], results: dict[str, dict[str, Any]], rules: tuple[Rule, ...] = RULES) -> str:
    rule = find_rule(cases[0], rules)
    if rule is not None:
        return rule.name
    statuses = [results[case.key]["status"] for case in cases if case.key in results]
    if "failed" in statuses:
        return "F"
    if not statuses:
        return "."
    return "R" if "refused" in statuses else str(len(statuses))
