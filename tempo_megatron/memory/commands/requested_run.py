"""Reads what the commands ledger, estimate, plan, order and flops are asked about: a model, or a Run of it.

`estimate` and `plan` read --deepspeed_config, too. Precision, ZeRO stage, batch sizes, the dtype of accumulated
gradients, buckets and offload are the file's, as DeepSpeed reads them: a precision that it does not enable is fp32. An
argument may say what the file leaves to "auto", and otherwise nothing else than the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from tempo_megatron.memory.megatron.command import Command, find_in_script, read_test_case, split_command
from tempo_megatron.memory.refusals import OURS
from tempo_megatron.memory.run import OptimizerSettings, Run, cut_layers, read_recomputation
from tempo_megatron.models.build import DTYPES
from tempo_megatron.models.huggingface.config import read_config_fields
from tempo_megatron.models.layout import Layout
from tempo_megatron.models.shape import ModelShape, make_shape
from tempo_megatron.models.shape_file import read_shape_file
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.words.deepspeed_json import read_deepspeed_json

_PRECISIONS = ("bf16", "fp16")
_TOTAL, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Argument, which not every command has -> field of a Layout.
_SIZES = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "cp": "cp",
    "sequence_parallel": "sp",
}
# Arguments of ours that say nothing of the run, or what the command cannot.
_BESIDE_A_COMMAND = (
    *("command", "words", "script", "world_size", "megatron_yaml", "vocab_size", "use_tempo", "gpu", "gpu_memory"),
    *("allocator", "moe_imbalance", "all_ranks", "tree", "json", "plot", "fixed_memory", "margin", "recompute_allowed"),
)


def take_command(args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> Command | None:
    """The command that stands behind --, or in the file of --script or --megatron-yaml; None where there is a --model.

    Args:
        args: of `estimate` or `plan`.
        add_arguments: declares what they are.

    Raises ValueError where there is neither, and for an argument that says what the command says.
    """
    if not args.words and args.megatron_yaml is None and args.script is None:
        if args.model is None and args.hf is None:
            raise ValueError(
                "nothing is given to look at; give --model with a file of configs/model, --hf with a folder, or a "
                "command of Megatron-LM behind --, such as -- pretrain_gpt.py --num-layers 12 ..."
            )
        if args.model is not None and args.hf is not None:
            raise ValueError("--model and --hf are both given; leave one of them out")
        if args.world_size is not None:
            raise ValueError("--world-size is for a command of Megatron-LM behind --; give --tp, --pp and --dp")
        return None
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for name, value in vars(args).items():
        if name not in _BESIDE_A_COMMAND and not name.startswith("tempo_") and value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is given beside a command of Megatron-LM, which says it; leave it out")
    if args.script is not None and args.megatron_yaml is not None:
        raise ValueError("--script and --megatron-yaml are both given; leave one of them out")
    if args.script is not None:
        return find_in_script(args.script, args.words, args.world_size)
    return split_command(args.words) if args.megatron_yaml is None else read_test_case(args.megatron_yaml, args.words)


def read_requested_run(args: argparse.Namespace, tempo: TempoConfig, deepspeed: Mapping[str, Any] | None = None) -> Run:
    """The run of a command's arguments, of which --micro-batch-size auto is 1.

    Args:
        args: of `ledger`, `estimate` or `plan`.
        tempo: what Tempo's operations do in it.
        deepspeed: the JSON of --deepspeed_config where it says what is trained; `take_deepspeed` has read it.

    Raises ValueError where the model cannot lie so, or an argument does not go with another or with the JSON.
    """
    shape = read_requested_shape(args)
    sizes = {field: getattr(args, name) for name, field in _SIZES.items() if hasattr(args, name)}
    given = {name: getattr(args, name, None) for name in ("micro_batch_size", "num_micro_batches")}
    of_stock = _read_stock(args) if hasattr(args, "stock") else {}
    chunks = cut_layers(
        shape.num_layers,
        sizes.get("pp", 1),
        per_chunk=getattr(args, "num_layers_per_virtual_pipeline_stage", None),
        first=getattr(args, "decoder_first_pipeline_num_layers", None),
        last=getattr(args, "decoder_last_pipeline_num_layers", None),
        names=OURS,
    )
    if args.recompute and "full" not in args.recompute:
        read_recomputation("selective", None, None, args.recompute, model=shape)
    run = Run(
        model=shape,
        tempo=tempo,
        layout=Layout(**sizes, chunks=chunks, **_lay_out_experts(args, shape)),
        optimizer=_read_optimizer(args, deepspeed),
        dtype=DTYPES[args.dtype],
        recompute=tuple(args.recompute),
        **{field: value for field, value in given.items() if value not in (None, "auto")},
        moe_grouped_gemm=shape.num_experts is not None and of_stock.get("stock") == "transformer_engine",
        **of_stock,
    )
    run.check(OURS)
    return run


def _lay_out_experts(args: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """The fields of a Layout for experts.

    Where they are divided, tokens are sent by all-to-all; else
    Megatron's default, all-gather, brings them. An expert is split as the layers are, but for one with biases.

    Raises ValueError where --ep is given for a model without experts.
    """
    parallel = getattr(args, "ep", None)
    if shape.num_experts is None:
        if parallel is not None:
            raise ValueError(f"--ep {parallel} is given, and the model has no experts; leave it out")
        return {}
    return {
        "ep": parallel or 1,
        "etp": 1 if shape.add_bias_linear else args.tp,
        "dispatcher": "allgather" if parallel in (None, 1) else "alltoall",
    }


def read_requested_shape(args: argparse.Namespace) -> ModelShape:
    """The model of --model or --hf, with the values that were typed in place of the file's.

    --dropout is that of attention and of hidden states alike; None leaves both to the file.

    Raises ValueError where the file is no model, or a value does not go with it.
    """
    if "full" in args.recompute and len(args.recompute) > 1:
        raise ValueError("--recompute full already recomputes everything; give it alone")
    is_hf = getattr(args, "hf", None) is not None
    values = {"vocab_size": 50257}
    values |= read_config_fields(args.hf) if is_hf else read_shape_file(args.model)
    dropout = {"attention_dropout": args.dropout, "hidden_dropout": args.dropout}
    given = {"seq_length": args.seq_length, "vocab_size": args.vocab_size, **dropout}
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("max_position_embeddings", 0) < values.get("seq_length", 0):
        values["max_position_embeddings"] = values["seq_length"]
    return make_shape(**values)


def _read_stock(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Run that say what stock modules are.

    Raises ValueError where --stock-attention or --no-masked-softmax-fusion speaks of modules that are not there.
    """
    stock = args.stock or ("local" if args.deepspeed_config else "transformer_engine")
    if args.stock_attention is not None and stock != "transformer_engine":
        raise ValueError(
            f"--stock-attention {args.stock_attention} is Transformer Engine's, and the stock modules are {stock}, "
            "whose attention is unfused; leave it out, or give --stock transformer_engine"
        )
    attention = args.stock_attention or "fused"
    if args.no_masked_softmax_fusion and (stock == "cpu" or (stock == "transformer_engine" and attention != "unfused")):
        raise ValueError(
            f"--no-masked-softmax-fusion is given, and stock attention ({stock}) has no softmax kernel to leave out; "
            "leave it out, or give --stock local or --stock-attention unfused"
        )
    return {
        "stock": stock,
        "stock_attention": attention,
        "masked_softmax_fusion": not args.no_masked_softmax_fusion,
    }


