"""Language models of transformers: their loss is stock's however it is called, and logits are computed when read."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from covering import exhaustive, parametrize_covering
from torch import nn
from torch.nn import functional as F
from witness import assert_within_rule

pytest.importorskip("transformers", reason="transformers is not installed; pip install tempo-megatron[test]")

import transformers

from tempo_torch import report_on, tempoize

pytestmark = [
    pytest.mark.filterwarnings("ignore:saved_tensors_hooks"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
VOCAB, B, S = 250, 2, 24
IDS = torch.arange(B * S).view(B, S) * 7 % (VOCAB - 5) + 3
LABELS = IDS.clone()
LABELS[0, :5] = -100
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
GROUPS = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {**GROUPS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 1, "n_head": 4},
    "LlamaForCausalLM": GROUPS,
    # Positional vocab_size.
    "MixtralForCausalLM": {**GROUPS, "num_local_experts": 4},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3MoeForCausalLM": EXPERTS,
    "OlmoeForCausalLM": EXPERTS,
    # Capped and scaled logits.
    "Gemma2ForCausalLM": {**GROUPS, "head_dim": 16, "final_logit_softcapping": 2.0},
    "CohereForCausalLM": {**GROUPS, "logit_scale": 0.25},
    "GraniteForCausalLM": {**GROUPS, "logits_scaling": 4.0},
    # Masked language models.
    "BertForMaskedLM": SIZES,
    "RobertaForMaskedLM": SIZES,
    "ElectraForMaskedLM": {**SIZES, "embedding_size": 64},
    "DistilBertForMaskedLM": {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 96},
    "ModernBertForMaskedLM": SIZES,
    "T5ForConditionalGeneration": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4},
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


def build(name, dtype=torch.float32, **more):
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    ids = {**TOKENS, "decoder_start_token_id": 0} if name.startswith("T5") else TOKENS
    config = cls.config_class(vocab_size=VOCAB, **MODELS[name], **ids, **more)
    for key in [key for key, value in vars(config).items() if "drop" in key and isinstance(value, float)]:
        setattr(config, key, 0.0)
    model = cls(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    with torch.no_grad():
        # Larger logits than at the start of training: a cap and a scale show.
        model.get_output_embeddings().weight.mul_(5.0)
    return model.to(dtype).train()


def exact_loss(name, count):
    """The loss in float64; a model's own would be computed in float32."""
    model, targets = build(name, torch.float64), LABELS
    more = {}
    if "CausalLM" in name or "LMHead" in name:
        targets = F.pad(LABELS, (0, 1), value=-100)[:, 1:]
    elif name.startswith("T5"):
        more = {"decoder_input_ids": model._shift_right(LABELS)}
    logits = model(input_ids=IDS, **more).logits
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return model, total / (count or (targets != -100).sum())


def build_both(name="LlamaForCausalLM", **choices):
    """Ours, and stock."""
    return tempoize(build(name), **choices), build(name)


def saved_sizes(run):
    """What run() returns, and the number of elements of each tensor that is kept for backward."""
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return run(), sizes


# The mixtures of experts differ in their layers only, and RoBERTa from BERT in its names.
ALIKE = ["Qwen3MoeForCausalLM", "OlmoeForCausalLM", "RobertaForMaskedLM"]


@pytest.mark.parametrize(
    "name", [*(name for name in MODELS if name not in ALIKE), *exhaustive(*([name] for name in ALIKE))]
)
def test_loss_and_gradients_are_stocks_and_no_logits_are_kept(name):
    takes_count = "num_items_in_batch" if "kwargs" in inspect.signature(build(name).forward).parameters else None
    counts = [None] if takes_count is None or name in ("ElectraForMaskedLM", "DistilBertForMaskedLM") else [None, 7]
    for count in counts:
        more = {} if count is None else {takes_count: torch.tensor(count)}
        models = build_both(name, norm="recompute")
        (ours, kept), (stock, _) = (
            saved_sizes(functools.partial(lambda model, more: model(IDS, labels=LABELS, **more).loss, model, more))
            for model in models
        )
        exact_model, exact = exact_loss(name, count)
        assert B * S * VOCAB not in kept and (B * S - B) * VOCAB not in kept
        found = []
        for model, loss in zip([*models, exact_model], (ours, stock, exact), strict=True):
            loss.backward()
            found.append({"loss": loss.detach(), **{key: p.grad for key, p in model.named_parameters()}})
        for key, value in found[0].items():
            if value is not None and found[2][key].abs().max() > 1e-9:
                assert_within_rule(f"{name} {key}", value, found[1][key], found[2][key])
            elif value is None:
                assert found[1][key] is None
    assert "loss" in {entry.operation for entry in report_on(models[0]).replaced}


