"""What is compiled for a CPU; a C++ compiler that is missing or broken costs one line and some speed, and no run."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from covering import compiles, exhaustive
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode

from tempo_kernels import compiled
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import swiglu

ROOT = Path(__file__).parents[2]
WARNING = "tempo_kernels cannot compile for the CPU"

TRAIN = """
import torch
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import swiglu
for operation in (gelu, swiglu):
    x = torch.full((1026, 2048), 0.5, dtype=torch.bfloat16, requires_grad=True)
    operation(x).sum().backward()
    assert bool(x.grad.isfinite().all())
from tempo_kernels import compiled
print("obstacle:", compiled.get_obstacle())
"""

FORMULA = """
import torch
from tempo_kernels.compiled import Compiled, get_obstacle
assert get_obstacle() is None, get_obstacle()
def variance(x):
    return (x - x.mean(-1, keepdim=True)).pow(2).mean(-1) * FACTOR
x = torch.randn(300, 256) * 3 + 1
torch.testing.assert_close(Compiled(variance, has_lanes=True)(x), variance(x))
"""


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("rows", "num_warnings"), [(8, 0), (514, 1)])
def test_without_a_compiler_large_tensors_cost_one_warning_and_small_ones_try_nothing(
    untried_compiler, monkeypatch, recwarn, rows, num_warnings
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for operation in (gelu, swiglu, gelu, swiglu):
        x = torch.randn(rows, 2048, requires_grad=True)
        operation(x).sum().backward()
    found = [str(warning.message) for warning in recwarn if WARNING in str(warning.message)]
    assert len(found) == num_warnings
    for words in found:
        assert "Training runs without" in words and f"python3.{sys.version_info.minor}-dev" in words


@pytest.fixture
def fail_with(untried_compiler, monkeypatch) -> Callable[[Exception], None]:
    """Lets what torch compiles raise an error."""

    def make_all_fail(error: Exception) -> None:
        def fail(*_: Tensor) -> Tensor:
            raise error

        monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)

    monkeypatch.setattr(compiled, "_try_once", lambda: None)
    return make_all_fail


def test_a_compiler_that_fails_after_its_trial_is_given_up(fail_with) -> None:
    fail_with(BackendCompilerFailed(lambda: None, OSError("No space left on device"), None))
    function = compiled.Compiled(lambda x: x + 1)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    assert not compiled.pays_for(torch.ones(100), 10)


def test_an_error_of_the_compiled_function_itself_is_raised(fail_with) -> None:
    fail_with(RuntimeError("not enough memory"))
    with pytest.raises(RuntimeError, match="not enough memory"):
        compiled.Compiled(lambda x: x + 1)(torch.ones(3))


@compiles
def test_cpp_that_does_not_compile_calls_nothing_and_costs_one_warning(untried_compiler) -> None:
    source, x = 'extern "C" void fill(int64_t threads, float* x) {', torch.zeros(3)
    with pytest.warns(RuntimeWarning, match="error: "):
        assert not compiled.run_cpp(source, "fill", x)
    assert not compiled.run_cpp(source, "fill", x) and torch.equal(x, torch.zeros(3))


def run(tmp_path: Path, program: str = TRAIN, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    # Of headers for a few functions a compilation of their own would take most of the time.
    variables |= {"PYTHONPATH": f"{ROOT / 'kernels'}", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", **environment}
    return subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=300)


@compiles
def test_processors_with_other_vectors_share_a_cache(tmp_path: Path) -> None:
    """The usual one, which knows this processor, and not yet a function with this factor."""
    program = FORMULA.replace("FACTOR", str(random.SystemRandom().random()))
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        exec(program, {})
    done = run(tmp_path, program, ATEN_CPU_CAPABILITY="default", TORCHINDUCTOR_CACHE_DIR=cache_dir())
    assert done.returncode == 0, done.stderr[-2000:]


def write_compiler(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


# A compiler that does not find Python's headers.
HEADERLESS = """
for argument in "$@"; do
    shift
    case "$argument" in -I*include/python3*) ;; *) set -- "$@" "$argument" ;; esac
done
exec {compiler} "$@"
"""


@compiles
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("broken", "No working C++ compiler"),
        *exhaustive(
            ("no headers", "Python.h: No such file or directory"),
            ("no cache", "Not a directory"),
            ("switched off", "torch.compile is switched off"),
        ),
    ],
)
def test_whatever_fails_costs_one_line_and_training_goes_on(case: str, reason: str, tmp_path: Path) -> None:
    environment = {
        "broken": lambda: {"CXX": write_compiler(tmp_path / "broken-g++", "exit 1")},
        "no headers": lambda: {
            "CXX": write_compiler(
                tmp_path / "headerless-g++", HEADERLESS.replace("{compiler}", str(compiled.find_compiler()))
            )
        },
        "no cache": lambda: {"TORCHINDUCTOR_CACHE_DIR": "/dev/null/cache"},
        "switched off": lambda: {"TORCHDYNAMO_DISABLE": "1"},
    }[case]()
    done = run(tmp_path, **environment)
    err = done.stderr
    assert done.returncode == 0, err[-3000:]
    assert err.count(WARNING) == 1 and "Traceback" not in err
    assert reason in done.stdout and reason in next(line for line in err.splitlines() if WARNING in line)


@compiles
@pytest.mark.filterwarnings("error:tempo_kernels cannot compile")
def test_what_is_not_compiled_for_a_while_is_tried_afterwards(untried_compiler) -> None:
    with torch.compiler.set_stance("force_eager"):
        assert not compiled.pays_for(torch.ones(100), 10)
        assert compiled.get_obstacle() == "torch.compiler.set_stance is in force"
    assert compiled.get_obstacle() is None and compiled.pays_for(torch.ones(100), 10)


def test_tensors_that_are_not_real_run_the_function_itself():
    function = compiled.Compiled(lambda x: x + 1)
    with FakeTensorMode():
        assert function(torch.ones(3)).shape == (3,)
    assert not function._compiled


def test_the_compiler_is_the_one_that_the_environment_names(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert compiled.find_compiler() is None


@pytest.mark.parametrize(("width", "lanes"), [(1, 1), (2, 1), (7, 1), (40, 8), (64, 32), (768, 64), (65536, 64)])
def test_columns_are_split_into_more_than_one_group_of_a_power_of_two(width, lanes):
    x, bias = torch.randn(3, 2, width), torch.randn(width)
    found = compiled.split_columns(width, x, bias)
    assert [t.shape[-1] for t in found] == [lanes, lanes] and found[1].shape == (width // lanes, lanes)
    assert torch.equal(found[0].flatten(-2), x) and torch.equal(found[1].flatten(), bias)


@compiles
def test_only_the_lanes_are_compiled_in():
    function = compiled.Compiled(lambda x: x + 1, has_lanes=True)
    graphs = set()
    for shape in ((3, 5, 64), (7, 2, 64), (9, 4, 64)):
        x = torch.randn(shape)
        assert torch.equal(function(x), x + 1)
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1


@compiles
def test_any_number_of_widths_and_dtypes_runs_compiled():
    """Each in a compilation of its own: torch stops after some of one function, which is an error here."""
    function = compiled.Compiled(lambda x: x * 2.0, has_lanes=True)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=1):
        for width, dtype in ((6, torch.float32), (12, torch.float32), (12, torch.bfloat16)):
            (x,) = compiled.split_columns(width, torch.ones(4, width, dtype=dtype))
            assert torch.equal(function(x), x * 2.0)