def describe_stock(run: Run) -> str:
    """For people: `Transformer Engine's, with fused attention`."""
    if run.stock == "cpu":
        return "Megatron's local ones on a CPU"
    softmax = "unfused attention" + ("" if run.masked_softmax_fusion else " without a softmax kernel")
    if run.stock == "local":
        return f"Megatron's local ones, with {softmax}"
    attention = {"fused": "fused attention", "flash": "FlashAttention 2", "unfused": softmax}[run.stock_attention]
    return f"Transformer Engine's, with {attention}"


def _read_optimizer(args: argparse.Namespace, deepspeed: Mapping[str, Any] | None) -> OptimizerSettings:
    """Who holds gradients and states. Raises ValueError where arguments and JSON name different ones."""
    zero = getattr(args, "zero", None)
    asked, is_whole = getattr(args, "optimizer", None), getattr(args, "no_distributed_optimizer", False)
    kind = asked or ("megatron" if deepspeed is None and zero is None else "deepspeed")
    if kind == "megatron" and deepspeed is not None:
        raise ValueError(
            "--deepspeed_config is given with --optimizer megatron; that file's optimizer is DeepSpeed's: leave one out"
        )
    if kind != "deepspeed":
        if zero is not None:
            raise ValueError(f"--zero {zero} is given with --optimizer {kind}; ZeRO is DeepSpeed's: leave one out")
        return OptimizerSettings(kind=kind, distributed=not is_whole)
    if is_whole:
        raise ValueError("--no-distributed-optimizer is Megatron's; give --zero 0 for DeepSpeed's")
    return _read_deepspeed_optimizer(deepspeed or {}, zero)


