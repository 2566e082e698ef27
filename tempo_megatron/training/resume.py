"""What a resumed run takes from its checkpoint and what from its command line, decided before anything slow starts.

A value that was typed, or that stands in the DeepSpeed JSON, wins; one that was left out comes from the checkpoint. The
learning rate schedule is the exception, as in Megatron-LM: the run keeps the checkpoint's and refuses another one that
was typed, and --override-opt-param-scheduler takes the whole schedule from the command line, its defaults included.
How the weights lie on the ranks is the run's own business, and another one is no other run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tempo_megatron.models.arguments import name_option
from tempo_megatron.models.shape import complete_description
from tempo_megatron.training.checkpoint_folder import CheckpointFolder
from tempo_megatron.training.checkpoint_integrity import (
    FORMAT,
    RUN_FILE,
    UNSEALED_FORMAT,
    find_missing,
    read_description,
)
from tempo_megatron.training.deepspeed_config import decides_batch_size, read_offload_device

if TYPE_CHECKING:
    from tempo_megatron.training.datasets import Vocabulary
    from tempo_megatron.training.run_config import RunConfig

SCHEDULE = ("lr", "min_lr", "lr_warmup_iters", "lr_decay_style", "lr_decay_iters")
OPTIMIZER = ("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
# What of a model changes its weights or what it computes from them.
MODEL_FIELDS = (
    "family",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "untie_embeddings_and_output_weights",
    "activation",
    "normalization",
    "norm_epsilon",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "window_size",
    "num_tokentypes",
    "add_binary_head",
    "decoder_seq_length",
)
# Description field -> what a user changes to make it match.
_REMEDIES = {
    **{name: name_option(name) for name in MODEL_FIELDS},
    "padded_vocab_size": "--vocab-size and --make-vocab-size-divisible-by",
    "gelu_form": "--no-bias-gelu-fusion",
    "precision": "bf16 and fp16 in the DeepSpeed JSON",
    "seq_length": name_option("seq_length"),
    "global_batch_size": "--global-batch-size",
    "seed": "--seed",
    "split": "--split",
    "masking": "--mask-prob, --short-seq-prob and --masking",
    "tokenizer": "--vocab-file and --merge-file",
    "data": "--data-path",
}
# How weights and moments lie on the ranks. A run goes on in another layout: see resharding.py.
_LAYOUT = ("tensor_model_parallel_size", "data_parallel_size", "zero_stage", "optimizer", "offload_device")
# What decides which sample comes when: another value and the resumed run would see other data.
_DATA_FIELDS = ("seq_length", "global_batch_size", "seed", "split", "masking")


def read_saved_run(args: argparse.Namespace, damaged: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """The description of the newest checkpoint in --load that is whole; None without --load.

    Added are "checkpoint", its name, "named", whether a file says which is the newest, and "passed_over": the newer
    ones that are not whole, by name, with the reason. None also where the folder is --save itself and holds nothing
    yet. Contents of files are not looked at: `checkpoint_integrity.find_damage` does that.

    Args:
        args: parsed.
        damaged: checkpoints that are known not to be whole, and why.

    Raises ValueError where no checkpoint is whole, or the newest whole one is not of this trainer's format.
    """
    if not args.load:
        return None
    folder = CheckpointFolder(args.load)
    name = folder.find_latest()
    if name is None:
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
        if saved.get("format") not in (FORMAT, UNSEALED_FORMAT):
            raise ValueError(
                f"--load {folder.path / candidate}: its {RUN_FILE} has format {saved.get('format')}, expected "
                f"{FORMAT}; it is of another version of this trainer, go on with that one"
            )
        if reason := find_missing(folder.path / candidate, saved["files"]):
            passed_over[candidate] = reason
            continue
        found = {"checkpoint": candidate, "named": folder.is_named(), "passed_over": passed_over}
        return {**complete_description(saved), **found}
    reasons = "; ".join(passed_over.values())
    raise ValueError(f"--load {args.load} holds no checkpoint that is whole: {reasons}; give another folder")


def take_from_checkpoint(
    args: argparse.Namespace, config: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of SCHEDULE, OPTIMIZER and the global batch: those typed, the checkpoint's where one was left out.

    Raises ValueError where the schedule that was typed is not the checkpoint's, or where the steps that are added
    would be made with a learning rate of 0.
    """
    settings = saved["settings"]
    values = {name: getattr(args, name) for name in (*SCHEDULE, *OPTIMIZER, "global_batch_size")}
    if values["global_batch_size"] is None and not decides_batch_size(config):
        values["global_batch_size"] = saved["global_batch_size"]
    for name in OPTIMIZER:
        in_json = name == "clip_grad" and config.get("gradient_clipping", "auto") not in (None, "auto")
        if values[name] is None and not in_json:
            values[name] = settings[name]
    if args.override_opt_param_scheduler:
        return values
    decay_was_left = args.lr_decay_iters is None
    for name in SCHEDULE:
        ours, theirs = values[name], settings[name]
        if ours is None:
            values[name] = theirs
        elif ours != theirs:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"{option} is {ours}, but the schedule of {args.load}/{saved['checkpoint']} has {theirs}; leave "
                f"{option} out, or take this run's schedule with --override-opt-param-scheduler"
            )
    decays_to_zero = values["lr_decay_style"] != "constant" and not values["min_lr"]
    decay_iters = values["lr_decay_iters"]
    if decay_was_left and decays_to_zero and args.train_iters > max(decay_iters, settings["train_iters"]):
        raise ValueError(
            f"--train-iters {args.train_iters} goes beyond the {decay_iters} steps of the checkpoint's "
            f"schedule, after which its learning rate is 0; give --lr-decay-iters {args.train_iters} with "
            "--override-opt-param-scheduler for a new schedule"
        )
    return values


