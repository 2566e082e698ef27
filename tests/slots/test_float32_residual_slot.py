"""Tempo's norms in a GPT whose residual is float32 and whose parameters have 16 bits (--fp32-residual-connection)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from gpt import build_gpt, gpt_config, gradients, losses
from torch import Tensor
from torch.nn import functional as F
from witness import ulp

from tempo_megatron import TempoConfig, tempo_block_spec
from tempo_megatron.slots.norm import TorchNorm
from tempo_megatron.slots.slot_content import change_slot

ALONE = {"activation": "off", "dropout": "off", "attention": "off", "loss": "off"}


class Float32Norm(TorchNorm):
    """What Apex computes on a GPU: in float32, rounded to the parameters' dtype. torch's own refuses two dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.float32, self.weight.dtype)
        y = F.layer_norm(x.to(dtype), self.hidden_size, self.weight.to(dtype), self.bias.to(dtype), self.eps)
        return y.to(self.weight.dtype)


def build(tempo_config: TempoConfig, **settings: Any) -> Any:
    """A model of one layer; stock has Float32Norm."""
    config = gpt_config(num_layers=1, fp32_residual_connection=True, **settings)
    spec = tempo_block_spec(config, tempo_config)
    if tempo_config.is_off:
        norms = dict.fromkeys(("input_layernorm", "pre_mlp_layernorm"), Float32Norm)
        spec = dataclasses.replace(
            spec, layer_specs=[change_slot(layer, **norms) for layer in spec.layer_specs], layer_norm=Float32Norm
        )
    return build_gpt(config, tempo_config, spec=spec)


def loss_and_gradients(tempo_config: TempoConfig, is_exact: bool = False) -> tuple[float, dict[str, Tensor], Any]:
    """Also the dtypes of each norm's input and output; exact: the same weights in float64."""
    model = build(tempo_config, params_dtype=torch.bfloat16, bf16=True)
    if is_exact:
        weights = model.state_dict()
        model = build(tempo_config)
        model.load_state_dict(weights)
        model.double()
    dtypes: list[tuple[torch.dtype, torch.dtype]] = []
    for module in model.modules():
        if isinstance(module, TorchNorm):
            module.register_forward_hook(lambda _, inputs, y: dtypes.append((inputs[0].dtype, y.dtype)))
    loss = losses(model, 0, 2, gives_mask=True).double().mean()
    loss.backward()
    return loss.item(), gradients(model), dtypes


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("choice", ["inplace", "recompute"])
def test_loss_and_every_gradient_are_as_exact_as_stock_with_a_float32_norm(choice: str) -> None:
    loss, found, dtypes = loss_and_gradients(TempoConfig(norm=choice, **ALONE))
    stock_loss, theirs, stock_dtypes = loss_and_gradients(TempoConfig.off())
    exact_loss, exact, _ = loss_and_gradients(TempoConfig.off(), is_exact=True)
    assert dtypes == stock_dtypes and (torch.float32, torch.bfloat16) in dtypes
    assert abs(loss - exact_loss) <= 2 * abs(stock_loss - exact_loss) + 2**-8 * exact_loss
    assert found.keys() == theirs.keys() == exact.keys()
    largest = max(grad.abs().max() for grad in exact.values())
    for name, grad in exact.items():
        error, allowed = ((t[name].double() - grad).abs().max() for t in (found, theirs))
        # Some gradients, as that of a key's bias, are nothing but round-off of the others.
        assert error <= 2 * allowed + ulp(torch.maximum(grad.abs().max(), 0.01 * largest), torch.bfloat16), name
