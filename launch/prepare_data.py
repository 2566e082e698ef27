"""Prepares training data: python launch/prepare_data.py --input PATH... --output-prefix P (see --help)."""

from __future__ import annotations

import sys

try:
    from tempo_megatron.cli import main
except ModuleNotFoundError as error:
    if error.name != "tempo_megatron":
        raise
    sys.exit(
        f"tempo_megatron is not installed for {sys.executable}; activate the environment that launch/quickstart.sh "
        "makes (source .venv/bin/activate), or pip install this folder's [train]"
    )

if __name__ == "__main__":
    raise SystemExit(main(["prepare-data", *sys.argv[1:]]))
