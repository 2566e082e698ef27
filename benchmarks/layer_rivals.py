"""Measures one GPT layer on a CPU against what a user would pick instead: kept bytes, peak, time, gradient error.

python benchmarks/layer_rivals.py       # what benchmarks/results/cpu/layer.jsonl does not have yet

- Stock is Megatron's layer: its own unfused attention, that recomputed (selective), all recomputed (full), or torch's
  scaled_dot_product_attention in its slot, which is the base that every other one alternates with.
- The same layer in plain torch runs under torch.compile with several activation memory budgets, which change nothing
  in Megatron's own layer, because its linears are autograd.Functions; and under torch's checkpoint, whole, or with a
  policy that saves the products (as torchtitan's, all or every second one, and attention).
- The paper's own choices (arXiv 2210.10246) in plain torch: GELU in place with a byte mask, LayerNorm in place, the
  output of softmax, dropout with a byte mask.
- Tempo's forms in Megatron's layer.
- Four of Megatron's layers beside four of stock's, all figures a layer: a plan for half of what Tempo can save, and
  everything sent to the host. On a CPU the host is the same memory: a pool that is there before, and is not counted,
  and threads that copy, whose CPU seconds are.

All have the same weights. Kept is what torch's allocator still holds of a forward, without the output, in bytes per
token and hidden unit (sbh); peak is the most that forward and backward hold, in the same unit; time is CPU seconds of
forward and backward, as the ratio of medians to stock's. The error is that of the gradient of x and of every parameter
without dropout, the largest of the norms of (gradient - exact) / exact, exact in float64.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from allocated import measure_held
from cpu_step import SdpaAttention
from measurements import DTYPES, RESULTS, measure_missing
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tempo_kernels.activation.inverse import INVERSES, Y_MAX, evaluate
from tempo_kernels.norm import layer_norm
from tempo_kernels.offload import Engine, Offload, ThreadDevice, move_all
from tempo_megatron import TempoConfig, cpu, tempo_block_spec
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.plan.gpu import read_gpu
from tempo_megatron.memory.plan.planner import Planner, PlanRequest
from tempo_megatron.memory.run import OptimizerSettings, Run
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.slots import dropout_rng

OUTPUT = RESULTS / "cpu" / "layer.jsonl"
HIDDEN_DROPOUT = 0.1
HEAD_DIM = 64
BASE = "stock, SDPA"
TEMPO = {
    "Tempo, in place": TempoConfig(),
    "Tempo, recompute": TempoConfig(activation="recompute", norm="recompute"),
    "Tempo, in place + linear_qkv": TempoConfig(linear_qkv="recompute"),
    "Tempo, recompute + linear_fc1": TempoConfig(activation="recompute", linear_fc1="recompute"),
}
STACKED = {"Tempo, planned": "plan", "Tempo, in place, offload": "offload"}
NUM_STACKED = 4
BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3)
# Of Megatron's layer, and of the plain one: the same weights.
NAMES = {
    "input_layernorm": "norm1",
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "proj",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
}
_PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Sizes(NamedTuple):
    """s tokens of b samples, h hidden units, in one dtype; the alternations that are measured."""

    s: int
    b: int
    h: int
    dtype: torch.dtype
    rounds: int


class Rival(NamedTuple):
    """Layers, and how they are run."""

    layers: list[Any]
    run: Callable[[Tensor], Tensor]

    def name_parameters(self) -> dict[str, Tensor]:
        """By the names of the plain layer, and of several layers their number."""
        found = {}
        for number, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                module, _, kind = name.rpartition(".")
                prefix = f"{number}." if len(self.layers) > 1 else ""
                found[f"{prefix}{NAMES.get(module, module)}.{kind}"] = parameter
        return found


class Stack(torch.nn.Module):
    """Megatron's layers after one another."""

    def __init__(self, layers: list[Any], mask: Tensor | None) -> None:
        super().__init__()
        self.layers, self.mask = torch.nn.ModuleList(layers), mask

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.mask)[0]
        return x


