"""Prepares training data: python launch/prepare_data.py --input PATH... --output-prefix P (see --help)."""

from __future__ import annotations

from tempo_megatron.data.prepare_data import main

if __name__ == "__main__":
    raise SystemExit(main())
