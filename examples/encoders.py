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

STEPS, BATCH, LENGTH = 6, 4, 256
SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
Made = tuple[nn.Module, list[Any], Callable[[Any, Any], Tensor]]


def make_text_model(name: str) -> Made:
    import transformers

    text = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "max_position_embeddings": LENGTH + PAD + 1}
    if name == "modernbert":
        rates = {"attention_dropout": 0.1, "mlp_dropout": 0.1, "embedding_dropout": 0.1}
        config = transformers.ModernBertConfig(
            **SIZES, **text, **rates, bos_token_id=0, eos_token_id=0, cls_token_id=0, sep_token_id=0
        )
        model: Any = transformers.ModernBertForMaskedLM(config)
    else:
        kind = "Bert" if name == "bert" else "Roberta"
        config = getattr(transformers, f"{kind}Config")(**SIZES, **text, **DROPOUT)
        model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    data = Bytes(STEPS * BATCH, LENGTH, masked=True)
    batches = []
    for step in range(STEPS):
        samples = [data[index] for index in range(step * BATCH, (step + 1) * BATCH)]
        batches.append({key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
        lengths = torch.full((BATCH, 1), LENGTH)
        lengths[-2:] -= 32  # the last rows are padded
        batches[-1]["attention_mask"] = (torch.arange(LENGTH) < lengths).long()
    return model, batches, lambda model, batch: model(**batch).loss


def make_images(size: int = 128) -> list[tuple[Tensor, Tensor]]:
    """Makes waves of ten directions, which are their classes."""
    generator = torch.Generator().manual_seed(1)
    grid = torch.linspace(0, 8 * math.pi, size)
    batches = []
    for _ in range(STEPS):
        labels = torch.randint(0, 10, (BATCH,), generator=generator)
        angles = (labels * math.pi / 10).view(-1, 1, 1)
        waves = torch.sin(angles.cos() * grid.view(1, -1, 1) + angles.sin() * grid.view(1, 1, -1))
        batches.append((waves.unsqueeze(1).expand(-1, 3, -1, -1).contiguous(), labels))
    return batches


def make_image_model(name: str) -> Made:
    if name == "timm":
        import timm

        model: Any = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=128,
            patch_size=8,
            num_classes=10,
            depth=2,
            drop_rate=0.1,
            proj_drop_rate=0.1,
            attn_drop_rate=0.1,
        )
        return model, make_images(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    import transformers

    if name == "vit":
        config: Any = transformers.ViTConfig(**SIZES, **DROPOUT, image_size=128, patch_size=8, num_labels=10)
        model = transformers.ViTForImageClassification(config)
    else:
        config = transformers.Dinov2Config(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            **DROPOUT,
            image_size=128,
            patch_size=8,
            num_labels=10,
        )
        model = transformers.Dinov2ForImageClassification(config)
    return model, make_images(), lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss


class Recogniser(nn.Module):
    """A Conformer with a classifier of the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        from torchaudio.models import Conformer

        self.encoder = Conformer(80, num_heads=4, ffn_dim=320, num_layers=2, depthwise_conv_kernel_size=31, dropout=0.1)
        self.head = nn.Linear(80, 10)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Logits [b, 10] of features [b, t, 80]."""
        encoded, _ = self.encoder(features, lengths)
        return self.head(encoded.mean(1))  # type: ignore[no-any-return]

    def gradient_checkpointing_enable(self) -> None:
        for layer in self.encoder.conformer_layers:
            run = layer.forward
            layer.forward = lambda *args, run=run: checkpoint(run, *args, use_reentrant=False)


def make_sound_model(_: str) -> Made:
    lengths = torch.full((BATCH,), LENGTH)
    batches = [(F.interpolate(images[:, :1], (LENGTH, 80)).squeeze(1), labels) for images, labels in make_images()]
    return Recogniser(), batches, lambda model, batch: F.cross_entropy(model(batch[0], lengths), batch[1])


MODELS: dict[str, tuple[str, Callable[[str], Made]]] = {
    "bert": ("transformers", make_text_model),
    "roberta": ("transformers", make_text_model),
    "modernbert": ("transformers", make_text_model),
    "vit": ("transformers", make_image_model),
    "dinov2": ("transformers", make_image_model),
    "timm": ("timm", make_image_model),
    "conformer": ("torchaudio", make_sound_model),
}
"""Models -> the package that each needs, and what makes it."""


def compare_model(name: str) -> list[Row]:
    make = MODELS[name][1]
    torch.manual_seed(0)
    _, batches, compute_loss = make(name)

    def build(seed: int, *, tempo: bool = False, checkpointing: bool = False) -> nn.Module:
        torch.manual_seed(seed)
        model: Any = make(name)[0]
        if checkpointing:
            if hasattr(model, "set_grad_checkpointing"):
                model.set_grad_checkpointing()
            else:
                model.gradient_checkpointing_enable()
        stock: nn.Module = model
        return tempoize(stock, seed=seed) if tempo else stock

    return compare(build, compute_loss, batches)


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
