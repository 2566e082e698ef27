"""Defines `tempoize`, which replaces modules of any PyTorch model in place by ones that keep less for backward, and
what it knows of a model: what was replaced, what a forward was seen to run, what a check found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from tempo_kernels.offload import Offload
from tempo_torch.attention import NAME, PLACE, get_change, give_back_attention, is_apart, name_implementation
from tempo_torch.compare import Unit, check_model, is_slow
from tempo_torch.functional import RedirectsFunctions
from tempo_torch.linear import DropsInput
from tempo_torch.loss import FusedLoss
from tempo_torch.mlp import TiledMLP, find_dropout
from tempo_torch.offload import offload_layers
from tempo_torch.position import Passes, Samples, get_rank
from tempo_torch.probe import Inputs, Seen, make_inputs, probe
from tempo_torch.replace import change_class, give_class_back
from tempo_torch.replacements import replace_attention, replace_losses, replace_modules
from tempo_torch.report import Entry, Report
from tempo_torch.versions import check_versions

CHOICES = {
    "activation": ("auto", "recompute", "inplace", "off"),
    "norm": ("auto", "inplace", "recompute", "off"),
    "dropout": ("recompute", "auto", "off"),
    "attention": ("auto", "flash", "off"),
    "loss": ("auto", "fused", "off"),
    "mlp": ("off", "tile"),
    "check": ("auto", "off"),
}
"""The values of each argument of `tempoize`, the default first."""
_ATTRIBUTE = "tempo"
Model = TypeVar("Model", bound=nn.Module)


def tempoize(
    model: Model,
    *,
    seed: int = 0,
    activation: str = "auto",
    norm: str = "auto",
    dropout: str = "recompute",
    attention: str = "auto",
    loss: str = "auto",
    mlp: str = "off",
    offload: str = "off",
    offload_ahead: int = 1,
    rank: int | None = None,
    num_ranks: int | None = None,
    sequence_ranks: int = 1,
    check: str = "auto",
) -> Model:
    """Replaces modules of `model` in place by Tempo's, which keep less for backward, and returns the same model.

    Parameters stay the same objects under the same names: call it before or after an optimizer is made and weights are
    loaded, but before FSDP, DDP, DeepSpeed or torch.compile wraps the model. After adding modules, such as adapters of
    peft, call it again with the same arguments: it replaces the new ones. `restore` undoes it.

    Args:
        model: any module. Modules of transformers and peft are recognised if these are imported.
        seed: the seed of the dropout masks, equal on all ranks.
        activation: "recompute" (and "auto") keeps an activation's input and frees its output once a linear has used
            it; "inplace" keeps the output and, for GELU, a bit per element.
        norm: "inplace" keeps a norm's output; "recompute" its input; "auto" is "inplace", and "recompute" where
            torch.compile compiles the model or where weights are too small for their biases (`tempo_kernels.norm`).
        dropout: "recompute" (and "auto") draws masks again by position; see `samples`.
        attention: "flash" (and "auto") gives attention with dropout a mask by position and no s*s tensor, in
            nn.MultiheadAttention, in models of transformers on "sdpa", and in BLOOM and MPT.
        loss: "fused" (and "auto") makes the logits of a causal language model a chunk of tokens at a time.
        mlp: "tile" runs the MLPs of transformers' models a tile of tokens at a time. They keep their input only, and
            both linears run again in backward. Under ZeRO 3 call tempoize before deepspeed.initialize. Under
            torch.compile tiles run between the graphs: fullgraph=True fails in training.
        offload: "all" moves what the layers (modules of the outermost nn.ModuleLists) keep to pinned host memory until
            their backward; names of modules in a layer joined by "+", such as "mlp.down_proj", move what those keep,
            and "input" the input of a layer that torch.utils.checkpoint runs again.
        offload_ahead: how many layers early they are copied back. With 0 backward waits, and one layer less is on the
            GPU.
        rank, num_ranks: this process among those that train on different samples. By default those of
            torch.distributed, and of the mesh of a model that transformers distributed.
        sequence_ranks: how many ranks share the tokens of a sample and, in attention, its heads, as under DeepSpeed's
            Ulysses: rank r has the samples of rank r // sequence_ranks, and the part r % sequence_ranks of each.
            Attention then draws the masks of one process, and so does other dropout of [samples, tokens, ...], if all
            ranks have as many tokens.
        check: "auto" compares a model of transformers with its stock modules on made-up inputs, as `check` does.

    Each operation may be "off". If an "auto" does not apply, modules stay, and `report_on` says why.

    Keeps for backward: see `report_on(model)`.
    Raises ValueError for an unknown value, for a model that was given to tempoize with other arguments, and if a value
        other than "auto" and "off" has nothing to apply to, or makes the model differ from stock.
    """
    choices = {"activation": activation, "norm": norm, "dropout": dropout, "attention": attention, "loss": loss}
    choices |= {"mlp": mlp}
    _check_model(model)
    _check_values({**choices, "check": check}, seed, rank, num_ranks, offload, offload_ahead, sequence_ranks)
    ranks = _get_ranks(model, sequence_ranks)
    if rank is None and ranks:
        rank, num_ranks = ranks["samples"]
    given = (seed, choices, offload, offload_ahead, rank, num_ranks, sequence_ranks)
    before = _take_before(model, given)
    passes, entries = before or (Passes(seed, Samples(rank, num_ranks, ranks.get("sequence", (0, 1)))), [])
    entries += replace_modules(model, choices, passes)
    if attention != "off":
        entries += replace_attention(model, choices, passes, ranks.get("heads", (0, 1)), tuple(entries))
    if loss != "off":
        entries += replace_losses(model)
    model.__dict__[_ATTRIBUTE] = state = State(passes, choices, entries, given)
    passes.follow(model)
    call = make_inputs(model, any(entry.operation == "loss" and entry.now for entry in entries))
    state.give_back_tiles(dict(model.named_modules()))
    if call is not None:
        state.watch(model, call)
    state.check_applied(model)
    if check == "auto" and is_slow(model):
        state.checked = "not checked: on a CPU its parameters take minutes; check(model) does it"
    elif check == "auto":
        num_entries = len(state.report(model).replaced)
        state.check(model)
        if call is not None and len(state.report(model).replaced) < num_entries:
            state.watch(model, call)
    state.offloads = offload_layers(model, offload, offload_ahead)
    watch = model.register_forward_pre_hook(state.watch_first, with_kwargs=True)  # behind hooks that change the inputs
    passes.handles.append(watch)
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module; build the model first")
    check_versions({type(module).__module__.partition(".")[0] for module in model.modules()})
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise ValueError(
            f"model is a {type(model).__name__}, which is compiled; expected the model itself; compile it later"
        )


def _check_values(
    choices: dict[str, str], seed: Any, rank: Any, num_ranks: Any, offload: Any, offload_ahead: Any, sequence_ranks: Any
) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed is {seed!r}; expected an integer, equal on all ranks")
    for name, value in choices.items():
        if value not in CHOICES[name]:
            values = ", ".join(f'"{choice}"' for choice in CHOICES[name])
            raise ValueError(f"{name} is {value!r}; expected one of {values}")
    are_numbers = type(rank) is type(num_ranks) is int and 0 <= rank < num_ranks
    if not are_numbers and (rank is not None or num_ranks is not None):
        raise ValueError(
            f"rank is {rank!r} and num_ranks {num_ranks!r}; expected both, with 0 <= rank < num_ranks, or none"
        )
    if not isinstance(offload, str):
        raise ValueError(f'offload is {offload!r}; expected "off", "all" or names of modules joined by "+"')
    if type(offload_ahead) is not int or offload_ahead < 0:
        raise ValueError(f"offload_ahead is {offload_ahead!r}; expected a number of layers; give 0, 1 or more")
    if type(sequence_ranks) is not int or sequence_ranks < 1:
        raise ValueError(f"sequence_ranks is {sequence_ranks!r}; expected a number of ranks; give 1 or more")


def _get_ranks(model: Any, sequence_ranks: int) -> dict[str, tuple[int, int]]:
    """Returns {"heads": (rank, size), "samples": ..., "sequence": ...}: this process among those that share the heads
    of an attention, or have other samples, or other tokens of a sample, where torch.distributed does not say it."""
    mesh: Any = getattr(model, "_device_mesh", None)
    is_split = mesh is not None and (getattr(model, "_tp_size", None) or 1) > 1
    rank, total = get_rank()
    if sequence_ranks > 1:
        if is_split or total % sequence_ranks:
            here = "a model with tensor parallelism" if is_split else f"{total} ranks of torch.distributed"
            raise ValueError(
                f"sequence_ranks is {sequence_ranks} for {here}; expected a number that divides the ranks, and no "
                "tensor parallelism; call deepspeed.init_distributed first"
            )
        place = rank % sequence_ranks, sequence_ranks
        return {"heads": place, "sequence": place, "samples": (rank // sequence_ranks, total // sequence_ranks)}
    if not is_split:
        return {}
    names = mesh.mesh_dim_names or ("tp",)
    ranks = dict(zip(names, zip(mesh.get_coordinate(), mesh.shape, strict=True), strict=True))
    return {"heads": ranks["tp"], "samples": ranks.get("fsdp", (0, 1))}


def _take_before(model: nn.Module, given: tuple[Any, ...]) -> tuple[Passes, list[Entry]] | None:
    """Takes the passes and entries off a model that was given to tempoize before; None if it was not."""
    found = [(name, module) for name, module in model.named_modules() if _ATTRIBUTE in module.__dict__]
    if not found:
        return None
    (name, module), *others = found
    state: State = module.__dict__[_ATTRIBUTE]
    if others or state.given != given:
        raise ValueError(
            f"{type(model).__name__} was given to tempoize before, with other arguments or in parts; expected the same "
            "arguments again; call restore first"
        )
    del module.__dict__[_ATTRIBUTE]
    state.leave()
    names = {each for each, _ in model.named_modules()}
    prefix = f"{name}." if name else ""
    moved = [dataclasses.replace(entry, name=f"{prefix}{entry.name}".rstrip(".")) for entry in state.made]
    # Modules that were left may have been exchanged since, so they are examined again.
    stays = (entry for entry in moved if entry.now is not None or entry.operation == "attention")
    return state.passes, [entry for entry in stays if entry.name in names]


def restore(model: Model) -> Model:
    """Undoes `tempoize` in place: modules get their own classes back, the model its attention and its loss.

    Parameters stay the same objects under the same names. Raises ValueError for a model that was not given to tempoize,
    and if FSDP2 has changed the classes of modules since.
    """
    _get_state(model)[1].leave()
    for module in model.modules():
        give_class_back(module)
        module.__dict__.pop(_ATTRIBUTE, None)
    give_back_attention(model)
    return model


def report_on(model: nn.Module) -> Report:
    """Returns what tempoize replaced in `model`, what it left and why; raises ValueError for any other model.

    The report says what a training forward was seen to run, on tensors without memory. For a model of transformers this
    happens before the first step. For any other, or if the first step has other inputs, it happens at that step.
    """
    module, state = _get_state(model)
    return state.report(module)


def check(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Compares `model`, which was given to tempoize, with its stock modules on a call model(*args, **kwargs); returns
    what the report then says of it. Without arguments it makes up inputs, as tempoize does.

    Both run forward and backward in training, and every dropout keeps all. Loss or outputs, the gradients of embeddings
    and of the first parameter of each kind, and of small ones the last, must agree. The bound is four times (in more
    than 16 bits 16 times) what one rounding of every module's output and gradient does to stock, at least two roundings
    and 4e-6 of the largest element. What differs is given back to stock, and the report says so.

    It costs forward and backward of 2 x 32 tokens, with padding once more, each two or three times; and the memory of
    at most 2**28 elements of gradients, twice. No random state, buffer, cache, counter or .grad is changed. What a few
    tokens do not reach, as a window of 4,096, is not seen.

    Raises ValueError where a value other than "auto" and "off" differs.
    """
    module, state = _get_state(model)
    state.check(module, (args, kwargs) if args or kwargs else None)
    return state.checked


