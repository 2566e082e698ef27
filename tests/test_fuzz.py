"""Whatever a file or a command line holds: it is read, or refused with one sentence. Never a traceback, never a wait.

Each test damages one kind of input, at the stage that reads it and in this process, so that hundreds of cases take
seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_configs import NEEDED, SIZES, decide, write_json
from training_job import Data

from tempo_megatron.data.dataset_files import load_dataset_tokenizer, validate_dataset
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.training.checkpoint_files.files import find_fault, read_tensors
from tempo_megatron.training.checkpoint_files.folder import (
    CheckpointFolder,
    describe_files,
    find_missing,
    write_description,
)
from tempo_megatron.training.config_command import describe_settings
from tempo_megatron.training.main import find_sentence_for_the_user
from tempo_megatron.training.metrics import MetricsFile
from tempo_megatron.training.run.arguments import parse_arguments
from tempo_megatron.training.run.resume import read_saved_run

ROOT = Path(__file__).parent.parent


def cases(number: int) -> Callable[[Any], Any]:
    """The same cases each time, so that what fails can be looked at."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def check(action: Callable[[], Any]) -> bool:
    """Whether `action` succeeds; where it does not, it says why in one sentence, of which the trainer prints this."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            action()
    except ValueError as error:
        sentence = find_sentence_for_the_user(error)
        assert sentence is not None and sentence.strip() and "\n" not in sentence.strip(), repr(error)
        assert type(error).__module__.startswith(("builtins", "tempo_megatron")), repr(error)
        assert not isinstance(error, (UnicodeError, json.JSONDecodeError)), repr(error)
        return False
    return True


@st.composite
def damaged(draw: Any, content: bytes) -> bytes:
    """A file with bits flipped, cut off, with bytes put in or left out, doubled, empty, or another one."""
    kind = draw(st.sampled_from(["flip", "flip", "cut", "insert", "remove", "replace", "double", "other"]))
    if kind == "other" or not content:
        return draw(
            st.sampled_from([b"", b"\0", b"null", b"[]", b"{}", b'""', b"\xff\xfe\x00"]) | st.binary(max_size=40)
        )
    place = draw(st.integers(0, len(content) - 1))
    if kind == "cut":
        return content[:place]
    if kind == "double":
        return content[:place] + content
    changed = bytearray(content)
    if kind == "flip":
        changed[place] ^= 1 << draw(st.integers(0, 7))
    elif kind == "insert":
        changed[place:place] = draw(st.binary(min_size=1, max_size=9))
    else:
        length = draw(st.integers(1, 40))
        changed[place : place + length] = (
            draw(st.binary(min_size=length, max_size=length)) if kind == "replace" else b""
        )
    return bytes(changed)


def start(folder: Path, config: bytes, *extra: str) -> None:
    """What a run does before it starts, and `config --show`."""
    decide(folder, *NEEDED, *extra, config=config)
    assert len(list(describe_settings([*write_json(folder, config), *NEEDED, *extra], "gpt", 1))) > 60


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "cpu", -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DEEPSPEED_KEYS = st.sampled_from(
    "bf16 fp16 zero_optimization zero_optimization.stage zero_optimization.offload_optimizer data_types checkpoint "
    "zero_optimization.offload_optimizer.device data_types.grad_accum_dtype tempo.activation tempo.layers tempo "
    "tempo.enabled "
    "tempo.memory_budget gradient_clipping train_batch_size train_micro_batch_size_per_gpu steps_per_print optimiser "
    "gradient_accumulation_steps flops_profiler wall_clock_breakdown checkpoint.load_universal TEMPO monitor".split()
)


@cases(120)
@given(key=DEEPSPEED_KEYS, value=JSON_VALUES)
def test_any_value_in_a_deepspeed_json(tmp_path: Path, key: str, value: Any) -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    inner = config
    *blocks, name = key.split(".")
    for block in blocks:
        inner = inner.setdefault(block, {})
    inner[name] = value
    check(lambda: start(tmp_path, json.dumps(config).encode(), *SIZES))


@cases(60)
@given(content=damaged((ROOT / "configs/deepspeed/zero2_bf16.json").read_bytes()))
def test_a_damaged_deepspeed_json(tmp_path: Path, content: bytes) -> None:
    check(lambda: start(tmp_path, content, *SIZES))
    check(lambda: TempoConfig.from_file(tmp_path / "deepspeed.json"))


@cases(60)
@given(content=damaged((ROOT / "configs/model/gpt2_tiny.json").read_bytes()))
def test_a_damaged_model_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.json"
    path.write_bytes(content)
    check(lambda: start(tmp_path, b"{}", "--model", str(path)))


OPTIONS = st.sampled_from(
    "--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels --seq-length "
    "--max-position-embeddings --vocab-size --make-vocab-size-divisible-by --norm-epsilon --attention-dropout --lr "
    "--hidden-dropout --micro-batch-size --global-batch-size --train-iters --seed --min-lr --lr-warmup-iters --split "
    "--lr-decay-iters --weight-decay --adam-beta1 --adam-eps --clip-grad --data-path --num-workers --eval-interval "
    "--recompute-num-layers --save --load --save-interval --log-interval --tensorboard-dir --metrics-file --loss-plot "
    "--log-dir --tensor-model-parallel-size --distributed-timeout-minutes --fault-timeout --tempo-layers "
    "--tempo-memory-budget --tempo-activation --window-size --init-method-std --rotary-base --model".split()
)
WORDS = (
    st.integers().map(str)
    | st.integers(-(2**80), 2**80).map(str)
    | st.floats().map(str)
    | st.text(max_size=12)
    | st.sampled_from(
        ["", " ", "-1", "1e999", "nan", "0", "/proc/x", "a\0b", "{", "[" * 5000, "1" * 5000, "1,2", "(0,0)"]
    )
)


@cases(120)
@given(option=OPTIONS, word=WORDS)
def test_any_word_on_the_command_line(tmp_path: Path, option: str, word: str) -> None:
    check(lambda: start(tmp_path, b"{}", *SIZES, f"{option}={word}"))


@cases(60)
@given(file=st.sampled_from(["vocab_file", "merge_file"]), rest=st.data())
def test_a_damaged_tokenizer_file(data: Data, tmp_path: Path, file: str, rest: Any) -> None:
    names = {name: getattr(data, name) for name in ("vocab_file", "merge_file")}
    path = tmp_path / "file"
    path.write_bytes(rest.draw(damaged(Path(names[file]).read_bytes())))
    names[file] = str(path)

    def load() -> None:
        tokenizer = load_dataset_tokenizer(data.prefix, names["vocab_file"], names["merge_file"])
        validate_dataset(data.prefix, tokenizer.vocab_size)
        tokenizer.tokenize("some words, 12 and \u00e9")

    check(load)


@cases(80)
@given(rest=st.data())
def test_a_damaged_index(data: Data, tmp_path: Path, rest: Any) -> None:
    """One that is accepted is read by megatron-core as what it was, or as a part of it."""
    prefix = tmp_path / "text"
    original = Path(data.prefix + ".idx").read_bytes()
    (tmp_path / "text.bin").write_bytes(Path(data.prefix + ".bin").read_bytes())
    (tmp_path / "text.idx").write_bytes(rest.draw(damaged(original)))
    if check(lambda: validate_dataset(str(prefix), 512)):
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        found = IndexedDataset(str(prefix))
        assert sum(len(found[number]) for number in range(len(found))) == len((tmp_path / "text.bin").read_bytes()) // 2


def make_checkpoint(folder: Path) -> Path:
    checkpoint = folder / "iter_0000002"
    checkpoint.mkdir(exist_ok=True)
    torch.save({"weight": torch.arange(64.0), "scheduler": {"steps": 3}}, checkpoint / "rank_00000.pt")
    content = {"iteration": 2, "settings": {"lr": 1e-3, "model": {}, "tempo": {}}, "sample_parts": [4]}
    write_description(checkpoint, content, describe_files(checkpoint, [checkpoint / "rank_00000.pt"]))
    (folder / "latest").write_text("iter_0000002\n")
    return checkpoint


@cases(120)
@given(file=st.sampled_from(["iter_0000002/rank_00000.pt", "iter_0000002/run.json", "latest"]), rest=st.data())
def test_a_damaged_checkpoint(tmp_path: Path, file: str, rest: Any) -> None:
    checkpoint = make_checkpoint(tmp_path)
    path = tmp_path / file
    path.write_bytes(rest.draw(damaged(path.read_bytes())))
    args = parse_arguments(["--deepspeed_config", "-", *NEEDED, *SIZES, "--load", str(tmp_path)])

    def load() -> None:
        CheckpointFolder(tmp_path).find_latest()
        saved = read_saved_run(args)
        assert saved is not None
        assert find_missing(checkpoint, saved["files"]) is None
        read_tensors(checkpoint / "rank_00000.pt")

    find_fault(checkpoint / "rank_00000.pt")
    check(load)


@cases(40)
@given(content=damaged(b'{"kind": "run"}\n{"kind": "train", "iteration": 1, "loss": 2.5}\n'))
def test_damaged_metrics(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    check(lambda: MetricsFile(str(path), 5).close())
