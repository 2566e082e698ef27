"""Runs a script of Megatron-LM's from this repository: torchrun launch/run_megatron.py SCRIPT ... --use-tempo"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from tempo_megatron.megatron_lm.run import main
except ModuleNotFoundError as error:
    if error.name not in ("tempo_megatron", "tempo_kernels"):
        raise
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "kernels")]
    from tempo_megatron.megatron_lm.run import main

if __name__ == "__main__":
    sys.exit(main())
