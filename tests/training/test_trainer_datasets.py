"""Which rank reads which sample, and what is said about data that cannot be trained on."""

from __future__ import annotations

import dataclasses
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_megatron_ranks
from run_configs import NEEDED, SIZES, complete
from training_job import Call, Data

from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import build_datasets, load_vocabulary, shard_batches
from tempo_megatron.training.tasks.task import NextTokenTask, Vocabulary, collate_tokens

TASK = NextTokenTask()
HOW = "--split 10,2 --eval-iters 2 --global-batch-size 4".split()


def vocabulary(run: RunConfig) -> Vocabulary:
    return load_vocabulary(run, TASK)


def options(data: Data, *words: str, **changes: object) -> RunConfig:
    run = complete(*SIZES, *NEEDED, *data.arguments(), *HOW, *words)
    return dataclasses.replace(run, **changes)


@pytest.mark.parametrize(("micro_batch_size", "data_parallel_size"), [(1, 1), (2, 2), (1, 4), (4, 2)])
def test_every_sample_is_read_once_and_in_the_order_of_one_rank(micro_batch_size: int, data_parallel_size: int) -> None:
    first, last = 16, 64
    samplers = [
        list(shard_batches(first, last, micro_batch_size, rank, data_parallel_size))
        for rank in range(data_parallel_size)
    ]
    read = [sample for micro_batches in zip(*samplers, strict=True) for batch in micro_batches for sample in batch]
    assert read == list(range(first, last))


def samples(data: Data, cache: str) -> list[list[int]]:
    run = options(data, data_cache_path=cache)
    built = build_datasets(run, TASK, vocabulary(run).tokenizer)
    train, valid = built.train, built.valid
    return [train[0]["tokens"].tolist(), train[0]["labels"].tolist(), valid[0]["tokens"].tolist(), [len(valid)]]


def test_all_ranks_read_the_same_and_labels_are_the_next_tokens(data: Data, tmp_path: Path) -> None:
    first, second = run_megatron_ranks(samples, 2, 1, data, str(tmp_path))
    assert first == second
    assert first[0][1:] == first[1][:-1]
    assert first[0] != first[2]
    assert first[3][0] >= 8


def samples_of_damaged_indices(data: Data, cache: str) -> list[list[int]]:
    """In one process, whose output the test does not see: the first samples, of files that a kill has cut off, in which
    a byte is changed, and that would run code."""
    first = samples(data, cache)
    files = sorted(Path(cache).glob("*.npy"))
    assert len(files) == 6 and all(Path(f"{path}.sha256").is_file() for path in files)
    written = [path.read_bytes() for path in files]
    intruder = pickle.dumps(Call(os.mknod, str(Path(cache) / "executed")))
    for damaged in (
        [content[:-50] for content in written],
        [content[:-8] + bytes([content[-8] ^ 1]) + content[-7:] for content in written],
        [intruder for _ in written],
    ):
        for path, content in zip(files, damaged, strict=True):
            path.write_bytes(content)
        assert samples(data, cache) == first and [path.read_bytes() for path in files] == written
    assert not (Path(cache) / "executed").exists()
    inodes = [path.stat().st_ino for path in files]
    assert samples(data, cache) == first and [path.stat().st_ino for path in files] == inodes
    for path in files:  # of Megatron-LM, say
        Path(f"{path}.sha256").unlink()
    assert samples(data, cache) == first and all(Path(f"{path}.sha256").is_file() for path in files)
    return first


def test_damaged_index_files_are_made_again(data: Data, tmp_path: Path) -> None:
    ranks = run_megatron_ranks(samples_of_damaged_indices, 1, 1, data, str(tmp_path))
    assert ranks == run_megatron_ranks(samples, 1, 1, data, str(tmp_path / "other"))


def blended(data: Data, cache: str) -> list[int]:
    words = [word for weight in ("2", "3", "5") for word in (weight, data.prefix)]
    run = options(data, "--data-path", *words, data_cache_path=cache)
    built = build_datasets(run, TASK, vocabulary(run).tokenizer)
    train, valid = built.train, built.valid
    assert len(train) >= 40 and len(valid) >= 8  # Megatron rounds the share of each up
    read = [int(train[sample]["dataset_id"]) for sample in range(40)]
    return [read.count(number) for number in range(3)]