@contextlib.contextmanager
def samples(model: nn.Module, first_sample: int, num_samples: int | None = None) -> Iterator[None]:
    """Says which samples the forwards of `model`, or of a wrapper of it, see in the context, one batch after another.

    Args:
        first_sample: index of the first batch's first sample over the whole run, as if one device consumed all samples
            in order; in [0, 2**47). The samples of a batch are consecutive.
        num_samples: samples of each batch; by default the first dimension of the model's main input, which is wrong
            where that is [tokens, samples, h].

    Without it, training forwards are counted: if all batches of a run have one size, the masks are those of a single
    process that sees the batches of all ranks one after another. `set_step` continues the count after a resume.
    Raises ValueError for another index, for fewer than one sample, or for another model.
    """
    with _get_state(model)[1].passes.samples.set_next(first_sample, num_samples):
        yield


def set_step(model: nn.Module, num_forwards: int, num_samples: int | None = None) -> None:
    """Continues the count of training forwards, as after loading a checkpoint. `read_step` returns both arguments.

    Args:
        num_forwards: the training forwards so far.
        num_samples: samples in the first forward of the run, by which later forwards are spaced. By default those of
            this model's first forward; needed if the run may continue with a smaller batch.

    Raises ValueError for a negative number of forwards and for fewer than one sample.
    """
    if num_forwards < 0:
        raise ValueError(f"num_forwards is {num_forwards}; expected at least 0, the forwards in training so far")
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; expected at least 1, the samples of the run's first forward")
    counted = _get_state(model)[1].passes.samples
    counted.num_steps = num_forwards
    if num_samples is not None:
        counted.step_samples = num_samples


