"""BERT's and RoBERTa's samples: Megatron's own where those are right, and what masks and order depend on."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_megatron_ranks
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from run_configs import NEEDED, SIZES, complete
from training_job import MaskedData

from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import BatchStream, build_datasets, load_vocabulary
from tempo_megatron.training.tasks.masked import MaskedTask, collate_masked, find_usable_documents

TASK = MaskedTask()
SEQ_LENGTH = 64


@pytest.fixture(params=["bert_data", "roberta_data"])
def data(request: pytest.FixtureRequest) -> MaskedData:
    return request.getfixturevalue(request.param)


def options(data: MaskedData, has_head: bool, **changes: Any) -> RunConfig:
    kind = [] if has_head else ["--bert-no-binary-head", "--masking", "tokens"]
    how = ["--data-path", data.prefix, "--split", "10,2", "--eval-iters", "2", "--global-batch-size", "4"]
    return dataclasses.replace(complete(*SIZES, *NEEDED, *how, *kind, family="bert"), **changes)


def collated(data: MaskedData, cache: str, has_head: bool, count: int, **changes: Any) -> dict[str, torch.Tensor]:
    run = options(data, has_head, data_cache_path=cache, **changes)
    vocabulary = load_vocabulary(run, TASK)
    train = build_datasets(run, TASK, vocabulary.tokenizer).train
    return TASK.make_collate(vocabulary)([train[number] for number in range(count)])


def megatrons_samples(data: MaskedData, cache: str) -> list[dict[str, Any]]:
    """As Megatron-LM's pretrain_bert.py makes them, of data whose padding token is 0."""
    run = options(data, True)
    tokenizer = load_vocabulary(run, TASK).tokenizer
    assert tokenizer.pad == 0
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=run.seed, sequence_length=SEQ_LENGTH, blend=([data.prefix], None), split=run.split,
        path_to_cache=cache, tokenizer=tokenizer, masking_probability=0.15, short_sequence_probability=0.1,
        masking_max_ngram=3, masking_do_full_word=True, masking_do_permutation=False, masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False, classification_head=True,
    )  # fmt: skip
    train, _, _ = BlendedMegatronDatasetBuilder(BERTMaskedWordPieceDataset, [40, 8, 0], lambda: True, config).build()
    return [train[number] for number in range(40)]


def test_the_samples_are_those_of_megatrons_own_script(bert_data: MaskedData, tmp_path: Path) -> None:
    (theirs,) = run_megatron_ranks(megatrons_samples, 1, 1, bert_data, str(tmp_path / "theirs"))
    (ours,) = run_megatron_ranks(collated, 1, 1, bert_data, str(tmp_path / "ours"), True, 40)
    names = {"text": "tokens", "types": "tokentype_ids", "is_random": "is_swapped", "loss_mask": "loss_mask"}
    for number, sample in enumerate(theirs):
        for theirs_name, name in names.items():
            expected = torch.as_tensor(np.asarray(sample[theirs_name]), dtype=ours[name].dtype)
            assert torch.equal(ours[name][number], expected), (number, name)
        # A token that was replaced by the padding token is text all the same.
        is_text = torch.as_tensor(sample["padding_mask"]) == 1
        assert bool((ours["padding_mask"][number].bool() >= is_text).all())
        is_masked = ours["loss_mask"][number] == 1
        assert torch.equal(ours["labels"][number][is_masked], torch.as_tensor(sample["labels"])[is_masked])
    assert ours["is_swapped"].float().mean() > 0.2 and (ours["padding_mask"] == 0).any()


def test_a_sample_is_framed_and_filled_with_the_tokenizers_own_tokens(data: MaskedData, tmp_path: Path) -> None:
    has_head = "bert" not in data.prefix  # either kind of data may have segments or none
    run = options(data, has_head)
    tokenizer = load_vocabulary(run, TASK).tokenizer
    (batch,) = run_megatron_ranks(collated, 1, 1, data, str(tmp_path), has_head, 40)
    is_text = batch["padding_mask"] == 1
    assert bool((batch["tokens"][~is_text] == tokenizer.pad).all()) and (~is_text).any()
    assert bool((batch["tokens"][:, 0] == tokenizer.cls).all())
    last = is_text.sum(1) - 1
    assert bool((batch["tokens"].gather(1, last[:, None]) == tokenizer.sep).all())
    assert bool((batch["tokentype_ids"][~is_text] == 0).all()) and int(batch["tokentype_ids"].max()) == int(has_head)
    is_masked = batch["loss_mask"] == 1
    assert bool((batch["labels"][~is_masked] == 0).all()) and bool(is_text[is_masked].all())
    share = is_masked.sum() / is_text.sum()
    assert 0.1 < share < 0.16
    hidden = batch["tokens"][is_masked] == tokenizer.mask
    assert 0.7 < hidden.float().mean() < 0.9


def samples_by_text(
    data: MaskedData, cache: str, seed: int, count: int | None = None
) -> tuple[dict[Any, list[tuple[int, ...]]], list[Any]]:
    """Text of a sample -> where it was masked, each time it came; and the first or all samples of the run in order."""
    run = options(data, False, data_cache_path=cache, train_iters=1000, seed=seed)
    train = build_datasets(run, TASK, load_vocabulary(run, TASK).tokenizer).train
    found, order = defaultdict(list), []
    for number in range(count or len(train)):
        first, last, _ = train.sample_index[number]
        sample = train[number]
        found[int(first), int(last)].append(tuple(np.flatnonzero(sample["loss_mask"]).tolist()))
        order.append((int(first), sample["text"].tolist()))
    return dict(found), order


