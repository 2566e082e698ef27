"""Lets the layers of a chunk be those of a HybridModel: each a Mamba layer, an attention, an MLP or a mixture of
experts.

Mamba's kernels (mamba_ssm at e9594ce, from mamba_ssm/ops/triton/) need a GPU and a package: what stands for them makes,
keeps and frees the tensors that they do. References are to megatron-core 0.16.1, from megatron/core/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from torch import Tensor

from tempo_megatron.memory.run import Hybrid
from tempo_megatron.memory.simulated.stand_in import Made, make_column_linear, make_row_linear, stand_in
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
        self.norm = torch.nn.RMSNorm(inner // ranks, dtype=dtype)
        self.norm.forward = self._normalize  # type: ignore[method-assign]
        self.out_proj = make_row_linear(config, inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected = self.in_proj(x)[0].transpose(0, 1).contiguous()
        decay = -torch.exp(self.A_log.float())
        convolution = self.conv1d.weight.squeeze(1), self.conv1d.bias
        inputs: list[Any] = [projected, *convolution, self.dt_bias.float(), decay, self.D]
        scan, differentiate = _make_scan(projected, len(self.conv1d.weight), len(self.D), *self._sizes)
        scanned = stand_in(scan, *inputs, differentiate=differentiate)
        found: Tensor = self.out_proj(self.norm(scanned.transpose(0, 1).contiguous()))[0]
        return found

    def _normalize(self, x: Tensor) -> Tensor:
        """layernorm_gated.py: RMSNorm of groups of channels, whose gate the scan has applied. Keeps its input, and a
        float32 of each token and group."""

        def make(x: Tensor, weight: Tensor) -> Made:
            statistics = x.new_empty(self._sizes[1] * x.numel() // weight.numel(), dtype=torch.float32)
            return torch.empty_like(x), (x, weight, statistics)

        return stand_in(make, x, self.norm.weight)


def _make_scan(
    projected: Tensor, num_channels: int, num_heads: int, head_dim: int, num_groups: int, num_processors: int
) -> tuple[Callable[..., Made], Callable[..., list[Tensor]]]:
    """Convolution, scan and gate in one, and their backward (ssd_combined.py: MambaSplitConv1dScanCombinedFn). What has
    a name in a kernel's launcher lives until it returns.

    Args:
        projected: [b, s, gate, input, B, C and steps], whose dtype tensors have that are not float32.
        num_channels, num_heads, head_dim, num_groups: of a rank.
        num_processors: of the GPU.
    """
    make, (batch, tokens, _) = projected.new_empty, projected.shape
    state_dim = (num_channels - num_heads * head_dim) // num_groups // 2
    chunks, of_group = math.ceil(tokens / _CHUNK), num_heads // num_groups
    # For each token and head; the state behind each chunk, and the last one.
    sums = batch, num_heads, chunks, _CHUNK
    all_states, state = (batch, chunks, num_heads, head_dim, state_dim), (batch, num_heads, head_dim, state_dim)
    # Products of B and C within each chunk. In backward the heads of a group are split (ssd_chunk_state.py:
    # _chunk_state_bwd_db).
    per_program = max(1, min(math.ceil(batch * chunks * num_heads / num_processors), of_group))
    splits = math.ceil(of_group / per_program)
    products, split_products = ((batch, chunks, each, num_groups, _CHUNK, _CHUNK) for each in (1, splits))
    split_grad = batch, tokens, splits, num_groups, state_dim

    def make_float32(*shapes: Sequence[int]) -> list[Tensor]:
        return [make(shape, dtype=torch.float32) for shape in shapes]

    def scan(projected: Tensor, *others: Tensor) -> Made:
        conv_weight, conv_bias, dt_bias, decay, skip = others
        # _mamba_chunk_scan_combined_fwd
        alive = [make(batch, tokens, num_channels), *make_float32(sums, sums)]
        states = make_float32(all_states)
        alive += [make(all_states), *make_float32(state)]
        del states
        alive += make_float32(products)
        output, ungated = (make(batch, tokens, num_heads, head_dim) for _ in range(2))
        del alive
        return output.flatten(2), (projected, conv_weight, conv_bias, ungated, decay, skip, dt_bias)

    def differentiate(kept: Sequence[Tensor], _: Tensor) -> list[Tensor]:
        projected, conv_weight, conv_bias, _, decay, skip, dt_bias = kept
        alive = [make(batch, tokens, num_channels)]
        grad_projected = torch.empty_like(projected)
        # The gradient of the convolution's output; the rest is _mamba_chunk_scan_combined_bwd.
        alive += [make(batch, tokens, num_channels), make(batch, tokens, num_heads)]
        alive += make_float32(sums, sums, products)
        in_chunks = make_float32(all_states)
        states = make_float32(all_states)
        alive += make_float32(state)
        del in_chunks
        # dout_x of _chunk_scan_bwd_dz.
        alive += [make(batch, tokens, num_heads, head_dim)]
        states += make_float32(all_states)
        alive += [make(all_states), make(all_states)]
        del states
        alive += make_float32(sums)
        # dB and dC, summed over the splits.
        for _operand in "BC":
            alive += [make_float32(split_grad)[0].sum(2), *make_float32(sums)]
        alive += [make_float32(split_products)[0].sum(2)]
        # ddA_prev, and ddA of _chunk_scan_bwd_ddAcs_stable.
        alive += [*make_float32(sums), torch.stack(make_float32(*[sums] * (_CHUNK // _ROWS))).sum(0)]
        small = [torch.empty_like(each) for each in (conv_weight, conv_bias, dt_bias, decay, skip)]
        del alive
        return [grad_projected, *small]

    return scan, differentiate
