"""Adapters, and weights' kinds, as Megatron-Bridge finds them in stock and in Tempo's models: a JSON line.

Started by test_megatron_bridge.py, one process per rank: `bridge_cases.py STORE RANK WORLD_SIZE [BRIDGE]`. With the
folder of a megatron-bridge it is Bridge's own code that decides and adapts; without it what stands here decides alike.
"""

from __future__ import annotations

import te_cases  # isort: skip  # installs the stand-in of Transformer Engine, before anything imports Megatron

import importlib
import importlib.metadata
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import te_package
import torch
from gpt import gpt_config, largest_gradient_error_eps, start_rank
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as extension
from torch import Tensor

from tempo_megatron import TempoConfig

AFTER_NORMS = ("linear_qkv", "linear_fc1")
LINEARS = (*AFTER_NORMS, "linear_proj", "linear_fc2")
# GELU in place has an error of its own, which other tests bound.
EXACT_GELU = {"activation": "recompute", "dropout": "recompute", "loss": "off"}
MODELS = {
    "stock": te_cases.OFF,
    "in place": TempoConfig(norm="inplace", attention="flash", **EXACT_GELU),
    "recompute": TempoConfig(norm="recompute", attention="flash", **EXACT_GELU),
    "attention again": TempoConfig(norm="inplace", attention="recompute", **EXACT_GELU),
}
AGAIN = TempoConfig(linear_fc1="recompute", loss="off")


def list_linears(model: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """(full name, what holds it, its name there, the linear) of the linears of a model's layers."""
    for name, module in list(model.named_modules()):
        holder, _, last = name.rpartition(".")
        if last in LINEARS:
            yield name, model.get_submodule(holder), last, module


class LoRALinear(torch.nn.Module):
    """A linear and an adapter beside it, fed as Bridge feeds its own: with what the linear's norm gave, where its class
    is the one with a norm."""

    def __init__(self, linear: Any, rank: int = 4) -> None:
        super().__init__()
        self.to_wrap = linear
        if isinstance(linear, extension.TELayerNormColumnParallelLinear):
            linear.return_layernorm_output = True
            linear.return_layernorm_output_gathered = linear.config.sequence_parallel
        self.down = torch.nn.Parameter(torch.randn(rank, linear.in_features) / 8)
        self.up = torch.nn.Parameter(torch.randn(linear.out_features, rank) / 8)

    def forward(self, x: Tensor) -> Any:
        output, *rest = self.to_wrap(x)
        if len(rest) == 2:
            bias, given = rest
        else:
            output, given = output if isinstance(output, tuple) else (output, x)
            (bias,) = rest
        self.rms = given.square().mean().sqrt().item()
        return output + given @ self.down.t() @ self.up.t(), bias


def adapt(linear: Any, name: str, full_name: str) -> Any:
    # The others' outputs are sums over ranks, which an adapter has to add up too.
    is_whole = parallel_state.get_tensor_model_parallel_world_size() == 1
    return LoRALinear(linear) if name in AFTER_NORMS or is_whole else linear


def find_kind(module: Any, parameter: str, *, is_exact: bool) -> str:
    """How the ranks share a parameter, by the name of its module's class: as Bridge until 0.4.2, where the linear with
    a norm must have its very name (`is_exact`), and since 0.5, where the name must hold that one without its TE."""
    name, fused = type(module).__name__, "TELayerNormColumnParallelLinear"
    if name == fused or (not is_exact and fused.removeprefix("TE") in name):
        return "replicated" if "layer_norm" in parameter else "column"
    known = {
        "column": ("ColumnParallelLinear", "TEColumnParallelLinear"),
        "row": ("RowParallelLinear", "TERowParallelLinear"),
    }
    for kind, names in known.items():
        if name in names:
            return kind
    return "replicated" if "Norm" in name else "unknown"


def load_bridge(root: str) -> tuple[Callable[..., Any], Callable[..., str]]:
    """(`adapt`, the kind of a module's parameter) of the megatron-bridge under `root`, of which only these modules are
    imported: the package itself wants what a GPU has."""
    sys.path.append(root)
    find_version = importlib.metadata.version
    importlib.metadata.version = lambda name: te_package.VERSION if name == "transformer-engine" else find_version(name)
    for name in ("", ".peft", ".utils", ".models", ".models.conversion"):
        package = types.ModuleType(f"megatron.bridge{name}")
        package.__path__ = [f"{root}/{package.__name__.replace('.', '/')}"]
        sys.modules[package.__name__] = package
    # Ranks and downloads, which nothing here asks for, by names of the newest megatron-core.
    name = "megatron.bridge.utils.common_utils"
    sys.modules[name] = te_package._Package(name)
    lora = importlib.import_module("megatron.bridge.peft.lora").LoRA(dim=4, alpha=4)
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping

    def adapt_as_bridge(linear: Any, name: str, full_name: str) -> Any:
        wrapped = lora.transform(linear, name, full_name.rpartition(".")[0])
        for parameter in wrapped.adapter.parameters():
            torch.nn.init.normal_(parameter, std=1 / 8)
        wrapped.adapter.register_forward_pre_hook(
            lambda _, args: setattr(wrapped, "rms", args[0].square().mean().sqrt().item())
        )
        return wrapped

    return adapt_as_bridge, lambda module, parameter: mapping(parameter, "theirs")._detect_parallelism_type(module)


def run_adapted(tempo_config: TempoConfig, adapt: Callable[..., Any]) -> dict[str, Any]:
    """Loss, gradients of the adapters, and the rms of what they were given, on frozen weights."""
    is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    model = te_cases.build_gpt(gpt_config(sequence_parallel=is_parallel), tempo_config).requires_grad_(False)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "word_embeddings" in name:
                parameter.mul_(100)  # so that the raw residual stream is not of the norm's size
    adapted = []
    for full_name, holder, name, linear in list(list_linears(model)):
        setattr(holder, name, adapt(linear, name, full_name))
        adapted.append(getattr(holder, name))
    loss = te_cases.run_gpt(model).mean()
    loss.backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.item(), "grads": grads, "rms": [each.rms for each in adapted if hasattr(each, "rms")]}


