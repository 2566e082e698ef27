"""Megatron's mixtures of experts: an activation that keeps its input only, the first linear's output, and copies of
tokens that are gathered or sent again.

Stock keeps that and the input of the second linear, the activation times the router's probability. Here the second is
dropped after use and made again for backward by Megatron's own code, whatever the activation and its options are: a
mixture computes, bit for bit, what it does without Tempo. Computing the input from the output, as in place, would
divide by probabilities, which are 0 where a token was dropped or padded.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tempo_kernels.recompute import adopt, drop, hold
from tempo_megatron.slots.linear import (
    HOLD_INPUTS,
    DropsInput,
    Function,
    find_reason,
    is_in_backward,
    name_as_stock,
    replace_modules,
    replace_names,
    run_between_linears,
)
from tempo_megatron.slots.megatron_versions import is_since
from tempo_megatron.slots.slot_content import change_slot, find_class


class KeepsActivationInput:
    """What marks experts whose activation keeps its input only."""


def _run_and_drop(module: Any, stock: Any, make: Callable[..., Any], probs: Any, *args: Any, **kwargs: Any) -> Any:
    """stock.forward(module, *args, **kwargs), of which the input of linear_fc2 is made again in backward.

    make: a forward of the activation's inputs: the module, the output of linear_fc1, and the probabilities `probs`.
    """
    if not torch.is_grad_enabled():
        return stock.forward(module, *args, **kwargs)
    found: list[Any] = []

    def run_fc1(*inputs: Any) -> Any:
        found.append(module.linear_fc1(*inputs))
        return found[0]

    def run_fc2(y: Tensor, *inputs: Any) -> Any:
        x, bias = found.pop()
        y = adopt(y, functools.partial(run_between_linears, module, make), x, bias, probs)
        result = module.linear_fc2(y, *inputs)
        drop(y, after=result[0])
        return result

    stand_in = replace_modules(module, linear_fc1=Function(run_fc1), linear_fc2=Function(run_fc2))
    return stock.forward(stand_in, *args, **kwargs)


class TempoExpertMLP(KeepsActivationInput, MLP):
    """One expert of a SequentialMLP."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
        """(output [n, h], None or bias) of the expert's tokens [n, h], weighted by per_token_scale [n]."""
        return _run_and_drop(self, MLP, MLP.forward, per_token_scale, hidden_states, per_token_scale, **kwargs)


class TempoSharedExpertMLP(KeepsActivationInput, SharedExpertMLP):
    """The experts that every token goes to. `moe_shared_expert_overlap` calls its parts instead of forward: there it
    keeps what stock does."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The output [s, b, h], times the gate where there is one."""
        return _run_and_drop(self, SharedExpertMLP, MLP.forward, None, hidden_states, *args, **kwargs)


class TempoSequentialMLP(KeepsActivationInput, experts.SequentialMLP):
    """Experts that run one after another."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for expert in self.local_experts:
            # SequentialMLP makes MLPs, whatever its spec says. Others in their place would draw their weights again.
            expert.__class__ = TempoExpertMLP


class TempoTEGroupedMLP(KeepsActivationInput, experts.TEGroupedMLP):
    """Experts in Transformer Engine's grouped products."""

    def forward(self, permuted_local_hidden_states: Tensor, tokens_per_expert: Any, permuted_probs: Tensor) -> Any:
        """(output, None) of tokens in the order of their experts [n, h], weighted by permuted_probs [n]."""

        def make(module: Any, x: Tensor, probs: Tensor) -> Any:
            # Only the linears look at the numbers of tokens, which would have to be fetched from the device.
            return experts.TEGroupedMLP.forward(module, x, torch.empty(0, dtype=torch.int64), probs)

        inputs = permuted_local_hidden_states, tokens_per_expert, permuted_probs
        return _run_and_drop(self, experts.TEGroupedMLP, make, permuted_probs, *inputs)


_CLASSES: dict[Any, Any] = {
    experts.SequentialMLP: TempoSequentialMLP,
    experts.TEGroupedMLP: TempoTEGroupedMLP,
    SharedExpertMLP: TempoSharedExpertMLP,
}
"""Megatron's class -> Tempo's."""


