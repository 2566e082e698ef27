"""The fused loss head in models that scale their logits, or hand them to a user's function; errors that come late."""

from __future__ import annotations

import inspect

import pytest
import torch
from distributed import run_megatron_ranks
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, gradients, tokens_of
from gpt_loss_head import FUSED, OFF, build, loss_and_gradients, loss_mask, run
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import TempoConfig
from tempo_megatron.memory.fake_tensors import use_fake_tensors
from tempo_megatron.slots.loss import _IS_MULTIPLE as IS_MULTIPLE
from tempo_megatron.slots.loss import _LossesOfTotal, choose_loss, fused_gpt_class, tempoize_loss

HAS_MUP = "use_mup" in TransformerConfig.__dataclass_fields__
HAS_PROCESSOR = "output_processor" in inspect.signature(GPTModel._postprocess).parameters


class ModelWithMuP(GPTModel):
    """What GPTModel is since megatron-core 0.17, for those before."""

    def _scale_logits(self, logits):
        return logits * 0.3

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.output_layer.register_forward_hook(lambda _, inputs, output: (self._scale_logits(output[0]), output[1]))


class ModelWithProcessor(GPTModel):
    """What GPTModel is since megatron-core 0.18, for those before."""

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, output_processor=None, **kwargs):
        if output_processor is None:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **kwargs)
        weight = self.shared_embedding_or_output_weight()
        return output_processor(
            hidden_states=hidden_states, output_layer=self.output_layer, output_weight=weight, labels=labels
        )


def losses_with_mup(tempo_config, gives_loss_mask):
    # Of a width whose scale is no power of two.
    settings = {"use_mup": True, "mup_base_hidden_size": 10} if HAS_MUP else {"cls": ModelWithMuP}
    model = build(tempo_config, **settings)
    tempoize_loss(model, tempo_config)
    found = run(model, **({"loss_mask": loss_mask()} if gives_loss_mask else {}))
    (found * loss_mask()).sum().backward()
    return found.sum().item(), gradients(model)


@pytest.mark.parametrize("gives_loss_mask", [False, True], ids=["recomputed", "in forward"])
def test_losses_are_those_of_logits_that_the_model_scales(gives_loss_mask):
    found = run_megatron_ranks(losses_with_mup, 2, 2, FUSED, gives_loss_mask)
    stock = run_megatron_ranks(losses_with_mup, 2, 2, OFF, False)
    plain = run_megatron_ranks(loss_and_gradients, 2, 2, OFF, True, False, False)
    assert plain[0][0] != pytest.approx(stock[0][0], rel=0.01)
    for ours, theirs in zip(found, stock, strict=True):
        assert_equal_to_stock(ours, theirs)


def scale_found_without_memory():
    model = build(OFF, cls=ModelWithMuP)
    with use_fake_tensors():
        tempoize_loss(model, FUSED)
    return model.output_layer.loss_head.logits_scale


def test_a_model_on_tensors_without_memory_has_its_scale_too():
    assert run_megatron_ranks(scale_found_without_memory, 1, 1) == [0.3]


def processed(tempo_config):
    """What an output_processor gets of the output layer, and the model's losses after it."""
    model = build(tempo_config, **({} if HAS_PROCESSOR else {"cls": ModelWithProcessor}))
    hidden = torch.randn(SEQ_LENGTH, 2, 32, generator=torch.Generator().manual_seed(3))
    labels = tokens_of(0, 2)[:, 1:].contiguous()

    def processor(*, hidden_states, output_layer, output_weight, **_):
        return output_layer(hidden_states, weight=output_weight)[0]

    logits = model._postprocess(hidden, None, None, labels, None, None, None, output_processor=processor)
    return logits.detach(), run(model).detach()


def test_an_output_processor_gets_logits():
    ((logits, losses),), ((stock_logits, stock_losses),) = (
        run_megatron_ranks(processed, 1, 1, c) for c in (FUSED, OFF)
    )
    assert logits.shape == (SEQ_LENGTH, 2, VOCAB_SIZE) and torch.equal(logits, stock_logits)
    torch.testing.assert_close(losses, stock_losses)


def logits_that_are_bent():
    model = build(OFF)
    model._scale_logits = torch.tanh
    try:
        tempoize_loss(model, FUSED)
    except ValueError as error:
        return str(error), type(model) is GPTModel
    return "not refused", False


class ModelWithLossOfItsOwn(GPTModel):
    def compute_language_model_loss(self, labels, logits):
        return super().compute_language_model_loss(labels, logits) + 1e-4 * logits.logsumexp(-1).square().t()


def losses_that_need_logits():
    built = build(OFF, cls=ModelWithLossOfItsOwn)
    patched = build(OFF)
    patched.compute_language_model_loss = lambda labels, logits: logits.sum()
    constructed = fused_gpt_class(ModelWithLossOfItsOwn)
    found = []
    for refused in (
        lambda: tempoize_loss(built, FUSED),
        lambda: tempoize_loss(patched, FUSED),
        lambda: build(OFF, cls=constructed),
    ):
        try:
            refused()
        except ValueError as error:
            found.append(str(error))
    before = run(built)
    tempoize_loss(built, TempoConfig())
    return found, choose_loss(built, TempoConfig()), torch.equal(run(built), before)


def test_a_model_with_a_loss_of_its_own_is_refused_and_auto_leaves_it_as_it_is():
    ((found, (choice, reason), is_stock),) = run_megatron_ranks(losses_that_need_logits, 1, 1)
    assert len(found) == 3 and is_stock and choice == "off"
    assert "ModelWithLossOfItsOwn has a compute_language_model_loss of its own" in reason
    assert all("of its own, which needs logits; set tempo.loss to" in text for text in found), found


def test_a_model_that_does_something_else_to_its_logits_is_refused():
    ((message, is_stock),) = run_megatron_ranks(logits_that_are_bent, 1, 1)
    assert "GPTModel does more to its logits" in message and is_stock


@pytest.mark.gpu
def test_on_a_gpu_a_wrong_gradient_is_nan_and_the_next_forward_says_why():
    losses, weights = (torch.rand(2, 8, device="cuda") for _ in range(2))
    total = (losses * weights).sum().requires_grad_()
    (_LossesOfTotal.apply(total, losses, weights) * weights).sum().backward()
    torch.cuda.synchronize()
    IS_MULTIPLE.raise_if_noted()
    (_LossesOfTotal.apply(total, losses, weights) * losses).sum().backward()
    assert total.grad.isnan()
    with pytest.raises(RuntimeError, match="not a number times loss_mask"):
        IS_MULTIPLE.raise_if_noted()
    IS_MULTIPLE.raise_if_noted()
