"""Supervised fine-tuning with LoRA and lora_dropout 0.05 by trl's SFTTrainer: one callback makes it Tempo's.

    python examples/sft_lora.py                       # the table: stock, Tempo, Tempo + checkpointing
    python examples/sft_lora.py --model llama --packing
    python examples/sft_lora.py --save runs/sft       # trains; started again it goes on from the last checkpoint

Needs pip install tempo-megatron trl peft; downloads nothing: the text is Python's own, and makes
the tokenizer.
"""

from __future__ import annotations

import argparse
import ast
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from measured import SEEDS, WAYS, Row, format_table, measure_step
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from tempo_torch.trainer import TempoCallback

STEPS, BATCH, LENGTH, VOCAB_SIZE = 4, 2, 256, 1024
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@functools.cache
def read_documents() -> list[str]:
    """Reads the docstrings of Python's own library, as prompts with their code."""
    documents = []
    for file in sorted((Path(ast.__file__).parent / "asyncio").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        functions = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef))
        documents += [ast.get_source_segment(text, each) or "" for each in functions if ast.get_docstring(each)]
    return documents


def make_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        documents, vocab_size=VOCAB_SIZE, special_tokens=["<pad>", "<eos>"], show_progress=False
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(shape: str, seed: int) -> Any:
    set_seed(seed)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "intermediate_size": 512, "bos_token_id": 1, "eos_token_id": 1}
    if shape == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, **more))
    return Qwen3ForCausalLM(Qwen3Config(head_dim=32, **sizes, **more))


def make_trainer(options: argparse.Namespace, folder: str, seed: int, tempo: bool, checkpointing: bool) -> SFTTrainer:
    documents = read_documents()
    arguments = SFTConfig(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=2, seed=seed,
        learning_rate=5e-3, max_length=LENGTH, packing=options.packing, gradient_checkpointing=checkpointing,
        save_steps=STEPS // 2, save_strategy="steps" if options.save else "no", logging_steps=STEPS // 2,
        use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    return SFTTrainer(
        make_model(options.model, seed),
        arguments,
        train_dataset=Dataset.from_dict({"text": documents}),
        processing_class=make_tokenizer(documents),
        peft_config=LoraConfig(r=16, lora_dropout=options.lora_dropout, target_modules=LINEARS),
        callbacks=[TempoCallback()] if tempo else [],
    )


def measure(options: argparse.Namespace, name: str, *, tempo: bool = False, checkpointing: bool = False) -> Row:
    losses = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(options, folder, seed, tempo, checkpointing)
            losses.append(trainer.train().training_loss)
    model = trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return Row(name, *measure_step(lambda: trainer.compute_loss(model, dict(batch))), tuple(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small model by trl's SFTTrainer with LoRA and Tempo.")
    parser.add_argument("--model", choices=["qwen3", "llama"], default="qwen3", help="the shape of the model")
    parser.add_argument("--packing", action="store_true", help="put several documents in a row")
    parser.add_argument("--lora-dropout", type=float, default=0.05, help="of the inputs of the adapters")
    parser.add_argument("--save", help="train with Tempo and save here; started again, go on from the last checkpoint")
    options = parser.parse_args()
    if options.save:
        trainer = make_trainer(options, options.save, 1, tempo=True, checkpointing=False)
        before = get_last_checkpoint(options.save) if Path(options.save).is_dir() else None
        trainer.train(resume_from_checkpoint=before)
        print(f"step {trainer.state.global_step}, from {before or 'the beginning'}")
        return
    rows = [measure(options, name, **how) for name, how in WAYS.items()]
    print(format_table(rows))


if __name__ == "__main__":
    main()