class _AllToAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's, which keeps the numbers of tokens of each expert instead of the map [experts, tokens] by which it
    chooses probabilities, and all probabilities. Where the tokens are is made again from the logits of a router that
    can choose again. Between the calls of one forward these lie on the dispatcher, which stock leaves there until the
    next one."""

    probs: Any
    routing_map: Any
    reversed_local_input_permutation_mapping: Any
    router: TempoTopKRouter | None = None
    """One that can choose again, and whose choice these places are."""

    take_places: Callable[[], Tensor] | None = None
    """Of this forward, where they are made again."""

    def dispatch_preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens in the order of their experts, and the probability of each."""
        found = _preprocess(self, *args, **kwargs)
        if self.router is not None and (choose := self.router.take_choice()) is not None:
            self.take_places = _find_places(choose, self.reversed_local_input_permutation_mapping.size(0))
        return found

    def combine_postprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens in their own order [s, b, h]."""
        restored = super().combine_postprocess(*args, **kwargs)
        take, self.take_places = self.take_places, None
        if take is not None:
            places = self.reversed_local_input_permutation_mapping
            drop(places, since=self.probs, after=restored, make=lambda: (take(),))
        # A graph of the layer's first part fills them at its capture, and once only.
        if getattr(self.config, "cuda_graph_impl", "none") == "none":
            self.probs = self.routing_map = self.reversed_local_input_permutation_mapping = None
        return restored


def _find_places(choose: Callable[[], Tensor], num_places: int) -> Callable[[], Tensor]:
    """A function that finds again which tokens the experts have got: their rows, sorted by expert [n]. All who ask in
    one backward get the same tensor."""
    found: weakref.ref[Tensor] | None = None

    def find() -> Tensor:
        nonlocal found
        places = None if found is None else found()
        if places is None:
            with torch.no_grad():
                chosen = choose()
            # A stable order, as Megatron's since 0.19: masked_select would wait for the device.
            order = chosen.T.reshape(-1).to(torch.int8).argsort(descending=True, stable=True)
            places = order[:num_places] % chosen.size(0)
            found = weakref.ref(places)
        return places

    return find


def _permute(tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Megatron's `permute`, whose order of tokens within an expert is that of the layer."""
    is_plain = not args and not kwargs.get("fused") and not kwargs.get("drop_and_pad")
    if probs is None or not probs.requires_grad or not is_plain:
        return moe_utils.permute(tokens, routing_map, probs, *args, **kwargs)
    permuted, chosen, indices, *rest = moe_utils.permute(tokens, routing_map, probs.detach(), **kwargs)
    return permuted, _Choose.apply(probs, chosen, indices, routing_map.sum(dim=0)), indices, *rest


class _Choose(torch.autograd.Function):
    """Returns `chosen`, which are the elements of x [tokens, experts] for tokens [indices], sorted by expert; `counts`
    says how many each expert has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, indices: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(indices, counts)
        ctx.num_tokens = x.size(0)
        return chosen.view_as(chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        indices, counts = ctx.saved_tensors
        experts = torch.repeat_interleave(counts, output_size=indices.size(0))
        grad_x = grad.new_zeros(ctx.num_tokens, counts.size(0))
        grad_x[indices, experts] = grad
        return grad_x, None, None, None


_preprocess = replace_names(MoEAlltoAllTokenDispatcher.dispatch_preprocess, permute=_permute)


def _keeps_places(config: Any) -> bool:
    """Whether the places of tokens must be kept, since the router's choice alone does not always give them."""
    of_others = (
        *("moe_permute_fusion", "moe_pad_expert_input_to_capacity"),
        *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
        "overlap_moe_expert_parallel_comm",
    )
    has_graphs = getattr(config, "cuda_graph_impl", "none") != "none"
    return has_graphs or any(getattr(config, name, False) for name in of_others)


