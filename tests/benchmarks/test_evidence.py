"""No figure stands alone: cards and docs/benchmarks.md are what the results say, and documents what their sources say.

What is checked of a section of README.md or docs/, outside of what a script has written, is this: each figure with a
unit of measurement (sbh, bytes, seconds, a percentage, a multiple) is found, rounded as it is printed, in a card, a
result or file of code that the section names, or in a block of the section that a script has written; or it stands in
figures.json with where it comes from: somebody else's page, the command that prints it, a definition, or a run by hand.
A coarse figure may be found by chance; what is printed with three digits hardly is.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import estimated_models
import layer_rivals
import pytest
import report
import run
import torch
from measurements import measure_missing, read_records

import cards
from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FIGURE = re.compile(r"(?<![\w.,/-])(\d+(?:,\d{3})*(?:\.\d+)?)\s?(%|(?:sbh|[KMGT]i?B|ms|us|s|times|MFU)\b)")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?")
SOURCE = re.compile(r"(?:cards|benchmarks|tests|tempo_megatron|kernels)/[\w/.]+\.(?:md|jsonl|py|json)")
# Unit -> what a source's number, in bytes, seconds or shares, is multiplied with.
SCALES = {"%": 1e2, "KiB": 2**-10, "MiB": 2**-20, "GiB": 2**-30, "KB": 1e-3, "MB": 1e-6, "GB": 1e-9, "ms": 1e3}
LISTED = json.loads((Path(__file__).parent / "figures.json").read_text(encoding="utf-8"))
BLOCK = re.compile(r"<!-- (.*?)(?:: begin| begins) -->.*?<!-- \1(?:: end| ends) -->", re.DOTALL)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`[^`\n]*`")


def list_unsupported(text: str, listed: dict[str, str]) -> dict[str, str]:
    """Figure -> the section that gives it, of the figures that neither a source nor the list has."""
    if text.startswith("<!-- Written by"):
        return {}
    found = {}
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        written = [block[0] for block in BLOCK.finditer(section)]
        figures = FIGURE.findall(INLINE.sub("", FENCE.sub("", BLOCK.sub("", section))))
        known = read_numbers("\n".join(written)) | {
            number for name in SOURCE.findall(section) if figures for number in read_source(name)
        }
        for number, unit in figures:
            figure = f"{number} {unit}"
            if figure not in listed and not is_known(number, unit, known):
                found[figure] = section.partition("\n")[0]
    return found


def is_known(printed: str, unit: str, known: set[float]) -> bool:
    """Whether a number of a source, as it is or in this unit, is printed so."""
    digits, plain = len(printed.partition(".")[2]), printed.replace(",", "")
    return any(f"{abs(number) * scale:.{digits}f}" == plain for number in known for scale in {1, SCALES.get(unit, 1)})


@functools.cache
def read_source(name: str) -> set[float]:
    path = ROOT / name
    return read_numbers(path.read_text(encoding="utf-8")) if path.is_file() else set()


def read_numbers(text: str) -> set[float]:
    return {float(number.replace(",", "").replace("_", "")) for number in NUMBER.findall(text)}


def test_cards_and_the_page_of_benchmarks_are_what_the_results_say() -> None:
    texts = {**cards.list_texts(), report.PAGE: report.write_page()}
    assert set(texts) == {*(ROOT / "cards").glob("*.md"), report.PAGE}
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python benchmarks/report.py"
    assert all(plot.is_file() for plot in report.PLOTS.values())


def test_goals_that_are_missed_and_rows_of_others_that_are_better_are_printed_as_such() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    for goal in report.list_goals():
        assert (f"| {goal.text} | [{goal.found}](" in page) is not goal.is_met
    found = {record["case"]: record["kept_sbh"] for record in read_records(layer_rivals.OUTPUT)}
    assert found.keys() == layer_rivals.list_rivals().keys()
    better = page.partition("## Where something else is better")[2].partition("## Goals")[0]
    for case, kept in found.items():
        is_better = kept < found["Tempo, in place"] - 0.01 and not case.startswith("Tempo")
        assert (f"- {case} keeps" in better) is is_better


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_is_what_its_source_says(page: Path) -> None:
    listed, text = LISTED.get(page.name, {}), page.read_text(encoding="utf-8")
    missing = list_unsupported(text, listed)
    assert not missing, (
        f"{page.name} gives {missing}, which no file that the section names has: name the card, the results or the "
        "test, or say in tests/benchmarks/figures.json where it comes from"
    )
    assert all(re.match(r"(published|command|definition|by hand): \S", why) for why in listed.values())


def test_a_figure_that_its_source_does_not_have_is_found() -> None:
    text = "# A\nIt keeps 20.59 sbh and 20.58 sbh (cards/kept_bytes.md).\n## B\n3 s\n```\n4 s\n```\n## C\nRank 5\n"
    assert list_unsupported(text, {}) == {"20.58 sbh": "# A", "3 s": "## B"}
    assert list_unsupported(text, {"20.58 sbh": "", "3 s": ""}) == {}
    assert is_known("1.50", "GiB", {1.5 * 2**30}) and is_known("12.3", "%", {0.12345}) and not is_known("2", "s", {2.6})


def test_the_results_of_a_suite_are_there_and_named_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--suite", "cpu", "estimate", "gpu", "--list"]) == 0
    listed = capsys.readouterr().out
    for name, benchmark in run.BENCHMARKS.items():
        script = benchmark.command.split()[0]
        assert re.search(rf"^{name} +{benchmark.suite} +python benchmarks/{script}", listed, re.MULTILINE)
        assert (ROOT / "benchmarks" / script).is_file()
        assert benchmark.output is None or read_records(benchmark.output), name


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path, measured = tmp_path / "folder" / "results.jsonl", []

    def measure(case: str) -> dict[str, str]:
        measured.append(case)
        if case == "c" and measured.count("c") == 1:
            raise RuntimeError("out of time")
        return {"value": case.upper()}

    with pytest.raises(RuntimeError):
        measure_missing(path, "abcd", measure)
    measure_missing(path, "abcd", measure)
    assert measured == list("abc") + list("cd")
    assert [record["value"] for record in map(json.loads, path.read_text().splitlines())] == list("ABCD")
    measure_missing(path, "a", measure, again=True)
    assert len(read_records(path)) == 1 and "commit" in read_records(path)[0]


@pytest.mark.parametrize("slope", [1, 7, 1000])
def test_the_largest_batch_fits_and_the_next_one_does_not(slope: int) -> None:
    """Whatever bends the line: what an optimizer's step needs, blocks, a jump."""
    for limit in range(1, 30 * slope, max(1, slope // 3)):

        def find_peak(batch: int) -> int:
            return max(5 * slope, slope * batch + 3 * (batch // 4) + (slope if batch > 9 else 0))

        found = estimated_models.find_largest(find_peak, limit)
        assert (find_peak(found) <= limit if found else find_peak(1) > limit) and find_peak(found + 1) > limit


@pytest.mark.slow
def test_rivals_keep_what_is_known_of_them() -> None:
    """Small, in bf16: s 64, h 128. In place 20.5, and rstd and logsumexp; a checkpoint has 5 KB of random state."""
    sizes = layer_rivals.Sizes(64, 1, 128, torch.bfloat16, 1)
    cpu.use_cpu()
    expected = {"Tempo, in place": 20.5, "Tempo, recompute": 20.0, "checkpoint": 2.0, "stock, SDPA": 36.0}
    with simulate_layout(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer_rivals.tensor_parallel.model_parallel_cuda_manual_seed(1234)
        found = {case: functools.partial(layer_rivals.measure, sizes=sizes)(case) for case in expected}
    for case, least in expected.items():
        assert least <= found[case]["kept_sbh"] <= least + 1.2, case
        assert found[case]["gradient_error"] < 0.05, case


def read_orders(name: str) -> dict[str, dict[str, Any]]:
    """What benchmarks/roam_models.py measured: the last line of each case."""
    return {line["model"]: line for line in read_records(ROOT / "benchmarks" / "results" / name)}


PLANNED = read_orders("estimate/roam.jsonl")


def test_the_models_of_the_paper_are_there_in_both_batches_and_dtypes() -> None:
    names = "alexnet vgg11 resnet50 mnasnet0_5 mobilenet_v2 efficientnet_b0 vit_b_16 bert".split()
    wanted = {f"{name} {batch} {dtype}" for name in names for batch in (1, 32) for dtype in ("fp32", "bf16")}
    assert wanted <= PLANNED.keys()


def test_no_plan_needs_more_than_any_other_order_nor_an_arena_more_than_is_alive_at_once() -> None:
    for case, line in PLANNED.items():
        others = [line[f"{name}_bytes"] for name in ("eager", "inductor", "lescea")]
        assert line["lower_bound"] <= line["plan_bytes"] <= min(others), case
        assert line["plan_arena_bytes"] == line["arena_lower_bound"], case


def test_the_largest_model_is_planned_in_half_a_minute_of_a_core() -> None:
    lines = [line for case, line in PLANNED.items() if case.startswith("gpt2-xl")]
    assert len(lines) == 6
    assert max(line["capture_s"] + line["order_s"] + line["layout_s"] for line in lines) < 30


def test_what_ran_has_the_bits_of_eager_mode_and_the_planned_peak() -> None:
    for case, line in read_orders("cpu/roam_runs.jsonl").items():
        assert line["is_bit_identical"], case
        # Convolutions of bf16 on a CPU hold copies of their operands, which no plan knows.
        tolerance = 0.03 if case.endswith("fp32") else 0.1
        assert line["measured_bytes"] == pytest.approx(line["planned_bytes"], rel=tolerance), case
        assert line["measured_bytes"] < line["measured_eager_bytes"], case
