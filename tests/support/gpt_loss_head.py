"""What the tests of the slot of the loss share: a GPT with the fused head or the stock one, and its losses."""

from __future__ import annotations

import torch
from gpt import SEQ_LENGTH, VOCAB_SIZE, gpt_config, tokens_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import TempoConfig, tempo_block_spec
from tempo_megatron.slots.loss import tempoize_loss

FUSED, OFF = TempoConfig(loss="fused"), TempoConfig.off()
# Of a width whose scale is no power of two.
MUP = {"use_mup": True, "mup_base_hidden_size": 10}
HAS_MUP = "use_mup" in TransformerConfig.__dataclass_fields__


class ModelWithMuP(GPTModel):
    """What GPTModel is since megatron-core 0.17, for those before."""

    def _scale_logits(self, logits):
        return logits * 0.3

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.output_layer.register_forward_hook(lambda _, inputs, output: (self._scale_logits(output[0]), output[1]))


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


def inputs():
    """Tokens, positions and mask of two samples, and the tokens that come next."""
    tokens = tokens_of(0, 2)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    return tokens[:, :-1].contiguous(), positions, mask, tokens[:, 1:].contiguous()


def run(model, **keywords):
    *given, labels = inputs()
    return model(*given, **{"labels": labels, **keywords})
