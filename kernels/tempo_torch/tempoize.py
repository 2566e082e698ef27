"""Defines `tempoize`, which replaces modules of any PyTorch model in place by ones that keep less for backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from tempo_kernels import KEEPS
from tempo_kernels.offload import Offload
from tempo_torch.activation import IN_PLACE, Activation, is_activation, name_activation
from tempo_torch.alibi import AlibiAttention, find_alibi
from tempo_torch.attention import (
    NAME,
    PLACE,
    AttentionPlace,
    find_change,
    find_ranks,
    give_back_attention,
    name_implementation,
    use_attention,
)
from tempo_torch.check import Unit, check_model, is_slow
from tempo_torch.dropout import RedrawnDropout
from tempo_torch.experts import RecomputesExperts, find_experts_refusal, is_experts
from tempo_torch.functional import RedirectsFunctions, find_functions, redirect
from tempo_torch.linear import DropsInput
from tempo_torch.loss import FusedLoss, is_language_model, use_fused_loss
from tempo_torch.mlp import TiledMLP, find_dropout, find_mlp_refusal, is_mlp
from tempo_torch.multihead import MultiheadAttention
from tempo_torch.norm import choose_value, find_norm
from tempo_torch.offload import offload_layers
from tempo_torch.position import Passes
from tempo_torch.probe import Call, Seen, make_inputs, probe
from tempo_torch.projections import TiledProjections, is_projected_attention
from tempo_torch.replace import Replaced, change_class, give_class_back
from tempo_torch.report import Entry, Report
from tempo_torch.versions import check_versions

CHOICES = {
    "activation": ("auto", "recompute", "inplace", "off"),
    "norm": ("auto", "inplace", "recompute", "off"),
    "dropout": ("recompute", "auto", "off"),
    "attention": ("auto", "flash", "off"),
    "loss": ("auto", "fused", "off"),
    "mlp": ("off", "tile"),
    "qkv": ("off", "tile"),
    "check": ("auto", "off"),
}
"""The values of each argument of `tempoize`, the default first."""

_OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ATTRIBUTE = "tempo"

Model = TypeVar("Model", bound=nn.Module)


class _State:
    """The state that `tempoize` attaches to a model.

    Args:
        made: the entries of modules that were replaced or left.
        given: the arguments of tempoize.
    """

    def __init__(self, passes: Passes, choices: dict[str, str], made: list[Entry], given: tuple[Any, ...] = ()) -> None:
        self.passes, self.choices, self.made, self.given = passes, choices, made, given
        self.offloads: list[Offload] = []
        self.seen: Seen | str = "its inputs are not; the first one tells"
        self.checked = 'not checked: check is "off"; check(model, **batch) does it'
        self._is_settled = False

    def watch(self, model: nn.Module, call: Call) -> None:
        """Finds out what model(*args, **kwargs) runs. If no module asks for Tempo's attention, stock's comes back.

        Raises ValueError if a value other than "auto" and "off" applies to nothing that runs.
        """
        modules = dict(model.named_modules())
        calls: dict[str, Call | None] = {
            name: None for name, module in modules.items() if isinstance(module, TiledProjections)
        }
        self.seen = probe(model, self.passes, call, calls)
        self.give_back_whole(modules, calls)
        flash = _find_of_registry(modules, self.made)
        is_asked = isinstance(self.seen, Seen) and any(not _is_apart(modules[name]) for name in self.seen.attention)
        is_changed = any(map(find_change, modules.values()))
        if isinstance(self.seen, Seen) and not (is_asked or is_changed) and flash is not None and flash.now is not None:
            give_back_attention(model)
            why = "none of its modules asks transformers' registry for attention"
            self._leave([flash], why)
            self.seen = probe(model, self.passes, call)
        _check_applied(self.report(model), self.choices)

    def give_back_whole(self, modules: dict[str, nn.Module], calls: dict[str, Call | None]) -> None:
        """Gives those modules their classes back that compute something else in tiles, or draw masks there."""
        for name, module in modules.items():
            if not isinstance(module, TiledProjections | TiledMLP):
                continue
            why = find_dropout(module)  # as adapters put in since then have it
            if why is None and isinstance(module, TiledProjections) and (call := calls.get(name)) is not None:
                why = module.find_refusal(*call[0], **call[1])
            if why is not None:
                if isinstance(module, TiledProjections):
                    module.leave_norms()
                    module.__dict__[PLACE].is_always_ours = False
                give_class_back(module)
                self._leave(
                    [each for each in self.made if each.name == name and each.operation in ("mlp", "qkv")], f"it {why}"
                )

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def watch_first(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Watches, as a hook before forwards, the first training forward whose inputs differ from the watched ones."""
        if model.training:
            self.passes.check_sequence()
            if self.choices["attention"] == "flash":
                _check_unchanged(model)
        if self._is_settled or not model.training or any(map(find_change, model.modules())):
            return
        self._is_settled = True
        if isinstance(self.seen, str) or args[1:] or any(name not in self.seen.inputs for name in kwargs):
            self.watch(model, (args, kwargs))

    def check(self, model: nn.Module, call: Call | None = None) -> None:
        """Compares the model with its stock modules, on made-up inputs without a call, and gives back what differs.

        Raises ValueError where that is a value other than "auto" and "off".
        """
        has_loss = any(entry.operation == "loss" and entry.now for entry in self.made)
        before, self._is_settled = self._is_settled, True  # no forward of the check is the first
        try:
            found = check_model(model, self.passes, self._list_units(model), call, has_loss)
        finally:
            self._is_settled = before
        self.checked = found.text
        for unit, why in found.units.items():
            self._give_back(model, unit, why)

    def _list_units(self, model: nn.Module) -> list[Unit]:
        modules = dict(model.named_modules())
        found: dict[tuple[str, str, bool], list[nn.Module]] = {}
        for entry in self.made:
            module = modules[entry.name]
            is_registry = entry.operation == "attention" and not _is_apart(module)
            if entry.now is not None:
                found.setdefault((entry.operation, entry.module, is_registry), []).append(module)
        is_asked = name_implementation(model) == NAME
        return [
            Unit(operation, kind, () if is_registry else tuple(replaced), is_registry)
            for (operation, kind, is_registry), replaced in found.items()
            if is_asked or not is_registry
        ]

    def _give_back(self, model: nn.Module, unit: Unit, why: str) -> None:
        value = self.choices[unit.operation]
        if value not in ("auto", "off", CHOICES[unit.operation][0]):
            own = why.partition("ValueError: ")[2]
            if own.startswith(f'{unit.operation} is "'):
                raise ValueError(own)
            others = '"auto" or "off"' if "auto" in CHOICES[unit.operation] else '"off"'
            raise ValueError(f'{unit.operation} is "{value}", but {unit.kind}: {why}; set it to {others}')
        if unit.is_registry:
            give_back_attention(model)
        for module in unit.modules:
            head: Any = module.get_output_embeddings() if isinstance(module, FusedLoss) else None
            give_class_back(module)
            if head is not None:
                give_class_back(head)
                change_class(head, DropsInput)
        kind = unit.operation, unit.kind
        self._leave([each for each in self.made if each.now is not None and (each.operation, each.module) == kind], why)

    def _leave(self, entries: list[Entry], why: str) -> None:
        """Notes that the modules of these entries are stock again."""
        self.made = [dataclasses.replace(each, now=None, why=why) if each in entries else each for each in self.made]

    def report(self, model: nn.Module) -> Report:
        """Builds the report of what is known by now."""
        modules = dict(model.named_modules())
        if isinstance(self.seen, str):
            entries = [_confirm_by_name(entry, modules) for entry in self.made]
            return Report(tuple(entries), f"What a forward in training runs is not known yet: {self.seen}.")
        entries = [entry for made in self.made for entry in _confirm(made, self.seen, modules)]
        listed = {entry.name for entry in entries if entry.now is None and entry.operation in ("dropout", "attention")}
        for name, functions in self.seen.draws.items():
            is_attention = PLACE in modules[name].__dict__ or any("attention" in function for function in functions)
            if name not in listed:
                why = f"{', '.join(sorted(functions))} draws from torch's generator"
                operation = "attention" if is_attention else "dropout"
                entries.append(Entry(name, type(modules[name]).__name__, operation, None, why))
        return Report(tuple(entries), f"Seen in a forward in training, without memory, of {self.seen.inputs}.")


