"""The grid's judge finds what is wrong: a gradient, a mask, a byte, a recomputation that changes something."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_cpu
import pytest
from distributed import run_megatron_ranks
from grid import judge as grid_judge
from grid import run_model as grid_run
from grid.cases import Case, Layout

from tempo_megatron.slots import dropout_rng

DROPPED = Case("GPT", Layout(), "full", "recompute", 0.1, "fp32")
STOCK = dataclasses.replace(DROPPED, choice="off")
REFUSED = Case("Llama", Layout(), "none", "inplace", 0.0, "fp32")

_run, _count, _set = grid_run.run_model, grid_run.count_stack, dropout_rng.set_micro_batch


def _run_wrongly(part: float) -> Any:
    """run_model in which a gradient of the case, and of no witness, is off by `part` of it."""

    def run(case: Case, *, is_stock: bool = False, **settings: Any) -> Any:
        found = _run(case, is_stock=is_stock, **settings)
        if not is_stock and case.dtype != "fp64":
            found.gradients["decoder.final_layernorm.weight"] *= 1 + part
        return found

    return run


CHANGES: dict[str, Any] = {
    "nothing": None,
    "a gradient": ("grid.judge.run_model", _run_wrongly(1e-3)),
    "a gradient's last bits": ("grid.judge.run_model", _run_wrongly(2e-7)),
    "kept bytes": ("grid.run_model.count_stack", lambda *args, **more: round(1.02 * _count(*args, **more))),
    "the sample": ("grid.run_model.dropout_rng.set_micro_batch", lambda seed, first: _set(seed, first + 1)),
    # Every rank takes its rows for the first ones.
    "the rows": (
        "tempo_megatron.slots.context_parallel.compute_document_segments",
        lambda boundaries, rank, size: [
            dropout_rng.Segment(document, 0, (end - start) // size)
            for document, (start, end) in enumerate(itertools.pairwise(boundaries))
        ],
    ),
    "a gradient that is none": ("grid.judge.run_model", _run_wrongly(float("nan"))),
}


def judge(case: Case, changes: list[str]) -> list[dict[str, Any]]:
    """One judge's results, each with one thing changed; first of all nothing."""
    megatron_cpu.install()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for reference in grid_judge.list_references([case]):
            grid_judge.save_reference(reference, Path(folder))
        judge = grid_judge.Judge(Path(folder), draws=2)
        for name in ["nothing", *changes]:
            if CHANGES[name] is None:
                found.append(judge.judge(case))
            else:
                with mock.patch(*CHANGES[name]):
                    found.append(judge.judge(case))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "changes", "messages"),
    [
        (
            DROPPED,
            ["a gradient", "a gradient that is none", "a gradient's last bits", "kept bytes", "the sample"],
            [
                "the error of decoder.final_layernorm.weight is .* of its limit",
                "the error of decoder.final_layernorm.weight is nan",
                "recomputation changes decoder.final_layernorm.weight",
                "decoder keeps .* bytes, and the formula says",
                "elements of masks are not those of one process",
            ],
        ),
        (STOCK, ["a gradient that is none", "kept bytes"], ["not finite", "decoder keeps"]),
    ],
    ids=["tempo", "stock"],
)
def test_what_is_wrong_fails(case: Case, changes: list[str], messages: list[str]) -> None:
    ((passed, *failed),) = run_megatron_ranks(judge, 1, 1, case, changes)
    assert passed["status"] == "passed", passed
    assert [result["status"] for result in failed] == ["failed"] * len(changes)
    for result, message in zip(failed, messages, strict=True):
        assert re.search(message, result["message"]), result


@pytest.mark.slow
def test_masks_of_context_parallel_ranks_that_are_not_those_of_one_process_fail() -> None:
    case = Case("GPT", Layout(cp=2, comm_type="all_gather"), "none", "auto", 0.1, "fp32", "packed")
    for passed, failed in run_megatron_ranks(judge, 2, 1, case, ["the rows"], context_parallel_size=2):
        assert passed["status"] == "passed", passed
        assert re.search("the error of .* of its limit; .* elements of masks are drawn by no rank", failed["message"])


@pytest.mark.slow
def test_a_refusal_is_one_sentence_and_anything_else_fails() -> None:
    ((refused,),) = run_megatron_ranks(judge, 1, 1, REFUSED, [])
    assert refused["status"] == "refused"
    assert refused["message"].startswith(
        "activation is swiglu, and in place exists for gelu and squared relu only; set"
    )