# SwiGLU has an exact form only.
LLAMA = {"activation": "recompute", "dropout": "recompute", "attention": "flash", "loss": "off"}
LLAMAS = {"stock": te_cases.OFF, "in place": TempoConfig(norm="inplace", **LLAMA)}
LLAMAS["recompute"] = TempoConfig(norm="recompute", **LLAMA)
ADAPTERS = {"LoRA": "lora", "DoRA": "dora", "CanonicalLoRA": "canonical_lora"}
STEPS = 4


def fine_tune(tempo_config: TempoConfig, kind: str) -> dict[str, Any]:
    """Steps of a small Llama with Bridge's adapters on frozen weights: its losses, the weights into which LoRA's are
    merged, and every weight as Bridge exports it to Hugging Face and takes it back."""
    settings = {**te_cases.SWIGLU, "num_query_groups": 2}
    model = te_cases.build_gpt(gpt_config(**settings), tempo_config).requires_grad_(False)
    peft = getattr(importlib.import_module(f"megatron.bridge.peft.{ADAPTERS[kind]}"), kind)(dim=4, alpha=8)
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping").AutoMapping
    merge = importlib.import_module("megatron.bridge.peft.lora_merge").LoRAMerge().merge
    torch.manual_seed(11)
    wrapped = {}
    for full_name, holder, name, linear in list(list_linears(model)):
        wrapped[full_name] = peft.transform(linear, name, full_name.rpartition(".")[0])
        setattr(holder, name, wrapped[full_name])
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    found: dict[str, Any] = {"losses": [], "trained": len(trained), "weights": {}, "is_exported": True}
    for _ in range(STEPS):
        loss = te_cases.run_gpt(model).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found["losses"].append(loss.item())
    for name, each in wrapped.items():
        linear = each.to_wrap
        if kind == "LoRA":
            parts = each.adapter.linear_out.weight, each.adapter.linear_in.weight
            found["weights"][name] = merge(linear.weight, *parts, 8, 4, tp_group=None).detach()
        exporter = mapping(f"{name}.weight", "theirs")
        exported = exporter.megatron_to_hf(linear.weight, linear)["theirs"]
        back = mapping(f"{name}.weight", "theirs").hf_to_megatron(exported, linear)
        found["is_exported"] &= torch.equal(exported, linear.weight) and torch.equal(back, linear.weight)
    return found


def compare_fine_tuning(kind: str) -> dict[str, Any]:
    found = {name: fine_tune(tempo_config, kind) for name, tempo_config in LLAMAS.items()}
    stock = found["stock"]["weights"]
    return {
        name: {
            **{key: each[key] for key in ("losses", "trained", "is_exported")},
            "merged_error": max([(each["weights"][key] - stock[key]).abs().max().item() for key in stock], default=0.0),
            "merged": len(each["weights"]),
        }
        for name, each in found.items()
    }


def compare(found: dict[str, Any]) -> dict[str, Any]:
    stock = found["stock"]["grads"]
    return {
        "loss": {name: each["loss"] for name, each in found.items()},
        "rms": {name: each["rms"] for name, each in found.items()},
        "gradient_error_eps": {name: largest_gradient_error_eps(each["grads"], stock) for name, each in found.items()},
        "gradients": {name: sorted(each["grads"]) for name, each in found.items()},
    }


def main() -> None:
    store, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    start_rank(store, rank, world_size)
    adapt_linear: Callable[..., Any] = adapt
    deciders: dict[str, Callable[..., str]] = {
        "until 0.4.2": lambda module, parameter: find_kind(module, parameter, is_exact=True),
        "since 0.5": lambda module, parameter: find_kind(module, parameter, is_exact=False),
    }
    if len(sys.argv) > 4:
        adapt_linear, own = load_bridge(sys.argv[4])
        deciders["Bridge's own"] = own
    kinds = {
        decider: {
            name: {
                f"{linear}.{parameter}": decide(module, f"{linear}.{parameter}")
                for linear, _, _, module in list_linears(te_cases.build_gpt(gpt_config(), tempo_config))
                for parameter, _ in module.named_parameters()
            }
            for name, tempo_config in MODELS.items()
        }
        for decider, decide in deciders.items()
    }
    found = {
        "kinds": kinds,
        "adapted": compare({name: run_adapted(each, adapt_linear) for name, each in MODELS.items()}),
    }
    if len(sys.argv) > 4 and world_size == 1:
        found["fine-tuning"] = {kind: compare_fine_tuning(kind) for kind in ADAPTERS}
    try:
        run_adapted(AGAIN, adapt_linear)
        found["again"] = "nothing was refused"
    except ValueError as error:
        found["again"] = str(error)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
