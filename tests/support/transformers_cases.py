"""Tiny models of transformers with random weights, and what a layer of each has to keep for backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import resolve_name

from tempo_megatron.memory.tape.scopes import Scopes
from tempo_torch import tempoize

H, HEADS, FFN, VOCAB = 256, 2, 1024, 128
B, S = 4, 128


def checkpoint_layers(model: Any, **given: Any) -> None:
    """Lets a model run its layers again in backward, by torch.utils.checkpoint with these arguments."""
    # Its name before transformers 5.22, with whose successor an older one would not do.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(given)


@dataclasses.dataclass(frozen=True)
class Case:
    """One architecture.

    Args:
        config, model: classes of transformers.
        layer: the qualified name of a layer between others.
        settings: of the configuration; sizes are filled in under the names of `names`.
        extra: sbh that the layer has to keep beside the inputs of its linears and q, k, v.
        left: sbh that stay above this floor.
    """

    config: str
    model: str
    layer: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    inputs: str = "ids"
    p: tuple[str, ...] = ()
    extra: float = 0.0
    left: float = 0.0

    def build(self, p: float = 0.1, dtype: torch.dtype = torch.float32, small: bool = False, **more: Any) -> Any:
        h, heads, ffn = (64, 4, 128) if small else (H, HEADS, FFN)
        sizes = dict(zip(self.names, (h, 3, heads, ffn), strict=False))
        torch.manual_seed(0)
        settings = {**sizes, **dict.fromkeys(self.p, p), **_scale(self.settings, h), **more}
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**settings))
        return model.to(dtype).train()

    def make_inputs(self, dtype: torch.dtype = torch.float32, small: bool = False) -> dict[str, Tensor]:
        batch, length = (2, 24) if small else (B, S)
        ids = torch.arange(batch * length).view(batch, length) * 7 % (VOCAB - 3) + 3
        generator = torch.Generator().manual_seed(1)
        if self.inputs == "ids":
            return {"input_ids": ids}
        if self.inputs == "pixels":
            side = 4 * round(length**0.5)
            return {"pixel_values": torch.randn(batch, 3, side, side, generator=generator).to(dtype)}
        if self.inputs == "mel":
            features = torch.randn(batch, 80, 2 * S, generator=generator).to(dtype)
            return {"input_features": features, "decoder_input_ids": ids[:, :4]}
        if self.inputs == "squares":
            return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=generator).to(dtype)}
        if self.inputs == "labels":
            return {"input_ids": ids, "labels": ids}
        if self.inputs == "wave":
            return {"input_values": torch.randn(batch, 10 * length + 10, generator=generator).to(dtype)}
        return {"input_ids": ids, "decoder_input_ids": ids}


def find_heads(h: int) -> int:
    return HEADS if h == H else 4


def _scale(settings: dict[str, Any], h: int) -> dict[str, Any]:
    return {name: value(h) if callable(value) else value for name, value in settings.items()}


IDS = {"vocab_size": VOCAB, "max_position_embeddings": S + 8, "use_cache": False}
BERT_P = ("hidden_dropout_prob", "attention_probs_dropout_prob")
# Gate and up, of which the product is made again.
_GATED_EXTRA = 2.0 * FFN / H

CASES: dict[str, Case] = {
    "BERT": Case("BertConfig", "BertModel", "encoder.layer.1", IDS, p=BERT_P),
    "RoBERTa": Case("RobertaConfig", "RobertaModel", "encoder.layer.1", IDS, p=BERT_P),
    "ELECTRA": Case(
        "ElectraConfig", "ElectraModel", "encoder.layer.1", {**IDS, "embedding_size": lambda h: h}, p=BERT_P
    ),
    "DistilBERT": Case(
        "DistilBertConfig", "DistilBertModel", "transformer.layer.1", IDS,
        ("dim", "n_layers", "n_heads", "hidden_dim"), p=("dropout", "attention_dropout"),
    ),
    "GPT-2": Case(
        "GPT2Config", "GPT2Model", "h.1",
        {"vocab_size": VOCAB, "n_positions": S + 8, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0},
        ("n_embd", "n_layer", "n_head", "n_inner"), p=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "OPT": Case(
        "OPTConfig", "OPTModel", "decoder.layers.1",
        {**IDS, "word_embed_proj_dim": lambda h: h, "pad_token_id": 1, "activation_function": "gelu"},
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim"), p=("dropout", "attention_dropout"),
    ),
    "GPT-NeoX": Case(
        "GPTNeoXConfig", "GPTNeoXModel", "layers.1", IDS, p=("hidden_dropout", "attention_dropout"),
    ),
    "ViT": Case(
        "ViTConfig", "ViTModel", "layers.1",
        {"image_size": lambda h: 44 if h == H else 20, "patch_size": 4}, inputs="pixels", p=BERT_P,
    ),
    "Whisper encoder": Case(
        "WhisperConfig", "WhisperModel", "encoder.layers.1",
        {"vocab_size": VOCAB, "max_source_positions": S, "pad_token_id": 0, "decoder_layers": 1,
         "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "decoder_start_token_id": 1, "bos_token_id": 1,
         "eos_token_id": 2, "max_target_positions": S, "use_cache": False},
        ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"), inputs="mel",
        p=("dropout", "attention_dropout", "activation_dropout"),
    ),
    "wav2vec2": Case(
        "Wav2Vec2Config", "Wav2Vec2Model", "encoder.layers.1",
        {"conv_dim": (32,), "conv_stride": (10,), "conv_kernel": (10,), "num_conv_pos_embeddings": 16,
         "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "mask_time_prob": 0.0, "apply_spec_augment": False},
        inputs="wave", p=("hidden_dropout", "attention_dropout", "activation_dropout"),
    ),
    "ESM-2": Case(
        "EsmConfig", "EsmModel", "encoder.layer.1",
        {**IDS, "position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2, "token_dropout": False},
        p=BERT_P,
    ),
    "ModernBERT": Case(
        "ModernBertConfig", "ModernBertModel", "layers.2",
        {**IDS, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
        p=("embedding_dropout", "mlp_dropout", "attention_dropout"),
        extra=_GATED_EXTRA,
    ),
    "Llama": Case(
        "LlamaConfig", "LlamaModel", "layers.1", {**IDS, "num_key_value_heads": find_heads}, p=("attention_dropout",),
        extra=_GATED_EXTRA,
    ),
    "Qwen2": Case(
        "Qwen2Config", "Qwen2Model", "layers.1", {**IDS, "num_key_value_heads": find_heads}, p=("attention_dropout",),
        extra=_GATED_EXTRA,
    ),
    "Gemma": Case(
        "GemmaConfig", "GemmaModel", "layers.1",
        {**IDS, "num_key_value_heads": find_heads, "head_dim": lambda h: h // find_heads(h)},
        p=("attention_dropout",), extra=_GATED_EXTRA,
    ),
    "BART decoder": Case(
        "BartConfig", "BartModel", "decoder.layers.1",
        {**IDS, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "pad_token_id": 1},
        ("d_model", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"), inputs="pair",
        p=("dropout", "attention_dropout", "activation_dropout"),
        # The encoder's output, which all layers share; the statistics of three norms and two attentions.
        extra=-2.0, left=0.1,
    ),
}  # fmt: skip


@contextlib.contextmanager
def with_bytes_of_a_gpu() -> Iterator[None]:
    """Stock keeps here what it keeps on a GPU: a byte per dropped element, and no s*s tensor for dropped attention."""
    resolve_name(F.dropout)  # torch makes its table of names once, and must not find what stands here in them
    attend = F.scaled_dot_product_attention

    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def attend_without_mask(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs)

    with (
        mock.patch.object(F, "dropout", drop),
        mock.patch.object(F, "scaled_dot_product_attention", attend_without_mask),
    ):
        yield


def kept_sbh(model: nn.Module, inputs: dict[str, Tensor], layer: str) -> float:
    """Bytes per token and hidden unit that the graph holds for one layer: its distinct storages."""
    reader, tokens = Scopes(model, exclude=inputs.values()), []
    hook = model.get_submodule(layer).register_forward_hook(lambda *args: tokens.append(_first(args[2]).numel()))
    with reader.follow():
        out = model(**inputs)
    hook.remove()
    kept = reader.list_saved([out[0]])
    return sum(saved.num_bytes for saved in kept if f"{saved.operation}.".startswith(f"{layer}.")) / tokens[0]


def floor_sbh(model: nn.Module, inputs: dict[str, Tensor], layer: str) -> float:
    """What the layer's products keep: the distinct inputs of linears whose weight gets a gradient, and q, k and v."""
    kept: dict[int, Tensor] = {}
    tokens: list[int] = []
    attend = F.scaled_dot_product_attention
    is_inside = [False]

    def note(*tensors: Tensor) -> None:
        for tensor in tensors:
            kept[tensor.untyped_storage()._cdata] = tensor

    def attend_noting(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_inside[0]:
            note(q, k, v)
        return attend(q, k, v, *args, **kwargs)

    def enter(*_: Any) -> None:
        is_inside[0] = True

    def leave(*args: Any) -> None:
        is_inside[0] = False
        tokens.append(_first(args[2]).numel())

    module = model.get_submodule(layer)
    hooks = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    for each in module.modules():
        if isinstance(each, nn.Linear | transformers.pytorch_utils.Conv1D) and each.weight.requires_grad:
            hooks.append(each.register_forward_pre_hook(lambda _, args: note(args[0])))
    with mock.patch.object(F, "scaled_dot_product_attention", attend_noting):
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens[0]


def measure(case: Case, has_floor: bool = True) -> dict[str, float | None]:
    """sbh that a layer keeps, stock and Tempo, and the floor of its architecture where that is known."""
    model, inputs = case.build(dtype=torch.bfloat16), case.make_inputs(torch.bfloat16)
    with with_bytes_of_a_gpu():
        stock = kept_sbh(model, inputs, case.layer)
        floor = floor_sbh(model, inputs, case.layer) + case.extra if has_floor else None
        kept = kept_sbh(tempoize(model, seed=1), inputs, case.layer)
    return {"stock_sbh": round(stock, 2), "tempo_sbh": round(kept, 2), "floor_sbh": floor and round(floor, 2)}


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]
