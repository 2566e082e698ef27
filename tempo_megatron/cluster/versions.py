"""Finds which packages are installed here, and whether their versions meet one another's requirements."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping

from tempo_megatron.extras import check_installed

# Packages that doctor lists. Those that Tempo needs or was tested with have the range of setup.py; others have none.
PACKAGES: dict[str, str] = {
    "torch": ">=2.7",
    "megatron-core": ">=0.14,<0.21",
    "deepspeed": ">=0.16",
    "triton": ">=3.3",
    "numpy": "",
    "apex": "",
    "transformer_engine": "",
}
# These are built against one torch and one CUDA. No metadata says which, so only an import shows that they fit.
_BUILT = {"apex": "apex", "transformer_engine": "transformer_engine.pytorch"}


def find_version(distribution: str) -> str | None:
    """Returns the installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_misfits() -> list[str]:
    """Lists a sentence for each installed package that is out of Tempo's range or that of another installed package.

    Raises MissingExtraError without the package packaging, which megatron-core and deepspeed install.
    """
    check_installed("a comparison of versions", "train", "packaging")
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    def fits(version: str, expected: str) -> bool:
        # prereleases: nightly builds and 2.6.0+cu124 count as their base version.
        return SpecifierSet(expected).contains(version, prereleases=True)

    installed = {name: version for name in PACKAGES if (version := find_version(name))}
    found = [
        f'{name} is {version}, expected {PACKAGES[name]}; pip install "{name}{PACKAGES[name]}"'
        for name, version in installed.items()
        if not fits(version, PACKAGES[name])
    ]
    known = {canonicalize_name(name): version for name, version in installed.items()}
    for name, version in installed.items():
        for needed in map(Requirement, importlib.metadata.requires(name) or []):
            other = known.get(canonicalize_name(needed.name))
            if other is None or (needed.marker and not needed.marker.evaluate({"extra": ""})):
                continue
            if not fits(other, str(needed.specifier)):
                expected = f"{needed.name}{needed.specifier}"
                found.append(f'{name} {version} needs {expected}, installed is {other}; pip install "{expected}"')
    return found


def find_broken_imports(built: Mapping[str, str] = _BUILT) -> list[str]:
    """Lists a sentence for each package that is installed but cannot be imported, tried in a separate Python."""
    found = []
    for name, module in built.items():
        if find_version(name) is None:
            continue
        command = [sys.executable, "-c", f"import {module}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            fault = "does not end within 60 s"
        else:
            said = done.stderr.strip().splitlines()
            fault = f"fails ({said[-1] if said else f'exit code {done.returncode}'})" if done.returncode else ""
        if fault:
            remedy = "install one built for this torch and CUDA, or remove it"
            found.append(f"{name} is installed, and `import {module}` {fault}; {remedy}")
    return found
