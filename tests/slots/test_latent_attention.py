"""Megatron's latent attention around Tempo's core attention and norms, with heads of two sizes."""

from __future__ import annotations

import functools

import pytest
import torch
from distributed import run_megatron_ranks, run_steps
from gpt import FULL, SEQ_LENGTH, assert_equal_to_stock, differentiate, losses
from latent_cases import build_latent
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tempo_megatron import TempoConfig
from tempo_megatron.memory.tape.scopes import record_saved
from tempo_megatron.slots.layer_spec import get_stock_block_spec
from tempo_megatron.slots.report import report_on

OFF, AUTO = TempoConfig.off(), TempoConfig()
RECOMPUTE = TempoConfig(activation="recompute", norm="recompute", attention="recompute")
EQUAL_SIZES = {"v_head_dim": 12, "kv_channels": 12}
UP_PROJECTIONS = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
BATCH = 2


def train(tempo_config, **settings):
    """The loss, gradients by name, the bytes that autograd keeps after the forward, and the report."""
    model = build_latent(tempo_config, **settings)
    loss, saved = record_saved(model, lambda: losses(model, 3, BATCH, gives_mask=tempo_config.is_off).sum())
    report = report_on(model) if not tempo_config.is_off else None
    return differentiate(model, loss), sum(each.num_bytes for each in saved), report


SP = {"sequence_parallel": True}
DROPPED = {"dropout": 0.1}
STEPS = {
    (1, 1): {
        "witness": (OFF, {}),
        "stock": (OFF, EQUAL_SIZES),
        "equal sizes": (AUTO, EQUAL_SIZES),
        "in place": (AUTO, {}),
        "recompute": (RECOMPUTE, {}),
        "up projections": (AUTO, UP_PROJECTIONS),
        "up projections, norms recomputed": (TempoConfig(norm="recompute"), UP_PROJECTIONS),
        "core attention": (AUTO, {"recompute_granularity": "selective"}),
        "witness, q not compressed": (OFF, {"q_lora_rank": None, "rope_type": "yarn"}),
        "q not compressed": (AUTO, {"q_lora_rank": None, "rope_type": "yarn"}),
        "dropped": (AUTO, DROPPED),
        "dropped, full": (RECOMPUTE, {**DROPPED, **FULL}),
        "dropped, up projections": (AUTO, {**DROPPED, **UP_PROJECTIONS}),
    },
    (2, 1): {
        "witness": (OFF, SP),
        "in place": (AUTO, SP),
        "recompute": (RECOMPUTE, SP),
        "dropped": (AUTO, {**SP, **DROPPED}),
    },
    (1, 2): {
        "dropped": (AUTO, {**DROPPED, "cp_comm_type": "p2p"}),
        "dropped, up projections": (AUTO, {**DROPPED, **UP_PROJECTIONS, "cp_comm_type": "a2a"}),
    },
}


def take_steps(steps):
    return {name: train(tempo_config, **settings) for name, (tempo_config, settings) in steps.items()}


steps_of = functools.partial(run_steps, take_steps, STEPS)


@pytest.mark.parametrize("tp", [1, 2])
def test_losses_and_gradients_are_those_of_plain_attention(tp):
    for found in steps_of(tp):
        for name, (result, *_) in found.items():
            if "dropped" not in name:
                witness = {"q not compressed": "witness, q not compressed", "equal sizes": "stock"}.get(name, "witness")
                if "witness" not in name and name != "stock":
                    assert_equal_to_stock(result, found[witness][0])


def test_masks_are_those_of_one_process_in_any_layout_and_recomputation():
    (alone,) = steps_of(1)
    expected = alone["dropped"][0]
    assert expected[0] != pytest.approx(alone["in place"][0][0], rel=1e-4)
    for found in (alone, *steps_of(1, 2)):
        for name, (result, *_) in found.items():
            if "dropped" in name:
                assert_equal_to_stock(result, expected)
    for found in steps_of(2):
        assert found["dropped"][0][0] == pytest.approx(expected[0], rel=1e-7)


def test_what_is_kept():
    (found,) = steps_of(1)
    kept = {name: num_bytes for name, (_, num_bytes, _) in found.items()}
    tokens, heads = SEQ_LENGTH * BATCH, 4
    vectors = 2 * tokens * heads * (2 * (8 + 4) + 6) * 8  # of q, k and v, in two layers
    # The recomputation keeps the rotated part of the keys, a view of all that the down projection made.
    assert vectors * 0.8 < kept["in place"] - kept["up projections"] <= vectors
    # The witness keeps scores and probabilities besides, and its norms their input.
    assert kept["witness"] - kept["in place"] > 2 * 2 * BATCH * heads * SEQ_LENGTH**2 * 8
    report = found["in place"][2]
    assert report.describe_counts() == "activation 2 of 2, norm 9 of 9, dropout 5 of 5, attention 2 of 2, loss 1 of 1"


def down_projections():
    """The gradients of every layer's down projections, by their class: of which a rank has a part, and has the whole.
    The part is gathered."""
    found = []
    for down in (ColumnParallelLinear, Linear):
        model = build_latent(AUTO, down=down)
        losses(model, 3, BATCH, gives_mask=False).sum().backward()
        weights = [p for name, p in model.named_parameters() if "down_proj" in name]
        grads = [p.grad if down is Linear else gather_along_rows(p.grad) for p in weights]
        found.append(grads)
    return found


def gather_along_rows(part):
    return gather_from_tensor_model_parallel_region(part.T.contiguous()).T


def test_the_rotary_key_has_the_gradient_of_every_ranks_heads():
    (expected,) = run_megatron_ranks(down_projections, 1, 1)
    for of_rank in run_megatron_ranks(down_projections, 2, 2):
        for kind, grads in zip(expected, of_rank, strict=True):
            for whole, found in zip(kind, grads, strict=True):
                torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("one_rank")
def test_recomputed_attention_beside_recomputed_projections_is_refused():
    reason = "recompute_modules holds mla_up_proj, after which queries, keys and values are there too late to make the "
    with pytest.raises(ValueError, match=f'^{reason}.*; set tempo.attention to "flash" or "softmax" or "off"$'):
        build_latent(RECOMPUTE, **UP_PROJECTIONS)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("is_latent", "q_lora_rank", "has_norm"), [(True, 4, True), (True, None, False), (False, None, True)]
)
def test_only_latent_attention_without_a_vector_of_q_has_no_norm_of_q(is_latent, q_lora_rank, has_norm):
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "qk_layernorm": True}
    config = MLATransformerConfig(**sizes, multi_latent_attention=is_latent, q_lora_rank=q_lora_rank)
    (layer,) = get_stock_block_spec(config, use_transformer_engine=False).layer_specs
    assert (layer.submodules.self_attention.submodules.q_layernorm is not IdentityOp) is has_norm