def read_step(model: nn.Module) -> tuple[int, int | None]:
    """Returns the arguments of `set_step`: (training forwards so far, samples of the first one or None before it)."""
    counted = _get_state(model)[1].passes.samples
    return counted.num_steps, counted.step_samples


def is_tempoized(model: nn.Module) -> bool:
    """Returns whether a model, or a module in it, was given to tempoize."""
    return any(isinstance(module.__dict__.get(_ATTRIBUTE), State) for module in model.modules())


def _get_state(model: nn.Module) -> tuple[nn.Module, State]:
    for module in model.modules():
        if isinstance(state := module.__dict__.get(_ATTRIBUTE), State):
            return module, state
    raise ValueError(
        f"{type(model).__name__} was not given to tempoize; expected a model that was; call tempoize first"
    )


class State:
    """The state that `tempoize` attaches to a model: its arguments and the entries of modules replaced or left."""

    def __init__(self, passes: Passes, choices: dict[str, str], made: list[Entry], given: tuple[Any, ...]) -> None:
        self.passes, self.choices, self.made, self.given = passes, choices, made, given
        self.offloads: list[Offload] = []
        self.seen: Seen | str = "its inputs are not; the first one tells"
        self.checked = 'not checked: check is "off"; check(model, **batch) does it'
        self._is_settled = False

    def leave(self) -> None:
        """Removes the hooks, and lets nothing be moved any more."""
        self.passes.leave()
        for offload in self.offloads:
            offload.remove()
        self.offloads = []

    def watch(self, model: nn.Module, call: Inputs) -> None:
        """Finds out what model(*args, **kwargs) runs. If no module asks for Tempo's attention, stock's comes back.
        Raises ValueError if a value other than "auto" and "off" applies to nothing that runs."""
        modules = dict(model.named_modules())
        self.seen = probe(model, self.passes, call)
        self.give_back_tiles(modules)
        flash = [entry for entry in self.made if entry.now and self._is_of_registry(entry, modules)]
        is_asked = isinstance(self.seen, str) or not all(is_apart(modules[name]) for name in self.seen.attention)
        if flash and not is_asked and not any(map(get_change, modules.values())):
            give_back_attention(model)
            self._leave(flash, "none of its modules asks transformers' registry for attention")
            self.seen = probe(model, self.passes, call)
        self.check_applied(model)

    def give_back_tiles(self, modules: dict[str, nn.Module]) -> None:
        """Gives the MLPs in tiles that draw masks, as adapters put in since then do, their classes back."""
        for name, module in modules.items():
            if isinstance(module, TiledMLP) and (why := find_dropout(module)) is not None:
                give_class_back(module)
                self._leave([each for each in self.made if each.name == name and each.operation == "mlp"], f"it {why}")

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def watch_first(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Watches, as a hook before forwards, the first training forward whose inputs differ from the watched ones."""
        if not model.training or self.passes.keeps_all:  # as in a check
            return
        self.passes.samples.check_sequence()
        is_flash = self.choices["attention"] == "flash"
        if self._is_settled and not is_flash:
            return
        changes = [(type(each).__name__, why) for each in model.modules() if (why := get_change(each)) is not None]
        if changes and is_flash:
            kind, why = changes[0]
            raise ValueError(f'attention is "flash", but {kind} {why}, or tempoize with "auto"')
        if self._is_settled or changes:
            return
        self._is_settled = True
        if isinstance(self.seen, str) or args[1:] or any(name not in self.seen.inputs for name in kwargs):
            self.watch(model, (args, kwargs))

    def check(self, model: nn.Module, call: Inputs | None = None) -> None:
        """Compares the model with its stock modules, on made-up inputs without a call, and gives back what differs;
        raises ValueError where that is a value other than "auto" and "off"."""
        has_loss = any(entry.operation == "loss" and entry.now for entry in self.made)
        self.checked, found = check_model(model, self.passes, self._list_units(model), call, has_loss)
        for unit, why in found.items():
            self._give_back(model, unit, why)

    def _list_units(self, model: nn.Module) -> list[Unit]:
        modules, is_asked = dict(model.named_modules()), name_implementation(model) == NAME
        found: dict[tuple[str, str, bool], list[nn.Module]] = {}
        for entry in self.made:
            is_registry = self._is_of_registry(entry, modules)
            if entry.now is not None and (is_asked or not is_registry):
                of_kind = found.setdefault((entry.operation, entry.module, is_registry), [])
                of_kind += [] if is_registry else [modules[entry.name]]
        return [Unit(operation, kind, tuple(each), registry) for (operation, kind, registry), each in found.items()]

    def _give_back(self, model: nn.Module, unit: Unit, why: str) -> None:
        value = self.choices[unit.operation]
        if _is_by_name(unit.operation, value):
            own = why.partition("ValueError: ")[2]
            if own.startswith(f'{unit.operation} is "'):
                raise ValueError(own)
            raise ValueError(_refuse(unit.operation, value, f"{unit.kind}: {why}"))
        if unit.is_registry:
            give_back_attention(model)
        modules: tuple[Any, ...] = unit.modules
        for module in modules:
            head = module.get_output_embeddings() if isinstance(module, FusedLoss) else None
            give_class_back(module)
            if head is not None:
                give_class_back(head)
                change_class(head, DropsInput)
        kind = unit.operation, unit.kind
        self._leave([each for each in self.made if each.now is not None and (each.operation, each.module) == kind], why)

    def _leave(self, entries: list[Entry], why: str) -> None:
        self.made = [each.leave(why) if each in entries else each for each in self.made]

    def check_applied(self, model: nn.Module) -> None:
        """Raises ValueError if a value that was asked for by name applies to nothing."""
        report = self.report(model)
        done = {entry.operation for entry in report.replaced}
        for operation, value in self.choices.items():
            if operation not in done and _is_by_name(operation, value):
                reasons = [entry.why for entry in report.left if entry.operation == operation]
                raise ValueError(_refuse(operation, value, (reasons or ["the model has no module for it"])[0]))

    def report(self, model: nn.Module) -> Report:
        """Returns the report of what is known by now."""
        modules = dict(model.named_modules())
        if isinstance(self.seen, str):
            entries = self._leave_changed(self.made, modules)
            seen = f"What a forward in training runs is not known yet: {self.seen}."
            return Report(tuple(entries), seen, self.checked)
        entries = [entry for made in self.made for entry in self._confirm(made, self.seen, modules)]
        listed = {entry.name for entry in entries if entry.now is None and entry.operation in ("dropout", "attention")}
        for name, functions in self.seen.draws.items():
            is_attention = PLACE in modules[name].__dict__ or any("attention" in function for function in functions)
            if name not in listed:
                why = f"{', '.join(sorted(functions))} draws from torch's generator"
                operation = "attention" if is_attention else "dropout"
                entries.append(Entry(name, type(modules[name]).__name__, operation, None, why))
        seen = f"Seen in a forward in training, without memory, of {self.seen.inputs}."
        return Report(tuple(entries), seen, self.checked)

    def _is_of_registry(self, entry: Entry, modules: dict[str, nn.Module]) -> bool:
        """Returns whether an entry stands for all attention that asks transformers' registry."""
        return entry.operation == "attention" and not is_apart(modules.get(entry.name))

    def _leave_changed(self, entries: Iterable[Entry], modules: dict[str, nn.Module]) -> list[Entry]:
        """Returns these entries; the registry's attention counts as left if another one was set since."""
        why = next(filter(None, map(get_change, modules.values())), None)
        return [
            each.leave(f"it {why}") if why and each.now and self._is_of_registry(each, modules) else each
            for each in entries
        ]

    def _confirm(self, made: Entry, seen: Seen, modules: dict[str, nn.Module]) -> Iterator[Entry]:
        """Yields an entry of `made` as it was seen to run."""
        module, is_loss = modules[made.name], made.operation == "loss"
        if made.now is None:
            yield made
        elif self._is_of_registry(made, modules):
            if not seen.attention:
                yield from (each for each in self._leave_changed([made], modules) if each is not made)
            for name, why in seen.attention.items():
                if not is_apart(modules[name]):
                    yield _confirm_attention(made, name, modules[name], why)
        elif made.operation == "attention" and made.name in seen.attention:
            yield _confirm_attention(made, made.name, module, seen.attention[made.name])
        elif made.operation == "attention" or (not is_loss and made.name not in seen.called):
            yield made.leave("the forward that was watched does not call it")
        elif is_loss:
            is_there = any("linear_cross_entropy" in operators for operators in seen.operators.values())
            yield made if is_there else made.leave("the forward that was watched does not come to its loss")
        elif "forward" in module.__dict__:
            yield made.leave("its forward was replaced on the object itself")
        elif isinstance(module, RedirectsFunctions) and not seen.operators.get(made.name):
            return  # its functions dropped nothing and got nothing that needs a gradient
        elif made.operation == "norm" and not seen.operators.get(made.name):
            yield made.leave("stock ran: it has a gate, or two dtypes")
        else:
            yield made


def _confirm_attention(made: Entry, name: str, module: nn.Module, why: str | None) -> Entry:
    why = get_change(module) or module.__dict__[PLACE].why or why
    found = dataclasses.replace(made, name=name, module=type(module).__name__)
    return found if why is None else found.leave(f"it {why}")


def _is_by_name(operation: str, value: str) -> bool:
    return value not in ("auto", "off", CHOICES[operation][0])


def _refuse(operation: str, value: str, why: str) -> str:
    others = '"auto" or "off"' if "auto" in CHOICES[operation] else '"off"'
    return f'{operation} is "{value}", but {why}; set it to {others}'
