"""Finds out what a training forward runs, by running and watching a copy of the model on tensors without memory.

The copy has fake tensors in place of parameters and buffers, and no hooks, so that neither the model nor a random state
changes. A model of 7e9 parameters takes about a second and some megabytes.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import inspect
import logging
import random
import sys
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tempo_torch.attention import PLACE
from tempo_torch.position import Passes

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs)."""
_SAMPLES, _TOKENS, _WAVE = 2, 16, 8000
_CHECKED_TOKENS, _PADDED = 32, 5
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclasses.dataclass(frozen=True)
class Seen:
    """What one training forward ran.

    Args:
        inputs: a description of its input tensors.
        called: the names of the modules that were called.
        operators, draws: Tempo's operators, and functions that drew from torch's generator, by the module whose forward
            called them.
        attention: the modules that asked for attention, each with the reason why stock served it, or None.
    """

    inputs: str
    called: frozenset[str]
    operators: dict[str, set[str]]
    draws: dict[str, set[str]]
    attention: dict[str, str | None]


def probe(model: nn.Module, passes: Passes, call: Inputs) -> Seen | str:
    """Returns what model(*args, **kwargs) runs in training, or the reason why that cannot be found out. Of the call
    only shapes and dtypes matter."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # torch's log of an operator without a fake kernel, which is the reason that is returned.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    is_silent, log.disabled = log.disabled, True
    try:
        with keep_random_states(), run_eagerly(), torch.enable_grad():
            twin, twin_passes, (args, kwargs) = _copy_without_memory(model, passes, call, mode)
            twin_passes.follow(twin)
            watch = _Watch(twin, model)
            # Inside a checkpointed region, these hooks keep the region's own from taking what is saved here.
            hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            with mode, watch, _Names(watch), twin_passes.samples.set_next(0), hooks, watch.follow():
                twin(*args, **kwargs)
    except Exception as error:  # a foreign model without values may raise anything
        return describe_error(error)
    finally:
        log.disabled = is_silent
    places = {name: module.__dict__[PLACE] for name, module in twin.named_modules() if PLACE in module.__dict__}
    attention = {name: place.why for name, place in places.items() if place.was_called}
    return Seen(name_inputs(call), frozenset(watch.called), dict(watch.operators), dict(watch.draws), attention)


def _copy_without_memory(
    model: nn.Module, passes: Passes, call: Inputs, mode: FakeTensorMode
) -> tuple[nn.Module, Passes, Inputs]:
    memo: dict[int, Any] = {}
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)]
    with mode:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                fake = torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    for module in model.modules():
        memo |= {id(module.__dict__[hooks]): collections.OrderedDict() for hooks in _HOOKS}
    twin, twin_passes, copied = copy.deepcopy((model, passes, call), memo)
    begin_training(twin)
    for module in twin.modules():
        # A function that replaced a forward still refers to the original module.
        module.__dict__.pop("forward", None)
        if (place := module.__dict__.get(PLACE)) is not None:
            place.is_required = False  # calls that stock would serve are noted, not refused
    return twin, twin_passes, copied


def describe_error(error: Exception) -> str:
    """Returns the kind of an exception and the first line of what it says."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:300].rstrip(".")


def begin_training(model: nn.Module) -> None:
    """Lets a model that is in eval run as in training, and any model without checkpointing."""
    if not model.training:
        model.train()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.__dict__["gradient_checkpointing"] = False


class _Watch(TorchDispatchMode):
    """Notes operators by the module whose forward runs. Where a model reads values, which fake tensors do not have, a
    bool reads as False, a number as 1, and a mask has one element set."""

    def __init__(self, twin: nn.Module, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in twin.named_modules()}
        self._originals = {id(module): name for name, module in model.named_modules()}
        self.called: set[str] = set()
        self.operators: dict[str, set[str]] = defaultdict(set)
        self.draws: dict[str, set[str]] = defaultdict(set)
        self.function = ""
        self._stack: list[str] = [""]

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """Tracks which module runs, and refuses modules of the original model, whose places would count the calls."""
        thread = threading.get_ident()

        def enter(module: nn.Module, _: Any) -> None:
            if threading.get_ident() != thread:
                return
            if (name := self._originals.get(id(module))) is not None:
                raise RuntimeError(f"a function reaches {name or 'the model'} otherwise than by its module")
            self._stack.append(self._names.get(id(module), self._stack[-1]))
            self.called.add(self._stack[-1])

        def leave(module: nn.Module, *_: Any) -> None:
            if threading.get_ident() == thread and id(module) not in self._originals:
                self._stack.pop()

        with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "tempo_kernels":
            self.operators[self._stack[-1]].add(func._opname)
        elif torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.draws[self._stack[-1]].add(self.function or func._opname)
        if func is torch.ops.aten._local_scalar_dense.default:
            return int(args[0].dtype != torch.bool)
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_zeros((1, args[0].dim()), dtype=torch.int64)
        if func is torch.ops.aten._grouped_mm.default:  # its fake kernel takes bfloat16 only
            first, second, *others = args
            return func(first.bfloat16(), second.bfloat16(), *others, **kwargs).to(first.dtype)
        return func(*args, **kwargs)


