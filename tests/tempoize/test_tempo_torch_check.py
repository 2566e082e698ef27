"""`tempoize` compares a model with its stock modules by numbers: planted mistakes are found, traced and given back."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import numpy
import pytest
import torch
from tiny_models import build as build_tiny
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers_cases import checkpoint_layers

from tempo_torch import check, read_step, report_on, tempoize
from tempo_torch.attention import attend
from tempo_torch.compare import Comparison, Unit
from tempo_torch.loss import DeferredLogits
from tempo_torch.mlp import TiledMLP
from tempo_torch.norm import Norm

IDS = torch.arange(2 * 20).view(2, 20) % 61 + 3
ATTEND = sys.modules["tempo_torch.attention"]


def build(kind: str = "Llama", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return build_tiny(kind, dtype, **{"num_hidden_layers": 3, "use_cache": True, **more})


def list_given_back(model: nn.Module) -> set[tuple[str, str]]:
    """(Operation, class) of what was given back because of its numbers."""
    left = report_on(model).left
    return {(e.operation, e.module) for e in left if "differs from stock" in e.why or "fails where" in e.why}


def attend_to_all_where_blind(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Any:
    """Stock's attention, but queries that see no key attend to all equally."""
    module.tempo_place.was_called = True
    out, _ = sdpa_attention_forward(module, q, k, v, mask, **more)
    if mask is None:
        return out, None
    means = v.mean(2, keepdim=True).repeat_interleave(q.size(1) // v.size(1), 1).transpose(1, 2)
    return torch.where(mask.any(-1).transpose(1, 2).unsqueeze(-1), out, means), None


def fail(*_: Any, **__: Any) -> Any:
    raise TypeError("planted")


normalise, compute_loss = Norm.normalise, DeferredLogits.compute_loss
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "eps": (Norm, "normalise", lambda self, x: normalise(self, x) * (1 - 1e-4)),
    "gradient": (Norm, "normalise", lambda self, x: (y := normalise(self, x)) * 1.01 - (y * 0.01).detach()),
    "form of GELU": (sys.modules["tempo_torch.replacements"], "name_function", lambda function: "gelu"),
    "divisor": (DeferredLogits, "compute_loss", lambda self, *given: compute_loss(self, *given) * 1.05),
    "crash": (Norm, "normalise", fail),
    "mask": (ATTEND, "attend", lambda module, q, k, v, mask, **more: attend(module, q, k, v, None, **more)),
    "blind row": (ATTEND, "attend", attend_to_all_where_blind),
    "softcap": (ATTEND, "attend", lambda *args, softcap=None, **more: attend(*args, **more)),
}
"""What makes one of Tempo's modules, or functions, slightly wrong: an attribute of it, and the wrong one."""
NORM, LOSS, ATTENTION = ("norm", "LlamaRMSNorm"), ("loss", "LlamaForCausalLM"), ("attention", "LlamaForCausalLM")
GELU, GEMMA = ("activation", "NewGELUActivation"), ("attention", "Gemma2ForCausalLM")
CAPPED = {"head_dim": 8, "attn_logit_softcapping": 0.1, "query_pre_attn_scalar": 8, "initializer_range": 0.3}
GPT2 = {"attn_pdrop": 0.0, "n_positions": 64, "activation_function": "gelu_new"}


@pytest.mark.parametrize(
    ("mistake", "kind", "more", "found"),
    [
        ("eps", "Llama", {}, {NORM}),
        ("gradient", "Llama", {}, {NORM}),
        ("crash", "Llama", {}, {NORM}),
        ("divisor", "Llama", {}, {LOSS}),
        ("mask", "Llama", {}, {ATTENTION}),
        ("blind row", "Llama", {}, {ATTENTION}),
        ("softcap", "Gemma2", CAPPED, {GEMMA}),
        ("form of GELU", "GPT2", GPT2, {GELU}),
        ("gradient+form of GELU", "GPT2", GPT2, {("norm", "LayerNorm"), GELU}),
    ],
)
def test_a_wrong_module_is_found_and_given_back(monkeypatch, mistake, kind, more, found):
    stock = build(kind, **more)
    for each in mistake.split("+"):
        monkeypatch.setattr(*MISTAKES[each])
    model = tempoize(copy.deepcopy(stock), dropout="off")
    assert list_given_back(model) == found, report_on(model)
    assert report_on(model).checked.startswith("checked: loss and ")
    left = {operation for operation, _ in found}
    assert {"norm", "activation", "loss"} - left <= {entry.operation for entry in report_on(model).replaced}
    assert "not" not in check(model) and list_given_back(model) == found
    if kind != "GPT2":  # whose other dropouts draw
        torch.testing.assert_close(model(IDS, labels=IDS).loss, stock(IDS, labels=IDS).loss, rtol=1e-6, atol=0)


