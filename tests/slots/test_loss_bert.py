"""The fused loss head in Megatron's BertModel against the stock one."""

from __future__ import annotations

import functools
import inspect

import torch
from covering import parametrize_covering
from distributed import run_megatron_ranks, run_megatron_ranks_once
from gpt import SEQ_LENGTH, VOCAB_SIZE, assert_equal_to_stock, gpt_config, gradients, tokens_of
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from torch.nn import functional as F
from witness import kept_storages

from tempo_megatron import TempoConfig, tempoize_loss
from tempo_megatron.slots.loss import TempoBertModel, choose_loss

FUSED, OFF = TempoConfig(loss="fused"), TempoConfig.off()


def build(tempo_config, is_tied, *, cls=BertModel):
    torch.manual_seed(7)
    model = cls(
        gpt_config(), 2, bert_layer_local_spec, VOCAB_SIZE, SEQ_LENGTH, share_embeddings_and_output_weights=is_tied
    )
    tempoize_loss(model, tempo_config)
    with torch.no_grad():  # Megatron begins with a bias of 0, which tells nothing
        model.output_layer.bias.normal_()
    return model.train()


def masked():
    """One token in six, and of the second sample fewer."""
    mask = torch.zeros(2, SEQ_LENGTH)
    mask[0, ::6] = mask[1, ::9] = 1
    return mask


def run(model, labels=None, **keywords):
    tokens = tokens_of(0, 2)
    padding = torch.ones(2, SEQ_LENGTH)
    padding[1, 10:] = 0
    segments = (torch.arange(SEQ_LENGTH) > 6).long().expand(2, -1)
    return model(tokens[:, :-1].contiguous(), padding, segments, labels, **keywords)


def loss_and_gradients(tempo_config, is_tied, gives_loss_mask, is_constructed):
    cls = TempoBertModel if is_constructed and tempo_config != OFF else BertModel
    model = build(OFF if is_constructed else tempo_config, is_tied, cls=cls)
    labels = tokens_of(0, 2)[:, 1:].contiguous()
    mask = masked()
    losses, order = run(model, labels, **({"loss_mask": mask} if gives_loss_mask else {}))
    assert losses.dtype == torch.float32 and losses.shape == (2, SEQ_LENGTH)
    loss = (losses * mask).sum() / mask.sum() + F.cross_entropy(order.float(), torch.tensor([0, 1]))
    loss.backward()
    return loss.item(), gradients(model)


@parametrize_covering(
    tp=[1, 2],
    is_tied={"tied": True, "untied": False},
    gives_loss_mask={"recomputed": False, "in forward": True},
    is_constructed={"built before": False, "constructed": True},
)
def test_loss_and_every_gradient_equal_stock(tp, is_tied, gives_loss_mask, is_constructed):
    found = run_megatron_ranks(loss_and_gradients, tp, tp, FUSED, is_tied, gives_loss_mask, is_constructed)
    stock = run_megatron_ranks_once(loss_and_gradients, tp, tp, OFF, is_tied, False, is_constructed)
    for ours, theirs in zip(found, stock, strict=True):
        assert_equal_to_stock(ours, theirs)


def first_of_run(*arguments, **keywords):
    return run(*arguments, **keywords)[0]


def logits_and_kept_bytes():
    found = []
    for tempo_config in (OFF, FUSED):
        model = build(tempo_config, True)
        labels = tokens_of(0, 2)[:, 1:].contiguous()
        keywords = {} if tempo_config == OFF else {"loss_mask": masked()}
        kept = kept_storages(functools.partial(first_of_run, model, labels, **keywords))
        model.eval()
        found.append((run(model)[0].detach(), sum(kept.values()), sorted(model.state_dict())))
    return found


def test_without_labels_there_are_logits_and_with_them_none_is_kept():
    (((stock, stock_bytes, stock_keys), (ours, our_bytes, our_keys)),) = run_megatron_ranks(logits_and_kept_bytes, 1, 1)
    assert torch.equal(stock, ours) and stock_keys == our_keys
    assert our_bytes < stock_bytes


def choice():
    return choose_loss(build(OFF, True), TempoConfig())


def test_auto_takes_the_fused_head():
    assert run_megatron_ranks(choice, 1, 1) == [("fused", None)]


def test_positional_signature_equals_megatrons():
    ours, theirs = (list(inspect.signature(cls.forward).parameters) for cls in (TempoBertModel, BertModel))
    assert ours[:5] == theirs[:5]
