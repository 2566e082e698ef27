"""Start with: deepspeed launch/pretrain_gpt.py --deepspeed_config configs/deepspeed/zero1_bf16.json --help"""

from __future__ import annotations

import sys
from pathlib import Path

# An installed tempo_megatron comes first.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "kernels"))

from tempo_megatron.cli import pretrain_gpt

if __name__ == "__main__":
    sys.exit(pretrain_gpt())
