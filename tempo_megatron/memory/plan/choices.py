"""The ladder of choices for one layer: what it keeps for backward, and what this costs.

The bytes are measured: one model on tensors without memory gets layers of different choices, and the ledger's rows of
each are read. The time is a price: products that run again over the GPU's rate, and bytes that elementwise work moves
beyond stock over its bandwidth. A choice that moves fewer bytes than stock counts as free, never as a gain. Collectives
that are repeated are not counted.

Most of the up to 288 choices need no measurement: the values of an operation are ordered by what they keep (`LADDER`),
and where a value further down has the same price it is taken. What remains is measured and pruned to the choices that
no other one matches in bytes, time, and bytes made again.

What a layer sends to the host has to be there when the next layer's forward ends, and to be back when the next layer's
backward does, or they would wait. These windows are the time of the products alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tempo_kernels.offload import MIN_BYTES
from tempo_megatron.memory.plan.flops import Flops, count_inner, count_layer_flops
from tempo_megatron.memory.plan.gpu import Gpu
from tempo_megatron.memory.routing import assume_fullest
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import record_chunk
from tempo_megatron.memory.simulated.chunk_model import describe_parts
from tempo_megatron.memory.tape.rows import Row, name_row, sum_rows
from tempo_megatron.models.build import DTYPES, build_transformer_config
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS, OFFLOAD, write_layers
from tempo_megatron.settings.operations import (
    CHOICES,
    INPUT,
    LEDGER_ROWS,
    OFFLOAD_ROWS,
    STACKS_OF_FAMILIES,
    find_offload_row,
    keeps_copies,
)
from tempo_megatron.slots.choose import find_refusal, refuse_written

Values = tuple[str, ...]
"""The value of each of LAYER_OPERATIONS, never "auto"."""
STOCK: Values = ("off",) * len(LAYER_OPERATIONS)
Rows = tuple[Row, ...]
"""What a layer keeps; `host_bytes` are those that it can send to the host."""
LADDER = {
    "activation": ("off", "inplace", "recompute"),
    "dropout": ("off", "recompute"),
    "attention": ("off", "softmax", "flash", "recompute"),
    "linear_fc1": ("off", "recompute"),
    "linear_qkv": ("off", "recompute"),
    "moe_permute": ("off", "recompute", "repeat"),
}
"""Operation -> its values, of which each keeps no more than those before it. Norms have no such order: with a
recomputed MLP one that is recomputed keeps more than one in place."""
_WRITTEN_ONLY = {"moe_permute": "repeat", "linear_fc1": "tile"}
"""Operation -> the value that no plan chooses by itself."""
# Fields of a Run on which the bytes of a layer depend, beside those that `LayerRows` changes.
_OF_A_LAYER = (
    *("micro_batch_size", "dtype", "stock", "stock_attention", "masked_softmax_fusion", "fuses_latent_rope"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_shared_expert_gate"),
)
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """One way to run a layer."""

    values: Values
    recompute: frozenset[str]
    """What Megatron recomputes of the layer."""
    offload: str = "off"
    """Which of its rows go to the host: "all", or names of OFFLOAD_ROWS joined by "+"."""

    def list_values(self) -> dict[str, str]:
        return dict(zip(LAYER_OPERATIONS, self.values, strict=True))


class LayerOption(NamedTuple):
    """A choice, and what it takes for one micro batch; or several, as arrays, with the choice of the first."""

    choice: LayerChoice
    seconds: Any
    """Beyond the products of forward and backward."""
    kept_bytes: Any
    """On the device from forward to backward."""
    replay_bytes: Any
    """That its recomputation has made again when its backward begins."""
    moved_bytes: Any = 0
    """On the host from forward to backward, beside `kept_bytes`."""
    copy_seconds: Any = 0.0
    """Of `seconds`, what these take of the device's bandwidth."""

    def keep_all(self) -> LayerOption:
        """The option with nothing on the host."""
        choice = dataclasses.replace(self.choice, offload="off")
        kept_bytes, seconds = self.kept_bytes + self.moved_bytes, self.seconds - self.copy_seconds
        return LayerOption(choice, seconds, kept_bytes, self.replay_bytes)


