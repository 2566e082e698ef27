"""Chunks of a pipeline whose micro batch makes and frees what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tempo_megatron.memory.simulated.chunk_memory import LAYERS, ChunkMemory, divide_blocks
from tempo_megatron.memory.tape.tape import Event


def make_chunk(forward: Sequence[Event], backward: Sequence[Event] = (), **values: Any) -> ChunkMemory:
    """A chunk of one layer with these events and values, and with no parameters unless they are among the values."""
    blocks = [((LAYERS, 0, False), forward), ((LAYERS, 0, True), backward)]
    segments = divide_blocks(blocks, gradients={}, workspaces={})
    numbers = dict.fromkeys(("mask_bytes", "global_buffer_bytes", "input_bytes", "output_bytes"), 0)
    none: dict[str, Any] = {**numbers, "batch_bytes": (), "parameters": ()}
    return ChunkMemory(**{**none, "forward": segments[:1], "backward": segments[1:], **values})
