"""Stock beside Tempo in HybridModels, on the stand-in of Transformer Engine.

A script of script_ranks.py, for the megatron-core of 0.19.2's wheel. The mixer of Megatron's Mamba layers needs the
kernels of mamba_ssm. Another one stands in its place, between the same linears.
"""

from __future__ import annotations

import te_cases  # isort: skip  # installs the stand-in of Transformer Engine, before anything imports Megatron

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpt
import script_ranks
import torch
from beside_stock import compare, find_refusal
from gpt import SEQ_LENGTH, VOCAB_SIZE, gpt_config
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempoize, tempoize_hybrid
from tempo_megatron.megatron_lm import patches, versions
from tempo_megatron.megatron_lm.report import RunReport
from tempo_megatron.slots.megatron_versions import find_version
from tempo_megatron.slots.report import report_on

OFF, run = te_cases.OFF, te_cases.run_gpt
INPLACE = dataclasses.replace(te_cases.INPLACE, loss="fused")
BESIDE_EXPERTS = dataclasses.replace(INPLACE, activation="recompute")
ALL_RECOMPUTED = dataclasses.replace(INPLACE, activation="recompute", norm="recompute")
PATTERN = "M*-ME"
EXPERTS = {"num_moe_experts": 2, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}


class Mixer(MegatronModule):
    """A gate between the linears of a Mamba layer."""

    def __init__(
        self, config: Any, submodules: Any, d_model: int, *, pg_collection: Any = None, name: Any = None, **_: Any
    ) -> None:
        super().__init__(config)
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        shared |= {"init_method": config.init_method, "skip_bias_add": False}
        self.in_proj = build_module(submodules.in_proj, d_model, 2 * d_model, gather_output=False, **shared)
        self.out_proj = build_module(submodules.out_proj, d_model, d_model, input_is_parallel=True, **shared)

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        gate, y = self.in_proj(x)[0].unflatten(-1, (-1, 2)).unbind(-1)
        return self.out_proj(F.silu(gate) * y)


def stack_spec() -> ModuleSpec:
    """Megatron's, whose mixer and grouped experts have no stand-ins."""
    given: Any = hybrid_stack_spec.submodules
    mamba, moe = given.mamba_layer, given.moe_layer
    mixer = ModuleSpec(Mixer, submodules=mamba.submodules.mixer.submodules)
    experts = get_moe_module_spec(use_te=True, num_experts=2, moe_grouped_gemm=False)
    submodules = dataclasses.replace(
        given,
        mamba_layer=dataclasses.replace(mamba, submodules=dataclasses.replace(mamba.submodules, mixer=mixer)),
        moe_layer=dataclasses.replace(moe, submodules=dataclasses.replace(moe.submodules, mlp=experts)),
    )
    return ModuleSpec(hybrid_stack_spec.module, submodules=submodules)


def build(pattern: str, tempo_config: TempoConfig, *, seed: int = 7, **settings: Any) -> Any:
    settings = {"add_bias_linear": False, "num_layers": len(pattern), "is_hybrid_model": True, **settings}
    is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    config = gpt_config(sequence_parallel=is_parallel, **settings)
    spec = stack_spec()
    if not tempo_config.is_off:
        spec = tempoize_hybrid(spec, config, tempo_config, pattern)
    return gpt.build_gpt(config, tempo_config, seed, spec=spec, cls=HybridModel, hybrid_layer_pattern=pattern)


def build_gpt(tempo_config: TempoConfig, *, seed: int = 7, **settings: Any) -> Any:
    config = gpt_config(add_bias_linear=False, **settings)
    return te_cases.build_gpt(config, tempo_config, seed, position_embedding_type="none")


def measure(pattern: str, tempo_config: TempoConfig, **settings: Any) -> dict[str, Any]:
    return compare(lambda chosen: build(pattern, chosen, **settings), lambda model, _: run(model), tempo_config)


def retargeted(model: Any, pattern: str) -> Any:
    """The model's sharded state, at the places of a GPT's checkpoint."""
    state = model.sharded_state_dict()
    retarget_sharded_state_dict_to_gpt_checkpoint(state, gpt_compatible_layer_maps(pattern))
    return state


def list_tensors(state: Any) -> dict[Any, torch.Tensor]:
    """Key, whole shape and offset of each part in a checkpoint -> its data."""
    parts = (value for value in state.values() if isinstance(value, ShardedTensor))
    return {(part.key, part.global_shape, part.global_offset): part.data for part in parts}


def copy_checkpoint(written: dict[Any, torch.Tensor], read: dict[Any, torch.Tensor]) -> None:
    """As if Megatron wrote and read a checkpoint, which takes seconds: parts are found by key, shape and offset."""
    assert written.keys() == read.keys()
    with torch.no_grad():
        for place, data in read.items():
            data.copy_(written[place])


