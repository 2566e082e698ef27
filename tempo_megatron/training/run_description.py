"""Describes the run that a checkpoint belongs to, and compares a checkpoint with the run that loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tempo_megatron.training.checkpoint_files.integrity import FORMAT
from tempo_megatron.training.run.deepspeed_config import read_offload_device
from tempo_megatron.training.run.resume import REMEDIES, describe_conflict
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.task import Vocabulary

# How weights and moments lie on the ranks. A run goes on in another layout: see resharding.py.
_LAYOUT = ("tensor_model_parallel_size", "data_parallel_size", "zero_stage", "optimizer", "offload_device")


def check_same_run(saved: Mapping[str, Any], description: Mapping[str, Any], load: str) -> None:
    """Raise ValueError for the first field of describe_run in which the checkpoint is of another run."""
    where = f"--load {load}/{saved['checkpoint']}"
    for name, remedy in REMEDIES.items():
        ours, theirs = description.get(name), saved.get(name)
        if ours == theirs:
            continue
        if name in ("data", "tokenizer"):
            raise ValueError(
                f"{where} was trained on {' '.join(saved['data_path'])}, and {' '.join(description['data_path'])} "
                f"has another {'content' if name == 'data' else 'tokenizer'}; change {remedy} to go on with what it "
                "was trained on, or start a new run"
            )
        raise ValueError(describe_conflict(where, name, theirs, ours))


def has_other_layout(saved: Mapping[str, Any], description: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's files are divided in another way than those of this run will be."""
    return any(saved.get(name, description[name]) != description[name] for name in _LAYOUT)


def describe_layout(description: Mapping[str, Any]) -> str:
    tp, dp, stage = (description[name] for name in _LAYOUT[:3])
    return f"TP {tp}, DP {dp}, ZeRO {stage}"


def describe_run(run: RunConfig, vocabulary: Vocabulary, **more: Any) -> dict[str, Any]:
    """What a checkpoint belongs to; a run resumes only from one whose description is its own.

    `more` holds what only the built run knows, such as the optimizer's name.
    """
    described = {name: getattr(run, name) for name in (*REMEDIES, *_LAYOUT) if hasattr(run, name)}
    described |= {"offload_device": read_offload_device(run.deepspeed), "vocab_padding_tp": run.vocab_padding_tp}
    described |= run.model.describe() | vocabulary.describe()
    if run.masking is None:  # a run for GPT has none, and says nothing of it
        del described["masking"]
    else:
        described["masking"] = dataclasses.asdict(run.masking)
    return {**described, "format": FORMAT, "data_path": list(run.data_path), **more}
