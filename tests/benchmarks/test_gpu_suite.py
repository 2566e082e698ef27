"""What runs first on a GPU, tried on a CPU: failures stop nothing, what is wrong is seen, the plan fits its time."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
import types

import fake_gpu
import gpu_suite
import pytest
import torch
from covering import exhaustive
from gpu import models, operations, plan, report, right, rivals
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


def make_planted():
    functions = {"wrong": fail, "left out": leave_out, "memory": run_out_of_memory, "crash": crash, "last": answer}
    planted = [Step(name, "right", 0.1, function) for name, function in functions.items()]
    return [Step("hang", "right", 1.0, hang), *planted, Step("long", "fast", 1000.0, answer)]


@pytest.mark.slow
def test_what_fails_hangs_crashes_or_has_no_memory_is_one_line_and_a_second_call_runs_what_had_no_time(
    tmp_path, capsys
):
    run = functools.partial(run_plan, make_planted(), make_planted, tmp_path, about={"device": "cpu"}, patience=0.2)
    assert run(seconds=300.0) == 1
    found = {record["step"]: (record["outcome"], record["answer"]) for record in read_records(tmp_path / "first.jsonl")}
    assert found == {
        "hang": ("not ended", "did not end within 6 s"),
        "wrong": ("failed", "gelu, [3, 4]: off by 7 of its bound"),
        "left out": ("left out", "there is no second GPU"),
        "memory": ("failed", "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB"),
        "crash": ("failed", "the process ended with 11"),
        "last": ("passed", "fine"),
    }
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and f"--resume {tmp_path}" in last
    told = "\n".join(report.summarise(tmp_path))
    assert "1 not ended, 3 failed, 1 left out, 1 passed" in told and "hang: not ended" in told and "last" not in told
    assert run(seconds=2000.0) == 0
    assert [record["step"] for record in read_records(tmp_path / "first.jsonl")] == [*found, "long"]


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


@pytest.mark.parametrize("more", [[], ["--interpret"]])
def test_without_a_gpu_it_says_so_in_one_sentence(more, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main(["first", *more]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_carried_wheels_are_installed_and_without_liger_a_line_says_so(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(plan, "_run", lambda command, environment: calls.append(command))
    (tmp_path / "einops-0.8-py3-none-any.whl").touch()
    with pytest.raises(LeftOut, match="1 wheels, none of them liger_kernel"):
        plan.install_wheels(plan.Options("cpu", tmp_path, wheels=tmp_path))
    monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: name)
    assert plan.install_wheels(plan.Options("cpu", tmp_path, wheels=tmp_path))["answer"].startswith("1 wheels")
    assert [command[-1] for command in calls] == [str(tmp_path / "einops-0.8-py3-none-any.whl")] * 2
    with pytest.raises(LeftOut, match="0 wheels"):
        monkeypatch.setattr(plan.importlib.util, "find_spec", lambda name: None)
        plan.install_wheels(plan.Options("cpu", tmp_path))


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
        right.replay_layer,
        right.compare_masks,
        right.overlap,
        right.offload,
        functools.partial(right.reach_beyond, limit=2**13),
    ):
        assert check("cpu")["answer"]
    for kind in ("on another stream", "on a second device"):
        with pytest.raises(LeftOut, match="no GPU"):
            right.check_families("cpu", kind)
    names = {case.name for case in right.list_cases()}
    assert names.issuperset(right.FAMILIES)
    drop = right.bias_dropout_add
    number = iter(range(9))
    monkeypatch.setattr(right, "bias_dropout_add", lambda *t, key, **more: drop(*t, key=key + next(number), **more))
    with pytest.raises(Wrong, match="bias_dropout_add: .* have another mask"):
        right.compare_masks("cpu")
    monkeypatch.setattr(right, "capture", lambda step: step)
    with pytest.raises(Wrong, match="replay 0: result 0 is off by"):  # whose masks differ from step to step
        right.replay_layer("cpu")


def test_a_family_that_is_wrong_on_another_stream_is_named(monkeypatch):
    """Streams that do nothing stand where a CPU has none."""
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    check = right.check
    monkeypatch.setattr(right, "check", lambda case, device, around: check(case, "cpu", around))
    monkeypatch.setattr(right, "FAMILIES", right.FAMILIES[:2])
    assert right.check_families("cuda", "on another stream")["answer"] == "2 cases are right on another stream"
    cases = [one._replace(function=lambda *t: t[0] * t[1], plain=one.function) for one in right.list_cases()]
    monkeypatch.setattr(right, "list_cases", lambda: cases)
    with pytest.raises(Wrong, match="2 of 2 cases; gelu none, inplace, a bias, bf16: "):
        right.check_families("cuda", "on another stream")


@pytest.mark.slow
def test_the_interpreter_runs_the_kernels_of_a_case():
    code = """if True:
        import fake_gpu, gpu_suite
        from gpu import right
        import replaced_kernels
        launches, replace = [], replaced_kernels.replace_kernels
        replaced_kernels.replace_kernels = lambda take: replace(lambda one: (launches.append(one), take(one)))
        cases = {case.name: case for case in right.list_cases(40)}
        print(right.check_interpreted(cases["attention, causal, d 64, fp16"])["answer"], len(launches))
        try:
            right.check_interpreted(cases["attention, causal, d 64, bf16"])
        except right.LeftOut as reason:
            print(reason)
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()[-2:]
    assert first.startswith("off by 0.") and int(first.split()[-1]) >= 4
    assert second == "Triton's interpreter multiplies bfloat16 as integers"


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
@pytest.mark.parametrize(
    "model", [models.GPT2, *exhaustive([models.BERT], [models.LLAMA])], ids=lambda model: model.name
)
def test_every_model_trains_in_all_forms_and_its_largest_batch_is_found(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    monkeypatch.setattr(models, "ROUNDS", 2)
    tiny = model.shrink()
    assert models.time_steps(tiny, "cpu")["tokens_per_s"].keys() == {*models.FORMS}
    fits = models.Trainee.fits
    monkeypatch.setattr(
        models.Trainee, "fits", lambda self, n: n <= (5 if self.form == "stock" else 9) and fits(self, n)
    )
    found = {form: models.find_largest_batch(tiny, form, "cpu", 64) for form in models.FORMS}
    assert {form: one["largest_batch"] for form, one in found.items()} == {"stock": 5, "stock compiled": 9, "tempo": 9}
    assert found["tempo"]["answer"].startswith("9 samples, ")


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
            *({"step": f"largest batch of A, {form}", "part": "fast", "outcome": "passed", "answer": "e", "model": "A",
               "form": form, "largest_batch": batch, "tokens_per_s": {form: rate}, **about}
              for form, batch, rate in (("stock", 4, 20.0), ("tempo", 9, 30.0))),
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
    assert "| A, batch 8, kept GiB | 2.00 |  | 1.00 | 0.500 |" in table
    assert "| A, batch 8, tokens/s | 10 | 12 | 8 | 0.667 |" in table
    assert "| A, tokens/s (at its own largest batch) | 20 (4) |  | 30 (9) | 1.500 |" in table


# Operations


@pytest.mark.parametrize(("name", "form"), FORMS, ids=form_id)
def test_tempo_computes_what_the_plain_formula_does(name, form):
    sizes, operation = TINY._replace(p=0.0, dtype=torch.float32), OPERATIONS[name]
    tensors = operation.tensors(sizes, "cpu")
    functions = form.factory(0.0), operation.plain(0.0)
    found, same = (rivals.Pass(function, tensors)() for function in functions)
    exact = rivals.Pass(operation.plain(0.0), [t.double() for t in tensors])
    exact._grads = [grad.double() for grad in rivals.Pass(operation.plain(0.0), tensors)._grads]
    exact = exact()
    for index, witnesses in enumerate(zip(found, same, exact, strict=True)):
        # GELU from its output is at the floor of an exact inverse, which its own tests know.
        if not (name.startswith("gelu") and form.keeps == "inplace" and index > 0):
            assert_within_rule(f"result {index}", *witnesses)
    assert rivals.compute_disagreement(found, exact) < 1e-3


@pytest.mark.parametrize(("name", "num_tensors"), [("squared_relu", (5, 5)), ("swiglu", (8,))])
def test_bytes_are_those_that_both_passes_must_move(name, num_tensors):
    """x, y, grad_y, grad_x, and in backward what is kept: x or y; a gated x counts twice."""
    operation = OPERATIONS[name]
    tensors, size = operation.tensors(TINY, "cpu"), 2 * TINY.s * TINY.b * getattr(TINY, operation.width)
    found = [rivals.Pass(form.factory(0.1), tensors).count_bytes() for form in operation.forms]
    assert found == [number * size for number in num_tensors]


def test_operations_attention_and_the_loss_head_are_compared_in_turn(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(rivals, "ROUNDS", 2)
    found = rivals.measure_operation(OPERATIONS["squared_relu"], "cpu", TINY)
    assert set(found["ms"]) == {"inplace", "recompute", "copy inplace", "copy recompute", "eager", "compile"}
    assert "liger" in found["left_out"]
    found = rivals.measure_attention("cpu", rivals.AttentionShape(64, 2, 2, 32), SDPBackend.MATH)
    assert set(found["ms"]) == {"tempo, p 0.1", "tempo, p 0", "sdpa, p 0.1", "sdpa, p 0"}
    shape = rivals.HeadShape(16, 2, 32, 96)
    assert {"eager", "compile"} <= set(rivals.measure_head("cpu", shape)["ms"])
    hidden, weight = torch.randn(16, 2, 32), torch.randn(96, 32)
    heads = {name: each for name, each in rivals.list_heads(shape, "cpu").items() if name != "liger"}
    losses = [each(hidden, weight).item() for each in heads.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)


def test_a_baseline_that_is_missing_raises_or_disagrees_is_left_out_and_says_why(monkeypatch):
    monkeypatch.setattr(rivals, "_compile", lambda function: function)

    def left_out(function):
        module = types.ModuleType("liger_kernel.ops.layer_norm")
        if function is not None:
            module.LigerLayerNormFunction = types.SimpleNamespace(apply=function)
        for name in ("liger_kernel", "liger_kernel.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return rivals.measure_operation(OPERATIONS["layer_norm"], "cpu", TINY)["left_out"]["liger"]

    def broken(*tensors):
        raise RuntimeError("no such device\nand more")

    assert left_out(None) == "LookupError: liger-kernel has no LigerLayerNormFunction here"
    assert left_out(broken) == "RuntimeError: no such device"
    assert left_out(lambda x, weight, bias, eps: x * weight + bias).startswith(
        "ValueError: disagrees with torch eager by"
    )
    assert left_out(lambda x, weight, bias, eps: (x * weight + bias) * float("nan")).endswith("by inf of its norm")


class Event:
    """Of a GPU that takes 2 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    synchronize = record

    def elapsed_time(self, end: Event) -> float:
        return 2.0


def test_passes_take_turns_behind_a_gpu_that_sleeps(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("sleep"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(rivals, "ROUNDS", 2)
    monkeypatch.setattr(rivals, "WARM_UPS", 1)
    passes = {name: functools.partial(order.append, name) for name in "ab"}
    assert rivals.measure(passes, "cuda") == {"a": 2.0, "b": 2.0}
    assert order == ["sleep", "a", "sleep", "b"] * 3
