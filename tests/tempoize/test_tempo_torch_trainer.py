"""The Trainer of transformers with TempoCallback: what it trains, and the masks of a run that is resumed."""

from __future__ import annotations

import pytest
import torch
from covering import exhaustive

pytest.importorskip("accelerate", reason="accelerate is not installed; pip install tempo-megatron[test]")

from tiny_models import build
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from tempo_torch import read_step, report_on, tempoize
from tempo_torch.trainer import TempoCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def make_arguments(folder, steps, **more):
    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1,
        "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return TrainingArguments(str(folder), max_steps=steps, **{**settings, **more})


def make_data(samples=40):
    return [{"input_ids": row, "labels": row} for row in torch.arange(samples * 16).view(samples, 16) * 7 % 47 + 3]


def make_model(kind="Bert"):
    return build(kind, vocab_size=50, num_hidden_layers=1, num_attention_heads=2)


class TrainerInOrder(Trainer):
    """Does not shuffle: with accelerate 1.10 a run that is resumed after its first epoch is shuffled otherwise."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def make_trainer(folder, steps, samples=40, **more):
    callbacks = [TempoCallback(norm="recompute")]
    arguments = make_arguments(folder, steps, **more)
    return TrainerInOrder(make_model(), arguments, train_dataset=make_data(samples), callbacks=callbacks)


def read_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# A last batch of one sample, with which the run goes on; 11 batches, of which the last step has fewer; and 20 batches.
@pytest.mark.parametrize(
    ("samples", "accumulation", "half"), [(21, 2, 5), *exhaustive((22, 2, 7), (40, 2, 2), (22, 4, 4))]
)
def test_a_resumed_run_has_the_losses_of_the_run_that_went_on(tmp_path, samples, accumulation, half):
    more = {"samples": samples, "gradient_accumulation_steps": accumulation, "save_steps": half}
    whole = make_trainer(tmp_path / "whole", half + 3, **more)
    assert {entry.operation for entry in report_on(whole.model).replaced} >= {"norm", "dropout", "activation"}
    whole.train()
    make_trainer(tmp_path / "half", half, **more).train()
    resumed = make_trainer(tmp_path / "half", half + 3, **more)
    resumed.train(resume_from_checkpoint=True)
    expected, found = read_losses(whole), read_losses(resumed)
    assert len(expected) == half + 3 and found == pytest.approx(expected, rel=1e-4)
    assert read_step(whole.model) == read_step(resumed.model)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_a_trainer_with_default_arguments_trains_a_language_model(tmp_path, name):
    model = make_model(name)
    data = [{**row, "length": 16} for row in make_data(8)]  # a column that is no argument of a forward
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True, logging_steps=1)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TempoCallback()])
    trainer.train()
    assert len(read_losses(trainer)) == 2 and "loss" in {entry.operation for entry in report_on(model).replaced}


def test_a_loss_of_ones_own_finds_the_logits(tmp_path):
    def smoothed(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), label_smoothing=0.1)

    found = []
    for callbacks in ([TempoCallback(dropout="off", attention="off", norm="recompute")], []):
        model = make_model("Llama")
        model.load_state_dict({key: torch.full_like(value, 0.02) for key, value in model.state_dict().items()})
        arguments = make_arguments(tmp_path, 2)
        more = {"compute_loss_func": smoothed, "callbacks": callbacks}
        trainer = Trainer(model, arguments, train_dataset=make_data(), **more)
        trainer.train()
        found.append(read_losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_model_init_that_tempoizes_trains_and_one_that_does_not_is_refused(tmp_path):
    more = {"args": make_arguments(tmp_path, 1), "train_dataset": make_data(), "callbacks": [TempoCallback()]}
    trainer = Trainer(model_init=lambda: tempoize(make_model(), seed=1), **more)
    trainer.train()
    assert len(read_losses(trainer)) == 1 and read_step(trainer.model) == (2, 2)
    with pytest.raises(ValueError, match="the Trainer has made a new model, as with model_init, which TempoCallback"):
        Trainer(model_init=lambda: make_model(), **more).train()


def test_liger_beside_tempo_is_refused(tmp_path):
    arguments = make_arguments(tmp_path, 1)
    arguments.use_liger_kernel = True
    with pytest.raises(ValueError, match="use_liger_kernel is set together with TempoCallback, and both replace"):
        TempoCallback().on_init_end(arguments, None, None, make_model())