def list_values(run: Run) -> dict[str, Values]:
    """Operation, the loss among them -> the values among which a plan chooses, stock's first: what was written, else
    those that the model can have and the estimate knows. Two are chosen only where they are written: tokens that are
    sent again, whose price takes a rate of the network, and the MLP in tiles, which keeps what a recomputed one does.

    Raises ValueError where the planner does not know the model, or it cannot have a value that was written.
    """
    if run.model.family == "t5":
        raise ValueError("the planner does not support T5; give a GPT or a BERT")
    if run.tempo.layers:
        raise ValueError(
            "tempo.layers is given, and a plan gives the layers their values; leave it out, or leave the budget out"
        )
    config = describe_parts(build_transformer_config(run.model, dtype=run.dtype), run)
    refuse_written(config, run.tempo)
    unknown = {"attention": run.model.multi_latent_attention, "linear_fc1": run.model.num_experts is not None}
    found = {}
    for name, choices in CHOICES.items():
        written, refused = getattr(run.tempo, name), {"off", "auto", _WRITTEN_ONLY.get(name)}
        others = [] if unknown.get(name) else [each for each in choices if each not in refused]
        possible = ("off", *(each for each in others if find_refusal(name, each, config) is None))
        found[name] = possible if written == "auto" else (written,)
    return found


class LayerRows:
    """What a layer of a run's model, with experts where it has some, keeps on one rank with any choice and any
    recomputation, measured when it is asked for."""

    def __init__(self, run: Run) -> None:
        model, seq_length = run.model, run.model.seq_length // run.layout.cp
        fields: dict[str, Any] = {name: getattr(run, name) for name in _OF_A_LAYER}
        self._run = Run(
            model=dataclasses.replace(model, moe_layer_freq="1", vocab_size=1, seq_length=seq_length),
            tempo=TempoConfig.off(),
            layout=dataclasses.replace(run.layout, pp=1, dp=1, chunks=None),
            # The tokens of the stage that has most: what is returned has neither stages nor a vocabulary.
            moe_imbalance=assume_fullest(run).moe_imbalance,
            **fields,
        )
        self._rows: dict[tuple[frozenset[str], Values], Rows] = {}
        self._stack_bytes: dict[frozenset[str], int] = {}

    def measure(self, recompute: frozenset[str], choices: Iterable[Values]) -> list[Rows]:
        """The rows of each choice with this recomputation by Megatron."""
        # A layer that is recomputed as a whole keeps its input, whatever its values are.
        asked = [STOCK if "full" in recompute else each for each in choices]
        if unknown := [each for each in dict.fromkeys(asked) if (recompute, each) not in self._rows]:
            self._record(recompute, unknown)
        return [self._rows[recompute, each] for each in asked]

    def _record(self, recompute: frozenset[str], choices: Sequence[Values]) -> None:
        """A model with a layer of each choice."""
        layers = {str(place): dict(zip(LAYER_OPERATIONS, choice, strict=True)) for place, choice in enumerate(choices)}
        model = dataclasses.replace(self._run.model, num_layers=len(choices))
        tempo = dataclasses.replace(TempoConfig.off(), layers=layers)
        run = dataclasses.replace(self._run, model=model, tempo=tempo, recompute=tuple(sorted(recompute)))
        by_layer, rest = record_chunk(run)
        (stack,) = STACKS_OF_FAMILIES[model.family]
        for place, choice in enumerate(choices):
            storages = (dataclasses.replace(s, is_on_host=s.num_bytes >= MIN_BYTES) for s in by_layer[stack, place])
            self._rows[recompute, choice] = sum_rows(storages, (model.seq_length,), model.activation)
        # The rest is the mask, which belongs to the micro batch.
        self._stack_bytes[recompute] = sum(each.num_bytes for each in rest if each.operation == stack)

    def count(self, recompute: frozenset[str], choices: Iterable[Values]) -> list[int]:
        """Bytes of a layer of each choice; of one that is not possible with stock's projection, which keeps as much."""
        possible = [
            each if self.is_possible(recompute, each) else replace_value(each, "linear_qkv", "off") for each in choices
        ]
        return [sum(row.num_bytes for row in rows) for rows in self.measure(recompute, possible)]

    def count_stack(self, recompute: frozenset[str]) -> int:
        """What the layers of a stage keep together: with full recomputation the angles of rotary embeddings."""
        if recompute not in self._stack_bytes:
            self.measure(recompute, [STOCK])
        return self._stack_bytes[recompute]

    def list_movable(self, choice: LayerChoice) -> dict[str, int]:
        """One of OFFLOAD_ROWS -> the bytes that a layer can send to the host by that name."""
        model, found = self._run.model, collections.Counter[str]()
        stacks = STACKS_OF_FAMILIES[model.family]
        names = {name_row(row, model.activation): find_offload_row(row) for row in LEDGER_ROWS if row.stack in stacks}
        (rows,) = self.measure(choice.recompute, [choice.values])
        for row in rows:
            if row.host_bytes and (name := names.get(row.operation)) is not None:
                found[name] += row.host_bytes
        return dict(found)

    def is_possible(self, recompute: frozenset[str], choice: Values) -> bool:
        """Whether the slots take a choice: not a projection that runs again where stock attention keeps copies of its
        q, k and v, so that nothing is saved."""
        values = dict(zip(LAYER_OPERATIONS, choice, strict=True))
        if values["attention"] != "off" or values["linear_qkv"] == "off" or "core_attn" in recompute:
            return True
        is_grouped = self._run.model.num_query_groups != self._run.model.num_attention_heads
        return not keeps_copies(is_megatrons=self._run.stock != "transformer_engine", is_grouped=is_grouped)


