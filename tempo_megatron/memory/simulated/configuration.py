"""Simulates a rank, builds its TransformerConfig and linears, and gives its fake parameters their dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.models.build import build_transformer_config
from tempo_megatron.models.shape import ModelShape
from tempo_megatron.slots import dropout_rng

_OF_STAND_INS = ("layernorm", "mla_up_proj", "moe_act")


def leave_out_stand_ins(recompute: Iterable[str]) -> tuple[str, ...]:
    """Megatron's recompute modules without those that modules of `memory.simulated` recompute themselves."""
    return tuple(name for name in recompute if name not in _OF_STAND_INS)


@contextlib.contextmanager
def simulate_rank(tensor_parallel: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a tensor-parallel group of this size, on a CPU, with Megatron's random states.

    Raises ValueError where torch.distributed is already initialised.
    """
    cpu.use_cpu()
    with simulate_layout(tensor_parallel):
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(1234, 0)
        yield


def build_ledger_config(
    shape: ModelShape,
    *,
    sequence_parallel: bool,
    dtype: torch.dtype,
    recompute: tuple[str, ...],
    fuse_swiglu: bool = False,
) -> TransformerConfig:
    """The model's TransformerConfig under the initialised model parallelism.

    Args:
        recompute: nothing, or "full", or names of Megatron's recompute modules ("core_attn", "mlp").
        fuse_swiglu: Megatron's fused SwiGLU, where that is the activation.
    """
    choices: dict[str, Any] = {}
    if shape.num_experts is not None:
        # Experts are all on one rank, until what stands for them is put there.
        choices = {"expert_tensor_parallel_size": 1}
    if "full" in recompute:
        choices |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute:
        choices |= {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    return build_transformer_config(
        shape,
        dtype=dtype,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        fuse_swiglu=fuse_swiglu,
        # Drawing the values of a large model's weights would take longer than its forward.
        perform_initialization=False,
        **choices,
    )


def make_column_linear(config: Any, num_inputs: int, num_outputs: int, linear: Any, **group: Any) -> Any:
    """A `linear` without bias, ColumnParallelLinear or Tempo's."""
    common = {"init_method": config.init_method, "bias": False, "gather_output": False}
    return linear(num_inputs, num_outputs, config=config, **common, **group)


def make_row_linear(config: Any, num_inputs: int, num_outputs: int, *, bias: bool) -> RowParallelLinear:
    common = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
    return RowParallelLinear(num_inputs, num_outputs, config=config, bias=bias, **common)


def convert_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters as `model.to(dtype)` does, which fake tensors refuse."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype != dtype:
                converted = torch.nn.Parameter(parameter.detach().to(dtype))
                converted.__dict__.update(parameter.__dict__)
                module._parameters[name] = converted
