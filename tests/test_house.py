"""The rules of the house that a reader relies on: who may import whom.

Each rule has a reason. Where one makes code worse, change the rule, not the code:
- imports point down, so that the operations can be used without Megatron and the slots without the trainer; models of
  plain PyTorch (tempo_torch) need the operations only; within tempo_megatron a room may need an extra that the rooms
  below it do not have: a memory command that imported data preparation would ask for its tokenizers;
- no files import one another in a circle: each can be read with what lies below it;
- triton stays in files named kernel*.py, which are imported when a CUDA tensor asks for them: without a GPU nothing of
  it is needed;
- a room of tempo_kernels is entered by its __init__.py, so that what lies behind can change; `philox` is shared inside
  kernels, because a device function has no other door;
- what is shipped replaces no name of another module with unittest.mock, nor reaches one by pkgutil: where code needs
  another to behave differently, that one has a parameter or a context for it;
- no test file imports another: what tests share lies in a module that is named after it, so that a reader finds it
  there, and a test that changes or goes takes nothing away from another.

No rule counts lines: a file ends where its meaning ends.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import seconds

ROOT = Path(__file__).parent.parent
FLOORS = {
    "kernels/tempo_kernels": 0,
    "kernels/tempo_torch": 1,
    "tempo_megatron": 2,
    "launch": 3,
    "tests": 4,
    "benchmarks": 4,
    "examples": 4,
}
FLOOR_OF_IMPORT = {
    "tempo_kernels": 0,
    "tempo_torch": 1,
    "tempo_megatron": 2,
    "launch": 3,
    "kernels": 3,
    "tests": 4,
    "benchmarks": 4,
}
TOP_FLOOR = 4
# Room of tempo_megatron -> the other rooms that it may import.
ROOMS_BELOW: dict[str, tuple[str, ...]] = {
    "words": (),
    "settings": ("words",),
    "data": ("words",),
    "slots": ("settings", "words"),
    "models": ("settings", "slots", "words"),
    "cluster": ("settings", "words"),
    "memory": ("models", "settings", "slots", "words"),
    "roam": ("memory", "models", "settings", "slots", "words"),
    "megatron_lm": ("cluster", "memory", "models", "settings", "slots", "words"),
    "training": ("cluster", "data", "memory", "models", "settings", "slots", "words"),
}
# initialize works without what the trainer needs, Megatron-core first of all.
DEEPSPEED_HOMES = ("tempo_megatron/training/", "tempo_megatron/deepspeed_initialize.py", "launch/")
FILES = sorted(path for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))
SHARED_ROOMS = ("philox",)
SHARED_MODULES = (
    "backend",
    "compiled",
    "derivative",
    "kernel_launch",
    "kernel_numbers",
    "kernel_sums",
    "late_check",
    "opaque",
    "saved",
)


@functools.cache
def imports(path: Path) -> list[str]:
    """The full name of every module that `path` imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module or ''}.{alias.name}" for alias in node.names]
            assert node.level == 0, f"{path}: relative import; write the full name"
    return found


def misplaced(where: str, name: str, module: str) -> str | None:
    """Why file `where` (its file name `name`) may not import `module`; None where it may."""
    floor = next(level for folder, level in FLOORS.items() if where.startswith(folder + "/"))
    top = module.partition(".")[0]
    if FLOOR_OF_IMPORT.get(top, 0) > floor:
        return "imports point down"
    if floor < TOP_FLOOR and top == "triton" and not is_kernel(name):
        return "triton belongs in kernel*.py"
    if floor < TOP_FLOOR and top in ("unittest", "pkgutil"):
        return "what is shipped patches nothing"
    if floor < TOP_FLOOR and top == "deepspeed" and not where.startswith(DEEPSPEED_HOMES):
        return "deepspeed belongs in tempo_megatron/training, tempo_megatron/deepspeed_initialize.py and launch"
    if floor < FLOORS["tempo_megatron"] and top == "megatron":
        return "tempo_kernels and tempo_torch work without megatron"
    if (
        floor == FLOORS["tempo_megatron"]
        and top == "tempo_megatron"
        and (below := ROOMS_BELOW.get(where.split("/")[1])) is not None
    ):
        room = module.partition(".")[2].partition(".")[0]
        if room in ROOMS_BELOW.keys() - {where.split("/")[1], *below}:
            return "imports point down"
    if floor == 0 and top == "tempo_kernels":
        own, room = where.split("/")[2], module.partition(".")[2].partition(".")[0]
        allowed = (own, *SHARED_ROOMS, *SHARED_MODULES)
        if room not in allowed and len(where.split("/")) > 3:
            return "only the room philox is shared"
    if top == "tempo_kernels" and floor < TOP_FLOOR and behind_the_door(module):
        room = module.split(".")[1]
        # Device functions have no other way in: a door must not import triton.
        shares_device_functions = is_kernel(name) and room in SHARED_ROOMS and is_kernel(module.split(".")[2] + ".py")
        if not where.startswith(f"kernels/tempo_kernels/{room}/") and not shares_device_functions:
            return "a room is entered by its door"
    return None


