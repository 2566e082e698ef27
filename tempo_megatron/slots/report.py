"""Reports what Tempo replaced in a spec or a model, what it left, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron.core.models.bert.bert_model import BertModel
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import write_layers
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots import transformer_engine as te
from tempo_megatron.slots.attention import LatentSelfAttention, TempoMLASelfAttention
from tempo_megatron.slots.block_slots import BUILT_NAMES, Slot, list_slots
from tempo_megatron.slots.choose import Choices
from tempo_megatron.slots.dropout import TempoEmbeddingDropout
from tempo_megatron.slots.experts import is_mixture
from tempo_megatron.slots.loss import choose_loss, get_loss_head
from tempo_megatron.slots.slot_content import find_class

_NOT_REPLACED = "the slot was filled without Tempo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedSlot:
    """One slot of a model."""

    operation: str
    where: str
    """As in checkpoint keys: `decoder.layers.3`; `decoder` for what the block has once."""

    slot: str
    """`mlp`, `self_attention.core_attention`, `final_layernorm`."""

    left: str | None = None
    """Why it does not hold Tempo's module; None where it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TempoReport:
    """Every slot that could hold an operation of Tempo's, in the order of the model."""

    slots: tuple[ReportedSlot, ...] = ()

    def __add__(self, other: TempoReport) -> TempoReport:
        """Both, as for the stacks or pipeline chunks of one model."""
        return TempoReport(slots=self.slots + other.slots)

    @property
    def replaced(self) -> dict[str, int]:
        """Operation -> slots that hold Tempo's module; an operation without a slot is not there."""
        return {name: replaced for name, (replaced, _) in self.counts.items()}

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Operation -> (slots that hold Tempo's module, slots there are); an operation without a slot is not there."""
        found = {name: [slot.left is None for slot in self.slots if slot.operation == name] for name in OPERATIONS}
        return {name: (sum(are_tempo), len(are_tempo)) for name, are_tempo in found.items() if are_tempo}

    @property
    def left(self) -> tuple[ReportedSlot, ...]:
        """The slots that do not hold Tempo's module, each with the reason."""
        return tuple(slot for slot in self.slots if slot.left is not None)

    def describe_counts(self) -> str:
        """`activation 3 of 4, norm 9 of 9`: of each operation's slots, how many hold Tempo's module."""
        return ", ".join(f"{name} {replaced} of {all_}" for name, (replaced, all_) in self.counts.items()) or "none"

    def describe_left(self) -> list[str]:
        """`activation in decoder.layers.0-2 (mlp): off for layers 0-2`: each reason with the slots that it left."""
        # Join the layers of each slot, then the slots with equal layers: one line for each reason.
        places: dict[Any, list[str]] = {}
        for slot in self.left:
            places.setdefault((slot.operation, slot.left, slot.slot), []).append(slot.where)
        names: dict[Any, list[str]] = {}
        for (operation, why, name), where in places.items():
            names.setdefault((operation, _join_layers(where), why), []).append(name)
        return [
            f"{operation} in {where} ({', '.join(slots)}): {why}" for (operation, where, why), slots in names.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: `{"slots": {"norm": {"tempo": 8, "all": 9}}, "left": [{"operation", "where", "slot", "left"}]}`."""
        return {
            "slots": {name: {"tempo": replaced, "all": all_} for name, (replaced, all_) in self.counts.items()},
            "left": [dataclasses.asdict(slot) for slot in self.left],
        }


def report_on(subject: Any, choices: Choices | None = None) -> TempoReport:
    """Report what the slots of a block's spec hold, or those of a built model, its embedding and loss head included.

    For a model it reads the modules, whatever the spec says.

    Args:
        subject: what `tempoize` or `tempo_block_spec` returned, or a GPTModel, BertModel or T5Model (or a pipeline
            stage of one) that was built with it, without wrappers such as DDP; or a spec of multi-token prediction.
        choices: what was asked for, and why "auto" is less than its first choice, from which the reasons are taken. By
            default those that the spec was made with.

    Raises ValueError where a spec, or a model's, was not made by `tempoize`.
    """
    if isinstance(subject, (TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules)):
        return TempoReport(slots=tuple(_report_block(subject, subject, choices)))
    specs = [(block, _get_spec(block)) for block in _list_blocks(subject)]
    found = choices or next((spec.choices for _, spec in specs if hasattr(spec, "choices")), None)
    if (prediction := getattr(subject, "mtp", None)) is not None:
        specs.append((prediction, prediction.submodules))
    slots = [slot for block, spec in specs for slot in _report_block(block, spec, choices)]
    return TempoReport(slots=(*slots, *(_report_whole(subject, found) if found is not None else ())))


def check_built(model: Any) -> None:
    """Raise ValueError where a slot of a built layer does not hold what its spec says, because the layer chose its
    modules itself."""
    for block in _list_blocks(model):
        spec = block.submodules
        asked = {(slot.where, slot.name, slot.operation): slot.value for slot in list_slots(spec)}
        for slot in list_slots(block, spec):
            value = asked.get((slot.where, slot.name, slot.operation), "nothing")
            if slot.layer is not None and value != slot.value:
                layer = type(block.layers[slot.layer - spec.first_layer]).__name__
                raise ValueError(
                    f"{layer} {slot.layer} holds {find_class(slot.content).__name__} in {slot.name} ({slot.operation} "
                    f"{slot.value}), where its spec says {value}; expected layers that build what their spec says; "
                    "give the spec of such layers"
                )


def _list_blocks(model: Any) -> list[Any]:
    return [block for name in ("encoder", "decoder") if (block := getattr(model, name, None)) is not None]


def _get_spec(block: Any) -> Any:
    """The spec that says what was asked for: the block's, or that of layers which choose their modules themselves."""
    chosen = next((layer.tempo_block for layer in block.layers if hasattr(layer, "tempo_block")), None)
    return chosen or block.submodules


def _report_block(block: Any, spec: Any, choices: Choices | None) -> Iterator[ReportedSlot]:
    """The slots of a block, or of multi-token prediction, built or as a spec; `spec` says what was asked for."""
    own: Choices | None = getattr(spec, "choices", None)
    if own is None and not isinstance(spec, MultiTokenPredictionBlockSubmodules):
        raise ValueError(
            f"the spec is a {type(spec).__name__} that Tempo has not made; expected what tempoize or tempo_block_spec "
            "returned; call one of them first"
        )
    choices = choices or own
    mentioned = choices.written.list_mentioned() if choices else TempoConfig().list_mentioned()
    for slot in list_slots(block, spec):
        if slot.operation in mentioned:
            why = _NOT_REPLACED if choices is None or own is None else _explain(slot, choices)
            name = BUILT_NAMES.get(slot.name, slot.name)
            left = None if slot.is_tempo else why
            yield ReportedSlot(operation=slot.operation, where=slot.where, slot=name, left=left)


def _explain(slot: Slot, choices: Choices) -> str:
    """Why a slot does not hold Tempo's module."""
    module, holder = find_class(slot.content), find_class(slot.holder)
    if slot.operation == "linear_fc1" and is_mixture(slot.content):
        return "mixture of experts"
    is_latent = isinstance(holder, type) and issubclass(holder, MultiLatentAttention)
    if is_latent and holder not in (MLASelfAttention, LatentSelfAttention, TempoMLASelfAttention):
        return f"{holder.__name__} is a latent attention that Tempo does not know"
    if getattr(slot.get_values(choices.config), slot.operation) == "off":
        return _explain_off(slot.operation, choices, slot.layer, slot.where.partition(".")[0])
    if module is SharedExpertMLP:
        return "its parts run beside communication (moe_shared_expert_overlap)"
    return (
        te.describe_stock(slot.content) or f"{getattr(module, '__name__', module)} is not a module that Tempo replaces"
    )


def _explain_off(operation: str, choices: Choices, layer: int | None = None, stack: str = "") -> str:
    key = None if layer is None else choices.written.get_range(layer, stack)
    own: Any = {} if key is None else choices.written.layers[key]
    if own.get(operation, getattr(choices.written, operation)) == "auto" and operation in choices.reasons:
        return f"auto: {choices.reasons[operation]}"
    if key is None or operation not in own:
        return "off"
    layers = key.split()[-1]  # without the stack, which the report names anyway
    return f"off for layer{'s' if '-' in layers else ''} {layers}"


def _report_whole(model: Any, choices: Choices) -> Iterator[ReportedSlot]:
    """What a model has once: the embedding's dropout, and the loss head."""
    dropout = getattr(getattr(model, "embedding", None), "embedding_dropout", None)
    if dropout is not None:
        why = _explain_off("dropout", choices) if choices.config.dropout == "off" else _NOT_REPLACED
        left = None if isinstance(dropout, TempoEmbeddingDropout) else why
        yield ReportedSlot(operation="dropout", where="embedding", slot="embedding_dropout", left=left)
    if getattr(model, "post_process", False):
        left = None
        if get_loss_head(model) is None:
            _, obstacle = choose_loss(model, TempoConfig())
            left = "off" if choices.written.loss == "off" else f"auto: {obstacle}" if obstacle else _NOT_REPLACED
        slot = "lm_head" if isinstance(model, BertModel) else "output_layer"
        yield ReportedSlot(operation="loss", where="model", slot=slot, left=left)


def _join_layers(where: list[str]) -> str:
    """`decoder.layers.0-2,5, embedding` of places in the order of the model."""
    layers: dict[str, list[int]] = {}
    for place in dict.fromkeys(where):
        stem, _, number = place.rpartition(".")
        layers.setdefault(stem if number.isdigit() else place, []).extend([int(number)] if number.isdigit() else [])
    return ", ".join(f"{stem}.{write_layers(numbers)}" if numbers else stem for stem, numbers in layers.items())
