"""Measures time and kept bytes of one GPT layer on the CPU: stock, Tempo's choices, and torch.compile.

python benchmarks/cpu_layer.py                  # h 768, s 512, b 2: appends to benchmarks/results/cpu_layer.jsonl

Stock is Megatron's layer with torch's scaled_dot_product_attention, without dropout, in the attention slot. The same
layer in plain torch is compiled with several activation memory budgets. In Megatron's own layer a budget changes
nothing, because its linears are autograd.Functions. All of them alternate in one process, and the result is the ratio
of the medians to stock's. sbh is bytes per token and hidden unit, in float32 halved to compare with bf16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from cpu_step import SdpaAttention
from measurements import DTYPES, RESULTS, add_output_argument, append_records, describe_cpu_run
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from tqdm import tqdm

from tempo_kernels.philox import eager as philox
from tempo_megatron import TempoConfig, cpu, tempo_block_spec
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.kept.ledger import measure_run
from tempo_megatron.memory.run import Run
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.slots import dropout_rng

HIDDEN_DROPOUT = 0.1
HEAD_DIM = 64
CHOICES = {
    "tempo": TempoConfig(),
    "tempo, recompute": TempoConfig(activation="recompute", norm="recompute"),
    "tempo, linear_qkv": TempoConfig(linear_qkv="recompute"),
    "tempo, attention": TempoConfig(attention="recompute"),
    "tempo, linear_fc1": TempoConfig(activation="recompute", linear_fc1="recompute"),
}
BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4)


class Rival(NamedTuple):
    """A layer as a function, and the storages of its parameters, which do not count as kept."""

    run: Callable[[Tensor], Tensor]
    layer: torch.nn.Module


def make_layer(shape: ModelShape, config: TempoConfig, dtype: torch.dtype) -> torch.nn.Module:
    """Makes Megatron's layer with Tempo's modules, or the stock layer with torch's attention."""
    transformer_config = build_transformer_config(shape, dtype=dtype)
    block = TransformerBlock(transformer_config, tempo_block_spec(transformer_config, config)).to(dtype)
    layer: torch.nn.Module = block.layers[0]
    if config.attention == "off":
        layer.self_attention.core_attention = SdpaAttention(0.0)
    return layer.train()


def make_rivals(shape: ModelShape, dtype: torch.dtype) -> Iterator[tuple[str, Rival]]:
    """Yields stock, Tempo's choices, and plain torch under torch.compile."""
    stock = make_layer(shape, TempoConfig.off(), dtype)
    yield "stock", Rival(lambda x: stock(x, None)[0], stock)
    for name, config in CHOICES.items():
        layer = make_layer(shape, config, dtype)
        yield name, Rival(lambda x, layer=layer: layer(x, None)[0], layer)
    for budget in BUDGETS:
        # A class of its own: torch reuses compiled code for all modules of a class, whatever the budget.
        layer = type(f"Layer{budget}", (PlainLayer,), {})(shape.hidden_size).to(dtype)
        yield f"torch.compile, budget {budget}", Rival(compile_layer(layer, budget), layer)


class PlainLayer(torch.nn.Module):
    """The same layer in plain torch, of hidden states [s, b, h], which torch.compile can partition freely."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (torch.nn.LayerNorm(hidden_size) for _ in range(2))
        self.qkv, self.proj = torch.nn.Linear(hidden_size, 3 * hidden_size), torch.nn.Linear(hidden_size, hidden_size)
        self.fc1, self.fc2 = (
            torch.nn.Linear(hidden_size, 4 * hidden_size), torch.nn.Linear(4 * hidden_size, hidden_size)
        )  # fmt: skip
        self.attention = SdpaAttention(0.0)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD_DIM))
        x = x + F.dropout(self.proj(self.attention(*heads.unbind(2))), HIDDEN_DROPOUT)
        return x + F.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))), HIDDEN_DROPOUT)


def compile_layer(layer: torch.nn.Module, budget: float) -> Callable[[Tensor], Tensor]:
    """Makes a function that is compiled at its first call, with this memory budget."""
    compiled = torch.compile(layer, dynamic=False)

    def run(x: Tensor) -> Tensor:
        functorch_config.activation_memory_budget = budget
        out: Tensor = compiled(x)
        return out

    return run


def find_sbh(rival: Rival, x: Tensor) -> float:
    """Measures what autograd holds after forward, without the layer's parameters."""
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        rival.run(x).sum().backward()
    parameters = {p.untyped_storage().data_ptr() for p in rival.layer.parameters()}
    num_bytes = sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in parameters)
    return num_bytes / x.numel() * 2 / x.element_size()


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one record per rival."""
    dtype = DTYPES[args.dtype]
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.hidden_size // 64,
    }
    lengths = {"seq_length": args.seq_length, "max_position_embeddings": args.seq_length}
    sizes |= {"family": "gpt", "vocab_size": 512}
    shape = make_shape(**sizes, **lengths, attention_dropout=0.0, hidden_dropout=HIDDEN_DROPOUT)
    cpu.use_cpu()
    philox.DRAWS_BEFORE_COMPILING = 0  # as in a run of more than a few steps
    seconds: dict[str, list[float]] = defaultdict(list)
    sbh: dict[str, float] = {}
    with simulate_layout(1):
        model_parallel_cuda_manual_seed(1234)
        rivals = dict(make_rivals(shape, dtype))
        x = torch.randn(args.seq_length, args.micro_batch_size, args.hidden_size, dtype=dtype, requires_grad=True)
        grad_out = torch.randn_like(x)
        for round_number in tqdm(range(args.rounds + 2), unit="round", disable=None):
            for name, rival in rivals.items():
                dropout_rng.set_micro_batch(1234, round_number)
                start = time.perf_counter()
                rival.run(x).backward(grad_out)
                if round_number >= 2:
                    seconds[name].append(time.perf_counter() - start)
        for name, rival in rivals.items():
            if name not in CHOICES:
                sbh[name] = find_sbh(rival, x)
    for name, config in CHOICES.items():
        run = Run(model=shape, tempo=config, micro_batch_size=args.micro_batch_size, dtype=dtype)
        sbh[name] = measure_run(run).layer_sbh * 2 / x.element_size()
    stock_ms = 1e3 * statistics.median(seconds["stock"])
    for name, took in seconds.items():
        took_ms = 1e3 * statistics.median(took)
        yield {
            "rival": name,
            "shape": {"s": args.seq_length, "b": args.micro_batch_size, "h": args.hidden_size},
            "dtype": args.dtype,
            "ms": round(took_ms, 1),
            "over_stock": round(took_ms / stock_ms, 3),
            "sbh": round(sbh[name], 2),
            "rounds": args.rounds,
            **describe_cpu_run(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seq-length", type=int, default=512, help="default %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="default %(default)s")
    parser.add_argument("--hidden-size", type=int, default=768, help="a multiple of 64; default %(default)s")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="default %(default)s")
    add_output_argument(parser, RESULTS / "cpu_layer.jsonl")
    args = parser.parse_args()
    records = list(measure(args))
    append_records(args.output, records)
    for record in records:
        print(
            f"{record['rival']:28}{record['ms']:9.1f} ms {record['over_stock']:7.3f} of stock {record['sbh']:8.2f} sbh"
        )


if __name__ == "__main__":
    main()
