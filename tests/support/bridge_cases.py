"""Adapters, and weights' kinds, as Megatron-Bridge finds them in stock and in Tempo's models.

A script of script_ranks.py, which may be given the folder of a megatron-bridge, whose own code decides and adapts. It
finds what te_cases.py measures, too; without the folder nothing else.
"""

from __future__ import annotations

import te_cases  # isort: skip  # installs the stand-in of Transformer Engine, before anything imports Megatron

import importlib
import importlib.metadata
import sys
import types
from collections.abc import Iterator
from typing import Any

import script_ranks
import te_package
import torch
from beside_stock import find_refusal
from gpt import differentiate, gpt_config, largest_gradient_error_eps
from megatron.core import parallel_state

from tempo_megatron import TempoConfig

LINEARS = ("linear_qkv", "linear_fc1", "linear_proj", "linear_fc2")
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


def load_bridge(root: str) -> None:
    """Let these modules of the megatron-bridge under `root` be imported: the package itself wants what a GPU has."""
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


def find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"megatron.bridge.{module}"), name)


def adapt(model: Any, peft: Any) -> dict[str, Any]:
    """Put Bridge's adapters, of random weights, around the linears of a frozen model; full name -> linear with its
    adapter."""
    model.requires_grad_(False)
    torch.manual_seed(11)
    wrapped = {}
    for full_name, holder, name, linear in list(list_linears(model)):
        wrapped[full_name] = peft.transform(linear, name, full_name.rpartition(".")[0])
        setattr(holder, name, wrapped[full_name])
    return wrapped


def run_adapted(tempo_config: TempoConfig) -> dict[str, Any]:
    """Loss, gradients of LoRA's adapters, and the rms of what they were given, on frozen weights."""
    is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    model = te_cases.build_gpt(gpt_config(sequence_parallel=is_parallel), tempo_config)
    with torch.no_grad():
        # So that the raw residual stream is not of the norm's size.
        model.embedding.word_embeddings.weight.mul_(100)
    given: list[float] = []
    for wrapped in adapt(model, find("peft.lora", "LoRA")(dim=4, alpha=4)).values():
        for parameter in wrapped.adapter.parameters():
            torch.nn.init.normal_(parameter, std=1 / 8)
        wrapped.adapter.register_forward_pre_hook(lambda _, args: given.append(args[0].square().mean().sqrt().item()))
    loss, grads = differentiate(model, te_cases.run_gpt(model).mean())
    return {"loss": loss, "grads": grads, "rms": given}


# SwiGLU has an exact form only.
LLAMA = {"activation": "recompute", "dropout": "recompute", "attention": "flash", "loss": "off"}
LLAMAS = {"stock": te_cases.OFF, "in place": TempoConfig(norm="inplace", **LLAMA)}
LLAMAS["recompute"] = TempoConfig(norm="recompute", **LLAMA)
ADAPTERS = {"LoRA": "lora", "DoRA": "dora", "CanonicalLoRA": "canonical_lora"}
STEPS = 3


def fine_tune(tempo_config: TempoConfig, kind: str) -> dict[str, Any]:
    """Steps of a small Llama with Bridge's adapters on frozen weights: its losses, the weights into which LoRA's are
    merged, and every weight as Bridge exports it to Hugging Face and takes it back."""
    model = te_cases.build_gpt(gpt_config(**te_cases.SWIGLU, num_query_groups=2), tempo_config)
    mapping = find("models.conversion.param_mapping", "AutoMapping")
    merge = find("peft.lora_merge", "LoRAMerge")().merge
    wrapped = adapt(model, find(f"peft.{ADAPTERS[kind]}", kind)(dim=4, alpha=8))
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


def describe(tempo_config: TempoConfig) -> dict[str, list[str]]:
    """Parameter of a linear -> the class by which older Bridges go, and how its ranks share it, as Bridge finds it."""
    mapping = find("models.conversion.param_mapping", "AutoMapping")
    return {
        f"{linear}.{parameter}": [
            type(module).__name__,
            mapping(f"{linear}.{parameter}", "theirs")._detect_parallelism_type(module),
        ]
        for linear, _, _, module in list_linears(te_cases.build_gpt(gpt_config(), tempo_config))
        for parameter, _ in module.named_parameters()
    }


def measure_all(world_size: int) -> dict[str, Any]:
    found = te_cases.measure_all(world_size)
    if len(sys.argv) <= 3:
        return found
    load_bridge(sys.argv[3])
    found["adapted"] = compare({name: run_adapted(each) for name, each in MODELS.items()})
    if world_size == 1:
        found["kinds"] = {name: describe(each) for name, each in MODELS.items()}
        found["fine-tuning"] = {kind: compare_fine_tuning(kind) for kind in ADAPTERS}
        found["again"] = find_refusal(lambda: run_adapted(AGAIN))
    return found


if __name__ == "__main__":
    script_ranks.main(measure_all)