def _confirm_by_name(made: Entry, modules: dict[str, nn.Module]) -> Entry:
    """Returns an entry of `made` as left if it stands for all attention and another one was set since."""
    why = next(filter(None, map(find_change, modules.values())), None)
    is_other = made.operation != "attention" or made.now is None or _is_apart(modules.get(made.name))
    return made if is_other or why is None else dataclasses.replace(made, now=None, why=f"it {why}")


def _confirm(made: Entry, seen: Seen, modules: dict[str, nn.Module]) -> Iterator[Entry]:
    """Yields an entry of `made` as it was seen to run."""
    operators = {operator for found in seen.operators.values() for operator in found}
    if made.now is None:
        yield made
    elif made.operation == "attention":
        is_own = _is_apart(modules[made.name])
        if is_own and made.name not in seen.attention:
            yield dataclasses.replace(made, now=None, why="the forward that was watched does not call it")
        if not seen.attention and (marked := _confirm_by_name(made, modules)) is not made:
            yield marked
        for name, why in seen.attention.items():
            if name != made.name if is_own else _is_apart(modules[name]):
                continue
            why = find_change(modules[name]) or modules[name].__dict__[PLACE].why or why
            now = made.now if why is None else None
            kind = type(modules[name]).__name__
            yield dataclasses.replace(made, name=name, module=kind, now=now, why="" if why is None else f"it {why}")
    elif made.operation != "loss" and made.name not in seen.called:
        yield dataclasses.replace(made, now=None, why="the forward that was watched does not call it")
    elif made.operation == "loss" and "linear_cross_entropy" not in operators:
        yield dataclasses.replace(made, now=None, why="the forward that was watched does not come to its loss")
    elif made.operation != "loss" and "forward" in modules[made.name].__dict__:
        yield dataclasses.replace(made, now=None, why="its forward was replaced on the object itself")
    elif isinstance(modules[made.name], RedirectsFunctions) and not seen.operators.get(made.name):
        return  # its functions dropped nothing and got nothing that needs a gradient
    elif made.operation == "norm" and not seen.operators.get(made.name):
        yield dataclasses.replace(made, now=None, why="stock ran: it has a gate, or two dtypes")
    else:
        yield made


