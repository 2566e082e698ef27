"""Runs a script of Megatron-LM's from this repository: torchrun launch/run_megatron.py SCRIPT ... --use-tempo"""

from __future__ import annotations

import sys
from pathlib import Path

# An installed tempo_megatron comes first.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "kernels"))

from tempo_megatron.megatron_lm.run import main

if __name__ == "__main__":
    sys.exit(main())
