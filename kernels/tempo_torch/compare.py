"""Compares a model with its stock modules on the same inputs, by numbers, before it trains.

Dropout keeps every element, and Tempo's modules run as they do with dropout; `tempo_torch.check` says what must agree,
and how far. What rounding does to this very model is measured, by one more run of stock. A difference is traced to the
units of replaced modules that make it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tempo_torch import probe
from tempo_torch.attention import NAME, PLACE, give_back_attention, is_wrapped, name_implementation
from tempo_torch.linear import DropsInput
from tempo_torch.loss import DeferredLogits
from tempo_torch.position import Passes, is_in_backward
from tempo_torch.replace import Replaced, has_changed_class

_FACTOR, _FINE_FACTOR = 4.0, 16.0
"""How many times the effect of one rounding in every module a difference may be, in 16 bits and in more. Inside of
attention, where none is made, scores round by more the larger they are."""
_FLOOR = 4e-6
"""A difference below two roundings, and below this part of the largest element, is none."""
_MAX_ELEMENTS, _SMALL, _MAX_ON_CPU = 1 << 28, 1 << 20, 1 << 30
_GELU_IN_PLACE = {torch.float32: 4e-5, torch.float16: 6.6e-3, torch.bfloat16: 1.6e-2}
"""The error of GELU's derivative from its output (`tempo_kernels.gelu`)."""
Values = dict[str, Tensor | None]
"""Outputs and gradients of one run by name; None for a gradient that there is not."""
Indices = dict[Any, list[Tensor]]
"""(Function, shape) -> the indices that it returned, call by call."""


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """What is replaced, and given back, together: the modules of one stock class (`kind`) that one argument of tempoize
    (`operation`) decides about, or the entry of transformers' registry of attention functions."""

    operation: str
    kind: str
    modules: tuple[nn.Module, ...]
    is_registry: bool = False


