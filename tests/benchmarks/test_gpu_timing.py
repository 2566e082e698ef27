"""How the GPU suite times, with whom it compares, and which tests it runs first; on a CPU, with stand-ins."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from gpu import implementations, kernel_tests, operations, profiling, records, timing, tuning
from gpu.operation import Sizes

ROOT = Path(__file__).parents[2]
OPERATIONS = {operation.name: operation for operation in operations.OPERATIONS}
TINY = Sizes(s=3, b=2, h=64, ffn=128, gated_ffn=48, p=0.1, dtype=torch.float32)


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


def test_inputs_rotate_until_the_cache_has_forgotten_them():
    large = [torch.empty(100, dtype=torch.int8)]
    assert [timing.num_sets(large, l2) for l2 in (10, 100, 150, 10_000)] == [3, 4, 6, 7]


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
    assert clock.ms(timing.Pass("one", lambda: runs.append(1), 3, lambda: runs.append(0))) == 2.0
    assert runs == [0, 1] * 3 and clock.lead_ms == 4.0 and not clock.waits
    monkeypatch.setattr(timing.CudaClock, "MAX_LEAD_MS", 2.0)
    clock = timing.CudaClock()
    assert clock.ms(timing.Pass("waiting", lambda: None, 1)) == 8.0 and clock.waits == {"waiting"}


class OverwritingRMSNorm(torch.autograd.Function):
    """Has the interface of Liger's, and its habit of writing the gradient of x over that of y."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset=0.0):
        assert x.dim() == 2 and eps == 1e-5
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, grad_y):
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = torch.nn.functional.rms_norm(leaves[0], leaves[1].shape, leaves[1], 1e-5)
        grad_x, grad_weight = torch.autograd.grad(y, leaves, grad_y)
        return grad_y.copy_(grad_x), grad_weight, None, None, None


class OverwritingGate(torch.autograd.Function):
    """Has the interface of Liger's, and its habit of writing gradients over the inputs, without autograd's notice."""

    @staticmethod
    def forward(ctx, gate, up):
        assert gate.is_contiguous() and up.is_contiguous() and gate.dim() == 2
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad_y):
        leaves = [t.detach().clone().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = torch.nn.functional.silu(leaves[0]) * leaves[1]
        for t, grad in zip(ctx.saved_tensors, torch.autograd.grad(y, leaves, grad_y), strict=True):
            t.data.copy_(grad)
        return ctx.saved_tensors


def install(monkeypatch, name: str, **functions) -> None:
    monkeypatch.setattr(implementations, "liger_version", lambda: "0.0.0")
    module = types.ModuleType(f"liger_kernel.ops.{name}")
    vars(module).update(functions)
    for each in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, each, types.ModuleType(each))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("rms_norm", {"LigerRMSNormFunction": OverwritingRMSNorm}),
        ("swiglu", {"LigerSiLUMulFunction": OverwritingGate}),
    ],
    ids=["rms_norm", "swiglu"],
)
def test_what_liger_writes_over_is_put_back_before_each_pass(name, functions, monkeypatch):
    install(monkeypatch, name, **functions)
    operation = OPERATIONS[name]
    [liger], left_out = implementations.comparable(operation, TINY, "cpu", [implementations.LIGER])
    assert liger.overwrites and not left_out
    sets = [operation.tensors(TINY, "cpu") for _ in range(2)]
    before = [t.clone() for each in sets for t in each]
    grads = [[torch.randn_like(operation.plain(0.1)(*each))] for each in sets]
    eager = implementations.eager(operation, TINY)
    wanted = [implementations.results(eager, *each)[1:] for each in zip(sets, grads, strict=True)]
    one = timing.backward_pass(liger, sets, grads)
    for _ in range(3):
        one.restore()
        for found, exact in zip(one.run(), wanted, strict=True):
            grad_x = torch.cat(found, -1) if liger.splits_x else found[0]
            torch.testing.assert_close(grad_x.view_as(exact[0]), exact[0])
    assert all(torch.equal(a, b) for a, b in zip(before, [t for each in sets for t in each], strict=True))
    assert timing.host_us([liger, eager], sets[0], grads[0], lambda: None).keys() == {"liger", "eager"}


def test_without_liger_everyone_else_is_compared(monkeypatch):
    monkeypatch.setattr(implementations, "liger_version", lambda: None)
    found, left_out = implementations.comparable(OPERATIONS["rms_norm"], TINY, "cpu", [implementations.LIGER])
    assert found == [] and left_out == {"liger": "LookupError: liger-kernel is not installed"}


def test_a_baseline_that_raises_or_disagrees_is_left_out_and_says_why(monkeypatch):
    def left_out(function):
        install(monkeypatch, "layer_norm", LigerLayerNormFunction=types.SimpleNamespace(apply=function))
        found, reasons = implementations.comparable(OPERATIONS["layer_norm"], TINY, "cpu", [implementations.LIGER])
        assert found == []
        return reasons["liger"]

    def broken(*tensors):
        raise RuntimeError("no such device\nand more")

    assert left_out(broken) == "RuntimeError: no such device"
    assert left_out(lambda x, weight, bias, eps: x * weight + bias).startswith("disagrees with torch eager by")
    assert left_out(lambda x, weight, bias, eps: (x * weight + bias) * float("nan")).endswith("by inf of its norm")
    install(monkeypatch, "layer_norm")
    _, reasons = implementations.comparable(OPERATIONS["layer_norm"], TINY, "cpu", [implementations.LIGER])
    assert "has none of ['LigerLayerNormFunction']" in reasons["liger"]


