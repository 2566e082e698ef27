"""tempoize on models of transformers and peft: what a layer keeps, losses and gradients, masks, keys and files."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from covering import exhaustive
from tiny_models import GROUPS, assert_equal_step, assert_same_step, build, list_reasons, step
from torch import Tensor, nn
from transformers_cases import CASES, kept_sbh, measure, with_bytes_of_a_gpu
from witness import assert_within_rule

from tempo_torch import report_on, restore, set_step, tempoize

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BF16 = torch.bfloat16


# Layers of RoBERTa, ELECTRA and ESM-2 are called as BERT's, those of Qwen2 and Gemma as Llama's.
ALIKE = [[name] for name in ("RoBERTa", "ELECTRA", "ESM-2", "Qwen2", "Gemma")]
every_architecture = pytest.mark.parametrize(
    "name", [*(name for name in CASES if [name] not in ALIKE), *exhaustive(*ALIKE)]
)


@every_architecture
def test_a_layer_keeps_the_floor_of_its_architecture(name):
    case = CASES[name]
    stock, kept, floor = measure(case).values()
    assert floor - 0.01 <= kept <= floor + case.left + 0.1 and kept < stock, f"{stock:.2f}, {kept:.2f}, {floor:.2f}"


def loss_and_gradients(case, model, dtype):
    inputs = case.make_inputs(dtype, small=True)
    out = model(**inputs)[0]
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
    loss = (out * weights).sum()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"out": out.detach(), **found}


@every_architecture
def test_without_dropout_loss_and_gradients_are_stocks(name):
    case = CASES[name]
    stock, ours, exact = (case.build(0.0, dtype, small=True) for dtype in (torch.float32, torch.float32, torch.float64))
    keys = list(ours.state_dict())
    tempoize(ours, norm="recompute")
    assert list(ours.state_dict()) == keys and "equal stock's" in report_on(ours).checked
    found, same, true = (
        loss_and_gradients(case, model, dtype)
        for model, dtype in ((ours, torch.float32), (stock, torch.float32), (exact, torch.float64))
    )
    assert found.keys() == same.keys()
    for key, value in found.items():
        # A gradient that is exactly 0, as of a key's bias, is rounding in both.
        if true[key].abs().max() > 1e-9:
            assert_within_rule(key, value, same[key], true[key])


@pytest.mark.parametrize(
    "name", ["BERT", "GPT-2", "ModernBERT", "Llama", *exhaustive(["DistilBERT"], ["OPT"], ["GPT-NeoX"], *ALIKE)]
)
def test_masks_are_the_same_with_checkpointing(name):
    case = CASES[name]
    plain, other = (tempoize(case.build(0.1, small=True), seed=3, norm="recompute") for _ in range(2))
    other.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    first, second = (loss_and_gradients(case, model, torch.float32) for model in (plain, other))
    assert all(torch.equal(first[key], second[key]) for key in first)
    again = loss_and_gradients(case, plain, torch.float32)
    assert case.p == () or not torch.equal(again["out"], first["out"])


def test_the_keys_and_files_of_a_saved_model_are_stocks(tmp_path):
    model = tempoize(build("Bert"))
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert '"BertForMaskedLM"' in config and "tempo" not in config
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.BertForMaskedLM and loaded.config._attn_implementation == "sdpa"
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_mask_that_is_changed_in_place_hides_what_it_hides_now():
    case = CASES["BERT"]
    # 16 bits drop none of so few.
    model = tempoize(case.build(0.0, torch.float64, small=True, attention_probs_dropout_prob=1e-6), norm="off")
    ids = case.make_inputs(torch.float64, small=True)["input_ids"]
    mask = torch.ones(2, 1, ids.size(1), ids.size(1), dtype=torch.bool)
    model(ids, attention_mask=mask)
    mask[..., -7:] = False
    changed, new, all_seen = (model(ids, attention_mask=m)[0] for m in (mask, mask.clone(), torch.ones_like(mask)))
    assert torch.equal(changed, new) and not torch.equal(new, all_seen)


def test_attention_that_was_not_given_to_tempoize_is_refused():
    from tempo_torch.attention import attend

    q = torch.ones(1, 1, 4, 8)
    with pytest.raises(ValueError, match='a Identity asks for attention "tempo", but was not given to tempoize'):
        attend(torch.nn.Identity(), q, q, q, None, dropout=0.1)


def test_dropout_of_lora_keeps_no_more_than_none():
    peft = pytest.importorskip("peft", reason="peft is not installed; pip install tempo-megatron[test]")
    case = CASES["Llama"]
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    kept = []
    for p in (0.0, 0.05):
        config = peft.LoraConfig(r=16, lora_dropout=p, target_modules=linears)
        model = peft.get_peft_model(case.build(0.0, BF16), config, autocast_adapter_dtype=False)
        model.enable_input_require_grads()
        keys = list(model.state_dict())
        assert list(tempoize(model, seed=1).state_dict()) == keys
        with with_bytes_of_a_gpu():
            kept.append(kept_sbh(model, case.make_inputs(BF16), "base_model.model.layers.1"))
    assert kept[1] <= kept[0] + 0.1


def test_adapters_that_are_added_later_are_taken_by_tempoize_again():
    peft = pytest.importorskip("peft", reason="peft is not installed; pip install tempo-megatron[test]")
    case, found = CASES["Llama"], []
    for is_before in (False, True):
        model = case.build(0.1, small=True)
        if is_before:
            tempoize(model, seed=1)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        model.enable_input_require_grads()
        tempoize(model, seed=1)
        again = report_on(tempoize(model, seed=1))
        assert {entry.now for entry in again.entries if ".lora_dropout." in entry.name} == {"recompute"}
        assert report_on(model).replaced == again.replaced
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        loss_and_gradients(case, model, torch.float32)
        kinds = sorted((entry.operation, entry.module, str(entry.now)) for entry in again.entries)
        found.append((kinds, [type(each).__mro__[1].__name__ for each in model.modules()]))
    assert found[0] == found[1]


def test_a_version_below_the_oldest_that_is_tested_is_refused(monkeypatch):
    from tempo_torch.versions import OLDEST_VERSIONS

    model, oldest = CASES["BERT"].build(small=True), OLDEST_VERSIONS["transformers"]
    package = sys.modules["transformers"]  # which importing a model may replace
    monkeypatch.setattr(package, "__version__", "4.56.2")
    with pytest.raises(
        ValueError, match=rf"transformers is 4.56.2; expected at least {oldest}, the oldest version that"
    ):
        tempoize(model)
    tempoize(torch.nn.LayerNorm(4))  # which needs none
    monkeypatch.setattr(package, "__version__", f"{oldest}.0.dev0")
    tempoize(model)


SCORES = {
    "GptOss": ({**GROUPS, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}, "attention_dropout"),
    "Gemma2": (
        {**GROUPS, "sliding_window": 5, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16},
        "attention_dropout",
    ),
    "T5": ({"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}, "dropout_rate"),
}
IDS = torch.arange(24).view(2, 12) * 7 % 47 + 3


@pytest.mark.parametrize("kind", SCORES)
def test_sinks_caps_and_biases_by_position_are_those_of_stock_and_masks_repeat(kind):
    settings, p = SCORES[kind]
    ours, stock = (build(kind, weights=4.0, **settings, **{p: 0.0}) for _ in range(2))
    without = step(tempoize(ours, seed=3, attention="auto"), IDS)
    assert_same_step(without, step(stock, IDS), rtol=1e-4, atol=1e-5)
    dropping = [build(kind, weights=4.0, **settings, **{p: 0.1}) for _ in range(2)]
    first, again = (step(tempoize(model, seed=3, attention="flash"), IDS) for model in dropping)
    assert torch.equal(first[0], again[0]) and not torch.allclose(first[0], without[0])
    assert list_reasons(dropping[0], "attention") == {"flash"}


def pack(lengths, half_window):
    """ModernBERT's arguments for documents in one row: who sees whom in layers of either kind, and positions."""
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    row = torch.arange(len(document))
    same = document == document.unsqueeze(-1)
    near = (row - row.unsqueeze(-1)).abs() <= half_window
    masks = {"full_attention": same[None, None], "sliding_attention": (same & near)[None, None]}
    return {"attention_mask": masks, "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)}


@pytest.mark.parametrize("is_sparse", [True, *exhaustive([False])], ids=["sparse predictions", "all predictions"])
def test_modernbert_predicts_masked_words_of_padded_and_unpadded_batches_as_stock_does_and_repeats_its_masks(is_sparse):
    lengths = [24, 17]
    ids = torch.arange(48).view(2, 24) * 7 % 47 + 3
    seen = torch.arange(24) < torch.tensor(lengths).unsqueeze(-1)
    labels = ids.masked_fill(~seen | (ids % 3 > 0), -100)
    padded = {"input_ids": ids, "attention_mask": seen.long(), "labels": labels}
    row = {"input_ids": ids[seen].unsqueeze(0), "labels": labels[seen].unsqueeze(0), **pack(lengths, 4)}
    sizes = {"num_hidden_layers": 3, "local_attention": 8, "sparse_prediction": is_sparse}
    sizes |= {"cls_token_id": 1, "sep_token_id": 2}

    def make(p, **choices):
        rates = {"attention_dropout": p, "mlp_dropout": min(p, 0.1), "embedding_dropout": p}
        model = build("ModernBert", torch.float64, **sizes, **rates)
        return tempoize(model, seed=3, **choices) if choices else model

    def run(model, inputs):
        loss, gradients = step(model, inputs["input_ids"], **{key: inputs[key] for key in inputs if key != "input_ids"})
        return {"loss": loss, **{name: gradient for name, gradient in gradients.items() if gradient is not None}}

    stock, dropping = make(0.0), [make(0.1, attention="flash") for _ in range(2)]
    expected = run(stock, padded)
    for inputs in (padded, row, {**padded, "attention_mask": None}):
        # Dropout this small neither drops nor scales, but has Tempo's attention run; in float64, where another function
        # would be far off.
        found, same = run(make(1e-15, attention="flash", dropout="off", loss="off"), inputs), run(stock, inputs)
        for key, value in same.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=key)
        if inputs is row:
            torch.testing.assert_close(found["loss"], expected["loss"])
        first, again = (run(model, inputs) for model in dropping)
        assert all(map(torch.equal, first.values(), again.values())) and not torch.equal(first["loss"], same["loss"])
    assert list_reasons(dropping[0], "attention") == {"flash"}


