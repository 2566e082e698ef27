"""The source distribution: it has the scripts, configurations, examples and tests, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parent.parent
NOT_SHIPPED = {"runs", "data", "build", "dist", ".git", ".venv"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths in the archive, without its top folder."""
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip(f"setuptools {setuptools.__version__} is here; the build needs 77, which pip would fetch")
    folder = tmp_path_factory.mktemp("dist")
    # The egg-info goes aside as well: nothing is written into the tree.
    place = str(folder)
    command = ["setup.py", "-q", "egg_info", "--egg-base", place, "sdist", "--dist-dir", place]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        return {name.partition("/")[2] for name in opened.getnames()}


def test_every_tracked_file_that_a_user_needs_is_in_it(sdist: set[str]) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a git checkout, so no list of the files is known")
    assert set(listed.stdout.splitlines()) - sdist == set()


def test_nothing_else_is_in_it(sdist: set[str]) -> None:
    assert not [name for name in sdist if name.split("/")[0] in NOT_SHIPPED or "__pycache__" in name]


def test_the_hooks_are_the_checks_of_ci() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for check in ("ruff check", "ruff format", "mypy", "shellcheck"):
        assert json.dumps(check) in ci or f"check {check} " in ci
        assert f"name: {check}\n" in hooks
    assert "http" not in hooks.partition("repos:")[2]