@name_as_stock
class TempoRoutedMoELayer(MoELayer):
    """A mixture that keeps less of what its router and its all-to-all dispatcher make for each pair of a token and an
    expert; see their classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.token_dispatcher) is MoEAlltoAllTokenDispatcher:  # which no slot holds
            self.token_dispatcher.__class__ = _AllToAllDispatcher
            if isinstance(self.router, TempoTopKRouter) and not _keeps_places(self.config):
                self.token_dispatcher.router = self.router
                self.router.is_asked = True


class TempoMoELayer(TempoRoutedMoELayer):
    """A mixture whose experts do not keep their tokens, of which each expert has a copy: just before the backward of
    their first linear the copies are gathered again from the tokens of the layer.

    Exact, without a product and without communication: the tokens of this rank's experts are this rank's own.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As MoELayer."""
        if not torch.is_grad_enabled() or is_in_backward():
            return super().forward(hidden_states, *args, **kwargs)
        run_experts = functools.partial(self._run_experts, hold(hidden_states))
        return MoELayer.forward(replace_modules(self, experts=Function(run_experts)), hidden_states, *args, **kwargs)

    def _run_experts(self, take_tokens: Callable[[], Tensor], copies: Tensor, *inputs: Any) -> Any:
        permute = _permute_again(copies.size(), self.token_dispatcher)
        result = self.experts(copies, *inputs)
        drop(copies, after=result[0], make=lambda: (permute(take_tokens()),))
        return result


class TempoRepeatMoELayer(TempoMoELayer):
    """A mixture whose tokens come from other ranks, which send them once more in backward, by the same collectives.

    Exact, without a product. Every rank of the group sends at the same place of backward, where the gradient of the
    experts' output is there, whether or not its own experts have got tokens: a rank that waited until its first linear
    asks for its input would never send if it has none.
    """

    def _run_experts(self, take_tokens: Callable[[], Tensor], copies: Tensor, *inputs: Any) -> Any:
        dispatch = _dispatch_again(self.token_dispatcher)
        found: list[Tensor] = []
        result = self.experts(copies, *inputs)

        def send(_: Tensor) -> None:
            found.append(dispatch(take_tokens()))

        if result[0].requires_grad:
            result[0].register_hook(send)
        drop(copies, after=result[0], make=lambda: (found.pop(),))
        return result


def _permute_again(size: torch.Size, dispatcher: Any) -> Callable[[Tensor], Tensor]:
    """A function that permutes tokens as the dispatcher has just done, into `size`. On one rank they are sorted by
    expert then: what the dispatcher does between permuting and the experts changes nothing."""
    if not dispatcher.config.moe_permute_fusion:
        index = dispatcher.reversed_local_input_permutation_mapping
        take = getattr(dispatcher, "take_places", None) or functools.partial(torch.Tensor.detach, index)
        return lambda tokens: tokens.view(-1, size[-1]).index_select(0, take())
    # The all-gather dispatcher lets go of the map of all ranks' tokens, which is that of its own here.
    is_gathered = isinstance(dispatcher, MoEAllGatherTokenDispatcher)
    routing_map = dispatcher.local_map if is_gathered else dispatcher.routing_map
    permute = functools.partial(moe_utils.permute, routing_map=routing_map, num_out_tokens=size[0], fused=True)
    return lambda tokens: permute(tokens.view(-1, size[-1]))[0]


def _dispatch_again(dispatcher: Any) -> Callable[[Tensor], Tensor]:
    """A function that sends tokens as the all-to-all dispatcher has just done, by the dispatcher's own code."""
    state = copy.copy(dispatcher)
    # With it all of the router's graph would stay, and it is sent no more.
    state.probs = None
    if not state.config.moe_permute_fusion:
        state.routing_map = None
    if state.take_places is not None:
        state.reversed_local_input_permutation_mapping = None
    num_sent = state.num_out_tokens

    def dispatch(tokens: Tensor) -> Tensor:
        again = copy.copy(state)
        sent = _permute_again(torch.Size((int(num_sent), tokens.size(-1))), again)(tokens)
        # The dispatcher sends a number with each token.
        numbers = sent.new_zeros(sent.size(0), dtype=torch.float32)
        received: Tensor = again.dispatch_postprocess(*again.token_dispatch(sent, numbers))[0]
        return received

    return dispatch


def find_permute_refusal(config: TransformerConfig, choice: str) -> str | None:
    """Why a mixture cannot have its tokens again in backward (tempo.moe_permute); None where it can."""
    if not config.num_moe_experts:
        return "the model has no experts (num_moe_experts)"
    split = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    sizes = {"expert_model_parallel_size": config.expert_model_parallel_size, "expert_tensor_parallel_size": split}
    for name, size in sizes.items():
        if size > 1 and choice == "recompute":
            return f"{name} is {size}, and tokens that other ranks sent cannot be gathered again without communication"
    dispatcher = config.moe_token_dispatcher_type
    if dispatcher == "flex":
        return "moe_token_dispatcher_type is flex, which permutes and sends tokens in one operation of its own"
    if choice == "repeat":
        if max(sizes.values()) == 1:
            return "all experts are on one rank, to which no tokens are sent"
        if dispatcher != "alltoall":
            return f"moe_token_dispatcher_type is {dispatcher}, and Tempo repeats alltoall only"
        if (graphs := getattr(config, "cuda_graph_impl", "none")) != "none":
            return f"cuda_graph_impl is {graphs}, whose graphs hold a part of what would be repeated"
    changes_order = dict.fromkeys(
        ("moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm"), "which changes the order of backward"
    )
    others = {"moe_latent_size": "by which experts get other tokens than the layer's"}
    return find_reason(config, {**changes_order, **others, **HOLD_INPUTS})


