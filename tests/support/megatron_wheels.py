"""Fetches wheels of megatron-core and megatron-bridge by pip, once, and unpacks them beside the packages under test.

Since 0.17 the wheel of megatron-core holds megatron.training, so that it serves as a checkout of Megatron-LM; of its
scripts, megatron_pretrain_gpt.py has the place of pretrain_gpt.py. It asks for Python 3.12, of which it uses no
more than `typing.override`, and for compiled helpers, which are the installed megatron-core's.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import pytest

_SHA256 = {
    "megatron-core==0.17.1": "6dd0826489ee70a791e38612b25e914c4a18b0b074f2282353f235ee96273cf2",
    "megatron-core==0.18.2": "c2717b84079bf0bad1151525533a251870d1a86201f8c0702e0b5a6d6b5594f1",
    "megatron-core==0.19.2": "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5",
    "megatron-bridge==0.6.2": "bcb7274ab9327167c345aa24b96b95790ce5090df1945d883bdc41065d5649e2",
}
# The first is the one of every run; the others are for --exhaustive.
MEGATRON_CORES = ("0.19.2", "0.17.1", "0.18.2")
SITE = """import typing

if not hasattr(typing, "override"):
    typing.override = lambda function: function
"""


@functools.cache
def unpack(requirement: str) -> Path:
    """The folder of an unpacked wheel; skips the test where pip cannot fetch it."""
    cache = Path(sys.prefix) / "unpacked-wheels"
    folder = cache / requirement
    if not folder.exists():
        cache.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            _fetch(requirement, Path(name))
            if requirement.startswith("megatron-core"):
                _complete(Path(name, "wheel"))
            try:
                Path(name, "wheel").rename(folder)
            except OSError:
                assert folder.exists()  # another process was first
    return folder


def _fetch(requirement: str, folder: Path) -> None:
    (folder / "wanted.txt").write_text(f"{requirement} --hash=sha256:{_SHA256[requirement]}\n", encoding="utf-8")
    # The platform is the one of the hash; what it has compiled is not used.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--retries=1", "--timeout=15", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
    command += ["--platform=manylinux_2_28_x86_64", "--require-hashes", "--requirement=wanted.txt", "--dest=."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr:
        raise RuntimeError(done.stderr)
    if done.returncode:
        reason = (done.stderr.strip() or "nothing").splitlines()[-1]
        pytest.skip(f"needs {requirement}, which pip does not get here: {reason}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")


def _complete(root: Path) -> None:
    """What another Python than 3.12 needs: `typing.override`, and the helpers compiled for it."""
    (root / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    installed, unpacked = Path(spec.origin).parent / "datasets", root / "megatron/core/datasets"
    assert (installed / "helpers.cpp").read_bytes() == (unpacked / "helpers.cpp").read_bytes()
    name = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not (installed / name).exists():
        pytest.skip(f"needs {name} in {installed}, as a wheel of megatron-core has it")
    shutil.copy(installed / name, unpacked / name)
