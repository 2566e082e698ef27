"""Defines `tempoize`, which replaces modules of any PyTorch model in place by ones that keep less for backward."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from tempo_torch.alibi import AlibiAttention
from tempo_torch.attention import get_ranks, give_back_attention
from tempo_torch.check import is_slow
from tempo_torch.inputs import make_inputs
from tempo_torch.numbering import get_rank
from tempo_torch.offload import offload_layers
from tempo_torch.position import Passes
from tempo_torch.replace import give_class_back
from tempo_torch.replacements import is_apart, replace_attention, replace_losses, replace_modules
from tempo_torch.report import Entry, Report
from tempo_torch.state import CHOICES, State
from tempo_torch.versions import check_versions

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
            nn.MultiheadAttention and in models of transformers on "sdpa", and in BLOOM and MPT.
        loss: "fused" (and "auto") makes the logits of a causal language model a chunk of tokens at a time.
        mlp: "tile" runs the MLPs of transformers' models a tile of tokens at a time. They keep their input only, and
            both linears run again in backward. Under DeepSpeed's ZeRO 3 call tempoize before deepspeed.initialize.
            Under torch.compile tiles run between the graphs: fullgraph=True fails in training.
        offload: "all" moves what the layers keep to pinned host memory after their forward, and back before their
            backward; so do, for themselves, names of modules in a layer joined by "+", such as "mlp.down_proj", and
            "input", the input of a layer that torch.utils.checkpoint runs again. Layers are the modules of the
            outermost nn.ModuleLists.
        offload_ahead: how many layers before the one whose backward runs are copied back meanwhile. With 0 backward
            waits for its layer, and one layer less is on the GPU.
        rank, num_ranks: this process among those that train on different samples. By default those of
            torch.distributed, and of the mesh of a model that transformers distributed.
        sequence_ranks: how many ranks share the tokens of a sample and, in attention, its heads, as under DeepSpeed's
            Ulysses: rank r of torch.distributed has the samples of rank r // sequence_ranks, and the part
            r % sequence_ranks of each. Attention then draws the masks of one process, and so does other dropout of
            [samples, tokens, ...], if all ranks have as many tokens.
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
    ranks = get_ranks(model)
    if sequence_ranks != 1:
        ranks = _divide_sequence(sequence_ranks, ranks)
    if rank is None and ranks:
        rank, num_ranks = ranks["samples"]
    given = (seed, choices, offload, offload_ahead, rank, num_ranks, sequence_ranks)
    before = _take_before(model, given)
    passes, entries = before or (Passes(seed, rank, num_ranks, ranks.get("sequence", (0, 1))), [])
    entries += replace_modules(model, choices, passes)
    if attention != "off" and _wants_attention(model, entries):
        entries.append(replace_attention(model, choices, passes, ranks.get("heads", (0, 1))))
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
    are_numbers = type(rank) is int and type(num_ranks) is int and 0 <= rank < num_ranks
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


def _divide_sequence(size: int, ranks: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Returns what get_ranks does, and "sequence", for `size` ranks that share a sample's tokens."""
    rank, total = get_rank()
    if ranks or total % size:
        here = "a model with tensor parallelism" if ranks else f"{total} ranks of torch.distributed"
        raise ValueError(
            f"sequence_ranks is {size} for {here}; expected a number that divides the ranks, and no tensor "
            "parallelism; call deepspeed.init_distributed first"
        )
    place, sample = (rank % size, size), (rank // size, total // size)
    return {"heads": place, "sequence": place, "samples": sample}


def _wants_attention(model: Any, entries: list[Entry]) -> bool:
    """Returns whether an entry for all attention that asks transformers' registry is missing."""
    modules = dict(model.named_modules())
    if any(isinstance(module, AlibiAttention) for module in modules.values()):
        return False
    if any(map(is_apart, modules.values())) and not hasattr(model, "set_attn_implementation"):
        return False
    return all(entry.operation != "attention" or is_apart(modules.get(entry.name)) for entry in entries)


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
    and of the first parameter of each kind, and of small ones the last, must agree. The bound is four times in
    16 bits, and else 16 times, what one rounding of every module's output and gradient does to stock, at least two
    roundings and 4e-6 of the largest element. What differs is given back to stock, and the report says so.

    It costs forward and backward of 2 x 32 tokens, with padding once more, each twice, and a third time where the two
    differ by more than two roundings; and the memory of at most 2**28 elements of gradients, twice. No random state,
    buffer, cache, counter or .grad is changed. What a few tokens do not reach, as a window of 4,096, is not seen.

    Raises ValueError where a value other than "auto" and "off" differs.
    """
    module, state = _get_state(model)
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
    """Returns the module that was given to tempoize, `model` or one inside it, and its state."""
    for module in model.modules():
        if isinstance(state := module.__dict__.get(_ATTRIBUTE), State):
            return module, state
    raise ValueError(
        f"{type(model).__name__} was not given to tempoize; expected a model that was; call tempoize first"
    )
