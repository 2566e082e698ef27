"""Start with: deepspeed launch/pretrain_t5.py --deepspeed_config configs/deepspeed/zero1_bf16.json --help"""

from __future__ import annotations

import sys
from pathlib import Path

# An installed tempo_megatron comes first.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "kernels"))

from tempo_megatron.cli import pretrain_t5

if __name__ == "__main__":
    sys.exit(pretrain_t5())
