"""Models whose linears run again in backward, and the same models without: what each computes and keeps."""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import Any
from unittest import mock

import torch
from formula_cases import count_stack
from grid.models import LLAMA, Sizes, build_config, build_model, fill_weights, make_batch, read_losses, record_stacks
from megatron.core.tensor_parallel import layers, model_parallel_cuda_manual_seed
from torch.nn import functional as F

from tempo_kernels.attention import cpu as attention_cpu
from tempo_kernels.norm import cpu as norm_cpu
from tempo_megatron import TempoConfig
from tempo_megatron.memory.tape.follower import Follower
from tempo_megatron.slots import dropout_rng
from tempo_megatron.slots.choose import choose

BASE = TempoConfig(activation="recompute", norm="inplace", dropout="recompute", attention="flash", loss="off")
RECOMPUTE = dataclasses.replace(BASE, norm="recompute")
STOCK = TempoConfig(activation="off", norm="off", dropout="recompute", attention="off", loss="off")
AGAIN: dict[str, dict[str, str]] = {
    "fc1": {"linear_fc1": "recompute"},
    "qkv": {"linear_qkv": "recompute"},
    "attention": {"attention": "recompute"},
    "all": {"linear_fc1": "recompute", "linear_qkv": "recompute", "attention": "recompute"},
}
SIZES = Sizes()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of two layers; `tempo` is what the operations are added to."""

    family: str
    tempo: TempoConfig = RECOMPUTE
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of `build_config`."""

    again: tuple[str, ...] = ("all",)
    """Of AGAIN."""


_QK_NORM = {"qk_layernorm": True, "normalization": "RMSNorm"}
CASES = {
    "GPT": Case("GPT", again=tuple(AGAIN)),
    "GPT, norms in place": Case("GPT", BASE),
    "GPT, stock": Case("GPT", STOCK, again=("fc1", "qkv")),
    "GPT, tanh": Case("GPT", dataclasses.replace(BASE, activation="off"), {"activation_func": F.tanh}),
    "GPT, softmax": Case("GPT", dataclasses.replace(BASE, attention="softmax"), again=("qkv",)),
    "Llama": Case("Llama", settings=LLAMA),
    "Llama, stock MLP": Case("Llama", dataclasses.replace(STOCK, attention="flash"), LLAMA),
    "Llama, one group, q and k normed": Case("Llama", BASE, {**LLAMA, "num_query_groups": 2, **_QK_NORM}),
    "Llama, q and k normed": Case("Llama", RECOMPUTE, {**LLAMA, **_QK_NORM}),
    "GPT, q and k normed, stock": Case("GPT", STOCK, _QK_NORM, again=("qkv",)),
    "BERT": Case("BERT"),
    "T5": Case("T5"),
    "GPT, core attention recomputed": Case("GPT", settings={"recompute": "core_attn"}, again=("attention", "all")),
    "Llama, core attention recomputed": Case(
        "Llama", dataclasses.replace(STOCK, norm="inplace"), {**LLAMA, "recompute": "core_attn"}, again=("fc1", "qkv")
    ),
    "GPT, MLP recomputed": Case("GPT", settings={"recompute": "mlp", "add_bias_linear": False}, again=("fc1", "all")),
    "GPT, all recomputed": Case("GPT", settings={"recompute": "full"}),
}


@dataclasses.dataclass
class Found:
    """What one forward and backward leave."""

    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]
    keys: list[str]
    kept: dict[str, tuple[int, int | None]]
    """Stack -> (bytes that its layers keep, measured; the formula's, None where it knows no such layer)."""


