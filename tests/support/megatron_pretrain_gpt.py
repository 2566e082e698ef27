"""Trains a GPT by megatron.training, in the place of Megatron-LM's pretrain_gpt.py, which its wheel leaves out.

Every rank reads the mock data that it needs itself, where a checkout's script sends them from the first tensor-parallel
rank to the others.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import import_module
from megatron.training import argument_utils, arguments, get_args, get_tokenizer, pretrain


def build_datasets(num_samples: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


build_datasets.is_distributed = True  # type: ignore[attr-defined]


def sum_losses(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
    """The sum over tokens, their number, and both to be printed."""
    loss = (losses.view(-1).float() * loss_mask.view(-1).float()).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}


def take_chunks(batch: dict[str, Any]) -> dict[str, Any]:
    """What belongs to the two chunks of the sequence that a context-parallel rank holds."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    if size == 1:
        return batch
    assert "attention_mask" not in batch
    places = rank, 2 * size - 1 - rank
    return {name: torch.cat([t.chunk(2 * size, 1)[place] for place in places], 1) for name, t in batch.items()}


def step_forward(data: Any, model: Any) -> Any:
    batch = take_chunks(next(data))
    inputs = (batch["tokens"], batch["position_ids"], batch.get("attention_mask"))
    losses = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return losses, functools.partial(sum_losses, batch["loss_mask"])


def choose_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    if args.spec is not None:
        return import_module(args.spec)
    if args.num_experts:
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
        )
    return get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    return GPTModel(
        config,
        choose_spec(args, config, vp_stage),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def main() -> None:
    given: dict[str, Any] = {
        "train_valid_test_dataset_provider": build_datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": step_forward,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:  # since 0.18 the arguments are parsed outside
        args = arguments.parse_and_validate_args()
        make_model_config = getattr(argument_utils, "gpt_config_from_args", None)  # since 0.19
        given["cfg_container"] = argument_utils.pretrain_cfg_container_from_args(
            args, make_model_config(args) if make_model_config else None
        )
        if make_model_config:
            pretrain(**given)
            return
    pretrain(**given, model_provider=build_model)


if __name__ == "__main__":
    main()
