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
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch import Tensor

from tempo_megatron.memory.run import Hybrid
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
        self._hybrid, self._num_processors = hybrid, num_processors
        num_heads = hybrid.find_num_heads(config.hidden_size)
        inner, groups = num_heads * hybrid.head_dim, hybrid.num_groups
        self._num_groups = groups // ranks
        channels = (inner + 2 * groups * hybrid.state_dim) // ranks
        self.in_proj = linear(
            config.hidden_size,
            2 * inner + 2 * groups * hybrid.state_dim + num_heads,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        self.conv1d = torch.nn.Conv1d(channels, channels, _KERNEL_SIZE, groups=channels, dtype=dtype)
        self.dt_bias, self.A_log, self.D = (
            torch.nn.Parameter(torch.empty(num_heads // ranks, dtype=dtype)) for _ in range(3)
        )
        self.norm = _GroupedNorm(inner // ranks, self._num_groups, dtype)
        self.out_proj = RowParallelLinear(
            inner,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        projected = self.in_proj(x)[0].transpose(0, 1).contiguous()
        decay = -torch.exp(self.A_log.float())
        scanned = _Scan.apply(
            projected,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias.float(),
            decay,
            self.D,
            self._hybrid.head_dim,
            self._num_groups,
            self._num_processors,
        )
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

        found: Tensor = stand_in(make, x, self.weight)
        return found


class _Scan(torch.autograd.Function):
    """ssd_combined.py: MambaSplitConv1dScanCombinedFn, with a gate and without a norm.

    Keeps its arguments and the scan's output before the gate; convolution and scan run again in backward.
    """

    @staticmethod
    def forward(ctx: Any, projected: Tensor, *others: Any) -> Tensor:
        conv_weight, conv_bias, dt_bias, decay, skip, head_dim, num_groups, num_processors = others
        sizes = _ScanSizes(projected, conv_weight.size(0), skip.numel(), head_dim, num_groups)
        # _mamba_chunk_scan_combined_fwd; what has a name there lives until it returns.
        alive = [sizes.convolve(), *sizes.sum_steps(2)]
        states = sizes.make_states(torch.float32)
        alive += [sizes.make_states(projected.dtype), sizes.make_state()]
        del states
        alive += [sizes.multiply_chunks()]
        output, ungated = sizes.make_output(), sizes.make_output()
        del alive
        ctx.save_for_backward(projected, conv_weight, conv_bias, ungated, decay, skip, dt_bias)
        ctx.sizes, ctx.num_processors = sizes, num_processors
        return output.flatten(2)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        projected, conv_weight, conv_bias, _, decay, skip, dt_bias = ctx.saved_tensors
        sizes, dtype, float32 = ctx.sizes, projected.dtype, torch.float32
        alive = [sizes.convolve()]
        grad_projected = torch.empty_like(projected)
        # The gradient of the convolution's output; the rest is _mamba_chunk_scan_combined_bwd.
        alive += [sizes.convolve(), sizes.copy_steps(), *sizes.sum_steps(2), sizes.multiply_chunks()]
        in_chunks = sizes.make_states(float32)
        states = [sizes.make_states(float32)]
        alive += [sizes.make_state()]
        del in_chunks
        # dout_x of _chunk_scan_bwd_dz.
        alive += [sizes.make_output()]
        states += [sizes.make_states(float32)]
        alive += [sizes.make_states(dtype), sizes.make_states(dtype)]
        del states
        splits = sizes.count_splits(ctx.num_processors)
        alive += [*sizes.sum_steps(1)]
        # dB and dC, summed over the splits.
        alive += [sizes.make_grad_of_state(splits).sum(2), *sizes.sum_steps(1)]
        alive += [sizes.make_grad_of_state(splits).sum(2), *sizes.sum_steps(1)]
        alive += [sizes.multiply_chunks(splits).sum(2)]
        # ddA_prev, and ddA of _chunk_scan_bwd_ddAcs_stable.
        alive += [*sizes.sum_steps(1), torch.stack([*sizes.sum_steps(_CHUNK // _ROWS)]).sum(0)]
        small = [torch.empty_like(each) for each in (conv_weight, conv_bias, dt_bias, decay, skip)]
        del alive
        return grad_projected, *small, None, None, None


class _ScanSizes:
    """Makes the tensors of a scan. A chunk is of _CHUNK tokens.

    Args:
        projected: [b, s, gate, input, B, C and steps], whose dtype tensors have that are not float32.
        num_channels: of the convolution.
        num_heads, head_dim, num_groups: of the rank.
    """

    def __init__(self, projected: Tensor, num_channels: int, num_heads: int, head_dim: int, num_groups: int) -> None:
        self._make = projected.new_empty
        self._batch, self._tokens, _ = projected.shape
        self._channels, self._heads, self._groups, self._head_dim = num_channels, num_heads, num_groups, head_dim
        self._state_dim = (num_channels - num_heads * head_dim) // num_groups // 2
        self._chunks = math.ceil(self._tokens / _CHUNK)

    def convolve(self) -> Tensor:
        return self._make(self._batch, self._tokens, self._channels)

    def make_output(self) -> Tensor:
        return self._make(self._batch, self._tokens, self._heads, self._head_dim)

    def copy_steps(self) -> Tensor:
        return self._make(self._batch, self._tokens, self._heads)

    def sum_steps(self, number: int) -> list[Tensor]:
        """So many tensors of a float32 for each token and head."""
        shape = (self._batch, self._heads, self._chunks, _CHUNK)
        return [self._make(shape, dtype=torch.float32) for _ in range(number)]

    def make_states(self, dtype: torch.dtype) -> Tensor:
        """The state behind each chunk."""
        return self._make(self._batch, self._chunks, self._heads, self._head_dim, self._state_dim, dtype=dtype)

    def make_state(self) -> Tensor:
        """The last one."""
        return self._make(self._batch, self._heads, self._head_dim, self._state_dim, dtype=torch.float32)

    def multiply_chunks(self, splits: int = 1) -> Tensor:
        """Products of B and C within each chunk, and their gradient."""
        return self._make(self._batch, self._chunks, splits, self._groups, _CHUNK, _CHUNK, dtype=torch.float32)

    def make_grad_of_state(self, splits: int) -> Tensor:
        """Of B or of C."""
        return self._make(self._batch, self._tokens, splits, self._groups, self._state_dim, dtype=torch.float32)

    def count_splits(self, num_processors: int) -> int:
        """Of the heads of a group (ssd_chunk_state.py: _chunk_state_bwd_db)."""
        of_group = self._heads // self._groups
        per_program = min(math.ceil(self._batch * self._chunks * self._heads / num_processors), of_group)
        return math.ceil(of_group / max(per_program, 1))
