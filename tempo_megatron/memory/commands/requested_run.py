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
from tempo_megatron.words.deepspeed_json import BATCH_KEYS, read_deepspeed_json

# Arguments of ours that say nothing of the run, or what the command cannot.
_BESIDE_A_COMMAND = (
    *("command", "words", "script", "world_size", "megatron_yaml", "vocab_size", "use_tempo", "gpu", "gpu_memory"),
    *("allocator", "moe_imbalance", "all_ranks", "tree", "json", "plot", "fixed_memory", "margin", "recompute_allowed"),
)


def take_command(args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> Command | None:
    """The command that stands behind --, or in the file of --script or --megatron-yaml; None where there is a --model.

    add_arguments: declares the arguments.

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
    """The run of the arguments of `ledger`, `estimate` or `plan`, of which --micro-batch-size auto is 1.

    deepspeed: the JSON of --deepspeed_config where it says what is trained; `take_deepspeed` has read it.

    Raises ValueError where the model cannot lie so, or an argument does not go with another or with the JSON.
    """
    shape = read_requested_shape(args)
    given = {name: value for name, value in vars(args).items() if value is not None}
    parallel: dict[str, Any] = {name: given[name] for name in ("tp", "pp", "dp", "cp") if name in given}
    parallel["sp"] = args.sequence_parallel
    if shape.num_experts is None:
        if "ep" in given:
            raise ValueError(f"--ep {args.ep} is given, and the model has no experts; leave it out")
    else:
        # Where experts are divided, tokens are sent by all-to-all; else Megatron's default, all-gather, brings them. An
        # expert is split as the layers are, but for one with biases.
        parallel |= {"ep": given.get("ep", 1), "etp": 1 if shape.add_bias_linear else args.tp}
        parallel["dispatcher"] = "allgather" if parallel["ep"] == 1 else "alltoall"
    of_stock = _read_stock(args)
    chunks = cut_layers(
        shape.num_layers,
        given.get("pp", 1),
        per_chunk=given.get("num_layers_per_virtual_pipeline_stage"),
        first=given.get("decoder_first_pipeline_num_layers"),
        last=given.get("decoder_last_pipeline_num_layers"),
        names=OURS,
    )
    if args.recompute and "full" not in args.recompute:
        asked = argparse.Namespace(recompute_granularity="selective", recompute_modules=args.recompute)
        read_recomputation(asked, model=shape)
    batch = {name: given[name] for name in ("micro_batch_size", "num_micro_batches") if name in given}
    run = Run(
        model=shape,
        tempo=tempo,
        layout=Layout(**parallel, chunks=chunks),
        optimizer=_read_optimizer(given, deepspeed),
        dtype=DTYPES[args.dtype],
        recompute=tuple(args.recompute),
        **{name: value for name, value in batch.items() if value != "auto"},
        moe_grouped_gemm=shape.num_experts is not None and of_stock["stock"] == "transformer_engine",
        **of_stock,
    )
    run.check(OURS)
    return run


def read_requested_shape(args: argparse.Namespace) -> ModelShape:
    """The model of --model or --hf, with the values that were typed in place of the file's.

    --dropout is that of attention and of hidden states alike; None leaves both to the file.

    Raises ValueError where the file is no model, or a value does not go with it.
    """
    if "full" in args.recompute and len(args.recompute) > 1:
        raise ValueError("--recompute full already recomputes everything; give it alone")
    values = {"vocab_size": 50257}
    values |= read_shape_file(args.model) if getattr(args, "hf", None) is None else read_config_fields(args.hf)
    dropout = {"attention_dropout": args.dropout, "hidden_dropout": args.dropout}
    given = {"seq_length": args.seq_length, "vocab_size": args.vocab_size, **dropout}
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("max_position_embeddings", 0) < values.get("seq_length", 0):
        values["max_position_embeddings"] = values["seq_length"]
    return make_shape(**values)


def _read_stock(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Run that say what stock modules are."""
    stock = args.stock or ("local" if args.deepspeed_config else "transformer_engine")
    if args.stock_attention is not None and stock != "transformer_engine":
        raise ValueError(
            f"--stock-attention {args.stock_attention} is Transformer Engine's, and the stock modules are {stock}, "
            "whose attention is unfused; leave it out, or give --stock transformer_engine"
        )
    attention, fuses_softmax = args.stock_attention or "fused", not args.no_masked_softmax_fusion
    if not fuses_softmax and (stock == "cpu" or (stock == "transformer_engine" and attention != "unfused")):
        raise ValueError(
            f"--no-masked-softmax-fusion is given, and stock attention ({stock}) has no softmax kernel to leave out; "
            "leave it out, or give --stock local or --stock-attention unfused"
        )
    return {"stock": stock, "stock_attention": attention, "masked_softmax_fusion": fuses_softmax}


def describe_stock(run: Run) -> str:
    """For people: `Transformer Engine's, with fused attention`."""
    if run.stock == "cpu":
        return "Megatron's local ones on a CPU"
    softmax = "unfused attention" + ("" if run.masked_softmax_fusion else " without a softmax kernel")
    if run.stock == "local":
        return f"Megatron's local ones, with {softmax}"
    attention = {"fused": "fused attention", "flash": "FlashAttention 2", "unfused": softmax}[run.stock_attention]
    return f"Transformer Engine's, with {attention}"


def _read_optimizer(given: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> OptimizerSettings:
    """Who holds gradients and states."""
    zero_stage, is_whole = given.get("zero"), given.get("no_distributed_optimizer", False)
    kind = given.get("optimizer") or ("megatron" if deepspeed is None and zero_stage is None else "deepspeed")
    if kind == "megatron" and deepspeed is not None:
        raise ValueError(
            "--deepspeed_config is given with --optimizer megatron; that file's optimizer is DeepSpeed's: leave one out"
        )
    if kind != "deepspeed":
        if zero_stage is not None:
            raise ValueError(
                f"--zero {zero_stage} is given with --optimizer {kind}; ZeRO is DeepSpeed's: leave one out"
            )
        return OptimizerSettings(kind=kind, distributed=not is_whole)
    if is_whole:
        raise ValueError("--no-distributed-optimizer is Megatron's; give --zero 0 for DeepSpeed's")
    config = deepspeed or {}
    zero = config.get("zero_optimization") or {}
    configured = {"zero_optimization.stage": zero.get("stage", 0)} if config else {}
    stage = _agree(given, "zero", configured, "zero_optimization.stage") or 0
    if (zero.get("offload_param") or {}).get("device", "none") != "none" and stage != 3:
        raise ValueError(f'the DeepSpeed JSON has "offload_param", which needs ZeRO 3, and its stage is {stage}')
    return OptimizerSettings.from_deepspeed({**config, "zero_optimization": {**zero, "stage": stage}})


def take_deepspeed(args: argparse.Namespace) -> dict[str, Any] | None:
    """Fills `args` in with what --deepspeed_config says of precision and batch sizes, else with bf16 and one sample.

    Returns:
        The JSON; None where there is none.

    Raises ValueError where an argument says something else than the JSON, or the batch sizes do not divide.
    """
    config = read_deepspeed_json(args.deepspeed_config) if args.deepspeed_config else None
    args.dtype = (args.dtype or "bf16") if config is None else _read_precision(args.dtype, config)
    _take_batch_sizes(args, config or {})
    return config


def _read_precision(given: str | None, config: Mapping[str, Any]) -> str:
    enabled = {name: (config.get(name) or {}).get("enabled", False) for name in ("bf16", "fp16")}
    chosen = [name for name, value in enabled.items() if value is True]
    if len(chosen) == 2:
        raise ValueError("the DeepSpeed JSON enables bf16 and fp16; enable one of them")
    if given is not None and not chosen and enabled.get(given) == "auto":
        return given
    precision, enables = (chosen[0], chosen[0]) if chosen else ("fp32", "neither bf16 nor fp16")
    if given not in (None, precision):
        raise ValueError(
            f"--dtype is {given}, but the DeepSpeed JSON trains in {precision}, as it enables {enables}; leave --dtype "
            "out, or change the JSON"
        )
    return precision


def _take_batch_sizes(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """ "gradient_accumulation_steps" are micro batches; "train_batch_size" becomes `args.global_batch_size` where there
    is that, else micro batches too."""
    names = ("global_batch_size", "micro_batch_size", "num_micro_batches")
    total, micro, steps = (_agree(vars(args), *each) for each in zip(names, [config] * 3, BATCH_KEYS, strict=True))
    args.micro_batch_size, args.num_micro_batches = micro or 1, steps
    if total is None:
        return
    size = 1 if micro in (None, "auto") else micro
    per_round = args.dp * (steps or 1) * size
    if total % per_round or (steps is not None and total != per_round):
        is_given = getattr(args, "global_batch_size", None) is not None
        name = "--global-batch-size" if is_given else f'the DeepSpeed JSON\'s "{BATCH_KEYS[0]}"'
        expected = "a multiple of" if steps is None else f"{steps} times"
        raise ValueError(
            f"{name} {total} is not {expected} --dp {args.dp} times a micro batch of {size}; change one of them"
        )
    if hasattr(args, "global_batch_size"):
        args.global_batch_size, args.num_micro_batches = total, None
    else:
        args.num_micro_batches = total // (args.dp * size)


def _agree(arguments: Mapping[str, Any], name: str, config: Mapping[str, Any], key: str) -> Any:
    """What is given or configured. Raises ValueError where both are, and differ."""
    given, configured = arguments.get(name), None if config.get(key) == "auto" else config.get(key)
    if given is not None and configured is not None and given != configured:
        option = f"--{name.replace('_', '-')}"
        raise ValueError(
            f'{option} is {given}, but "{key}" in the DeepSpeed JSON is {configured}; leave {option} out, or change '
            "the JSON"
        )
    return configured if given is None else given