def find_vocab_padding_tp(saved: Mapping[str, Any]) -> int:
    """The tensor parallel size that the checkpoint's vocabulary was padded for.

    The rows of the padding are part of every softmax, so that a run that goes on elsewhere has to keep their number.
    """
    return int(saved.get("vocab_padding_tp", saved["tensor_model_parallel_size"]))


def check_same_run(saved: Mapping[str, Any], description: Mapping[str, Any], load: str) -> None:
    """Raise ValueError for the first field of describe_run in which the checkpoint is of another run."""
    where = f"--load {load}/{saved['checkpoint']}"
    for name, remedy in _REMEDIES.items():
        ours, theirs = description.get(name), saved.get(name)
        if ours == theirs:
            continue
        if name in ("data", "tokenizer"):
            raise ValueError(
                f"{where} was trained on {' '.join(saved['data_path'])}, and {' '.join(description['data_path'])} "
                f"has another {'content' if name == 'data' else 'tokenizer'}; change {remedy} to go on with what it "
                "was trained on, or start a new run"
            )
        what = "the order of its samples would change" if name in _DATA_FIELDS else "it cannot be loaded"
        raise ValueError(f"{where}: its {name} is {theirs}, this run's is {ours}, so {what}; change {remedy}")


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
    described = {name: getattr(run, name) for name in (*_REMEDIES, *_LAYOUT) if hasattr(run, name)}
    described |= {"offload_device": read_offload_device(run.deepspeed), "vocab_padding_tp": run.vocab_padding_tp}
    described |= run.model.describe() | vocabulary.describe()
    if run.masking is None:  # a run for GPT has none, and says nothing of it
        del described["masking"]
    else:
        described["masking"] = dataclasses.asdict(run.masking)
    return {**described, "format": FORMAT, "data_path": list(run.data_path), **more}


def select_settings(run: RunConfig) -> dict[str, Any]:
    """What a resumed run takes over where its command line leaves it out."""
    return {name: getattr(run, name) for name in (*SCHEDULE, *OPTIMIZER, "train_iters")}