measure_rows = functools.lru_cache(maxsize=64)(LayerRows)
"""The rows of a run's layers; equal runs share what is measured."""


def measure_stock_layer(run: Run) -> dict[str, int]:
    """Row of the ledger -> bytes of a stock layer of a run's model, without recomputation."""
    (rows,) = LayerRows(run).measure(frozenset(), [STOCK])
    return {row.operation: row.num_bytes for row in rows}


def replace_value(values: Values, operation: str, value: str) -> Values:
    place = LAYER_OPERATIONS.index(operation)
    return (*values[:place], value, *values[place + 1 :])


class LayerOptions:
    """Measures and prices the ways to run a layer of a run on a GPU, for one micro batch."""

    def __init__(self, run: Run, gpu: Gpu, measure: Callable[[Run], LayerRows] = measure_rows) -> None:
        self._run, self._gpu = run, gpu
        self.flops, self.rows = count_layer_flops(run), measure(run)

    def seconds(self, flops: int, moved_bytes: int = 0) -> float:
        """The time of products and then of elementwise work."""
        rate = self._gpu.matmul_flops_per_second[_DTYPE_NAMES[self._run.dtype]]
        return flops / rate + moved_bytes / self._gpu.bytes_per_second

    def price(self, choice: LayerChoice) -> float:
        """What a choice adds to forward and backward of a layer, without its copies to the host."""
        return self.seconds(count_recomputed_flops(self.flops, choice), count_moved_bytes(self._run, choice))

    def make(self, recompute: frozenset[str], choices: Iterable[Values]) -> list[LayerOption]:
        """The options of these values and this recomputation, without offload."""
        choices, is_full = list(choices), "full" in recompute
        kept = self.rows.count(recompute, choices)
        # Backward runs the MLP's first linear again, and attention when the MLP has been differentiated, so that never
        # both results exist. In a layer that Megatron recomputes Tempo recomputes neither.
        with_mlp = [replace_value(each, "linear_fc1", "off") for each in choices]
        with_attention = []
        for values in with_mlp if is_full else choices:
            is_again = values[LAYER_OPERATIONS.index("attention")] == "recompute"
            values = replace_value(values, "attention", "flash") if is_again else values
            with_attention.append(replace_value(values, "linear_qkv", "off"))
        without = map(max, *(self.rows.count(frozenset(), each) for each in (with_mlp, with_attention)))
        found = []
        for values, num_bytes, whole in zip(choices, kept, without, strict=True):
            choice, replay_bytes = LayerChoice(values, recompute), whole if is_full else max(0, whole - num_bytes)
            found.append(LayerOption(choice, self.price(choice), num_bytes, replay_bytes))
        return found

    def move(self, option: LayerOption, offload: str, num_bytes: int) -> LayerOption:
        """An option of which nothing is on the host with these of its bytes there, and the device's time for copies."""
        copy_seconds = self.seconds(0, 2 * num_bytes)
        choice = dataclasses.replace(option.choice, offload=offload)
        kept_bytes, seconds = option.kept_bytes - num_bytes, option.seconds + copy_seconds
        return LayerOption(choice, seconds, kept_bytes, option.replay_bytes, num_bytes, copy_seconds)

    def make_ladder(
        self, recompute: frozenset[str], values: Mapping[str, Sequence[str]], window_bytes: int
    ) -> list[LayerOption]:
        """The undominated options of a layer with this recomputation by Megatron, of those with these values, by
        ascending time; of equal ones the first stays. Some of the rows are on the host where they fit the window."""
        every = itertools.product(*(values[name] for name in LAYER_OPERATIONS))
        prices = {
            each: self.price(LayerChoice(each, recompute)) for each in every if self.rows.is_possible(recompute, each)
        }
        options = self.make(recompute, [each for each in prices if not _is_matched(each, prices)])
        for option in options[:] if window_bytes else ():
            moved = choose_rows_to_move(self.rows.list_movable(option.choice), window_bytes)
            options += [self.move(option, offload, num_bytes) for offload, num_bytes in moved.items()]
        found: list[LayerOption] = []
        for option in sorted(options, key=lambda option: option[1:5]):
            if not any(all(map(operator.le, other[1:5], option[1:5])) for other in found):
                found.append(option)
        return found


