"""Compares layers with Megatron's own in a run's first forward: their outputs and gradients at dropout 0.

The first layer of each kind (the same operations in the same slots, in place of the same modules) has a forward
pre-hook, which removes itself. From that forward's arguments it takes the first 64 tokens. It builds two layers, one
from Tempo's spec and one from the spec that Tempo was given, both without dropout and with the weights of the layer
itself, runs both forward and backward, and lets go of them. Backward is `torch.autograd.grad` on parameters of these
two layers, which share storages with the model's and nothing else, so no gradient, hook or buffer of the model's sees
it. Random states, the tracker's, Megatron's global buffers and the statistics of routers are as before.

The error of a tensor is norm(Tempo's - stock's) / norm(stock's). A bound of the dtype holds for each. A tensor beyond
it has the bound that stock itself shows: the change of its own tensor, times 4, where its input and weights change by
one rounding each. So a gradient that is zero but for rounding, as that of a key's bias, gives no alarm.

A router's choice of experts is not continuous: a rounding flips it where two experts score alike. Both layers therefore
have the logits of stock's router. The gradient flows through each layer's own.

Where a tensor differs, operations are switched back on one by one, beginning with none. Those that bring the difference
are named.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from tempo_kernels.recompute import Kept
from tempo_megatron.beside import first_line
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.operations import OPERATIONS, STACKS
from tempo_megatron.slots.attention import TempoDotProductAttention
from tempo_megatron.slots.block_slots import TempoBlockSubmodules, list_layer_slots
from tempo_megatron.slots.layer_spec import tempoize_layer
from tempo_megatron.slots.linear import find_reason
from tempo_megatron.slots.megatron_versions import has_cuda_graphs
from tempo_megatron.slots.slot_content import find_class

NUM_TOKENS = 64
_SLACK = 4
# Of the derivative from gelu's output, which is 1 where x is large (tempo_kernels/gelu.py).
_GELU_ERRORS = {torch.float32: 5.1e-5, torch.float16: 7.1e-3, torch.bfloat16: 1.6e-2}
# What the two layers have in place of the run's: no dropout, no random number, nothing that writes elsewhere.
_PLAIN = {
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("recompute_granularity", "moe_z_loss_coeff", "moe_input_jitter_eps"), None),
    **dict.fromkeys(("perform_initialization", "gradient_accumulation_fusion", "delay_wgrad_compute"), False),
    **dict.fromkeys(("cpu_offloading", "fine_grained_activation_offloading", "tp_comm_overlap"), False),
    # Of the run, and bound to its models: experts copy the configuration deeply.
    **dict.fromkeys(("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"), None),
    **dict.fromkeys(("moe_grad_scale_func", "mtp_grad_scale_func", "finalize_model_grads_func", "timers"), None),
    **dict.fromkeys(("moe_layer_recompute", "moe_enable_routing_replay"), False),
}
# As the block gives them to a layer.
_INPUTS = ("hidden_states", "context")
_ARGUMENTS = ("hidden_states", "attention_mask", "context", "context_mask", "rotary_pos_emb")

_Errors = dict[str, float]


class LayerChecks:
    """The comparisons of the layers of this rank's models.

    Args:
        say: is given the line of each, `checked: ...` or `not checked: ...` with the reason.
        build: builds a layer from its spec, as Megatron's `build_module`.
        refuse: makes the error that the first training forward raises where a layer differs, on every rank that
            computes the layer, of its sentence.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        build: Callable[..., Any] = build_module,
        refuse: Callable[[str], Exception] = ValueError,
    ) -> None:
        self.say, self.build, self.refuse = say, build, refuse
        self._known: set[Any] = {None}

    def add(self, model: Any, tempo_config: TempoConfig) -> None:
        """Let the layers of a model, or of a chunk of it, be compared, unless `tempo_config.check` is "off"."""
        for stack in STACKS if tempo_config.check != "off" else ():
            block: Any = getattr(model, stack, None)
            spec = getattr(block, "submodules", None)
            if not isinstance(spec, TempoBlockSubmodules) or spec.stock_layers is None:
                continue
            obstacle = _find_obstacle(block.config)
            for place, layer in enumerate(block.layers):
                check = _Check(self, block, spec, place, layer, obstacle)
                if (kind := check.get_kind()) not in self._known:
                    self._known.add(kind)
                    # Before the model's forward where no layer can be compared: perhaps a layer's hooks do not run.
                    module = layer if obstacle is None else model
                    check.handle = module.register_forward_pre_hook(check, prepend=True, with_kwargs=True)


