"""Tempo in Megatron-DeepSpeed, which carries a transformer.py and a megatron.core (0.2.0) of its own.

    from tempo_megatron import TempoConfig
    from tempo_megatron.megatron_lm.megatron_deepspeed import use_tempo
    use_tempo(get_args(), TempoConfig())  # before the model is built

or no line at all: `python -m tempo_megatron run pretrain_gpt.py ... --use-tempo` patches its scripts.

Megatron-DeepSpeed has no layer specs, and its constructors name their own class in `super()`: a subclass in that
class's place would construct itself without end. Tempo therefore replaces the functions that compute: the forwards of
the norms, the MLP and core attention, and the functions that add bias and dropout. Modules, parameters and checkpoint
keys stay. The embedding's dropout and the loss head stay stock.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import megatron.model
import torch
from megatron import arguments as megatron_arguments
from megatron import get_args
from megatron.core import parallel_state
from megatron.model import transformer
from megatron.model.enums import AttnMaskType, LayerType
from torch import Tensor

from tempo_kernels.attention import attention
from tempo_kernels.dropout_add import bias_dropout_add
from tempo_kernels.gelu import gelu
from tempo_kernels.glu import swiglu
from tempo_kernels.norm import layer_norm, rms_norm
from tempo_kernels.recompute import drop
from tempo_kernels.squared_relu import squared_relu
from tempo_megatron.megatron_lm.samples import announce_micro_batch
from tempo_megatron.megatron_lm.versions import wrap
from tempo_megatron.settings.activations import find_inplace_refusal
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.dropout_rng import Site, Stack, find_key_and_sample

_FLASH_FLAGS = ("use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")
_MODELS = ("GPTModel", "GPTModelPipe", "BertModel", "T5Model")


class Place(NamedTuple):
    """Where in the model a layer stands."""

    layer_number: int
    """Global, from 1."""
    stack: Stack


class _Calls:
    """The state of a running model: which layer draws next, and which micro batch it is."""

    def __init__(self) -> None:
        self.sites: list[tuple[Place, Iterator[Site]]] = []
        """The layers whose forward runs, the innermost last, each with the sites where it has yet to add."""
        self.consumed_samples = -1
        self.micro_batch = 0
        self.in_use: tuple[TempoConfig, dict[str, str]] | None = None


_CALLS = _Calls()


def use_tempo(args: argparse.Namespace, tempo_config: TempoConfig) -> tuple[TempoConfig, dict[str, str]]:
    """Give the models that this process builds from now on the operations that `tempo_config` names.

    Args:
        args: Megatron-DeepSpeed's, validated.
        tempo_config: "auto" becomes the first of in place, recompute and off that can be had here.

    Returns:
        (the choices without "auto", why an operation got less than its first choice).

    Keeps for backward what `tempo_kernels`' operations keep; see their docstrings.
    Raises ValueError where a written choice cannot be had, and where the process has other choices already.
    """
    chosen, reasons = choose(args, tempo_config)
    if _CALLS.in_use is not None:
        if _CALLS.in_use[0] != chosen:
            raise ValueError(
                f"use_tempo was called with {_CALLS.in_use[0].describe()} before and now with {chosen.describe()}; "
                "expected one configuration for a process"
            )
        return _CALLS.in_use
    if chosen.norm != "off":
        for norm in {megatron.model.LayerNorm, megatron.model.RMSNorm}:
            norm.forward = _run_norm
    if chosen.activation != "off":
        transformer.ParallelMLP.forward = functools.partialmethod(_run_mlp, keep=chosen.activation)
    if chosen.attention != "off":
        transformer.CoreAttention.forward = functools.partialmethod(_run_attention, form=chosen.attention)
    if chosen.dropout != "off":
        transformer.bias_dropout_add_fused_train = _add_bias_and_dropout
        wrap(
            transformer,
            "get_bias_dropout_add",
            lambda choose, training: _add_bias_and_dropout if training else choose(training),
        )
    wrap(transformer.ParallelTransformerLayer, "__init__", _note_place)
    wrap(transformer.ParallelTransformerLayer, "forward", _run_layer)
    for name in _MODELS:
        wrap(getattr(megatron.model, name), "forward", _count_micro_batch)
    _CALLS.in_use = (chosen, reasons)
    return _CALLS.in_use


def choose(args: argparse.Namespace, tempo_config: TempoConfig) -> tuple[TempoConfig, dict[str, str]]:
    """(`tempo_config` without "auto", per operation why "auto" took less than its first choice).

    Raises ValueError where a written choice cannot be had, and where single layers have values of their own.
    """
    if tempo_config.layers:
        raise ValueError(
            "tempo.layers is given, and Tempo replaces Megatron-DeepSpeed's functions for all layers at once; "
            "expected one value for each operation; leave layers out"
        )
    if tempo_config.offloads:
        raise ValueError(
            f"tempo.offload is {tempo_config.offload}, and it moves what Megatron-core's layers keep, not those of "
            "Megatron-DeepSpeed; leave offload out"
        )
    chosen: dict[str, Any] = {}
    reasons = {}
    for name, operation in OPERATIONS.items():
        written = getattr(tempo_config, name)
        values = operation.preference if written == "auto" else (written,)
        obstacles = {value: _find_obstacle(args, name, value) for value in values}
        first = obstacles[values[0]]
        if written != "auto" and first is not None:
            raise ValueError(f'tempo.{name} is "{written}", but {first}; set it to "auto" or "off"')
        chosen[name] = next(value for value, obstacle in obstacles.items() if obstacle is None)
        if first is not None:
            reasons[name] = first
    return TempoConfig(**chosen, check=tempo_config.check), reasons


def _find_obstacle(args: argparse.Namespace, operation: str, choice: str) -> str | None:
    """Why `choice` cannot be had for `operation`; None where it can."""
    if choice == "off":
        return None
    if getattr(args, "ds_sequence_parallel_fpdt", False):
        return "ds_sequence_parallel_fpdt computes layers in chunks of its own"
    if getattr(args, "retro_add_retriever", False):
        return "retro_add_retriever nests layers of the same numbers, which would draw the same masks"
    if operation in ("linear_fc1", "linear_qkv") or (operation, choice) == ("attention", "recompute"):
        return "Megatron-DeepSpeed's linears cannot be run again, or let go of their input, from outside"
    if operation == "moe_permute":
        return "Megatron-DeepSpeed's experts are DeepSpeed's"
    if operation == "loss":
        return "Megatron-DeepSpeed's loss head has no place for a fused one"
    if operation == "activation":
        own = next((flag for flag in ("openai_gelu", "onnx_safe") if getattr(args, flag, False)), None)
        if own is not None:
            return f"--{own.replace('_', '-')} has a formula of its own"
        return find_inplace_refusal("swiglu") if args.swiglu and choice == "inplace" else None
    if operation == "norm" and choice == "recompute":
        return (
            "Megatron-DeepSpeed's linears do not say when they have used a norm's output, so that it cannot be dropped"
        )
    if operation == "attention":
        flags = [f"--{flag.replace('_', '-')}" for flag in _FLASH_FLAGS if getattr(args, flag, False)]
        return f"{flags[0]} runs an attention of its own that keeps no s*s tensor" if flags else None
    return None


def patch_scripts(
    tempo_config: TempoConfig, report_file: str | None, add_options: Callable[[Any], argparse.ArgumentParser]
) -> None:
    """Have the checkout's parser take `add_options`, and its models built with `tempo_config` where that is not off."""
    wrap(megatron_arguments, "_add_network_size_args", lambda add, parser: add_options(add(parser)))
    if tempo_config.is_off:
        return

    def build_with_tempo(build: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        options = get_args()
        if _CALLS.in_use is None:
            chosen, reasons = use_tempo(options, tempo_config)
            if options.rank == 0:
                _publish(chosen, reasons, report_file)
        build(model, *args, **kwargs)

    for name in _MODELS:
        wrap(getattr(megatron.model, name), "__init__", build_with_tempo)


def _publish(chosen: TempoConfig, reasons: Mapping[str, str], report_file: str | None) -> None:
    lines = [f"tempo: Megatron-DeepSpeed, {chosen.describe()}"]
    lines += [f"tempo:   {name}={getattr(chosen, name)}: {reason}" for name, reason in reasons.items()]
    if chosen.check != "off":
        lines.append("tempo: not checked: Megatron-DeepSpeed's functions are replaced, and no layer of its own is left")
    print("\n".join(lines), flush=True)
    if report_file:
        content = {"megatron_deepspeed": True, "tempo": dataclasses.asdict(chosen), "reasons": dict(reasons)}
        Path(report_file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _count_micro_batch(forward: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Announce each training micro batch. A stage runs the micro batches of a step in order, and the trainer counts
    their samples after the step."""
    if model.training and torch.is_grad_enabled():
        options = get_args()
        if options.consumed_train_samples != _CALLS.consumed_samples:
            _CALLS.consumed_samples, _CALLS.micro_batch = options.consumed_train_samples, 0
        announce_micro_batch(options, _CALLS.micro_batch)
        _CALLS.micro_batch += 1
    return forward(model, *args, **kwargs)


def _note_place(build: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    build(layer, *args, **kwargs)
    mask_type = kwargs.get("self_attn_mask_type", args[3] if len(args) > 3 else AttnMaskType.padding)
    is_decoder = layer.layer_type == LayerType.decoder or mask_type == AttnMaskType.causal
    # GPTModelPipe counts its layers from 0, all other models from 1.
    first = 1 if isinstance(layer, transformer.ParallelTransformerLayerPipe) else 0
    layer.tempo_place = Place(layer.layer_number + first, Stack.DECODER if is_decoder else Stack.ENCODER)
    for name, site in (("self_attention", Site.ATTENTION), ("inter_attention", Site.CROSS_ATTENTION)):
        for module in getattr(layer, name, torch.nn.Identity()).modules():
            if isinstance(module, transformer.CoreAttention):
                module.tempo_place, module.tempo_site = layer.tempo_place, site


def _run_layer(forward: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward. The functions that add get tensors only, so this notes the layer and its sites for them."""
    cross = [Site.CROSS_ATTENTION_OUTPUT] if layer.layer_type == LayerType.decoder else []
    sites = iter([Site.SELF_ATTENTION_OUTPUT, *cross, Site.MLP_OUTPUT])
    _CALLS.sites.append((_find_place(layer), sites))
    try:
        return forward(layer, *args, **kwargs)
    finally:
        _CALLS.sites.pop()


def _find_place(module: Any) -> Place:
    place: Place | None = getattr(module, "tempo_place", None)
    if place is None:
        raise RuntimeError(
            f"this {type(module).__name__} was built before use_tempo was called; build the model after it"
        )
    return place


def _add_bias_and_dropout(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
    """residual + dropout(x + bias) of hidden states [s or a rank's part of s, b, h]; bias comes expanded to them."""
    if bias is not None and (vector := _find_vector(bias)) is not None:
        bias = vector
    elif bias is not None:
        x, bias = x + bias, None
    place, sites = _CALLS.sites[-1]
    site = next(sites)
    if prob == 0.0:
        return residual + (x if bias is None else x + bias)
    if residual.dtype != x.dtype:
        # As type promotion does it in Megatron-DeepSpeed's sum.
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, residual, bias = x.to(dtype), residual.to(dtype), None if bias is None else bias.to(dtype)
    key, first_sample = find_key_and_sample(place.layer_number, site, place.stack)
    # Which part of the sequence this rank's hidden states are.
    is_split = get_args().sequence_parallel
    rank = parallel_state.get_tensor_model_parallel_rank() if is_split else _find_ulysses_rank() or 0
    first_row = rank * x.size(0)
    return bias_dropout_add(x, bias, residual, p=prob, key=key, first_sample=first_sample, first_row=first_row)


def _find_vector(bias: Tensor) -> Tensor | None:
    """The vector [h] that `bias` is expanded from, whose gradient is then a sum and no tensor of bias's shape."""
    base = bias._base
    is_vector = base is not None and base.dim() == 1 and base.size(0) == bias.size(-1)
    return base if is_vector and not any(bias.stride()[:-1]) else None


def _find_ulysses_rank() -> int | None:
    """The rank of DeepSpeed's sequence parallelism (Ulysses); None without it."""
    if not parallel_state.sequence_parallel_is_initialized() or parallel_state.get_sequence_parallel_world_size() == 1:
        return None
    return int(parallel_state.get_sequence_parallel_rank())


def _run_norm(norm: Any, x: Tensor) -> Tensor:
    """y of x's shape; RMSNorm is the one without a bias."""
    if getattr(norm, "bias", None) is None:
        return rms_norm(x, norm.weight, norm.eps)
    return layer_norm(x, norm.weight, norm.bias, norm.eps, zero_centered=getattr(norm, "apply_layernorm_1p", False))


def _run_mlp(mlp: Any, hidden_states: Tensor, keep: str) -> tuple[Tensor, Tensor | None]:
    """(output, bias or None) of hidden states [..., h]."""
    x, bias = mlp.dense_h_to_4h(hidden_states)
    if mlp.swiglu:
        y = swiglu(x, bias)
    elif mlp.activation_func is torch.nn.functional.gelu:
        y = gelu(x, bias, "tanh" if mlp.bias_gelu_fusion else "none", keep=keep)
    else:
        y = squared_relu(x, bias, keep=keep)
    output, output_bias = mlp.dense_4h_to_h(y)
    if keep == "recompute":
        drop(y, after=output)
    return output, output_bias


def _run_attention(core: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: str) -> Tensor:
    """[sq, b, a/p * d] of query [sq, b, a/p, d] and key, value [sk, b, a/p, d]; mask is bool, True = hidden."""
    place = _find_place(core)
    # The mask of a causal layer is the causal one, unless documents are told apart or keys come from a cache.
    causal = core.attn_mask_type == AttnMaskType.causal and query.size(0) == key.size(0)
    causal &= mask is None or not get_args().reset_attention_mask
    dropout_p = core.attention_dropout.p if core.training else 0.0
    draw: dict[str, Any] = {}
    if dropout_p > 0:
        dropout_key, first_sample = find_key_and_sample(place.layer_number, core.tempo_site, place.stack)
        ulysses_rank = _find_ulysses_rank()
        rank = parallel_state.get_tensor_model_parallel_rank() if ulysses_rank is None else ulysses_rank
        draw = {"dropout_key": dropout_key, "first_sample": first_sample, "first_head": rank * query.size(2)}
    context = attention(
        query,
        key,
        value,
        causal=causal,
        # A curriculum of lengths hands out the mask of full length.
        mask=None if causal or mask is None else mask[..., : query.size(0), : key.size(0)],
        softmax_scale=query.size(3) ** -0.5,
        dropout_p=dropout_p,
        form=form,
        **draw,
    )
    return context.flatten(2)