def is_mixture(slot: Any) -> bool:
    """Whether an MLP's slot holds a mixture of experts."""
    found = find_class(slot)
    return isinstance(found, type) and issubclass(found, MoELayer)


@name_as_stock
class TempoTopKRouter(TopKRouter):
    """TopKRouter that keeps its logits only, [tokens, experts] in the router's dtype, of all that leads from them to
    probabilities and auxiliary losses.

    Scores, choices and probabilities are made again in backward by Megatron's functions. As where Megatron recomputes a
    whole layer, equal scores must have the same order once more, which torch.topk gives.
    """

    is_asked = False
    """Whether the dispatcher takes the choice of each forward."""

    _choice: Callable[[], Tensor] | None = None

    def take_choice(self) -> Callable[[], Tensor] | None:
        """A function that makes the last forward's map of chosen experts [tokens, experts] again; None where it cannot
        be."""
        choice, self._choice = self._choice, None
        return choice

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(probabilities, map) [tokens, experts]."""
        # What a replay hands out depends on how often it is asked.
        if not torch.is_grad_enabled() or is_in_backward() or getattr(self, "router_replay", None) is not None:
            return super().routing(logits, *args, **kwargs)
        # Sinkhorn's iterations wait for the device.
        if self.is_asked and self.routing_type != "sinkhorn":
            take_logits, choose = hold(logits), super().routing
            self._choice = lambda: choose(take_logits(), *args, **kwargs)[1]
        return _route(self, logits, *args, **kwargs)


@name_as_stock
class TempoDroppingTopKRouter(DropsInput, TempoTopKRouter):
    """TempoTopKRouter that does not keep its input either, of which experts get copies; see DropsInput."""


def _keep_logits(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """`function`, whose result at `place` keeps the function's arguments only."""

    def make(*args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = function(*args, **kwargs)[place]
        return made

    def run(*args: Any, **kwargs: Any) -> Any:
        found = list(function(*args, **kwargs))
        found[place] = adopt(found[place], make, *args, **kwargs)
        return tuple(found)

    return run


# Megatron's functions of logits, by names in the router's module -> the place of what has a gradient in their results.
_SCORES = {"topk_routing_with_score_function": 0, "compute_routing_scores_for_aux_loss": 1}
_route = replace_names(
    TopKRouter.routing,
    **{
        name: _keep_logits(function, place)
        for name, place in _SCORES.items()
        if (function := getattr(moe_utils, name, None)) is not None
    },
)


def replace_experts(
    submodules: Any, config: TransformerConfig, *, keeps_input: bool, drops_input: bool
) -> dict[str, Any]:
    """What becomes of the submodules of a MoELayer, by name; of shared experts nothing where the configuration has
    none, since the layer makes none then.

    Args:
        submodules: Megatron's.
        config: of the layer.
        keeps_input: whether the activation of experts keeps its input.
        drops_input: whether the norm in front can make the layer's input again.
    """
    has_shared = getattr(config, "moe_shared_expert_intermediate_size", None) is not None
    changes: dict[str, Any] = {} if has_shared else {"shared_experts": None}
    # Transformer Engine's op fuser runs both linears and the activation in one operation (since 0.17).
    if keeps_input and not (is_since("0.17") and getattr(config, "use_transformer_engine_op_fuser", False)):
        changes["experts"] = _replace(submodules.experts)
    if keeps_input and has_shared and not config.moe_shared_expert_overlap:
        changes["shared_experts"] = _replace(submodules.shared_experts)
    # A slot since 0.16.
    if (keeps_input or drops_input) and getattr(submodules, "router", None) is TopKRouter:
        changes["router"] = TempoDroppingTopKRouter if drops_input else TempoTopKRouter
    return changes


def _replace(slot: Any) -> Any:
    stock = find_class(slot)
    if getattr(stock, "__name__", "") == "_build_shared_experts":  # since 0.18, a function
        stock = SharedExpertMLP
    module = _CLASSES.get(stock)
    if module is None:
        return slot
    return change_slot(slot, module) if isinstance(slot, functools.partial | ModuleSpec) else module
