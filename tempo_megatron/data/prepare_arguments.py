"""Parses and checks the command line of prepare_data."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from tempo_megatron.data.huggingface_tokenizer import FILES
from tempo_megatron.data.sentences import RULE, WAYS
from tempo_megatron.data.tokenizer import LARGEST_VOCABULARY
from tempo_megatron.data.tokenizer_types import GPT2_BPE, HUGGING_FACE, MASKED_TYPES, TYPES

DESCRIPTION = "Tokenizes text, JSON-lines and directory trees into a data set of Megatron's format."
_TRAIN_BYTES = 32_000_000


def parse_prepare_arguments(argv: list[str] | None, prog: str) -> argparse.Namespace:
    """Parses, checks and completes the command line; an error ends the process with status 2.

    Returns the values by the names of the arguments, `prog` for messages, and text_key, that of the text.
    """
    parser = _build_parser(prog)
    options = parser.parse_args(argv)
    _take_tokenizer_model(parser, options)
    _check(parser, options)
    options.prog = prog
    options.text_key = "text" if options.json_key is None else options.json_key
    options.train_bytes = options.train_bytes or _TRAIN_BYTES
    if options.vocab_size is None:
        options.vocab_size = TYPES[options.tokenizer_type].default_size
    return options


def _take_tokenizer_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Names the files of --tokenizer-model's folder as those of the tokenizer."""
    folder, is_of_model = options.tokenizer_model, options.tokenizer_type == HUGGING_FACE
    if folder is None:
        if is_of_model and options.vocab_file is None:
            parser.error(f"--tokenizer-type {HUGGING_FACE} takes the tokenizer of --tokenizer-model; give that")
        return
    if not is_of_model or options.vocab_file is not None or options.merge_file is not None:
        parser.error(
            f"--tokenizer-model is for --tokenizer-type {HUGGING_FACE} alone, and brings its files; leave out "
            "--vocab-file and --merge-file, and give that type"
        )
    for name in FILES:
        if not os.path.isfile(os.path.join(folder, name)):
            parser.error(f"--tokenizer-model {folder} has no {name}; give a folder that transformers saved")
    options.vocab_file, options.merge_file = (os.path.join(folder, name) for name in FILES)


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION)
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    paths = "text, .json/.jsonl (also as .gz or .zst), .parquet, .arrow, .csv, .tsv, directory trees"
    add("--input", **several, metavar="PATH", help=paths)
    names = "data sets of the Hugging Face hub, or folders of one: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT"
    add("--input-hub", **several, metavar="NAME", help=names)
    add("--input-stdlib", action="store_true", help="sources and texts of this Python's standard library")
    add("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx, P.json (and the tokenizer)")
    add("--json-key", help="key of the text in JSON-lines files, or its column in tables (default: text)")
    endings = "of directory trees take only files that end so, for example .txt .md"
    add("--extensions", nargs="+", default=[], metavar="EXT", help=endings)
    add("--max-bytes", type=_parse_byte_count, metavar="N", help="use the first N bytes only; 12M, 1.5GiB")
    ways = "store each sentence as a sequence of its own, as BERT and RoBERTa need: found by rule, or the lines"
    add("--split-sentences", nargs="?", const=RULE, choices=WAYS, help=ways)
    kinds = "RobertaBPETokenizer is GPT-2's with RoBERTa's special tokens (default: %(default)s)"
    add("--tokenizer-type", choices=TYPES, default=GPT2_BPE, help=kinds)
    model = f"with {HUGGING_FACE}: a model's folder with tokenizer.json and tokenizer_config.json"
    add("--tokenizer-model", metavar="FOLDER", help=model)
    add("--vocab-file", help="vocab.json, or BERT's vocab.txt; without it a vocabulary is trained")
    add("--merge-file", help="GPT-2's merges.txt")
    sizes = ", ".join(f"{kind.default_size} for {name}" for name, kind in TYPES.items() if kind.default_size)
    add("--vocab-size", type=int, help=f"tokens of the trained vocabulary (default: {sizes})")
    add("--train-bytes", type=_parse_byte_count, help="text to train the vocabulary on (default: 32M)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="threads (default: one per core)")
    bad = "leave out, and count, lines that are not UTF-8 or not a JSON object with a text"
    add("--skip-bad-lines", action="store_true", help=bad)
    add("--overwrite", action="store_true", help="replace files named like the output that prepare_data did not make")
    add("--skip-existing", action="store_true", help="keep P where it was made from the same files in the same way")
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.input and not options.input_hub and not options.input_stdlib:
        parser.error("nothing to read; give --input PATH... or --input-stdlib")
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: expected at least 1")
    if options.extensions and not any(os.path.isdir(path) for path in options.input):
        parser.error("--extensions chooses files of a directory tree, but --input has no directory; leave it out")
    for name in ("vocab_size", "train_bytes"):
        if options.vocab_file is not None and getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is for training a vocabulary, but --vocab-file gives one; choose")
    if options.tokenizer_type in MASKED_TYPES and options.split_sentences is None:
        parser.error(
            f"--tokenizer-type {options.tokenizer_type} is for masked language models, whose samples are made of "
            "sentences; add --split-sentences"
        )
    if options.vocab_size is None:
        return
    smallest, reason = TYPES[options.tokenizer_type].smallest_size
    if options.vocab_size < smallest:
        parser.error(f"--vocab-size {options.vocab_size}: expected at least {smallest} ({reason})")
    if options.vocab_size > LARGEST_VOCABULARY:
        parser.error(f"--vocab-size {options.vocab_size}: expected at most {LARGEST_VOCABULARY}; GPT-2 has 50257")


def _parse_byte_count(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i?))?B?", text.strip())
    size = 0
    if match:
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index((unit or " ").upper()))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 12000000, 12M or 1.5GiB")
    return size
