"""Start with: deepspeed launch/pretrain_gpt.py --deepspeed_config configs/deepspeed/zero1_bf16.json --help"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

# megatron-core says so once per module and rank; the run's banner says it once.
warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")

try:
    from tempo_megatron.cli import pretrain_gpt
except ModuleNotFoundError as error:
    if error.name not in ("tempo_megatron", "tempo_kernels"):
        raise
    root = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(root), str(root / "kernels")]
    from tempo_megatron.cli import pretrain_gpt

if __name__ == "__main__":
    sys.exit(pretrain_gpt())
