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


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("out[.-]*") if path.is_file()}


def kill_each_moment(folder: Path, old: str | None) -> tuple[list[Path], Path]:
    """The folders that runs left which were killed, in the order of the moments, and last the one of the run that
    ended; the text of these runs. Before them there was a data set of the text `old`."""
    start, work, text = folder / "start", folder / "work", folder / "new.txt"
    start.mkdir()
    text.write_text("the new text has more words and other words " * 3)
    if old is not None:
        (folder / "old.txt").write_text(old)
        command = ["--input", str(folder / "old.txt"), "--output-prefix", str(start / "out"), "--vocab-size", "300"]
        assert main(command) == 0
    command = ["--input", str(text), "--output-prefix", str(work / "out"), "--vocab-size", "300", "--workers", "1"]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILL_EACH_MOMENT, str(start), str(work), *command],
        capture_output=True,
        text=True,
        check=True,
    )
    ended = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    assert [status for _, status in ended] == [9] * (len(ended) - 1) + [0]
    return [folder / f"work-{n}" for n, _ in ended], text


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_that_loads_or_a_whole_data_set(tmp_path: Path) -> None:
    folders, text = kill_each_moment(tmp_path, old="the old text has a few words")
    old, new = content(tmp_path / "start"), content(folders[-1])
    assert not list(folders[-1].glob("*.partial"))
    kinds = []
    for folder in folders:
        kinds.append("old" if content(folder) == old else "new" if content(folder) == new else "none")
        assert kinds[-1] != "none" or not IndexedDataset.exists(str(folder / "out"))
        for leftover in folder.glob("out.partial/*"):
            assert leftover.suffix not in (".bin", ".idx")
            assert not leftover.name.startswith(".")
    # First the old one, then for a few moments none, then the new one, and never a mixture of the two.
    assert [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before] == ["old", "none", "new"]
    assert len(folders) > 20
    assert (folders[kinds.index("none")] / "out.partial").is_dir()
    assert_all_can_be_made_again(folders, text, new)


@pytest.mark.slow
def test_what_a_killed_first_run_leaves_is_known_as_its_own(tmp_path: Path) -> None:
    folders, text = kill_each_moment(tmp_path, old=None)
    published = [set(content(folder)) for folder in folders]
    names = ["out.json", "out-vocab.json", "out-merges.txt", "out.bin", "out.idx"]
    assert all(set(names[:count]) in published for count in range(1, 6))
    assert_all_can_be_made_again(folders, text, content(folders[-1]))


def assert_all_can_be_made_again(folders: list[Path], text: Path, new: dict[str, bytes]) -> None:
    """Also where the next run ends in an error first."""
    for folder in folders:
        command = ["--output-prefix", str(folder / "out"), "--vocab-size", "300", "--workers", "1"]
        bad = folder / "bad.jsonl"
        bad.write_text("{")
        assert main(["--input", str(bad), *command]) == 1
        assert main(["--input", str(text), *command]) == 0
        assert {name: data for name, data in content(folder).items() if name != "out.json"} == {
            name: data for name, data in new.items() if name != "out.json"
        }
        assert not list(folder.glob("*.partial"))
        validate_dataset(str(folder / "out"), 300)
