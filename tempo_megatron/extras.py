"""Says in one sentence what to install where a package is missing: one of the extras of setup.py.

`pip install tempo-megatron` brings torch and numpy, which is all that the operations need.
"""

from __future__ import annotations

import importlib.util


class MissingExtraError(ModuleNotFoundError):
    """A package is missing; the text says which one, and the command that installs it."""


def check_installed(what: str, extra: str, *modules: str) -> None:
    """Say in one sentence which package `what` misses, before an import of it fails somewhere deeper.

    Args:
        what: the beginning of the sentence, for example "tempo_block_spec".
        extra: of tempo-megatron; it brings the modules.
        modules: full names; none of them is imported.

    Raises MissingExtraError for the first module that is not installed.
    """
    for module in modules:
        if not is_installed(module):
            # megatron.core comes from the distribution megatron-core, every other one from that of its own name.
            raise MissingExtraError(
                f"{what} needs {module.replace('.', '-')}, which is not installed; "
                f'pip install "tempo-megatron[{extra}]"',
                name=module,
            )


def is_installed(module: str) -> bool:
    """Whether a module of this full name can be found. It is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
