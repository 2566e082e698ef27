"""What a run cannot have together, or the estimate does not know together, and what it does not know at all.

`list_refusals` is the one table over a Run, which `Run.check` asks: a condition, and the sentence that a user reads,
with each option as it was typed. `memory.megatron.derived` has the like for options of Megatron-LM that no Run has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tempo_megatron.settings.operations import STACKS_OF_FAMILIES, keeps_copies

MEGATRONS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "ranks": "--world-size",
    "stock": "--transformer-impl",
}
"""Part of a layout, and whose modules stock ones are -> the option of Megatron-LM and of our trainer."""

OURS = {**MEGATRONS, "tp": "--tp", "pp": "--pp", "cp": "--cp", "ep": "--ep", "ranks": "--dp", "stock": "--stock"}
"""Likewise, of the commands estimate, plan and ledger."""


def list_refusals(run: Any, names: Mapping[str, str] = MEGATRONS) -> Iterator[str]:
    """A sentence for each thing that a Run cannot be; each takes it that none before it was said."""
    model, optimizer = run.model, run.optimizer
    tp, pp, cp = (names[part] for part in ("tp", "pp", "cp"))
    is_engine = run.stock == "transformer_engine"
    if model.vocab_size is None:
        yield "the model has no vocab_size; give --vocab-size"
    yield from _list_refused_stages(run, pp)
    if run.mtp_num_layers and model.family != "gpt":
        yield f"--mtp-num-layers is {run.mtp_num_layers}, and the model is no GPT; leave it out"
    if run.hybrid is not None and not run.hybrid.divides(model.hidden_size, run.layout.tp, run.layout.cp):
        yield (
            f"the {run.hybrid.find_num_heads(model.hidden_size)} heads of a Mamba layer and --mamba-num-groups "
            f"{run.hybrid.num_groups} do not divide over each other and over {tp} {run.layout.tp} and {cp} "
            f"{run.layout.cp}; change --mamba-num-heads or --mamba-num-groups"
        )
    if run.layout.cp > 1 and (model.family != "gpt" or not is_engine):
        yield (
            f"{cp} is {run.layout.cp}, which Megatron has for a GPT with Transformer Engine's attention only; "
            f"leave it out, or give {names['stock']} transformer_engine"
        )
    if run.layout.cp > 1 and model.seq_length % (2 * run.layout.cp):
        yield (
            f"--seq-length {model.seq_length} is not a multiple of twice {cp} {run.layout.cp}, as each rank "
            "takes two chunks; change one of them"
        )
    if model.num_experts is not None:
        yield from _list_refused_experts(run, names)
    if _repeats_qkv_for_nothing(run):
        yield (
            'tempo.linear_qkv is "recompute" and tempo.attention "off", whose attention may keep copies of q, k and v, '
            'so that nothing is saved; set tempo.attention to "flash", or tempo.linear_qkv to "off"'
        )
    if run.overlaps_tensor_parallel and not (run.layout.sp and is_engine):
        yield (
            f"--tp-comm-overlap needs {tp} of at least 2, --sequence-parallel and {names['stock']} transformer_engine; "
            "add what is missing, or leave it out"
        )
    if run.deferred_head_gradients is not None and (run.layout.pp == 1 or not run.fuses_gradient_accumulation):
        yield (
            f"--defer-embedding-wgrad-compute needs {pp} of at least 2 and the fusion of gradient accumulation; add "
            "the one and leave --no-gradient-accumulation-fusion out, or leave it out"
        )
    if optimizer.fsdp is not None and (run.layout.pp > 1 or run.mtp_num_layers):
        yield (
            "--use-megatron-fsdp is known to the estimate in one pipeline stage and without multi-token prediction; "
            "leave out what is otherwise"
        )
    if run.float8 is not None and (not is_engine or run.gpu == "a100"):
        yield (
            "--fp8-format needs Transformer Engine's modules and Hopper or Blackwell; leave it out, or change "
            f"{names['stock']} or --gpu"
        )
    if run.float8 == "mxfp8" and run.gpu == "h100":
        yield "--fp8-recipe mxfp8 needs Blackwell; leave it out, or give --gpu gb200"
    if run.float8 == "delayed" and run.float8_layers is not None:
        yield (
            "--first-last-layers-bf16 is not for --fp8-recipe delayed; give tensorwise, blockwise or mxfp8, or leave "
            "it out"
        )
    if run.float8_weights and (run.float8 == "mxfp8" or (run.float8 == "blockwise" and optimizer.fsdp is not None)):
        yield (
            f"--fp8-param-gather gathers weights of --fp8-recipe {run.float8} through buffers that the estimate does "
            "not know; leave it out"
        )


def _repeats_qkv_for_nothing(run: Any) -> bool:
    """Whether some layer has a projection that runs again before stock attention with copies of its q, k and v."""
    model, stacks = run.model, STACKS_OF_FAMILIES[run.model.family]
    is_grouped = model.num_query_groups not in (None, model.num_attention_heads)
    has_copies = keeps_copies(is_megatrons=run.stock != "transformer_engine", is_grouped=is_grouped)
    if "core_attn" in run.recompute or not has_copies:
        return False
    layers = (run.tempo.for_layer(layer, stack) for stack in stacks for layer in range(model.num_layers))
    return any((layer.linear_qkv, layer.attention) == ("recompute", "off") for layer in layers)


def _list_refused_stages(run: Any, pp: str) -> Iterator[str]:
    """Of layers that the stages of a pipeline share."""
    stages, num_layers, chunks = run.layout.pp, run.model.num_layers, run.layout.chunks
    if run.model.family == "t5" and stages > 1:
        yield (
            f"{pp} is {stages}, and the model is a T5, whose encoder and decoder have stages of their own, which the "
            "estimate does not know; leave it out"
        )
    if chunks is None and num_layers % stages:
        yield f"{num_layers} layers are not a multiple of {pp} {stages}; change one of them"
    if chunks is not None and (len(chunks) % stages or sum(chunks) != num_layers or min(chunks) < 0):
        yield (
            f"the pipeline's {len(chunks)} chunks have {sum(chunks)} layers; expected a multiple of {pp} {stages}, and "
            f"the model's {num_layers} layers"
        )
    if chunks is None or len(chunks) == stages:
        return
    group, number = run.micro_batch_group or stages, run.num_micro_batches or 0
    if 0 < number % group < stages or 0 < number < group or group < stages:
        yield (
            f"{number} micro batches pass through chunks in groups of {group}, of which none may be smaller than {pp} "
            f"{stages}, as interleaving needs; change one of them"
        )


def _list_refused_experts(run: Any, names: Mapping[str, str]) -> Iterator[str]:
    """Of a mixture: how its experts divide, what they can take, and what may run at the same time."""
    model, ep, parallel, shared = run.model, names["ep"], run.layout.ep, run.layout.etp
    if model.num_experts % parallel:
        yield f"{ep} {parallel} does not divide the model's {model.num_experts} experts; change it"
    if run.layout.ranks_of_stage % (parallel * shared):
        yield (
            f"{ep} {parallel} times {shared}, over which an expert is split, does not divide the "
            f"{run.layout.ranks_of_stage} ranks of a pipeline stage; change {ep}, {names['tp']} or {names['ranks']}"
        )
    capacity, is_padded = model.moe_expert_capacity_factor, model.moe_pad_expert_input_to_capacity
    if is_padded and run.layout.dispatcher == "flex":
        yield (
            "--moe-pad-expert-input-to-capacity and --moe-token-dispatcher-type flex are both given, which DeepEP "
            "refuses and the estimate does not know; change one of them"
        )
    most = model.num_experts / model.moe_router_topk
    # Rows are taken from the tokens, which are fewer (core/transformer/moe/moe_utils.py: permute of core 0.16.1).
    if is_padded and run.layout.dispatcher == "alltoall" and capacity > most:
        yield (
            f"--moe-expert-capacity-factor is {capacity:g} and experts are padded to it; Megatron's all-to-all fails "
            f"above {most:g}, where an expert has more rows than there are tokens; lower it, or use "
            "--moe-token-dispatcher-type allgather"
        )
    is_cut = run.layout.pp == 1 or len(run.list_chunks(0)) > 1
    if run.layout.overlaps and (run.layout.dispatcher == "allgather" or parallel == 1 or not is_cut):
        yield (
            f"--overlap-moe-expert-parallel-comm needs {ep} of at least 2, --moe-token-dispatcher-type alltoall or "
            "flex, and several chunks of each pipeline stage where there are stages; change what is missing, or leave "
            "it out"
        )
    if run.layout.overlaps and "full" in run.recompute:
        yield "--overlap-moe-expert-parallel-comm and --recompute-granularity full are both given; leave one out"


def refuse(sentences: Iterator[str]) -> None:
    """Raise ValueError with the first sentence, where there is one."""
    if (sentence := next(sentences, None)) is not None:
        raise ValueError(sentence)
