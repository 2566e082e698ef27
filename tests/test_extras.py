"""What works without Megatron-core and DeepSpeed, and what is said where a package is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tempo_megatron import cli

ROOT = Path(__file__).parent.parent
# The extra "train" brings them, the extra "megatron" does not.
NOT_MEGATRONS = ("tokenizers", "tqdm", "safetensors", "deepspeed", "tensorboard", "matplotlib")
KERNELS = ROOT / "kernels" / "tempo_kernels"
ROOMS = sorted(path.parent.name for path in KERNELS.glob("*/__init__.py"))
ROOMS += sorted(path.stem for path in KERNELS.glob("*.py") if "\n__all__ = " in path.read_text(encoding="utf-8"))


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


# Imports torch, which takes seconds, and runs each of the codes that it reads in a fork: its status, output, errors.
PROGRAM = """
import json, os, sys, tempfile, torch
done = []
for code, arguments in json.load(sys.stdin):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    if not (pid := os.fork()):
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        sys.argv = ["command", *arguments]
        exec(code)
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    done.append([status, *(file.seek(0) or file.read() for file in files)])
print(json.dumps(done))
"""
IMPORTS = "; ".join(f"import tempo_kernels.{room}" for room in ROOMS)
WORK = "from tempo_kernels.gelu import gelu; x = torch.randn(4, 8, requires_grad=True); gelu(x).sum().backward()"
CONFIG = "from tempo_megatron import TempoConfig; from tempo_megatron.cli import main; print(TempoConfig()); main()"
WITHOUT_PACKAGES = [(f"{IMPORTS}; {WORK}; print(x.grad.shape)", []), (CONFIG, ["doctor"])]
# Code, what needs which package, the extra that has it.
LACKING = [
    ("from tempo_megatron import tempo_block_spec", "tempo_block_spec", "megatron"),
    ("from tempo_megatron import set_micro_batch", "set_micro_batch", "megatron"),
    ("from tempo_megatron.cpu import use_cpu; use_cpu()", "use_cpu()", "megatron"),
    ("import tempo_megatron.training.main", "the trainer", "train"),
]
COMMANDS = [["ledger", "--model", "gpt.json"], ["prepare-data"], ["export"]]
SCRIPTS = ["prepare_data", "pretrain_gpt", "pretrain_bert", "pretrain_t5"]
RUN_COMMAND = "from tempo_megatron.cli import main; sys.exit(main())"
RUN_TRAINER = "from tempo_megatron.cli import pretrain_gpt; sys.exit(pretrain_gpt())"


@pytest.fixture(scope="module")
def outcomes(bare_site: Path) -> list[tuple[int, str, str]]:
    """What becomes of each code above: exit status, output, errors."""
    scripts = [
        (f"import runpy; runpy.run_path({str(ROOT / 'launch' / f'{script}.py')!r}, run_name='__main__')", ["--help"])
        for script in SCRIPTS
    ]
    codes = [*WITHOUT_PACKAGES, *((code, []) for code, _, _ in LACKING)]
    codes += [*((RUN_COMMAND, argv) for argv in COMMANDS), *scripts, (RUN_TRAINER, [])]
    start = f"import sys; sys.path += {[str(ROOT), str(ROOT / 'kernels'), str(bare_site)]}\n"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", start + PROGRAM],
        input=json.dumps(codes),
        env={**os.environ, "CXX": "no-compiler"},  # to try one takes doctor longer than all the rest
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_what_needs_no_package_works_without(outcomes: list[tuple[int, str, str]]) -> None:
    assert "gelu" in ROOMS and len(ROOMS) > 6
    operations, doctor = outcomes[:2]
    assert operations[1] == "torch.Size([4, 8])\n", operations
    assert doctor[0] == 0 and re.search(r"^megatron-core +not installed$", doctor[1], re.MULTILINE), doctor


@pytest.mark.slow
def test_a_missing_package_is_named_with_the_command_that_installs_it(outcomes: list[tuple[int, str, str]]) -> None:
    for (_, what, extra), (status, _, errors) in zip(LACKING, outcomes[2:6], strict=True):
        sentence = f'{what} needs megatron-core, which is not installed; pip install "tempo-megatron[{extra}]"'
        assert errors.splitlines()[-1] == f"tempo_megatron.extras.MissingExtraError: {sentence}" and status == 1


@pytest.mark.slow
def test_a_command_that_lacks_a_package_says_so_without_a_traceback(outcomes: list[tuple[int, str, str]]) -> None:
    for argv, (status, _, errors) in zip(COMMANDS, outcomes[6:9], strict=True):
        assert errors.startswith(f"tempo-megatron {argv[0]}: ") and errors.count("\n") == 1 and status == 2
        assert 'which is not installed; pip install "tempo-megatron[' in errors
    for status, _, errors in outcomes[9:]:
        assert status and errors.count("\n") == 1
        assert 'which is not installed; pip install "tempo-megatron[train]"' in errors


def find_others(module: str, seen: set[str]) -> set[str]:
    """The packages of others that are imported with a module of ours, by itself or by what of ours it imports."""
    folder = ROOT / ("" if module.startswith("tempo_megatron") else "kernels") / Path(*module.split("."))
    path = next((path for path in (folder.with_suffix(".py"), folder / "__init__.py") if path.is_file()), None)
    if module in seen or path is None:  # a name in a module is none
        return set()
    seen.add(module)
    found = find_others(module.rpartition(".")[0], seen)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = [each.name for each in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
        for name in names:
            found |= find_others(name, seen) if name.startswith("tempo_") else {name.partition(".")[0]}
    return found


def test_commands_that_need_megatron_only_start_without_what_data_preparation_needs() -> None:
    modules = [command.module for command in cli.COMMANDS.values() if command.needs == "megatron"]
    assert "tempo_megatron.memory.commands.plan" in modules and len(modules) > 4
    seen: set[str] = set()
    found = {name for module in modules for name in find_others(module, seen)}
    assert {"torch", "megatron"} <= found and not found & set(NOT_MEGATRONS)


def test_both_packages_have_one_version_and_are_typed() -> None:
    import tempo_kernels
    import tempo_megatron

    assert tempo_megatron.__version__ is tempo_kernels.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", tempo_kernels.__version__)
    for package in (tempo_kernels, tempo_megatron):
        assert Path(package.__file__).with_name("py.typed").is_file()