class _Names(TorchFunctionMode):
    """Tells a watch which function was called."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self._watch.function = self._watch.function, resolve_name(func) or getattr(func, "__name__", "")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._watch.function = before


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return value is None or value > 0.0
    return True


@contextlib.contextmanager
def keep_random_states(devices: Collection[torch.device] = ()) -> Iterator[None]:
    """Restores the states of Python's and numpy's generators afterwards, and of torch's there and on the CPU."""
    numpy: Any = sys.modules.get("numpy")
    state, others = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        kind = next((device.type for device in devices), "cuda")
        with torch.random.fork_rng(devices=list(devices), device_type=kind):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(others)


def run_eagerly() -> contextlib.AbstractContextManager[Any]:
    """Runs functions that a model has compiled without compiling them."""
    is_imported = "torch._dynamo" in sys.modules  # not imported here, which takes seconds
    return torch.compiler.set_stance("force_eager") if is_imported else contextlib.nullcontext()


def make_inputs(model: Any, has_loss: bool, num_tokens: int = _TOKENS) -> Inputs | None:
    """Returns a call, of tensors without memory, that a model accepts, with labels if `has_loss`; None if its
    configuration does not say enough."""
    config: Any = getattr(model, "config", None)
    name: Any = getattr(model, "main_input_name", None)
    ids = torch.empty(_SAMPLES, num_tokens, dtype=torch.int64, device="meta")
    shape: tuple[int, ...] | None = None
    if name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        shape = (getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size))
    elif name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_values" and hasattr(config, "conv_stride"):
        shape = (_WAVE,)
    elif name != "input_ids" or not hasattr(config, "vocab_size"):
        return None
    inputs = {name: ids if shape is None else torch.empty(_SAMPLES, *shape, dtype=model.dtype, device="meta")}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    return (), inputs | ({"labels": ids} if has_loss else {})


def make_calls(model: Any, has_loss: bool) -> list[Inputs] | None:
    """Returns calls with values: without a mask, and with padding on either side where the model takes a mask."""
    config = getattr(model, "config", None)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    num_tokens = min([_CHECKED_TOKENS, *(limit for limit in limits if isinstance(limit, int))])
    if (call := make_inputs(model, has_loss, num_tokens)) is None:
        return None
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    given: dict[str, Tensor] = {}
    for name, value in call[1].items():
        if value.is_floating_point():
            given[name] = torch.randn(value.shape, generator=generator).to(device, value.dtype)
        else:
            ids = _list_ids(config)
            given[name] = ids[torch.randint(len(ids), value.shape, generator=generator)].to(device)
    is_copied = "labels" in given and "decoder_input_ids" not in given
    if is_copied:
        given["labels"] = given["input_ids"].clone()
    if "input_ids" not in given or "attention_mask" not in inspect.signature(model.forward).parameters:
        return [((), given)]
    padding = min(_PADDED, given["input_ids"].size(1) // 2)
    mask = torch.ones_like(given["input_ids"])
    mask[0, :padding] = 0
    mask[1, -padding:] = 0
    padded = {**given, "attention_mask": mask}
    if is_copied:
        padded["labels"] = given["labels"].masked_fill(mask == 0, -100)
    return [((), given), ((), padded)]


def _list_ids(config: Any) -> Tensor:
    text = config.get_text_config()
    special: set[Any] = set()
    for name, value in [*text.__dict__.items(), *config.__dict__.items()]:
        if name.endswith(("_token_id", "_token_index")):
            special.update(value if isinstance(value, list | tuple) else (value,))
    size = min(value for value in (getattr(text, "vocab_size", None), getattr(config, "vocab_size", None)) if value)
    return torch.tensor([each for each in range(size) if each not in special] or [0])


def name_inputs(call: Inputs) -> str:
    """Names the tensors of a call with their shapes."""
    given = [*enumerate(call[0]), *call[1].items()]
    return ", ".join(f"{name} {list(value.shape)}" for name, value in given if isinstance(value, Tensor))
