"""SFTTrainer of trl with TempoCallback: the losses, and what it reads from the logits, of stock."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("datasets", reason="datasets is not installed; trl needs it; pip install trl")
pytest.importorskip("trl", reason="trl is not installed; pip install trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tempo_torch.trainer import TempoCallback

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}


def train(folder, callbacks):
    words = {f"w{number}": number for number in range(96)}
    tokenizer = Tokenizer(models.WordLevel({**words, "<pad>": 96, "<eos>": 97, "<unk>": 98}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    torch.manual_seed(0)
    arguments = SFTConfig(
        output_dir=str(folder), max_steps=3, report_to=[], use_cpu=True, bf16=False, logging_steps=1, disable_tqdm=True,
        per_device_train_batch_size=2, save_strategy="no", dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = SFTTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=100, **SIZES)),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[(i * 7 + j) % 90 for j in range(16)] for i in range(16)]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names),
        callbacks=callbacks,
    )
    trainer.train()
    return [
        entry[name]
        for entry in trainer.state.log_history
        if "loss" in entry
        for name in ("loss", "mean_token_accuracy")
    ]


def test_sft_has_the_losses_and_accuracies_of_stock(tmp_path):
    found, expected = train(tmp_path / "ours", [TempoCallback(norm="recompute")]), train(tmp_path / "stock", [])
    assert len(expected) == 6 and found == pytest.approx(expected, rel=1e-3)
