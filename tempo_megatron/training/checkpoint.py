"""Saves and resumes a whole run: model, optimizer, schedule, data position, random states.

A description of the run is saved beside them, and a run goes on only from a checkpoint whose description fits it. It
may have another layout: another tensor, pipeline or data parallel size, another ZeRO stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from tempo_megatron.disk import flush_all_to_disk
from tempo_megatron.training.checkpoint_files.files import name_rank_file, read_tensors, try_to_write
from tempo_megatron.training.checkpoint_files.folder import (
    FORMAT,
    CheckpointFolder,
    Files,
    describe_files,
    describe_layout,
    name_unfinished,
    parse_iteration,
    write_description,
)
from tempo_megatron.training.checkpoint_files.saved_state import SavedState
from tempo_megatron.training.checkpoint_files.sharding import MOMENTS, Fragment, Partition, get_partition
from tempo_megatron.training.engine import Engine, take_scale
from tempo_megatron.training.ranks import gather, raise_on_all_ranks
from tempo_megatron.training.run.deepspeed_config import read_offload_device
from tempo_megatron.training.run.resume import REMEDIES, describe_conflict
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.task import Vocabulary

_SECONDS_BETWEEN_LINES = 10


@dataclasses.dataclass(slots=True)
class Progress:
    """The position of a run."""

    iteration: int = 0
    consumed_samples: int = 0


class Checkpoints:
    """Saves to `--save` and resumes from `--load`, on every rank at once.

    `settings` are the fields of the run as the user gave it, before anything was planned for it, `description` is
    describe_run's, and `sample_parts` are those of its datasets. `last_saved` is the newest step of this run in --save,
    or the one that is being written there with --async-save.
    """

    def __init__(
        self, engine: Engine, settings: Mapping[str, Any], description: dict[str, Any], sample_parts: tuple[int, ...]
    ) -> None:
        self.run, self.engine, self.settings = engine.run, engine, settings
        self.description, self.sample_parts = description, sample_parts
        self.rank = dist.get_rank()
        self._folder = CheckpointFolder(str(self.run.save))
        self.last_saved: int | None = None
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._unfinished: tuple[Progress, Future[Files | str]] | None = None

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint or, with --async-save, begins to, once `finish` has returned; every rank calls it.

        Raises ValueError on every rank if one cannot write it, for example on a full disk. The checkpoint before stays
        the latest, and the unfinished one is removed.
        """
        assert self._unfinished is None
        unfinished = self._folder.path / name_unfinished(progress.iteration)
        self._try_everywhere(progress, self.rank == 0, self._folder.begin, progress.iteration)
        self._write(unfinished, progress)
        self._raise_everywhere(progress, self.engine.files.take_failure())
        written = self._writer.submit(_write_and_describe, unfinished, self.engine.files.take_writer())
        self._unfinished = (dataclasses.replace(progress), written)
        self.last_saved = progress.iteration
        if not self.run.async_save:
            self.finish(waits=True)

    def finish(self, *, waits: bool) -> int | None:
        """Makes a checkpoint the latest that --async-save has written; every rank calls it.

        Returns its step, or None if there is none. Without `waits` it does nothing while a rank still writes. Raises
        ValueError as `save` does.
        """
        if self._unfinished is None:
            return None
        progress, written = self._unfinished
        if not waits and not all(gather(written.done())):
            return None
        self._unfinished = None
        unfinished = self._folder.path / name_unfinished(progress.iteration)
        self._try_everywhere(progress, True, self._describe, unfinished, progress, written.result())
        self._try_everywhere(progress, os.environ["LOCAL_RANK"] == "0", flush_all_to_disk, unfinished)
        self._try_everywhere(progress, self.rank == 0, self._folder.commit, progress.iteration)
        if self.rank == 0 and self.run.keep_checkpoints:
            self._folder.remove_older_than_newest(self.run.keep_checkpoints)
        return progress.iteration

    def _try_everywhere(self, progress: Progress, is_this_ranks: bool, write: Callable[..., Any], *args: Any) -> None:
        self._raise_everywhere(progress, try_to_write(write, *args) if is_this_ranks else None)

    def _raise_everywhere(self, progress: Progress, reason: str | None) -> None:
        """Waits until every rank is as far as this one. If one has a reason to give up, cleans up and raises."""
        sentence = reason and (
            f"--save {self.run.save}: the checkpoint of step {progress.iteration} cannot be written ({reason}); "
            "free some space and go on from the one before with --load"
        )
        try:
            raise_on_all_ranks(sentence)
        except ValueError:
            if self.rank == 0:
                with contextlib.suppress(OSError):
                    self._folder.remove_unfinished()
            raise

    def _write(self, unfinished: Path, progress: Progress) -> None:
        self.engine.files.take_writer()
        self.engine.deepspeed.save_checkpoint(str(unfinished.parent), tag=unfinished.name, save_latest=False)
        path = unfinished / name_rank_file(self.rank)
        state = {
            "progress": dataclasses.asdict(progress),
            "scheduler": self.engine.scheduler.state_dict(),
            "rng": get_rng_state(self.run.on_gpu),
            "layout": describe_rank(self.engine),
        }
        self.engine.files.save(state, str(path))

    def _describe(self, unfinished: Path, progress: Progress, own: Files | str) -> None:
        """Writes the description on rank 0, with the checksums of the files that every rank wrote.

        `own` is of _write_and_describe. Raises OSError with the reason of the first rank that has one.
        """
        files: list[Any] = gather(own)
        if reasons := [found for found in files if isinstance(found, str)]:
            raise OSError(reasons[0])
        if self.rank != 0:
            return
        content = {**self.description, **dataclasses.asdict(progress)}
        content |= {"settings": self.settings, "sample_parts": self.sample_parts}
        write_description(unfinished, content, {name: entry for found in files for name, entry in found.items()})

    def load(self, saved: Mapping[str, Any]) -> Progress:
        """Restores everything from the checkpoint that `saved` (of read_saved_run) describes; returns its position.

        Its files are whole. Raises ValueError on every rank if the checkpoint belongs to another run.
        """
        assert self.run.load is not None
        check_same_run(saved, self.description, self.run.load)
        checkpoint = Path(self.run.load) / saved["checkpoint"]
        state: dict[str, Any] | None = None
        if all(saved[name] == self.description[name] for name in _LAYOUT):
            state = self._load_as_saved(checkpoint)
        if state is None:
            state = self._reshard(checkpoint, saved)
        self.engine.scheduler.load_state_dict(state["scheduler"])
        progress = Progress(**state["progress"])
        assert progress.iteration == parse_iteration(saved["checkpoint"])
        if self.run.save and self._folder.path.resolve() == checkpoint.parent.resolve():
            self.last_saved = progress.iteration
        return progress

    def _load_as_saved(self, checkpoint: Path) -> dict[str, Any] | None:
        """Lets DeepSpeed load what the same layout saved; returns this rank's own state.

        Returns None, and loads nothing, if ZeRO divides the weights otherwise now, as its round robin does.
        """
        state: dict[str, Any] = read_tensors(checkpoint / name_rank_file(self.rank))
        if any(gather(state["layout"]["fragments"] != describe_rank(self.engine)["fragments"])):
            return None
        self.engine.load(checkpoint)
        set_rng_state(state["rng"], self.run.on_gpu)
        return state

    def _reshard(self, checkpoint: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Loads what another layout saved; returns the state that a corresponding rank saved.

        Data-parallel ranks have equal random states, so those of the same tensor-parallel rank and stage are restored.
        If the tensor or pipeline parallel size changes, the random states start anew from the seed and the step.
        """
        start = time.perf_counter()
        if self.rank == 0:
            change = f"{describe_layout(saved)} to {describe_layout(self.description)}"
            print(f"resharding {checkpoint}: {change}", flush=True)
        source = SavedState(checkpoint, saved)
        load_resharded(self.engine, source)
        has_same_ranks = all(saved[name] == self.description[name] for name in _MODEL_PARALLEL)
        first_rank = 0
        if has_same_ranks:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            first_rank = stage * source.tp * saved["data_parallel_size"]
            first_rank += parallel_state.get_tensor_model_parallel_rank()
        state: dict[str, Any] = read_tensors(checkpoint / name_rank_file(first_rank))
        if has_same_ranks:
            set_rng_state(state["rng"], self.run.on_gpu)
        else:
            seed_all(self.run.seed + state["progress"]["iteration"])
        if self.rank == 0:
            print(f"resharded in {time.perf_counter() - start:.1f} s", flush=True)
        return state


def _write_and_describe(unfinished: Path, write: Callable[[], list[str]]) -> Files | str:
    """Writes a rank's files; returns their sizes and checksums, or why they cannot be written."""
    found: list[Files] = []
    reason = try_to_write(lambda: found.append(describe_files(unfinished, write())))
    return reason or found[0]


def load_pretrained(engine: Engine, pretrained: Mapping[str, Any], description: Mapping[str, Any]) -> None:
    """Loads the weights of the checkpoint that `pretrained` (of read_pretrained) describes; every rank calls it.

    Its files were found to be whole, and `description` is describe_run of this run.

    Raises ValueError on every rank if the checkpoint is of another model.
    """
    checkpoint = Path(str(engine.run.pretrained_checkpoint)) / pretrained["checkpoint"]
    for name in ("padded_vocab_size", "gelu_form"):
        ours, theirs = description[name], pretrained.get(name)
        if ours != theirs:
            raise ValueError(describe_conflict(f"--pretrained-checkpoint {checkpoint}", name, theirs, ours))
    start = time.perf_counter()
    load_weights(engine, SavedState(checkpoint, pretrained, "--pretrained-checkpoint"))
    if dist.get_rank() == 0:
        ours, theirs = description["tokenizer_files"], pretrained.get("tokenizer_files", {})
        for name in ours.keys() & theirs.keys():
            if ours[name]["sha256"] != theirs[name]["sha256"]:
                print(f"note: the data was made with another {name.replace('_', ' ')} than {theirs[name]['path']}")
        print(f"the weights are those of {checkpoint}, read in {time.perf_counter() - start:.1f} s", flush=True)


def seed_all(seed: int) -> None:
    """Seeds Python, numpy, torch and Megatron's tracker.

    Only the tracker differs between tensor-parallel ranks. Pipeline stages differ in all, as in Megatron-LM: stages of
    equal seeds would begin with equal layers.
    """
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def get_rng_state(on_gpu: bool) -> dict[str, Any]:
    """Returns the states of Python's, numpy's, torch's CPU and CUDA generators and Megatron's tracker."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_gpu else None,
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def set_rng_state(state: dict[str, Any], on_gpu: bool) -> None:
    """Restores what get_rng_state returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if on_gpu:
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


# The layout: how weights and moments are divided over the ranks.
_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_LAYOUT = (
    *(*_MODEL_PARALLEL, "data_parallel_size", "zero_stage"),
    *("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout", "optimizer", "offload_device"),
)


def check_same_run(saved: Mapping[str, Any], description: Mapping[str, Any], load: str) -> None:
    """Raises ValueError for the first field of describe_run that differs from the checkpoint's."""
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


def describe_run(run: RunConfig, vocabulary: Vocabulary, **more: Any) -> dict[str, Any]:
    """Describes the run that a checkpoint belongs to; only a run of the same description resumes from it.

    `more` holds what only the built run knows, such as the optimizer's name.
    """
    described = {name: getattr(run, name) for name in (*REMEDIES, *_LAYOUT) if hasattr(run, name)}
    described |= {"offload_device": read_offload_device(run.deepspeed), "vocab_padding_tp": run.vocab_padding_tp}
    described |= run.model.describe() | vocabulary.describe()
    described["masking"] = run.masking and dataclasses.asdict(run.masking)
    described["rampup_batch_size"] = run.rampup_batch_size and list(run.rampup_batch_size)
    for name in ("masking", "rampup_batch_size"):  # what a run has not is left out
        if described[name] is None:
            del described[name]
    return {**described, "format": FORMAT, "data_path": list(run.data_path), **more}


# Another layout: every rank reads the elements of the weights and moments that it holds now, parameter by parameter.
# Nothing has to be converted first, and a kill leaves the checkpoint as it was.


def describe_rank(engine: Engine) -> dict[str, Any]:
    """Describes this rank's part of the checkpoint for a later run of another layout, in plain types."""
    return {
        "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "cuts": {name: cut.pack() for name, cut in engine.cuts.items()},
        "fragments": get_partition(engine.deepspeed).pack(),
    }


def load_resharded(engine: Engine, source: SavedState) -> None:
    """Loads weights, moments, steps and loss scale of `source` into `engine`; every rank calls it.

    Raises ValueError as load_weights does.
    """
    load_weights(engine, source, with_moments=True)
    scale, counts = source.read_counts()
    if scale is not None and getattr(engine.deepspeed.optimizer, "loss_scaler", None) is not None:
        take_scale(engine.deepspeed.optimizer.loss_scaler, scale)
    for name, count in counts.items():
        setattr(engine.deepspeed, name, count)


@torch.no_grad()
def load_weights(engine: Engine, source: SavedState, *, with_moments: bool = False) -> None:
    """Loads the weights of `source` into `engine`, perhaps with the optimizer's moments; every rank calls it.

    Raises ValueError on every rank, before anything is changed, if the checkpoint is of another model or the
    optimizer's states are on NVMe, where they cannot be reached.
    """
    if read_offload_device(engine.run.deepspeed) == "nvme":
        raise ValueError(
            f"{source.where} has another layout or is of another run, and states that are offloaded to nvme cannot be "
            'filled from it; use "cpu" for zero_optimization.offload_optimizer.device, or the layout of the checkpoint'
        )
    names = {name for name, _ in engine.deepspeed.module.named_parameters()}
    tp = parallel_state.get_tensor_model_parallel_world_size()
    everywhere: set[str] = set().union(*gather(names))
    raise_on_all_ranks(source.find_mismatch(engine.cuts, names, everywhere, tp))
    optimizer = engine.deepspeed.optimizer
    if engine.zero_stage == 3:
        optimizer.checkpoint_event_prologue()
    moments, fault = MOMENTS if with_moments and source.has_moments() else (), None
    try:
        _fill(get_partition(engine.deepspeed), source, engine, moments)
    except ValueError as error:  # of a file that perhaps only this rank reads
        fault = str(error)
    raise_on_all_ranks(fault)
    _publish(engine)


def _fill(partition: Partition, source: SavedState, engine: Engine, moments: tuple[str, ...]) -> None:
    """Fills every fragment of this rank; rank 0 prints its progress now and then."""
    keys = ("weight", *moments)
    tp, tp_rank = engine.run.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    total, done, said = sum(fragment.size for fragment in partition.fragments), 0, time.monotonic()
    for fragment in partition.fragments:
        states = _prepare_states(partition, fragment, source) if moments else {}
        cut = engine.cuts.get(fragment.name)
        for key in keys:
            flat = partition.groups[fragment.group].data if key == "weight" else states[key]
            values = source.read(fragment.name, key, fragment.first, fragment.last, cut=cut, tp=tp, tp_rank=tp_rank)
            flat.view(-1)[fragment.start : fragment.start + fragment.size].copy_(values)
        done += fragment.size
        if dist.get_rank() == 0 and time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            what = "weights and moments" if moments else "weights"
            print(f"{done / total:.0%} of the {what} of rank 0 are read", flush=True)


def _prepare_states(partition: Partition, fragment: Fragment, source: SavedState) -> dict[str, Any]:
    """Returns the optimizer's states of a flat tensor, and makes those that do not exist yet."""
    group, step = partition.groups[fragment.group], source.read_step(fragment.name)
    states: dict[str, Any] = partition.optimizer.state[group]
    for key in MOMENTS:
        if key not in states:
            states[key] = torch.zeros_like(group, requires_grad=False)
    is_on_the_cpu = isinstance(partition.optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam)
    states["step"] = int(step) if is_on_the_cpu else torch.tensor(step, dtype=torch.float32, device=group.device)
    return states


def _publish(engine: Engine) -> None:
    """Copies the master weights into the model, in its precision and on every data-parallel rank."""
    optimizer = engine.deepspeed.optimizer
    if engine.zero_stage == 3:
        # Loading only the flat groups makes DeepSpeed copy them to the parameters, offloaded ones too.
        state = {
            "loss_scaler": optimizer.loss_scaler,
            "dynamic_loss_scale": optimizer.dynamic_loss_scale,
            "overflow": optimizer.overflow,
            "fp32_flat_groups": optimizer.fp32_partitioned_groups_flat,
        }
        size = parallel_state.get_data_parallel_world_size()
        optimizer.load_state_dict([state] * size, load_optimizer_states=False)
        optimizer.checkpoint_event_epilogue()
    elif engine.zero_stage:
        optimizer.update_lp_params()