def test_another_epoch_masks_other_tokens_and_a_resumed_run_the_same(roberta_data: MaskedData, tmp_path: Path) -> None:
    ((found, order),) = run_megatron_ranks(samples_by_text, 1, 1, roberta_data, str(tmp_path / "a"), 5)
    epochs = {len(places) for places in found.values()}
    assert max(epochs) >= 2
    again = [places for places in found.values() if len(places) > 1]
    assert sum(len(set(places)) > 1 for places in again) > 0.95 * len(again)
    # A run that goes on builds its dataset anew, perhaps without the files of the first.
    ((_, resumed),) = run_megatron_ranks(samples_by_text, 1, 1, roberta_data, str(tmp_path / "b"), 5, 200)
    assert resumed == order[:200]
    ((_, other),) = run_megatron_ranks(samples_by_text, 1, 1, roberta_data, str(tmp_path / "c"), 6, 200)
    assert other != order[:200]


def batches(data: MaskedData, cache: str, layouts: list[tuple[int, int]]) -> list[list[list[int]]]:
    """The tokens of 16 samples as the ranks of each layout read them, put together in global order."""
    run = options(data, True, data_cache_path=cache)
    vocabulary = load_vocabulary(run, TASK)
    train = build_datasets(run, TASK, vocabulary.tokenizer).train
    found = []
    for micro_batch_size, ranks in layouts:
        layout: Any = SimpleNamespace(micro_batch_size=micro_batch_size, num_workers=0)
        streams = [
            BatchStream(
                train, layout, TASK.make_collate(vocabulary), torch.device("cpu"), consumed_samples=8, num_samples=24,
                rank=rank, data_parallel_size=ranks,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        steps = 16 // (micro_batch_size * ranks)
        found.append([row for _ in range(steps) for stream in streams for row in stream.take_next()["tokens"].tolist()])
    return found


def test_the_order_of_the_samples_does_not_depend_on_the_layout(bert_data: MaskedData, tmp_path: Path) -> None:
    ((first, *others),) = run_megatron_ranks(batches, 1, 1, bert_data, str(tmp_path), [(4, 1), (2, 2), (1, 4), (8, 2)])
    assert len(first) == 16 and all(other == first for other in others)


def test_documents_that_megatrons_index_passes_over_are_known() -> None:
    lengths = np.array([5, 600, 5, 5, 513, 512, 4], np.int32)
    borders = np.array([0, 1, 2, 4, 4, 6, 7], np.int64)  # [5], [600], [5, 5], [], [513, 512], [4]
    assert find_usable_documents(borders, lengths, 1).tolist() == [True, True, True, False, False, True]
    assert find_usable_documents(borders, lengths, 2).tolist() == [False, False, True, False, False, False]


def test_a_part_without_a_sample_is_refused_instead_of_searched_for_ever(bert_data: MaskedData, tmp_path: Path) -> None:
    run = options(bert_data, True, split="999,1", split_weights=(0.999, 0.001, 0.0))
    with pytest.raises(ValueError, match="gives validation 0 of 12 documents, none of which has two sentences or more"):
        load_vocabulary(run, TASK)


def test_a_token_without_a_row_is_an_error() -> None:
    sample = {name: np.array([1, 600]) for name in ("text", "types", "labels", "loss_mask", "padding_mask")}
    with pytest.raises(ValueError, match="the data holds token 600 but the model's vocabulary ends at 511"):
        collate_masked([{**sample, "is_random": 0}], vocab_size=512, pad=0)


def test_the_losses_are_megatrons() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    batch = {"tokens": mask.long(), "padding_mask": mask, "tokentype_ids": mask, "labels": mask.long(),
             "loss_mask": mask, "is_swapped": torch.tensor([1, 0])}  # fmt: skip
    given: dict[str, Any] = {}

    def model(*arguments: Any, **keywords: Any) -> Any:
        given.update(keywords)
        return torch.arange(6.0).view(2, 3), torch.tensor([[0.0, 2.0], [1.0, 1.0]])

    def pretend(num_tokentypes: int, loss: str) -> Any:
        return SimpleNamespace(model=SimpleNamespace(num_tokentypes=num_tokentypes), tempo=SimpleNamespace(loss=loss))

    found = TASK.forward(pretend(2, "off"), model, batch)
    order = (torch.log1p(torch.exp(torch.tensor(-2.0))) + torch.log(torch.tensor(2.0))) / 2
    torch.testing.assert_close(found["lm_loss"], torch.tensor(1.0))
    torch.testing.assert_close(found["sop_loss"], order)
    torch.testing.assert_close(found["loss"], 1.0 + order)
    assert given["tokentype_ids"] is mask and "loss_mask" not in given
    found = TASK.forward(pretend(0, "fused"), lambda *a, **k: (model(*a, **k)[0], None), batch)
    assert set(found) == {"loss"} and given["tokentype_ids"] is None and given["loss_mask"] is mask
    nothing = {**batch, "loss_mask": torch.zeros_like(mask)}
    assert TASK.forward(pretend(0, "off"), lambda *a, **k: (model(*a, **k)[0], None), nothing)["loss"] == 0
