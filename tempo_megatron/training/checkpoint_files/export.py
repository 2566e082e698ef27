"""Writes a checkpoint of any model and layout (TP, PP, DP, ZeRO) as one safetensors file: `tempo-megatron export`.

With `--format huggingface` transformers loads the folder of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.disk import flush_to_disk
from tempo_megatron.extras import check_installed
from tempo_megatron.models.shape import complete_description
from tempo_megatron.training.checkpoint_files import huggingface
from tempo_megatron.training.checkpoint_files.folder import CheckpointFolder, name_checkpoint
from tempo_megatron.training.checkpoint_files.integrity import RUN_FILE, find_damage, find_missing, read_description
from tempo_megatron.training.checkpoint_files.saved_state import SavedState

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LAYOUT_FIELDS = ("tensor_model_parallel_size", "data_parallel_size", "zero_stage")
# transformers needs these besides the fields of the model; older checkpoints may lack them.
_HUGGINGFACE_FIELDS = ("vocab_size", "padded_vocab_size", "end_of_document", "gelu_form")
_HUGGINGFACE_FILE = "model.safetensors"
_COMPANIONS = ("config.json", "vocab.json", "merges.txt", "tokenizer")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tempo-megatron export`."""
    parser.add_argument("--load", required=True, metavar="DIR", help="the trainer's --save")
    parser.add_argument("--iteration", type=int, metavar="N", help="the checkpoint of this step (default the latest)")
    parser.add_argument("--output", required=True, metavar="FILE", help="the .safetensors file to write")
    parser.add_argument(
        "--format",
        choices=("megatron", "huggingface"),
        default="megatron",
        help="names and order of the weights: Megatron's, or those of Hugging Face's transformers (GPT-2, Llama, "
        "Mistral, Qwen 2 and 3, BERT), with config.json and the tokenizer's files beside them (default %(default)s)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32", help="default %(default)s, as the optimizer has it")