def masks_of_gpt() -> dict[str, list[float]]:
    """The losses at dropout 0.2 of a GPT, of a HybridModel that read its checkpoint, and of a GPT that read that."""
    pattern = "*-*-"
    gpt, hybrid, again = (
        make(INPLACE, seed=seed, dropout=0.2)
        for seed, make in enumerate((build_gpt, lambda *args, **kwargs: build(pattern, *args, **kwargs), build_gpt))
    )
    before = [run(each).mean().item() for each in (gpt, hybrid, again)]
    for written, read in (
        (gpt.sharded_state_dict(), retargeted(hybrid, pattern)),
        (retargeted(hybrid, pattern), again.sharded_state_dict()),
    ):
        copy_checkpoint(list_tensors(written), list_tensors(read))
    return {"before": before, "after": [run(each).mean().item() for each in (gpt, hybrid, again)]}


def masks_again(**settings: Any) -> list[float]:
    """Loss and a gradient's norm at dropout 0.2."""
    model = build(PATTERN, BESIDE_EXPERTS, dropout=0.2, **EXPERTS, **settings)
    loss = run(model).mean()
    loss.backward()
    return [loss.item(), model.embedding.word_embeddings.weight.grad.norm().item()]


def numbers_of_a_stage() -> list[Any]:
    """Of the second pipeline stage: numbers of layers, of masks, and of what its own report says."""
    pattern = "M*|-*E"
    config = gpt_config(num_layers=5, add_bias_linear=False, is_hybrid_model=True, dropout=0.1, **EXPERTS)
    spec = tempoize_hybrid(stack_spec(), config, BESIDE_EXPERTS, pattern)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    place: dict[str, Any] = {"layer_type_list": [*"-*E"], "pp_layer_offset": 2, "pre_process": False}
    stack = build_module(spec, config, pg_collection=groups, **place)
    where = [slot.where for slot in report_on(SimpleNamespace(decoder=stack, config=config)).slots]
    core_attention = stack.layers[1].self_attention.core_attention
    return [[layer.layer_number for layer in stack.layers], core_attention.mask_layer, sorted(set(where))]


def refusals() -> dict[str, str]:
    config = gpt_config(num_layers=2, is_hybrid_model=True, dropout=0.1)
    written = TempoConfig(dropout="recompute")
    calls = {
        "tempoize": lambda: tempoize(stack_spec(), config, INPLACE),
        "no pattern": lambda: tempoize_hybrid(stack_spec(), config, INPLACE, None),
        "a GPT's spec": lambda: tempoize_hybrid(get_gpt_layer_with_transformer_engine_spec(), config, INPLACE, "*-"),
        "symbol": lambda: tempoize_hybrid(stack_spec(), config, INPLACE, "*-X"),
        "prediction": lambda: tempoize_hybrid(stack_spec(), config, written, "*-/*-"),
    }
    return {name: find_refusal(call) for name, call in calls.items()}


def what_the_launcher_builds() -> dict[str, Any]:
    """A script builds a HybridModel of the stock spec under --use-tempo."""
    patches.get_hook = lambda place, version: (
        (lambda: SimpleNamespace(seed=1)) if place == versions.GET_ARGS else versions.get_hook(place, version)
    )
    report = RunReport(str(find_version()), Path(), None)
    stock = HybridModel.__init__
    patches.patch_models(str(find_version()), TempoConfig(attention="flash", layers={"2": {"norm": "off"}}), report)
    config = gpt_config(num_layers=5, add_bias_linear=False, is_hybrid_model=True, dropout=0.1, **EXPERTS)
    HybridModel(config, stack_spec(), VOCAB_SIZE, SEQ_LENGTH, hybrid_layer_pattern=PATTERN)
    HybridModel.__init__ = stock
    (built,) = report.models
    return {"counts": built.report.counts, "left": built.report.describe_left(), "draws": built.draws_masks}


def measure_all(world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"masks": masks_again()}
    if world_size == 1:
        found["cases"] = {
            "norms in place": measure(PATTERN, BESIDE_EXPERTS, **EXPERTS),
            "recompute, swiglu and RMSNorm": measure(PATTERN, ALL_RECOMPUTED, **EXPERTS, **te_cases.SWIGLU),
        }
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        found["masks of a full recomputation"] = masks_again(**full)
        found["stage"] = numbers_of_a_stage()
        found["refusals"] = refusals()
        found["gpt"] = masks_of_gpt()
        found["launcher"] = what_the_launcher_builds()
    return found


if __name__ == "__main__":
    script_ranks.main(measure_all)
