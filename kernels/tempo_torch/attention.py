"""Gives models of transformers attention with dropout, through their registry of attention functions.

Without dropout stock attention runs, which keeps what ours keeps: q, k, v, the output and a logsumexp. With dropout
torch keeps an s*s tensor on a CPU, and on a GPU draws from a generator, so that masks depend on all earlier draws.
Sinks (gpt-oss) and capped scores (Gemma 2), which torch's attention does not have, are ours with and without dropout.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tempo_kernels.attention import attention
from tempo_kernels.recompute import adopt
from tempo_torch.position import DropoutPlace

Result = TypeVar("Result")
NAME = "tempo"
PLACE = "tempo_place"
"""The attribute of an attention module that holds its AttentionPlace."""

_KNOWN = frozenset("cache dropout is_causal position_bias s_aux scaling softcap".split())
"""Keyword arguments of a call that Tempo's attention reads."""
_HARMLESS = frozenset(
    "cu_seq_lens_k cu_seq_lens_q cu_seqlens deterministic labels logits_to_keep max_length_k max_length_q max_seqlen "
    "max_seqlen_k max_seqlen_q num_items_in_batch output_attentions output_hidden_states output_router_logits "
    "position_ids return_dict seq_idx shift_labels sliding_window target_dtype use_cache cache_position".split()
)
"""Those that change no result of torch's attention: the mask has windows and documents already."""


@dataclasses.dataclass
class AttentionPlace:
    """The state of an attention module that its dropout needs.

    Args:
        place: where it draws.
        is_required: whether a call that Tempo's attention cannot serve is an error; otherwise stock serves it.
        head_ranks: (this process among those that share the heads of one attention, how many they are).
        was_called: whether the module asked for attention.
        implementation: the name of its attention that its configuration had when tempoize was called.
        why: the reason of the last call with dropout that stock served.
    """

    place: DropoutPlace
    is_required: bool = False
    head_ranks: tuple[int, int] = (0, 1)
    was_called: bool = False
    why: str | None = None
    implementation: str | None = None

    def note_call(self) -> None:
        """Notes that the module asked for attention."""
        if not self.was_called:  # a write that a compiler would trace in every call
            self.was_called = True

    def draw(self, module: Any, device: torch.device, num_rows: int, num_heads: int, p: float) -> dict[str, Any]:
        """Returns the arguments of attention's dropout for a batch of `num_rows` and this process's heads."""
        key, first_sample, _ = self.place.draw(device, num_rows)
        p, first_head = self.place.passes.get_probability(p), self._get_first_head(module, num_heads)
        return {"dropout_p": p, "dropout_key": key, "first_sample": first_sample, "first_head": first_head}

    def _get_first_head(self, module: Any, num_heads: int) -> int:
        rank, size = self.head_ranks
        total = num_heads if size == 1 else module.config.get_text_config().num_attention_heads
        if num_heads == total:
            return 0
        if num_heads * size != total:
            raise ValueError(
                f"{type(module).__name__} has {num_heads} of {total} heads here, of {size} processes with "
                'tensor parallelism, or of sequence_ranks; expected as many in each; give tempoize attention="off"'
            )
        return rank * num_heads

    def refuse(self, module: Any, why: str) -> None:
        """Notes why stock serves a call; raises ValueError if it must not."""
        if self.is_required:
            raise ValueError(
                f'attention is "flash", but {type(module).__name__} {why}, which Tempo\'s attention with dropout does '
                'not; set it to "auto" or "off"'
            )
        self.why = why


def use_attention(model: Any) -> str | None:
    """Gives `model` Tempo's attention; returns the reason if that is impossible."""
    config = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or config is None:
        return "the model has no registry of attention functions, as models of transformers have"
    if config._attn_implementation == NAME:
        return "it is Tempo's already"
    stock = _name_stock(model)
    if config._attn_implementation != stock:
        return f'attn_implementation is "{config._attn_implementation}"; expected "{stock}"'
    if (why := _find_reader(model, stock)) is not None:
        return why
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ALL_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_attention_forward:
        # Tempo's attention would go around it. DeepSpeed's UlyssesSPAttentionHF is one, and without it ranks would see
        # their own tokens only.
        return (
            f'"sdpa" was replaced in transformers\' registry; call tempoize first, then replace "{NAME}", as with '
            f'core_attn_implementation="{NAME}" of UlyssesSPAttentionHF'
        )
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return None


def _name_stock(model: Any) -> str:
    """The implementation that Tempo's attention takes the place of: torch's, or where that lacks what the model's
    scores need the model's own."""
    text = model.config.get_text_config()
    needs_eager = getattr(text, "attn_logit_softcapping", None) is not None or any(
        name.endswith(".sinks") for name, _ in model.named_parameters()
    )
    return "eager" if needs_eager and not getattr(model, "_supports_sdpa", True) else "sdpa"