class Comparison:
    """What stock makes of one call, and how far from it rounding leads. Whatever stock raises is raised."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], call: probe.Inputs) -> None:
        self._model, self._call = model, call
        self._has_registry = any(unit.is_registry for unit in units)
        self._names = {id(module): name for name, module in model.named_modules()}
        self._parameters = _choose_parameters(model)
        self._indices: Indices = defaultdict(list)
        self.largest = 0.0
        """The largest difference that was found to be rounding, of the largest element."""
        self._stock = self._run()
        num_gradients = sum(name.startswith("grad") for name in self._stock)
        self.what = f"{'loss' if 'loss' in self._stock else 'outputs'} and {num_gradients} gradients"
        dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
        self._coarsest = max(_get_eps(torch.empty(0, dtype=dtype)) for dtype in dtypes)
        sizes = {name: _get_largest(value) for name, value in self._stock.items()}
        self._scales = {name: size.clamp(min=torch.finfo(size.dtype).tiny) for name, size in sizes.items()}

    def differs(self, units: Sequence[Unit]) -> str | None:
        """Says what is different where these units, and no others, are Tempo's; None if nothing is."""
        try:
            ours = self._run(units)
        except Exception as error:  # whatever Tempo's modules, or a foreign model with them, may raise
            return f"it fails where stock runs: {probe.describe_error(error)}"
        worst, found, largest = 1.0, None, 0.0
        for name, scale in self._scales.items():
            if name.startswith("grad") and name not in ours:
                continue  # tiles call the module where nobody sees it
            distance, bound, counts = self._judge(name, ours.get(name), scale)
            largest = max(largest, (distance / scale).max().item() if counts else 0.0)
            excess = torch.nan_to_num(distance / bound, nan=float("inf"))
            row = int(excess.argmax())
            if excess[row] > worst:
                worst, part, limit = excess[row].item(), (distance / scale)[row].item(), (bound / scale)[row].item()
                found = f"it differs from stock: {name} by {part:.2g} of its largest, bound {limit:.1g}"
        if found is None:
            self.largest = largest
        return found

    def _judge(self, name: str, ours: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Returns of each row how far ours is, how far it may be, and whether the bound is small for it."""
        stock = self._stock[name]
        distance = _compute_difference(stock, ours, scale)
        # How far rounding leads one number, such as a loss, is found by chance only.
        eps = self._coarsest / 32 if stock is not None and stock.numel() == 1 else _get_eps(stock)
        bound = max(2 * eps, _FLOOR) * scale
        if bool((distance <= bound).all()):
            return distance, bound, True
        noise = self._noise[name]
        bound = torch.maximum(bound, (_FACTOR if self._coarsest > 1e-4 else _FINE_FACTOR) * noise)
        if bool((distance <= bound).all()) or (exact := self._exact.get(name)) is None:
            return distance, bound, bool((noise <= 0.1 * scale).all())
        # A sum of many numbers in 16 bits, as of a norm's gradients, may be far off in stock.
        bound = torch.maximum(bound, 2 * _compute_difference(exact, stock, scale))
        return _compute_difference(exact, ours, scale), bound, False

    def trace(self, units: Sequence[Unit]) -> dict[Unit, str]:
        """Finds the units that make a difference, alone or only together, each with what is different then."""
        found = {unit: why for unit in units if (why := self.differs([unit])) is not None}
        if not found and (why := self.differs(units)) is not None:
            needed = [unit for unit in units if self.differs([each for each in units if each is not unit]) is None]
            found = dict.fromkeys(needed or units, why)
        return found

    @functools.cached_property
    def _noise(self) -> dict[str, Tensor]:
        """How far one rounding of each module's output and gradient leads stock."""
        with register_module_forward_hook(_make_perturbation(self._names)):
            noisy = self._run()
        return {
            name: _compute_difference(self._stock[name], noisy.get(name), scale).nan_to_num(nan=float("inf"))
            for name, scale in self._scales.items()
        }

    @functools.cached_property
    def _exact(self) -> Values:
        """Returns what stock makes of 16 bits in float32; nothing in a wider dtype, or if it does not run there."""
        if self._coarsest < torch.finfo(torch.float16).eps:
            return {}
        held = [(each, each.data) for each in (*self._model.parameters(), *self._model.buffers())]
        try:
            for each, data in held:
                each.data = _widen(data)
            return self._run(call=pytree.tree_map(_widen, self._call))
        except Exception:  # a foreign model may ask for its dtype
            return {}
        finally:
            for each, data in held:
                each.data = data

    def _run(self, units: Sequence[Unit] = (), call: probe.Inputs | None = None) -> Values:
        args, kwargs = call or self._call
        torch.manual_seed(0)
        random.seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
        ends: dict[str, Tensor] = {}
        note = functools.partial(self._note_end, ends)
        setting, fixed = _only(self._model, units, self._has_registry), _FixedChoices(self._indices)
        with setting, register_module_forward_hook(note), fixed:
            values = _list_outputs(self._model(*args, **kwargs), kwargs.get("attention_mask"))
            goal = values["loss"] if "loss" in values else sum(map(_sum_weighted, values.values()))
            found: Values = {name: value.detach().clone() for name, value in values.items()}
            if not isinstance(goal, Tensor) or not goal.requires_grad:
                raise ValueError("none of its outputs needs a gradient")
            stopped = {**ends, **self._parameters}
            ends.clear()
            grads = torch.autograd.grad(goal, list(stopped.values()), allow_unused=True)
        return found | {f"grad of {name}": grad for name, grad in zip(stopped, grads, strict=True)}

    def _note_end(self, ends: dict[str, Tensor], module: nn.Module, args: Any, out: Any) -> None:
        """Notes what a module returns at which gradients end in the model, such as embeddings of tokens."""
        name = self._names.get(id(module))
        if name is None or len(ends) == 4 or name in ends or any(module.children()):
            return
        is_end = isinstance(out, Tensor) and out.is_floating_point() and out.requires_grad
        if is_end and not any(isinstance(each, Tensor) and each.requires_grad for each in args):
            ends[name] = out


class _FixedChoices(TorchFunctionMode):
    """Lets torch's dropout keep every element, and lets the choices of the first run of stock hold in all others: a
    mixture's router, or an index, may choose otherwise by values that differ by a rounding."""

    def __init__(self, indices: Indices) -> None:
        super().__init__()
        self._indices, self._calls = indices, defaultdict[Any, int](int)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            x = args[0] if args else kwargs["input"]
            return (x, torch.ones_like(x, dtype=torch.bool)) if func is torch.native_dropout else x
        if (place := _DROP_ARGUMENTS.get(func)) is not None:
            args = (*args[:place], 0.0, *args[place + 1 :]) if len(args) > place else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        out = func(*args, **kwargs)
        if func not in _CHOOSING or is_in_backward() or not args or not args[0].is_floating_point():
            return out
        indices = out if isinstance(out, Tensor) else out[1]
        # Each function of each shape by itself: attention of one of the two may choose where the other's does not.
        key = func, indices.shape
        if self._calls[key] == len(chosen := self._indices[key]):
            chosen.append(indices)
        held = chosen[self._calls[key]]
        self._calls[key] += 1
        if isinstance(out, Tensor):
            return held
        dim = kwargs.get("dim", args[_CHOOSING[func]] if len(args) > _CHOOSING[func] else -1)
        return type(out)((args[0].gather(dim, held), held))


_DROPOUTS = {getattr(home, name) for home in (F, torch) for name in dir(home) if "dropout" in name and name[0] != "_"}
_DROP_ARGUMENTS = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""Functions with an argument dropout_p -> its place."""
_DIMS = {"topk": 2, "sort": 1, "argmax": 1, "argsort": 1}
_CHOOSING = {getattr(home, name): dim for home in (torch, Tensor) for name, dim in _DIMS.items()}
"""Functions that return indices, some behind values -> the place of dim."""


def _choose_parameters(model: nn.Module) -> dict[str, Tensor]:
    # Of each kind, by its name, the first, and of small ones the last.
    kinds: dict[str, list[tuple[str, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
            kinds.setdefault(re.sub(r"\d+", "#", name), []).append((name, parameter))
    chosen: dict[str, Tensor] = {}
    for (name, first), *others in sorted(kinds.values(), key=lambda each: each[0][1].numel()):
        if sum(each.numel() for each in chosen.values()) + first.numel() <= _MAX_ELEMENTS:
            chosen[name] = first
            chosen |= dict(others[-1:]) if first.numel() <= _SMALL else {}
    return chosen


def _list_outputs(out: Any, mask: Tensor | None) -> dict[str, Tensor]:
    """Lists the numbers in a model's output, with 0 for tokens that are hidden by a mask [b, s]."""
    found = {}
    for name, value in out.items() if isinstance(out, Mapping) else (("output", out),):
        for number, leaf in enumerate(pytree.tree_leaves(value)):
            if isinstance(leaf, DeferredLogits):
                with torch.no_grad():
                    leaf = leaf.read()
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
                continue
            if isinstance(mask, Tensor) and leaf.dim() > 2 and leaf.shape[:2] == mask.shape:
                leaf = leaf.masked_fill((mask == 0).view(*mask.shape, *[1] * (leaf.dim() - 2)), 0.0)
            found[f"{name}.{number}" if number else str(name)] = leaf
    return found


def _sum_weighted(value: Tensor) -> Tensor:
    weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)).to(value.device)
    return (value.float() * weights).sum()


