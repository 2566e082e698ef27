"""Converts the weights of one model between Megatron and transformers, a tensor at a time and in both directions.

Megatron's linear_qkv has, for each group of heads, the rows of its queries, its key and its value. transformers has all
queries, then all keys, then all values: as three weights, or in GPT-2 as one, whose linears are [in, out]. A gated
linear_fc1 begins with the rows of the gate. Megatron's vocabulary may have rows of padding.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tempo_megatron.models.huggingface.config import find_class
from tempo_megatron.settings.activations import GATED
from tempo_megatron.words.expert_layers import parse_layer_frequency

Shape = tuple[int, ...]
Modules = dict[str, tuple[Shape, tuple[str, ...]]]
"""Megatron's name of a module -> the shape of its weight, and which of "weight" and "bias" it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Converted:
    """A tensor of Megatron, and those of transformers that have the same elements."""

    key: str
    """Megatron's name."""
    shape: Shape
    keys: tuple[str, ...]
    """transformers' names."""
    copies: tuple[str, ...] = ()
    """Other names that transformers has for the first of `keys`."""
    are_copies_written: bool = False
    heads: tuple[int, int] | None = None
    """Of queries, keys and values: the number of heads of queries, and of groups."""
    vocab_size: int | None = None
    """Of the vocabulary's rows: how many are not padding."""
    is_transposed: bool = False

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of `keys`."""
        return [tuple(part.shape) for part in self.split(torch.empty(self.shape, dtype=torch.float32, device="meta"))]

    def split(self, value: Tensor) -> list[Tensor]:
        """Returns transformers' tensors, as views where possible."""
        parts: Sequence[Tensor] = (value,)
        if self.vocab_size is not None:
            parts = (value[: self.vocab_size],)
        elif self.heads is not None:
            heads, groups = self.heads
            of_groups = value.unflatten(0, (groups, heads // groups + 2, -1)).split([heads // groups, 1, 1], dim=1)
            parts = [part.flatten(0, 2) for part in of_groups]
            parts = parts if len(self.keys) == len(parts) else (torch.cat(parts),)
        elif len(self.keys) > 1:
            parts = value.chunk(len(self.keys))
        return [part.t() if self.is_transposed else part for part in parts]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns Megatron's tensor, from what `split` returns.

        Rows of padding are the mean of the others. The logit of a mean is the mean of the logits m, and exp(m) is at
        most the mean of exp(logit): with v rows and p of padding a cross entropy rises by at most log(1 + p / v). Rows
        of zeros would have the logit 0, which in GPT-2 is far above all others.
        """
        parts = [part.t() if self.is_transposed else part for part in parts]
        if self.heads is not None:
            heads, groups = self.heads
            if len(parts) == 1:
                size = parts[0].size(0) // (heads + 2 * groups)
                parts = parts[0].split([heads * size, groups * size, groups * size])
            return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
        whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        if missing := self.shape[0] - whole.size(0):
            mean = whole.to(torch.float32).mean(0, keepdim=True).to(whole.dtype)
            whole = torch.cat([whole, mean.expand(missing, *mean.shape[1:])])
        return whole


def list_tensors(run: Mapping[str, Any]) -> list[Converted]:
    """Lists the tensors of a model, in its order.

    Args:
        run: the content of a checkpoint's run.json, with vocab_size and padded_vocab_size.

    Raises ValueError if no class of transformers is this model.
    """
    _, family = find_class(run)
    is_tied = not run["untie_embeddings_and_output_weights"]
    heads = (run["num_attention_heads"], run["num_query_groups"])
    found = []
    for module, (shape, kinds) in list_modules(run).items():
        numbers = re.findall(r"\.(\d+)\.", module)
        # Each * is one of the numbers.
        patterns = family.names[re.sub(r"\.\d+\.", ".*.", module)]
        theirs = [pattern.replace("*", "{}").format(*numbers) for pattern in patterns]
        for kind in kinds:
            copies: tuple[str, ...] = ()
            if module == "embedding.word_embeddings" and is_tied:
                copies = tuple(f"{name}.weight" for name in family.names["output_layer"])
            elif module == "output_layer" and kind == "bias":
                copies = ("cls.predictions.bias",)
            elif module.endswith(".router"):
                # Beside stacked experts Mixtral's has the name that it has in memory.
                copies = tuple({f"model.layers.{numbers[0]}.mlp.gate.weight"} - {f"{theirs[0]}.weight"})
            found.append(
                Converted(
                    key=f"{module}.{kind}",
                    shape=shape if kind == "weight" else shape[:1],
                    keys=tuple(f"{name}.{kind}" for name in theirs),
                    copies=copies,
                    are_copies_written=module == "output_layer",
                    heads=heads if module.endswith("linear_qkv") else None,
                    vocab_size=run["vocab_size"] if module in ("embedding.word_embeddings", "output_layer") else None,
                    is_transposed=family.has_transposed_linears and ".linear_" in module and kind == "weight",
                )
            )
    return found


def list_zeros(run: Mapping[str, Any]) -> dict[str, Shape]:
    """Lists the tensors of transformers, with their shapes, that Megatron lacks and that are zero.

    A BERT without kinds of segments has one in transformers, whose embedding is added.
    """
    if run["family"] != "bert" or run["num_tokentypes"]:
        return {}
    return {"bert.embeddings.token_type_embeddings.weight": (1, run["hidden_size"])}


def list_modules(run: Mapping[str, Any]) -> Modules:
    """Lists Megatron's modules of the model that `run` describes."""
    h, ffn, vocab, heads = (
        run[name] for name in ("hidden_size", "ffn_hidden_size", "padded_vocab_size", "num_attention_heads")
    )
    head, is_bert, gates = run["kv_channels"], run["family"] == "bert", 2 if run["activation"] in GATED else 1
    queries, rows = heads * head, (heads + 2 * run["num_query_groups"]) * head
    weight: tuple[str, ...] = ("weight",)
    both = ("weight", "bias")
    norm = both if run["normalization"] == "LayerNorm" else weight
    linear = both if run["add_bias_linear"] else weight
    stack = "encoder" if is_bert else "decoder"
    modules: Modules = {"embedding.word_embeddings": ((vocab, h), weight)}
    if run["position_embedding_type"] == "learned_absolute":
        modules["embedding.position_embeddings"] = (run["max_position_embeddings"], h), weight
    if run["num_tokentypes"]:
        modules["embedding.tokentype_embeddings"] = (run["num_tokentypes"], h), weight
    has = [False] * run["num_layers"]
    if run["num_experts"] is not None:
        has = list(parse_layer_frequency(run["moe_layer_freq"], run["num_layers"]))
    for number, has_experts in enumerate(has):
        layer = f"{stack}.layers.{number}"
        modules[f"{layer}.input_layernorm"] = (h,), norm
        modules[f"{layer}.self_attention.linear_qkv"] = (rows, h), both if run["add_qkv_bias"] else linear
        if run["qk_layernorm"]:
            modules |= {f"{layer}.self_attention.{name}_layernorm": ((head,), norm) for name in "qk"}
        modules[f"{layer}.self_attention.linear_proj"] = (h, queries), linear
        modules[f"{layer}.pre_mlp_layernorm"] = (h,), norm
        size, places = ffn, [f"{layer}.mlp"]
        if has_experts:
            modules[f"{layer}.mlp.router"] = (run["num_experts"], h), weight
            size = run["moe_ffn_hidden_size"] or ffn
            places = [f"{layer}.mlp.experts.local_experts.{number}" for number in range(run["num_experts"])]
        for place in places:
            modules[f"{place}.linear_fc1"] = (gates * size, h), linear
            modules[f"{place}.linear_fc2"] = (h, size), linear
    modules[f"{stack}.final_layernorm"] = (h,), norm
    own = weight if run["untie_embeddings_and_output_weights"] else ()
    modules["output_layer"] = (vocab, h), (*own, "bias") if is_bert else own
    if is_bert:
        modules |= {"lm_head.dense": ((h, h), both), "lm_head.layer_norm": ((h,), both)}
    if run["add_binary_head"]:
        modules |= {"pooler.dense": ((h, h), both), "binary_head": ((2, h), both)}
    return modules