def _check_unchanged(model: nn.Module) -> None:
    """Raises ValueError if a module got another attention than Tempo's since tempoize."""
    for module in model.modules():
        if (why := find_change(module)) is not None:
            raise ValueError(f'attention is "flash", but {type(module).__name__} {why}, or tempoize with "auto"')


def _is_apart(module: nn.Module | None) -> bool:
    """Whether a module is one of Tempo's that asks no registry for attention, and has an entry of its own."""
    return isinstance(module, MultiheadAttention | AlibiAttention)


def _find_of_registry(modules: dict[str, nn.Module], entries: list[Entry]) -> Entry | None:
    """Finds the entry for all attention that asks transformers' registry."""
    found = (entry for entry in entries if entry.operation == "attention")
    return next((entry for entry in found if not _is_apart(modules.get(entry.name))), None)


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
    qkv: str = "off",
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
        model: any module; its modules are replaced wherever they are. Modules of transformers and peft are recognised
            if these are imported.
        seed: the seed of the dropout masks, equal on all ranks.
        activation: "recompute" keeps an activation's input and frees its output once a linear has used it; "inplace"
            keeps the output and, for GELU, a bit per element; "auto" is "recompute", which is right whatever follows.
        norm: "inplace" keeps a norm's output; "recompute" its input; "auto" is "inplace", and "recompute" where
            torch.compile compiles the model or where weights are too small for their biases (`tempo_kernels.norm`).
        dropout: "recompute" (and "auto") draws masks again by position; see `samples`.
        attention: "flash" (and "auto") gives attention with dropout a mask by position and no s*s tensor, in
            nn.MultiheadAttention and in models of transformers on "sdpa", and in BLOOM and MPT.
        loss: "fused" (and "auto") makes the logits of a causal language model a chunk of tokens at a time.
        mlp: "tile" computes the MLPs of transformers' models a tile of tokens at a time, in forward and in backward,
            so that they keep their input only and nothing as wide as their inner size is there for all tokens; both
            linears run again in backward. Under DeepSpeed's ZeRO 3 call tempoize before deepspeed.initialize. Under
            torch.compile tiles run between the graphs, here and for qkv: fullgraph=True fails in training.
        qkv: "tile" lets attention of transformers' models with rotary embeddings keep the input of the norm in front of
            it, and attention's output: q, k and v are made again in backward, and norm, projections and rotary
            embeddings run for a tile of tokens at a time. Attention is then Tempo's also without dropout. A module that
            computes something else in tiles, by a trial on a few tokens, stays, and the report says why. Training
            with a cache of keys and values raises ValueError: set model.config.use_cache = False.
        offload: "all" moves what the layers keep to pinned host memory after their forward, and back before their
            backward; so do, for themselves, names of modules in a layer joined by "+", such as "mlp.down_proj", and
            "input", the input of a layer that torch.utils.checkpoint runs again. Layers are the modules of the
            outermost nn.ModuleLists.
        offload_ahead: how many layers before the one whose backward runs are copied back meanwhile. With 0 a layer is
            copied back when its backward begins, which then waits for it, and one layer less is on the GPU.
        rank, num_ranks: this process among those that train on different samples. By default those of
            torch.distributed, and of the mesh of a model that transformers distributed; give them if processes share
            samples in another way.
        sequence_ranks: how many ranks share the tokens of a sample and, in attention, its heads, as under DeepSpeed's
            Ulysses: rank r of torch.distributed has the samples of rank r // sequence_ranks, and the part
            r % sequence_ranks of each. Attention then draws the masks of one process, and so does other
            dropout of [samples, tokens, ...], if all ranks have as many tokens.
        check: "auto" compares a model of transformers with its stock modules on made-up inputs, as `check` does.

    Each operation may be "off". If an "auto" does not apply, modules stay, and `report_on` says why.

    Keeps for backward: see `report_on(model)`.
    Raises ValueError for an unknown value, for a model that was given to tempoize with other arguments, and if a value
        other than "auto" and "off" has nothing to apply to, or makes the model differ from stock.
    """
    choices = {"activation": activation, "norm": norm, "dropout": dropout, "attention": attention, "loss": loss}
    choices |= {"mlp": mlp, "qkv": qkv}
    _check(model, seed, {**choices, "check": check}, rank, num_ranks)
    _check_numbers(offload, offload_ahead, sequence_ranks)
    ranks = find_ranks(model)
    if sequence_ranks != 1:
        ranks = _divide_sequence(sequence_ranks, ranks)
    if rank is None and ranks:
        rank, num_ranks = ranks["samples"]
    given = (seed, choices, offload, offload_ahead, rank, num_ranks, sequence_ranks)
    before = _take_before(model, given)
    passes, entries = before or (Passes(seed, rank, num_ranks, ranks.get("sequence", (0, 1))), [])
    for name, module in list(model.named_modules()):
        if isinstance(module, Replaced):
            continue
        for replace in _REPLACEMENTS:
            if (entry := replace(name, module, choices, passes)) is not None:
                entries.append(entry)
                break
    modules = dict(model.named_modules())
    is_enough = any(isinstance(module, AlibiAttention) for module in modules.values())
    is_enough |= any(map(_is_apart, modules.values())) and not hasattr(model, "set_attn_implementation")
    if choices["attention"] != "off" and not is_enough and _find_of_registry(modules, entries) is None:
        entries.append(_replace_attention(model, choices, passes, ranks.get("heads", (0, 1))))
    if choices["loss"] != "off":
        entries += _replace_losses(model)
    _finish_projections(model, entries)
    model.__dict__[_ATTRIBUTE] = state = _State(passes, choices, entries, given)
    passes.follow(model)
    call = make_inputs(model, any(entry.operation == "loss" and entry.now for entry in entries))
    state.give_back_whole(dict(model.named_modules()), {})
    if call is not None:
        state.watch(model, call)
    _check_applied(state.report(model), choices)
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


def _divide_sequence(size: int, ranks: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Returns what find_ranks does, and "sequence", for `size` ranks that share a sample's tokens."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, total = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_there else (0, 1)
    if ranks or total % size:
        here = "a model with tensor parallelism" if ranks else f"{total} ranks of torch.distributed"
        raise ValueError(
            f"sequence_ranks is {size} for {here}; expected a number that divides the ranks, and no tensor "
            "parallelism; call deepspeed.init_distributed first"
        )
    place, sample = (rank % size, size), (rank // size, total // size)
    return {"heads": place, "sequence": place, "samples": sample}


def _take_before(model: nn.Module, given: tuple[Any, ...]) -> tuple[Passes, list[Entry]] | None:
    """Takes the passes and entries off a model that was given to tempoize before; None if it was not."""
    found = [(name, module) for name, module in model.named_modules() if _ATTRIBUTE in module.__dict__]
    if not found:
        return None
    (name, module), *others = found
    state: _State = module.__dict__[_ATTRIBUTE]
    if others or state.given != given:
        raise ValueError(
            f"{type(model).__name__} was given to tempoize before, with other arguments or in parts; expected the same "
            "arguments again; call restore first"
        )
    del module.__dict__[_ATTRIBUTE]
    state.passes.leave()
    _stop_offload(state)
    names = {each for each, _ in model.named_modules()}
    prefix = f"{name}." if name else ""
    moved = [dataclasses.replace(entry, name=f"{prefix}{entry.name}".rstrip(".")) for entry in state.made]
    # Modules that were left may have been exchanged since, so they are examined again.
    stays = (entry for entry in moved if entry.now is not None or entry.operation == "attention")
    return state.passes, [entry for entry in stays if entry.name in names]


def _stop_offload(state: _State) -> None:
    for offload in state.offloads:
        offload.remove()
    state.offloads = []


def restore(model: Model) -> Model:
    """Undoes `tempoize` in place: modules get their own classes back, the model its attention and its loss.

    Parameters stay the same objects under the same names. Raises ValueError for a model that was not given to tempoize,
    and if FSDP2 has changed the classes of modules since.
    """
    state = _find(model)[1]
    state.passes.leave()
    _stop_offload(state)
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
    module, state = _find(model)
    return dataclasses.replace(state.report(module), checked=state.checked)


def check(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Compares `model`, which was given to tempoize, with its stock modules on a call model(*args, **kwargs); returns
    what the report then says of it. Without arguments it makes up inputs, as tempoize does.

    Both run forward and backward in training, and every dropout keeps all. Loss or outputs, the gradients of embeddings
    and those of the first parameter of each kind, and of small ones the last, must agree. The bound is four times in
    16 bits, and else 16 times, what one rounding of every module's output and gradient does to stock, at least two
    roundings and 4e-6 of the largest element. What differs is given back to stock, and the report says so.

    It costs forward and backward of 2 x 32 tokens, with padding once more, each twice, and a third time where the two
    differ by more than two roundings; and the memory of at most 2**28 elements of gradients, twice. No random state,
    buffer, cache, counter or .grad is changed. What a few tokens do not reach, as a window of 4,096, is not seen.

    Raises ValueError where a value other than "auto" and "off" differs.
    """
    module, state = _find(model)
    state.check(module, (args, kwargs) if args or kwargs else None)
    return state.checked