class PlainLayer(torch.nn.Module):
    """The layer in plain torch, of hidden states [s, b, h], with q, k and v of a head side by side as in Megatron."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (torch.nn.LayerNorm(hidden_size) for _ in range(2))
        self.qkv, self.proj = torch.nn.Linear(hidden_size, 3 * hidden_size), torch.nn.Linear(hidden_size, hidden_size)
        self.fc1, self.fc2 = (
            torch.nn.Linear(hidden_size, 4 * hidden_size), torch.nn.Linear(4 * hidden_size, hidden_size)
        )  # fmt: skip
        self.attention: torch.nn.Module = SdpaAttention(0.0)
        self.hidden_dropout = HIDDEN_DROPOUT

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, HEAD_DIM))
        x = x + F.dropout(self.proj(self.attention(*heads.unbind(3))), self.hidden_dropout)
        return x + F.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))), self.hidden_dropout)


class PaperLayer(PlainLayer):
    """What the paper keeps, in its own form."""

    def forward(self, x: Tensor) -> Tensor:
        y = layer_norm(x, self.norm1.weight, self.norm1.bias, self.norm1.eps)
        heads = self.qkv(y).unflatten(-1, (-1, 3, HEAD_DIM)).unbind(3)
        q, k, v = (t.permute(1, 2, 0, 3) for t in heads)
        mask = torch.ones(x.size(0), x.size(0), dtype=torch.bool).triu(1)
        # softmax keeps its output, and nothing of the scores.
        probabilities = torch.softmax((q @ k.mT * HEAD_DIM**-0.5).masked_fill_(mask, -torch.inf), -1)
        x = x + self._drop(self.proj((probabilities @ v).permute(2, 0, 1, 3).flatten(2)))
        y = layer_norm(x, self.norm2.weight, self.norm2.bias, self.norm2.eps)
        return x + self._drop(self.fc2(GeluWithByteMask.apply(self.fc1(y))))

    def _drop(self, x: Tensor) -> Tensor:
        """Dropout that keeps a byte for each element, as on a GPU; F.dropout on a CPU keeps a mask of x's dtype."""
        dropped: Tensor = torch.native_dropout(x, self.hidden_dropout, True)[0] if self.hidden_dropout else x
        return dropped


class GeluWithByteMask(torch.autograd.Function):
    """GELU that keeps its output and a byte for each element: whether x lay right of the minimum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = F.gelu(x)
        ctx.save_for_backward(y, x >= INVERSES["gelu"].x_min)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> Tensor:
        y, is_right = ctx.saved_tensors
        inverse = INVERSES["gelu"]
        above = (y.float() - inverse.y_min).clamp(inverse.y_min_low, Y_MAX - inverse.y_min) - inverse.y_min_low
        slope = evaluate(inverse, torch.where(is_right, 1.0, -1.0) * above.sqrt())
        return (slope * grad_y).to(y.dtype)


def list_rivals() -> dict[str, Callable[[Sizes], Rival]]:
    """Case -> what makes it."""
    found: dict[str, Callable[[Sizes], Rival]] = {
        BASE: functools.partial(make_megatron_layer, TempoConfig.off(), attention="sdpa"),
        "stock, unfused": functools.partial(make_megatron_layer, TempoConfig.off()),
        "stock, selective": functools.partial(make_megatron_layer, TempoConfig.off(), recompute="selective"),
        "stock, full": functools.partial(make_megatron_layer, TempoConfig.off(), attention="sdpa", recompute="full"),
    }
    found |= {f"torch.compile, budget {budget}": functools.partial(make_compiled, budget) for budget in BUDGETS}
    found |= {
        "checkpoint": make_checkpointed,
        "checkpoint, saves products": functools.partial(make_checkpointed, saves_every=1),
        "checkpoint, saves every second product": functools.partial(make_checkpointed, saves_every=2),
        "the paper's choices": make_paper,
    }
    found |= {name: functools.partial(make_megatron_layer, config) for name, config in TEMPO.items()}
    return found | {
        "Tempo, planned": make_planned,
        "Tempo, in place, offload": functools.partial(
            make_megatron_layer, TempoConfig(offload="all"), num_layers=NUM_STACKED
        ),
    }


def make_planned(sizes: Sizes) -> Rival:
    return make_megatron_layer(plan_stack(sizes), sizes, num_layers=NUM_STACKED)


@functools.cache
def plan_stack(sizes: Sizes) -> TempoConfig:
    """The plan, without Megatron's recomputation, for the mean of what the quickest and the smallest plan need, by the
    rates of an H100's data sheet."""
    run = Run(
        model=describe(sizes, NUM_STACKED),
        tempo=TempoConfig(),
        micro_batch_size=sizes.b,
        dtype=sizes.dtype,
        optimizer=OptimizerSettings(kind="none"),
    )
    planner = Planner(PlanRequest(run=run, gpu=read_gpu("h100"), recompute=frozenset()))
    least, quickest = planner.make_smallest(), planner.plan(10**15)
    budget = (least.peak_bytes + quickest.peak_bytes) // 2
    return planner.plan(budget).tempo


