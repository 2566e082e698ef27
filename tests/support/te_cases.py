"""Stock beside Tempo in specs of Transformer Engine, whose stand-in this process installs first.

A script of script_ranks.py, alone or in bridge_cases.py.
"""

from __future__ import annotations

import te_package

te_package.install()

import contextlib  # noqa: E402
import copy  # noqa: E402
import dataclasses  # noqa: E402
import functools  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gpt  # noqa: E402
import script_ranks  # noqa: E402
import torch  # noqa: E402
from beside_stock import compare, find_refusal  # noqa: E402
from gpt import bert_losses, gpt_config, losses  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.extensions import transformer_engine as extension  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import (  # noqa: E402
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec  # noqa: E402
from megatron.core.transformer import multi_latent_attention, transformer_block  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tempo_megatron import TempoConfig  # noqa: E402
from tempo_megatron.memory.tape.scopes import record_saved  # noqa: E402
from tempo_megatron.slots.layer_spec import tempoize  # noqa: E402
from tempo_megatron.slots.megatron_versions import is_since  # noqa: E402
from tempo_megatron.slots.report import report_on  # noqa: E402

OFF = TempoConfig.off()
INPLACE = TempoConfig(activation="inplace", norm="inplace", dropout="recompute", attention="flash", loss="off")
ALL_RECOMPUTED = dataclasses.replace(INPLACE, activation="recompute", norm="recompute")
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False}
# With weights large enough to tell the two forms of GELU apart.
TE_ACTIVATION = {"use_te_activation_func": True, "init_method_std": 0.3}
AGAIN = {"attention": "recompute", "linear_fc1": "recompute", "linear_qkv": "recompute"}
LAYERS = {"0": {"norm": "recompute", "attention": "off"}, "1": {"norm": "off", "activation": "off"}}
GPT_CASES: dict[str, tuple[dict[str, Any], TempoConfig]] = {
    "in place": ({}, INPLACE),
    "recompute": ({}, ALL_RECOMPUTED),
    "the paper's attention": ({}, TempoConfig(attention="softmax", loss="off")),
    "a window to both sides": ({"window_size": (3, 2)}, INPLACE),
    "single layers": ({}, dataclasses.replace(INPLACE, layers=LAYERS)),
    "norm alone": ({}, TempoConfig(activation="off", dropout="off", attention="off", loss="off")),
    "swiglu and RMSNorm": (SWIGLU, ALL_RECOMPUTED),
    "zero-centred gamma, no biases": ({"layernorm_zero_centered_gamma": True, "add_bias_linear": False}, INPLACE),
    "query and key norms, grouped": ({"qk_layernorm": True, "num_query_groups": 2}, INPLACE),
    "Transformer Engine's activation": (TE_ACTIVATION, ALL_RECOMPUTED),
    "linears again": ({}, dataclasses.replace(ALL_RECOMPUTED, **AGAIN)),
    "linears again, norms in place": ({"qk_layernorm": True}, dataclasses.replace(INPLACE, **AGAIN)),
    "linears again, with their own norms": (SWIGLU, dataclasses.replace(OFF, **AGAIN)),
    "linears again, Transformer Engine's activation": (
        TE_ACTIVATION,
        dataclasses.replace(OFF, linear_fc1="recompute"),
    ),
    "full recomputation": (
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        INPLACE,
    ),
}
# What ranks of a tensor-parallel group do in ways of their own.
PARALLEL = ("in place", "recompute", "swiglu and RMSNorm", "full recomputation", "linears again")
PARALLEL += ("linears again, norms in place", "linears again, with their own norms")


def is_known(settings: dict[str, Any], _: TempoConfig) -> bool:
    """Whether Tempo has these settings in this Megatron: 0.14 knows no activation of Transformer Engine's, and has a
    window in its attention only."""
    has_window = is_since("0.15") or "window_size" not in settings
    return has_window and settings.keys() <= {field.name for field in dataclasses.fields(TransformerConfig)}


def build_gpt(config: Any, tempo_config: TempoConfig, seed: int = 7, **more: Any) -> Any:
    chosen = {"use_te_activation_func": True} if getattr(config, "use_te_activation_func", False) else {}
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, **chosen)
    return gpt.build_gpt(config, tempo_config, seed, spec=place(spec, config, tempo_config), **more)