def run(case: Case, tempo: TempoConfig, dtype: torch.dtype, dropout: float, sequence_parallel: bool) -> Found:
    """Two micro batches, both forwards before both backwards."""
    layout = {"perform_initialization": True, "sequence_parallel": sequence_parallel}
    config = build_config(dtype=dtype, dropout=dropout, **layout, **case.settings)
    chosen = choose(config, tempo).config
    model_parallel_cuda_manual_seed(1234)
    model = build_model(case.family, config, tempo, SIZES)
    fill_weights(model)
    losses, kept = [], {}
    for sample in (0, SIZES.micro_batch_size):
        dropout_rng.set_micro_batch(5, sample)
        args, kwargs = make_batch(case.family, sample, SIZES, gives_mask=chosen.attention == "off")
        if losses:
            output = model(*args, **kwargs)
        else:
            output, stacks = record_stacks(model, functools.partial(model, *args, **kwargs))
            is_counted = not config.qk_layernorm and config.activation_func is not F.tanh
            kept = {
                stack: (
                    sum(saved.num_bytes for saved in found),
                    count_stack(case.family, stack, config, chosen, SIZES) if is_counted else None,
                )
                for stack, found in stacks.items()
            }
        losses.append(read_losses(case.family, output))
    for each in losses:
        each.float().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return Found(torch.cat(losses).detach(), found, sorted(model.state_dict()), kept)


@dataclasses.dataclass
class Difference:
    """Between a run in which something runs again and one without."""

    changed: list[str]
    """What is not the same, bit for bit: gradients by name, "loss", "keys"."""

    kept: dict[str, tuple[int, int, int | None]]
    """Stack -> (bytes without it, bytes, the formula's)."""


def compare(
    names: list[str], dtype: torch.dtype, dropout: float, sequence_parallel: bool = False
) -> dict[tuple[str, str], Difference]:
    """(case, what runs again) -> how it differs from the same run without."""
    differences = {}
    for name in names:
        case = CASES[name]
        plain = run(case, case.tempo, dtype, dropout, sequence_parallel)
        for again in case.again:
            tempo = dataclasses.replace(case.tempo, **AGAIN[again])
            found = run(case, tempo, dtype, dropout, sequence_parallel)
            changed = [key for key, grad in plain.gradients.items() if not torch.equal(found.gradients[key], grad)]
            changed += [] if torch.equal(found.losses, plain.losses) else ["loss"]
            changed += [] if found.keys == plain.keys else ["keys"]
            kept = {stack: (plain.kept[stack][0], *of_stack) for stack, of_stack in found.kept.items()}
            differences[name, again] = Difference(changed, kept)
    return differences


def list_calls(again: dict[str, str]) -> dict[str, int]:
    """What a forward and backward of one layer call, and how often: products by their weight, norms, attention."""
    config = build_config(num_layers=1)
    model = build_model("GPT", config, dataclasses.replace(RECOMPUTE, **again), SIZES)
    fill_weights(model)
    calls: dict[str, int] = {}

    def count(name: str, function: Any) -> Any:
        def run_and_count(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        return run_and_count

    names = {id(p): name.rpartition("layers.0.")[2] for name, p in model.named_parameters()}
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication.forward

    def multiply(ctx: Any, x: Any, weight: Any, *args: Any) -> Any:
        return count(f"forward of {names[id(weight)]}", linear)(ctx, x, weight, *args)

    with (
        mock.patch.object(layers.LinearWithGradAccumulationAndAsyncCommunication, "forward", multiply),
        mock.patch("tempo_kernels.attention.cpu.forward", count("attention", attention_cpu.forward)),
        mock.patch("tempo_kernels.norm.cpu.refill", count("norm made again", norm_cpu.refill)),
    ):
        dropout_rng.set_micro_batch(5, 0)
        args, kwargs = make_batch("GPT", 0, SIZES, gives_mask=False)
        model(*args, **kwargs).mean().backward()
    return calls


def count_alive(again: dict[str, str]) -> tuple[int, int]:
    """(bytes of all tensors that are alive after a forward and were not before it, what the formula counts)."""
    config = build_config(dtype=torch.bfloat16, dropout=0.1, num_layers=4)
    tempo = dataclasses.replace(RECOMPUTE, **again)
    model = build_model("GPT", config, tempo, SIZES)
    fill_weights(model)
    dropout_rng.set_micro_batch(5, 0)
    args, kwargs = make_batch("GPT", 0, SIZES, gives_mask=False)
    with Follower(*model.parameters(), *model.buffers()) as counter:
        output = model(*args, **kwargs)
        gc.collect()
        alive = counter.alive_bytes
    del output
    return alive, count_stack("GPT", "decoder", config, tempo, SIZES)