def describe(sizes: Sizes, num_layers: int) -> ModelShape:
    return make_shape(
        family="gpt", num_layers=num_layers, hidden_size=sizes.h, num_attention_heads=sizes.h // HEAD_DIM,
        vocab_size=512, seq_length=sizes.s, max_position_embeddings=sizes.s, attention_dropout=0.0,
        hidden_dropout=HIDDEN_DROPOUT,
    )  # fmt: skip


def make_megatron_layer(
    config: TempoConfig, sizes: Sizes, attention: str = "", recompute: str = "", num_layers: int = 1
) -> Rival:
    """Makes Megatron's layer, or several, with Tempo's modules or the stock ones."""
    shape = describe(sizes, num_layers)
    settings: dict[str, Any] = {}
    if recompute == "selective":
        settings = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    transformer_config = build_transformer_config(shape, dtype=sizes.dtype, **settings)
    block = TransformerBlock(transformer_config, tempo_block_spec(transformer_config, config)).to(sizes.dtype)
    layers: list[Any] = list(block.layers)
    mask = None
    if attention == "sdpa":
        for layer in layers:
            layer.self_attention.core_attention = SdpaAttention(0.0)
    elif config.attention == "off":
        mask = torch.ones(1, 1, sizes.s, sizes.s, dtype=torch.bool).triu(1)
    run = Stack(layers, mask).train()
    if config.offloads:
        Offload(run, dict.fromkeys(layers, move_all), Engine(ThreadDevice()))
    whole = functools.partial(tensor_parallel.checkpoint, run, False)
    return Rival(layers, whole if recompute == "full" else run)


def make_compiled(budget: float, sizes: Sizes) -> Rival:
    """Compiles the plain layer at its first call, with this memory budget."""
    # torch reuses compiled code for all modules of a class, whatever the budget, and runs uncompiled after some more.
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    layer = PlainLayer(sizes.h).to(sizes.dtype)
    compiled = torch.compile(layer, dynamic=False)

    def run(x: Tensor) -> Tensor:
        functorch_config.activation_memory_budget = budget
        out: Tensor = compiled(x)
        return out

    return Rival([layer], run)


def make_checkpointed(sizes: Sizes, saves_every: int = 0) -> Rival:
    """The plain layer under torch's checkpoint, which saves every so many of the products, and then attention too."""
    layer = PlainLayer(sizes.h).to(sizes.dtype)

    def make_contexts() -> Any:
        seen = {True: 0, False: 0}

        def choose(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            if operator in _PRODUCTS:
                seen[context.is_recompute] += 1
                saves = seen[context.is_recompute] % saves_every == 0
            else:
                saves = operator == _ATTENTION
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(choose)

    contexts = {"context_fn": make_contexts} if saves_every else {}
    return Rival([layer], functools.partial(checkpoint, layer, use_reentrant=False, **contexts))


def make_paper(sizes: Sizes) -> Rival:
    layer = PaperLayer(sizes.h).to(sizes.dtype)
    return Rival([layer], layer)


@torch.no_grad()
def share_weights(rival: Rival, weights: dict[str, Tensor]) -> None:
    for name, parameter in rival.name_parameters().items():
        parameter.copy_(weights[name])


def measure(case: str, sizes: Sizes) -> dict[str, Any]:
    """Measures one rival beside stock."""
    torch.manual_seed(1)
    makers = list_rivals()
    exact = torch.nn.Sequential(*(PlainLayer(sizes.h) for _ in range(NUM_STACKED if case in STACKED else 1)))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(sizes.dtype))  # so that all start from the same weights
    stock = functools.partial(makers[BASE], num_layers=len(exact)) if case in STACKED else makers[BASE]
    rivals = {BASE: stock(sizes)} | {name: makers[name](sizes) for name in {case} - {BASE}}
    x = torch.randn(sizes.s, sizes.b, sizes.h).to(sizes.dtype)
    grad_out = torch.randn(sizes.s, sizes.b, sizes.h).to(sizes.dtype)
    weights = Rival(list(exact), exact).name_parameters()
    for rival in rivals.values():
        share_weights(rival, weights)
    ms = {name: 1e3 * statistics.median(times) for name, times in alternate(rivals, x, grad_out, sizes.rounds).items()}
    kept, peak = find_memory(rivals[case], x, grad_out)
    errors = find_errors(rivals[case], Rival(list(exact.double()), exact), x, grad_out)
    return {
        "shape": {"s": sizes.s, "b": sizes.b, "h": sizes.h},
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == sizes.dtype),
        "p": {"attention": 0.0, "hidden": HIDDEN_DROPOUT},
        "kept_sbh": round(kept / x.numel() / len(exact), 2),
        "peak_sbh": round(peak / x.numel() / len(exact), 2),
        "cpu_ms": round(ms[case], 1),
        "over_stock": round(ms[case] / ms[BASE], 3),
        "gradient_error": float(f"{max(errors.values()):.3g}"),
        "worst": max(errors, key=lambda name: errors[name]),
        "layers": len(exact),
        "rounds": sizes.rounds,
    }