def place(spec: Any, config: Any, tempo_config: TempoConfig) -> Any:
    return spec if tempo_config.is_off else tempoize(spec, config, tempo_config)


def build_latent(config: Any, tempo_config: TempoConfig) -> Any:
    """Latent attention, whose norms are in its up projections."""
    spec = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True)
    # Megatron looks for these beside modelopt's.
    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(multi_latent_attention, name, getattr(extension, name))
    spec = place(spec, config, tempo_config)
    return gpt.build_gpt(config, tempo_config, spec=spec, position_embedding_type="none")


def build_bert(config: Any, tempo_config: TempoConfig) -> Any:
    return gpt.build_bert(config, tempo_config, spec=get_bert_layer_with_transformer_engine_spec())


LATENT = {
    "cls": MLATransformerConfig,
    "rope_type": "rope",
    "qk_layernorm": True,
    **{"q_lora_rank": 16, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6},
}
UP_PROJECTIONS = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
LATENT_CASES: dict[str, tuple[dict[str, Any], TempoConfig]] = {
    "latent": (LATENT, INPLACE),
    "latent, recompute": (LATENT, dataclasses.replace(ALL_RECOMPUTED, attention="recompute")),
    "latent, up projections": ({**LATENT, **UP_PROJECTIONS}, ALL_RECOMPUTED),
}


def measure(build: Any, run: Any, settings: dict[str, Any], tempo_config: TempoConfig) -> dict[str, Any]:
    # BERT's head has a norm of Megatron's own, which without Apex refuses sequence parallelism.
    is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1 and build is not build_bert
    config = functools.partial(gpt_config, sequence_parallel=is_parallel, **settings)
    return compare(lambda chosen: build(config(), chosen), lambda model, _: run(model), tempo_config)


def run_gpt(model: Any) -> torch.Tensor:
    return losses(model, 0, 2, gives_mask=False)


def kept_bytes(tempo_config: TempoConfig, **settings: Any) -> dict[str, Any]:
    """Bytes that one layer keeps, and whether a norm's output lies in memory that the linear after it keeps."""
    is_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    config = gpt_config(num_layers=1, sequence_parallel=is_parallel, params_dtype=torch.bfloat16, bf16=True, **settings)
    model = build_gpt(config, tempo_config).to(torch.bfloat16)
    loss, saved = record_saved(model, lambda: losses(model, 0, 2, gives_mask=False).sum())
    found: dict[str, int] = {}
    for each in saved:
        if each.operation.startswith("decoder.layers.0"):
            found[each.operation] = found.get(each.operation, 0) + each.num_bytes
    loss.backward()
    return {"total": sum(found.values()), "by_module": found}


def in_fp8() -> dict[str, Any]:
    """What is kept, losses and gradients, where linears compute in FP8, and what "auto" takes there."""
    config = {"fp8": "e4m3", "fp8_recipe": "tensorwise"}
    te_package.QUANTISES, context = True, transformer_block.get_fp8_context
    transformer_block.get_fp8_context = lambda *_, **__: contextlib.nullcontext()
    try:
        return {
            "kept": {name: kept_bytes(chosen, **config) for name, chosen in (("stock", OFF), ("inplace", INPLACE))},
            "case": measure(build_gpt, run_gpt, config, INPLACE),
            "auto": what_auto_takes(**config),
        }
    finally:
        te_package.QUANTISES, transformer_block.get_fp8_context = False, context


def load_each_other(exchange: Any) -> list[float]:
    """The losses of stock and Tempo, and of Tempo and stock after each loaded the other's checkpoint, strictly."""
    models = [build_gpt(gpt_config(), config, seed) for config, seed in ((OFF, 1), (INPLACE, 2))]
    before = [run_gpt(model.eval()).mean().item() for model in models]
    for model, state in zip(models, exchange(*models), strict=True):
        model.load_state_dict(state, strict=True)
    return [*before, *(run_gpt(model.eval()).mean().item() for model in reversed(models))]


def exchange_plain(stock: Any, tempo: Any) -> list[Any]:
    return [copy.deepcopy(model.state_dict()) for model in (tempo, stock)]