RIGHT, LEFT, INSIDE = (torch.ones(2, 12, dtype=torch.int64) for _ in range(3))
RIGHT[1, -4:], LEFT[1, :4], INSIDE[1, 4:6] = 0, 0, 0
PADDINGS = {"none": None, "right": RIGHT, "left": LEFT, "inside": INSIDE}


def build_alibi(name, p=0.0, dtype=torch.float32, **choices):
    rates = {"hidden_dropout": p, "attention_dropout": p} if name == "Bloom" else {"max_seq_len": 160}
    model = build(name, dtype, 4.0, hidden_size=64, **rates)
    for module in model.modules():  # transformers' configuration takes whole numbers only
        if type(module).__name__ == "MptAttention":
            module.attn_dropout_p, module.clip_qkv = p, 3.0
    return tempoize(model, seed=3, **choices) if choices else model


def step_alibi(model, mask=None):
    # No padded query counts, as it would where one predicts the first token of a sample.
    hidden = torch.zeros_like(IDS, dtype=torch.bool) if mask is None else mask == 0
    return step(model, IDS, attention_mask=mask, labels=IDS.masked_fill(hidden | hidden.roll(1, 1), -100))


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_alibi_is_that_of_stock_with_any_padding(name, padding):
    ours, stock = (build_alibi(name, **choices) for choices in ({"attention": "flash"}, {}))
    assert_same_step(step_alibi(ours, padding), step_alibi(stock, padding), atol=1e-6)
    assert list_reasons(ours, "attention") == {"flash"}
    ours.eval()
    assert torch.equal(*(m(IDS, attention_mask=padding).logits for m in (ours, stock.eval())))