def test_three_data_sets_are_blended_by_weight(data: Data, tmp_path: Path) -> None:
    assert run_megatron_ranks(blended, 1, 1, data, str(tmp_path)) == [[8, 12, 20]]


def test_the_vocabulary_is_padded_for_the_tensor_parallel_size(data: Data) -> None:
    assert vocabulary(options(data, tensor_model_parallel_size=3, vocab_padding_tp=3)).padded_size == 768
    assert vocabulary(options(data, "--vocab-size", "50257")).padded_size == 50304
    odd = ["--vocab-size", "513", "--make-vocab-size-divisible-by", "1"]
    with pytest.raises(ValueError, match="has 513 rows of vocabulary, padding included, which the run keeps and --ten"):
        vocabulary(options(data, *odd, tensor_model_parallel_size=2, load="save"))


NO_SAMPLE = {"split": "99,1", "split_weights": (0.99, 0.01, 0.0)}


@pytest.mark.parametrize(
    ("words", "changes", "sentence"),
    [
        ("--vocab-size 300", {}, "--vocab-size 300 is below the tokenizer's 512 tokens"),
        ("", NO_SAMPLE, "gives validation 0 of 12 documents with 0 tokens"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data: Data, words: str, changes: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        vocabulary(options(data, *words.split(), **changes))
    vocabulary(options(data, **NO_SAMPLE, eval_iters=0))


def test_a_cache_folder_that_cannot_be_written_is_an_error(data: Data, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RuntimeError, match="ValueError: the sample indices cannot be written .* give --data-cache-path"
    ):
        run_megatron_ranks(samples, 1, 1, data, str(tmp_path / "file"))


def test_a_token_without_a_row_in_the_embedding_is_an_error() -> None:
    def sample(token: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([1, token])
        return {"tokens": tokens, "labels": torch.zeros_like(tokens), "loss_mask": torch.ones(2)}

    assert collate_tokens([sample(511), sample(0)], 512)["tokens"].tolist() == [[1, 511], [1, 0]]
    with pytest.raises(ValueError, match="the data holds token 512 but the model's vocabulary ends at 511"):
        collate_tokens([sample(3), sample(512)], 512)


def test_a_misspelt_data_path_is_answered_with_the_data_that_is_there(data: Data) -> None:
    for typed in (data.prefix.replace("text", "tex"), data.prefix + ".bin"):
        with pytest.raises(
            ValueError, match=f"not found; prepare the data, or check --data-path: there is {data.prefix}"
        ):
            vocabulary(options(data, blend=([typed], None), vocab_file=None, merge_file=None))


def first_samples(
    data: Data, cache: str, train_iters: int, sample_parts: tuple[int, ...], first: int
) -> tuple[list[int], int, Any]:
    run = options(data, data_cache_path=cache, train_iters=train_iters, sample_parts=sample_parts, eval_iters=0)
    built = build_datasets(run, TASK, vocabulary(run).tokenizer)
    train = built.train
    order = [hash(tuple(train[sample]["tokens"].tolist())) for sample in range(first, min(len(train), first + 1000))]
    return order, len(train), built.sample_parts


@pytest.mark.slow
def test_a_longer_run_keeps_the_order_of_its_first_samples(data: Data, tmp_path: Path) -> None:
    def order(train_iters: int, parts: tuple[int, ...], first: int = 0) -> tuple[list[int], int, Any]:
        return run_megatron_ranks(first_samples, 1, 1, data, str(tmp_path), train_iters, parts, first)[0]

    planned, length, parts = order(10, ())
    assert parts == (40,) and 40 <= length < 4000
    afresh, _, _ = order(1000, ())
    assert afresh[:40] != planned[:40]  # what this is about
    longer, longer_length, grown = order(1000, parts)
    assert longer[: len(planned)] == planned[: len(longer)] and longer_length >= 4000
    assert grown == (40, 4000 - length)
    assert order(1000, grown)[0] == longer and order(1000, grown)[2] == grown
    assert order(5, grown)[0][:20] == planned[:20]  # a shorter one is the beginning
    within = order(length // 4, parts)
    assert within[2] == (40,) and within[0] == planned
    appended = order(length // 2, parts, first=length)[0]
    assert len(appended) == len(planned) and appended != planned  # as many samples in an order of their own