@contextlib.contextmanager
def samples(model: nn.Module, first_sample: int, num_samples: int | None = None) -> Iterator[None]:
    """Says which samples the forwards of `model` inside the context see, one batch after the other.

    Args:
        model: one that was given to tempoize, or a wrapper of it.
        first_sample: index of the first batch's first sample over the whole run, as if one device consumed all samples
            in order; in [0, 2**47). The samples of a batch are consecutive.
        num_samples: samples of each batch; by default the first dimension of the model's main input, which is wrong
            where that is [tokens, samples, h].

    Without it, training forwards are counted: if all batches of a run have one size, the masks are those of a single
    process that sees the batches of all ranks one after another. `set_step` continues the count after a resume.
    Raises ValueError for another index, for fewer than one sample, or for another model.
    """
    with _find(model)[1].passes.set_next(first_sample, num_samples):
        yield


def set_step(model: nn.Module, num_forwards: int, num_samples: int | None = None) -> None:
    """Continues the count of training forwards, as after loading a checkpoint.

    Args:
        num_forwards: the training forwards so far.
        num_samples: samples in the first forward of the run, by which later forwards are spaced. By default those of
            this model's first forward; needed if the run may continue with a smaller batch.

    `read_step` returns both, for a checkpoint.
    """
    if num_forwards < 0:
        raise ValueError(f"num_forwards is {num_forwards}; expected at least 0, the forwards in training so far")
    if num_samples is not None and num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; expected at least 1, the samples of the run's first forward")
    passes = _find(model)[1].passes
    passes.num_steps = num_forwards
    if num_samples is not None:
        passes.step_samples = num_samples


