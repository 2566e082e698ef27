"""Small models of six families in any layout: how they are built, fed and laid out, and what their layers keep.

The weights of a model are a function of each parameter's name in the whole model, so that any layout has the weights
of one process, sliced.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import latent_cases
import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from prediction_cases import make_prediction_spec
from sequence_parts import take_part
from torch import Tensor
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize, tempoize_embedding, tempoize_loss
from tempo_megatron.memory.tape.scopes import SavedStorage, record_saved

FAMILIES = ("GPT", "BERT", "T5", "Llama")
SEQUENCE_FAMILIES = ("GPT", "Llama", "MLA", "MTP")
"""Those that run under context parallelism and with packed rows."""

ACTIVATIONS = {
    "gelu": {"activation_func": F.gelu},
    "squared_relu": {"activation_func": squared_relu},
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "geglu": {"activation_func": F.gelu, "gated_linear_unit": True},
}
LLAMA = {
    **ACTIVATIONS["swiglu"],
    "normalization": "RMSNorm",
    "num_query_groups": 4,
    "add_bias_linear": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "MLA": {"normalization": "RMSNorm", "qk_layernorm": True, "rope_type": "rope", **latent_cases.SIZES},
    # Otherwise Megatron weighs each rank's further tokens by their number on the rank.
    "MTP": {"mtp_num_layers": 2, "calculate_per_token_loss": True},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a model is fed with."""

    seq_length: int = 16
    micro_batch_size: int = 2
    vocab_size: int = 64


DOCUMENTS = (0, 16, 48, 64)
"""Where the documents of a packed row begin and end: multiples of twice the context-parallel ranks, up to 8."""

PACKED_SIZES = Sizes(seq_length=DOCUMENTS[-1], micro_batch_size=1)


def build_config(
    *, dtype: torch.dtype = torch.float32, dropout: float = 0.0, recompute: str = "none", **settings: Any
) -> TransformerConfig:
    """In the layout that is initialised: two layers, h 32, 8 heads, unless `settings` says otherwise."""
    cls = MLATransformerConfig if "kv_lora_rank" in settings else TransformerConfig
    return cls(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 8,
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
            "pipeline_dtype": dtype,
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            "masked_softmax_fusion": False,
            "use_cpu_initialization": True,
            "perform_initialization": False,
            "batch_p2p_sync": False,
            **RECOMPUTE[recompute],
            **settings,
        }
    )


def build_model(
    family: str, config: TransformerConfig, tempo_config: TempoConfig | None, sizes: Sizes, vp_stage: int | None = None
) -> Any:
    """This rank's part of the model, in training mode, without weights: `fill_weights` sets them.

    tempo_config: None for Megatron's own specs, untouched; with `TempoConfig.off()` torch's norms stand in them that
        honour sequence parallelism, which Megatron's refuse without Apex."""
    stages = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
    }
    model: Any
    lengths = (sizes.vocab_size, sizes.seq_length)
    if family == "MLA":
        model = latent_cases.construct_latent(
            config, tempo_config or TempoConfig.off(), *lengths, share_embeddings_and_output_weights=False, **stages
        )
    elif family in SEQUENCE_FAMILIES:
        position = {"position_embedding_type": "rope"} if family == "Llama" else {}
        if family == "MTP":
            position["mtp_block_spec"] = make_prediction_spec(config, tempo_config)
        model = GPTModel(
            config,
            _make_gpt_spec(config, tempo_config, vp_stage),
            *lengths,
            share_embeddings_and_output_weights=family in ("GPT", "MTP"),
            vp_stage=vp_stage,
            **position,
            **stages,
        )
    elif family == "BERT":
        spec = _replace(bert_layer_local_spec, config, tempo_config, vp_stage)
        model = BertModel(
            config, 0, spec, *lengths, share_embeddings_and_output_weights=True, add_binary_head=False,
            vp_stage=vp_stage, **stages,
        )  # fmt: skip
    else:
        specs = (encoder_model_with_local_spec(), decoder_model_with_local_spec())
        replaced = [_replace(spec, config, tempo_config) for spec in specs]
        model = T5Model(config, config, *replaced, *lengths, share_embeddings_and_output_weights=True)
    if tempo_config is not None:
        tempoize_embedding(model, tempo_config)
        tempoize_loss(model, tempo_config)
    return model.to(config.params_dtype).train()


def _make_gpt_spec(config: Any, tempo_config: TempoConfig | None, vp_stage: int | None) -> Any:
    if tempo_config is not None:
        return tempo_block_spec(config, tempo_config, vp_stage=vp_stage)
    norms = {"normalization": config.normalization}
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage, **norms)


def _replace(spec: Any, config: Any, tempo_config: TempoConfig | None, vp_stage: int | None = None) -> Any:
    return spec if tempo_config is None else tempoize(spec, config, tempo_config, vp_stage=vp_stage)


def draw_tokens(first_sample: int, sizes: Sizes) -> Tensor:
    """[b, s + 1] tokens of consecutive samples, each a function of its index."""
    generators = (torch.Generator().manual_seed(1000 + first_sample + i) for i in range(sizes.micro_batch_size))
    return torch.stack([torch.randint(sizes.vocab_size, (sizes.seq_length + 1,), generator=g) for g in generators])


