"""Trains a small BERT with random weights on masked bytes, stock and with Tempo, for several seeds.

    python benchmarks/huggingface_finetune.py

Writes benchmarks/results/cpu/huggingface_finetune.jsonl: a line per run with its losses. Both sides of a seed start from
the same weights and see the same samples; their dropout masks differ, as those of two seeds do. It fails if the mean
curves of stock and Tempo differ by more than the stock seeds do.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from text_bytes import PAD, VOCAB_SIZE, Bytes  # noqa: E402
from transformers import BertConfig, BertForMaskedLM  # noqa: E402

from tempo_torch import tempoize  # noqa: E402

RESULTS = ROOT / "benchmarks/results/cpu/huggingface_finetune.jsonl"
STEPS, BATCH, LENGTH, SEEDS, WINDOW = 200, 8, 64, (1, 2, 3), 20
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}


def train(seed: int, is_tempo: bool) -> list[float]:
    """Trains and returns the loss of each step."""
    torch.manual_seed(seed)
    model = BertForMaskedLM(
        BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH, pad_token_id=PAD, **SIZES)
    ).train()
    if is_tempo:
        tempoize(model, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = Bytes(STEPS * BATCH, LENGTH, masked=True)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    losses = []
    for step in range(STEPS):
        samples = [data[index] for index in order[step * BATCH : (step + 1) * BATCH]]
        loss = model(**{name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def smooth(losses: list[float]) -> torch.Tensor:
    """Returns means over windows of steps."""
    return torch.tensor(losses, dtype=torch.float64).view(-1, WINDOW).mean(1)


def find_distance(records: list[dict]) -> float:
    """Returns the largest distance of Tempo's mean curve from stock's, relative to the stock seeds' spread there."""
    curves = {
        kind: torch.stack([smooth(r["losses"]) for r in records if r["kind"] == kind]) for kind in ("stock", "Tempo")
    }
    spread = curves["stock"].amax(0) - curves["stock"].amin(0)
    return ((curves["Tempo"].mean(0) - curves["stock"].mean(0)).abs() / spread).amax().item()


def main() -> None:
    warnings.simplefilter("ignore")
    environment = {"torch": torch.__version__, "transformers": transformers.__version__, "device": platform.machine()}
    records = []
    for seed in SEEDS:
        for kind in ("stock", "Tempo"):
            losses = train(seed, kind == "Tempo")
            records.append({"kind": kind, "seed": seed, "losses": [round(loss, 5) for loss in losses], **environment})
            print(f"{kind}, seed {seed}: loss {losses[0]:.3f} -> {smooth(losses)[-1]:.3f}", flush=True)
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    distance = find_distance(records)
    print(f"the mean curves differ by at most {distance:.2f} of the spread of the stock seeds")
    if distance > 1:
        raise SystemExit("the curves differ by more than the seeds do")


if __name__ == "__main__":
    main()
