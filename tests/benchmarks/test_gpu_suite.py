"""The GPU suite's bookkeeping, on a CPU: what it compares is the same, and what it counts is right."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import gpu_suite
import pytest
import torch
from gpu import budget, implementations, kept, kernel_tests, operations, records, suite, timing
from gpu.operation import Sizes
from measurements import append_records, read_records
from witness import assert_within_rule, kept_storages

ROOT = Path(__file__).parents[2]
OPERATIONS = {operation.name: operation for operation in operations.OPERATIONS}
TINY = Sizes(s=3, b=2, h=64, ffn=128, gated_ffn=48, p=0.1, dtype=torch.bfloat16)
FORMS = [(name, form) for name, operation in OPERATIONS.items() for form in operation.forms]


def form_id(value: object) -> str:
    return value if isinstance(value, str) else value.keeps


def of_form(name, form, sizes):
    """The implementation of one form of an operation."""
    [found] = [one for one in implementations.tempo(OPERATIONS[name], sizes) if one.name == form.keeps]
    return found


def num_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(("name", "form"), FORMS, ids=form_id)
def test_tempo_computes_what_the_plain_formula_does(name, form):
    sizes, operation = TINY._replace(p=0.0, dtype=torch.float32), OPERATIONS[name]
    tensors = operation.tensors(sizes, "cpu")
    plain = implementations.eager(operation, sizes)
    grads = [torch.randn_like(output) for output in plain.outputs(plain.leaves(tensors))]
    found = implementations.results(of_form(name, form, sizes), tensors, grads)
    same = implementations.results(plain, tensors, grads)
    exact = implementations.results(plain, [t.double() for t in tensors], [t.double() for t in grads])
    for index, witnesses in enumerate(zip(found, same, exact, strict=True)):
        # GELU from its output is at the floor of an exact inverse, which its own tests know.
        if not (name.startswith("gelu") and form.keeps == "output" and index > 0):
            assert_within_rule(f"result {index}", *witnesses)
    assert implementations.disagreement(found, exact) < 1e-3
    assert implementations.errors_of_tempo(operation, TINY, "cpu")[form.keeps] < implementations.AGREEMENT


@pytest.mark.slow
def test_torch_compile_is_compared_and_agrees():
    for name in ("gelu", "rms_norm"):
        sizes, operation = TINY._replace(dtype=torch.float32), OPERATIONS[name]
        found, left_out = implementations.comparable(operation, sizes, "cpu", [implementations.COMPILE])
        assert [one.name for one in found] == ["compile"] and not left_out
        sets = [operation.tensors(sizes, "cpu") for _ in range(2)]
        grads = [[torch.randn_like(y) for y in found[0].outputs(found[0].leaves(sets[0]))]] * 2
        # Over one graph again and again.
        repeated = timing.backward_pass(found[0], sets, grads)
        first, second = repeated.run(), repeated.run()
        assert all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize(("name", "form"), FORMS, ids=form_id)
def test_bytes_are_those_of_inputs_outputs_and_what_autograd_holds(name, form):
    operation = OPERATIONS[name]
    tensors, width = operation.tensors(TINY, "cpu"), operation.width_of(TINY)
    for one in (of_form(name, form, TINY), implementations.eager(operation, TINY)):
        leaves = one.leaves(tensors)
        outputs: list[torch.Tensor] = []
        saved = kept_storages(lambda *inputs, o=outputs, one=one: o.extend(one.outputs(inputs)), *leaves)
        # Kept: without parameters, and with the next linear's input.
        parameters = {t.data_ptr() for t, is_one in zip(leaves, operation.parameters, strict=True) if is_one}
        expected = {pointer: size for pointer, size in saved.items() if pointer not in parameters}
        if operation.kept_output is not None:
            y = outputs[operation.kept_output]
            expected[y.data_ptr()] = num_bytes([y])
        assert kept.measure(operation, one, tensors, drops_output=False).kept_bytes == sum(expected.values())
        if one.name != form.keeps:
            continue
        # The fewest that forward and backward have to move: each once.
        known = {t.untyped_storage().data_ptr() for t in [*leaves, *outputs]}
        beside = sum(size for pointer, size in saved.items() if pointer not in known)
        assert form.forward.num_bytes(TINY, width) == num_bytes([*leaves, *outputs]) + beside
        grads = [torch.randn_like(output) for output in outputs]
        found = torch.autograd.grad(outputs, leaves, grads)
        new = [t for t in found if t.data_ptr() not in {grad.data_ptr() for grad in grads}]
        # LayerNorm's bias is kept for refill only.
        only_for_refill = width * 2 if (name, form.keeps) == ("layer_norm", "input") else 0
        moved = num_bytes([*grads, *new]) + sum(saved.values()) - only_for_refill
        assert form.backward.num_bytes(TINY, width) == moved
    if form.refill is not None:
        dropped = kept.measure(operation, of_form(name, form, TINY), tensors, drops_output=True).kept_bytes
        assert dropped == num_bytes(tensors[:1]) + form.backward.row_bytes * TINY.tokens


def test_records_are_appended_and_read_back_as_they_were(tmp_path):
    path = tmp_path / "new" / "suite.jsonl"
    for number in range(2):
        results = records.Results(path, records.environment(ROOT, "cpu", "abc", "passed"))
        fields = records.of_operation(OPERATIONS["bias_dropout_add"], TINY, "nothing")
        goals = records.goals_of_time(1.0, 0.95, {"eager": 2.0 - number, "compile": 3.0})
        results.add(
            "time", goals, **fields, what="forward", unit="ms", tempo=1.0, others={"eager": 2.0, "compile": 3.0}
        )
        assert [record["passed"] for record in results.records] == [number == 0]
        assert len(results.failed) == number
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[1:] == results.records and len(lines) == 2
    expected = set("commit device torch triton liger megatron apex transformer_engine shape dtype".split())
    assert expected | {"p", "tests", "goals"} <= lines[0].keys()
    assert lines[0]["shape"] == {"s": 3, "b": 2, "h": 64} and lines[0]["dtype"] == "bfloat16" and lines[0]["p"] == 0.1
    table = records.table(lines)
    assert "eager 2.00, compile 3.00" in table and table.splitlines()[2].endswith("met")
    assert "MISSED: time_of_the_next 1, expected less than 1" in table.splitlines()[3]


def test_who_was_left_out_is_told_once_for_each_reason():
    left_out = {"liger": "not installed"}
    found = [{"operation": name, "left_out": left_out} for name in ("gelu", "gelu", "rms_norm")]
    found.append({"operation": "gelu", "waits_for_gpu": ["compile"]})
    expected = ["liger of gelu, rms_norm: not installed", "compile of gelu: the host waits for the GPU"]
    assert list(records.notes(found)) == expected


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_part_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu_suite.main(["operation"])
    assert "operation is no part; expected tests, operations, attention" in capsys.readouterr().err


FAILING = """
import pytest

