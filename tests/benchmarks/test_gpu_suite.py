"""What runs first on a GPU, tried on a CPU: failures stop nothing, what is wrong is seen, the plan fits its time."""

from __future__ import annotations

import functools
import os
import sys
import time
import types

import fake_gpu
import gpu_suite
import pytest
import torch
from gpu import models, operations, plan, report, right, rivals, timing
from gpu.operations import Sizes
from gpu.steps import LeftOut, Step, Wrong, run_plan
from measurements import append_records, read_records
from torch.nn.attention import SDPBackend
from witness import assert_within_rule

OPERATIONS = {operation.name: operation for operation in operations.OPERATIONS}
TINY = Sizes(s=3, b=2, h=64, ffn=128, gated_ffn=48, p=0.1, dtype=torch.bfloat16)
FORMS = [(name, form) for name, operation in OPERATIONS.items() for form in operation.forms]


def form_id(value: object) -> str:
    return value if isinstance(value, str) else value.keeps


# A plan with every way to fail


def fail():
    raise Wrong("gelu, [3, 4]: off by 7 of its bound")


def leave_out():
    raise LeftOut("there is no second GPU")


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more")


def crash():
    os._exit(11)


def hang():
    time.sleep(600)


def answer():
    return {"answer": "fine", "number": 1}


def make_planted(seconds: float = 1.0):
    functions = {"wrong": fail, "left out": leave_out, "memory": run_out_of_memory, "crash": crash, "last": answer}
    return [Step("hang", "right", seconds, hang), *(Step(name, "right", 0.1, one) for name, one in functions.items())]


@pytest.mark.slow
def test_what_fails_hangs_crashes_or_has_no_memory_is_one_line_and_the_rest_runs(tmp_path, capsys):
    assert run_plan(make_planted(), make_planted, tmp_path, 300.0, {"device": "cpu"}, patience=0.05) == 0
    found = {record["step"]: (record["outcome"], record["answer"]) for record in read_records(tmp_path / "first.jsonl")}
    assert found == {
        "hang": ("not ended", "did not end within 2 s"),
        "wrong": ("failed", "gelu, [3, 4]: off by 7 of its bound"),
        "left out": ("left out", "there is no second GPU"),
        "memory": ("failed", "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB"),
        "crash": ("failed", "the process ended with 11"),
        "last": ("passed", "fine"),
    }
    assert len(capsys.readouterr().out.splitlines()) == 6
    told = "\n".join(report.summarise(tmp_path))
    assert "1 not ended, 3 failed, 1 left out, 1 passed" in told and "hang: not ended" in told and "last" not in told


@pytest.mark.slow
def test_a_second_call_runs_what_had_no_time(tmp_path, capsys):
    steps = [Step("short", "right", 0.1, answer), Step("long", "fast", 50.0, answer)]
    make = functools.partial(list, steps)
    assert run_plan(steps, make, tmp_path, 40.0, {}) == 1
    assert f"--resume {tmp_path}" in capsys.readouterr().out
    assert run_plan(steps, make, tmp_path, 90.0, {}) == 0
    assert [record["step"] for record in read_records(tmp_path / "first.jsonl")] == ["short", "long"]