def _find_reader(model: Any, stock: str) -> str | None:
    """Returns why the model's code would compute something else with an attention of another name, or None.

    Sparse attention builds its mask only for names that it knows (DeepSeek V3.2), and a module that changes its mask
    relies on the form that its attention wants: numbers to add for "eager", bool for "sdpa" and Tempo's.
    """
    kinds = dict.fromkeys(map(type, model.modules()))
    functions = [(kind.__name__, each) for kind in kinds for each in _list_functions(kind)]
    if not any("ALL_ATTENTION_FUNCTIONS" in each.__code__.co_names for _, each in functions):
        return None  # no module asks the registry
    target = r"[\w.\[\]]+"
    compares_name = rf"""(==|!=|\bin\b)[^:\n]*["']{stock}["']"""
    changes_mask = rf"^ +({target}, )*attention_mask(, {target})* [|*+&-]?= "
    for kind, function in functions:
        code = function.__code__
        if "_attn_implementation" in code.co_names and _matches(function, compares_name):
            return f'{kind} asks whether attn_implementation is "{stock}", and computes something else if it is not'
        has_mask = stock == "eager" and "Attention" in kind and "attention_mask" in code.co_varnames
        if has_mask and _matches(function, changes_mask):
            return f'{kind} changes its attention_mask, which has numbers for "eager" only'
    return None


def _matches(function: types.FunctionType, pattern: str) -> bool:
    """Returns whether the source of a function has a line like `pattern`; True if nobody can read its source."""
    try:
        return re.search(pattern, inspect.getsource(function), re.MULTILINE) is not None
    except OSError:
        return True


def _list_functions(kind: type[nn.Module]) -> Iterator[types.FunctionType]:
    """Yields the methods of a module's class that run after it is made, without those that all models share."""
    for each in kind.__mro__:
        if re.match(r"torch\.|builtins|transformers\.(?!models\.)", each.__module__):
            continue
        for name, member in vars(each).items():
            function = inspect.unwrap(getattr(member, "__func__", None) or getattr(member, "fget", None) or member)
            if isinstance(function, types.FunctionType) and name != "__init__":
                yield function


def name_implementation(module: Any, of: str = "attn") -> str | None:
    """Returns the name of the attention, or of the "experts", that a module's configuration has, if it has one."""
    return getattr(getattr(module, "config", None), f"_{of}_implementation", None)


def is_wrapped() -> bool:
    """Returns whether something was registered in place of Tempo's attention, as DeepSpeed's Ulysses is."""
    models: Any = sys.modules.get("transformers.modeling_utils")
    return models is not None and models.ALL_ATTENTION_FUNCTIONS.get(NAME, attend) is not attend


def get_change(module: nn.Module) -> str | None:
    """Returns why a module that got Tempo's attention does not ask for it any more; None while it does."""
    place: AttentionPlace | None = module.__dict__.get(PLACE)
    name = name_implementation(module)
    if place is None or place.implementation != NAME or name == NAME:
        return None
    return f'has attn_implementation "{name}" since tempoize; call set_attn_implementation("{NAME}")'


def is_apart(module: nn.Module | None) -> bool:
    """Returns whether a module is one of Tempo's that asks no registry for attention, and has its own entry."""
    return module is not None and PLACE in module.__dict__.get("tempo_attributes", ())


def give_back_attention(model: Any) -> None:
    """Gives `model` the attention back that Tempo's took the place of, unless another one was set since."""
    if name_implementation(model) == NAME:
        model.set_attn_implementation(_name_stock(model))
    for module in model.modules():
        if not is_apart(module):
            module.__dict__.pop(PLACE, None)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Returns what transformers' sdpa_attention_forward does: (out [b, s, a, d], None) for q, k, v [b, a or g, s, d].

    Dropout draws its mask by position. The transposed output is a promise, so that the next linear does not keep it
    twice. If a call asks for what Tempo's attention does not do, stock serves it, and the report says so.
    Raises ValueError for a module that was not given to tempoize, for such a call with attention="flash" or with sinks
    or capped scores, which torch's attention does not have, and for packed rows under Ulysses.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    p = kwargs.get("dropout", 0.0) or 0.0
    place: AttentionPlace | None = getattr(module, PLACE, None)
    if place is not None:
        place.note_call()
    if attention_mask is None and getattr(module, "layer_idx", 0) == 0:
        _check_documents(kwargs.get("position_ids"))
    # torch's attention has no sinks, and does not cap.
    is_special = any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))
    if (p > 0.0 or is_special) and query.numel() > 0:
        if place is None and p > 0.0:
            raise ValueError(
                f'a {type(module).__name__} asks for attention "{NAME}", but was not given to tempoize; expected a '
                'module of a model that was; set attn_implementation to "sdpa", or call tempoize'
            )
        if (why := _get_refusal(attention_mask, kwargs)) is None:
            return _attend(module, query, key, value, attention_mask, p, kwargs), None
        if is_special:
            raise ValueError(
                f"{type(module).__name__} {why}, which neither Tempo's attention nor torch's does together with "
                'sinks or capped scores; expected a call without it; give tempoize attention="off"'
            )
        if place is not None:
            place.refuse(module, why)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, call: dict[str, Any]
) -> Tensor:
    causal, bias, softcap, sink = map(call.get, ("is_causal", "position_bias", "softcap", "s_aux"))
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    causal = causal and mask is None and query.size(2) > 1
    if causal and key.size(2) > query.size(2):  # as sdpa_attention_forward has it
        key, value = (t[:, :, : query.size(2)] for t in (key, value))
        bias = None if bias is None else bias[..., : query.size(2)]
    # Where stock adds numbers to scores it attends to hidden keys if there are no others.
    rows = "zero" if softcap is sink is bias is None else "added"
    more: dict[str, Any] = {"causal": causal, "bias": bias, "softcap": softcap, "sink": sink, "hidden_rows": rows}
    return attend_by_position(module, query, key, value, p, seen=mask, scale=call.get("scaling"), **more)


