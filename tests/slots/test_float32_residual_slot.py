"""Tempo's norms in a GPT whose residual is float32 and whose parameters have 16 bits (--fp32-residual-connection)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from gpt import build_gpt, gpt_config, gradients, losses
from torch import Tensor
from torch.nn import functional as F
from witness import ulp

from tempo_megatron import TempoConfig
from tempo_megatron.slots import layer_spec
from tempo_megatron.slots.norm import TorchLayerNorm

CONFIG = {"num_layers": 1, "fp32_residual_connection": True}
HALF = {"params_dtype": torch.bfloat16, "bf16": True}
ALONE = {"activation": "off", "dropout": "off", "attention": "off", "loss": "off"}


class Float32Norm(TorchLayerNorm):
    """What Apex computes on a GPU: in float32, rounded to the parameters' dtype. torch's own refuses two dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.float32, self.weight.dtype)
        parameters = (t.to(dtype) for t in (self._gamma(), self.bias))
        return F.layer_norm(x.to(dtype), self.hidden_size, *parameters, self.eps).to(self.weight.dtype)


def loss_and_gradients(tempo_config: TempoConfig, is_exact: bool = False) -> tuple[float, dict[str, Tensor], Any]:
    """Also the dtypes of each norm's input and output; exact: the same weights in float64."""
    model = build_gpt(gpt_config(**CONFIG, **HALF), tempo_config)
    if is_exact:
        weights = model.state_dict()
        model = build_gpt(gpt_config(**CONFIG), tempo_config)
        model.load_state_dict(weights)
        model.double()
    dtypes: list[tuple[torch.dtype, torch.dtype]] = []
    for module in model.modules():
        if isinstance(module, TorchLayerNorm):
            module.register_forward_hook(lambda _, inputs, y: dtypes.append((inputs[0].dtype, y.dtype)))
    loss = losses(model, 0, 2, gives_mask=True).double().mean()
    loss.backward()
    return loss.item(), gradients(model), dtypes


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("choice", ["inplace", "recompute"])
def test_loss_and_every_gradient_are_as_exact_as_stock_with_a_float32_norm(choice: str) -> None:
    loss, found, dtypes = loss_and_gradients(TempoConfig(norm=choice, **ALONE))
    with mock.patch.object(layer_spec, "TorchLayerNorm", Float32Norm):
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
