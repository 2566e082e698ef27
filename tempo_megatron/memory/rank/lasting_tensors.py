"""Counts what the layers of a rank hold from one micro batch to the next beside weights: rotary tables, and routing.

Rotary embeddings are cached where they are made (core/models/common/embeddings/rotary_pos_embedding.py: lru_cache): by
the model, or with latent attention by every layer, with tables of cosines and sines beside them where it is Yarn's
(yarn_rotary_pos_embedding.py: _set_cos_sin_cache; of the run's dtype, as the model's other buffers). A dispatcher has
in attributes how the tokens of the latest micro batch went to experts (core/transformer/moe/token_dispatcher.py:
MoEAlltoAllTokenDispatcher.dispatch_preprocess, MoEAllGatherTokenDispatcher.dispatch_postprocess,
_HybridEPManager.setup_metadata). All of Megatron-LM at d98e8a64dd.
"""

from __future__ import annotations

from tempo_megatron.memory.run import Experts, Run

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
    if run.mtp_precedes_head and stage == run.pipeline_parallel - 1:
        # As long as the head's input, which further tokens' hidden states lengthen (gpt_model.py: get_rotary_seq_len).
        num_tables += run.mtp_num_layers
    found = _count_rotary_tables(run, num_tables, len(layers))
    if run.experts is not None:
        found += sum(run.experts.layers[layer] for layer in layers) * _count_routing(run, run.experts)
    return found


def _count_rotary_tables(run: Run, num_tables: int, num_layers: int) -> int:
    if run.model.position_embedding_type != "rope":
        return 0
    positions, latent = run.model.seq_length // run.context_parallel, run.latent_attention
    if latent is None:
        return num_tables * _FLOAT32 * positions * int(run.model.kv_channels * run.model.rotary_percent)
    tables = 0
    if latent.is_yarn:
        # A context-parallel rank has its own positions.
        in_tables = positions if latent.fuses_rope else _YARN_POSITIONS // run.context_parallel
        tables = 2 * run.dtype.itemsize * in_tables
    return num_layers * latent.qk_pos_emb_head_dim * (_FLOAT32 * positions + tables)


def _count_routing(run: Run, experts: Experts) -> int:
    """Of one layer: probabilities, which expert each token goes to, and where its copies lie."""
    tokens = run.micro_batch_size * run.model.seq_length // run.context_parallel
    tokens //= run.tensor_parallel if run.sequence_parallel else 1
    of_probability = (experts.router_dtype or run.dtype).itemsize
    if experts.dispatcher == "flex":
        return tokens * experts.num_experts * (_FLOAT32 + 1)
    if experts.dispatcher == "alltoall":
        return tokens * experts.num_experts * (of_probability + 1) + _count_places(
            experts, tokens, experts.num_experts, experts.count_sent(tokens)
        )
    tokens *= experts.expert_parallel * experts.tensor_parallel
    local, rows = experts.num_experts // experts.expert_parallel, experts.count_sent(tokens) // experts.expert_parallel
    return tokens * local + rows * of_probability + _count_places(experts, tokens, local, rows)


def _count_places(experts: Experts, tokens: int, num_experts: int, rows: int) -> int:
    """An int64 for each copy; a kernel has an int32 for each token and twice each expert, and how many there are."""
    return 4 * tokens * (2 * num_experts + 1) if experts.fuses_permutation else 8 * rows