def _is_matched(choice: Values, prices: Mapping[Values, float]) -> bool:
    """Whether a value further down the ladder, of one operation, has no higher price."""
    for operation, value in zip(LAYER_OPERATIONS, choice, strict=True):
        ladder = LADDER.get(operation, ())
        further = ladder[ladder.index(value) + 1 :] if value in ladder else ()
        if any(prices.get(replace_value(choice, operation, each), math.inf) <= prices[choice] for each in further):
            return True
    return False


def choose_rows_to_move(rows: Mapping[str, int], window_bytes: int) -> dict[str, int]:
    """Values of `offload` -> what a layer with these movable rows sends: the largest sets of rows that fit the window,
    half of it and a quarter of it; none of 0 bytes, and no size twice.

    Of sets of one size the one with fewer rows, the larger rows first, is taken.
    """
    names = sorted((name for name in rows if rows[name]), key=lambda name: (-rows[name], OFFLOAD_ROWS.index(name)))
    sets: dict[int, tuple[str, ...]] = {}
    for number in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, number):
            sets.setdefault(sum(rows[name] for name in chosen), chosen)
    found = {}
    for size in sorted({max((s for s in sets if s <= window_bytes // part), default=0) for part in (1, 2, 4)} - {0}):
        is_all = len(sets[size]) == len(names) and sets[size] != (INPUT,)
        found["all" if is_all else "+".join(sorted(sets[size], key=OFFLOAD_ROWS.index))] = size
    return found


def count_window_bytes(gpu: Gpu, layer_seconds: float) -> int:
    """The bytes that a layer can send to the host in the next layer's forward, of `layer_seconds`, and get back in its
    backward, which computes two products for each of forward's, while all GPUs that share an uplink copy.

    Raises ValueError where nothing says how fast the link is.
    """
    if gpu.host_link is None:
        raise ValueError(
            f"--host-memory is given, and the file of {gpu.title} has no host_link, the rates to the host's memory; "
            "write it as in configs/gpu/h100.json, or measure it with tempo-megatron bench --calibrate"
        )
    to_host, to_gpu = gpu.host_link.share()
    return int(min(layer_seconds * to_host, 2 * layer_seconds * to_gpu))


def count_recomputed_flops(flops: Flops, choice: LayerChoice) -> int:
    """FLOPs that Megatron's recomputation of a layer and Tempo's repeat. Nothing is computed a third time."""
    recompute, values = choice.recompute, choice.list_values()
    if "full" in recompute:
        return flops.layers
    found = flops.linear_qkv * (values["linear_qkv"] == "recompute")
    found += flops.core_attention * ("core_attn" in recompute or values["attention"] == "recompute")
    found += flops.up_projections * ("mla_up_proj" in recompute)
    of_mlp = {"recompute": flops.linear_fc1, "tile": flops.mlp}.get(values["linear_fc1"], 0)
    return found + (flops.mlp if recompute & {"mlp", "moe"} else of_mlp)


def count_moved_bytes(run: Run, choice: LayerChoice) -> int:
    """Bytes that elementwise work of one layer reads and writes beyond stock, per micro batch on one rank."""
    shape, t, element_bytes = run.model, run.layout.tp, run.dtype.itemsize
    recompute, values = choice.recompute, choice.list_values()
    is_full, norm = "full" in recompute, values["norm"]
    tokens = shape.seq_length * run.micro_batch_size // run.layout.cp
    # With sequence parallelism a rank has only its part of the tokens outside of attention and MLP.
    hidden = tokens // (t if run.layout.sp else 1) * shape.hidden_size * element_bytes
    num_elements = tokens * (count_inner(shape) // t)
    # What the activation reads and writes.
    of_activation = (3 if shape.is_gated else 2) * num_elements * element_bytes
    moved = 0
    if values["linear_fc1"] in ("recompute", "tile"):
        # A recomputed MLP is counted below.
        moved += 0 if recompute & {"mlp", "full"} else of_activation
    elif values["activation"] == "recompute":
        moved += 0 if "moe" in recompute else of_activation
    elif values["activation"] == "inplace" and shape.activation == "gelu":
        # A bit per element is written and read. The output is read instead of the input, which costs nothing more.
        moved += 2 * (-(-num_elements // 8))
    # Each of a token's experts has a copy of it.
    copies = shape.moe_router_topk * hidden if shape.num_experts is not None else 0
    if values["moe_permute"] != "off" and not recompute & {"moe", "full"}:
        moved += 2 * copies
    if norm == "recompute":
        moved += 2 * (2 * hidden)
    elif norm == "inplace":
        moved += 2 * (2 * 4 * (2 if shape.normalization == "LayerNorm" else 1) * shape.hidden_size)
    if not is_full:
        heads = (shape.num_attention_heads + shape.num_query_groups) // t
        queries_and_keys = tokens * heads * shape.kv_channels * element_bytes
        # With norms of their own they are normalised and rotated again, also where the projection is not repeated: once
        # more for their statistics, which are not kept.
        is_normalised = norm == "recompute" and shape.qk_layernorm and values["attention"] != "off"
        is_rotated = values["linear_qkv"] == "recompute" or is_normalised
        is_rotated &= shape.position_embedding_type == "rope"
        moved += 2 * queries_and_keys * (2 * is_normalised + is_rotated)
    if values["attention"] == "softmax" and shape.attention_dropout > 0:
        # Backward reads the softmax's output and writes its dropout again.
        moved += 2 * (tokens * shape.num_attention_heads // t * shape.seq_length * element_bytes)
    # Elementwise work that runs again with the products around it: also copies are made, and added up again; and two
    # norms, and two sums of an output and the residual.
    if recompute & {"mlp", "moe", "full"}:
        moved += of_activation + 2 * 2 * copies
    return moved + (2 * (2 * hidden) + 2 * (3 * hidden) if is_full else 0)


def write_block(layers: Sequence[LayerChoice], loss: str) -> dict[str, Any]:
    """The "tempo" block: its fields are the values of most layers, its "layers" the ranges that differ."""
    # The final norm and the embedding take the fields, too, and no recomputation drops what they keep: so the fields
    # are taken from layers that Megatron does not recompute.
    kept = [choice for choice in layers if "full" not in choice.recompute] or layers
    ((values, _),) = collections.Counter(choice.values for choice in kept).most_common(1)
    ((offload, _),) = collections.Counter(choice.offload for choice in layers).most_common(1)
    common = dict(zip(LAYER_OPERATIONS, values, strict=True))
    block: dict[str, Any] = {**common, "loss": loss}
    if any(choice.offload != "off" for choice in layers):
        block[OFFLOAD] = offload
    ranges = {}
    every = [{**choice.list_values(), OFFLOAD: choice.offload} for choice in layers]
    for own, group in itertools.groupby(range(len(layers)), key=every.__getitem__):
        if others := {name: value for name, value in own.items() if value != block.get(name, "off")}:
            ranges[write_layers(list(group))] = others
    return {**block, "layers": ranges} if ranges else block
