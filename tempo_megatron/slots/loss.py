"""Gives Megatron's GPTModel, BertModel, T5Model and HybridModel the fused loss head: labels in, losses out, no logits
of all tokens.

The models compute logits in their output layer and pass them to compute_language_model_loss. A fused output layer that
has labels computes the losses inside its own forward, so that hooks which gather and release its weight (ZeRO-3's) run
around it. compute_language_model_loss then returns them as they are. Without labels everything is as in Megatron.

With multi-token prediction Megatron calls the output layer once for each depth, and then for the decoder; the head
knows the labels of each of these calls beforehand.

`log_probs` gives RL trainers log-probabilities and entropies from the same head.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer import multi_token_prediction
from megatron.core.utils import get_attr_wrapped_model, get_pg_rank, get_pg_size
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import once_differentiable

from tempo_kernels.late_check import LateCheck
from tempo_kernels.linear_cross_entropy import CHUNK_BYTES, linear_cross_entropy, linear_log_prob
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.choose import find_refusal

_IGNORED = -100
# Relative to the largest gradient: by so much float32 rounds proportions.
_TOLERANCE = 1e-4
IS_MULTIPLE = LateCheck(
    "the gradient of the losses is not a number times loss_mask, for which the fused loss made its gradients (on a GPU "
    "they became NaN in an earlier step); sum loss_mask * losses, or call the model without loss_mask"
)


@dataclasses.dataclass
class LossHead:
    """What a fused output layer knows about the running forward."""

    logits_scale: float
    """What the model multiplies logits by (MuP); the losses are those of the logits so scaled."""

    labels: Tensor | None = None
    """[b, s]; None asks for logits."""

    loss_mask: Tensor | None = None

    further: list[tuple[Tensor, Tensor | None]] = dataclasses.field(default_factory=list)
    """Labels and loss masks of the calls that come first, one for each depth of multi-token prediction."""

    log_prob: Mapping[str, Any] | None = None
    """The arguments of linear_log_prob, if log-probabilities are asked for in place of the decoder's losses."""