def alternate(rivals: dict[str, Rival], x: Tensor, grad_out: Tensor, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of forward and backward, in turn; two rounds before do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    leaf = x.clone().requires_grad_()
    for number in range(rounds + 2):
        for name, rival in rivals.items():
            dropout_rng.set_micro_batch(1234, number)
            start = time.process_time()
            rival.run(leaf).backward(grad_out)
            if number >= 2:
                seconds[name].append(time.process_time() - start)
    return seconds


def find_memory(rival: Rival, x: Tensor, grad_out: Tensor) -> tuple[int, int]:
    """Bytes that a forward leaves allocated beside its output, its input among them if it keeps that, and the most
    that forward and backward hold. The gradients of parameters are there before."""
    leaf = x.clone().requires_grad_()

    def forward() -> Tensor:
        dropout_rng.set_micro_batch(1234, 0)
        return rival.run(leaf * 1.0)  # no leaf: freed where nothing keeps it

    out, _, held = measure_held(forward)
    out.backward(grad_out)
    _, most, _ = measure_held(lambda: forward().backward(grad_out))
    return held - out.untyped_storage().nbytes(), most


def find_errors(rival: Rival, exact: Rival, x: Tensor, grad_out: Tensor) -> dict[str, float]:
    """Relative errors of the gradients of x and of every parameter, without dropout."""
    for layer in (*exact.layers, *rival.layers):
        layer.hidden_dropout = 0.0
    found = []
    for run, parameters, dtype in (
        (exact.run, exact.name_parameters(), torch.float64),
        (rival.run, rival.name_parameters(), x.dtype),
    ):
        for parameter in parameters.values():
            parameter.grad = None
        leaf = x.to(dtype).requires_grad_()
        dropout_rng.set_micro_batch(1234, 0)
        run(leaf).backward(grad_out.to(dtype))
        found.append({name: t.grad.double() for name, t in ({"x": leaf} | parameters).items() if t.grad is not None})
    truth, ours = found
    assert truth.keys() == ours.keys(), f"gradients of {sorted(truth.keys() ^ ours.keys())} are missing"
    return {name: float((ours[name] - grad).norm() / grad.norm()) for name, grad in truth.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seq-length", type=int, default=512, help="default %(default)s")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="default %(default)s")
    parser.add_argument("--hidden-size", type=int, default=512, help="a multiple of 64; default %(default)s")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=list_rivals(), metavar="CASE", help="default all")
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    parser.add_argument("--output", type=type(OUTPUT), default=OUTPUT, help="JSON-lines file")
    args = parser.parse_args()
    sizes = Sizes(args.seq_length, args.micro_batch_size, args.hidden_size, DTYPES[args.dtype], args.rounds)
    torch.set_num_threads(1)
    cpu.use_cpu()
    cases = args.only or list_rivals()
    if "Tempo, planned" in cases:
        plan_stack(sizes)  # the planner has layouts of its own, so before this one
    with simulate_layout(1):
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        measure_missing(args.output, cases, functools.partial(measure, sizes=sizes), again=args.again)


if __name__ == "__main__":
    main()
