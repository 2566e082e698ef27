"""What doctor says of packages that do not fit together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tempo_megatron.cluster.versions import PACKAGES, find_broken_imports, find_misfits

ROOT = Path(__file__).parents[2]


def install(folder: Path, name: str, version: str, *lines: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    (metadata / "METADATA").write_text(text + "\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_what_these_tests_run_with_fits_together_and_the_ranges_are_those_that_pip_gets() -> None:
    assert find_misfits() == []
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for name in ("torch", "megatron-core", "deepspeed", "triton"):
        assert f'"{name}{PACKAGES[name]}' in setup


def test_a_package_outside_its_range_is_said_with_what_to_install(packages: Path) -> None:
    install(packages, "deepspeed", "0.12.3")
    install(packages, "megatron_core", "0.21.0rc1")
    assert find_misfits() == [
        'megatron-core is 0.21.0rc1, expected >=0.14,<0.21; pip install "megatron-core>=0.14,<0.21"',
        'deepspeed is 0.12.3, expected >=0.16; pip install "deepspeed>=0.16"',
    ]


def test_what_one_package_needs_of_another_is_compared(packages: Path) -> None:
    needed = (
        "torch==2.6.0",
        'triton==1.0; sys_platform == "none such"',
        'deepspeed<0.1; extra == "test"',
        "numpy (>=1.0)",
    )
    install(packages, "transformer_engine", "2.1", *(f"Requires-Dist: {text}" for text in needed))
    (torch,) = find_misfits()
    assert torch.startswith("transformer_engine 2.1 needs torch==2.6.0, installed is 2.")
    assert torch.endswith('; pip install "torch==2.6.0"')


def test_a_build_that_cannot_be_imported_is_said(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = {"apex": "apex"}
    assert find_broken_imports(built) == []
    install(packages, "apex", "0.1")
    (packages / "apex.py").write_text('raise ImportError("libcudart.so.11.0: cannot open shared object file")\n')
    monkeypatch.setenv("PYTHONPATH", str(packages))
    (sentence,) = find_broken_imports(built)
    assert sentence == (
        "apex is installed, and `import apex` fails (ImportError: libcudart.so.11.0: cannot open shared object file); "
        "install one built for this torch and CUDA, or remove it"
    )
    assert "apex" not in sys.modules
