"""Times a training step on the CPU, stock beside Tempo: forward, backward and AdamW of the same GPT and batch.

python benchmarks/cpu_step.py                           # gpt2_124m, s 512: appends to benchmarks/results/cpu/step.jsonl
python benchmarks/cpu_step.py --stock-attention sdpa    # stock with torch's scaled_dot_product_attention in its slot

Both models live in one process and their steps alternate; the ratio of the medians is the result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measurements import DTYPES, RESULTS, add_model_arguments, describe_cpu_run, record_measurement
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from tqdm import tqdm

from tempo_megatron import TempoConfig, cpu, tempo_block_spec, tempoize_embedding, tempoize_loss
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import make_shape
from tempo_megatron.slots import dropout_rng


class SdpaAttention(torch.nn.Module):
    """torch's attention in the slot of Megatron's DotProductAttention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns causal attention [s, b, h] of q, k, v [s, b, a, d]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return out.permute(2, 0, 1, 3).flatten(2)


class Job:
    """One model, its optimizer and its batch."""

    def __init__(self, sizes: dict[str, Any], tempo_config: TempoConfig, args: argparse.Namespace) -> None:
        shape = make_shape(**sizes, attention_dropout=args.dropout, hidden_dropout=args.dropout)
        config = build_transformer_config(shape, dtype=DTYPES[args.dtype])
        torch.manual_seed(1234)
        self.model = GPTModel(
            config,
            tempo_block_spec(config, tempo_config),
            vocab_size=args.vocab_size,
            max_sequence_length=args.seq_length,
            share_embeddings_and_output_weights=True,
        ).to(config.params_dtype)
        tempoize_embedding(self.model, tempo_config)
        tempoize_loss(self.model, tempo_config)
        if tempo_config.attention == "off" and args.stock_attention == "sdpa":
            for layer in self.model.decoder.layers:
                layer.self_attention.core_attention = SdpaAttention(args.dropout)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(4321)
        self.tokens = torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length))
        self.loss_mask = torch.ones(self.tokens.shape)
        self.positions = torch.arange(args.seq_length).expand(args.micro_batch_size, -1)
        self.mask = None
        if tempo_config.attention == "off":
            self.mask = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool).triu(1)
        self.steps = 0

    def step(self) -> float:
        """Runs one step and returns its seconds."""
        start = time.perf_counter()
        dropout_rng.set_micro_batch(1234, self.steps * self.tokens.size(0))
        # As Megatron's pretrain_gpt.py: with loss_mask the fused loss makes its gradients in forward.
        losses = self.model(self.tokens, self.positions, self.mask, labels=self.tokens, loss_mask=self.loss_mask)
        ((losses * self.loss_mask).sum() / self.loss_mask.sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return time.perf_counter() - start


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns medians of alternating steps, after two of each that do not count."""
    sizes = json.loads(Path(args.model).read_text(encoding="utf-8"))
    sizes["num_layers"] = args.num_layers or sizes["num_layers"]
    cpu.use_cpu()
    with simulate_layout(1):
        model_parallel_cuda_manual_seed(1234)
        jobs = {"stock": Job(sizes, TempoConfig.off(), args), "tempo": Job(sizes, TempoConfig(), args)}
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        for round_number in tqdm(range(args.rounds + 2), unit="round", disable=None):
            for name, job in jobs.items():
                took = job.step()
                if round_number >= 2:
                    seconds[name].append(took)
    stock_ms, tempo_ms = (1e3 * statistics.median(seconds[name]) for name in ("stock", "tempo"))
    return {
        "model": Path(args.model).stem,
        "num_layers": sizes["num_layers"],
        "shape": {"s": args.seq_length, "b": args.micro_batch_size, "h": sizes["hidden_size"], "v": args.vocab_size},
        "dtype": args.dtype,
        "p": args.dropout,
        "stock_attention": args.stock_attention,
        "stock_step_ms": round(stock_ms, 1),
        "tempo_step_ms": round(tempo_ms, 1),
        "tempo_over_stock": round(tempo_ms / stock_ms, 4),
        "rounds": args.rounds,
        **describe_cpu_run(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_model_arguments(parser, micro_batch_size=4)
    parser.add_argument("--num-layers", type=int, help="fewer layers, for a quick look (default the model's)")
    parser.add_argument("--dropout", type=float, default=0.1, help="default %(default)s")
    parser.add_argument("--stock-attention", choices=("unfused", "sdpa"), default="unfused", help="default %(default)s")
    record_measurement(parser, measure, RESULTS / "cpu" / "step.jsonl", rounds=5)


if __name__ == "__main__":
    main()
