"""Reads a Run from the command that starts a training script of Megatron-LM, and writes one again.

No model is built, and Megatron's training code is not imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Sequence
from typing import Any

from tempo_megatron.memory.megatron.command import ALLOCATORS, MODELS, WORKSPACE, Command, split_command
from tempo_megatron.memory.megatron.derived import (
    derive,
    find_float8_layers,
    find_padded_vocab_size,
    read_modules,
    read_optimizer,
)
from tempo_megatron.memory.megatron.options import parse_options
from tempo_megatron.memory.megatron.read_run import read_run
from tempo_megatron.memory.plan.gpu import H100, read_gpu
from tempo_megatron.memory.run import Run
from tempo_megatron.settings.arguments import tempo_config_from
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.deepspeed_json import read_deepspeed_json
from tempo_megatron.words.json_text import read_object


def read_command(
    command: Command,
    tempo: TempoConfig | None = None,
    *,
    world_size: int | None = None,
    vocab_size: int | None = None,
    gpu: str | None = None,
) -> tuple[Run, list[str]]:
    """The run, and warnings for a user.

    Args:
        command: of `split_command`.
        tempo: what Tempo's operations do in it; None is what the command says.
        world_size: GPUs of the whole run, where the launcher does not say it.
        vocab_size: tokens, where the command does not say it.
        gpu: what it runs on; see Run.

    Raises ValueError for what Megatron-LM would refuse, and what the estimate does not know.
    """
    args, warnings = parse_options(command.options)
    if tempo is None:
        tempo = tempo_config_from(args, _read_tempo_block(args))
    derive(args, command, world_size, warnings)
    arguments = {
        "vocab_size": find_padded_vocab_size(args, vocab_size, warnings),
        "max_sequence_length": args.max_position_embeddings,
        "position_embedding_type": args.position_embedding_type,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
    }
    if command.family == "bert":
        # pretrain_bert.py: segments are told apart for the binary head.
        arguments |= {"num_tokentypes": 2 * args.bert_binary_head, "add_binary_head": args.bert_binary_head}
    if command.family == "t5":
        arguments["decoder_seq_length"] = args.decoder_seq_length
    run = read_run(MODELS[command.family], args, arguments, args, tempo, **read_modules(args))
    run = dataclasses.replace(
        run,
        optimizer=read_optimizer(args),
        deterministic=args.deterministic_mode,
        **_read_settings(command.launcher),
        fuses_gradient_accumulation=args.gradient_accumulation_fusion,
        overlaps_tensor_parallel=args.tp_comm_overlap,
        deferred_head_gradients=args.wgrad_deferral_limit if args.defer_embedding_wgrad_compute else None,
        float8=args.fp8 and args.fp8_recipe,
        float8_layers=find_float8_layers(args),
        float8_weights=args.fp8_param_gather,
        data_has_masks=args.create_attention_mask_in_dataloader,
    )
    run = set_gpu(run, gpu)
    run.check()
    return run, warnings


def write_command(command: Command, options: Sequence[str], expected: Run, vocab_size: int | None) -> str:
    """A line for a shell: the command with Tempo, through launch/run_megatron.py.

    Args:
        command: as it was given.
        options: what stands behind its script now.
        expected: what they say. The line is read again, so that it is what was meant.
        vocab_size: as of `read_command`.
    """
    words = [*(command.launcher or ("python",)), "launch/run_megatron.py", command.script, *options]
    line = shlex.join(words)
    again, _ = read_command(
        split_command(shlex.split(line)), world_size=expected.layout.world_size, vocab_size=vocab_size, gpu=expected.gpu
    )
    # No command says which chip; plans may be for one of which Run.gpu knows nothing.
    assert dataclasses.replace(again, chip=expected.chip) == expected, line
    return line


def set_gpu(run: Run, gpu: str | None) -> Run:
    """The run on a GPU, given as `read_gpu` takes it, with its chip; without one its chip is an H100's.

    The libraries are those of an A100, an H100 or a GB200, by the compute capability.
    """
    if gpu is None:
        return dataclasses.replace(run, gpu=None, chip=H100)
    chip = read_gpu(gpu).chip
    if chip is None:
        raise ValueError(f'--gpu {gpu} has no "chip", by which libraries choose; add it as in configs/gpu/h100.json')
    return dataclasses.replace(run, gpu={9: "h100", 10: "gb200"}.get(chip.major, "a100"), chip=chip)


def _read_tempo_block(args: argparse.Namespace) -> dict[str, Any]:
    """The "tempo" block of --tempo-config or --deepspeed_config, as a DeepSpeed JSON holds it."""
    if args.tempo_config is not None:
        content = read_object(args.tempo_config)
        return content if "tempo" in content else {"tempo": content}
    return read_deepspeed_json(args.deepspeed_config) if args.deepspeed_config is not None else {}


def _read_settings(launcher: Sequence[str]) -> dict[str, Any]:
    """The fields of a Run that the environment before a command says.

    CUBLAS_WORKSPACE_CONFIG is `:size in KiB:number` once or more often, PYTORCH_ALLOC_CONF `name:value` by commas.
    """
    given = dict(word.split("=", 1) for word in reversed(launcher) if "=" in word)
    workspace, allocators = given.get(WORKSPACE), [given[name] for name in ALLOCATORS if name in given]
    if workspace is not None and not re.fullmatch(r"(:\d+:\d+)+", workspace):
        raise ValueError(f"{WORKSPACE} is {workspace}; expected sizes in KiB and how many of each, such as :4096:8")
    sizes = re.findall(r":(\d+):(\d+)", workspace or "")
    words = allocators[-1].lower().replace(" ", "").split(",") if allocators else []
    return {
        "cublas_workspace_bytes": sum(int(size) * int(number) << 10 for size, number in sizes) if sizes else None,
        "expandable_segments": "expandable_segments:true" in words,
    }