@pytest.mark.gpu
def test_that_fails():
    assert 1 == 2

@pytest.mark.gpu
def test_that_passes():
    pass
"""


@pytest.mark.slow
def test_a_test_that_fails_or_never_ends_stops_no_other(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(FAILING)
    (tmp_path / "tests" / "test_b.py").write_text(
        "import pytest, time\n@pytest.mark.gpu\ndef test_b(): time.sleep(999)"
    )
    (tmp_path / "tests" / "test_c.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_c(: pass")
    (tmp_path / "tests" / "test_large_tensors.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_d(): pass")
    monkeypatch.setattr(kernel_tests, "imported", lambda path: set())
    monkeypatch.setattr(kernel_tests, "MARKS", ("",))
    run = subprocess.run

    def run_all_but_one(command, timeout, **options):
        if command[-1].endswith("test_b.py"):
            raise subprocess.TimeoutExpired(command, timeout)
        return run(command, timeout=timeout, **options)

    monkeypatch.setattr(subprocess, "run", run_all_but_one)
    output = tmp_path / "results"
    assert kernel_tests.read_outcome(output) == "not run"
    assert kernel_tests.run(tmp_path, output, 800.0) == "failed"
    found = {record["test"]: record for record in read_records(output / "tests.jsonl")}
    assert {name: record["outcome"] for name, record in found.items()} == {
        "tests/test_a.py::test_that_fails": "failed",
        "tests/test_a.py::test_that_passes": "passed",
        "test_b.py": "not ended",
        "tests/test_c.py": "failed",
        "test_c.py": "not ended",
        "tests/test_large_tensors.py::test_d": "passed",
    }
    assert "assert 1 == 2" in found["tests/test_a.py::test_that_fails"]["error"]
    assert "did not end within" in found["test_b.py"]["error"] and "pytest ended with 2" in found["test_c.py"]["error"]
    told = kernel_tests.describe(output).splitlines()
    assert told[0] == "2 failed, 2 not ended, 2 passed" and any("assert 1 == 2" in line for line in told)
    assert "1 failed" in (output / "tests" / "test_a.log").read_text(encoding="utf-8")


def test_a_dry_run_tells_the_steps_of_each_part_and_writes_no_result(tmp_path, capsys):
    assert gpu_suite.main(["operations", "attention", "--dry-run", "--output", str(tmp_path)]) == 0
    told = set(capsys.readouterr().out.splitlines())
    assert {"time of gelu", "host of squared_relu", "attention of s 1024 b 16 a 32 d 64"} <= told
    assert "loss head of s 4096 b 4 h 4096 v 50304" in told
    assert "log prob of s 4096 b 2 h 4096 v 128256 softcap 30.0 entropy True" in told
    assert not list(tmp_path.iterdir())


def test_what_was_measured_before_an_interruption_stays_and_says_how_the_tests_ended(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "environment", lambda root, device, commit, tests: {"tests": tests})
    monkeypatch.setattr(gpu_suite, "forget", lambda: None)
    append_records(tmp_path / "tests.jsonl", [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed"}])

    def one_record(self, operation):
        if operation.name == "gelu_tanh":
            raise KeyboardInterrupt
        fields = records.of_operation(operation, TINY, "output")
        self.results.add(
            "host", records.goals_of_host(1.0), **fields, what="small call", unit="us", tempo=1.0, others={}
        )

    monkeypatch.setattr(suite.Suite, "time", one_record)
    assert gpu_suite.main(["operations", "--output", str(tmp_path)]) == 1
    [found] = read_records(tmp_path / "operations.jsonl")
    assert found["operation"] == "gelu" and found["tests"] == "failed"
    printed = capsys.readouterr().out
    assert "interrupted" in printed and "small call" in printed


class Steps:
    """A suite whose steps take 10 s of a clock of their own."""

    def __init__(self, fails: str = "") -> None:
        self.now, self.begun, self.fails = 0.0, [], fails

    def __getattr__(self, kind: str):
        def step(operation):
            self.begun.append((kind, operation.name))
            self.now += 10.0
            if operation.name == self.fails:
                raise ValueError("broken")

        return step


def test_no_step_begins_that_the_budget_has_no_time_for(monkeypatch):
    monkeypatch.setattr(gpu_suite, "forget", lambda: None)
    steps, chosen = Steps(), operations.OPERATIONS[:3]
    missing = gpu_suite.run_all(steps, chosen, budget.Budget(100.0, gpu_suite.FIRST_GUESS_S, lambda: steps.now))
    assert steps.begun == [(kind, each.name) for kind in ("time", "host", "autotune") for each in chosen]
    assert missing == []
    steps = Steps()
    missing = gpu_suite.run_all(steps, chosen, budget.Budget(55.0, gpu_suite.FIRST_GUESS_S, lambda: steps.now))
    assert steps.now <= 55.0 and len(steps.begun) == 5
    assert missing == [f"host of {chosen[2].name}: no time was left"]


def test_a_step_that_fails_is_told_and_stops_no_other(monkeypatch, capsys):
    monkeypatch.setattr(gpu_suite, "forget", lambda: None)
    steps, chosen = Steps(fails="gelu"), operations.OPERATIONS[:2]
    missing = gpu_suite.run_all(steps, chosen, budget.Budget(500.0, gpu_suite.FIRST_GUESS_S, lambda: steps.now))
    assert len(steps.begun) == 6 and missing[0] == "time of gelu: ValueError: broken" and len(missing) == 3


def test_every_kind_of_result_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(implementations, "compiled", lambda operation, sizes, is_autotuned=False: (
        implementations.eager(operation, sizes)._replace(name="compile max-autotune" if is_autotuned else "compile")
    ))  # fmt: skip
    for name in ("WARM_UP_MS", "MEASURED_MS"):
        monkeypatch.setattr(timing, name, 0.5)
    monkeypatch.setattr(timing, "HOST_CALLS", 2)
    results = records.Results(tmp_path / "suite.jsonl", {})
    cpu = suite.Suite(results, "cpu", timing.HostClock(), TINY, TINY)
    for kind in (kind for kind in gpu_suite.FIRST_GUESS_S if kind not in gpu_suite.WHOLE):
        getattr(cpu, kind)(OPERATIONS["squared_relu"])
    found = [(record["kind"], record["what"], record["keeps"], *record["others"]) for record in results.records]
    both, autotuned = ("eager", "compile"), ("compile max-autotune",)
    assert found == [
        *(("time", what, keeps, *both) for what in ("forward", "backward") for keeps in ("output", "input")),
        ("time", "refill", "input"),
        *(("kept", "kept", keeps, *both) for keeps in ("output", "input")),
        *(("host", "small call", keeps, *both) for keeps in ("output", "input")),
        *(("time", what, keeps, *autotuned) for what in ("forward", "backward") for keeps in ("output", "input")),
    ]
    assert all(record["tempo"] > 0 for record in results.records)