def _check_documents(positions: Any) -> None:
    """Raises ValueError if position_ids [b, s] restart inside a row and UlyssesSPAttentionHF, which passes no mask
    on, calls. A GPU is waited for, once in a forward, since the first layer asks. Compiled code does not check."""
    # Tensors of a probe have no values.
    if torch.compiler.is_compiling() or not is_wrapped() or type(positions) is not Tensor or positions.dim() != 2:
        return
    if bool((positions[:, 1:] == 0).any()):
        raise ValueError(
            "position_ids restart inside a row, and UlyssesSPAttentionHF passes no mask on, so that the documents "
            "of a packed row would attend to one another; expected one document in a row; unpack the rows, or give "
            'tempoize attention="off" and DeepSpeed core_attn_implementation="flash_attention_2"'
        )


def attend_by_position(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: float,
    *,
    seen: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    **given: Any,
) -> Tensor:
    """Returns Tempo's attention [b, sq, a, d] of q, k, v [b, a or g, s, d], with dropout at the module's place.

    As torch's attention does, it casts under autocast, `seen` is True where a query sees a key, in up to four
    dimensions, and `scale` is by default that of the heads' size. `given` are arguments of tempo_kernels.attention.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if seen is not None:
        hidden = read_once(torch.logical_not, (seen,))
        given["mask"] = hidden[(None,) * (4 - hidden.dim())]
    if sink is not None:
        given["sink"] = sink.to(query.dtype)
    place: AttentionPlace | None = getattr(module, PLACE, None)
    if place is not None and p > 0.0:
        given |= place.draw(module, query.device, query.size(0), query.size(1), p)
    given["softmax_scale"] = query.size(-1) ** -0.5 if scale is None else scale
    out = attention(*(t.permute(2, 0, 1, 3) for t in (query, key, value)), **given)
    y = out.transpose(0, 1)
    if y.is_contiguous() or torch.compiler.is_compiling():
        return y.contiguous()
    return adopt(_transpose(out), _transpose, out)  # made again in backward from out, which a GPU keeps


def _transpose(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous()


def _get_refusal(attention_mask: Tensor | None, more: dict[str, Any]) -> str | None:
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        # Models that add such masks may attend in windows, which are no samples (Swin).
        return "adds a tensor to its scores"
    if more.get("cache") is not None:
        return "pages its keys"
    unknown = sorted(more.keys() - _KNOWN - _HARMLESS)
    name = next((name for name in unknown if more[name] is not None and more[name] is not False), None)
    return None if name is None else f"passes {name} to its attention"


_read: Any = WeakIdKeyDictionary()
"""Of each mask that came first in a call: how it was read, which masks came with it, and the result."""


def read_once(compute: Callable[..., Result], masks: tuple[Tensor | None, ...], *given: Any) -> Result:
    """Returns compute(*masks, *given), computed again only when one of the masks, which all layers of a model share,
    was written to.

    The result may hold a mask's storage, but neither the mask nor a view that knows it: it would never be freed.
    """
    first, *others = (mask for mask in masks if mask is not None)
    # Writes to tensors are counted neither by a compiler nor in inference mode.
    if torch.compiler.is_compiling() or any(mask.is_inference() for mask in (first, *others)):
        return compute(*masks, *given)
    now = (compute, given, tuple(None if mask is None else mask._version for mask in masks))
    before, partners, result = _read.get(first, (None, (), None))
    if before != now or any(partner() is not mask for partner, mask in zip(partners, others, strict=True)):
        result = compute(*masks, *given)
        _read[first] = now, [weakref.ref(mask) for mask in others], result
    return result  # type: ignore[no-any-return]
