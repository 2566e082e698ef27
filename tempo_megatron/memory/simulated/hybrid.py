"""Lets the layers of a chunk be those of a HybridModel: each a Mamba layer, an attention, an MLP or a mixture of
experts.

Mamba's kernels (mamba_ssm at e9594ce, from mamba_ssm/ops/triton/) need a GPU and a package: what stands for them makes,
keeps and frees the tensors that they do. References are to megatron-core 0.16.1, from megatron/core/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch import Tensor

from tempo_megatron.memory.run import Hybrid
from tempo_megatron.memory.simulated.configuration import make_column_linear, make_row_linear
from tempo_megatron.memory.simulated.stand_in import Made, stand_in
from tempo_megatron.slots.linear import TempoColumnParallelLinear

_CHUNK = 128
"""Tokens that the scan takes at once (ssm/mamba_mixer.py:164)."""

_KERNEL_SIZE = 4
"""Of the convolution (ssm/mamba_mixer.py:149)."""

_ROWS = 32
"""Of a block of a chunk's tokens, each of which has a sum of its own (ssd_chunk_scan.py: BLOCK_SIZE_M_min)."""


def put_hybrid_layers(block: Any, config: Any, hybrid: Hybrid, kinds: Sequence[str], num_processors: int) -> None:
    """Leave of each layer what its kind has, as models/mamba/mamba_layer_specs.py: mamba_stack_spec does.

    Args:
        block: whose layers have attention and MLP or experts.
        config: of its layers.
        hybrid: sizes of the Mamba layers.
        kinds: a letter of the pattern for each of the block's layers.
        num_processors: of the GPU, by which gradients of B and C are split.
    """
    for place, (layer, kind) in enumerate(zip(block.layers, kinds, strict=True)):
        if kind == "M":
            block.layers[place] = _MambaLayer(config, hybrid, layer, num_processors)
        elif kind == "*":
            layer.pre_mlp_layernorm, layer.mlp, layer.mlp_bda = IdentityOp(), IdentityOp(), IdentityFuncOp()
        else:
            layer.input_layernorm, layer.self_attention = IdentityOp(), IdentityOp()
            layer.self_attn_bda = IdentityFuncOp()


class _MambaLayer(torch.nn.Module):
    """ssm/mamba_layer.py: MambaLayer with the norm and the bias, dropout and residual of `layer`."""

    def __init__(self, config: Any, hybrid: Hybrid, layer: Any, num_processors: int) -> None:
        super().__init__()
        self._dropout, self._is_fused = config.hidden_dropout, config.bias_dropout_fusion
        self.norm, self.mamba_bda = layer.input_layernorm, layer.self_attn_bda
        drops_norm = getattr(self.norm, "keep", "") == "recompute"
        linear = TempoColumnParallelLinear if drops_norm else ColumnParallelLinear
        self.mixer = _MambaMixer(config, hybrid, linear, num_processors)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        output = self.mixer(self.norm(hidden_states))
        add = self.mamba_bda(self.training, self._is_fused)
        return add((output, None), hidden_states, self._dropout), None