def test_logits_are_computed_when_they_are_read_with_their_graph():
    for name in ("LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM"):
        found = []
        for model in build_both(name, norm="recompute"):
            out = model(input_ids=IDS, labels=LABELS)
            assert out.logits.shape == (B, S, VOCAB) and out.logits.dtype == torch.float32 and out.logits.dim() == 3
            accuracy = (out.logits[:, :-1].argmax(-1) == LABELS[:, 1:]).float().mean()
            loss = out.loss + 0.01 * torch.logsumexp(out.logits, -1).square().mean() + (1 - out.logits).mean() * 0.1
            loss.backward()
            found.append([accuracy, loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


LOSSES = {
    "cross entropy": (lambda logits: F.cross_entropy(logits.view(-1, VOCAB), LABELS.view(-1)), True),
    "a module": (lambda logits: nn.CrossEntropyLoss()(logits.float().reshape(-1, VOCAB), LABELS.reshape(-1)), True),
    "scaled": (lambda logits: F.cross_entropy((0.5 * logits / 3).view(-1, VOCAB), LABELS.view(-1)), True),
    "sum": (lambda logits: F.cross_entropy(logits.view(-1, VOCAB), LABELS.view(-1), reduction="sum") / 9, True),
    "none": (lambda logits: F.cross_entropy(logits.view(-1, VOCAB), LABELS.view(-1), reduction="none").mean(), True),
    "negative scale": (lambda logits: F.cross_entropy((-1 * logits).view(-1, VOCAB), LABELS.view(-1)), False),
    "smoothed": (
        lambda logits: F.cross_entropy(logits.view(-1, VOCAB), LABELS.view(-1), label_smoothing=0.1), False,
    ),
    "classes second": (lambda logits: F.cross_entropy(logits.transpose(1, 2), LABELS), False),
    "shifted": (
        lambda logits: F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), LABELS[:, 1:].reshape(-1)), False,
    ),
    "written by hand": (lambda logits: -torch.log_softmax(logits, -1).gather(-1, IDS[..., None]).mean(), False),
}  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_ones_own_reads_them_or_is_fused(loss):
    compute, is_fused = loss
    found = []
    for is_ours, model in zip((True, False), build_both(norm="recompute"), strict=True):
        value, kept = saved_sizes(lambda model=model: compute(model(input_ids=IDS, labels=LABELS).logits))
        assert bool({B * S * VOCAB, (B * S - B) * VOCAB} & set(kept)) is not (is_ours and is_fused)
        value.backward()
        found.append([value.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


NEVER = torch.zeros(B, S, VOCAB, dtype=torch.bool)
NEVER[..., 3:9] = True


def write_with_operators(z):
    half = z * 0.5
    z[..., 3] = -4.0
    z *= 0.5
    z += half


WRITES = {
    "an item": lambda z: z.__setitem__((..., 3), -4.0),
    "a mask": lambda z: z.__setitem__(NEVER, -4.0),
    "operators": write_with_operators,
    "masked_fill_": lambda z: z.masked_fill_(NEVER, -4.0),
    "zero_ of a view": lambda z: z[..., 3].zero_(),
    "relu in place": lambda z: F.relu(z, inplace=True),
    "out=": lambda z: torch.no_grad()(torch.mul)(z, 0.5, out=z.detach()),
    ".data": lambda z: z.data.__setitem__((..., 3), -4.0),
    ".data =": lambda z: setattr(z, "data", z.detach().clone() * 0.5),
    "view": lambda z: z.view(-1, VOCAB).index_fill_(1, torch.tensor([3]), -4.0),
    "float": lambda z: z.float().masked_fill_(NEVER, -4.0),
    "to": lambda z: z.to(torch.float32).mul_(0.5),
    "detach": lambda z: z.detach()[..., 3].fill_(-4.0),
    "no grad": lambda z: torch.no_grad()(z.masked_fill_)(NEVER, -4.0),
}


@parametrize_covering(each={"place": ["logits", "a view noted before", "after a cap"], "write": WRITES})
def test_what_is_written_to_logits_counts_for_the_loss(write, place):
    found = []
    for model in build_both():
        z = model(input_ids=IDS, labels=LABELS).logits
        if place == "after a cap":
            z = 2.0 * (z / 2.0).tanh()
        rows = z.view(-1, VOCAB)
        other = z.float() if place == "a view noted before" else z
        write(other)
        losses = F.cross_entropy(rows, LABELS.view(-1)), F.cross_entropy(z.view(-1, VOCAB), LABELS.view(-1))
        sum(losses).backward()
        found.append((torch.stack(losses).detach(), [p.grad for p in model.parameters()]))
    (ours, gradients), (stock, stocks) = found
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)
    for gradient, expected in zip(gradients, stocks, strict=True):
        assert (gradient - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-9


@pytest.mark.parametrize("label", [VOCAB, -1, 10**9])
def test_a_label_outside_of_the_vocabulary_is_an_index_error_as_in_stock(label):
    labels = LABELS.clone()
    labels[1, 7] = label
    model, stock = build_both()
    with pytest.raises(IndexError):
        stock(input_ids=IDS, labels=labels)
    with pytest.raises(IndexError, match="in the model's vocabulary nor ignored .*; correct the labels, or resize"):
        model(input_ids=IDS, labels=labels)
    assert model(input_ids=IDS, labels=LABELS).loss.isfinite()


def test_logits_that_are_read_after_the_weight_has_changed_are_refused():
    model = tempoize(build("LlamaForCausalLM"), norm="recompute")
    out = model(input_ids=IDS, labels=LABELS)
    out.loss.backward()
    assert torch.isfinite(out.logits.detach()).all()  # after the backward they can be read
    out = model(input_ids=IDS, labels=LABELS)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match=r"logits are read after what they are made of was written to; expected to"):
        out.logits.argmax(-1)


def test_logits_of_a_step_under_autocast_have_its_dtype_when_they_are_read_later():
    found = []
    for model in build_both(norm="recompute"):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(input_ids=IDS, labels=LABELS)
        found.append((out.logits.dtype, out.logits.argmax(-1).shape, out.logits[0].dtype, out.loss.dtype))
    assert found[0] == found[1]


def test_what_is_no_training_with_labels_has_logits_as_in_stock():
    model, stock = build_both("GPT2LMHeadModel", norm="recompute")
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    assert isinstance(model(input_ids=IDS).logits, torch.Tensor)
    loss, logits = model(input_ids=IDS, labels=LABELS, return_dict=False)[:2]
    torch.testing.assert_close(loss, stock(input_ids=IDS, labels=LABELS).loss)
    torch.testing.assert_close(logits.read(), stock(input_ids=IDS).logits, rtol=1e-4, atol=1e-5)
    kept = model(input_ids=IDS, labels=LABELS, logits_to_keep=S)
    torch.testing.assert_close(kept.loss, loss)
    place = list(inspect.signature(model.forward).parameters).index("labels")
    by_position = model(*[IDS, *[None] * (place - 1), LABELS])
    torch.testing.assert_close(by_position.loss, loss)
    assert not isinstance(by_position.logits, torch.Tensor)
    with torch.no_grad():
        assert isinstance(model(input_ids=IDS, labels=LABELS).logits, torch.Tensor)
    model.eval()
    assert isinstance(model(input_ids=IDS, labels=LABELS).logits, torch.Tensor)
    assert model(input_ids=IDS, labels=LABELS).loss == stock.eval()(input_ids=IDS, labels=LABELS).loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_model_has_the_fused_loss_in_one_graph():
    model, stock = build_both("Gemma2ForCausalLM", norm="recompute")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out, kept = saved_sizes(lambda: compiled(input_ids=IDS, labels=LABELS))
    expected = stock(input_ids=IDS, labels=LABELS)
    torch.testing.assert_close(out.loss, expected.loss)
    assert B * S * VOCAB not in kept
    torch.testing.assert_close(out.logits.read(), expected.logits, rtol=1e-4, atol=1e-5)