def _find_obstacle(config: Any) -> str | None:
    """Why layers of a TransformerConfig cannot be compared."""
    if has_cuda_graphs(config):
        return "CUDA graphs are on, whose replays run no hook"
    if config.context_parallel_size > 1:
        return f"context_parallel_size is {config.context_parallel_size}, which cuts the sequence"
    scales = dict.fromkeys(("fp8", "fp4"), "whose scales belong to the model's layers")
    return find_reason(config, {**scales, "moe_router_force_load_balancing": "by which routers draw their choice"})


class _DifferenceError(Exception):
    """A layer differs from Megatron's own."""


@dataclasses.dataclass
class _Check:
    """The comparison of one layer, as the hook before its forward."""

    checks: LayerChecks
    block: Any
    spec: TempoBlockSubmodules
    place: int
    layer: Any
    obstacle: str | None
    """Why it is not done."""

    handle: Any = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The layer's, for the tokens that are compared."""

    held: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """The logits of stock's routers by their names."""

    def __post_init__(self) -> None:
        assert self.spec.choices is not None
        number, stack = self.spec.first_layer + self.place, self.spec.stack.name.lower()
        self.values = self.spec.choices.config.for_layer(number, stack)
        self.ours = (self.spec.layer_specs or [])[self.place]
        self.stock = (self.spec.stock_layers or [])[self.place]
        self.slots = [slot for slot in list_layer_slots(self.ours) if slot.is_tempo]
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = f" on pipeline stage {parallel_state.get_pipeline_model_parallel_rank()}" if stages > 1 else ""
        self.name = f"{stack}.layers.{self.layer.layer_number - 1}{stage}"

    def get_kind(self) -> Any:
        """What layers that one comparison, or one obstacle, stands for have in common; None if nothing is Tempo's."""
        slots = tuple((slot.operation, slot.name, slot.value) for slot in self.slots)
        # A bias-dropout-add is a function of its own in each layer.
        stock = [find_class(slot.content) for slot in list_layer_slots(self.stock) if slot.operation != "dropout"]
        return (self.obstacle or (slots, tuple(stock))) if slots else None

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not module.training:
            return
        self.handle.remove()
        line = f"not checked: {self.obstacle}"
        try:
            if self.obstacle is None:
                given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
                with _leave_as_it_was(given["hidden_states"]):
                    line = self._compare(given)
        except _DifferenceError as difference:
            raise self.checks.refuse(str(difference)) from None
        except Exception as error:
            # Whatever Megatron's own layer cannot do here, or this comparison, the run may do well without.
            line = f"not checked: {self.name}: {type(error).__name__}: {first_line(error)}"
        self.checks.say(line)

    def _compare(self, given: Mapping[str, Any]) -> str:
        """The line to say; raises _DifferenceError where the layer does."""
        if reason := _get_partition(self.layer):
            return f"not checked: {self.name}: {reason}"
        self.arguments, num_tokens = _cut(given, self.layer.config)
        # Megatron's wrapper around torch's norm refuses sequence parallelism; torch's norm itself takes its place.
        stock_spec = self._make_spec([]) if self.layer.config.sequence_parallel else self.stock
        stock = self._run(stock_spec)
        if wrong := [key for key, tensor in stock.items() if not tensor.isfinite().all()]:
            return f"not checked: {self.name}: stock's {wrong[0]} is not finite"
        floor = _compute_floor(self.layer, self.arguments["hidden_states"], self.values)
        ours = _compute_errors(self._run(self.ours), stock)
        bounds = dict.fromkeys(stock, floor)
        if self._exceeds(ours, bounds):
            changes = _compute_errors(self._run(stock_spec, _change_by_a_rounding), stock)
            bounds = {key: max(floor, _SLACK * changes[key]) for key in stock}
        if self._exceeds(ours, bounds):
            worst = max(stock, key=lambda key: ours[key] / bounds[key])
            raise _DifferenceError(
                f"at dropout 0 {worst} of {self.name} differs from stock's by {ours[worst]:.1e} of its size (bound "
                f"{bounds[worst]:.0e}) on the first {num_tokens} tokens, {self._name_operations(stock, bounds)}"
            )
        firm = [ours[key] for key in stock if bounds[key] == floor]
        loose = f", {len(stock) - len(firm)} of them within what a rounding changes" if len(firm) < len(stock) else ""
        return (
            f"checked: output and {len(stock) - 1} gradients of {self.name} equal stock's within "
            f"{max(firm, default=0.0):.0e} (bound {floor:.0e}){loose} on {num_tokens} tokens at dropout 0"
        )

    def _make_spec(self, on: list[str]) -> ModuleSpec:
        """The layer's spec with these operations only."""
        off: Any = {name: "off" for name in OPERATIONS if name not in on}
        values = dataclasses.replace(self.values, **off)
        return tempoize_layer(self.stock, self.layer.config, values, self.layer.layer_number, self.spec.stack)

    def _make(self, spec: Any) -> Any:
        """A layer by `spec` in the place of this one, with its weights."""
        layer, config = self.layer, copy.copy(self.layer.config)
        for name, value in _PLAIN.items():
            if hasattr(config, name):
                setattr(config, name, value)
        if coefficients := getattr(config, "moe_aux_loss_coeff", None):
            config.moe_aux_loss_coeff = [0.0] * len(coefficients) if isinstance(coefficients, list) else 0.0
        # The groups are called so since 0.15, and before.
        names = ("pg_collection", "model_comm_pgs", "vp_stage")
        own = {name: getattr(layer, name, None) or getattr(self.block, name, None) for name in names}
        accepted = inspect.signature(spec.module.__init__).parameters
        own = {name: value for name, value in own.items() if name in accepted and value is not None}
        made = self.checks.build(spec, config=config, layer_number=self.place + 1, **own)
        assert made.layer_number == layer.layer_number
        theirs = layer.state_dict(keep_vars=True)
        for key, tensor in made.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.nn.Parameter):
                tensor.data = theirs[key].data
                tensor.requires_grad_(theirs[key].requires_grad)
            elif isinstance(tensor, Tensor) and not key.endswith("_extra_state"):
                tensor.data = theirs[key].data.clone()
        return made.to(next(layer.parameters()).device).train()

    def _run(self, spec: Any, change: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
        """The output of a layer of `spec`, and every gradient for one gradient of its output, where the arguments and
        the weights are perhaps changed."""
        made, given = self._make(spec), dict(self.arguments)
        if change is not None:
            for parameter in made.parameters():
                parameter.data = change(parameter.data)
        if given.get("attention_mask") is None and _needs_mask(made):
            x = given["hidden_states"]
            length = x.size(0) * _count_parts(self.layer.config)
            given["attention_mask"] = torch.ones(1, 1, length, length, dtype=torch.bool, device=x.device).triu(1)
        leaves = {}
        for name in _INPUTS:
            if isinstance(x := given.get(name), Tensor):
                given[name] = (x if change is None else change(x)).detach().clone().requires_grad_()
                leaves[f"the gradient of {name}"] = given[name]
        weights = made.state_dict(keep_vars=True).items()
        leaves |= {f"the gradient of {name}": each for name, each in weights if getattr(each, "requires_grad", False)}
        _hold_routers(made, self.held)
        found = made(**given)
        output: Tensor = found[0] if isinstance(found, tuple) else found
        generator = torch.Generator("cpu").manual_seed(0)
        grad = torch.randn(output.shape, generator=generator, dtype=torch.float32, device="cpu").to(output)
        grads = torch.autograd.grad(output, list(leaves.values()), grad, materialize_grads=True)
        return {"the output": output.detach(), **dict(zip(leaves, grads, strict=True))}

    def _exceeds(self, errors: _Errors, bounds: Mapping[str, float]) -> bool:
        """Whether a tensor is beyond its bound, on any of the ranks that compute the layer with this one."""
        is_beyond = float(any(not errors[key] <= bounds[key] for key in bounds))
        exceeds = torch.tensor(is_beyond, dtype=torch.float32, device=next(self.layer.parameters()).device)
        for group in _list_groups(self.layer.config):
            dist.all_reduce(exceeds, dist.ReduceOp.MAX, group=group)
        return bool(exceeds)

    def _name_operations(self, stock: Mapping[str, Tensor], bounds: Mapping[str, float]) -> str:
        """By which operations the layer differs, those without which nothing does; and what to do.

        An operation that cannot be had without others waits until these are on.
        """

        def differs(on: list[str]) -> bool:
            return self._exceeds(_compute_errors(self._run(self._make_spec(on)), stock), bounds)

        if differs([]):
            return "with every operation off too; expected stock's numbers; leave Tempo (--use-tempo) off"
        waiting, on = list(dict.fromkeys(slot.operation for slot in self.slots)), list[str]()
        for name in waiting * 2:
            with contextlib.suppress(ValueError):
                if name not in on and not differs([*on, name]):
                    on.append(name)
        by = [name for name in waiting if name not in on]
        slots = {name: ", ".join(slot.name for slot in self.slots if slot.operation == name) for name in by}
        held = " and ".join(f'tempo.{name} "{getattr(self.values, name)}" (in {slots[name]})' for name in by)
        remedies = ", ".join(f"{OPERATIONS[name].argument} off" for name in by)
        return f"by {held}; expected stock's numbers; train with {remedies}"


@contextlib.contextmanager
def _leave_as_it_was(x: Any) -> Iterator[None]:
    """Inside the context random numbers and Megatron's global buffers may be used; after it they are as before.

    What surrounds the layer (full recomputation, offload, the ledger) does not see what is saved here for backward.
    """
    tracker, buffers = get_cuda_rng_tracker(), parallel_state.get_global_memory_buffer().buffer
    states, kept = tracker.get_states(), dict(buffers)
    try:
        with (
            torch.random.fork_rng([x.device] if x.is_cuda else []),
            torch.enable_grad(),
            # Else what Megatron compiles would be compiled for 64 tokens too.
            torch.compiler.set_stance("force_eager"),
            torch.autograd.graph.saved_tensors_hooks(Kept, Kept.unpack),
        ):
            yield
    finally:
        tracker.set_states(states)
        buffers.clear()
        buffers.update(kept)


def _get_partition(layer: Any) -> str | None:
    """Why the weights are not all here."""
    for parameter in layer.parameters():
        if hasattr(parameter, "ds_id"):
            return "ZeRO-3 partitions the weights"
        if hasattr(parameter, "placements") or not parameter.untyped_storage().size():
            return "FSDP shards the weights"
    return None


def _compute_floor(layer: Any, x: Tensor, values: TempoConfig) -> float:
    """The bound for tensors that are not more sensitive than most, of the coarsest of what the layer computes with."""
    dtypes: set[torch.dtype] = {x.dtype, *(parameter.dtype for parameter in layer.parameters())}
    if torch.is_autocast_enabled(x.device.type):
        dtypes.add(torch.get_autocast_dtype(x.device.type))
    dtype = max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)
    of_gelu = 2 * _GELU_ERRORS.get(dtype, 0.0) if values.activation == "inplace" else 0.0
    return max(1e-5, 4 * torch.finfo(dtype).eps, of_gelu)


