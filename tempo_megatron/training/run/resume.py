"""Decides what a resumed run takes from its checkpoint and what from its command line.

A value on the command line or in the DeepSpeed JSON wins; one that is left out comes from the checkpoint, which holds
every field of the run. The learning rate schedule is the exception, as in Megatron-LM: the run keeps the checkpoint's
and refuses another one, unless --override-opt-param-scheduler takes the whole schedule from the command line, defaults
included. The layout (TP, DP, ZeRO stage) and the outputs are not taken from the checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from tempo_megatron.models.arguments import name_option
from tempo_megatron.models.shape import NAMES
from tempo_megatron.models.shape_file import complete_description
from tempo_megatron.settings.config import BUDGET, HOST_MEMORY, TempoConfig
from tempo_megatron.training.checkpoint_files.folder import (
    IMPORTED,
    CheckpointFolder,
    check_format,
    find_missing,
    read_description,
)
from tempo_megatron.training.run import option
from tempo_megatron.training.run.deepspeed_config import is_given
from tempo_megatron.training.run.option import flatten, list_options, name_argument
from tempo_megatron.training.run.run_config import MASKINGS, OPTIONS
from tempo_megatron.words.deepspeed_json import BATCH_KEYS

TAKEN = tuple(name for name, each in OPTIONS.items() if each.on_load.is_taken)
"""Fields that have the checkpoint's value if they are left out."""
MAY_CHANGE = tuple(name for name, each in OPTIONS.items() if each.on_load is option.MAY_CHANGE)
SCHEDULE = tuple(name for name, each in OPTIONS.items() if each.on_load is option.SCHEDULE)
_RECOMPUTATION = tuple(name for name in OPTIONS if name.startswith("recompute_"))
MODEL_MAY_CHANGE = (
    *("vocab_size", "make_vocab_size_divisible_by"),
    *("init_method_std", "attention_dropout", "hidden_dropout"),
)
"""Fields of ModelShape that may have another value on --load: of the vocabulary the rows are compared instead, and no
trained weight depends on the others."""
PRETRAINED_MAY_CHANGE = ("seq_length", "rotary_base", "use_rope_scaling", "rope_scaling_factor")
"""Fields of ModelShape that may also have another value where a run begins with weights of another run."""
# The fields of ModelShape that change the weights, or what is computed from them.
MODEL_FIELDS = tuple(name for name in NAMES if name not in MODEL_MAY_CHANGE)
_MASKING = {name for kind in MASKINGS.values() for name in list_options(kind)}
# Field of a description -> what a user changes to make it match.
REMEDIES = {
    **{name: name_option(name) for name in MODEL_FIELDS},
    "padded_vocab_size": "--vocab-size and --make-vocab-size-divisible-by",
    "gelu_form": "--bias-gelu-fusion",
    "precision": "bf16 and fp16 in the DeepSpeed JSON",
    **{name: name_argument(name) for name in ("global_batch_size", "rampup_batch_size", "seed", "split")},
    "masking": "--mask-prob, --short-seq-prob, --masking and --vocab-extra-ids",
    "tokenizer": "--vocab-file and --merge-file",
    "data": "--data-path",
}
# Names of the DeepSpeed JSON that are also fields of the run.
_TOLD_OF_JSON = (*BATCH_KEYS, "gradient_clipping", "tempo", "steps_per_print")
# Fields that decide which sample comes when.
_DATA_FIELDS = ("seq_length", "global_batch_size", "rampup_batch_size", "seed", "split", "masking")


