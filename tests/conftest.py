from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import megatron_wheels
import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from training_job import Data

# So that what these modules assert is told with its values, as in a test file.
pytest.register_assert_rewrite("gpt", "gpt_loss_head", "prepared_data")

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read once, when deepspeed is imported
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron warns under sequence parallelism without it


if "PYTEST_XDIST_WORKER" in os.environ:
    # Every core has a process that runs tests; more threads or compilers, here or in what it starts, share its core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if table := config.getoption("--seconds"):
        from seconds import Stopwatch

        config.pluginmanager.register(Stopwatch(config, Path(table).resolve()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {item for item in items if is_left_out(item, config)}
    if config.getoption("--quick"):
        # A file that is named runs, whatever it takes.
        costly = list_costly_files() - {config.invocation_params.dir / each.partition("::")[0] for each in config.args}
        left_out |= {item for item in items if item.path in costly and not item.get_closest_marker("quick")}
        # Of each test function one case.
        first: dict[str, pytest.Item] = {}
        for item in items:
            if item not in left_out and first.setdefault(item.nodeid.partition("[")[0], item) is not item:
                left_out.add(item)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    # One of its tests takes minutes: if it came late, one process would work and the others wait.
    items.sort(key=lambda item: item.path.name != "test_readme.py")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


def list_costly_files() -> set[Path]:
    """Those whose tests take more than half a second of a processor each, by tests/seconds.json."""
    folder = Path(__file__).parent
    rows = json.loads((folder / "seconds.json").read_text(encoding="utf-8")).items()
    return {folder / path for path, row in rows if row["cpu"] > 0.5 * row["tests"]}


def is_left_out(item: pytest.Item, config: pytest.Config) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    if config.getoption("--quick"):
        return bool(marks & {"slow", "gpu", "exhaustive"})
    return "quick" in marks or ("exhaustive" in marks and not config.getoption("--exhaustive"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="one case of each test that needs no GPU, without slow tests and costly files",
    )
    parser.addoption("--exhaustive", action="store_true", help="also run the tests marked exhaustive: minutes more")
    parser.addoption("--seconds", metavar="FILE", help="write what each test file takes: see support/seconds.py")
    parser.addoption("--megatron-root", metavar="DIR", help="a Megatron-LM checkout (default: MEGATRON_LM_ROOT)")
    parser.addoption("--megatron-bridge", metavar="DIR", help="an unpacked megatron-bridge (default: MEGATRON_BRIDGE)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "megatron_root" in metafunc.fixturenames:
        first, *others = megatron_wheels.MEGATRON_CORES
        rest = [pytest.param(version, marks=pytest.mark.exhaustive) for version in others]
        given = given_checkout(metafunc.config)
        metafunc.parametrize("megatron_root", [str(given)] if given else [first, *rest], indirect=True, scope="session")


def given_checkout(config: pytest.Config) -> Path | None:
    given = config.getoption("--megatron-root") or os.environ.get("MEGATRON_LM_ROOT")
    return Path(given).resolve() if given else None


@pytest.fixture(scope="session")
def megatron_root(request: pytest.FixtureRequest) -> Path:
    """What holds megatron.core and megatron.training: a checkout that is given, or an unpacked wheel."""
    if importlib.util.find_spec("six") is None:
        pytest.skip("needs the package six, which Megatron-LM's tokenizers import")
    if given_checkout(request.config) is None:
        return megatron_wheels.unpack(f"megatron-core=={request.param}")
    return check_helpers(Path(request.param))


@pytest.fixture(scope="session")
def megatron_checkout(request: pytest.FixtureRequest) -> Path:
    """A checkout of Megatron-LM, for what its wheels leave out."""
    given = given_checkout(request.config)
    if given is None:
        pytest.skip("needs a Megatron-LM checkout, as its wheel leaves this out: --megatron-root DIR")
    return check_helpers(given)


def check_helpers(root: Path) -> Path:
    if not list((root / "megatron/core/datasets").glob("helpers_cpp*.so")):
        pytest.skip(f"needs compiled helpers in {root}/megatron/core/datasets: make -C there, or those of the wheel")
    return root


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A small data set of real text, of GPT."""
    from training_job import make_data

    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def same_seed_for_every_test() -> None:
    random.seed(1234)
    np.random.seed(1234)
    torch.manual_seed(1234)


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No launch is planned by what another test put in a constant's place, nor another test's by this one's."""
    from tempo_kernels.kernel_launch import forget_plans

    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def untried_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has compiled nothing for the CPU yet."""
    from tempo_kernels import compiled

    monkeypatch.setattr(compiled, "_failure", None)
    cached = (compiled._try_once, compiled._warn, compiled._load)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def without_compiler(untried_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C++ compiler: what compiled code makes, no dispatcher sees."""
    from tempo_kernels import compiled

    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setattr(compiled, "_warn", lambda: None)


@pytest.fixture
def nan_poison() -> Iterator[None]:
    """torch.empty and its like give NaN (the largest value for integers), so that an element nobody wrote shows."""
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms does the same, and imports Inductor
    yield
    torch.set_deterministic_debug_mode("default")
