"""Finds which packages are installed here, and whether their versions meet one another's requirements."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys

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
MINIMUM_PYTHON = ">=3.10"
# These are built against one torch and one CUDA. No metadata says which, so only an import shows that they fit.
_IMPORTS = {
    "apex": "import apex",
    "transformer_engine": "import transformer_engine.pytorch",
}
_REMEDIES = {
    "apex": "build it again for this torch and CUDA, or remove it",
    "transformer_engine": "install the release built for this torch and CUDA, or remove it",
}


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
    found = []
    if not _fits(platform.python_version(), MINIMUM_PYTHON):
        found.append(f"python is {platform.python_version()}, expected {MINIMUM_PYTHON}; take a newer one")
    for name, expected in PACKAGES.items():
        version = find_version(name)
        if version and not _fits(version, expected):
            found.append(f'{name} is {version}, expected {expected}; pip install "{name}{expected}"')
    for name in PACKAGES:
        found += _find_unmet_requirements(name)
    return found


def _fits(version: str, expected: str) -> bool:
    from packaging.specifiers import SpecifierSet

    # prereleases: nightly builds and 2.6.0+cu124 count as their base version.
    return SpecifierSet(expected).contains(version, prereleases=True)


def _find_unmet_requirements(name: str) -> list[str]:
    """Lists the requirements of an installed package, on Python and on PACKAGES, that are not met."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    python = package.metadata["Requires-Python"]
    if python and not _fits(platform.python_version(), python):
        found.append(
            f"{name} {package.version} needs python {python}, this is {platform.python_version()}; install another"
        )
    known = {canonicalize_name(other): find_version(other) for other in PACKAGES}
    for requirement in map(Requirement, package.requires or []):
        installed = known.get(canonicalize_name(requirement.name))
        if installed is None or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        expected = f"{requirement.name}{requirement.specifier}"
        if not _fits(installed, str(requirement.specifier)):
            found.append(
                f'{name} {package.version} needs {expected}, installed is {installed}; pip install "{expected}"'
            )
    return found


def find_broken_imports() -> list[str]:
    """Lists a sentence for each package that is installed but cannot be imported, tried in a separate Python."""
    found = []
    for name, statement in _IMPORTS.items():
        if find_version(name) is None:
            continue
        command = [sys.executable, "-c", statement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            found.append(f"{name} is installed, and `{statement}` does not end within 60 s; {_REMEDIES[name]}")
            continue
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
            found.append(f"{name} is installed, and `{statement}` fails ({last}); {_REMEDIES[name]}")
    return found
