"""One layer of GPT, BERT and T5, stock beside Tempo, in whatever megatron-core this process finds: a JSON line.

Started by test_megatron_versions.py in a process of its own for each version.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from gpt import (
    RECOMPUTE,
    SEQ_LENGTH,
    VOCAB_SIZE,
    bert_losses,
    gpt_config,
    largest_gradient_error_eps,
    losses,
    start_rank,
    tokens_of,
)
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional as F

from tempo_megatron import TempoConfig, tempo_block_spec, tempoize, tempoize_embedding, tempoize_loss
from tempo_megatron.slots.dropout_rng import set_micro_batch
from tempo_megatron.slots.megatron_versions import VERSION
from tempo_megatron.slots.report import report_on

OFF = TempoConfig.off()
SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True, "normalization": "RMSNorm"}
AGAIN = TempoConfig(
    activation="recompute", norm="recompute", attention="recompute", linear_fc1="recompute", linear_qkv="recompute"
)
RECOMPUTED_MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


def build_gpt(config: Any, tempo_config: TempoConfig) -> Any:
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    spec = stock
    if not tempo_config.is_off:
        spec = tempo_block_spec(config, tempo_config)
        assert report_on(spec).counts == report_on(replaced(stock, config, tempo_config)).counts
    return GPTModel(config, spec, VOCAB_SIZE, SEQ_LENGTH)


def build_bert(config: Any, tempo_config: TempoConfig) -> Any:
    spec = replaced(bert_layer_local_spec, config, tempo_config)
    return BertModel(config, 0, spec, VOCAB_SIZE, SEQ_LENGTH, share_embeddings_and_output_weights=True)


def build_t5(config: Any, tempo_config: TempoConfig) -> Any:
    stock = (encoder_model_with_local_spec(), decoder_model_with_local_spec())
    specs = [replaced(spec, config, tempo_config) for spec in stock]
    return T5Model(config, config, *specs, VOCAB_SIZE, SEQ_LENGTH, share_embeddings_and_output_weights=True)


def replaced(spec: Any, config: Any, tempo_config: TempoConfig) -> Any:
    """The stock spec itself where Tempo is off: nothing of ours stands in the model that ours is held against."""
    if tempo_config.is_off:
        return spec
    found = tempoize(spec, config, tempo_config)
    assert all(ours == total > 0 for ours, total in report_on(found).counts.values()), report_on(found).counts
    return found


def run_gpt(model: Any, has_tempo: bool) -> torch.Tensor:
    return losses(model, 0, 2, gives_mask=not has_tempo)


def run_bert(model: Any, has_tempo: bool) -> torch.Tensor:
    return bert_losses(model)


def run_t5(model: Any, has_tempo: bool) -> torch.Tensor:
    set_micro_batch(5, 0)
    tokens = tokens_of(0, 2)[:, :-1].contiguous()
    seen = [torch.zeros(2, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool) for _ in range(3)]
    seen[0][..., 12:] = seen[2][..., 12:] = True
    seen[1] = torch.ones_like(seen[1]).triu(1)
    found: torch.Tensor = model(tokens, tokens.flip(1), *seen, lm_labels=tokens)
    return found


# Name -> (how to build, how to run, settings of both, settings of Tempo's alone, which operations).
CASES: dict[str, Any] = {
    "GPT, in place": (build_gpt, run_gpt, {}, {}, TempoConfig()),
    "GPT, recompute": (build_gpt, run_gpt, {}, {}, RECOMPUTE),
    "GPT, SwiGLU and RMSNorm": (build_gpt, run_gpt, SWIGLU, {}, RECOMPUTE),
    "GPT, linears again": (build_gpt, run_gpt, SWIGLU, {}, AGAIN),
    # Some stock Megatrons never end here, so that their layer without recomputation is the reference.
    "GPT, mlp recomputed": (build_gpt, run_gpt, {}, RECOMPUTED_MLP, TempoConfig()),
    "BERT": (build_bert, run_bert, {}, {}, TempoConfig(loss="off")),
    "T5": (build_t5, run_t5, {}, {}, TempoConfig(loss="off")),
}


def measure(build: Any, run: Any, settings: Any, tempo_settings: Any, tempo_config: TempoConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, chosen, more in (("stock", OFF, {}), ("tempo", tempo_config, tempo_settings)):
        torch.manual_seed(7)
        config = gpt_config(num_layers=1, **settings, **more)
        model = build(config, chosen)
        tempoize_embedding(model, chosen)
        tempoize_loss(model, chosen)
        loss = run(model.train(), name == "tempo").mean()
        loss.backward()
        # A parameter that the loss does not depend on, as BERT's pooler, has none.
        gradients = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items() if value is not None}
        sharded = {key: getattr(value, "key", key) for key, value in model.sharded_state_dict().items()}
        found[name] = (loss.item(), gradients, shapes, sharded)
    stock, tempo = found["stock"], found["tempo"]
    return {
        "loss": [stock[0], tempo[0]],
        "gradients": len(stock[1]),
        "gradient_error_eps": largest_gradient_error_eps(tempo[1], stock[1]),
        "same_gradients": stock[1].keys() == tempo[1].keys(),
        "same_state_dict": stock[2] == tempo[2],
        "same_sharded_keys": stock[3] == tempo[3],
    }


def dropped_loss(build: Any, run: Any, settings: Any, tempo_settings: Any, tempo_config: TempoConfig) -> float:
    """The loss at dropout 0.1, whose masks are a function of seed and place and so the same in every Megatron."""
    torch.manual_seed(7)
    model = build(gpt_config(num_layers=1, dropout=0.1, **settings, **tempo_settings), tempo_config)
    tempoize_embedding(model, tempo_config)
    tempoize_loss(model, tempo_config)
    loss = run(model.train(), True).mean()
    loss.backward()
    return float(loss)


def what_is_left() -> dict[str, list[str]]:
    """Per kind of model, the lines of its report: Megatron writes what Tempo leaves in another way in each version."""
    experts = {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "moe_router_topk": 2, "add_bias_linear": False}
    latent = MLATransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, qk_layernorm=True)
    latent_spec = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True)
    predicting = gpt_config(num_layers=1, mtp_num_layers=1)
    stock = get_gpt_decoder_block_spec(predicting, use_transformer_engine=False)
    prediction = get_gpt_mtp_block_spec(predicting, stock, use_transformer_engine=False)
    single = TempoConfig(layers={"0": {"activation": "recompute"}, "1": {"attention": "off"}})
    reports = {
        "experts": report_on(tempo_block_spec(gpt_config(**experts), TempoConfig())),
        "latent attention": report_on(tempoize(latent_spec, latent, TempoConfig())),
        "multi-token prediction": report_on(tempoize(prediction, predicting, TempoConfig())),
        "single layers": report_on(tempo_block_spec(gpt_config(num_layers=3), single)),
    }
    return {name: [report.describe_counts(), *report.describe_left()] for name, report in reports.items()}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        start_rank(f"{folder}/store", 0, 1)
        found = {name: measure(*case) for name, case in CASES.items()}
        dropped = {name: dropped_loss(*case) for name, case in CASES.items()}
        told = {"cases": found, "dropped": dropped, "left": what_is_left()}
        print(json.dumps({"version": str(VERSION), **told}))
        sys.stdout.flush()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