@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_attention_with_alibi_repeats_its_masks_and_keeps_no_square_of_the_sequence(name):
    model = build_alibi(name, 0.1, attention="flash")
    layer = "transformer.h.1.self_attention" if name == "Bloom" else "transformer.blocks.1.attn"
    # float32 q, k, v, output, logsumexp and slopes; MPT's clamp keeps what it clamps.
    model.config.use_cache = False
    kept = kept_sbh(model, {"input_ids": torch.arange(40).unsqueeze(0)}, layer)
    assert kept == 12 + 4 + 16 / 64 + 12 * (name == "Mpt") + 16 / 64 / 40
    set_step(model, 0)
    first = step_alibi(model)
    set_step(model, 0)
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    assert_equal_step(step_alibi(model), first)


@pytest.mark.parametrize("name", ["Bloom", "Mpt", "Llama"])
def test_restore_gives_a_model_its_own_attention_and_loss_again(name):
    model, stock = (build_alibi(name) if name != "Llama" else build(name) for _ in range(2))
    step(tempoize(model), IDS)
    restore(model)
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert type(ours) is type(theirs) and ours.__dict__.keys() == theirs.__dict__.keys()
    assert name != "Llama" or model.config._attn_implementation == "sdpa"
    assert isinstance(model(input_ids=IDS, labels=IDS).logits, torch.Tensor)