def _make_perturbation(names: Mapping[int, str]) -> Callable[..., Any]:
    """Makes a hook that changes each module's output, and the gradient of it, by a rounding up or down."""
    generators: dict[torch.device, torch.Generator] = {}

    def change(x: Tensor, amount: float) -> Tensor:
        generator = generators.setdefault(x.device, torch.Generator(x.device).manual_seed(1))
        signs = 2 * torch.randint(0, 2, x.shape, generator=generator, device=x.device, dtype=torch.int8) - 1
        return x * (1 + amount * signs.to(x.dtype))

    def perturb(module: nn.Module, _: Any, out: Any) -> Any:
        def change_one(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or not x.requires_grad:
                return x
            y, back = change(x, _get_eps(x)), _get_eps(x)
            # By its attributes, as its class is stock's here.
            if "function" in module.__dict__ and module.__dict__.get("keep") == "inplace":
                back = max(back, _GELU_IN_PLACE.get(x.dtype, 0.0))
            y.register_hook(lambda grad: change(grad, back))
            return y

        is_known = id(module) in names and isinstance(out, Tensor | tuple | list)
        return pytree.tree_map(change_one, out) if is_known else out

    return perturb


def _widen(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_narrow else value


@contextlib.contextmanager
def _only(model: Any, units: Sequence[Unit], has_registry: bool) -> Iterator[None]:
    """Lets no unit but these be Tempo's. Linears that drop what others make again are Tempo's with any unit."""
    stay = {id(module) for unit in units for module in unit.modules}
    is_stock = has_registry and not any(unit.is_registry for unit in units)
    places = [(module.__dict__, module.__dict__[PLACE]) for module in model.modules() if PLACE in module.__dict__]
    replaced = [module for module in model.modules() if isinstance(module, Replaced) and id(module) not in stay]
    changed = [(module, type(module)) for module in replaced if not units or not isinstance(module, DropsInput)]
    try:
        for module, _ in changed:
            module.__class__ = module.stock_class
        if is_stock:
            give_back_attention(model)
        yield
    finally:
        if is_stock:
            model.set_attn_implementation(NAME)
            for attributes, place in places:
                attributes[PLACE] = place
        for module, kind in changed:
            module.__class__ = kind


def _compute_difference(stock: Tensor | None, ours: Tensor | None, size: Tensor) -> Tensor:
    """Returns of each row the largest difference where stock's number is one; `size` is what stock measures."""
    if stock is None or ours is None:
        other = _get_largest(ours if stock is None else stock)
        return other if other.shape == size.shape else other.amax().expand(size.shape)
    first, second = _split(stock), _split(ours)
    if first.shape != second.shape:
        return torch.full_like(size, float("inf"))
    return torch.where(first.isfinite(), first - second, 0.0).abs().amax(1).cpu()


def _get_eps(x: Tensor | None) -> float:
    """Returns the relative distance of neighbouring numbers, as products see them."""
    dtype = torch.float32 if x is None else x.dtype
    is_coarse = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return 2.0**-10 if is_coarse else torch.finfo(dtype).eps


def _split(value: Tensor) -> Tensor:
    """Views a tensor as rows, one for each sample where it may have samples."""
    value = value.detach() if value.dtype == torch.float64 else value.detach().float()
    return value.flatten(1) if value.dim() > 2 and value.size(0) <= 64 else value.reshape(1, -1)


def _get_largest(value: Tensor | None) -> Tensor:
    return torch.zeros(1) if value is None else _split(value).nan_to_num(0.0, 0.0, 0.0).abs().amax(1).cpu()


def _get_obstacle(model: nn.Module) -> str | None:
    parameters = list(model.parameters())
    if not parameters:
        return "it has no parameters"
    if any(each.is_meta for each in parameters):
        return "the model is on the meta device"
    if any(hasattr(each, "ds_id") and each.shape != getattr(each, "ds_shape", each.shape) for each in parameters):
        return "ZeRO-3 has partitioned its parameters"
    if name_implementation(model) == NAME and is_wrapped():
        return "another attention is registered in place of Tempo's, such as Ulysses for ranks that share tokens"
    if any(hasattr(each, "device_mesh") for each in parameters) or (getattr(model, "_tp_size", None) or 1) > 1:
        return "ranks share its parameters"
    if any(map(has_changed_class, model.modules())):
        return "something that wraps the model has changed the classes of its modules"
    return None


def is_slow(model: nn.Module) -> bool:
    """Returns whether forward and backward of some tokens take minutes."""
    return sum(each.numel() for each in model.parameters() if each.device.type == "cpu") > _MAX_ON_CPU


@contextlib.contextmanager
def _keep_state(model: Any, passes: Passes) -> Iterator[None]:
    """Lets `model` run in training, without a cache and without checkpointing, its dropout keeping every element on the
    paths that it takes otherwise, and restores what its modules hold, buffers, counters, hooks, and random states."""
    modules, buffers = list(model.modules()), [(each, each.clone()) for each in model.buffers()]
    places = [module.__dict__[PLACE] for module in modules if PLACE in module.__dict__]
    configs = {id(each): each for module in modules if (each := getattr(module, "config", None)) is not None}
    caching = [each for each in configs.values() if isinstance(getattr(each, "use_cache", None), bool)]
    holders = [*modules, *places, *caching, passes, passes.samples, *passes.places.values()]
    states = [(holder.__dict__, dict(holder.__dict__)) for holder in holders]
    inner = [
        (value, value.copy()) for _, state in states for value in state.values() if type(value) in (list, dict, deque)
    ]
    random_states = probe.keep_random_states({each.device for each in model.parameters() if each.device.type != "cpu"})
    quiet = warnings.catch_warnings()
    with random_states, probe.run_eagerly(), quiet, torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            probe.begin_training(model)
            passes.keeps_all = True
            for config in caching:
                config.use_cache = False
            yield
        finally:
            for now, before in states:
                now.clear()
                now.update(before)
            for value, held in inner:
                value.clear()
                value.update(held) if isinstance(value, dict) else value.extend(held)
            for buffer, values in buffers:
                if not torch.equal(buffer, values):
                    with torch.no_grad():
                        buffer.copy_(values)


Found = tuple[str, dict[Unit, str]]
"""What a check found: a sentence for the report, and the units that differ, each with what is different."""


def check_model(
    model: nn.Module, passes: Passes, units: Sequence[Unit], call: probe.Inputs | None, has_loss: bool
) -> Found:
    """Runs `model` with these units and without, on a call or, without one, on inputs made up, with labels if
    `has_loss`, and traces what differs. Whatever a foreign model raises is told in the sentence."""
    try:
        if (why := _get_obstacle(model)) is not None:
            return _refuse(why)
        calls = probe.make_calls(model, has_loss) if call is None else [call]
        if calls is None:
            return _refuse("it takes inputs that could not be made up")
        with _keep_state(model, passes):
            return _compare(model, units, calls)
    except Exception as error:
        return _refuse(probe.describe_error(error))


def _refuse(why: str) -> Found:
    return f"not checked: {why}; check(model, **batch) does it on a batch", {}


def _compare(model: nn.Module, units: Sequence[Unit], calls: Sequence[probe.Inputs]) -> Found:
    found: dict[Unit, str] = {}
    notes, largest, what = [], 0.0, ""
    for call in calls:
        try:
            comparison = Comparison(model, units, call)
        except Exception as error:  # a foreign model may raise anything
            if not what:
                return _refuse(f"without Tempo it fails on these inputs: {probe.describe_error(error)}")
            notes.append(f"not with padding, on which stock fails: {probe.describe_error(error)}")
            continue
        while comparison.differs(rest := [unit for unit in units if unit not in found]) is not None:
            if (why := comparison.differs(())) is not None:
                return _refuse(f"two runs of the stock modules differ: {why}")
            found |= comparison.trace(rest)
        largest, what = max(largest, comparison.largest), what or comparison.what
    ids = calls[0][1].get("input_ids")
    where = probe.name_inputs(calls[0]) if ids is None else " x ".join(map(str, ids.shape)) + " tokens"
    where += ", with and without padding" if len(calls) > 1 else ""
    return "; ".join([f"checked: {what} equal stock's within {largest:.0e} on {where}", *notes]), found