def run_export(args: argparse.Namespace) -> int:
    """Reads, joins, renames and writes the weights, and reports each step on stdout.

    It holds the whole model in memory, in float32. A file gets its name when it is whole.

    Raises ValueError if the checkpoint does not exist or is not whole, or if the output exists already.
    """
    check_installed("it", "train", "safetensors")
    checkpoint = _find_checkpoint(args.load, args.iteration)
    run = _read_run(checkpoint, args.format)
    output = Path(args.output)
    _check_output(output, args.format)
    weights = read_weights(checkpoint, run)
    if args.format == "huggingface":
        weights = huggingface.convert(weights, run)
    weights = {name: value.to(_DTYPES[args.dtype]).contiguous() for name, value in weights.items()}
    num_bytes = sum(value.nbytes for value in weights.values())
    print(f"writing {len(weights)} tensors, {num_bytes / 2**20:,.1f} MiB in {args.dtype}, to {output}", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    with _rename_when_whole(output) as unfinished:
        _save(weights, unfinished, run)
        if args.format == "huggingface":
            _write_companions(output.parent, run, args.dtype)
    return 0


def read_weights(checkpoint: Path, run: Mapping[str, Any]) -> dict[str, Tensor]:
    """Reads the weights of the whole model by Megatron's names, vocabulary padding included.

    Args:
        checkpoint: one checkpoint's folder, iter_XXXXXXX.
        run: the content of its run.json.

    Raises ValueError if a file is missing or damaged, or does not say how its ranks divide the weights.
    """
    tp, dp, stage = (run[name] for name in _LAYOUT_FIELDS)
    pp = run.get("pipeline_model_parallel_size", 1)
    print(f"reading {checkpoint}: TP {tp}, {f'PP {pp}, ' if pp > 1 else ''}DP {dp}, ZeRO {stage}", flush=True)
    state, weights = SavedState(checkpoint, run), {}
    for name in state.list_names():
        weights[name], difference = state.read_whole(name)
        if difference:
            print(f"note: {name} differs between tensor-parallel ranks by up to {difference:.3g}; rank 0's is written")
    return weights


def _find_checkpoint(load: str, iteration: int | None) -> Path:
    folder = CheckpointFolder(load)
    if (folder.path / RUN_FILE).is_file():
        raise ValueError(f"--load {load} is one checkpoint; give the folder around it, and --iteration to choose")
    name = folder.find_latest() if iteration is None else name_checkpoint(iteration)
    if name is None:
        raise ValueError(f"--load {load} holds no checkpoint; give a folder that the trainer saved to")
    if not (folder.path / name).is_dir():
        steps = sorted(int(path.name.removeprefix("iter_")) for path in folder.path.glob("iter_*[0-9]"))
        choice = f"give one of {', '.join(map(str, steps))}" if steps else "give another --load"
        raise ValueError(f"--iteration {iteration}: {load} holds no checkpoint of this step; {choice}")
    return folder.path / name


def _read_run(checkpoint: Path, form: str) -> dict[str, Any]:
    run = read_description(checkpoint)
    files = run.get("files", [])
    if reason := find_missing(checkpoint, files) or find_damage(checkpoint, files, 0, 1):
        raise ValueError(f"{reason}; give --iteration of another checkpoint")
    missing = [name for name in _LAYOUT_FIELDS if name not in run]
    if missing == list(_LAYOUT_FIELDS):
        raise ValueError(f"{checkpoint} is not a checkpoint of Tempo's trainer; give another --load")
    if form == "huggingface":
        missing += [name for name in _HUGGINGFACE_FIELDS if name not in run]
    if missing:
        raise ValueError(
            f"{checkpoint / RUN_FILE} does not say {', '.join(missing)}: it is of an older version of the trainer; "
            + ("give --format megatron, or " if form == "huggingface" else "")
            + "save the run anew with this version"
        )
    run = complete_description(run)
    if form == "huggingface":
        huggingface.find_class(run)  # fails, before anything is read, if transformers has no such class
    return run


def _check_output(output: Path, form: str) -> None:
    if output.suffix != ".safetensors":
        raise ValueError(f"--output {output} does not end in .safetensors; give such a name")
    written = [output]
    if form == "huggingface":
        if output.name != _HUGGINGFACE_FILE:
            raise ValueError(
                f"--output {output}: transformers loads a folder that holds {_HUGGINGFACE_FILE}; "
                f"give {output.with_suffix('') / _HUGGINGFACE_FILE}"
            )
        written += [output.with_name(name) for name in _COMPANIONS]
    if present := [str(path) for path in written if path.exists()]:
        raise ValueError(f"{', '.join(present)} would be overwritten; remove it, or give another --output")


@contextlib.contextmanager
def _rename_when_whole(output: Path) -> Iterator[Path]:
    unfinished = output.with_name(f"{output.name}.tmp")
    try:
        yield unfinished
        flush_to_disk(unfinished)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)


def _save(weights: dict[str, Tensor], path: Path, run: Mapping[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {"format": "pt", "iteration": str(run.get("iteration")), "gelu": str(run.get("gelu_form"))}
    try:
        save_file(weights, path, metadata=metadata)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be written ({error}); free some space or give another --output") from error


def _write_companions(folder: Path, run: Mapping[str, Any], dtype: str) -> None:
    """Writes config.json and copies the files of the tokenizer, if the checkpoint says where they are."""
    config, files = huggingface.build_config(run, dtype), run.get("tokenizer_files", {})
    _write_json(folder / "config.json", config)
    names = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    if config["model_type"] != "gpt2":
        # Beside a config.json AutoTokenizer would choose the model's own tokenizer class, which may split words
        # differently.
        folder = folder / "tokenizer"
        folder.mkdir()
        if run["family"] == "gpt":
            _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
        elif "merge_file" not in files:
            names = {"vocab_file": "vocab.txt"}
        print(f"the tokenizer's files are in {folder}")
    for file, name in names.items():
        source = files.get(file)
        content = Path(source["path"]).read_bytes() if source and Path(source["path"]).is_file() else None
        if content is None or hashlib.sha256(content).hexdigest() != source["sha256"]:
            why = f"{source['path']} has changed since the training" if source else "its place is not known"
            print(f"note: the tokenizer's {name} is not copied ({why}); copy it to {folder}")
        else:
            (folder / name).write_bytes(content)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