def take_deepspeed(args: argparse.Namespace) -> dict[str, Any] | None:
    """Fill `args` in with what --deepspeed_config says of precision and batch sizes.

    Returns:
        The JSON; None where there is none.

    Raises ValueError where an argument says something else than the JSON.
    """
    config = read_deepspeed_json(args.deepspeed_config) if args.deepspeed_config else None
    _take_precision(args, config)
    _take_batch_sizes(args, config or {})
    return config


def _read_deepspeed_optimizer(config: Mapping[str, Any], zero_stage: int | None = None) -> OptimizerSettings:
    """Who holds gradients and states.

    Raises ValueError where --zero says another stage, or the JSON offloads weights that its stage does not divide.

    Args:
        config: the JSON; empty where there is none.
        zero_stage: --zero, where it is given.
    """
    zero = _read_block(config, "zero_optimization")
    offload = _read_block(zero, "offload_param").get("device", "none")
    stage = _agree("--zero", zero_stage, '"zero_optimization.stage"', zero.get("stage", 0) if config else None)
    if offload != "none" and stage != 3:
        raise ValueError(f'the DeepSpeed JSON has "offload_param", which needs ZeRO 3, and its stage is {stage or 0}')
    return OptimizerSettings.from_deepspeed({**config, "zero_optimization": {**zero, "stage": stage or 0}})


def _take_precision(args: argparse.Namespace, config: Mapping[str, Any] | None) -> None:
    """Fill `args.dtype` in: the JSON's precision, or bf16 where there is no JSON (None).

    Raises ValueError where --dtype is another one.
    """
    if config is None:
        args.dtype = args.dtype or "bf16"
        return
    enabled = {name: _read_block(config, name).get("enabled", False) for name in _PRECISIONS}
    chosen = [name for name, value in enabled.items() if value is True]
    if len(chosen) == 2:
        raise ValueError("the DeepSpeed JSON enables bf16 and fp16; enable one of them")
    if not chosen and enabled.get(args.dtype) == "auto":
        return
    precision = chosen[0] if chosen else "fp32"
    if args.dtype not in (None, precision):
        raise ValueError(
            f"--dtype is {args.dtype}, but the DeepSpeed JSON trains in {precision}, as "
            f"{f'it enables {precision}' if chosen else 'it enables neither bf16 nor fp16'}; leave --dtype out, or "
            "change the JSON"
        )
    args.dtype = precision


def _take_batch_sizes(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Fill `args.micro_batch_size` (else 1) and `args.num_micro_batches` in with what the JSON has as numbers.

    "gradient_accumulation_steps" are micro batches; "train_batch_size" becomes `args.global_batch_size` where there is
    that, else micro batches too.

    Raises ValueError where an argument is another number, or the numbers do not divide.
    """
    micro = _agree("--micro-batch-size", args.micro_batch_size, f'"{_MICRO}"', _read_number(config, _MICRO)) or 1
    steps = _agree("--num-micro-batches", args.num_micro_batches, f'"{_STEPS}"', _read_number(config, _STEPS))
    given = getattr(args, "global_batch_size", None)
    total = _agree("--global-batch-size", given, f'"{_TOTAL}"', _read_number(config, _TOTAL))
    args.micro_batch_size, args.num_micro_batches = micro, steps
    if total is None:
        return
    per_round = args.dp * (steps or 1) * (1 if micro == "auto" else micro)
    if total % per_round or (steps is not None and total != per_round):
        name = "--global-batch-size" if given is not None else f'the DeepSpeed JSON\'s "{_TOTAL}"'
        expected = "a multiple of" if steps is None else f"{steps} times"
        raise ValueError(
            f"{name} {total} is not {expected} --dp {args.dp} times a micro batch of "
            f"{1 if micro == 'auto' else micro}; change one of them"
        )
    if hasattr(args, "global_batch_size"):
        args.global_batch_size, args.num_micro_batches = total, None
    else:
        args.num_micro_batches = total // (args.dp * micro)


def _agree(option: str, given: Any, key: str, configured: Any) -> Any:
    if given is not None and configured is not None and given != configured:
        raise ValueError(
            f"{option} is {given}, but {key} in the DeepSpeed JSON is {configured}; leave {option} out, or change the "
            "JSON"
        )
    return configured if given is None else given


def _read_block(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return config.get(key) or {}


def _read_number(config: Mapping[str, Any], key: str) -> int | None:
    """The JSON's number; None where it is absent or "auto"."""
    value = config.get(key)
    return None if value == "auto" else value
