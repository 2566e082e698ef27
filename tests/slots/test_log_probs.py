"""Log-probabilities of a GPTModel with the fused head, against the logits of the stock one."""

from __future__ import annotations

import pytest
import torch
from covering import parametrize_covering
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, gradients, tokens_of
from gpt_loss_head import FUSED, LAYOUTS, OFF, build, run
from log_prob_inputs import reference
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import log_probs
from tempo_megatron.slots.loss import tempoize_loss

HAS_MUP = "use_mup" in TransformerConfig.__dataclass_fields__
CASES = [{}, {"temperature": 0.7, "softcap": 5.0}, {"temperature": 1.3, "vocab_size": 50}]


def inputs():
    """Tokens, positions, mask and labels; of these one has none, and one is of padding, as RL trainers give them."""
    tokens = tokens_of(0, 2) % 50
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    labels = tokens[:, 1:].clone()
    labels[0, 3] = -100
    return tokens[:, :-1].contiguous(), torch.arange(SEQ_LENGTH).expand(2, -1), mask, labels


def whole_results(model, case):
    """From the model's logits: [log_prob, entropy]."""
    *given, labels = inputs()
    logits = gather_from_tensor_model_parallel_region(model(*given)).float()
    # The specification starts from hidden states and a weight: with the unit matrix logits are themselves.
    return reference(logits.transpose(0, 1), torch.eye(VOCAB_SIZE), None, labels, **case)


def results_of(tempo_config, case, settings):
    model = build(tempo_config, **settings)
    if tempo_config == OFF:
        found = whole_results(model, case)
    else:
        found = torch.stack(log_probs(model, *inputs(), return_entropy=True, **case))
        alone = log_probs(model, *inputs(), **case)
        assert found.shape == (2, 2, SEQ_LENGTH) and found.dtype == torch.float32 and torch.equal(alone, found[0])
    # A ratio, and a bonus for entropy.
    total = (found[0] + 3).clamp(-1, 1).exp().sum() + 0.1 * found[1].sum()
    total.backward()
    return total.item(), {**gradients(model), "results": found.detach()}


@parametrize_covering(each={"is_tied": {"tied": True, "untied": False}}, layout=LAYOUTS, case=CASES)
def test_results_and_every_gradient_equal_those_of_the_logits(layout, is_tied, case):
    tp, sequence_parallel = layout
    settings = {"is_tied": is_tied, "sequence_parallel": sequence_parallel}
    found = run_megatron_ranks(results_of, tp, tp, FUSED, case, settings)
    stock = run_megatron_ranks(results_of, tp, tp, OFF, case, settings)
    for ours, theirs in zip(found, stock, strict=True):
        assert_equal_to_stock(ours, theirs)


@pytest.mark.skipif(not HAS_MUP, reason="this Megatron-core has no MuP")
def test_logits_that_the_model_scales_are_scaled_before_the_cap():
    settings = {"use_mup": True, "mup_base_hidden_size": 10}
    ours, stock = (run_megatron_ranks(results_of, 2, 2, c, CASES[1], settings) for c in (FUSED, OFF))
    for found, theirs in zip(ours, stock, strict=True):
        assert_equal_to_stock(found, theirs)


class ModelWithMuP(GPTModel):
    """What GPTModel is since megatron-core 0.17, for those before."""

    def _scale_logits(self, logits):
        return logits * 0.3


def scaled_logits():
    model, stock = build(OFF, cls=ModelWithMuP), build(OFF)
    tempoize_loss(model, FUSED)
    *given, labels = inputs()
    expected = reference((stock(*given) * 0.3).transpose(0, 1), torch.eye(VOCAB_SIZE), None, labels, softcap=0.5)
    return torch.stack(log_probs(model, *inputs(), softcap=0.5, return_entropy=True)).detach(), expected.detach()


def test_the_numbers_that_a_model_multiplies_its_logits_by_are_in_its_log_probabilities():
    ((found, expected),) = run_megatron_ranks(scaled_logits, 1, 1)
    torch.testing.assert_close(found, expected)


def other_uses():
    stock, model = build(OFF), build(FUSED)
    *given, labels = inputs()
    losses = run(model)
    with torch.no_grad():
        reference_pass = log_probs(model, *inputs(), return_entropy=True)
    after = run(model)
    first = build(FUSED, pre_process=True, post_process=False)
    half = build(FUSED, bf16=True, params_dtype=torch.bfloat16)
    wrapped = log_probs(Float16Module(half.config, half), *inputs(), return_entropy=True)
    errors = []
    for call in (
        lambda: log_probs(stock, *inputs()),
        lambda: log_probs(model, *inputs(), loss_mask=torch.ones(2, SEQ_LENGTH)),
        lambda: log_probs(model, *inputs(), temperature=0.0),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return {
        "errors": errors,
        "losses are losses again": torch.equal(after, losses) and torch.equal(run(model), losses),
        "no graph without gradients": not any(t.requires_grad for t in reference_pass),
        "hidden states of a first stage": torch.equal(log_probs(first, *inputs()), first(*given, labels=labels)),
        "float32 of a 16-bit model": [(t.dtype, t.shape) for t in wrapped],
    }


def test_what_log_probs_leaves_as_it_was_and_what_it_refuses():
    (found,) = run_megatron_ranks(other_uses, 1, 1)
    no_head, loss_mask, temperature = found.pop("errors")
    assert "the GPTModel has no fused loss head, which log_probs needs; call tempoize_loss" in no_head
    assert "log_probs was given loss_mask, which is for losses" in loss_mask
    assert "temperature is 0.0" in temperature
    assert found.pop("float32 of a 16-bit model") == [(torch.float32, (2, SEQ_LENGTH))] * 2
    assert all(found.values()), found
