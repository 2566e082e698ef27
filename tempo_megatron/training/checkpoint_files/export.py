"""Writes a checkpoint of any model and layout (TP, PP, DP, ZeRO) as one safetensors file: `tempo-megatron export`.

With `--format huggingface` transformers loads the folder of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.data.tokenizer import FILES, HuggingFaceTokenizer
from tempo_megatron.disk import flush_to_disk
from tempo_megatron.extras import check_installed
from tempo_megatron.models.huggingface.config import build_config, find_class, find_special_tokens
from tempo_megatron.models.huggingface.tensors import list_tensors, list_zeros
from tempo_megatron.models.shape_file import complete_description
from tempo_megatron.training.checkpoint_files.folder import (
    IMPORTED,
    RUN_FILE,
    CheckpointFolder,
    check_format,
    describe_layout,
    find_damage,
    find_missing,
    name_checkpoint,
    read_description,
)
from tempo_megatron.training.checkpoint_files.import_command import TOKENIZER_FILES, TOKENIZER_FOLDER
from tempo_megatron.training.checkpoint_files.saved_state import SavedState
from tempo_megatron.training.checkpoint_files.tensor_file import write_tensors

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HUGGINGFACE_FILE = "model.safetensors"
_COMPANIONS = ("config.json", "tokenizer", *TOKENIZER_FILES)


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
        "Mistral, Mixtral, Qwen 2, 3 and 3-MoE, BERT), with config.json and the tokenizer's files beside them "
        "(default %(default)s)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32", help="default %(default)s, as the optimizer has it")


def run_export(args: argparse.Namespace) -> int:
    """Reads, joins, renames and writes the weights, a tensor at a time, and reports each step on stdout.

    A file gets its name when it is whole.

    Raises ValueError if the checkpoint does not exist or is not whole, or if the output exists already.
    """
    check_installed("it", "train", "safetensors")
    checkpoint = _get_checkpoint(args.load, args.iteration)
    run = _read_run(checkpoint, args.format)
    output, dtype = Path(args.output), _DTYPES[args.dtype]
    _check_output(output, args.format)
    print(f"reading {checkpoint}: {describe_layout(run)}", flush=True)
    state = SavedState(checkpoint, run)
    if args.format == "huggingface":
        shapes, tensors = list_converted(state, run), convert(state, run)
    else:
        shapes, tensors = {name: state.cuts[0][name].shape for name in state.list_names()}, read_weights(state)
    elements = sum(math.prod(shape) for shape in shapes.values())
    size = f"{elements * dtype.itemsize / 2**20:,.1f} MiB in {args.dtype}"
    print(f"writing {len(shapes)} tensors, {size}, to {output}", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "iteration": str(run.get("iteration")), "gelu": str(run.get("gelu_form"))}
    layout = [(name, dtype, shape) for name, shape in shapes.items()]
    with _rename_when_whole(output) as unfinished:
        write_tensors(unfinished, layout, (tensor.to(dtype) for tensor in tensors), metadata)
        if args.format == "huggingface":
            _write_companions(output.parent, checkpoint, run, dtype)
    return 0


def read_weights(state: SavedState) -> Iterator[Tensor]:
    """Yields the weights of the whole model, vocabulary padding included, in the order of `state.list_names`."""
    return (_read_whole(state, name) for name in state.list_names())


def _read_whole(state: SavedState, name: str) -> Tensor:
    weight, difference = state.read_whole(name)
    if difference:
        print(f"note: {name} differs between tensor-parallel ranks by up to {difference:.3g}; rank 0's is written")
    return weight


def list_converted(state: SavedState, run: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Lists the names and shapes of the tensors that `convert` yields, in its order.

    Raises ValueError if a weight is missing, has another shape than in this model, or does not belong to it.
    """
    left = set(state.list_names())
    found: dict[str, tuple[int, ...]] = {}
    for each in list_tensors(run):
        if each.key not in left:
            raise ValueError(f"the model of run.json has {each.key}, the checkpoint has not; {_UNCHANGED}")
        left.remove(each.key)
        if (shape := state.cuts[0][each.key].shape) != each.shape:
            raise ValueError(f"{each.key} has the shape {list(shape)}, expected {list(each.shape)}; {_UNCHANGED}")
        found |= dict(zip(each.keys, each.shapes, strict=True))
        found |= dict.fromkeys(each.copies if each.are_copies_written else (), each.shapes[0])
    if left:
        raise ValueError(f"the checkpoint has {min(left)}, the model of run.json has not; {_UNCHANGED}")
    return {**found, **list_zeros(run)}


def convert(state: SavedState, run: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the weights as transformers has them, without the vocabulary's padding."""
    for each in list_tensors(run):
        parts = each.split(_read_whole(state, each.key))
        yield from parts
        yield from parts[:1] * (len(each.copies) if each.are_copies_written else 0)
    for shape in list_zeros(run).values():
        yield torch.zeros(shape, dtype=torch.float32)


_UNCHANGED = "give a checkpoint whose files were not changed"


def _get_checkpoint(load: str, iteration: int | None) -> Path:
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
    check_format(run, str(checkpoint))
    if reason := find_missing(checkpoint, run["files"]) or find_damage(checkpoint, run["files"], 0, 1):
        raise ValueError(f"{reason}; give --iteration of another checkpoint")
    run = complete_description(run)
    if form == "huggingface":
        find_class(run)  # fails, before anything is read, if transformers has no such class
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
    except OSError as error:
        raise ValueError(
            f"{output} cannot be written ({error.strerror}); free some space or give another --output"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _write_companions(folder: Path, checkpoint: Path, run: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Writes config.json and generation_config.json, and copies the tokenizer's files if their place is known."""
    config = build_config(run, str(dtype).removeprefix("torch."))
    _write_json(folder / "config.json", config)
    if run["family"] == "gpt":
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **find_special_tokens(run)})
    if IMPORTED in run:
        for name in TOKENIZER_FILES:
            if (source := checkpoint / TOKENIZER_FOLDER / name).is_file():
                shutil.copyfile(source, folder / name)
        return
    files = run.get("tokenizer_files", {})
    names = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    if run.get("tokenizer_class") == HuggingFaceTokenizer.__name__:
        names = dict(zip(names, FILES, strict=True))
    elif config["model_type"] != "gpt2":
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