def exchange_sharded(stock: Any, tempo: Any) -> list[Any]:
    """Through sharded checkpoints, which Megatron writes and reads."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]  # for which Megatron's writer waits
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("stock", stock), ("tempo", tempo)):
            Path(folder, name).mkdir()
            dist_checkpointing.save(model.sharded_state_dict(), str(Path(folder, name)))
        read = [
            dist_checkpointing.load(model.sharded_state_dict(), str(Path(folder, name)))
            for name, model in (("tempo", stock), ("stock", tempo))
        ]
    return [{key: value for key, value in state.items() if value is not None} for state in read]


def what_was_replaced() -> dict[str, Any]:
    config = gpt_config()
    layer = get_gpt_layer_with_transformer_engine_spec()
    gpt = tempoize(layer, config, INPLACE)
    bert = tempoize(get_bert_layer_with_transformer_engine_spec(), config, INPLACE)
    stock = tempoize(layer, config, OFF)
    return {
        "gpt": report_on(gpt).counts,
        "bert": report_on(bert).counts,
        "stock": report_on(stock).counts,
        "again": report_on(tempoize(gpt, config, INPLACE)).counts,
        "left": [report_on(each).describe_left() for each in (gpt, bert, stock)],
        "left by single layers": report_on(
            tempoize(layer, config, TempoConfig(attention="flash", layers={"1": {"attention": "auto", "norm": "off"}}))
        ).describe_left(),
        "final norm": [transformer_block.LayerNormImpl.__name__, gpt.layer_norm.__name__],
    }


def refusals() -> dict[str, str]:
    found = {}
    linear_qkv = TempoConfig(linear_qkv="recompute")
    for name, value, tempo_config in (
        ("delay_wgrad_compute", True, INPLACE),
        ("tp_comm_overlap", True, INPLACE),
        ("cpu_offloading", True, INPLACE),
        ("quant_recipe", {"some": "recipe"}, INPLACE),
        ("qk_clip", True, INPLACE),
        ("fp8", "e4m3", INPLACE),
        ("linear_qkv", None, linear_qkv),
        ("op fuser", None, INPLACE),
    ):
        config = gpt_config()
        setattr(config, name, value)
        chosen = {"use_te_op_fuser": True} if name == "op fuser" else {}
        spec = get_gpt_layer_with_transformer_engine_spec(**chosen)
        found[name] = find_refusal(functools.partial(tempoize, spec, config, tempo_config))
    return found


def what_auto_takes(**settings: Any) -> list[Any]:
    """The choices and reasons of "auto" in Megatron's own configuration, and beside what has linears do more."""
    config = gpt_config()
    for name, value in settings.items():
        setattr(config, name, value)
    choices = tempoize(get_gpt_layer_with_transformer_engine_spec(), config, TempoConfig()).choices
    return [dataclasses.asdict(choices.config), dict(choices.reasons)]


def measure_all(world_size: int) -> dict[str, Any]:
    cases = GPT_CASES if world_size == 1 else {name: GPT_CASES[name] for name in PARALLEL}
    found: dict[str, Any] = {
        "gpt": {name: measure(build_gpt, run_gpt, *case) for name, case in cases.items() if is_known(*case)},
        "latent": {name: measure(build_latent, run_gpt, *case) for name, case in LATENT_CASES.items()},
        "bert": measure(build_bert, bert_losses, {}, INPLACE),
        "kept": {
            name: kept_bytes(chosen)
            for name, chosen in (
                ("stock", OFF),
                ("inplace", INPLACE),
                ("recompute", ALL_RECOMPUTED),
                ("again", dataclasses.replace(ALL_RECOMPUTED, **AGAIN)),
                ("inplace, again", dataclasses.replace(INPLACE, **AGAIN)),
                ("stock, fc1 again", dataclasses.replace(OFF, linear_fc1="recompute")),
            )
        },
        "fp8": in_fp8(),
    }
    if world_size == 1:
        found |= {"replaced": what_was_replaced(), "refusals": refusals()}
        more = ("nothing", "delay_wgrad_compute", "qk_clip")
        found["auto"] = {name: what_auto_takes(**{name: True}) for name in more}
        found |= {"loaded": load_each_other(exchange_plain), "resumed": load_each_other(exchange_sharded)}
    return found


if __name__ == "__main__":
    script_ranks.main(measure_all)
