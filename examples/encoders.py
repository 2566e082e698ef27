"""Encoders with dropout: BERT, RoBERTa, ModernBERT, ViT and DINOv2, a ViT of timm, and torchaudio's Conformer.

    python examples/encoders.py                  # a table for each of those whose package is installed
    python examples/encoders.py bert dinov2

Trains each stock, with Tempo, and with Tempo and checkpointing, from random weights. Needs pip install tempo-megatron
transformers, and timm and torchaudio for their models; downloads nothing. The text is Python's own, the images and the
sound are waves. `examples/bert_trainer.py` does the same in the Trainer.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from measured import Row, compare, format_table
from text_bytes import PAD, VOCAB_SIZE, Bytes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tempo_torch import tempoize

STEPS, BATCH, LENGTH, CLASSES = 6, 4, 256, 10
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
Batch = dict[str, Tensor]


def make_text_model(name: str) -> Any:
    import transformers

    text = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "max_position_embeddings": LENGTH + PAD + 1}
    if name == "modernbert":
        rates = {"attention_dropout": 0.1, "mlp_dropout": 0.1, "embedding_dropout": 0.1}
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**SIZES, **text, **rates, **ids))
    kind = "Bert" if name == "bert" else "Roberta"
    config = getattr(transformers, f"{kind}Config")(**SIZES, **text, **DROPOUT)
    return getattr(transformers, f"{kind}ForMaskedLM")(config)


def make_image_model(name: str) -> Any:
    if name == "timm":
        import timm

        rates = dict.fromkeys(("drop_rate", "proj_drop_rate", "attn_drop_rate"), 0.1)
        sizes = {"img_size": 128, "patch_size": 8, "num_classes": CLASSES, "depth": 2}
        return timm.create_model("vit_tiny_patch16_224", **sizes, **rates)
    import transformers

    sizes = SIZES | {"image_size": 128, "patch_size": 8, "num_labels": CLASSES}
    if name == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **DROPOUT))
    del sizes["intermediate_size"]
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**sizes, **DROPOUT))


class Recogniser(nn.Module):
    """torchaudio's Conformer with a classifier of the mean over time."""

    def __init__(self, _: str) -> None:
        super().__init__()
        from torchaudio.models import Conformer

        self.encoder = Conformer(80, num_heads=4, ffn_dim=320, num_layers=2, depthwise_conv_kernel_size=31, dropout=0.1)
        self.head = nn.Linear(80, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [b, 10] of features [b, t, 80]."""
        encoded, _ = self.encoder(features, torch.full((features.size(0),), features.size(1)))
        return self.head(encoded.mean(1))  # type: ignore[no-any-return]

    def gradient_checkpointing_enable(self) -> None:
        for layer in self.encoder.conformer_layers:
            run = layer.forward
            layer.forward = lambda *args, run=run: checkpoint(run, *args, use_reentrant=False)


def make_text() -> list[Batch]:
    """Makes batches of masked text. Their last rows are padded."""
    lengths = torch.full((BATCH, 1), LENGTH)
    lengths[-2:] -= 32
    is_token = (torch.arange(LENGTH) < lengths).long()
    return [
        each | {"attention_mask": is_token} for each in Bytes(STEPS * BATCH, LENGTH, masked=True).list_batches(BATCH)
    ]


def make_images(size: int = 128) -> list[Batch]:
    """Makes waves of ten directions, which are their classes."""
    generator = torch.Generator().manual_seed(1)
    grid = torch.linspace(0, 8 * math.pi, size)
    batches = []
    for _ in range(STEPS):
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        angles = (labels * math.pi / CLASSES).view(-1, 1, 1)
        waves = torch.sin(angles.cos() * grid.view(1, -1, 1) + angles.sin() * grid.view(1, 1, -1))
        batches.append({"pixel_values": waves.unsqueeze(1).expand(-1, 3, -1, -1).contiguous(), "labels": labels})
    return batches


def make_sounds() -> list[Batch]:
    """Makes 80 features at 256 times of the same waves."""
    return [
        {"features": F.interpolate(each["pixel_values"][:, :1], (LENGTH, 80)).squeeze(1), "labels": each["labels"]}
        for each in make_images()
    ]


def compute_loss(model: Any, batch: Batch) -> Tensor:
    if hasattr(model, "config"):  # of transformers
        loss: Tensor = model(**batch).loss
        return loss
    inputs, labels = batch.values()
    return F.cross_entropy(model(inputs), labels)


MODELS: dict[str, tuple[str, Callable[[str], Any], Callable[[], list[Batch]]]] = {
    "bert": ("transformers", make_text_model, make_text),
    "roberta": ("transformers", make_text_model, make_text),
    "modernbert": ("transformers", make_text_model, make_text),
    "vit": ("transformers", make_image_model, make_images),
    "dinov2": ("transformers", make_image_model, make_images),
    "timm": ("timm", make_image_model, make_images),
    "conformer": ("torchaudio", Recogniser, make_sounds),
}
"""Models -> the package that each needs, what makes it, and what makes its batches."""


def compare_model(name: str) -> list[Row]:
    _, make_model, make_batches = MODELS[name]

    def build(seed: int, *, tempo: bool = False, checkpointing: bool = False) -> Any:
        torch.manual_seed(seed)
        model = make_model(name)
        if checkpointing:
            is_timms = hasattr(model, "set_grad_checkpointing")
            model.set_grad_checkpointing() if is_timms else model.gradient_checkpointing_enable()
        return tempoize(model, seed=seed) if tempo else model

    return compare(build, compute_loss, make_batches())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train small encoders stock and with Tempo, and compare.")
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="by default all that are installed")
    for name in parser.parse_args().models or MODELS:
        if importlib.util.find_spec(MODELS[name][0]) is None:
            print(f"{name}: {MODELS[name][0]} is not installed; pip install {MODELS[name][0]}\n")
            continue
        print(f"{name}\n\n{format_table(compare_model(name))}\n", flush=True)


if __name__ == "__main__":
    main()
