"""Log-probabilities of a GPTModel with the fused head, against the logits of the stock one."""

from __future__ import annotations

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, differentiate
from gpt_loss_head import FUSED, HAS_MUP, MUP, OFF, ModelWithMuP, build, inputs, run
from loss_head_inputs import log_prob_reference
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module

from tempo_megatron import log_probs

CAPPED = {"temperature": 0.7, "softcap": 5.0}
CASES = [{}, CAPPED, {"temperature": 1.3, "vocab_size": 50}]


def inputs_of_rl():
    """As RL trainers give them: one label is of padding, and no token is of the rows that pad the vocabulary."""
    tokens, positions, mask, labels = inputs()
    labels[0, 3] = -100
    return tokens % 50, positions, mask, torch.where(labels < 0, labels, labels % 50)


def results_of(tempo_config, case, **settings):
    model = build(tempo_config, **settings)
    *given, labels = inputs_of_rl()
    if tempo_config == OFF:
        logits = gather_from_tensor_model_parallel_region(model(*given)).float()
        # The specification starts from hidden states and a weight: with the unit matrix logits are themselves.
        found = log_prob_reference(logits.transpose(0, 1), torch.eye(VOCAB_SIZE), None, labels, **case)
    else:
        found = torch.stack(log_probs(model, *given, labels, return_entropy=True, **case))
        alone = log_probs(model, *given, labels, **case)
        assert found.shape == (2, 2, SEQ_LENGTH) and found.dtype == torch.float32 and torch.equal(alone, found[0])
    # A ratio, and a bonus for entropy.
    total = (found[0] + 3).clamp(-1, 1).exp().sum() + 0.1 * found[1].sum()
    total, grads = differentiate(model, total)
    return total, {**grads, "results": found.detach()}


def results_of_all(tp):
    layouts = [{}, {"sequence_parallel": True}] if tp > 1 else [{}]
    ways = [(case, {**each, "is_tied": tied}) for case in CASES for each in layouts for tied in (True, False)]
    # Logits that the model scales are scaled before the cap.
    ways.append((CAPPED, MUP if HAS_MUP else {"cls": ModelWithMuP}))
    return [[results_of(tempo_config, case, **more) for tempo_config in (FUSED, OFF)] for case, more in ways]


@pytest.mark.parametrize("tp", [1, 2])
def test_results_and_every_gradient_equal_those_of_the_logits(tp):
    for found in run_megatron_ranks(results_of_all, tp, tp, tp):
        for ours, stock in found:
            assert_equal_to_stock(ours, stock)


@pytest.mark.usefixtures("one_rank")
def test_what_log_probs_leaves_as_it_was_and_what_it_refuses():
    stock, model = build(OFF), build(FUSED)
    given = inputs_of_rl()
    losses = run(model)
    with torch.no_grad():
        reference_pass = log_probs(model, *given, return_entropy=True)
    assert not any(t.requires_grad for t in reference_pass)
    assert torch.equal(run(model), losses)
    first = build(FUSED, pre_process=True, post_process=False)
    assert torch.equal(log_probs(first, *given), first(*given[:-1], labels=given[-1]))
    half = build(FUSED, bf16=True, params_dtype=torch.bfloat16)
    for each in log_probs(Float16Module(half.config, half), *given, return_entropy=True):
        assert (each.dtype, each.shape) == (torch.float32, (2, SEQ_LENGTH))
    for refused, more, message in (
        (stock, {}, "the GPTModel has no fused loss head, which log_probs needs; call tempoize_loss"),
        (model, {"loss_mask": torch.ones(2, SEQ_LENGTH)}, "log_probs was given loss_mask, which is for losses"),
        (model, {"temperature": 0.0}, "temperature is 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            log_probs(refused, *given, **more)
    assert torch.equal(run(model), losses)