def read_saved_run(args: argparse.Namespace, damaged: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Reads the description of the newest whole checkpoint in --load.

    It completes "settings", the fields of the RunConfig that saved it, and adds "checkpoint" (the name), "named"
    (whether the file `latest` exists) and "passed_over" (the newer checkpoints that are not whole, name -> reason),
    which begins with `damaged`. It returns None without --load, or if --load is --save and still empty. It does not
    read the contents of files: `find_damage` does.

    Raises ValueError if no checkpoint is whole, or the newest whole one is not of this trainer's format.
    """
    if not args.load:
        return None
    folder = CheckpointFolder(args.load)
    if (name := folder.find_latest()) is None:
        if args.save and Path(args.save).resolve() == folder.path.resolve():
            return None
        raise ValueError(f"--load {args.load} holds no checkpoint; give a folder with one, or leave --load out")
    passed_over = dict(damaged or {})
    for candidate in folder.list_up_to(name):
        if candidate in passed_over:
            continue
        try:
            saved = read_description(folder.path / candidate)
        except ValueError as error:
            passed_over[candidate] = str(error)
            continue
        check_format(saved, f"--load {folder.path / candidate}")
        if reason := find_missing(folder.path / candidate, saved["files"]):
            passed_over[candidate] = reason
            continue
        if IMPORTED in saved:
            raise ValueError(
                f"--load {args.load} holds a model that was imported, and no run to go on with; give the folder as "
                "--pretrained-checkpoint, and another one as --save"
            )
        described = complete_description(saved)
        found = {"checkpoint": candidate, "named": folder.is_named(), "passed_over": passed_over}
        return {**described, "settings": _complete_settings(described), **found}
    reasons = "; ".join(passed_over.values())
    raise ValueError(f"--load {args.load} holds no checkpoint that is whole: {reasons}; give another folder")


def read_pretrained(path: str | None, family: str) -> dict[str, Any] | None:
    """Reads the description of the newest checkpoint in --pretrained-checkpoint, and adds its name, "checkpoint".

    It returns None if `path` is None. It does not read the contents of files: `find_damage` does.

    Raises ValueError if there is no checkpoint, or the newest one is not whole or not of this `family`.
    """
    if path is None:
        return None
    folder, where = CheckpointFolder(path), f"--pretrained-checkpoint {path}"
    if (name := folder.find_latest()) is None:
        raise ValueError(f"{where} holds no checkpoint; give a folder that import or the trainer has made")
    saved = complete_description(read_description(folder.path / name))
    check_format(saved, f"{where}/{name}")
    if reason := find_missing(folder.path / name, saved["files"]):
        raise ValueError(f"{where}: {reason}; import it anew, or give another folder")
    if saved["family"] != family:
        raise ValueError(f"{where} holds a model of the family {saved['family']}; train it with the script for that")
    return {**saved, "checkpoint": name}


def _complete_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    model = {name: saved[name] for name in NAMES if name in saved}
    # Operations that did not exist when it was saved have their defaults.
    tempo = {**dataclasses.asdict(TempoConfig()), **saved["settings"]["tempo"]}
    return {**saved["settings"], "model": {**model, **saved["settings"]["model"]}, "tempo": tempo}


def take_from_checkpoint(
    args: argparse.Namespace, config: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the checkpoint's values of the arguments that neither the command line nor the DeepSpeed JSON gives.

    It does not return the model and Tempo's: see models.arguments.read_given_model and join_tempo.

    Raises ValueError if the command line has another schedule than the checkpoint, if added steps would have a learning
    rate of 0, or if the checkpoint is beyond --train-iters.
    """
    settings = saved["settings"]
    masking = settings.get("masking") or {}
    stored = {**settings, **{name: masking[name] for name in _MASKING if name in masking}}
    stored |= {name: settings.get("precision") == name for name in ("bf16", "fp16")}
    given = vars(args)
    left_out = {name for name in given if given[name] is None} - _list_decided(given, config, settings)
    if not any(given[name] or is_given(config.get(name, {}), "enabled") for name in ("bf16", "fp16")):
        left_out |= {"bf16", "fp16"}
    names = {*TAKEN, *_MASKING, "bf16", "fp16"} - {"model", "tempo", "memory_budget", "host_memory"}
    taken = {name: stored[name] for name in names & left_out if name in stored}
    if args.override_opt_param_scheduler:
        taken = {name: value for name, value in taken.items() if name not in SCHEDULE}
    else:
        _check_schedule(args, {**given, **taken}, saved)
    train_iters = {**given, **taken}.get("train_iters")
    if train_iters is not None and train_iters < saved["iteration"]:
        raise ValueError(
            f"--train-iters {train_iters} is less than the {saved['iteration']} steps of {args.load}/"
            f"{saved['checkpoint']}; leave it out or raise it to go on, or give a --load with an earlier checkpoint"
        )
    return taken


def _list_decided(given: Mapping[str, Any], config: Mapping[str, Any], settings: Mapping[str, Any]) -> set[str]:
    """Lists arguments that are left out but follow from others that the user gave."""
    decided = {name for name in ("clip_grad", "micro_batch_size") if is_given(config, OPTIONS[name].in_json)}
    if any(is_given(config, key) for key in ("train_batch_size", "gradient_accumulation_steps")):
        decided.add("global_batch_size")
    granularity = "selective" if given["recompute_activations"] else given["recompute_granularity"]
    if granularity not in (None, settings.get("recompute_granularity")):
        decided |= set(_RECOMPUTATION)
    if given["vocab_file"] or given["merge_file"]:
        decided |= {"vocab_file", "merge_file"}
    return decided


def _check_schedule(args: argparse.Namespace, values: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    settings = saved["settings"]
    for name in SCHEDULE:
        ours, theirs = values[name], settings.get(name)
        if ours != theirs:
            argument = name_argument(name)
            raise ValueError(
                f"{argument} is {ours}, but the schedule of {args.load}/{saved['checkpoint']} has {theirs}; leave "
                f"{argument} out, or take this run's schedule with --override-opt-param-scheduler"
            )
    decays_to_zero = values["lr_decay_style"] != "constant" and not values["min_lr"]
    decay_iters, train_iters = values["lr_decay_iters"], values["train_iters"]
    if args.lr_decay_iters is None and decays_to_zero and train_iters > max(decay_iters, settings["train_iters"]):
        raise ValueError(
            f"--train-iters {train_iters} goes beyond the {decay_iters} steps of the checkpoint's "
            f"schedule, after which its learning rate is 0; give --lr-decay-iters {train_iters} with "
            "--override-opt-param-scheduler for a new schedule"
        )


def check_given_model(
    given: Mapping[str, Any], saved: Mapping[str, Any], folder: str, may_change: Collection[str] = ()
) -> None:
    """Raises ValueError for the first field of ModelShape that was given and differs from the checkpoint's.

    `folder` is the option that names the checkpoint's folder, with its value. Fields in `may_change` may differ.
    """
    for name in MODEL_FIELDS:
        ours = None if name in may_change else given.get(name)
        ours = list(ours) if isinstance(ours, tuple) else ours
        if ours is not None and name in saved and ours != saved[name]:
            raise ValueError(describe_conflict(f"{folder}/{saved['checkpoint']}", name, saved[name], ours))


def join_tempo(args: argparse.Namespace, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the DeepSpeed JSON with the "tempo" block that counts on --load, where the arguments do not decide.

    A key of the block counts only if its value has changed since the checkpoint's run, whose arguments may have had
    precedence over its block. The other keys have the values of that run.
    """
    config_then = settings["deepspeed"]
    block, block_then = config.get("tempo", {}), config_then.get("tempo", {})
    if not isinstance(block, Mapping):
        return config  # its reader refuses it
    was_off = TempoConfig(**settings["tempo"]).is_off
    enabled, enabled_then = (
        None if "tempo" not in each else each["tempo"].get("enabled", True) for each in (config, config_then)
    )
    joined = {"enabled": not was_off if enabled in (None, enabled_then) else enabled}
    new = {name: value for name, value in block.items() if name != "enabled" and value != block_then.get(name)}
    if was_off:
        return {**config, "tempo": {**block, **joined}}
    had = {**settings["tempo"], BUDGET: settings["memory_budget"], HOST_MEMORY: settings.get("host_memory")}
    # A budget chooses the values of the layers, so the newer of the two counts.
    if "layers" in new or args.tempo_layers is not None:
        del had[BUDGET], had[HOST_MEMORY]
    if BUDGET in new or args.tempo_memory_budget is not None:
        del had["layers"]
    had = {name: value for name, value in had.items() if value}
    return {**config, "tempo": {**had, **new, **joined}}


def describe_changes(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line about the settings, as the user gave them, that differ from the checkpoint's, if there are any."""
    stored = saved["settings"]

    def pick(fields: Mapping[str, Any]) -> dict[str, Any]:
        picked = {name: fields[name] for name in ("model", *MAY_CHANGE) if name in stored}
        picked["deepspeed"] = {k: v for k, v in fields["deepspeed"].items() if k not in _TOLD_OF_JSON}
        return flatten({"run": picked})

    theirs, ours = pick(stored), pick(json.loads(json.dumps(settings)))
    changes = [
        f"{name.removeprefix('run ')} {_write(theirs.get(name))} -> {_write(ours.get(name))}"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]
    if changes:
        yield f"other than in {saved['checkpoint']}: {', '.join(changes)}"


def _write(value: Any) -> str:
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def describe_conflict(where: str, name: str, theirs: Any, ours: Any) -> str:
    what = "the order of its samples would change" if name in _DATA_FIELDS else "it cannot be loaded"
    do = "leave out" if theirs is None else "change"
    return f"{where}: its {name} is {theirs}, this run's is {ours}, so {what}; {do} {REMEDIES[name]}"