def forward_output_layer(
    layer: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> Any:
    """The forward of an output layer that has a LossHead: losses or log-probabilities of its labels, or logits if it
    has none.

    Args:
        layer: the ColumnParallelLinear.
        input_, weight, runtime_gather_output: as ColumnParallelLinear's; input_ is [s, b, h], or with sequence
            parallelism [s/p, b, h].

    Returns:
        (losses [b, s] in float32, None), or ([1 or 2, b, s], None), log-probabilities and, where asked for, entropies,
        or what ColumnParallelLinear returns.
    """
    IS_MULTIPLE.raise_if_noted()
    head: LossHead = layer.loss_head
    if head.labels is None:
        return ColumnParallelLinear.forward(layer, input_, weight, runtime_gather_output)
    is_further = bool(head.further)
    labels, loss_mask = head.further.pop(0) if is_further else (head.labels, head.loss_mask)
    weight = layer.weight if weight is None else weight
    assert weight is not None
    bias = None if layer.skip_bias_add else layer.bias
    if head.logits_scale != 1.0:
        # There are no logits to scale, so scale what they are made of.
        input_ = input_ * head.logits_scale
        bias = None if bias is None else bias * head.logits_scale
    num_rows = weight.size(0)
    is_outside = (labels < 0) | (labels >= num_rows * get_pg_size(layer.tp_group))
    token_weights = None
    if loss_mask is not None and torch.is_grad_enabled():
        token_weights = loss_mask.view_as(labels).float()
    labels = labels.masked_fill(is_outside, _IGNORED)
    shared = {
        "bias": bias,
        "ignore_index": _IGNORED,
        "vocab_start": get_pg_rank(layer.tp_group) * num_rows,
        "group": layer.tp_group,
        "sequence_parallel": layer.sequence_parallel,
        "gradient_accumulation_fusion": layer.gradient_accumulation_fusion,
    }
    if head.log_prob is not None and not is_further:
        found = linear_log_prob(input_, weight, labels, **shared, **head.log_prob)
        return torch.stack(found if isinstance(found, tuple) else (found,)), None
    found = linear_cross_entropy(input_, weight, labels, **shared, token_weights=token_weights)
    losses = found if token_weights is None else LossesOfTotal.apply(*found, token_weights)
    if is_further:
        losses.find_predictions = functools.partial(_compute_predictions, layer, input_.detach(), weight.detach(), bias)
    return losses, None


@torch.no_grad()
def _compute_predictions(layer: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The tokens of the largest logits, int64 [s, b], with the logits of one chunk of tokens alive at a time."""
    if layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=layer.tp_group)
    rows = hidden.flatten(0, 1)
    chunk_bytes = CHUNK_BYTES["cuda" if rows.is_cuda else "cpu"]
    chunks = rows.split(max(1, chunk_bytes // (weight.size(0) * weight.element_size())))
    largest = [torch.nn.functional.linear(chunk, weight, bias).max(-1) for chunk in chunks]
    logits, tokens = (torch.cat(parts) for parts in zip(*largest, strict=True))
    size = get_pg_size(layer.tp_group)
    if size > 1:
        # A float64 holds a token exactly, so that one message carries both.
        mine = torch.stack((logits.double(), tokens.double()))
        parts = [torch.empty_like(mine) for _ in range(size)]
        torch.distributed.all_gather(parts, mine, group=layer.tp_group)
        found = torch.stack(parts)
        rank = found[:, 0].argmax(0)
        tokens = found[:, 1].long().gather(0, rank.unsqueeze(0)).squeeze(0) + rank * weight.size(0)
    return tokens.view(hidden.shape[:2])


@functools.cache
def _count_predictions_of_fused_heads() -> None:
    """Let Megatron, which since 0.19 logs how many tokens multi-token prediction gets right, ask a fused head for the
    predictions that it else takes from the logits."""
    count_of_logits = getattr(multi_token_prediction, "_compute_mtp_acceptance_counts", None)
    if count_of_logits is None:
        return

    @functools.wraps(count_of_logits)
    def count(mtp_logits: Tensor, mtp_labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        find_predictions = getattr(mtp_logits, "find_predictions", None)
        if find_predictions is None:
            return count_of_logits(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        is_counted = loss_mask.bool()
        return (find_predictions().t().eq(mtp_labels) & is_counted).sum().float(), is_counted.sum().float()

    multi_token_prediction._compute_mtp_acceptance_counts = count


def _roll_targets(
    model: Any, labels: Tensor | None, loss_mask: Tensor | None, packed_seq_params: Any
) -> list[tuple[Tensor, Tensor | None]]:
    """Labels and loss masks of each depth of multi-token prediction, rolled as Megatron rolls them for its losses."""
    if labels is None or not model.post_process:
        return []
    group = getattr(model, "cp_group", None) or getattr(getattr(model, "pg_collection", None), "cp", None)
    offered = {"cp_group": group, "packed_seq_params": packed_seq_params}
    # Older Megatrons roll without one or both.
    taken = inspect.signature(multi_token_prediction.roll_tensor).parameters
    given = {name: value for name, value in offered.items() if name in taken}
    found: list[Any] = []
    for _ in range(model.config.mtp_num_layers or 0):
        labels, loss_mask = (
            each if each is None else multi_token_prediction.roll_tensor(each, shifts=-1, dims=-1, **given)[0]
            for each in (labels, loss_mask)
        )
        found.append((labels, loss_mask))
    return found


def fused_gpt_class(cls: Any = GPTModel) -> Any:
    """A subclass of `cls`, GPTModel or a class that derives from it, whose models are built with the fused loss head.

    Use it where you choose the class of a model. `tempoize_loss` is for a model that is built already; its docstring
    says what the head does. Constructor, modules, parameters and checkpoint keys are those of `cls`.

    The constructor raises ValueError where the model or its configuration has what the fused head cannot do.
    """
    return _make_fused_class(cls)


def fused_bert_class(cls: Any = BertModel) -> Any:
    """As fused_gpt_class, of BertModel or a class that derives from it.

    Its forward takes `loss_mask` [b, s] besides, by name, as GPTModel's does.
    """
    return _make_fused_class(cls)


def fused_t5_class(cls: Any = T5Model) -> Any:
    """As fused_bert_class, of T5Model or a class that derives from it; labels and loss_mask are the decoder's."""
    return _make_fused_class(cls)


# Megatron's model -> its method around the output layer that is given the labels, and their name among its arguments.
_ENTRIES = {
    "GPTModel": ("_postprocess", "labels"),
    "BertModel": ("forward", "lm_labels"),
    "T5Model": ("forward", "lm_labels"),
    "HybridModel": ("forward", "labels"),  # since 0.18
}


def _find_base(cls: type) -> Any:
    """The class of Megatron's in _ENTRIES that `cls` is or derives from; None where there is none."""
    known = (base for base in cls.__mro__ if base.__module__.startswith("megatron.core.") and base.__name__ in _ENTRIES)
    return next(known, None)


@functools.cache
def _make_fused_class(cls: Any) -> Any:
    class Fused(cls):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            tempoize_loss(self, TempoConfig(loss="fused"))

    Fused.__name__ = Fused.__qualname__ = f"Tempo{cls.__name__}"
    Fused.__doc__ = f"{cls.__name__} with the fused loss head; see fused_gpt_class."
    return Fused


def _tell_head(run: Any, labels_name: str, place: int, *, has_loss_mask: bool) -> Callable[..., Any]:
    """A method of a model, during which the output layer knows the labels that the method is given; with an argument
    loss_mask where Megatron's has none. `place`: of the labels among its arguments."""

    @functools.wraps(run)
    def run_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        head = get_loss_head(self)
        loss_mask = kwargs.get("loss_mask") if has_loss_mask else kwargs.pop("loss_mask", None)
        # A user's output processor may ask the output layer for logits.
        if head is None or kwargs.get("output_processor") is not None:
            return run(self, *args, **kwargs)
        labels = args[place] if len(args) > place else kwargs.get(labels_name)
        head.labels, head.loss_mask = labels, loss_mask
        head.further = _roll_targets(self, labels, loss_mask, kwargs.get("packed_seq_params"))
        try:
            return run(self, *args, **kwargs)
        finally:
            head.labels, head.loss_mask, head.further = None, None, []

    if not has_loss_mask:
        signature = inspect.signature(run)
        mask = inspect.Parameter("loss_mask", inspect.Parameter.KEYWORD_ONLY, default=None)
        found: Any = run_and_tell
        found.__signature__ = signature.replace(parameters=[*signature.parameters.values(), mask])
    return run_and_tell


TempoGPTModel, TempoBertModel, TempoT5Model = fused_gpt_class(), fused_bert_class(), fused_t5_class()


def tempoize_loss(model: Any, tempo_config: TempoConfig) -> None:
    """Give a built GPTModel, BertModel, T5Model or HybridModel the fused loss head, if `choose_loss` says so and the
    model has an output layer. A BertModel or T5Model without one takes `loss_mask` from then on, and ignores it.

    It replaces methods of this one model and the forward of its output layer by attributes of the two objects. Both
    keep their class. No module, parameter, hook or checkpoint key changes, and ZeRO-3 gathers the output layer's weight
    around its forward as before. A copy.deepcopy is a model with a head of its own. If you can choose the class, build
    a `TempoGPTModel`, a `TempoBertModel` or a `TempoT5Model` instead.

    Called with labels, the model returns losses [b, s] in float32 and keeps no logits; called without, it returns
    logits. A label outside of the vocabulary has loss 0. With an `output_processor` everything is as in Megatron. If
    the model scales its logits (MuP), a scaled copy of the hidden states is kept.

    Called with `loss_mask` too, as by Megatron's pretrain_gpt.py, it makes the gradients in forward, and backward need
    not make the logits again. The loss must then be a number times sum(loss_mask * losses), as Megatron's loss
    functions are, and may have one backward; any other gradient of the losses raises RuntimeError. On a GPU, which is
    not waited for, the gradients become NaN, and a later forward raises the error.

    Raises ValueError where `tempo_config.loss` is "fused" and the model or its configuration has what the fused head
    cannot do; "auto" leaves such a model as it is.
    """
    if choose_loss(model, tempo_config)[0] == "off" or get_loss_head(model) is not None:
        return
    cls: Any = type(model)
    method, labels_name = _ENTRIES[_find_base(cls).__name__]
    arguments = list(inspect.signature(getattr(_find_base(cls), method)).parameters)[1:]
    place, has_loss_mask = arguments.index(labels_name), "loss_mask" in arguments
    tell_head = _tell_head(getattr(cls, method), labels_name, place, has_loss_mask=has_loss_mask)
    if not model.post_process:
        # A pipeline stage without an output layer is given a loss_mask too, and stock BERT and T5 take none.
        if not has_loss_mask:
            setattr(model, method, types.MethodType(tell_head, model))
        return
    _count_predictions_of_fused_heads()
    layer = model.output_layer
    layer.loss_head = LossHead(_get_logits_scale(model))

    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Any:
        """The losses that the output layer returned, or Megatron's of real logits."""
        return logits if _is_told_labels(self) else cls.compute_language_model_loss(self, labels, logits)

    def scale_logits(self: Any, logits: Tensor) -> Any:
        """Scaled logits; losses stay, because they are already those of scaled logits."""
        return logits if _is_told_labels(self) else cls._scale_logits(self, logits)

    methods: dict[tuple[Any, str], Callable[..., Any]] = {
        (layer, "forward"): forward_output_layer,
        (model, method): tell_head,
        (model, "compute_language_model_loss"): compute_language_model_loss,
        **({(model, "_scale_logits"): scale_logits} if hasattr(cls, "_scale_logits") else {}),  # since 0.17
    }
    for (owner, name), function in methods.items():
        setattr(owner, name, types.MethodType(function, owner))


def get_loss_head(model: Any) -> LossHead | None:
    """The LossHead of a built model's output layer; None if it has none."""
    return getattr(getattr(model, "output_layer", None), "loss_head", None)


def _is_told_labels(model: Any) -> bool:
    return getattr(get_loss_head(model), "labels", None) is not None


def choose_loss(model: Any, tempo_config: TempoConfig) -> tuple[str, str | None]:
    """The value of `loss` for a built model, "fused" or "off", and why "auto" is "off" (else None).

    Raises ValueError where `tempo_config.loss` is "fused" and the model cannot have it.
    """
    if tempo_config.loss == "off":
        return "off", None
    obstacle = _find_obstacle(model)
    if obstacle is None:
        return "fused", None
    if tempo_config.loss == "auto":
        return "off", obstacle
    raise ValueError(f'{obstacle}; set tempo.loss to "off"')


def _find_obstacle(model: Any) -> str | None:
    """Why a built model cannot have the fused head; None where it can."""
    if _find_base(type(model)) is None:
        known = "GPTModel, BertModel, T5Model and HybridModel"
        return f"the model is a {type(model).__name__}, and the fused loss is for {known}"
    if getattr(model, "mtp_num_depths", 0):  # of a HybridModel's pattern
        return "the layer pattern has layers of multi-token prediction, which need logits of their own"
    refusal = find_refusal("loss", "fused", model.config)
    if refusal is not None:
        return refusal.reason
    if not model.post_process or get_loss_head(model) is not None:
        return None
    layer = model.output_layer
    if type(layer) is not ColumnParallelLinear:
        return f"the output layer is a {type(layer).__name__}, where a ColumnParallelLinear is expected"
    if "forward" in vars(layer):
        return "the output layer has a forward of its own, which the fused head would replace"
    if _has_loss_of_its_own(model):
        return f"{type(model).__name__} has a compute_language_model_loss of its own, which needs logits"
    if _get_logits_scale(model) is None:
        return f"{type(model).__name__} does more to its logits than multiply them by a number"
    return None


def _has_loss_of_its_own(model: Any) -> bool:
    """Whether the model, or one of its classes that is not Megatron's, has its own compute_language_model_loss."""
    name = "compute_language_model_loss"
    owner = next(owner for owner in type(model).__mro__ if name in vars(owner))
    return name in vars(model) or not owner.__module__.startswith("megatron.core.")


def _get_logits_scale(model: Any) -> Any:
    """The number that a model's logits are multiplied by; None where it does something else with them."""
    scale_logits = getattr(model, "_scale_logits", None)
    if scale_logits is None:
        return 1.0
    with unset_fake_temporarily():  # a model whose memory is estimated has its scale too
        logits = torch.tensor([1.0, -3.0, 50.0], dtype=torch.float64, device="cpu")
        scaled = scale_logits(logits)
        return scaled[0].item() if torch.equal(scaled, scaled[0] * logits) else None


class LossesOfTotal(torch.autograd.Function):
    """The losses, whose gradient must be a multiple of token_weights, as that of their weighted total is."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, losses: Tensor, token_weights: Tensor) -> Tensor:
        ctx.save_for_backward(token_weights)
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        (token_weights,) = ctx.saved_tensors
        square = token_weights.square().sum()
        factor = (grad_losses * token_weights).sum() / torch.where(square > 0, square, 1.0)
        expected = factor * token_weights
        error, largest = (grad_losses - expected).abs().amax(), expected.abs().amax()
        is_another = error > _TOLERANCE * largest
        IS_MULTIPLE.note(is_another)
        # On a GPU an exception here would wait for the device. The gradient becomes NaN, and the error comes later.
        return torch.where(is_another, torch.nan, factor), None, None


def log_probs(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    vocab_size: int | None = None,
    **inputs: Any,
) -> Any:
    """Call a GPTModel for the log-probabilities of labels, in place of model(...) and a log-softmax of its logits.

    Args:
        model: a GPTModel with the fused loss head (`TempoGPTModel`, or one that was given to `tempoize_loss`), wrapped
            or not; of a pipeline any stage.
        input_ids, position_ids, attention_mask, inputs: the model's arguments.
        labels: [b, s], the wanted token at each position, as the model's own labels. The caller shifts them and divides
            packed sequences. A label outside of the vocabulary gives 0 and no gradient.
        temperature, softcap, return_entropy: as of tempo_kernels' linear_log_prob. If the model scales its logits
            (MuP), that comes first.
        vocab_size: the tokenizer's; rows that pad it then have probability 0. By default they are in the softmax.

    Returns:
        log_prob [b, s], or (log_prob, entropy), float32 and differentiable: those of the whole vocabulary and sequence
        on every rank of the tensor-parallel group. On a pipeline's other stages what the model returns.

    Raises ValueError for a model without the fused loss head, for loss_mask and output_processor, and for what
    linear_log_prob refuses.
    """
    inner = get_attr_wrapped_model(model, "post_process", return_model_obj=True)
    if unused := inputs.keys() & {"loss_mask", "output_processor"}:
        raise ValueError(
            f"log_probs was given {', '.join(sorted(unused))}, which is for losses; expected none; leave it out"
        )
    if not inner.post_process:
        return model(input_ids, position_ids, attention_mask, labels=labels, **inputs)
    head = get_loss_head(inner)
    if head is None:
        raise ValueError(
            f"the {type(inner).__name__} has no fused loss head, which log_probs needs; call "
            'tempoize_loss(model, TempoConfig(loss="fused")) before it is wrapped'
        )
    scaled = {"temperature": temperature, "softcap": softcap}
    head.log_prob = {**scaled, "return_entropy": return_entropy, "vocab_size": vocab_size}
    try:
        found = model(input_ids, position_ids, attention_mask, labels=labels, **inputs)
    finally:
        head.log_prob = None
    return (found[0], found[1]) if return_entropy else found[0]
