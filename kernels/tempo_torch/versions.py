"""The oldest versions of transformers, peft, accelerate and trl that Tempo supports.

docs/huggingface.md says which were tested.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

OLDEST_VERSIONS = {"transformers": "4.57", "peft": "0.17", "accelerate": "1.10", "trl": "0.24"}


def check_versions(packages: Iterable[str]) -> None:
    """Raises ValueError where one of these packages is imported and older than the oldest supported version."""
    for package in packages:
        module, oldest = sys.modules.get(package), OLDEST_VERSIONS.get(package)
        version = getattr(module, "__version__", None)
        if oldest is not None and version is not None and _parse(version) < _parse(oldest):
            raise ValueError(
                f"{package} is {version}; expected at least {oldest}, the oldest version that is tested; upgrade it"
            )


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
