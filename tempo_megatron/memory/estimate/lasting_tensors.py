"""Counts what the layers of a rank hold from one micro batch to the next beside weights: rotary tables, and routing.

Rotary embeddings are cached where they are made (core/models/common/embeddings/rotary_pos_embedding.py: lru_cache): by
the model, or with latent attention by every layer, with tables of cosines and sines beside them where it is Yarn's
(yarn_rotary_pos_embedding.py: _set_cos_sin_cache; of the run's dtype, as the model's other buffers). A dispatcher has
in attributes how the tokens of the latest micro batch went to experts (core/transformer/moe/token_dispatcher.py:
MoEAlltoAllTokenDispatcher.dispatch_preprocess, MoEAllGatherTokenDispatcher.dispatch_postprocess,
_HybridEPManager.setup_metadata). All of Megatron-LM at d98e8a64dd.
"""

from __future__ import annotations

from tempo_megatron.memory.run import Run

_FLOAT32 = 4
_YARN_POSITIONS = 4096
"""Of Yarn's tables where no kernel rotates (--original-max-position-embeddings)."""


def count_lasting_tensors(run: Run, stage: int) -> int:
    """Bytes on a rank of a pipeline stage."""
    chunks = run.list_chunks(stage)
    layers = [layer for chunk in chunks for layer in chunk]
    if run.mtp_num_layers and any(ends["predicts"] for ends in run.list_ends(stage)):
        # Those of multi-token prediction are as the model's last, or of a hybrid as its pattern says.
        last = run.model.num_layers - 1 if run.hybrid is None else run.hybrid.pattern.rfind(run.hybrid.mtp_pattern[-1])
        layers += [last] * (1 if run.mtp_repeats_layer else run.mtp_num_layers)
    num_tables = len(chunks)
    if run.mtp_precedes_head and stage == run.layout.pp - 1:
        # As long as the head's input, which further tokens' hidden states lengthen (gpt_model.py: get_rotary_seq_len).
        num_tables += run.mtp_num_layers
    found = _count_rotary_tables(run, num_tables, len(layers))
    has_experts = run.model.layers_with_experts
    number = sum(has_experts[layer] for layer in layers)
    return found + number * _count_routing(run) if number else found


def _count_rotary_tables(run: Run, num_tables: int, num_layers: int) -> int:
    model = run.model
    if model.position_embedding_type not in ("rope", "yarn"):
        return 0
    positions = model.seq_length // run.layout.cp
    if not model.multi_latent_attention:
        return num_tables * _FLOAT32 * positions * int(model.kv_channels * model.rotary_percent)
    tables = 0
    if model.position_embedding_type == "yarn":
        # A context-parallel rank has its own positions.
        in_tables = positions if run.fuses_latent_rope else _YARN_POSITIONS // run.layout.cp
        tables = 2 * run.dtype.itemsize * in_tables
    return num_layers * (model.qk_pos_emb_head_dim or 0) * (_FLOAT32 * positions + tables)


def _count_routing(run: Run) -> int:
    """Of one layer: probabilities, which expert each token goes to, and where its copies lie."""
    tokens = run.micro_batch_size * run.model.seq_length // run.layout.cp
    tokens //= run.layout.tp if run.layout.sp else 1
    of_probability, number = (run.router_dtype or run.dtype).itemsize, run.model.num_experts or 0
    if run.layout.dispatcher == "flex":
        return tokens * number * (_FLOAT32 + 1)
    if run.layout.dispatcher == "alltoall":
        places = _count_places(run, tokens, number, run.count_sent(tokens))
        return tokens * number * (of_probability + 1) + places
    tokens *= run.layout.ep * run.layout.etp
    local, rows = run.num_local_experts, run.count_sent(tokens) // run.layout.ep
    return tokens * local + rows * of_probability + _count_places(run, tokens, local, rows)


def _count_places(run: Run, tokens: int, num_experts: int, rows: int) -> int:
    """An int64 for each copy; a kernel has an int32 for each token and twice each expert, and how many there are."""
    return 4 * tokens * (2 * num_experts + 1) if run.moe_permute_fusion else 8 * rows
