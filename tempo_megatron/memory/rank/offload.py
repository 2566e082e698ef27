"""Counts what the layers of a run send to the host, and what of it is on the device at a time.

The engine's order (`tempo_kernels.offload`): what layer n sends leaves while layer n + 1 runs forward, and is freed
when that ends; it comes back while layer n + 1 runs backward. So two layers' groups are on the device at a time. The
last layer of a chunk has nothing behind it to run meanwhile, so what it keeps stays where it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tempo_kernels.offload import MIN_BYTES
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.chunk import record_chunk
from tempo_megatron.memory.tape.rows import find_row
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.settings.layer_values import LAYER_OPERATIONS, OFFLOAD
from tempo_megatron.settings.operations import STACKS_OF_FAMILIES, find_offload_row, is_moved


def drop_offload(config: TempoConfig) -> TempoConfig:
    """The same operations, of which nothing goes to the host."""
    layers = {
        key: {name: value for name, value in values.items() if name != OFFLOAD}
        for key, values in config.layers.items()
        if values.keys() - {OFFLOAD}
    }
    return dataclasses.replace(config, offload="off", layers=layers)


def list_moved_of_layers(run: Run, layers: range) -> tuple[tuple[int, ...], ...]:
    """For each layer of a chunk, counted from 0 over the whole model, the bytes of each storage that one micro batch
    sends to the host.

    Raises ValueError for a T5, a hybrid and multi-token prediction, whose layers the engine does not know.
    """
    if not layers or not run.tempo.offloads:
        return ((),) * len(layers)
    if run.model.family == "t5" or run.hybrid is not None or run.mtp_num_layers:
        raise ValueError(
            "tempo.offload is given for a T5, a hybrid or multi-token prediction, which it does not know; leave it out"
        )
    (stack,), has_experts = STACKS_OF_FAMILIES[run.model.family], run.model.layers_with_experts
    kinds = [
        (run.tempo.for_layer(layer, stack), run.find_recomputed(layer - layers.start), has_experts[layer])
        for layer in layers
    ]
    distinct = list(dict.fromkeys(kinds))
    values = {
        str(place): {name: getattr(config, name) for name in LAYER_OPERATIONS}
        for place, (config, _, _) in enumerate(distinct)
    }
    of_kinds = dataclasses.replace(
        run,
        model=run.model.take_layers([layers[kinds.index(kind)] for kind in distinct]),
        tempo=dataclasses.replace(run.tempo, offload="off", layers=values),
        layout=dataclasses.replace(run.layout, pp=1, dp=1, chunks=None),
        # Those that are recomputed as a whole are the first ones of the chunk, and so of its kinds.
        recompute_num_layers=run.recompute_num_layers and sum("full" in recomputed for _, recomputed, _ in distinct),
    )
    by_layer, _ = record_chunk(of_kinds, range(len(distinct)))
    moved: dict[Any, tuple[int, ...]] = {}
    for place, kind in enumerate(distinct):
        rows = [
            (find_offload_row(find_row(saved.operation, saved.shape, (run.tokens_of_sample,))), saved.num_bytes)
            for saved in by_layer[stack, place]
        ]
        moved[kind] = tuple(
            size for row, size in rows if row is not None and size >= MIN_BYTES and is_moved(row, kind[0].offload)
        )
    return (*(moved[kind] for kind in kinds[:-1]), ())