def test_a_wrong_value_that_was_asked_for_by_name_raises(monkeypatch):
    tiles = TiledMLP._run_in_tiles
    monkeypatch.setattr(TiledMLP, "_run_in_tiles", lambda self, x: tiles(self, x) * 1.001)
    with pytest.raises(ValueError, match=r'^mlp is "tile", but LlamaMLP: it differs from stock: .*; set it to "off"$'):
        tempoize(build(), mlp="tile")
    monkeypatch.setattr(*MISTAKES["eps"])
    with pytest.raises(ValueError, match='norm is "recompute", but LlamaRMSNorm: .*; set it to "auto" or "off"'):
        tempoize(build(), norm="recompute")


def test_an_option_that_is_off_is_not_blamed_and_off_checks_nothing(monkeypatch):
    monkeypatch.setattr(*MISTAKES["eps"])
    assert not list_given_back(tempoize(build(), norm="off"))
    model = tempoize(build(), check="off")
    assert not list_given_back(model) and "check is" in report_on(model).checked
    assert "equal stock's" in check(model) and list_given_back(model) == {("norm", "LlamaRMSNorm")}
    with pytest.raises(ValueError, match='check is \'on\'; expected one of "auto", "off"'):
        tempoize(build(), check="on")


def draw(*_: Any) -> None:
    random.random()
    numpy.random.rand()


class Counts(nn.BatchNorm1d):
    """A norm over the batch that also counts its calls, and keeps what it saw."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def test_the_check_changes_nothing():
    models = []
    for value in ("off", "auto"):
        model = build("GPT2", attn_pdrop=0.0, use_cache=True)
        model.transformer.ln_f = Counts(32)
        model.lm_head.eval()
        model.transformer.h[1].mlp.register_forward_hook(draw)
        states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        tempoize(model, seed=3, check=value)
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
        assert states[2] == numpy.random.get_state()[1].tolist()
        assert read_step(model) == (0, None) and all(p.grad is None for p in model.parameters())
        norm = model.transformer.ln_f
        assert norm.calls == len(norm.seen) == int(norm.num_batches_tracked) == 0 and not norm.running_mean.any()
        assert model.config.use_cache and model.training and not model.lm_head.training
        models.append(model)
    first, second = (model(IDS, labels=IDS).loss for model in models)
    assert torch.equal(first, second) and read_step(models[1]) == (1, 2)
    first.backward()
    second.backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_model_in_eval_is_checked_as_it_trains_and_stays_in_eval():
    model = tempoize(build(attention_dropout=0.1).eval(), seed=1)
    assert "equal stock's" in report_on(model).checked
    assert not any(module.training for module in model.modules())


def test_a_model_that_cannot_be_checked_says_why():
    with torch.device("meta"):
        meta = build()
    assert "not checked: the model is on the meta device; check(model, **batch)" in report_on(tempoize(meta)).checked
    unknown = tempoize(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2)))
    assert "not checked: it takes inputs that could not be made up; check(model" in str(report_on(unknown))
    broken = build()
    broken.model.layers[0].forward = fail
    assert "without Tempo it fails on these inputs: TypeError: planted" in report_on(tempoize(broken)).checked
    frozen = tempoize(build().requires_grad_(False))
    assert "none of its outputs needs a gradient" in report_on(frozen).checked


def test_check_compares_on_a_batch_of_the_users():
    model = tempoize(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 2)))
    assert check(model, torch.randn(3, 4)).startswith("checked: outputs and 5 gradients equal stock's within ")
    assert report_on(model).checked.endswith("on 0 [3, 4]") and read_step(model) == (0, None)
    with pytest.raises(ValueError, match="was not given to tempoize"):
        check(nn.Linear(2, 2))


def test_a_model_that_draws_otherwise_raises_no_alarm():
    model, generator = build(), torch.Generator().manual_seed(0)
    model.model.embed_tokens.register_forward_hook(lambda _, __, y: y + torch.randn(y.shape, generator=generator))
    assert not list_given_back(tempoize(model))


def test_a_router_that_chooses_by_a_rounding_raises_no_alarm():
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    model = build("Mixtral", torch.bfloat16, **more)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name or "router" in name:
            parameter.data.mul_(1e-3)  # so that experts are nearly equal
    tempoize(model)
    assert "equal stock's" in report_on(model).checked and not list_given_back(model)


def test_only_what_trains_is_compared_and_checkpointing_is_left_out():
    model = build(num_key_value_heads=2)
    model.requires_grad_(False)
    model.model.layers[2].self_attn.q_proj.requires_grad_(True)
    checkpoint_layers(model, use_reentrant=False)
    tempoize(model)
    assert "loss and 1 gradients" in report_on(model).checked or "2 gradients" in report_on(model).checked
    assert model.model.layers[0].gradient_checkpointing


def test_a_difference_that_two_units_make_only_together_is_traced_to_both():
    first, second, third = units = [Unit("norm", kind, ()) for kind in ("A", "B", "C")]

    class Together(Comparison):
        def __init__(self) -> None: ...

        def differs(self, units: Any) -> str | None:
            return "differs" if {first, second} <= set(units) else None

    assert Together().trace(units) == {first: "differs", second: "differs"}
    assert Together().trace([first, third]) == {}
