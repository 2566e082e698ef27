"""What the tests of the slot of the loss share: a GPT with the fused head or the stock one, and its losses."""

from __future__ import annotations

import torch
from gpt import SEQ_LENGTH, build_gpt, gpt_config, tokens_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import TempoConfig, tempo_block_spec

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


def build(tempo_config, *, is_tied=True, **settings):
    of_model = {name: settings.pop(name) for name in ("cls", "seed", "pre_process", "post_process") if name in settings}
    config = gpt_config(**settings)
    spec = tempo_block_spec(config, TempoConfig.off())
    return build_gpt(config, tempo_config, spec=spec, share_embeddings_and_output_weights=is_tied, **of_model)


def inputs():
    """Tokens, positions and mask of two samples, and the tokens that come next."""
    tokens = tokens_of(0, 2)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQ_LENGTH).expand(2, -1)
    return tokens[:, :-1].contiguous(), positions, mask, tokens[:, 1:].contiguous()


def run(model, **keywords):
    *given, labels = inputs()
    return model(*given, **{"labels": labels, **keywords})
