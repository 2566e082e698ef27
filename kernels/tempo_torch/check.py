"""Checks a model of transformers against itself before it trains, and says in a sentence what was found."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tempo_torch.attention import NAME, PLACE, is_wrapped, name_implementation
from tempo_torch.compare import Comparison, Unit, describe_error
from tempo_torch.inputs import Inputs, make_calls, name_inputs
from tempo_torch.position import Passes
from tempo_torch.probe import begin_training, keep_random_states, run_eagerly
from tempo_torch.replace import Replaced, make_class

_MAX_ON_CPU = 1 << 30


def get_obstacle(model: nn.Module) -> str | None:
    """Returns why a model cannot run on its own here; None if nothing speaks against it."""
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
    replaced = [module for module in model.modules() if isinstance(module, Replaced)]
    if any(type(each) is not make_class(each.mixin_class, each.stock_class) for each in replaced):
        return "something that wraps the model has changed the classes of its modules"
    return None


def is_slow(model: nn.Module) -> bool:
    """Returns whether forward and backward of some tokens take minutes."""
    return sum(each.numel() for each in model.parameters() if each.device.type == "cpu") > _MAX_ON_CPU


@contextlib.contextmanager
def keep_state(model: Any, passes: Passes) -> Iterator[None]:
    """Lets `model` run in training, without a cache and without checkpointing, and gives it back as it was: what its
    modules hold, buffers, counters, hooks, and random states."""
    modules, buffers = list(model.modules()), [(each, each.clone()) for each in model.buffers()]
    places = [module.__dict__[PLACE] for module in modules if PLACE in module.__dict__]
    configs = {id(each): each for module in modules if (each := getattr(module, "config", None)) is not None}
    caching = [each for each in configs.values() if isinstance(getattr(each, "use_cache", None), bool)]
    holders = [*modules, *places, *caching, passes, passes.samples, *passes.places.values()]
    states = [(holder.__dict__, dict(holder.__dict__)) for holder in holders]
    inner = [
        (value, value.copy()) for _, state in states for value in state.values() if type(value) in (list, dict, deque)
    ]
    devices = {each.device for each in model.parameters() if each.device.type != "cpu"}
    quiet = warnings.catch_warnings()
    with keep_random_states(devices), run_eagerly(), quiet, torch.inference_mode(False), torch.enable_grad():
        warnings.simplefilter("ignore")
        try:
            begin_training(model)
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


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found: a sentence for the report, and the units that differ, each with what is different."""

    text: str
    units: dict[Unit, str] = dataclasses.field(default_factory=dict)


def check_model(
    model: nn.Module, passes: Passes, units: Sequence[Unit], call: Inputs | None, has_loss: bool
) -> Finding:
    """Runs `model` with these units and without, on a call or, without one, on inputs made up, and traces what differs.
    Whatever a foreign model raises is told in the sentence.

    Args:
        has_loss: whether the made-up inputs have labels.
    """
    try:
        if (why := get_obstacle(model)) is not None:
            return _refuse(why)
        calls = make_calls(model, has_loss) if call is None else [call]
        if calls is None:
            return _refuse("it takes inputs that could not be made up")
        with keep_state(model, passes):
            return _compare(model, passes, units, calls)
    except Exception as error:
        return _refuse(describe_error(error))


def _refuse(why: str) -> Finding:
    return Finding(f"not checked: {why}; check(model, **batch) does it on a batch")


def _compare(model: nn.Module, passes: Passes, units: Sequence[Unit], calls: Sequence[Inputs]) -> Finding:
    found: dict[Unit, str] = {}
    notes, largest, what = [], 0.0, ""
    for call in calls:
        try:
            comparison = Comparison(model, passes, units, call)
        except Exception as error:  # a foreign model may raise anything
            if not what:
                return _refuse(f"without Tempo it fails on these inputs: {describe_error(error)}")
            notes.append(f"not with padding, on which stock fails: {describe_error(error)}")
            continue
        while comparison.differs(rest := [unit for unit in units if unit not in found]) is not None:
            if (why := comparison.differs(())) is not None:
                return _refuse(f"two runs of the stock modules differ: {why}")
            found |= comparison.trace(rest)
        largest, what = max(largest, comparison.largest), what or comparison.describe()
    ids = calls[0][1].get("input_ids")
    where = name_inputs(calls[0]) if ids is None else " x ".join(map(str, ids.shape)) + " tokens"
    where += ", with and without padding" if len(calls) > 1 else ""
    return Finding("; ".join([f"checked: {what} equal stock's within {largest:.0e} on {where}", *notes]), found)