def make_batch(family: str, first_sample: int, sizes: Sizes, *, gives_mask: bool) -> tuple[tuple[Any, ...], Any]:
    """(positional arguments, keyword arguments) of the model's forward; one sample in two has padding where a family
    knows padding; of context-parallel ranks this one's tokens."""
    s, b = sizes.seq_length, sizes.micro_batch_size
    tokens = draw_tokens(first_sample, sizes)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if family in SEQUENCE_FAMILIES:
        positions = torch.arange(s).expand(b, -1).contiguous()
        mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1) if gives_mask else None
        inputs, positions, labels = take_part(inputs, positions, labels)
        return (inputs, positions, mask), {"labels": labels}
    padding = torch.ones(b, s)
    padding[1::2, s - s // 3 :] = 0
    if family == "BERT":
        return (inputs, padding), {"lm_labels": labels}
    hidden = (padding == 0)[:, None, None].expand(b, 1, s, s).contiguous()
    future = torch.ones(b, 1, s, s, dtype=torch.bool).triu(1)
    return (inputs, labels, hidden, future, hidden.clone()), {"lm_labels": labels}


def list_documents() -> list[Sizes]:
    """What a model is fed with of each document of a packed row."""
    return [Sizes(end - start, 1) for start, end in pairwise(DOCUMENTS)]


def make_packed_batch(first_sample: int) -> tuple[tuple[Any, ...], Any]:
    """As `make_batch`, with consecutive samples as the documents of one packed row."""
    documents = list_documents()
    tokens = [draw_tokens(first_sample + i, sizes) for i, sizes in enumerate(documents)]
    inputs, labels = (torch.cat([t[:, part] for t in tokens], 1) for part in (slice(None, -1), slice(1, None)))
    positions = torch.cat([torch.arange(sizes.seq_length) for sizes in documents]).unsqueeze(0)
    inputs, positions, labels = take_part(inputs, positions, labels, boundaries=DOCUMENTS)
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32)
    longest = max(sizes.seq_length for sizes in documents)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return (inputs, positions, None), {"labels": labels, "packed_seq_params": packed}


def read_losses(family: str, output: Any) -> Tensor:
    """[b, s] of what the last stage's forward returns."""
    found: Tensor = output[0] if family == "BERT" else output
    return found


def name_globally(model: Any, name: str) -> str:
    """A parameter's name in the whole model: with its layer's global number, and one name for tied weights."""
    if name == "output_layer.weight" and getattr(model, "share_embeddings_and_output_weights", False):
        return "embedding.word_embeddings.weight"
    block, mark, rest = name.partition(".layers.")
    if not mark:
        return name
    number, _, rest = rest.partition(".")
    layer = getattr(model, block).layers[int(number)]
    return f"{block}.layers.{layer.layer_number - 1}.{rest}"


def fill_weights(model: Any, draw: int = 0) -> None:
    """Weights that depend on a parameter's global name, element by element, whatever part of it this rank holds; of
    another draw other ones."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in model.named_parameters():
        key = name_globally(model, name)
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) + draw)
        full = torch.randn(_full_shape(parameter), generator=generator, dtype=torch.float64)
        full = full * (0.1 if parameter.dim() == 1 else 0.7 * full.size(-1) ** -0.5)
        if "norm" in key and key.endswith("weight"):
            full += 1
        part = _split(full, parameter, key, model.config)[rank] if _is_split(parameter) else full
        with torch.no_grad():
            parameter.copy_(part)


def gather_gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(global name, the whole parameter's gradient) of this rank's parameters, on each rank of a tensor-parallel
    group; of tied weights this rank's part of the sum. Over context-parallel ranks it is the mean, or with per-token
    losses the sum, as in Megatron."""
    group, size = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    for name, parameter in model.named_parameters():
        key = name_globally(model, name)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().contiguous()
        if parallel_state.get_context_parallel_world_size() > 1:
            # In float32 at least, as Megatron's optimizers add up.
            total = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
            if not model.config.calculate_per_token_loss:
                total /= parallel_state.get_context_parallel_world_size()
            gradient = total.to(gradient.dtype)
        if size > 1 and _is_split(parameter):
            parts = [torch.empty_like(gradient) for _ in range(size)]
            torch.distributed.all_gather(parts, gradient, group=group)
            gradient = _join(parts, parameter, key, model.config)
        elif size > 1 and getattr(parameter, "sequence_parallel", False):
            gradient = gradient.clone()
            torch.distributed.all_reduce(gradient, group=group)
        yield key, gradient


def _is_split(parameter: Any) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _full_shape(parameter: Any) -> list[int]:
    shape = list(parameter.shape)
    if _is_split(parameter):
        shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def _is_gated(key: str, config: Any) -> bool:
    return bool(config.gated_linear_unit) and ".linear_fc1." in key


def _split(full: Tensor, parameter: Any, key: str, config: Any) -> list[Tensor]:
    size = parallel_state.get_tensor_model_parallel_world_size()
    if not _is_gated(key, config):
        return list(full.chunk(size, parameter.partition_dim))
    # Each rank has its part of the gate and then its part of the other half.
    gates, others = (half.chunk(size) for half in full.chunk(2))
    return [torch.cat(parts) for parts in zip(gates, others, strict=True)]


def _join(parts: list[Tensor], parameter: Any, key: str, config: Any) -> Tensor:
    if not _is_gated(key, config):
        return torch.cat(parts, parameter.partition_dim)
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves])


def record_stacks(model: Any, forward: Callable[[], Any]) -> tuple[Any, dict[str, list[SavedStorage]]]:
    """What `forward` returns, and stack (encoder, decoder, mtp) -> what its layers keep, without its final norm."""
    output, kept = record_saved(model, forward)
    found: dict[str, list[SavedStorage]] = {}
    for saved in kept:
        stack, _, rest = saved.operation.partition(".")
        is_mask = saved.dtype == torch.bool and saved.shape[1:2] == (1,)  # the micro batch's own
        if stack in ("encoder", "decoder", "mtp") and not rest.startswith("final_layernorm") and not is_mask:
            found.setdefault(stack, []).append(saved)
    return output, found
