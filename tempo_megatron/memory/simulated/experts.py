"""Stands in for the experts of a mixture and for the dispatcher that brings tokens to them, on fake tensors.

How many tokens an expert gets depends on the tokens, which fake ones do not have: the run says how many more than an
equal share a rank's experts get. The router and the shared experts are Megatron's own modules. References are to
megatron-core 0.16.1, from megatron/core/transformer/moe/, and to Transformer Engine 2.20.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.transformer.moe import experts as experts_of_megatron
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker, permute
from torch import Tensor

from tempo_kernels.saved import KeepInput
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.stand_in import DroppedOutput, stand_in
from tempo_megatron.slots.experts import KeepsActivationInput, TempoRoutedMoELayer, TempoTopKRouter


def _forget_losses() -> None:
    """Empties Megatron's notes of auxiliary losses for a log, which have an entry for each layer of the last model."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:  # an older Megatron-core notes them in a dictionary
        get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


@contextlib.contextmanager
def leave_out_experts() -> Iterator[None]:
    """Models that are built inside have experts without linears, of which each would take a millisecond."""
    made = experts_of_megatron.MLP
    experts_of_megatron.MLP = lambda *_, **__: torch.nn.Module()
    try:
        yield
    finally:
        experts_of_megatron.MLP = made


def put_experts(model: torch.nn.Module, run: Run, *, is_fused: bool) -> None:
    """Let the experts of the model's layers compute as on a rank of the run.

    Args:
        model: built with the all-gather dispatcher and all experts on one rank, perhaps without them.
        run: whose experts they are. Experts of Tempo's recompute their activation with or without moe_act.
        is_fused: whether the gated activation, or squared ReLU, is Megatron's fused one.
    """
    _forget_losses()
    is_sinkhorn = run.model.moe_router_load_balancing_type == "sinkhorn"
    for module in model.modules():
        if isinstance(module, MoELayer):
            # It keeps its inputs whatever the dtype of its output is (moe_utils.py: RouterGatingLinearFunction).
            module.router.gating = functools.partial(_multiply, module.router.weight, run.router_dtype)
            module.router.sinkhorn_load_balancing = _balance
            config = module.config
            recomputes = "moe_act" in run.recompute or isinstance(module.experts, KeepsActivationInput)
            module.experts = LocalExperts(config, run, is_fused, recomputes)
            module.token_dispatcher = dispatcher = _DISPATCHERS[run.layout.dispatcher](config, run)
            if run.layout.dispatcher == "alltoall":
                dispatcher.keeps_map = not isinstance(module, TempoRoutedMoELayer)
                others = run.moe_permute_fusion, run.layout.overlaps, run.model.moe_pad_expert_input_to_capacity
                is_made_again = isinstance(module.router, TempoTopKRouter) and not any(others) and not is_sinkhorn
                dispatcher.keeps_places = dispatcher.keeps_map or not is_made_again


