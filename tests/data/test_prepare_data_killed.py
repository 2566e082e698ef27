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

# Runs prepare_data in a child process per moment n = 1, 2, ... that kills itself just before the n-th call of one of
# these functions, until a child comes through. Prints, per child, how it ended and the files it left.
KILL_EACH_MOMENT = """
import json, os, shutil, signal, sys
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # here once, and not in each child
from tempo_megatron.data.prepare_data import main

start, work, *command = sys.argv[1:]

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

for n in range(1, 200):
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(start, work)
    pid = os.fork()
    if not pid:
        kill_before(n)
        os._exit(main(command))
    status = os.waitpid(pid, 0)[1]
    shutil.copytree(work, f"{work}-{n}")
    print(json.dumps([n, status]), flush=True)
    if status == 0:
        break
"""
HOW = ("--vocab-size", "300", "--workers", "1")


def prepare(text: Path, prefix: Path) -> int:
    return main(["--input", str(text), "--output-prefix", str(prefix), *HOW])


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("out[.-]*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("has_old", [True, False])
def test_a_killed_run_leaves_nothing_that_loads_or_a_whole_data_set(tmp_path: Path, has_old: bool) -> None:
    start, work, text = tmp_path / "start", tmp_path / "work", tmp_path / "new.txt"
    start.mkdir()
    text.write_text("the new text has more words and other words " * 3)
    if has_old:
        (tmp_path / "old.txt").write_text("the old text has a few words")
        assert prepare(tmp_path / "old.txt", start / "out") == 0
    command = [sys.executable, "-W", "ignore", "-c", KILL_EACH_MOMENT, str(start), str(work)]
    command += ["--input", str(text), "--output-prefix", str(work / "out"), *HOW]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ended = [json.loads(line) for line in printed if line.startswith("[")]
    assert [status for _, status in ended] == [9] * (len(ended) - 1) + [0] and len(ended) > 20
    folders = [tmp_path / f"work-{n}" for n, _ in ended]

    old, new = content(start), content(folders[-1])
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
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    for folder in folders:
        assert prepare(bad, folder / "out") == 1
        assert prepare(text, folder / "out") == 0
        found = content(folder)
        assert all(found[name] == data for name, data in new.items() if name != "out.json") and len(found) == len(new)
        assert not list(folder.glob("*.partial"))
        validate_dataset(str(folder / "out"), 300)