def read_step(model: nn.Module) -> tuple[int, int | None]:
    """Returns the arguments of `set_step`: (training forwards so far, samples of the first one or None before it)."""
    passes = _find(model)[1].passes
    return passes.num_steps, passes.step_samples


def is_tempoized(model: nn.Module) -> bool:
    """Whether a model, or a module in it, was given to tempoize."""
    return any(isinstance(module.__dict__.get(_ATTRIBUTE), _State) for module in model.modules())


def _find(model: nn.Module) -> tuple[nn.Module, _State]:
    """Returns the module that was given to tempoize, `model` or one inside it, and its state."""
    for module in model.modules():
        if isinstance(state := module.__dict__.get(_ATTRIBUTE), _State):
            return module, state
    raise ValueError(
        f"{type(model).__name__} was not given to tempoize; expected a model that was; call tempoize first"
    )


def _check(model: Any, seed: Any, choices: dict[str, str], rank: int | None, num_ranks: int | None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}; expected a torch.nn.Module; build the model first")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed is {seed!r}; expected an integer, equal on all ranks")
    check_versions({type(module).__module__.partition(".")[0] for module in model.modules()})
    for name, value in choices.items():
        if value not in CHOICES[name]:
            values = ", ".join(f'"{choice}"' for choice in CHOICES[name])
            raise ValueError(f"{name} is {value!r}; expected one of {values}")
    are_numbers = type(rank) is int and type(num_ranks) is int and 0 <= rank < num_ranks
    if not are_numbers and (rank is not None or num_ranks is not None):
        raise ValueError(
            f"rank is {rank!r} and num_ranks {num_ranks!r}; expected both, with 0 <= rank < num_ranks, or none"
        )
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise ValueError(
            f"model is a {type(model).__name__}, which is compiled; expected the model itself; compile it later"
        )


