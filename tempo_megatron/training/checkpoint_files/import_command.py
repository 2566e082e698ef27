"""Makes a checkpoint of a Hugging Face model, for `--pretrained-checkpoint` of the trainer: `tempo-megatron import`.

The checkpoint has the layout of one process. The trainer reads it in any other layout, as it does with its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.disk import flush_all_to_disk
from tempo_megatron.extras import check_installed
from tempo_megatron.models.huggingface.config import ReadModel, read_config
from tempo_megatron.models.huggingface.family import Family
from tempo_megatron.models.huggingface.tensors import Converted, list_tensors, list_zeros
from tempo_megatron.models.layout import pad_vocab_size
from tempo_megatron.models.shape import make_shape
from tempo_megatron.training.checkpoint_files.files import name_rank_file, try_to_write
from tempo_megatron.training.checkpoint_files.folder import (
    IMPORTED,
    CheckpointFolder,
    describe_files,
    write_description,
)
from tempo_megatron.training.checkpoint_files.saved_state import WEIGHTS_FILE
from tempo_megatron.training.checkpoint_files.sharding import Box, Cut, Fragment
from tempo_megatron.training.checkpoint_files.tensor_file import DTYPES, Layout, TensorFiles, write_tensors
from tempo_megatron.words.argument_types import parse_positive
from tempo_megatron.words.json_text import read_object

TOKENIZER_FOLDER = "tokenizer"
"""The folder in a checkpoint with the files of Hugging Face's tokenizer, which export copies."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "generation_config.json"),
)
_VOCABULARY_FILES = {"vocab.txt": "vocab_file", "vocab.json": "vocab_file", "merges.txt": "merge_file"}
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_FORMATS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tempo-megatron import`."""
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="FOLDER",
        help="a model of transformers: config.json and safetensors, in one file or several (GPT-2, Llama 2 and 3, "
        "Mistral, Mixtral, Qwen 2, 3 and 3-MoE, Megatron-BERT)",
    )
    parser.add_argument(
        "--to", required=True, metavar="DIR", help="a new folder, for --pretrained-checkpoint of the trainer"
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=parse_positive,
        default=128,
        metavar="N",
        help="pad the vocabulary to a multiple of N, which tensor parallel sizes then divide (default %(default)s)",
    )


def run_import(args: argparse.Namespace) -> int:
    """Reads, joins, renames and writes the weights, a tensor at a time, and reports each step on stdout.

    The checkpoint gets its name when it is whole; an import that was killed is begun anew.

    Raises ValueError, in one sentence, if the folder holds no model that the trainer can train, or not all of its
    weights, or if --to holds checkpoints already.
    """
    check_installed("it", "train", "safetensors")
    source = Path(args.source)
    if not source.is_dir():
        raise ValueError(f"--from {source} is not a folder; give one with config.json and safetensors")
    if not (source / "config.json").is_file():
        raise ValueError(f"--from {source} has no config.json; give the folder of a model of transformers")
    model = read_config(source)
    run = describe_model(model, args.make_vocab_size_divisible_by)
    tensors, files = list_tensors(run), open_tensors(source)
    files.unstack(model.family.stacks)
    names = get_names(run, model.family, tensors, files)
    layout = [(each.key, compute_dtype(each, names, files), each.shape) for each in tensors]
    if model.unread:
        print(f"note: config.json has {', '.join(model.unread)}, which import does not know and leaves out")
    _report(source, run, layout)
    folder = CheckpointFolder(args.to, option="--to")
    if (present := folder.find_latest()) is not None:
        raise ValueError(f"--to {args.to} already holds {present}; give another folder, or remove it")
    folder.lock()
    try:
        unfinished = folder.path / folder.begin(0)
        joined = (
            each.join([files[names[key]].to(dtype) for key in each.keys])
            for each, (_, dtype, _) in zip(tensors, layout, strict=True)
        )
        reason = try_to_write(_write, unfinished, source, run, layout, joined)
        if reason:
            raise ValueError(f"--to {args.to} cannot be written ({reason}); free some space or give another folder")
        folder.commit(0)
    except BaseException:
        with contextlib.suppress(OSError):
            folder.remove_unfinished()
        raise
    finally:
        folder.unlock()
    print(f"{args.to} is ready; train it with --pretrained-checkpoint {args.to} and --seq-length", flush=True)
    return 0


def describe_model(model: ReadModel, divisor: int) -> dict[str, Any]:
    """Describes the model as run.json does, without seq_length, which a config.json does not say.

    Raises ValueError if the values contradict each other.
    """
    fields = {**model.fields, "make_vocab_size_divisible_by": divisor}
    described = make_shape(**fields, seq_length=fields["max_position_embeddings"]).describe()
    del described["seq_length"]
    eos = model.special_tokens.get("eos_token_id")
    return {
        **described,
        "padded_vocab_size": pad_vocab_size(described["vocab_size"], divisor, 1),
        "gelu_form": model.gelu_form,
        "special_tokens": model.special_tokens,
        "end_of_document": eos[0] if isinstance(eos, list) else eos,
        **{"tensor_model_parallel_size": 1, "data_parallel_size": 1, "zero_stage": 0, "iteration": 0},
    }


def open_tensors(source: Path) -> TensorFiles:
    """Opens the safetensors of a folder. Raises ValueError if there are none, or a file is missing or damaged."""
    if (source / _INDEX).is_file():
        placed = read_object(source / _INDEX).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise ValueError(f"{source / _INDEX} has no weight_map of names and files; copy it again")
        files = TensorFiles(source / name for name in sorted(set(placed.values())))
        if missing := min(placed.keys() - files.keys(), default=None):
            raise ValueError(f"{source / placed[missing]} has no {missing}, which {_INDEX} places there; copy it again")
        return files
    if (source / _WHOLE).is_file():
        return TensorFiles([source / _WHOLE])
    others = [name for name in _OTHER_FORMATS if (source / name).exists()]
    found = f"has {others[0]}, which may run code when it is read, but no" if others else "has no"
    raise ValueError(f"--from {source} {found} {_WHOLE}; save the model with save_pretrained of transformers")


def get_names(
    run: Mapping[str, Any], family: Family, tensors: Sequence[Converted], files: TensorFiles
) -> dict[str, str]:
    """Returns by which name the files have each tensor of transformers.

    Raises ValueError for a tensor that is missing, of another shape or dtype, or too many.
    """
    zeros = list_zeros(run)
    known = {name for each in tensors for name in (*each.keys, *each.copies)} | set(zeros)
    # The files of a base model lack its name in front of the tensors'.
    own = {name if name in known or family.prefix + name not in known else family.prefix + name: name for name in files}
    left, names = dict(own), {}
    for each in tensors:
        for key, shape in zip(each.keys, each.shapes, strict=True):
            candidates = [key, *(each.copies if key == each.keys[0] else ())]
            present = [name for name in candidates if name in own]
            if not present:
                raise ValueError(f"the files lack {key}, which the model of config.json has; give all weights of it")
            names[key] = own[present[0]]
            for name in present:
                _check_tensor(left.pop(name), shape, files)
            for copy in present[1:]:
                if not torch.equal(files[names[key]], files[own[copy]]):
                    raise ValueError(
                        f"{own[copy]} differs from {names[key]}, and the model of config.json has one tensor for both; "
                        "correct its tie_word_embeddings, or give config.json and weights of one model"
                    )
    for key, shape in zeros.items():
        if key in left:
            _check_tensor(own[key], shape, files)
            if files[left.pop(key)].count_nonzero():
                raise ValueError(
                    f"{key} is not zero, and Megatron's BERT has embeddings of several kinds of segments or of none; "
                    "add it to each row of the position embeddings and make it zero"
                )
    others = [name for name in left.values() if not any(re.fullmatch(buffer, name) for buffer in family.buffers)]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ValueError(
            f"the files have {min(others)}{more}, which the model of config.json has not; give config.json and weights "
            "of one model"
        )
    return names


def _check_tensor(name: str, shape: tuple[int, ...], files: TensorFiles) -> None:
    dtype, found = files.describe(name)
    if dtype not in DTYPES:
        raise ValueError(f"{name} is of dtype {dtype}; expected one of {', '.join(DTYPES)}, so convert it first")
    if found != shape:
        raise ValueError(
            f"{name} has the shape {list(found)}, and config.json makes it {list(shape)}; give config.json and weights "
            "of one model"
        )


def compute_dtype(each: Converted, names: Mapping[str, str], files: TensorFiles) -> torch.dtype:
    """Returns the smallest dtype that holds what is joined exactly."""
    dtypes = {DTYPES[files.describe(names[key])[0]] for key in each.keys}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _report(source: Path, run: Mapping[str, Any], layout: Layout) -> None:
    elements = sum(math.prod(shape) for _, _, shape in layout)
    print(f"importing {source}: {elements:,} weights, {run['num_layers']} layers, hidden {run['hidden_size']}")
    size, padded = run["vocab_size"], run["padded_vocab_size"]
    if padded > size:
        print(
            f"the vocabulary of {size:,} tokens has {padded:,} rows; the new ones are the mean of the others, so that "
            f"a loss is at most {math.log(padded / size):.2g} higher"
        )
    sys.stdout.flush()


def _write(unfinished: Path, source: Path, run: Mapping[str, Any], layout: Layout, tensors: Iterator[Tensor]) -> None:
    """Writes weights, their layout, the tokenizer's files and the description."""
    written = [unfinished / WEIGHTS_FILE, unfinished / name_rank_file(0)]
    write_tensors(written[0], layout, tensors, {"format": "pt"})
    described: dict[str, Any] = {"pp_rank": 0, "tp_rank": 0, "dp_rank": 0, "cuts": {}, "fragments": []}
    for number, (name, _, shape) in enumerate(layout):
        start = (0,) * len(shape)
        described["cuts"][name] = Cut(shape, shape, (Box(start, start, shape),)).pack()
        described["fragments"].append(dataclasses.astuple(Fragment(name, number, 0, 0, math.prod(shape))))
    torch.save({"layout": described}, written[1])
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            (unfinished / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            written.append(unfinished / TOKENIZER_FOLDER / name)
            shutil.copyfile(source / name, written[-1])
    files = describe_files(unfinished, written)
    own = {
        field: {"path": str(source.resolve() / name), "sha256": files[f"{TOKENIZER_FOLDER}/{name}"][1]}
        for name, field in _VOCABULARY_FILES.items()
        if f"{TOKENIZER_FOLDER}/{name}" in files
    }
    content = {**run, IMPORTED: str(source.resolve()), "tokenizer_files": own, "settings": {}}
    write_description(unfinished, content, files)
    flush_all_to_disk(unfinished)
