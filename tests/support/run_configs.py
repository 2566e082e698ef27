"""What the trainer decides of a command line and a DeepSpeed JSON before anything slow starts, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tempo_megatron.training.run.arguments import complete_run, parse_arguments
from tempo_megatron.training.run.checks import check_run
from tempo_megatron.training.run.deepspeed_config import read_deepspeed_config
from tempo_megatron.training.run.resume import read_saved_run
from tempo_megatron.training.run.run_config import RunConfig

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split()
NEEDED = "--micro-batch-size 2 --train-iters 10 --lr 1e-3 --data-path text".split()


def write_json(folder: Path, config: dict[str, Any] | str | bytes | None) -> list[str]:
    """The words that name a DeepSpeed JSON with this content."""
    path = folder / "deepspeed.json"
    content = config if isinstance(config, (str, bytes)) else json.dumps(config or {})
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return ["--deepspeed_config", str(path)]


def decide(
    folder: Path,
    *words: str,
    config: dict[str, Any] | str | bytes | None = None,
    family: str = "gpt",
    world_size: int = 1,
    on_gpu: bool = False,
) -> RunConfig:
    """The completed and checked run of these words, as main() decides it."""
    args = parse_arguments([*write_json(folder, config), *words], family)
    read = read_deepspeed_config(args.deepspeed_config)
    run = complete_run(args, read, read_saved_run(args), world_size=world_size, on_gpu=on_gpu)
    check_run(run)
    return run


def complete(*words: str, family: str = "gpt", world_size: int = 1) -> RunConfig:
    """The run of these words with an empty DeepSpeed JSON, unchecked."""
    args = parse_arguments(["--deepspeed_config", "-", *words], family)
    return complete_run(args, {}, None, world_size=world_size, on_gpu=False)
