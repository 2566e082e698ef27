"""A BERT with random weights learns masked bytes with the Trainer of transformers, and keeps less for backward.

    python examples/bert_trainer.py

Needs pip install tempo-megatron transformers accelerate; downloads nothing.
"""

from __future__ import annotations

import tempfile

from text_bytes import PAD, VOCAB_SIZE, Bytes
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

from tempo_torch import report_on
from tempo_torch.trainer import TempoCallback

STEPS, BATCH, LENGTH = 32, 8, 128


def main() -> None:
    set_seed(1)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForMaskedLM(
        BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, pad_token_id=PAD, **sizes)
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=2e-3, logging_steps=STEPS // 4,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        data = Bytes(STEPS * BATCH, LENGTH, masked=True)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TempoCallback()])
        print(report_on(model))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {float(losses[0]):.3f} at first, {float(losses[-1]):.3f} at last")


if __name__ == "__main__":
    main()
