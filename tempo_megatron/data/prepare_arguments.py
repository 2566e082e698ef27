"""Parses and checks the command line of prepare_data, into one object that is only read afterwards."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass

from tempo_megatron.data import DataError
from tempo_megatron.data.huggingface_tokenizer import find_tokenizer_files
from tempo_megatron.data.sentences import RULE, WAYS
from tempo_megatron.data.tokenizer import LARGEST_VOCABULARY
from tempo_megatron.data.tokenizer_types import GPT2_BPE, HUGGING_FACE, TYPES

DESCRIPTION = "Tokenizes text, JSON-lines and directory trees into a data set of Megatron's format."
TRAIN_BYTES = 32_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """One data set to make. A field means what `--help` says of the argument of that name."""

    prog: str
    """The command, for messages."""
    input: tuple[str, ...]
    input_hub: tuple[str, ...]
    input_stdlib: bool
    output_prefix: str
    json_key: str | None
    extensions: tuple[str, ...]
    max_bytes: int | None
    split_sentences: str | None
    tokenizer_type: str
    vocab_file: str | None
    merge_file: str | None
    vocab_size: int
    train_bytes: int
    workers: int
    skip_bad_lines: bool
    overwrite: bool
    skip_existing: bool

    @property
    def text_key(self) -> str:
        return "text" if self.json_key is None else self.json_key


def parse_prepare_arguments(argv: list[str] | None, prog: str) -> PrepareOptions:
    """Parses, checks and completes the command line; an error ends the process with status 2."""
    parser = _build_parser(prog)
    typed = parser.parse_args(argv)
    _take_tokenizer_model(parser, typed)
    _check(parser, typed)
    completed = {
        "input": tuple(typed.input),
        "input_hub": tuple(typed.input_hub),
        "extensions": tuple(typed.extensions),
        "train_bytes": typed.train_bytes or TRAIN_BYTES,
        "vocab_size": TYPES[typed.tokenizer_type].vocab_size if typed.vocab_size is None else typed.vocab_size,
    }
    return PrepareOptions(**{**vars(typed), **completed, "prog": prog})


def _take_tokenizer_model(parser: argparse.ArgumentParser, typed: argparse.Namespace) -> None:
    """Replaces --tokenizer-model by the files of its folder."""
    folder = vars(typed).pop("tokenizer_model")
    if folder is None:
        if not TYPES[typed.tokenizer_type].is_trained and typed.vocab_file is None:
            parser.error(f"--tokenizer-type {typed.tokenizer_type} takes the tokenizer of --tokenizer-model; give that")
        return
    if typed.tokenizer_type != HUGGING_FACE or typed.vocab_file is not None or typed.merge_file is not None:
        parser.error(
            f"--tokenizer-model is for --tokenizer-type {HUGGING_FACE} alone, and brings its files; leave out "
            "--vocab-file and --merge-file, and give that type"
        )
    try:
        typed.vocab_file, typed.merge_file = find_tokenizer_files(folder)
    except DataError as error:
        parser.error(str(error))


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="text, .json/.jsonl (also as .gz or .zst), .parquet, .arrow, .csv, .tsv, directory trees",
    )
    add(
        "--input-hub",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="data sets of the Hugging Face hub, or folders of one: NAME, NAME:CONFIG or NAME:CONFIG:SPLIT",
    )
    add("--input-stdlib", action="store_true", help="sources and texts of this Python's standard library")
    add("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx, P.json (and the tokenizer)")
    add(
        "--json-key",
        default=None,
        help="key of the text in JSON-lines files, or its column in tables (default: text)",
    )
    add(
        "--extensions",
        nargs="+",
        default=[],
        metavar="EXT",
        help="of directory trees take only files that end so, for example .txt .md",
    )
    add(
        "--max-bytes", type=_parse_byte_count, default=None, metavar="N", help="use the first N bytes only; 12M, 1.5GiB"
    )
    add(
        "--split-sentences",
        nargs="?",
        const=RULE,
        choices=WAYS,
        help="store each sentence as a sequence of its own, as BERT and RoBERTa need: found by rule, or the lines",
    )
    add(
        "--tokenizer-type",
        choices=TYPES,
        default=GPT2_BPE,
        help="RobertaBPETokenizer is GPT-2's with RoBERTa's special tokens (default: %(default)s)",
    )
    add(
        "--tokenizer-model",
        metavar="FOLDER",
        help=f"with {HUGGING_FACE}: a model's folder with tokenizer.json and tokenizer_config.json",
    )
    add("--vocab-file", default=None, help="vocab.json, or BERT's vocab.txt; without it a vocabulary is trained")
    add("--merge-file", default=None, help="GPT-2's merges.txt")
    sizes = ", ".join(f"{kind.vocab_size} for {name}" for name, kind in TYPES.items() if kind.is_trained)
    add("--vocab-size", type=int, default=None, help=f"tokens of the trained vocabulary (default: {sizes})")
    add("--train-bytes", type=_parse_byte_count, default=None, help="text to train the vocabulary on (default: 32M)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one per core)")
    add(
        "--skip-bad-lines",
        action="store_true",
        help="leave out, and count, lines that are not UTF-8 or not a JSON object with a text",
    )
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
    kind = TYPES[options.tokenizer_type]
    if kind.of_masked and options.split_sentences is None:
        parser.error(
            f"--tokenizer-type {options.tokenizer_type} is for masked language models, whose samples are made of "
            "sentences; add --split-sentences"
        )
    if options.vocab_size is None:
        return
    if options.vocab_size < kind.smallest:
        parser.error(f"--vocab-size {options.vocab_size}: expected at least {kind.smallest} ({kind.smallest_reason})")
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
