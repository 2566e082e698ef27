"""Tempo's attention in models of transformers gives stock's values, or says why stock runs."""

from __future__ import annotations

import pytest
import torch
import transformers
from covering import exhaustive
from tiny_models import GROUPS, list_reasons
from tiny_models import build as build_tiny
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

from tempo_torch import restore, set_step, tempoize
from tempo_torch.attention import PLACE, attend

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
IDS = torch.arange(26).view(2, 13) * 7 % 60 + 3
P = {"GPT2": "attn_pdrop", "Bert": "attention_probs_dropout_prob"}


def build(name, p=0.0, dtype=torch.float64, **more):
    return build_tiny(name, dtype, 4.0, **{**more, P.get(name, "attention_dropout"): p})


def loss_and_gradients(model, mask=None):
    """The sum of logits with weights, where real tokens are or are predicted, and its gradients."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=IDS, attention_mask=mask).logits
    counts = 1.0 if mask is None else (mask | mask.roll(-1, 1)).unsqueeze(-1)
    loss = (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits) * counts).sum()
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def assert_alike(ours, stock):
    tolerance = 1e-11 if stock[0].dtype == torch.float64 else 2e-5
    assert len(ours) == len(stock)
    for each, other in zip(ours, stock, strict=True):
        torch.testing.assert_close(each, other, rtol=0, atol=tolerance * max(1.0, other.abs().max().item()))


def find_places(model):
    return [module.__dict__[PLACE] for module in model.modules() if PLACE in module.__dict__]


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
PADDED = {
    "Llama": ("Llama", GROUPS),
    "Mistral, in windows": ("Mistral", {**GROUPS, "sliding_window": 5}),
    "Qwen3": ("Qwen3", GROUPS),
    "Gemma 3": ("Gemma3", {**GROUPS, "sliding_window": 3}),
    "OPT": ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "GPT-2": ("GPT2", {"embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "ModernBERT": ("ModernBert", {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}),
    "BERT": ("Bert", {"hidden_dropout_prob": 0.0}),
    # Stock itself gives NaN in float64, whose lowest number overflows beside a score.
    "Gemma 2": ("Gemma2", {**GROUPS, "sliding_window": 3, "dtype": torch.float32}),
    "gpt-oss": ("GptOss", {**GROUPS, "sliding_window": 3, **EXPERTS, "dtype": torch.float32}),
}


# Called as Llama, and as Mistral.
ALIKE = [PADDED.pop("Qwen3"), PADDED.pop("Gemma 3")]


@pytest.mark.parametrize(("name", "more"), [*PADDED.values(), *exhaustive(*ALIKE)])
def test_padding_before_a_sample_leaves_loss_and_gradients_those_of_stock(name, more):
    mask = torch.ones_like(IDS)
    mask[1, :5] = 0
    # 16 bits drop none of so few, but Tempo's attention runs.
    ours = tempoize(build(name, 1e-6, **more), norm="off", activation="off", loss="off")
    for place in find_places(ours):
        place.is_required = True
    assert_alike(loss_and_gradients(ours, mask), loss_and_gradients(build(name, **more), mask))
    assert any(place.was_called for place in find_places(ours)) and list_reasons(ours, "attention") == {"flash"}


SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
SPARSE |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
SPARSE |= {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16, "first_k_dense_replace": 1}


@pytest.mark.parametrize("name", ["DeepseekV32", *exhaustive(["GlmMoeDsa"])])
def test_sparse_attention_stays_sparse_in_training_and_in_eval(name):
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip("this version of transformers has no such model")
    stock, ours = build(name, dtype=torch.float32, **SPARSE), tempoize(build(name, dtype=torch.float32, **SPARSE))
    assert_alike(loss_and_gradients(ours), loss_and_gradients(stock))
    dense = build(name, dtype=torch.float32, **{**SPARSE, "index_topk": IDS.size(1)})
    found, logits, other = (model.eval()(input_ids=IDS).logits for model in (ours, stock, dense))
    assert_alike([found], [logits])
    assert (other - logits).abs().max() > 1e-2 * logits.abs().max()
    why = f'{name}Attention asks whether attn_implementation is "sdpa"'
    assert [entry for entry in list_reasons(ours, "attention") if why in entry]
    with pytest.raises(ValueError, match=why):
        tempoize(build(name, **SPARSE), attention="flash")


CHANGES = """
def forward(self, hidden_states, attention_mask=None, **kwargs):
    attention_mask = attention_mask.masked_fill(attention_mask < 0, -1.0)
    return GptOssAttention.forward(self, hidden_states, attention_mask=attention_mask, **kwargs)
