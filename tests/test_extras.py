"""What works without Megatron-core and DeepSpeed, and what is said where a package is missing."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tempo_megatron.cli import _COMMANDS

ROOT = Path(__file__).parent.parent
# The extra "train" brings them, the extra "megatron" does not.
NOT_MEGATRONS = ("tokenizers", "tqdm", "safetensors", "deepspeed", "tensorboard", "matplotlib")
ROOMS = sorted(path.parent.name for path in (ROOT / "kernels" / "tempo_kernels").glob("*/__init__.py"))


@pytest.fixture(scope="module")
def bare_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from with torch, numpy and what torch itself requires, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    queue, done = ["torch", "numpy"], set()
    while queue:
        name = re.split(r"[^\w.-]", queue.pop())[0]
        if name in done or name == "triton":
            continue
        done.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        queue += [text for text in distribution.requires or () if "extra ==" not in text]
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(distribution.locate_file(top)))
    return folder


def run_bare(site: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "kernels"), str(site)]
    start = f"import sys; sys.path += {paths}; sys.argv = {['command', *arguments]}; "
    return subprocess.run([sys.executable, "-S", "-I", "-c", start + code], capture_output=True, text=True)


def test_the_operations_need_torch_and_numpy_only(bare_site: Path) -> None:
    assert "gelu" in ROOMS and len(ROOMS) > 6
    imports = "; ".join(f"import tempo_kernels.{room}" for room in ROOMS)
    work = "import torch; from tempo_kernels.gelu import gelu; x = torch.randn(4, 8, requires_grad=True); "
    done = run_bare(bare_site, f"{imports}; {work} gelu(x).sum().backward(); print(x.grad.shape)")
    assert done.stdout == "torch.Size([4, 8])\n", done.stderr


@pytest.mark.parametrize(
    ("code", "what", "missing", "extra"),
    [
        ("from tempo_megatron import tempo_block_spec", "tempo_block_spec", "megatron-core", "megatron"),
        ("from tempo_megatron import set_micro_batch", "set_micro_batch", "megatron-core", "megatron"),
        ("from tempo_megatron.cpu import use_cpu; use_cpu()", "use_cpu()", "megatron-core", "megatron"),
        ("import tempo_megatron.training.main", "the trainer", "megatron-core", "train"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    bare_site: Path, code: str, what: str, missing: str, extra: str
) -> None:
    done = run_bare(bare_site, code)
    assert done.returncode == 1
    sentence = f'{what} needs {missing}, which is not installed; pip install "tempo-megatron[{extra}]"'
    assert done.stderr.splitlines()[-1] == f"tempo_megatron.extras.MissingExtraError: {sentence}"


@pytest.mark.parametrize("argv", [["ledger", "--model", "gpt.json"], ["prepare-data"], ["export"]], ids=" ".join)
def test_a_command_that_lacks_a_package_says_so_without_a_traceback(bare_site: Path, argv: list[str]) -> None:
    done = run_bare(bare_site, "from tempo_megatron.cli import main; sys.exit(main())", *argv)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tempo-megatron {argv[0]}: ") and done.stderr.count("\n") == 1
    assert 'which is not installed; pip install "tempo-megatron[' in done.stderr


@pytest.mark.slow
def test_commands_that_need_megatron_only_start_without_what_data_preparation_needs() -> None:
    modules = [command.module for command in _COMMANDS.values() if command.needs == "megatron"]
    assert "tempo_megatron.memory.commands.plan" in modules and len(modules) > 4
    hide = f"import sys; sys.modules |= dict.fromkeys({NOT_MEGATRONS}); import importlib; "
    code = f"{hide}[importlib.import_module(name) for name in {modules}]"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["prepare_data", "pretrain_gpt", "pretrain_bert"])
def test_a_script_that_lacks_a_package_says_so_without_a_traceback(bare_site: Path, script: str) -> None:
    path = str(ROOT / "launch" / f"{script}.py")
    done = run_bare(bare_site, f"import runpy; runpy.run_path({path!r}, run_name='__main__')", "--help")
    assert done.returncode and done.stderr.count("\n") == 1
    assert 'which is not installed; pip install "tempo-megatron[train]"' in done.stderr


def test_the_training_command_says_so_without_a_traceback(bare_site: Path) -> None:
    done = run_bare(bare_site, "from tempo_megatron.cli import pretrain_gpt; sys.exit(pretrain_gpt())")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and 'pip install "tempo-megatron[train]"' in done.stderr


@pytest.mark.slow
def test_what_needs_no_package_works_without(bare_site: Path) -> None:
    code = "from tempo_megatron import TempoConfig; from tempo_megatron.cli import main; print(TempoConfig()); main()"
    done = run_bare(bare_site, code, "doctor")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^megatron-core +not installed$", done.stdout, re.MULTILINE)


def test_both_packages_have_one_version_and_are_typed() -> None:
    import tempo_kernels
    import tempo_megatron

    assert tempo_megatron.__version__ is tempo_kernels.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", tempo_kernels.__version__)
    for package in (tempo_kernels, tempo_megatron):
        assert Path(package.__file__).with_name("py.typed").is_file()
