"""BERT and RoBERTa pretraining with megatron-core and DeepSpeed:

`deepspeed launch/pretrain_bert.py --deepspeed_config ...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tempo_megatron.training.main import train


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code."""
    return train(argv, "bert")


if __name__ == "__main__":
    sys.exit(main())
