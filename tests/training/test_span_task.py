"""T5's samples: Megatron's own, and a text that can be put together again whatever the decoder has room for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_megatron_ranks
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
from run_configs import NEEDED, SIZES, complete
from training_job import MaskedData

from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import build_datasets, load_vocabulary
from tempo_megatron.training.tasks.masked import SpanTask, hide_padding

TASK = SpanTask()
COUNT = 40


def options(data: MaskedData, *words: str, cache: str) -> RunConfig:
    how = ["--data-path", data.prefix, "--split", "10,2", "--eval-iters", "2", "--global-batch-size", "4"]
    return complete(*SIZES, *NEEDED, *how, "--data-cache-path", cache, *words, family="t5")


def collated(data: MaskedData, cache: str, words: list[str]) -> dict[str, Any]:
    """The first samples; what stands for what; and the same samples of Megatron's own dataset, where it makes any."""
    run = options(data, *words, cache=cache)
    vocabulary = load_vocabulary(run, TASK)
    train = build_datasets(run, TASK, vocabulary.tokenizer).train
    tokenizer = vocabulary.tokenizer
    found: dict[str, Any] = {"batch": TASK.make_collate(vocabulary)([train[number] for number in range(COUNT)])}
    found["tokens"] = (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.additional_special_tokens_ids)
    index = train.sample_index[:COUNT]
    found["texts"] = [np.concatenate([train.dataset[i] for i in range(a, b)])[:size].tolist() for a, b, size in index]
    if not words:
        # As Megatron-LM's pretrain_t5.py.
        config = T5MaskedWordPieceDatasetConfig(
            random_seed=run.seed, sequence_length=64, sequence_length_decoder=64, blend=([data.prefix], None),
            split=run.split, path_to_cache=cache + "-theirs", tokenizer=tokenizer, masking_probability=0.15,
            short_sequence_probability=0.1, masking_max_ngram=10, masking_do_full_word=True,
            masking_do_permutation=False, masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=True,
        )  # fmt: skip
        builder = BlendedMegatronDatasetBuilder(T5MaskedWordPieceDataset, [40, 8, 0], lambda: True, config)
        theirs = builder.build()[0]
        found["theirs"] = [theirs[number] for number in range(COUNT)]
    return found


def put_together(batch: dict[str, torch.Tensor], number: int, tokens: tuple[int, int, int, list[int]]) -> list[int]:
    """The text of a sample: each sentinel of the encoder is replaced by what follows it in the labels."""
    _, eos, _, sentinels = tokens
    labels = batch["labels"][number][batch["loss_mask"][number] == 1].tolist()
    assert labels.pop() == eos
    spans: dict[int, list[int]] = {}
    for token in labels:
        if token in sentinels:
            spans[token] = current = []
        else:
            current.append(token)
    assert list(spans) == sentinels[: len(spans)] and all(spans.values())
    text = batch["encoder_tokens"][number][batch["encoder_mask"][number] == 1].tolist()
    return [each for token in text for each in (spans.pop(token) if token in spans else [token])]


# The second has fewer sentinels, the third a decoder with room for fewer spans, than the samples have.
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("bert_data", []),
        ("bert_data", ["--vocab-extra-ids", "2"]),
        ("bert_data", ["--decoder-seq-length", "8"]),
        ("roberta_data", []),
    ],
    ids=str,
)
def test_the_samples_are_megatrons_and_hold_the_whole_text(
    request: Any, tmp_path: Path, kind: str, words: list[str]
) -> None:
    data = request.getfixturevalue(kind)
    (found,) = run_megatron_ranks(collated, 1, 1, data, str(tmp_path / "cache"), words)
    batch, (bos, _, pad, _) = found["batch"], found["tokens"]
    for number, text in enumerate(found["texts"]):
        assert put_together(batch, number, found["tokens"]) == text, number
    # The decoder reads its labels, one token later.
    assert bool((batch["decoder_tokens"][:, 0] == bos).all())
    read = batch["decoder_mask"][:, 1:] == 1
    assert torch.equal(batch["decoder_tokens"][:, 1:][read], batch["labels"][:, :-1][read])
    assert torch.equal(batch["decoder_mask"], batch["loss_mask"].long())
    for stack in ("encoder", "decoder"):
        is_filled = batch[f"{stack}_mask"] == 0
        assert bool((batch[f"{stack}_tokens"][is_filled] == pad).all())
    assert (batch["encoder_mask"] == 0).any()
    for number, sample in enumerate(found.get("theirs", []) if kind == "bert_data" else []):
        labels = np.maximum(sample["labels"], 0)  # Megatron fills them up with -1, where no loss counts
        theirs = sample["text_enc"], sample["text_dec"], labels, sample["loss_mask"]
        names = ("encoder_tokens", "decoder_tokens", "labels", "loss_mask")
        assert all(np.array_equal(each, batch[name][number]) for each, name in zip(theirs, names, strict=True)), number


def test_the_step_hides_padding_and_the_future_and_averages_over_the_decoders_tokens() -> None:
    encoder, decoder = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 1, 0]])
    batch = {"encoder_tokens": encoder, "decoder_tokens": decoder, "labels": decoder, "encoder_mask": encoder,
             "decoder_mask": decoder, "loss_mask": decoder.float()}  # fmt: skip
    given: list[Any] = []
    run: Any = SimpleNamespace(tempo=SimpleNamespace(loss="off"))
    found = TASK.forward(run, lambda *a, **k: given.extend([*a, k]) or torch.tensor([[1.0, 3.0, 9.0]]), batch)
    assert found == {"loss": torch.tensor(2.0)} and given[-1] == {"lm_labels": decoder}
    assert given[2].shape == (1, 1, 4, 4) and given[2][0, 0, 0].tolist() == [False, False, False, True]
    assert given[3][0, 0].tolist() == [[False, True, True], [False, False, True], [True, True, True]]
    assert torch.equal(given[4], hide_padding(decoder, encoder)) and given[4].shape == (1, 1, 3, 4)