def is_kernel(name: str) -> bool:
    return fnmatch.fnmatch(name, "kernel*.py")


def behind_the_door(module: str) -> bool:
    """Whether tempo_kernels.ROOM.NAME names a file of the room, or something in one."""
    parts = module.split(".")
    return len(parts) > 3 or (len(parts) == 3 and (ROOT / "kernels" / Path(*parts)).with_suffix(".py").exists())


def test_imports_point_down_and_rooms_are_entered_by_the_door() -> None:
    named = {path.relative_to(ROOT).as_posix(): path for path in FILES}
    assert len(named) > 400
    assert not [
        f"{where}: {module}: {why}"
        for where, path in named.items()
        for module in imports(path)
        if (why := misplaced(where, path.name, module))
    ]


def test_no_files_import_one_another_in_a_circle() -> None:
    """Imports inside functions and those for types alone count: a circle is one for the reader, too."""
    graph = {name: set(imports(path)) for name, path in _list_modules("tempo_megatron")}
    below = {
        name: {target for module in found for target in (module, module.rpartition(".")[0]) if target in graph} - {name}
        for name, found in graph.items()
    }
    assert not find_circle(below)
    top = max(name for name in below if below[name])
    assert find_circle({**below, min(below[top]): {top}})


def find_circle(below: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _list_modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in (ROOT / package).rglob("*.py"):
        if path.name != "__init__.py":
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


@pytest.mark.slow
def test_every_module_can_be_imported() -> None:
    """Also what no quick test runs; and on Python 3.10, where a dataclass refuses a default that is a list, a dict or a
    set, even one that can be hashed."""
    inside_of_another = "tempo_megatron.megatron_lm.megatron_deepspeed"  # imports Megatron-DeepSpeed's own `megatron`
    names = [name for name, _ in _list_modules("tempo_megatron") if not name.endswith(("__main__", inside_of_another))]
    for package in ("tempo_kernels", "tempo_torch"):
        names += [name.removeprefix("kernels.") for name, _ in _list_modules(f"kernels/{package}")]
    program = "\n".join(
        (
            "import dataclasses, importlib, sys",
            f"for name in {names!r}: importlib.import_module(name)",
            "ours = [module for name, module in sys.modules.items() if name.startswith('tempo_')]",
            "made = [each for module in ours for each in vars(module).values() if isinstance(each, type)]",
            "fields = [field for each in made if dataclasses.is_dataclass(each) for field in dataclasses.fields(each)]",
            "assert len(fields) > 500 and not [f for f in fields if isinstance(f.default, (list, dict, set))]",
        )
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and len(names) > 200, done.stderr


def test_no_test_file_imports_another() -> None:
    tests = [path for path in FILES if path.name.startswith("test_")]
    names = {path.stem for path in tests}
    found = {
        path.name: shared for path in tests if (shared := {name.partition(".")[0] for name in imports(path)} & names)
    }
    assert not found


@pytest.mark.parametrize(
    ("where", "module"),
    [
        ("kernels/tempo_kernels/activation/function.py", "tempo_megatron.settings.config"),
        ("kernels/tempo_kernels/activation/function.py", "tempo_kernels.norm.layer_norm"),
        ("kernels/tempo_kernels/activation/function.py", "tempo_kernels.philox.eager"),
        ("kernels/tempo_kernels/norm/kernel.py", "tempo_kernels.dropout_add.kernel.forward"),
        ("kernels/tempo_kernels/gelu.py", "tempo_kernels.activation.kernel_activations"),
        ("kernels/tempo_kernels/activation/eager.py", "triton"),
        ("kernels/tempo_kernels/activation/eager.py", "megatron.core.parallel_state"),
        ("tempo_megatron/slots/mlp.py", "deepspeed"),
        ("tempo_megatron/memory/fake_tensors.py", "unittest.mock"),
        ("tempo_megatron/slots/mlp.py", "tempo_kernels.activation.function.activate"),
        ("launch/pretrain_gpt.py", "tests.distributed"),
        ("tempo_megatron/memory/rank/estimate.py", "tempo_megatron.data.tokenizer.GPT2Tokenizer"),
        ("tempo_megatron/models/shape.py", "tempo_megatron.memory.run.Run"),
    ],
)
def test_a_misplaced_import_is_found(where: str, module: str) -> None:
    assert misplaced(where, Path(where).name, module)


@pytest.mark.parametrize("name", ["kernels", "launch", "configs"])
def test_folders_with_common_names_are_not_packages(name: str) -> None:
    assert not list((ROOT / name).glob("__init__.py"))


def test_the_table_of_seconds_has_every_test_file() -> None:
    """`bash tests/run.sh --seconds tests/seconds.json FILE...` adds a file's row; no test asks that a figure hold."""
    table = json.loads((ROOT / "tests" / "seconds.json").read_text(encoding="utf-8"))
    assert set(table) == set(seconds.list_files())