def _check_numbers(offload: Any, offload_ahead: Any, sequence_ranks: Any) -> None:
    if not isinstance(offload, str):
        raise ValueError(f'offload is {offload!r}; expected "off", "all" or names of modules joined by "+"')
    if type(offload_ahead) is not int or offload_ahead < 0:
        raise ValueError(f"offload_ahead is {offload_ahead!r}; expected a number of layers; give 0, 1 or more")
    if type(sequence_ranks) is not int or sequence_ranks < 1:
        raise ValueError(f"sequence_ranks is {sequence_ranks!r}; expected a number of ranks; give 1 or more")


def _check_applied(report: Report, choices: dict[str, str]) -> None:
    done = {entry.operation for entry in report.replaced}
    for operation, value in choices.items():
        if value in ("auto", "off") or operation in done or value == CHOICES[operation][0]:
            continue
        reasons = [entry.why for entry in report.left if entry.operation == operation]
        why = reasons[0] if reasons else "the model has no module for it"
        others = '"auto" or "off"' if "auto" in CHOICES[operation] else '"off"'
        raise ValueError(f'{operation} is "{value}", but {why}; set it to {others}')


def _replace_norm(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Entry | None:
    found = find_norm(module) if choices["norm"] != "off" else None
    if found is None:
        return None
    kind = type(module).__name__
    if isinstance(found, str):
        return Entry(name, kind, "norm", None, found)
    mixin, attributes = found
    is_auto = choices["norm"] == "auto"
    value = choose_value(module, attributes.get("zero_centered", False)) if is_auto else choices["norm"]
    compiled_value = "recompute" if is_auto else value
    change_class(module, mixin, **attributes, keep=KEEPS[value], compiled_keep=KEEPS[compiled_value])
    return Entry(name, kind, "norm", value, stock_bytes=2.0)


def _replace_activation(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Entry | None:
    if choices["activation"] == "off" or not is_activation(module):
        return None
    function, kind = name_activation(module), type(module).__name__
    if function is None:
        return Entry(name, kind, "activation", None, "Tempo has gelu, quick_gelu, silu and squared relu only")
    value = "recompute" if choices["activation"] == "auto" else choices["activation"]
    keep = KEEPS[value]
    if keep == "output" and function not in IN_PLACE:
        return Entry(name, kind, "activation", None, f"in place exists for {', '.join(IN_PLACE)} only")
    change_class(module, Activation, function=function, keep=keep)
    bits = 0.125 if keep == "output" and function.startswith("gelu") else 0.0
    stock = 4.0 if keep == "input" else 2.0
    return Entry(name, kind, "activation", value, stock_bytes=stock, tempo_bytes=2.0 if keep == "input" else bits)


def _replace_experts(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Entry | None:
    if choices["activation"] == "off" or not is_experts(module):
        return None
    kind, why = type(module).__name__, find_experts_refusal(module)
    if why is None and choices["activation"] == "inplace":
        why = "a gated activation cannot be computed from its output"
    if why is not None:
        return Entry(name, kind, "activation", None, why)
    change_class(module, RecomputesExperts)
    return Entry(name, kind, "activation", "recompute", stock_bytes=1.0)


def _replace_dropout(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> Entry | None:
    kind = type(module).__name__
    if choices["dropout"] == "off":
        return None
    if isinstance(module, _OTHER_DROPOUTS):
        return Entry(name, kind, "dropout", None, "it drops channels, or changes more than it drops")
    if not isinstance(module, nn.Dropout):
        return None
    if type(module) is not nn.Dropout or module.inplace:
        return Entry(name, kind, "dropout", None, "it writes in place, or is a class of its own")
    # peft's dropout: other adapters of the same input, and without dropout this one, keep its input anyway.
    is_lora = ".lora_dropout." in f".{name}"
    change_class(module, RedrawnDropout, place=passes.add_place(name), keeps_input=is_lora)
    return Entry(name, kind, "dropout", "recompute", stock_bytes=3.0 if is_lora else 1.0)


def _replace_linear(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Entry | None:
    if type(module) is nn.Linear or (type(module).__name__, type(module).__module__) == (
        "Conv1D",
        "transformers.pytorch_utils",
    ):
        change_class(module, DropsInput)
    return None


def _replace_multihead(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> Entry | None:
    if choices["attention"] == "off" or type(module) is not nn.MultiheadAttention or not module.dropout:
        return None  # without dropout stock keeps what ours keeps and draws nothing
    place = AttentionPlace(passes.add_place(name), choices["attention"] == "flash")
    change_class(module, MultiheadAttention, **{PLACE: place})
    return Entry(name, "MultiheadAttention", "attention", "flash")


def _replace_alibi(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> Entry | None:
    if choices["attention"] == "off" or (found := find_alibi(module)) is None:
        return None
    mixin, slopes = found
    kind, stock = type(module).__name__, type(module)
    redirect(stock)
    redirected = frozenset(operation for operation in find_functions(stock) if choices[operation] != "off")
    place = AttentionPlace(passes.add_place(f"{name}.attention"), choices["attention"] == "flash")
    given = {"redirected": redirected, "function_place": passes.add_place(f"{name}.functional"), PLACE: place}
    change_class(module, mixin, slopes=slopes, **given)
    return Entry(name, kind, "attention", "flash")


def _replace_losses(model: nn.Module) -> list[Entry]:
    heads = [(name, module) for name, module in model.named_modules() if is_language_model(module)]
    entries = []
    for name, module in heads:
        kind, is_new = type(module).__name__, not isinstance(module, FusedLoss)
        why = use_fused_loss(module)
        if is_new:
            entries.append(Entry(name, kind, "loss", "fused" if why is None else None, why or ""))
    if not heads:
        entries.append(Entry("", type(model).__name__, "loss", None, "it is no language model of transformers"))
    return entries


def _replace_functions(name: str, module: nn.Module, choices: dict[str, str], passes: Passes) -> Entry | None:
    kind, found = type(module).__name__, find_functions(type(module))
    operations = [operation for operation in found if choices[operation] != "off"]
    if not operations:
        return None
    redirect(type(module))  # made here, so that a compiler need not make it
    place = passes.add_place(f"{name}.functional")
    change_class(module, RedirectsFunctions, redirected=frozenset(operations), function_place=place)
    is_dropout = operations[0] == "dropout"
    return Entry(
        name,
        kind,
        operations[0],
        "recompute",
        stock_bytes=1.0 if is_dropout else 4.0,
        tempo_bytes=0.0 if is_dropout else 2.0,
    )


def _replace_mlp(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Entry | None:
    if choices["mlp"] == "off" or not is_mlp(module):
        return None
    kind, why = type(module).__name__, find_mlp_refusal(module)
    if why is not None:
        return Entry(name, kind, "mlp", None, why)
    # ZeRO 3 then gathers its weights once for all tiles (deepspeed/utils/z3_leaf_module.py).
    change_class(module, TiledMLP, _z3_leaf=True)
    return Entry(name, kind, "mlp", "tile")


def _replace_projections(name: str, module: nn.Module, choices: dict[str, str], _: Passes) -> Entry | None:
    if choices["qkv"] == "off" or not is_projected_attention(module):
        return None
    kind = type(module).__name__
    if choices["attention"] == "off":
        why = "attention is off, and only Tempo's gives back in backward what it made in forward"
        return Entry(name, kind, "qkv", None, why)
    # As for an MLP in tiles, ZeRO 3 gathers its weights once.
    change_class(module, TiledProjections, _z3_leaf=True, tempo_norms=[], tempo_ways={})
    return Entry(name, kind, "qkv", "tile")


def _finish_projections(model: nn.Module, entries: list[Entry]) -> None:
    """Lets tiled projections follow the norms of their layers, and Tempo's attention serve all their calls."""
    left = [entry.why for entry in entries if entry.operation == "attention" and entry.now is None]
    for layer in model.modules():
        for child in layer.children():
            if isinstance(child, TiledProjections):
                child.follow_norms(layer.children())
                place: AttentionPlace | None = child.__dict__.get(PLACE)
                if place is None:
                    why = left[0] if left else 'attn_implementation is not "sdpa"'
                    raise ValueError(
                        f'qkv is "tile", but {type(child).__name__} does not get Tempo\'s attention: {why}; set qkv to '
                        '"off"'
                    )
                place.is_always_ours = True


_REPLACEMENTS = (
    _replace_projections,
    _replace_mlp,
    _replace_norm,
    _replace_experts,
    _replace_activation,
    _replace_dropout,
    _replace_linear,
    _replace_multihead,
    _replace_alibi,
    _replace_functions,
)


def _replace_attention(model: nn.Module, choices: dict[str, str], passes: Passes, head_ranks: tuple[int, int]) -> Entry:
    kind = type(model).__name__
    why = use_attention(model)
    if why is not None:
        return Entry("", kind, "attention", None, why)
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__ and not _is_apart(module):
            place = passes.add_place(f"{name}.attention")
            module.__dict__[PLACE] = AttentionPlace(
                place, choices["attention"] == "flash", *head_ranks, implementation=name_implementation(module)
            )
    return Entry("", kind, "attention", "flash", stock_bytes=0.0)
