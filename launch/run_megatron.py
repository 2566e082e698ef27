"""Runs a training script of a Megatron-LM checkout: deepspeed launch/run_megatron.py pretrain_gpt.py ... --use-tempo"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

# megatron-core says so once per module and rank.
warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")

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
