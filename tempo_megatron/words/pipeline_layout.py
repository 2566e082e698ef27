"""Reads Megatron's --pipeline-model-parallel-layout: which layers each chunk of a pipeline has, in order."""

from __future__ import annotations

import re


def parse_pipeline_layout(text: str, num_layers: int, stages: int, mtp_num_layers: int = 0) -> list[str]:
    """Returns the letters of each chunk: E, L, t for a layer and m for one of multi-token prediction.

    As transformer/pipeline_parallel_layer_layout.py of megatron-core 0.16.1 reads it: chunks have | between them, a
    letter or a part in parentheses may be repeated by *N, and commas mean nothing. Of N chunks stage 0 has the first,
    and in turn one of each `stages` of the rest.

    Raises ValueError if the layout is not of a model of these layers, or the chunks do not divide over the stages.
    """
    repeated = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text.replace(",", ""))
    repeated = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), repeated)
    chunks = repeated.split("|")
    if "".join(chunks) != f"E{'t' * num_layers}{'m' * mtp_num_layers}L":
        of_mtp = f", {mtp_num_layers} times m" if mtp_num_layers else ""
        raise ValueError(
            f"--pipeline-model-parallel-layout {text} is not E, {num_layers} times t{of_mtp} and L, in chunks with | "
            "between; correct it"
        )
    if len(chunks) % stages:
        raise ValueError(
            f"--pipeline-model-parallel-layout {text} has {len(chunks)} chunks, which are not a multiple of "
            f"--pipeline-model-parallel-size {stages}; change one of them"
        )
    return chunks