def _list_groups(config: Any) -> list[Any]:
    """The groups of ranks that compute one layer together."""
    groups = [parallel_state.get_tensor_model_parallel_group()]
    if getattr(config, "num_moe_experts", None) and config.expert_model_parallel_size > 1:
        groups += [parallel_state.get_expert_model_parallel_group(), *groups]
    return [group for group in groups if dist.get_world_size(group) > 1]


def _needs_mask(layer: Any) -> bool:
    """Whether core attention is Megatron's own and would make a causal mask, which it does on a GPU only."""
    core: Any = getattr(getattr(layer, "self_attention", None), "core_attention", None)
    is_stock = isinstance(core, DotProductAttention) and not isinstance(core, TempoDotProductAttention)
    return is_stock and core.attn_mask_type is AttnMaskType.causal


def _count_parts(config: Any) -> int:
    """The tensor-parallel ranks over which the sequence is cut."""
    return parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1


def _cut(given: Mapping[str, Any], config: Any) -> tuple[dict[str, Any], int]:
    """A layer's arguments for its first tokens, and how many these are.

    They are of the first sample, or samples if these are short. Under sequence parallelism each rank has the first ones
    of its part. Documents of a packed row are one sequence here.
    """
    x: Tensor = given["hidden_states"]
    ranks = _count_parts(config)
    num_rows = max(1, min(NUM_TOKENS // ranks, x.size(0)))
    length, batch = num_rows * ranks, x.size(1)
    num_samples = min(batch, max(1, NUM_TOKENS // length))
    context = given.get("context")
    context_rows = 0 if context is None else min(num_rows, context.size(0))
    sequence = x.size(0) * ranks
    keys = {"context_mask": (0 if context is None else context.size(0) * ranks, context_rows * ranks)}

    def cut(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(cut(name, each) for each in value)
        if not isinstance(value, Tensor):
            return value
        if name in _INPUTS:
            return value[: num_rows if name == "hidden_states" else context_rows, :num_samples].detach().contiguous()
        if name.startswith("rotary_pos"):
            value = value[:length]
            return value[:, :num_samples] if value.dim() > 1 and value.size(1) == batch > 1 else value
        if name.endswith(("mask", "bias")):
            num_keys, num_kept = keys.get(name, (sequence, length))
            if value.size(0) == batch:
                value = value[:num_samples]
            if value.dim() > 2 and value.size(-2) == sequence:
                value = value[..., :length, :]
            return value[..., :num_kept] if value.size(-1) == num_keys else value
        raise ValueError(f"the layer is given {name}, which cannot be cut to {length} tokens")

    found = {name: cut(name, value) for name, value in given.items() if name != "packed_seq_params"}
    return found, length * num_samples


def _hold_routers(layer: torch.nn.Module, held: dict[str, Tensor]) -> None:
    """Let routers compute with the logits in `held`, which takes those that it lacks; gradients flow into their own."""

    def gate(name: str, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        logits = compute(*args)
        return held.setdefault(name, logits.detach()) + (logits - logits.detach())

    for name, router in layer.named_modules():
        if hasattr(router, "gating"):
            router.gating = functools.partial(gate, name, router.gating)


def _change_by_a_rounding(x: Tensor) -> Tensor:
    """x whose numbers are larger or smaller by one rounding each."""
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(2, x.shape, generator=generator, dtype=torch.int64, device="cpu")
    return x + x * ((2 * signs.to(x) - 1) * torch.finfo(x.dtype).eps)


def _compute_errors(found: Mapping[str, Tensor], stock: Mapping[str, Tensor]) -> _Errors:
    """norm(found - stock) / norm(stock) of each tensor; what stock says is zero counts beside its largest gradient."""
    norms = {key: float(tensor.double().norm()) for key, tensor in stock.items()}
    least = max(norms.values()) * torch.finfo(stock["the output"].dtype).eps or 1.0
    return {
        key: float((found[key].double() - tensor.double()).norm().nan_to_num(nan=math.inf)) / max(norms[key], least)
        for key, tensor in stock.items()
    }
