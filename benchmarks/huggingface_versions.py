"""Runs Tempo's tests of models of transformers with several versions of transformers, peft, accelerate and trl.

    python benchmarks/huggingface_versions.py [--again] [--folder FOLDER] [VERSION ...]

It installs each set of `SETS` into a folder of its own, without torch, and runs `TESTS` with that folder first on the
path. After each set it writes benchmarks/results/cpu/huggingface_versions.jsonl and docs/huggingface.md's table. A set
that has a line in the results runs again only with --again. A VERSION of transformers chooses its set; by default all
sets run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCUMENT, RESULTS = ROOT / "docs/huggingface.md", ROOT / "benchmarks/results/cpu/huggingface_versions.jsonl"
BEGIN, END = "<!-- huggingface versions: begin -->\n", "<!-- huggingface versions: end -->"

# The oldest set first: the first releases of OLDEST_VERSIONS that pip can install (transformers 4.57.0 was withdrawn).
SETS: list[dict[str, str]] = [
    {"transformers": "4.57.1", "peft": "0.17.0", "accelerate": "1.10.0", "trl": "0.24.0"},
    {"transformers": "5.0.0", "peft": "0.18.1", "accelerate": "1.12.0", "trl": "0.27.0"},
    {"transformers": "5.23.0", "peft": "0.21.2", "accelerate": "1.15.0", "trl": "1.16.0"},
]
TESTS = (
    "test_tempo_torch_loss.py",
    "test_tempo_torch_trainer.py",
    "test_tempo_torch_trl.py",
    "test_tempo_torch_transformers.py::test_without_dropout_loss_and_gradients_are_stocks",
    "test_tempo_torch_transformers.py::test_the_keys_and_files_of_a_saved_model_are_stocks",
    "test_tempo_torch_transformers.py::test_dropout_of_lora_keeps_no_more_than_none",
    "test_tempo_torch_transformers.py::test_adapters_that_are_added_later_are_taken_by_tempoize_again",
)
ALSO_RECORDED = ("huggingface_hub", "tokenizers", "datasets")


def install(versions: dict[str, str], folder: Path) -> dict[str, str]:
    """Fills `folder` with a set unless it has it already, and returns the installed versions."""
    if read_installed(folder).items() >= versions.items():
        return read_installed(folder)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    needs_torch = [f"{name}=={version}" for name, version in versions.items() if name != "transformers"]
    subprocess.run([*pip, "--no-deps", *needs_torch], check=True)
    # Other packages that these three import come with transformers, datasets and torch. torch was built for this numpy.
    others = [f"transformers=={versions['transformers']}", "datasets", f"numpy=={metadata.version('numpy')}"]
    subprocess.run([*pip, *others], check=True)
    found = read_installed(folder)
    assert found.items() >= versions.items() and "torch" not in found, found
    return found


def read_installed(folder: Path) -> dict[str, str]:
    """Reads the packages in a folder, and their versions."""
    return {each.metadata["Name"]: each.version for each in metadata.distributions(path=[str(folder)])}


def read_outcome(junit: str) -> dict[str, Any]:
    """Reads from a JUnit report how many tests passed, and which failed or were skipped and why."""
    outcome: dict[str, Any] = {"passed": 0, "failed": [], "skipped": []}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name, skip = case.get("name"), case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome["failed"].append(name)
        elif skip is not None:
            outcome["skipped"].append(f"{name}: {skip.get('message')}")
        else:
            outcome["passed"] += 1
    return outcome


def run_tests(folder: Path) -> dict[str, Any]:
    """Runs `TESTS` with the packages in `folder` and returns their outcome."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        junit = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={junit}"]
        done = subprocess.run([*command, *(f"tests/tempoize/{test}" for test in TESTS)], cwd=ROOT, env=environment)
        if done.returncode not in (0, 1):  # 1: a test failed
            raise RuntimeError(
                f"pytest ended with {done.returncode} before it had run every test; see its output above"
            )
        return read_outcome(junit.read_text(encoding="utf-8"))


def make_table(records: list[dict[str, Any]]) -> str:
    """Formats the table in Markdown, of records in the order of `SETS`."""
    packages = [*SETS[0], "torch"]
    lines = [f"| {' | '.join(packages)} | passed | failed | skipped |"]
    lines.append(f"|{' --- |' * len(packages)} ---: | --- | --- |")
    for record in records:
        cells = [*(record["versions"][name] for name in packages), str(record["passed"])]
        cells += ["<br>".join(record[name]).replace("|", "\\|") or "none" for name in ("failed", "skipped")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read_records() -> list[dict[str, Any]]:
    """Reads the records so far."""
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def is_of(record: dict[str, Any], versions: dict[str, str]) -> bool:
    """Whether a record belongs to a set."""
    return bool(record["versions"].items() >= versions.items())


def write(records: list[dict[str, Any]]) -> None:
    """Writes the results in the order of `SETS`, without those of sets that are no longer there, and the table."""
    records = [record for versions in SETS for record in records if is_of(record, versions)]
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}{make_table(records)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> None:
    """Runs the sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="also run sets that have a line")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/huggingface_versions", help="default: %(default)s")
    names = [versions["transformers"] for versions in SETS]
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of transformers: {', '.join(names)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.versions) - set(names):
        parser.error(f"{', '.join(sorted(unknown))} is in no set; expected one of {', '.join(names)}")
    for versions in SETS:
        name = versions["transformers"]
        is_done = any(is_of(record, versions) for record in read_records())
        if name not in (arguments.versions or names) or (is_done and not arguments.again):
            continue
        # datasets hashes with dill, which takes packages elsewhere for the user's code and fails to pickle pyarrow.
        folder = arguments.folder.resolve() / name / "site-packages"
        installed = install(versions, folder)
        recorded = {**versions, **{package: installed[package] for package in ALSO_RECORDED}}
        recorded |= {"torch": metadata.version("torch")}
        found = {"versions": recorded, **run_tests(folder)}
        write([*(record for record in read_records() if not is_of(record, versions)), found])
    print(make_table(read_records()))


if __name__ == "__main__":
    main()