class _MambaMixer(torch.nn.Module):
    """ssm/mamba_mixer.py: MambaMixer in training, with --use-mamba-mem-eff-path as by default."""

    def __init__(self, config: Any, hybrid: Hybrid, linear: Any, num_processors: int) -> None:
        super().__init__()
        ranks, dtype = config.tensor_model_parallel_size, config.params_dtype
        num_heads = hybrid.find_num_heads(config.hidden_size)
        inner, groups = num_heads * hybrid.head_dim, hybrid.num_groups
        self._sizes = hybrid.head_dim, groups // ranks, num_processors
        channels = (inner + 2 * groups * hybrid.state_dim) // ranks
        num_outputs = 2 * inner + 2 * groups * hybrid.state_dim + num_heads
        self.in_proj = make_column_linear(config, config.hidden_size, num_outputs, linear)
        self.conv1d = torch.nn.Conv1d(channels, channels, _KERNEL_SIZE, groups=channels, dtype=dtype)
        self.dt_bias, self.A_log, self.D = (
            torch.nn.Parameter(torch.empty(num_heads // ranks, dtype=dtype)) for _ in range(3)
        )
        self.norm = _GroupedNorm(inner // ranks, groups // ranks, dtype)
        self.out_proj = make_row_linear(config, inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.in_proj(x)[0].transpose(0, 1).contiguous()
        decay = -torch.exp(self.A_log.float())
        convolution = self.conv1d.weight.squeeze(1), self.conv1d.bias
        scan = _Scan(projected, len(self.conv1d.weight), len(self.D), *self._sizes)
        inputs: list[Any] = [projected, *convolution, self.dt_bias.float(), decay, self.D]
        scanned = stand_in(scan.run, *inputs, differentiate=scan.differentiate)
        found: Tensor = self.out_proj(self.norm(scanned.transpose(0, 1).contiguous()))[0]
        return found


class _GroupedNorm(torch.nn.Module):
    """layernorm_gated.py: RMSNorm of groups of channels, whose gate the scan has applied."""

    def __init__(self, size: int, num_groups: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._num_groups = num_groups
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Keeps its input, and a float32 of each token and group."""

        def make(x: Tensor, weight: Tensor) -> Made:
            statistics = x.new_empty(self._num_groups * x.numel() // weight.numel(), dtype=torch.float32)
            return torch.empty_like(x), (x, weight, statistics)

        return stand_in(make, x, self.weight)


class _Scan:
    """ssd_combined.py: MambaSplitConv1dScanCombinedFn, with a gate and without a norm. A chunk is of _CHUNK tokens.

    Keeps its arguments and the scan's output before the gate; convolution and scan run again in backward.

    Args:
        projected: [b, s, gate, input, B, C and steps], whose dtype tensors have that are not float32.
        num_channels: of the convolution.
        num_heads, head_dim, num_groups: of the rank.
        num_processors: of the GPU.
    """

    def __init__(
        self, projected: Tensor, num_channels: int, num_heads: int, head_dim: int, num_groups: int, num_processors: int
    ) -> None:
        self._make, (batch, tokens, _) = projected.new_empty, projected.shape
        state_dim = (num_channels - num_heads * head_dim) // num_groups // 2
        chunks = math.ceil(tokens / _CHUNK)
        self._convolved = batch, tokens, num_channels
        self._output = batch, tokens, num_heads, head_dim
        self._steps = batch, tokens, num_heads
        # For each token and head.
        self._sums = batch, num_heads, chunks, _CHUNK
        # The state behind each chunk, and the last one.
        self._states = batch, chunks, num_heads, head_dim, state_dim
        self._state = batch, num_heads, head_dim, state_dim
        # Products of B and C within each chunk.
        self._products = batch, chunks, 1, num_groups, _CHUNK, _CHUNK
        # In backward the heads of a group are split (ssd_chunk_state.py: _chunk_state_bwd_db).
        of_group = num_heads // num_groups
        per_program = min(math.ceil(batch * chunks * num_heads / num_processors), of_group)
        splits = math.ceil(of_group / max(per_program, 1))
        self._split_products = batch, chunks, splits, num_groups, _CHUNK, _CHUNK
        # Of B or of C.
        self._split_grad = batch, tokens, splits, num_groups, state_dim

    def _make_float32(self, *shapes: Sequence[int]) -> list[Tensor]:
        return [self._make(shape, dtype=torch.float32) for shape in shapes]

    def run(self, projected: Tensor, *others: Tensor) -> Made:
        conv_weight, conv_bias, dt_bias, decay, skip = others
        # _mamba_chunk_scan_combined_fwd; what has a name there lives until it returns.
        alive = [self._make(self._convolved), *self._make_float32(self._sums, self._sums)]
        states = self._make_float32(self._states)
        alive += [self._make(self._states), *self._make_float32(self._state)]
        del states
        alive += self._make_float32(self._products)
        output, ungated = self._make(self._output), self._make(self._output)
        del alive
        return output.flatten(2), (projected, conv_weight, conv_bias, ungated, decay, skip, dt_bias)

    def differentiate(self, kept: Sequence[Tensor], _: Tensor) -> list[Tensor]:
        projected, conv_weight, conv_bias, _, decay, skip, dt_bias = kept
        alive = [self._make(self._convolved)]
        grad_projected = torch.empty_like(projected)
        # The gradient of the convolution's output; the rest is _mamba_chunk_scan_combined_bwd.
        alive += [self._make(self._convolved), self._make(self._steps)]
        alive += self._make_float32(self._sums, self._sums, self._products)
        in_chunks = self._make_float32(self._states)
        states = self._make_float32(self._states)
        alive += self._make_float32(self._state)
        del in_chunks
        # dout_x of _chunk_scan_bwd_dz.
        alive += [self._make(self._output)]
        states += self._make_float32(self._states)
        alive += [self._make(self._states), self._make(self._states)]
        del states
        alive += self._make_float32(self._sums)
        # dB and dC, summed over the splits.
        for _operand in "BC":
            alive += [self._make_float32(self._split_grad)[0].sum(2), *self._make_float32(self._sums)]
        alive += [self._make_float32(self._split_products)[0].sum(2)]
        # ddA_prev, and ddA of _chunk_scan_bwd_ddAcs_stable.
        blocks = [self._sums] * (_CHUNK // _ROWS)
        alive += [*self._make_float32(self._sums), torch.stack(self._make_float32(*blocks)).sum(0)]
        small = [torch.empty_like(each) for each in (conv_weight, conv_bias, dt_bias, decay, skip)]
        del alive
        return [grad_projected, *small]
