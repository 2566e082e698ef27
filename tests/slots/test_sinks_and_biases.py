"""Softmax with a sink, and T5's relative positions, in Megatron's layers with Tempo's attention."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from distributed import run_megatron_ranks, run_steps
from gpt import assert_equal_to_stock, build_gpt, build_t5, differentiate, gpt_config, losses, t5_losses
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from tempo_megatron import TempoConfig
from tempo_megatron.slots.attention import TempoDotProductAttention

OFF, ON = TempoConfig.off(), TempoConfig()
RECOMPUTE = TempoConfig(attention="recompute", linear_qkv="recompute")
SINK = {"softmax_type": "learnable", "init_method_std": 0.1}
ONE = {"softmax_type": "off-by-one", "num_query_groups": 2}
SP = {"sequence_parallel": True}
DROPPED = {**SINK, "num_query_groups": 2, "dropout": 0.1}
STEPS = {
    (1, 1): {
        "stock": (OFF, SINK),
        "flash": (ON, SINK),
        "recompute": (RECOMPUTE, SINK),
        "softmax": (TempoConfig(attention="softmax"), SINK),
        "stock, off by one": (OFF, ONE),
        "off by one": (ON, ONE),
        "dropped": (ON, DROPPED),
        "dropped, selective": (ON, {**DROPPED, "recompute_granularity": "selective"}),
    },
    (2, 1): {"stock": (OFF, {**SINK, **SP}), "flash": (ON, {**SINK, **SP})},
    (1, 2): {
        f"dropped, {comm_type}": (ON, {**DROPPED, "cp_comm_type": comm_type})
        for comm_type in ("p2p", "all_gather", "a2a")
    },
}


def take_steps(steps):
    """Loss and gradients by name, and the keys and shapes of the checkpoint, of each step."""
    found = {}
    for name, (tempo_config, settings) in steps.items():
        model = build_gpt(gpt_config(**settings), tempo_config)
        result = differentiate(model, losses(model, 3, 2, gives_mask=tempo_config.is_off).sum())
        sharded = {
            key: (getattr(value, "global_shape", None), getattr(value, "global_offset", None))
            for key, value in model.sharded_state_dict().items()
        }
        found[name] = result, sharded
    return found


steps_of = functools.partial(run_steps, take_steps, STEPS)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_sink_gives_losses_gradients_and_checkpoint_keys_of_stock(tp):
    for found in steps_of(tp):
        for name, (result, sharded) in found.items():
            if "dropped" not in name:
                stock, stock_sharded = found["stock, off by one" if "off by one" in name else "stock"]
                assert_equal_to_stock(result, stock)
                assert sharded == stock_sharded
        name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
        assert found["flash"][0][1][name].abs().min() > 0


def test_context_parallel_ranks_find_their_parts_of_a_sinks_gradient():
    (alone,) = steps_of(1)
    assert_equal_to_stock(alone["dropped, selective"][0], alone["dropped"][0])
    for found in steps_of(1, 2):
        for result, _ in found.values():
            assert_equal_to_stock(result, alone["dropped"][0])


def attend_plainly(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, **_):
    """Megatron's own attention takes no bias, so that plain torch is the witness."""
    scores = torch.einsum("ibad,jbad->baij", query, key) * self.softmax_scale
    scores = scores if attention_bias is None else scores + attention_bias
    probabilities = scores.masked_fill(attention_mask, -10000.0).softmax(-1)
    return torch.einsum("baij,jbad->ibad", probabilities, value).flatten(2)


def relative_positions():
    found = {}
    choices = {name: TempoConfig(attention=name) for name in ("flash", "softmax")}
    for name, tempo_config in {"plain": OFF, **choices}.items():
        config = gpt_config(init_method_std=0.1, params_dtype=torch.float64)
        model = build_t5(config, tempo_config, position_embedding_type="relative").double()
        with mock.patch.object(DotProductAttention, "forward", attend_plainly):
            found[name] = differentiate(model, t5_losses(model).mean())
    return found


def test_relative_positions_of_t5_get_the_gradients_of_plain_attention():
    for found in run_megatron_ranks(relative_positions, 2, 2):
        name = "encoder_relative_pos_emb.relative_attention_bias.weight"
        assert found["plain"][1][name].abs().max() > 0
        for each in ("flash", "softmax"):
            assert_equal_to_stock(found[each], found["plain"])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("exchange", "packed", "reason"),
    [(SimpleNamespace(), None, "context_parallel_size is 1"), (None, SimpleNamespace(), "sequences are packed")],
)
def test_a_bias_beside_context_parallelism_or_packing_is_refused(exchange, packed, reason):
    attention = TempoDotProductAttention(gpt_config(), 1, AttnMaskType.causal, "self")
    attention._exchange = exchange
    q, k, v = (torch.randn(4, 1, 4, 8) for _ in range(3))
    with pytest.raises(ValueError, match=f'{reason}.*; set tempo.attention to "off"$'):
        attention(q, k, v, None, attention_bias=torch.zeros(1, 4, 4, 4), packed_seq_params=packed)
