"""What the tests of the slot of the loss share: a GPT with the fused head or the stock one, and its losses."""

from __future__ import annotations

import torch
from gpt import SEQ_LENGTH, VOCAB_SIZE, gpt_config, gradients, tokens_of
from megatron.core.models.gpt.gpt_model import GPTModel

from tempo_megatron import TempoConfig, tempo_block_spec
from tempo_megatron.slots.loss import tempoize_loss

FUSED, OFF = TempoConfig(loss="fused"), TempoConfig.off()
# Tensor parallel size, and whether sequences are parallel too.
LAYOUTS = {"TP 1": (1, False), "TP 2": (2, False), "TP 2 + SP": (2, True)}


def build(tempo_config, *, is_tied=True, sequence_parallel=False, cls=GPTModel, seed=7, **settings):
    stage = {name: settings.pop(name) for name in ("pre_process", "post_process") if name in settings}
    config = gpt_config(sequence_parallel=sequence_parallel, **settings)
    torch.manual_seed(seed)
    model = cls(
        config,
        tempo_block_spec(config, TempoConfig.off()),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=is_tied,
        **stage,
    )
    tempoize_loss(model, tempo_config)
    return model.to(config.params_dtype).train()


def run(model, labels=None, **keywords):
    tokens = tokens_of(0, 2)
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    if labels is None:
        labels = tokens[:, 1:].contiguous()
    return model(tokens[:, :-1].contiguous(), positions, mask, labels=labels, **keywords)


def loss_mask():
    mask = torch.ones(2, SEQ_LENGTH)
    mask[0, :5] = 0
    mask[1] *= 0.25
    return mask


def loss_and_gradients(tempo_config, is_tied, sequence_parallel, gives_loss_mask):
    model = build(tempo_config, is_tied=is_tied, sequence_parallel=sequence_parallel)
    found = run(model, **({"loss_mask": loss_mask()} if gives_loss_mask else {}))
    assert found.dtype == torch.float32 and found.shape == (2, SEQ_LENGTH) and found.is_contiguous()
    loss = (found * loss_mask()).sum() / loss_mask().sum()
    (128.0 * loss).backward()
    return loss.item(), gradients(model)