def test_a_profile_has_a_table_for_each_implementation(monkeypatch):
    monkeypatch.setattr(implementations, "compiled", lambda *a, **k: implementations.eager(*a)._replace(name="compile"))
    found = dict(profiling.tables(OPERATIONS["squared_relu"], TINY, "cpu"))
    assert found.keys() == {"output", "input", "eager", "compile"}
    assert "_SquaredReLUBackward" in found["output"] and "aten::relu" in found["eager"]


@pytest.mark.slow
def test_the_tests_that_run_first_need_neither_megatron_nor_deepspeed(tmp_path):
    paths = kernel_tests.files(ROOT)
    files = [path.name for path in paths]
    for name in ("attention", "norm", "activations"):
        assert f"test_{name}_kernels.py" in files
    assert {"test_kernels_interpreted.py", "test_cuda_graphs.py", kernel_tests.LARGE} <= set(files)
    assert "megatron" in kernel_tests.imported(ROOT / "tests" / "slots" / "test_layer_spec.py")
    program = (
        "import sys, pytest\n"
        "sys.modules.update(dict.fromkeys(['megatron', 'deepspeed', 'tempo_megatron']))\n"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    python, _, _, *arguments = kernel_tests.command(tmp_path, ROOT / "tests", "gpu and not slow")
    command = [python, "-c", program, *arguments[:-1], *map(str, paths), "--collect-only"]
    result = subprocess.run(
        command, cwd=ROOT, env=kernel_tests._environment(ROOT), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "test_large_tensors" not in result.stdout and "test_activations_kernels" in result.stdout


ENVIRONMENT = {"device": "a GPU", "triton": "3.6.0"}
TODAY, FASTER, SLOWER, OTHER, BROKEN = [
    (64, 64, 4, 2),
    (64, 128, 8, 2),
    (128, 64, 4, 2),
    (128, 64, 8, 2),
    (64, 64, 8, 2),
]


@pytest.fixture
def tuned(monkeypatch):
    """Kernels that are the specification, and take as long as their tile says."""
    from tempo_kernels.attention import eager, kernel

    monkeypatch.setattr(kernel, "SHAPES", {90: {"forward": {64: kernel.Shape(*TODAY, True)}}, 80: {}})
    monkeypatch.setattr(kernel, "PASSES", ("forward",) * 4)
    monkeypatch.setattr(tuning, "TOKENS", 16)
    monkeypatch.setattr(tuning, "LENGTH", 16)
    monkeypatch.setattr(tuning, "GRIDS", {"forward": ((64, 128), (64, 128), (4, 8), (2,))})
    kernel._find_shapes.cache_clear()

    def forward(inputs, settings):
        shape = kernel.choose_shapes(inputs.q, inputs.v)[0][:4]
        if shape == BROKEN:
            raise RuntimeError("out of resources: shared memory\nRequired: many")
        out, logsumexp = eager.forward(inputs, settings)
        return (out + 1 if shape == OTHER else out), logsumexp

    class Clock:
        def ms(self, one):
            one.run()
            with_shape = [cell.cell_contents for cell in one.run.__closure__]
            shape = next(tuple(cell) for cell in with_shape if isinstance(cell, tuple) and len(cell) == 4)
            return {FASTER: 50.0, SLOWER: 70.0}.get(shape, 60.0)

    monkeypatch.setattr(kernel, "forward", forward)
    yield Clock()
    kernel._find_shapes.cache_clear()


def test_tuning_writes_the_fastest_that_computes_the_same_and_goes_on_where_it_stopped(tuned, tmp_path):
    path = tmp_path / "tune.jsonl"
    candidates = tuning.list_candidates(90)
    assert candidates[0].shape == TODAY and {FASTER, SLOWER, OTHER, BROKEN} <= {one.shape for one in candidates}
    for allowed in (2, 9):  # stopped after two, and begun again
        left = tuning.find_left(candidates, path, ENVIRONMENT)
        assert len(left) == len(candidates) - (0 if allowed == 2 else 2)
        for one in left[:allowed]:
            tuning.measure(records.Results(path, ENVIRONMENT), tuned, "cpu", 90, one)
    assert not tuning.find_left(candidates, path, ENVIRONMENT)
    assert len(tuning.find_left(candidates, path, ENVIRONMENT | {"triton": "3.9.0"})) == len(candidates)
    found = {tuple(one["shape"]): one for one in map(json.loads, path.read_text().splitlines())}
    assert found[FASTER]["tempo"] == 50.0 and found[FASTER]["others"] == {"today": 60.0}
    assert found[BROKEN]["left_out"] == "RuntimeError: out of resources: shared memory"
    assert found[OTHER]["left_out"].endswith("its result is another one than that of today's shape")
    assert not any("tempo" in found[shape] for shape in (BROKEN, OTHER))
    table = json.loads(tuning.write_table(90, path, ENVIRONMENT).read_text())
    assert table == {"90": {"forward": {"64": list(FASTER)}}, "80": {}}


def test_the_table_of_tiles_is_written_as_it_is_read(tmp_path):
    from tempo_kernels.attention import walks

    written = tuning.write_table(90, tmp_path / "tune.jsonl", ENVIRONMENT)
    shipped = Path(walks.__file__).with_name("shapes.json")
    assert written.read_text() == shipped.read_text() and walks.read_shapes(written) == walks.SHAPES