def test_the_plan_fits_into_its_seconds_and_says_what_it_leaves(tmp_path):
    steps = plan.list_steps(plan.Options("cuda", tmp_path))
    names = [step.name for step in steps]
    assert len(set(names)) == len(names) and names[0] == "compile"
    parts = [step.part for step in steps if not step.name.startswith("compute-sanitizer")]
    assert parts == sorted(parts, key=["right", "memory", "fast"].index)
    told = list(plan.describe(steps, gpu_suite.SECONDS))
    assert 460 <= float(told[-2].split()[2]) <= 480 and "left to a second call" in told[-1]
    for kind in (
        "gelu tanh",
        "attention, sink",
        "rms_norm",
        "lost channels",
        "loss head",
        "log prob",
        "offload",
        "masks",
    ):
        assert any(kind in name for name in names), kind
    for dtype in right.DTYPES:
        assert any(f"attention, causal, d 64, {dtype}" in name for name in names)


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main(["first"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# Right


@pytest.mark.parametrize("name", ["gelu tanh, inplace, no bias, bf16", "attention, sink, d 64, bf16"])
def test_a_case_that_is_right_passes_and_a_wrong_one_is_one_line(name):
    [case] = [each for each in right.list_cases() if each.name == name]
    assert right.check(case, "cpu")["share_of_bound"] < 1
    plain = case.plain or case.function
    nowhere = torch.tensor([0.0] * 6 + [float("nan")])
    for wrong, told in (
        (lambda y: y * 1.02, "is off by .* of its bound"),
        (lambda y: y + nowhere.sum(), "output .* inf"),
    ):
        with pytest.raises(Wrong, match=told):
            right.check(case._replace(function=lambda *t, w=wrong: w(case.function(*t)), plain=plain), "cpu")
    with pytest.raises(Wrong, match="two runs differ"):
        right.check(case._replace(function=lambda *t: case.function(*t) + torch.rand(()), plain=plain), "cpu")


def test_the_checks_of_masks_large_tensors_streams_and_offload_run_and_see_a_fault(monkeypatch):
    for check in (
        right.compare_masks,
        right.overlap,
        right.offload,
        functools.partial(right.reach_beyond, limit=2**13),
    ):
        assert check("cpu")["answer"]
    drop = right.bias_dropout_add
    number = iter(range(9))
    monkeypatch.setattr(right, "bias_dropout_add", lambda *t, key, **more: drop(*t, key=key + next(number), **more))
    with pytest.raises(Wrong, match="bias_dropout_add: .* have another mask"):
        right.compare_masks("cpu")


@pytest.mark.slow
def test_a_share_of_the_cases_compiles_without_a_gpu_and_what_does_not_is_named(capsys, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed; it is part of this project's `test` extra")
    monkeypatch.setattr(fake_gpu, "CAPABILITY", fake_gpu.CAPABILITY)
    names = ("gelu tanh, inplace, no bias, bf16", "loss head, bf16")
    cases = [case for case in right.list_cases() if case.name in names]
    broken = cases[0]._replace(name="broken", shapes=[(3, 1)], function=lambda x: x.no_such_method())
    monkeypatch.setattr(right, "list_cases", lambda: [*cases, broken])
    plan.compile_share(90, "0/1")
    assert capsys.readouterr().out.splitlines() == [
        *(f"COMPILED {name}" for name in names),
        "FAILED broken: AttributeError: 'Tensor' object has no attribute 'no_such_method'",
    ]


# Memory and tokens per second


@pytest.mark.slow
@pytest.mark.parametrize("model", [models.GPT2, models.BERT, models.LLAMA], ids=lambda model: model.name)
def test_every_model_trains_in_all_forms_and_its_largest_batch_is_found(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    monkeypatch.setattr(models, "ROUNDS", 2)
    tiny = model.shrink()
    assert models.time_steps(tiny, "cpu")["tokens_per_s"].keys() == {*models.FORMS}
    fits = models.Trainee.fits
    monkeypatch.setattr(
        models.Trainee, "fits", lambda self, n: n <= (5 if self.form == "stock" else 9) and fits(self, n)
    )
    found = models.find_largest_batch(tiny, "cpu", 64)
    assert found["largest_batch"] == {"stock": 5, "tempo": 9} and "Tempo / stock" in found["answer"]


def test_a_model_that_differs_from_stock_under_tempoize_is_wrong(monkeypatch):
    tiny = models.GPT2.shrink()
    assert models.compare_with_stock(tiny, "cpu")["answer"].startswith("checked: loss and")
    monkeypatch.setattr("tempo_torch.activation.apply_activation", lambda x, *_: 2 * torch.nn.functional.gelu(x))
    with pytest.raises(Wrong, match="activation: it differs from stock: "):
        models.compare_with_stock(tiny, "cpu")


def test_a_prediction_is_what_a_step_on_tensors_without_memory_keeps():
    found = {form: models.follow(models.GPT2.shrink(), form) for form in ("stock", "tempo")}
    assert 0 < found["tempo"]["kept_bytes"] < found["stock"]["kept_bytes"] < found["stock"]["peak_bytes"]


def test_the_report_lists_what_failed_was_mispredicted_or_is_slower(tmp_path, capsys):
    sizes = {"stock": {"kept_bytes": 2**31, "peak_bytes": 2**32}, "tempo": {"kept_bytes": 2**30, "peak_bytes": 2**31}}
    about = {"device": "cpu", "seconds": 1.0}
    append_records(
        tmp_path / "first.jsonl",
        [
            {"step": "silu, bf16", "part": "right", "outcome": "failed", "answer": "off by 3 of its bound", **about},
            {"step": "memory of A", "part": "memory", "outcome": "passed", "answer": "a", "measured": sizes,
             "predicted": {"stock": {"kept_bytes": 2**30}}, "batch": 8, **about},
            {"step": "gelu", "part": "fast", "outcome": "passed", "answer": "b",
             "ms": {"inplace": 2.0, "copy inplace": 1.0, "eager": 4.0, "compile": 1.5}, **about},
            {"step": "attention", "part": "fast", "outcome": "passed", "answer": "c",
             "ms": {"tempo, p 0.1": 2.0, "tempo, p 0": 2.0, "sdpa, p 0.1": 4.0, "sdpa, p 0": 1.0}, **about},
            {"step": "steps of A", "part": "fast", "outcome": "passed", "answer": "d", "batch": 8,
             "tokens_per_s": {"stock": 10.0, "stock compiled": 12.0, "tempo": 8.0}, **about},
        ],
    )  # fmt: skip
    assert report.write(tmp_path) == 0
    told = capsys.readouterr().out
    for line in (
        "silu, bf16: off by 3",
        "stock's kept_bytes was predicted -50.0 % off",
        "gelu: compile is 1.33 times as fast as inplace",
        "attention: sdpa, p 0 is 2.00 times as fast as tempo, p 0",
        "steps of A: stock compiled is 1.50 times as fast as tempo",
    ):
        assert line in told
    table = list(report.make_model_table(read_records(tmp_path / "first.jsonl")))
    assert "| A, batch 8, kept GiB | 2.00 | 1.00 | 0.50 |" in table


# Operations


@pytest.mark.parametrize(("name", "form"), FORMS, ids=form_id)
def test_tempo_computes_what_the_plain_formula_does(name, form):
    sizes, operation = TINY._replace(p=0.0, dtype=torch.float32), OPERATIONS[name]
    tensors = operation.tensors(sizes, "cpu")
    plain = rivals.eager(operation, sizes)
    grads = [torch.randn_like(output) for output in plain.outputs(plain.leaves(tensors))]
    [one] = [each for each in rivals.tempo(operation, sizes) if each.name == form.keeps]
    found, same = (rivals.results(each, tensors, grads) for each in (one, plain))
    exact = rivals.results(plain, [t.double() for t in tensors], [t.double() for t in grads])
    for index, witnesses in enumerate(zip(found, same, exact, strict=True)):
        # GELU from its output is at the floor of an exact inverse, which its own tests know.
        if not (name.startswith("gelu") and form.keeps == "inplace" and index > 0):
            assert_within_rule(f"result {index}", *witnesses)
    assert rivals.disagreement(found, exact) < 1e-3


@pytest.mark.parametrize(("name", "num_tensors"), [("squared_relu", (5, 5)), ("swiglu", (8,))])
def test_bytes_are_those_that_both_passes_must_move(name, num_tensors):
    """x, y, grad_y, grad_x, and in backward what is kept: x or y; a gated x counts twice."""
    operation = OPERATIONS[name]
    tensors, size = operation.tensors(TINY, "cpu"), 2 * TINY.s * TINY.b * getattr(TINY, operation.width)
    found = [rivals.count_bytes(one, tensors) for one in rivals.tempo(operation, TINY)]
    assert found == [number * size for number in num_tensors]


def test_operations_attention_and_the_loss_head_are_compared_in_turn(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for name in ("WARM_UP_MS", "MEASURED_MS"):
        monkeypatch.setattr(timing, name, 0.5)
    clock = timing.HostClock()
    found = rivals.measure_operation(OPERATIONS["squared_relu"], clock, "cpu", TINY)
    assert set(found["ms"]) == {"inplace", "recompute", "copy inplace", "copy recompute", "eager", "compile"}
    assert "liger" in found["left_out"]
    found = rivals.measure_attention(clock, "cpu", rivals.AttentionShape(64, 2, 2, 32), SDPBackend.MATH)
    assert set(found["ms"]) == {"tempo, p 0.1", "tempo, p 0", "sdpa, p 0.1", "sdpa, p 0"}
    for shape in (rivals.HeadShape(16, 2, 32, 96), rivals.HeadShape(16, 2, 32, 96, True)):
        assert {"eager", "compile"} <= set(rivals.measure_head(clock, "cpu", shape)["ms"])
        hidden, weight = torch.randn(16, 2, 32), torch.randn(96, 32)
        heads = {name: each for name, each in rivals.list_heads(shape, "cpu").items() if name != "liger"}
        losses = [each(hidden, weight).item() for each in heads.values()]
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def test_a_baseline_that_is_missing_raises_or_disagrees_is_left_out_and_says_why(monkeypatch):
    monkeypatch.setattr(rivals, "compiled", rivals.eager)

    def left_out(function):
        module = types.ModuleType("liger_kernel.ops.layer_norm")
        if function is not None:
            module.LigerLayerNormFunction = types.SimpleNamespace(apply=function)
        for name in ("liger_kernel", "liger_kernel.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return rivals.comparable(OPERATIONS["layer_norm"], TINY, "cpu")[1]["liger"]

    def broken(*tensors):
        raise RuntimeError("no such device\nand more")

    assert left_out(None) == "LookupError: liger-kernel has no LigerLayerNormFunction here"
    assert left_out(broken) == "RuntimeError: no such device"
    assert left_out(lambda x, weight, bias, eps: x * weight + bias).startswith("disagrees with torch eager by")
    assert left_out(lambda x, weight, bias, eps: (x * weight + bias) * float("nan")).endswith("by inf of its norm")


class PresetClock:
    """Times that were written down before."""

    def __init__(self, ms: dict[str, list[float]]) -> None:
        self.ms_of, self.order = {name: iter(found) for name, found in ms.items()}, []

    def ms(self, one) -> float:
        self.order.append(one.name)
        return next(self.ms_of[one.name])


def test_implementations_take_turns_until_each_was_measured_long_enough(monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP_MS", 3.0)
    monkeypatch.setattr(timing, "MEASURED_MS", 10.0)
    passes = [timing.Pass("quick", lambda: None, 2), timing.Pass("slow", lambda: None, 1)]
    # Two passes that do not count, then 3 ms of warm-up: two passes of 2 calls, or one.
    clock = PresetClock({"quick": [9, 9, 1, 1, 1, 3, 2], "slow": [50, 50, 40, 7, 5, 6]})
    found = timing.measure(passes, clock)
    assert clock.order == ["quick"] * 4 + ["slow"] * 3 + ["quick", "slow"] * 3
    assert found == {"quick": (2.0, 0.5), "slow": (6.0, pytest.approx(1 / 6))}


class Event:
    """Of a GPU that wakes up after as many milliseconds as it was told to sleep; launching takes the host 3."""

    slept_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.slept_ms < 3.0

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 8.0 if self.query() else 6.0


def test_a_pass_that_the_gpu_began_before_it_was_queued_is_measured_again(monkeypatch):
    def sleep(cycles: int) -> None:
        Event.slept_ms = cycles / timing.CudaClock.SLEEP_CYCLES_PER_MS

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, runs = timing.CudaClock(), []
    assert clock.ms(timing.Pass("one", lambda: runs.append(1), 3)) == 2.0
    assert len(runs) == 3 and clock.lead_ms == 4.0 and not clock.waits
    monkeypatch.setattr(timing.CudaClock, "MAX_LEAD_MS", 2.0)
    clock = timing.CudaClock()
    assert clock.ms(timing.Pass("waiting", lambda: None, 1)) == 8.0 and clock.waits == {"waiting"}
