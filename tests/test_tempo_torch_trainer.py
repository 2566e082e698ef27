"""The Trainer of transformers with TempoCallback: what it trains, and the masks of a run that is resumed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed; pip install tempo-megatron[test]")
pytest.importorskip("accelerate", reason="accelerate is not installed; pip install tempo-megatron[test]")

from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

from tempo_torch import report_on
from tempo_torch.trainer import TempoCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def make_trainer(folder, steps):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(vocab_size=50, max_position_embeddings=16, **sizes))
    ids = torch.arange(40 * 16).view(40, 16) * 7 % 47 + 3
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        logging_steps=1, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in ids]
    return Trainer(model, arguments, train_dataset=data, callbacks=[TempoCallback(norm="recompute")])


def test_a_resumed_run_has_the_losses_of_the_run_that_went_on(tmp_path):
    whole = make_trainer(tmp_path / "whole", 4)
    assert {entry.operation for entry in report_on(whole.model).replaced} >= {"norm", "dropout", "activation"}
    whole.train()
    make_trainer(tmp_path / "half", 2).train()
    resumed = make_trainer(tmp_path / "half", 4)
    resumed.train(resume_from_checkpoint=True)
    expected, found = (
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (whole, resumed)
    )
    assert len(expected) == 4 and found == pytest.approx(expected, rel=1e-4)


def test_a_trainer_without_a_model_is_refused(tmp_path):
    callback = TempoCallback()
    with pytest.raises(ValueError, match="the Trainer has no model when it is made, as with model_init"):
        callback.on_init_end(TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), None, None)