"""


@pytest.mark.parametrize("has_source", [True, False])
def test_attention_that_changes_the_mask_of_eager_is_left_to_stock(has_source, tmp_path):
    file, names = tmp_path / "changing.py", {"GptOssAttention": GptOssAttention}
    if has_source:
        file.write_text(CHANGES)
    exec(compile(CHANGES, file, "exec"), names)
    changing = type("ChangingAttention", (GptOssAttention,), {"forward": names["forward"]})
    model = build("GptOss", **PADDED["gpt-oss"][1])
    for layer in model.model.layers:
        layer.self_attn.__class__ = changing
    expected = loss_and_gradients(model)
    assert_alike(loss_and_gradients(tempoize(model)), expected)
    assert list_reasons(model, "attention") == {
        'ChangingAttention changes its attention_mask, which has numbers for "eager" only'
    }


def attend_with(p=0.5, required=False, **more):
    model = tempoize(build("Llama", p, dtype=torch.float32, **GROUPS), attention="flash" if required else "auto")
    model(input_ids=IDS)
    module = model.model.layers[0].self_attn
    q, k, v = (torch.randn(2, heads, 13, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        ours = attend(module, q, k, v, None, dropout=p, scaling=0.3, **more)[0]
        torch.manual_seed(1)
        return ours, sdpa_attention_forward(module, q, k, v, None, dropout=p, scaling=0.3)[0], module


def test_a_keyword_that_tempos_attention_does_not_know_is_left_to_stock_or_refused():
    ours, stock, module = attend_with(indices=torch.zeros(2, 13, 4))
    assert torch.equal(ours, stock) and module.__dict__[PLACE].why == "passes indices to its attention"
    for harmless in ({"indices": None, "is_new": False}, {"sliding_window": 4, "num_items_in_batch": torch.ones(())}):
        ours, stock, module = attend_with(**harmless)
        assert not torch.equal(ours, stock) and module.__dict__[PLACE].why is None
    for more in ({"indices": torch.zeros(2, 13, 4)}, {"factor": 2.0}):
        with pytest.raises(ValueError, match=f'attention is "flash", but LlamaAttention passes {next(iter(more))}'):
            attend_with(required=True, **more)
        with pytest.raises(ValueError, match=f"passes {next(iter(more))} .* together with sinks or capped scores"):
            attend_with(s_aux=torch.zeros(4), **more)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_another_attention_that_is_set_later_is_in_the_report_and_refused_by_name(name):
    auto, flash = (tempoize(build("Llama", 0.5, **GROUPS), attention=each) for each in ("auto", "flash"))
    assert list_reasons(auto, "attention") == {"flash"}
    for model in (auto, flash):
        model.set_attn_implementation(name)
    why = f'it has attn_implementation "{name}" since tempoize; call set_attn_implementation("tempo")'
    assert list_reasons(auto, "attention") == {why}
    loss_and_gradients(auto)
    assert why in list_reasons(auto, "attention") and "flash" not in list_reasons(auto, "attention")
    with pytest.raises(ValueError, match=f'attention is "flash", but .* has attn_implementation "{name}" since'):
        loss_and_gradients(flash)
    for model in (auto, flash):
        model.set_attn_implementation("tempo")
        assert list_reasons(model, "attention") == {"flash"}
    set_step(flash, 0)
    assert torch.equal(loss_and_gradients(flash)[0], loss_and_gradients(tempoize(build("Llama", 0.5, **GROUPS)))[0])
    auto.set_attn_implementation(name)
    assert restore(auto).config._attn_implementation == name and not find_places(auto)


def test_another_attention_that_is_set_before_the_first_forward_is_in_the_report():
    model = tempoize(build("Llama", 0.5, **GROUPS))
    model.set_attn_implementation("eager")
    model(inputs_embeds=torch.randn(2, 13, 32).double(), labels=IDS)
    found = " ".join(list_reasons(model, "attention"))
    assert 'attn_implementation "eager" since tempoize' in found and "flash" not in found