def test_a_call_that_asks_for_the_weights_of_attention_with_alibi_is_stocks_or_refused():
    ours = build_alibi("Bloom", attention="auto")
    weights = ours(IDS, output_attentions=True).attentions
    assert weights[0].shape == (2, 4, 12, 12)
    with pytest.raises(ValueError, match="returns its weights"):
        build_alibi("Bloom", attention="flash")(IDS, output_attentions=True)


# Models with modules that no other has.
WORDS = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
SEEN = torch.ones_like(WORDS)
SEEN[1, -5:] = 0
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
ROPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
STATES = {"n_groups": 1, "chunk_size": 8}
NEMOTRON = {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8}
GRANITE = {"layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1}
LLAMA4 = {**EXPERTS, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 4, "intermediate_size_mlp": 24}

WIDE = {"hidden_size": 32, "intermediate_size": 48}
GATED: dict[str, dict[str, Any]] = {
    "Bamba": {**MAMBA, "attn_layer_indices": [1]},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "GraniteMoeHybrid": {**MAMBA, **GRANITE, "shared_intermediate_size": 16},
    "Mamba2": {**STATES, "num_heads": 8, "state_size": 8},
    "NemotronH": {**STATES, **NEMOTRON},
    "Qwen3Next": {**EXPERTS, **LINEAR},
}
"""Hybrids, whose norms may be called with a gate."""
OTHERS: dict[str, dict[str, Any]] = {
    "Afmoe": {**EXPERTS, **ROPES},
    "BitNet": {"head_dim": 4},
    "Llama4": LLAMA4,
    "Qwen3_5": LINEAR,
}


def train(kind: str, settings: dict[str, Any], **choices: str) -> tuple[Any, list[Any]]:
    """(The model, steps with and without padding and logits in eval), under tempoize if there are choices."""
    model = build(kind, weights=8.0, **{**GROUPS, "hidden_size": 16, "intermediate_size": 24, **settings})
    if choices:
        tempoize(model, **choices)
    padded = {"attention_mask": SEEN, "labels": WORDS.masked_fill(SEEN == 0, -100)}
    steps = [step(model, WORDS), step(model, WORDS, **padded)]
    with torch.no_grad():
        return model, [*steps, model.eval()(input_ids=WORDS).logits]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*GATED, *OTHERS])
def test_models_train_as_stock(kind: str) -> None:
    settings = OTHERS[kind] if kind in OTHERS else {**WIDE, **GATED[kind]}
    (model, found), (_, expected) = train(kind, settings, norm="auto"), train(kind, settings)
    for ours, stock in zip(found[:2], expected[:2], strict=True):
        assert_same_step(ours, stock, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)
    assert kind in OTHERS or any("Gated" in type(module).__name__ for module in model.modules())


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-5

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


def test_a_norm_that_is_called_with_a_gate_is_the_stock_classs_however_it_is_given() -> None:
    norm, (x, gate) = nn.Sequential(GatedNorm()), torch.randn(2, 3, 8)
    calls: Any = [lambda: norm[0](x, gate), lambda: norm[0](x, gate=gate), lambda: norm[0](gate=gate, x=x)]
    calls += [lambda: norm[0](x), lambda: norm[0](x=x)]
    expected = [call() for call in calls]
    assert [entry.now for entry in report_on(tempoize(norm)).entries if entry.operation == "norm"] == ["inplace"]
    found = [call() for call in calls]
    assert all(map(torch.equal, found[:3], expected[:3]))
    torch.testing.assert_close(found, expected)
