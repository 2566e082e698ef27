"""Save and resume a whole run: model, optimizer, schedule, data position, random states."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tempo_megatron.training.checkpoint_folder import CheckpointFolder, all_to_disk, checkpoint_name, iteration_of
from tempo_megatron.training.engine import Engine
from tempo_megatron.training.rng_state import rng_state, set_rng_state

RUN_FILE = "run.json"
_FORMAT = 1
# Checkpoint field -> what a user changes to make it match.
_REMEDIES = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "max_position_embeddings": "--max-position-embeddings",
    "padded_vocab_size": "--vocab-size and --make-vocab-size-divisible-by",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "gelu_form": "--no-bias-gelu-fusion",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "data_parallel_size": "the number of processes",
    "zero_stage": "zero_optimization.stage in the DeepSpeed JSON",
    "optimizer": "zero_optimization and data_types in the DeepSpeed JSON",
    "precision": "bf16 and fp16 in the DeepSpeed JSON",
    "seq_length": "--seq-length",
    "global_batch_size": "--global-batch-size",
    "seed": "--seed",
    "split": "--split",
}
# What decides which sample comes when: another value and the resumed run would see other data.
_DATA_FIELDS = ("seq_length", "global_batch_size", "seed", "split")
_SCHEDULE = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters",
    "lr_decay_steps": "--lr-decay-iters (default --train-iters)",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay",
}


@dataclasses.dataclass(slots=True)
class Progress:
    """How far a run is."""

    iteration: int = 0
    consumed_samples: int = 0


def run_description(
    args: argparse.Namespace, engine: Engine, data_parallel_size: int, gelu_form: str
) -> dict[str, Any]:
    """What a checkpoint belongs to; a run resumes only from one whose description is its own."""
    described = {name: getattr(args, name) for name in _REMEDIES if hasattr(args, name)}
    described |= {
        "format": _FORMAT,
        "data_parallel_size": data_parallel_size,
        "zero_stage": engine.zero_stage,
        "optimizer": engine.optimizer_name,
        "gelu_form": gelu_form,
    }
    return described


class Checkpoints:
    """Saving to `--save` and resuming from `--load`, on every rank at once.

    Args:
        args: save and load folders.
        engine: whose state it is.
        description: run_description of this run.
    """

    def __init__(self, args: argparse.Namespace, engine: Engine, description: dict[str, Any], on_gpu: bool) -> None:
        self.args, self.engine, self.description, self.on_gpu = args, engine, description, on_gpu
        self.rank = dist.get_rank()
        self._last_saved: int | None = None

    def save(self, progress: Progress) -> bool:
        """Write a checkpoint; every rank calls it. False where this step is saved already.

        Raises ValueError where it cannot be written, for want of space for example; the one before stays the latest.
        """
        if progress.iteration == self._last_saved:
            return False
        try:
            self._write(progress)
        except (OSError, RuntimeError) as error:
            # What torch.save raises on a full disk is a RuntimeError of its writer.
            if isinstance(error, RuntimeError) and not re.search("inline_container|PytorchStreamWriter", str(error)):
                raise
            reason = error if isinstance(error, OSError) else "the disk took a part of a file only"
            raise ValueError(
                f"--save {self.args.save}: the checkpoint of step {progress.iteration} cannot be written ({reason}); "
                "free some space and go on from the one before with --load"
            ) from error
        self._last_saved = progress.iteration
        return True

    def _write(self, progress: Progress) -> None:
        folder = CheckpointFolder(self.args.save)
        if self.rank == 0:
            folder.begin(progress.iteration)
        dist.barrier()
        unfinished = folder.path / f"{checkpoint_name(progress.iteration)}.tmp"
        if not unfinished.is_dir():
            raise ValueError(f"--save {self.args.save} is not the same folder on every node; give a shared file system")
        self.engine.deepspeed.save_checkpoint(str(folder.path), tag=unfinished.name, save_latest=False)
        torch.save(self._rank_state(progress), unfinished / _rank_file(self.rank))
        if self.rank == 0:
            content = json.dumps({**self.description, **dataclasses.asdict(progress)}, indent=2)
            (unfinished / RUN_FILE).write_text(content + "\n", encoding="utf-8")
        dist.barrier()
        if int(os.environ["LOCAL_RANK"]) == 0:
            all_to_disk(unfinished)
        dist.barrier()
        if self.rank == 0:
            folder.commit(progress.iteration)
        dist.barrier()

    def load(self) -> Progress | None:
        """Put everything back; how far the checkpoint was. None where --save is --load and nothing is there yet.

        Raises ValueError where there is no checkpoint or it belongs to another run.
        """
        folder = CheckpointFolder(self.args.load)
        name = folder.latest()
        if name is None:
            self._start_afresh_or_raise()
            return None
        self._check_run(folder.path / name)
        self.engine.deepspeed.load_checkpoint(str(folder.path), tag=name, load_lr_scheduler_states=False)
        state = torch.load(folder.path / name / _rank_file(self.rank), map_location="cpu", weights_only=True)
        self._check_schedule(state["scheduler"])
        self.engine.scheduler.load_state_dict(state["scheduler"])
        set_rng_state(state["rng"], self.on_gpu)
        progress = Progress(**state["progress"])
        assert progress.iteration == iteration_of(name)
        if self.args.save and Path(self.args.save).resolve() == folder.path.resolve():
            self._last_saved = progress.iteration
        return progress

    def _rank_state(self, progress: Progress) -> dict[str, Any]:
        return {
            "progress": dataclasses.asdict(progress),
            "scheduler": self.engine.scheduler.state_dict(),
            "rng": rng_state(self.on_gpu),
        }

    def _start_afresh_or_raise(self) -> None:
        same = self.args.save and Path(self.args.save).resolve() == Path(self.args.load).resolve()
        if not same:
            raise ValueError(
                f"--load {self.args.load} holds no checkpoint; give a folder with one, or leave --load out"
            )

    def _check_run(self, checkpoint: Path) -> None:
        try:
            saved = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{checkpoint} is not a checkpoint of this trainer ({error}); give another --load"
            ) from error
        for name, remedy in _REMEDIES.items():
            ours, theirs = self.description[name], saved.get(name)
            if ours != theirs:
                what = "the order of its samples would change" if name in _DATA_FIELDS else "it cannot be loaded"
                raise ValueError(
                    f"--load {checkpoint}: its {name} is {theirs}, this run's is {ours}, so {what}; change {remedy}"
                )

    def _check_schedule(self, saved: dict[str, Any]) -> None:
        ours = self.engine.scheduler.state_dict()
        for name, option in _SCHEDULE.items():
            if ours[name] != saved[name] and not self.args.override_opt_param_scheduler:
                raise ValueError(
                    f"--load {self.args.load}: {name} of the checkpoint's schedule is {saved[name]}, this run's is "
                    f"{ours[name]}; change {option}, or take this run's with --override-opt-param-scheduler"
                )


def claim_save_folder(args: argparse.Namespace) -> CheckpointFolder | None:
    """The folder of --save, which on rank 0 no other run can write to as long as the result is kept.

    Raises ValueError where another run writes to it, or where it holds checkpoints that this run neither continues
    nor may overwrite.
    """
    if not args.save:
        return None
    folder = CheckpointFolder(args.save)
    if int(os.environ["RANK"]) == 0:
        folder.lock()
    resumes = args.load and Path(args.load).resolve() == Path(args.save).resolve()
    if not resumes and (name := folder.latest()) is not None:
        raise ValueError(
            f"--save {args.save} already holds checkpoints up to {name}; add --load {args.save} to go on from there, "
            "or give another folder"
        )
    return folder


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"
