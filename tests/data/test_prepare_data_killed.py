"""kill -9 at every moment at which a file appears, changes its name or goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tempo_megatron.data.dataset_files import validate_dataset
from tempo_megatron.data.prepare_data import main

# Runs prepare_data in each folder, in a child process per moment n = 1, 2, ... that kills itself just before the n-th
# call of one of these functions, until a child comes through. Prints, per folder and child, how it ended.
KILL_EACH_MOMENT = """
import json, os, shutil, signal, sys
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # here once, and not in each child
from tempo_megatron.data.prepare_data import main

text, *folders = sys.argv[1:]

def kill_before(n):
    calls = 0
    def wrap(owner, name):
        real = getattr(owner, name)
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(owner, name, wrapped)
    for name in ("replace", "remove", "fsync", "close"):
        wrap(os, name)
    for name in ("add_item", "finalize"):
        wrap(IndexedDatasetBuilder, name)

for folder in folders:
    for n in range(1, 200):
        work = f"{folder}-{n}"
        shutil.copytree(folder, work)
        pid = os.fork()
        if not pid:
            kill_before(n)
            how = ["--vocab-size", "300", "--workers", "1"]
            os._exit(main(["--input", text, "--output-prefix", f"{work}/out", *how]))
        status = os.waitpid(pid, 0)[1]
        print(json.dumps([folder, work, status]), flush=True)
        if status == 0:
            break
"""
HOW = ("--vocab-size", "300", "--workers", "1")


def prepare(text: Path, prefix: Path) -> int:
    return main(["--input", str(text), "--output-prefix", str(prefix), *HOW])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("out[.-]*") if path.is_file()}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """What each killed run has left, and at last a whole one, in a folder "without" and one with an "old" data set."""
    root = tmp_path_factory.mktemp("killed")
    for name in ("old", "without"):
        (root / name).mkdir()
    (root / "old.txt").write_text("the old text has a few words")
    assert prepare(root / "old.txt", root / "old" / "out") == 0
    (root / "new.txt").write_text("the new text has more words and other words " * 3)
    command = [sys.executable, "-W", "ignore", "-c", KILL_EACH_MOMENT, *map(str, (root / "new.txt", root / "old"))]
    printed = subprocess.run([*command, str(root / "without")], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[tuple[Path, int]]] = {"old": [], "without": []}
    for folder, work, status in (json.loads(line) for line in printed.splitlines() if line.startswith("[")):
        found[Path(folder).name].append((Path(work), status))
    for ended in found.values():
        assert [status for _, status in ended] == [9] * (len(ended) - 1) + [0] and len(ended) > 20
    return {name: [work for work, _ in ended] for name, ended in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["old", "without"])
def test_a_killed_run_leaves_nothing_that_loads_or_a_whole_data_set(killed: dict[str, list[Path]], name: str) -> None:
    folders, has_old = killed[name], name == "old"
    root = folders[0].parent
    old, new = content(root / name), content(folders[-1])
    kinds = []
    for folder in folders:
        kinds.append("new" if content(folder) == new else "old" if has_old and content(folder) == old else "none")
        assert kinds[-1] != "none" or not IndexedDataset.exists(str(folder / "out"))
        for leftover in folder.glob("out.partial/*"):
            assert leftover.suffix not in (".bin", ".idx") and not leftover.name.startswith(".")
    # First the old one, then for a few moments none, then the new one, and never a mixture of the two.
    order = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert order == [*(["old"] if has_old else []), "none", "new"]
    if not has_old:
        names = ["out.json", "out-vocab.json", "out-merges.txt", "out.bin", "out.idx"]
        published = [set(content(folder)) for folder in folders]
        assert all(set(names[:count]) in published for count in range(1, 6))
    # What a killed run leaves is known as its own, also where the next run ends in an error first.
    bad = root / "bad.jsonl"
    bad.write_text("{")
    for folder in folders:
        assert prepare(bad, folder / "out") == 1
        assert prepare(root / "new.txt", folder / "out") == 0
        found = content(folder)
        assert all(found[name] == data for name, data in new.items() if name != "out.json") and len(found) == len(new)
        assert not list(folder.glob("*.partial"))
        validate_dataset(str(folder / "out"), 300)
