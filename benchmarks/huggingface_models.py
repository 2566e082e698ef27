"""Checks models of transformers under tempoize: equal to stock at p = 0, repeatable, what is kept, and what is left.

    python benchmarks/huggingface_models.py [ARCHITECTURE ...]

Builds each architecture with random weights, measures on a CPU, and writes the table of docs/huggingface.md and
benchmarks/results/cpu/huggingface_models.jsonl. Given architectures it prints their rows and writes nothing.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from transformers_cases import BERT_P, CASES, IDS, Case, S, find_heads, measure  # noqa: E402

from tempo_torch import report_on, samples, tempoize  # noqa: E402

DOCUMENT, RESULTS = ROOT / "docs/huggingface.md", ROOT / "benchmarks/results/cpu/huggingface_models.jsonl"
BEGIN, END = "<!-- huggingface models: begin -->\n", "<!-- huggingface models: end -->"


_HEAD_DIM: dict[str, Any] = {"head_dim": lambda h: h // find_heads(h)}


def _causal(name: str, p: tuple[str, ...] = ("attention_dropout",), layer: str = "model.layers.1", **more: Any) -> Case:
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    names = more.pop("names", Case.names)
    settings = {**IDS, **tokens, "num_key_value_heads": find_heads, **_HEAD_DIM, **more}
    return Case(f"{name}Config", f"{name}ForCausalLM", layer, settings, names, "labels", p)


def _falcon(alibi: bool) -> Case:
    settings = {**IDS, "alibi": alibi, "bos_token_id": 1, "eos_token_id": 2}
    return Case("FalconConfig", "FalconForCausalLM", "transformer.h.1", settings, inputs="labels", p=_FALCON_P)


def _experts(name: str, **more: Any) -> Case:
    experts = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    return _causal(name, **experts, moe_intermediate_size=64, **more)


_GPT = ("n_embd", "n_layer", "n_head", "n_inner")
_GPT_P = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_FALCON_P = ("hidden_dropout", "attention_dropout")
_BART_P = ("dropout", "attention_dropout", "activation_dropout")
_BART = {
    **IDS, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "pad_token_id": 1,
    "decoder_start_token_id": 2,
}  # fmt: skip
_BART_NAMES = ("d_model", "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim")
_PIXELS: dict[str, Any] = {"image_size": lambda h: 44 if h != 64 else 20, "patch_size": 4}
_WAVES = dict(CASES["wav2vec2"].settings)


def _bart(name: str, **more: Any) -> Case:
    return Case(f"{name}Config", f"{name}Model", "decoder.layers.1", {**_BART, **more}, _BART_NAMES, "pair", _BART_P)


def _encoder(name: str, layer: str = "encoder.layer.1", **more: Any) -> Case:
    return Case(f"{name}Config", f"{name}Model", layer, {**IDS, **more}, p=BERT_P)


MODELS: dict[str, Case] = {
    **CASES,
    "XLM-RoBERTa": _encoder("XLMRoberta"),
    "ALBERT": _encoder(
        "Albert", "encoder.albert_layer_groups.0.albert_layers.0", embedding_size=32, num_hidden_groups=1
    ),
    "MPNet": _encoder("MPNet"),
    "DeBERTa-v2": _encoder("DebertaV2", relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"]),
    "RoFormer": _encoder("RoFormer", embedding_size=lambda h: h),
    "GPT-Neo": Case(
        "GPTNeoConfig", "GPTNeoForCausalLM", "transformer.h.1",
        {**IDS, "attention_types": [[["global", "local"], 2]], "bos_token_id": 1, "eos_token_id": 2, "num_layers": 4},
        ("hidden_size", "unused_layers", "num_heads", "intermediate_size"), "labels",
        ("embed_dropout", "attention_dropout", "resid_dropout"),
    ),
    "GPT-J": _causal("GPTJ", _GPT_P, "transformer.h.1", names=_GPT, rotary_dim=16, n_positions=S + 8),
    "GPTBigCode": _causal("GPTBigCode", _GPT_P, "transformer.h.1", names=_GPT, n_positions=S + 8),
    "CodeGen": _causal("CodeGen", _GPT_P, "transformer.h.1", names=_GPT, rotary_dim=16, n_positions=S + 8,
                       num_attention_heads=4, n_head=4),
    "BLOOM": _causal("Bloom", _FALCON_P, "transformer.h.1", names=("hidden_size", "n_layer", "n_head")),
    "Falcon": _falcon(alibi=False),
    "Falcon, ALiBi": _falcon(alibi=True),
    "MPT": Case(
        "MptConfig", "MptForCausalLM", "transformer.blocks.1", {**IDS, "max_seq_len": S + 8, "resid_pdrop": 0.1},
        ("d_model", "n_layers", "n_heads"), "labels", ("resid_pdrop", "emb_pdrop"),
    ),
    "Phi": _causal("Phi", ("resid_pdrop", "embd_pdrop", "attention_dropout")),
    "Phi-3": _causal("Phi3", ("resid_pdrop", "embd_pdrop", "attention_dropout")),
    "StableLM": _causal("StableLm", _FALCON_P),
    "Starcoder2": _causal("Starcoder2", ("residual_dropout", "embedding_dropout", "attention_dropout")),
    "Persimmon": _causal("Persimmon", _FALCON_P),
    "Nemotron": _causal("Nemotron"),
    "Mistral": _causal("Mistral"),
    "Ministral": _causal("Ministral"),
    "Qwen3": _causal("Qwen3"),
    "Gemma 2": _causal("Gemma2"),
    "Gemma 3": Case(
        "Gemma3TextConfig", "Gemma3ForCausalLM", "model.layers.1", dict(CASES["Gemma"].settings), inputs="labels",
        p=("attention_dropout",),
    ),
    "Cohere": _causal("Cohere"),
    "Cohere 2": _causal("Cohere2"),
    "OLMo": _causal("Olmo"),
    "OLMo 2": _causal("Olmo2"),
    "OLMo 3": _causal("Olmo3"),
    "Granite": _causal("Granite"),
    "SmolLM3": _causal("SmolLM3"),
    "GLM": _causal("Glm"),
    "GLM-4": _causal("Glm4"),
    "Helium": _causal("Helium"),
    "EXAONE 4": _causal("Exaone4"),
    "Seed-OSS": _causal("SeedOss", ("attention_dropout", "residual_dropout")),
    "ERNIE 4.5": _causal("Ernie4_5"),
    "Arcee": _causal("Arcee"),
    "Mixtral": _experts("Mixtral"),
    "Qwen2-MoE": _experts("Qwen2Moe", shared_expert_intermediate_size=64),
    "Qwen3-MoE": _experts("Qwen3Moe"),
    "OLMoE": _experts("Olmoe"),
    "Phi-3.5-MoE": _experts("Phimoe"),
    "GraniteMoE": _experts("GraniteMoe"),
    "gpt-oss": _experts("GptOss"),
    "DeepSeek-V3": _experts("DeepseekV3", n_group=1, topk_group=1, first_k_dense_replace=0, kv_lora_rank=32,
                            q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, head_dim=16),
    "dots.llm1": _experts("Dots1", n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=0),
    "T5": Case(
        "T5Config", "T5ForConditionalGeneration", "decoder.block.1",
        {**IDS, "d_kv": 32, "decoder_start_token_id": 0}, ("d_model", "num_layers", "num_heads", "d_ff"), "pair",
        ("dropout_rate",),
    ),
    "mBART": _bart("MBart"),
    "Pegasus": _bart("Pegasus"),
    "Marian": _bart("Marian"),
    "DeiT": Case("DeiTConfig", "DeiTModel", "layers.1", _PIXELS, inputs="pixels", p=BERT_P),
    "DINOv2": Case("Dinov2Config", "Dinov2Model", "encoder.layer.1", _PIXELS, inputs="pixels",
                   p=(*BERT_P, "drop_path_rate")),
    "BEiT": Case("BeitConfig", "BeitModel", "layers.1", _PIXELS, inputs="pixels", p=BERT_P),
    "Swin": Case(
        "SwinConfig", "SwinModel", "encoder.layers.0.blocks.1",
        {"image_size": 32, "patch_size": 2, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
        ("embed_dim",), "squares", BERT_P,
    ),
    "CLIP vision": Case("CLIPVisionConfig", "CLIPVisionModel", "encoder.layers.1", _PIXELS, inputs="pixels",
                        p=("attention_dropout",)),
    "SigLIP vision": Case("SiglipVisionConfig", "SiglipVisionModel", "encoder.layers.1", _PIXELS, inputs="pixels",
                          p=("attention_dropout",)),
    "HuBERT": Case("HubertConfig", "HubertModel", "encoder.layers.1", _WAVES, inputs="wave",
                   p=CASES["wav2vec2"].p),
    "WavLM": Case("WavLMConfig", "WavLMModel", "encoder.layers.1", _WAVES, inputs="wave", p=CASES["wav2vec2"].p),
}  # fmt: skip
"""Each has small sizes; those of `CASES` have a floor too, and a test that holds them to it."""


def run(case: Case, model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns a forward's first output, which is the loss if the model has one, and all gradients."""
    out = model(**case.make_inputs(dtype, small=True))[0]
    (out * torch.linspace(1, -1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"out": out.detach(), **found}


def difference_without_dropout(case: Case) -> float:
    """Returns the largest difference at p = 0 between stock's and Tempo's output and gradients, relative to each one's
    largest element. A gradient of rounding errors only, such as that of a key's bias, does not count."""
    ours, stock = run(case, tempoize(case.build(0.0, small=True))), run(case, case.build(0.0, small=True))
    assert ours.keys() == stock.keys()
    largest = max(value.abs().max().item() for value in stock.values())
    sizes = {name: value.abs().max().item() for name, value in stock.items()}
    names = [name for name, size in sizes.items() if size > 1e-6 * largest]
    return max((ours[name] - stock[name]).abs().max().item() / sizes[name] for name in names)


def is_repeatable(case: Case, model: nn.Module) -> bool:
    """Whether forward and backward of the same samples are equal for any state of torch's generator."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with samples(model, 0):
            found.append(run(case, model))
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def examine(case: Case) -> dict[str, Any]:
    """Makes one row of the table."""
    model = tempoize(case.build(0.1, small=True), seed=1)
    repeatable = is_repeatable(case, model)
    report = report_on(model)
    assert report.seen.startswith("Seen"), report.seen
    left = {entry.why for entry in report.left if entry.operation != "loss" or case.inputs == "labels"}
    unused = "the forward that was watched does not call it"
    row: dict[str, Any] = {"p0": float(f"{difference_without_dropout(case):.0e}"), "repeatable": repeatable}
    row["left"] = sorted(left - {unused})
    return row | measure(case, has_floor=case in CASES.values())


def make_table(records: list[dict]) -> str:
    """Formats the table in Markdown."""
    lines = ["| | stock | Tempo | left |", "| --- | ---: | ---: | --- |"]
    for row in records:
        cells = [row["architecture"], f"{row['stock_sbh']:.2f}", f"{row['tempo_sbh']:.2f}"]
        lines.append(f"| {' | '.join([*cells, '; '.join(row['left'])])} |")
    return "\n".join(lines)


def main() -> None:
    environment = {"torch": torch.__version__, "transformers": transformers.__version__, "device": platform.machine()}
    names = sys.argv[1:] or list(MODELS)
    records = []
    for name in names:
        records.append({"architecture": name, **examine(MODELS[name]), "dtype": "bfloat16", "p": 0.1, **environment})
        print(make_table(records).splitlines()[-1], flush=True)
    if sys.argv[1:]:
        return
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}{make_table(records)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