def _balance(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sinkhorn's routing but for its iterations, which end where the tokens' values say (router.py)."""
    logits = torch.sigmoid(logits)
    chosen = torch.empty_like(logits, dtype=torch.bool)
    return logits * chosen, chosen


def _multiply(weight: Tensor, dtype: torch.dtype | None, x: Tensor) -> Tensor:
    """x W^T of x [..., n] and W [..., m, n], which keeps x and W. W may be of several experts, whose tokens stand one
    behind another in x; without a dtype the result has that of x."""
    return stand_in(
        lambda x, weight: (x.new_empty(*x.shape[:-1], weight.size(-2), dtype=dtype or x.dtype), (x, weight)), x, weight
    )


class LinearsOfExperts(torch.nn.Module):
    """One linear of each of several experts, without bias."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(self.weight, None, x)


def _resize(x: Tensor, num_rows: int, indices: Tensor | None = None) -> Tensor:
    """A tensor whose first size is `num_rows`, which keeps what backward needs to undo it: nothing, or indices."""
    kept = () if indices is None else (indices,)
    return stand_in(lambda x: (x.new_empty(num_rows, *x.shape[1:]), kept), x)


def _gather(x: Tensor, num_rows: int) -> Tensor:
    """All ranks' tokens, and back the sum of their gradients, both in Megatron's global memory buffer
    (tensor_parallel/mappings.py: gather_from_sequence_parallel_region with use_global_buffer)."""
    size = list(x.shape)

    def differentiate(_: Any, grad: Tensor) -> list[Tensor]:
        return [_lend(size, grad.dtype)]

    return stand_in(lambda x: (_lend([num_rows, *size[1:]], x.dtype), ()), x, differentiate=differentiate)


def _lend(size: list[int], dtype: torch.dtype) -> Tensor:
    buffer: Any = get_global_memory_buffer()
    lend: Callable[..., Tensor] = getattr(buffer, "lend", buffer.get_tensor)
    return lend(size, dtype, "mpu")


class LocalExperts(torch.nn.Module):
    """The experts of one rank: two linears of all of them, and the activation between, weighted by probabilities.

    As TEGroupedMLP and SequentialMLP compute it (experts.py); the latter puts its experts' outputs together in one more
    tensor.
    """

    def __init__(self, config: Any, run: Run, is_fused: bool, recomputes_activation: bool) -> None:
        super().__init__()
        self._recomputes_activation = recomputes_activation
        self._activation, self._is_gated = config.activation_func, config.gated_linear_unit
        self._largest = getattr(config, "activation_func_clamp_value", None)
        self._offset = getattr(config, "glu_linear_offset", 0.0)
        self._is_fused = is_fused and (self._is_gated or self._activation is squared_relu)
        local, inner = run.num_local_experts, run.model.expert_size // run.layout.etp
        outer = config.hidden_size
        self._joins = local > 1 and not run.moe_grouped_gemm
        self.keep_input: Callable[[Tensor], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Around each product, of whose input it decides what is kept."""

        def make(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(local, *shape, dtype=config.params_dtype))

        # By Megatron's names, which the ledger's rows have.
        self.linear_fc1 = LinearsOfExperts(make((1 + self._is_gated) * inner, outer))
        self.linear_fc2 = LinearsOfExperts(make(outer, inner))
        self.fc1_bias = make((1 + self._is_gated) * inner) if config.add_bias_linear else None
        self.fc2_bias = make(outer) if config.add_bias_linear else None

    def forward(self, x: Tensor, _: Any, probabilities: Tensor) -> tuple[Tensor, None]:
        with self.keep_input(x):
            inner = self.linear_fc1(x)
        inputs = _add_bias(inner, self.fc1_bias), probabilities.unsqueeze(-1)
        dropped = DroppedOutput(drops=self._recomputes_activation)
        inner = dropped.run(self._activate, *inputs)
        with dropped.use() if self._recomputes_activation else self.keep_input(inner):
            out = self.linear_fc2(inner)
        dropped.recompute_for(out)
        del inner, inputs
        out = _add_bias(out, self.fc2_bias)
        return (_resize(out, out.size(0)) if self._joins else out), None

    def _activate(self, x: Tensor, probabilities: Tensor) -> Tensor:
        if self._is_fused:
            # silu(gate) * up * probability, or relu(x)**2 * probability, in one kernel, which keeps its inputs
            # (fusions/fused_bias_swiglu.py and fused_weighted_squared_relu.py).
            num_results = x.size(1) // (1 + self._is_gated)
            return stand_in(lambda x, *p: (x.new_empty(x.size(0), num_results), (x, *p)), x, probabilities)
        dtype = x.dtype
        if self._is_gated:
            gate, up = torch.chunk(x, 2, dim=-1)
            if self._largest is not None:
                gate, up = gate.clamp(max=self._largest), up.clamp(-self._largest, self._largest)
            x = self._activation(gate) * (up + self._offset)
        else:
            x = self._activation(x)
        return (x * probabilities).to(dtype)


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Each expert's bias, added to its tokens in one tensor."""
    if bias is None:
        return x
    return stand_in(
        lambda x, bias: (torch.empty_like(x), (bias,)),
        x,
        bias,
        differentiate=lambda kept, grad: (grad, torch.empty_like(kept[0])),
    )


class _Dispatcher:
    """What all dispatchers share (token_dispatcher.py): tokens, and the probabilities of those for each expert, go
    through three stages, and the experts' results back through three."""

    _dtype: torch.dtype
    """Of the probabilities."""

    def __init__(self, config: Any, run: Run) -> None:
        self._run, self._layout, self.config = run, run.layout, config
        self._ranks = run.layout.ep * run.layout.etp
        self._is_padded = run.model.moe_pad_expert_input_to_capacity
        self.reversed_local_input_permutation_mapping: Tensor | None = None
        self.keeps_map = True
        """Whether choosing probabilities keeps Megatron's map of experts, and the probabilities of all."""
        self.keeps_places = True
        """Whether backward needs the index of `_permute` of the forward, not one that it makes again."""
        self.take_places: Callable[[], Tensor] | None = None

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Since 0.19 a layer asks for buffers that its experts write to."""
        return None, None

    def dispatch_postprocess(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, None, Tensor]:
        return x, None, probabilities

    def token_combine(self, x: Tensor) -> Tensor:
        return x

    def _fill(self, num_rows: int) -> int:
        """The rows of the fullest rank, of which an equal share are `num_rows`; padded, each rank has as many."""
        return num_rows if self._is_padded else round(num_rows * (self._run.moe_imbalance or 1.0))

    def _permute(self, x: Tensor, num_rows: int) -> Tensor:
        """`index_select` by a kept index, or a kernel's map of as many rows."""
        index = x.new_empty(num_rows, dtype=torch.int64)
        # By Megatron's name, for a layer that permutes again.
        self.reversed_local_input_permutation_mapping = index
        if not self.keeps_places:
            self.take_places = functools.partial(torch.empty, num_rows, dtype=index.dtype, device=index.device)
        return _resize(x, num_rows, index if self.keeps_places else None)

    def _choose(self, probabilities: Tensor, routing_map: Tensor, num_rows: int) -> Tensor:
        """`masked_select`, which keeps the mask and what it selects from, or TempoRoutedMoELayer's choice."""
        if not self.keeps_map and not self._run.moe_permute_fusion:
            return _resize(probabilities.view(-1), num_rows, routing_map.sum(dim=0))
        mask = routing_map.T.contiguous()
        probabilities = probabilities.T.contiguous().view(-1)
        if not self._run.moe_permute_fusion:
            probabilities = KeepInput.apply(probabilities)
        return _resize(probabilities, num_rows, mask)

    def _unpermute(self, x: Tensor, num_rows: int) -> Tensor:
        """`scatter_add_` by the index of `_permute`; deterministic, `index_add_`, of which torch keeps what is added
        (moe_utils.py: unpermute)."""
        index, self.reversed_local_input_permutation_mapping = self.reversed_local_input_permutation_mapping, None
        self.take_places = None
        if self._run.deterministic and not self._run.moe_permute_fusion:
            x = KeepInput.apply(x)
        return _resize(x, num_rows, index if self.keeps_places else None)

    def _sum(self, x: Tensor, num_rows: int) -> Tensor:
        """Summed over ranks in the probabilities' dtype."""
        return _resize(x.to(self._dtype), num_rows).to(x.dtype)


class _AllToAll(_Dispatcher):
    """Permuted by expert, sent, gathered over tensor-parallel experts, and sorted by local expert; and back."""

    def dispatch_preprocess(self, x: Tensor, routing_map: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        self._shape, self._dtype = x.shape, probabilities.dtype
        x = x.view(-1, x.size(-1))
        self._num_routed = self._run.count_routed(len(x))
        self._num_sent = self.num_out_tokens = self._run.count_sent(len(x))
        if self._is_padded and not self._run.moe_permute_fusion:
            # Sizes that no token's choice decides.
            x, chosen, self.reversed_local_input_permutation_mapping, *_ = permute(
                x, routing_map, probabilities, self._num_sent, drop_and_pad=True
            )
            return x, chosen
        chosen = self._choose(probabilities, routing_map, self._num_sent)
        return self._permute(x, self._num_sent), chosen

    def token_dispatch(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = self._fill(self._num_routed)
        return (x, probabilities) if self._layout.ep == 1 else (_resize(x, num_rows), _resize(probabilities, num_rows))

    def dispatch_postprocess(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, None, Tensor]:
        num_rows = self._fill(self._num_routed * self._layout.etp)
        for _ in range((self._layout.etp > 1) + (self._run.num_local_experts > 1)):
            x, probabilities = _resize(x, num_rows), _resize(probabilities, num_rows)
        return x, None, probabilities

    def combine_preprocess(self, x: Tensor) -> Tensor:
        x = _resize(x, x.size(0)) if self._run.num_local_experts > 1 else x
        return self._sum(x, self._fill(self._num_routed)) if self._layout.etp > 1 else x

    def token_combine(self, x: Tensor) -> Tensor:
        return x if self._layout.ep == 1 else _resize(x, self._num_sent)

    def combine_postprocess(self, x: Tensor) -> Tensor:
        return self._unpermute(x, self._shape[:-1].numel()).view(self._shape)


class _Flex(_AllToAll):
    """One kernel sends and permutes (fused_a2a.py)."""

    def token_dispatch(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = self._fill(self._num_routed)
        return (x, probabilities) if num_rows == len(x) else (_resize(x, num_rows), _resize(probabilities, num_rows))

    def combine_preprocess(self, x: Tensor) -> Tensor:
        return x if len(x) == self._num_sent else _resize(x, self._num_sent)

    dispatch_postprocess, token_combine = _Dispatcher.dispatch_postprocess, _Dispatcher.token_combine


class _AllGather(_Dispatcher):
    """Every rank gathers the tokens of all, and takes those for its experts."""

    def dispatch_preprocess(self, x: Tensor, routing_map: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        self._shape, self._map = x.shape, routing_map
        return x.view(-1, x.size(-1)), probabilities

    def token_dispatch(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        self._num_tokens = x.size(0)
        if self._ranks > 1:
            num_all = self._num_tokens * self._ranks
            self._map = self._map.new_empty(num_all, self._map.size(1))
            x, probabilities = _gather(x, num_all), _resize(probabilities, num_all)
        return x, probabilities

    def dispatch_postprocess(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, None, Tensor]:
        self._num_all, self._dtype, local = x.size(0), probabilities.dtype, self._run.num_local_experts
        num_routed = self._num_all // self._num_tokens * self._run.count_routed(self._num_tokens)
        num_rows = self._fill(num_routed // self._layout.ep)
        local_map, chosen = self._map[:, :local].contiguous(), probabilities[:, :local].contiguous()
        del self._map
        permuted = self._permute(x, num_rows)
        return permuted, None, self._choose(chosen, local_map, num_rows)

    def combine_preprocess(self, x: Tensor) -> Tensor:
        return self._unpermute(x, self._num_all)

    def token_combine(self, x: Tensor) -> Tensor:
        return self._sum(x, self._num_tokens) if self._ranks > 1 else x

    def combine_postprocess(self, x: Tensor) -> Tensor:
        return x.view(self._shape)


_DISPATCHERS = {"alltoall": _AllToAll, "allgather": _AllGather, "flex": _Flex}
