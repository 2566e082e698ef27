"""Follows the forward and backward of a whole model on fake tensors: its memory over time, at any size."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from tempo_kernels.gelu import make_tables
from tempo_megatron import cpu
from tempo_megatron.memory.fake_tensors import simulate_layout, use_fake_tensors
from tempo_megatron.memory.kept.ledger import build_ledger_config, convert_parameters
from tempo_megatron.memory.kept.standing_bytes import WEIGHTS
from tempo_megatron.memory.kept.timeline import StepTimeline, Timeline
from tempo_megatron.memory.run import Run
from tempo_megatron.memory.simulated.device import on_device
from tempo_megatron.memory.storages import find_storages
from tempo_megatron.models.build import build_model, choose_for_model
from tempo_megatron.models.inputs import make_inputs
from tempo_megatron.settings.operations import STACKS
from tempo_megatron.slots import dropout_rng


def simulate_step(run: Run, *, title: str) -> Timeline:
    """One micro batch of all layers on rank 0 of a tensor-parallel group, with Megatron's local modules as on a GPU.

    It ends with the last gradient: there is no optimizer. Raises ValueError where the model has no vocab_size.
    """
    shape, vocab_size = run.model, run.padded_vocab_size
    cpu.use_cpu()
    make_tables()
    with simulate_layout(run.tensor_parallel):
        model_parallel_cuda_manual_seed(1234)
        dropout_rng.set_micro_batch(1234, 0)
        config = build_ledger_config(
            shape, sequence_parallel=run.sequence_parallel, dtype=run.dtype, recompute=run.recompute
        )
        chosen = choose_for_model(shape, config, run.tempo).config
        with use_fake_tensors(), on_device("local"):
            model = build_model(shape, config, chosen, vocab_size).train()
            convert_parameters(model, run.dtype)
            gives_mask = any(
                chosen.for_layer(layer, stack).attention == "off"
                for layer in range(shape.num_layers)
                for stack in STACKS
            )
            batch = make_inputs(shape, vocab_size, run.micro_batch_size, causal_mask=gives_mask)
            timeline = StepTimeline([model], {WEIGHTS: find_storages(model.parameters())})
            with timeline:
                _run(model, batch, takes_mask=shape.family == "gpt" or chosen.loss == "fused")
            return timeline.finish(title)


def _run(model: torch.nn.Module, batch: dict[str, torch.Tensor], *, takes_mask: bool) -> None:
    labels = batch["lm_labels" if "lm_labels" in batch else "labels"]
    mask = torch.ones(labels.shape, dtype=torch.float32)
    output = model(**batch, **({"loss_mask": mask} if takes_mask else {}))
    losses = output[0] if isinstance(output, tuple) else output
    loss = (losses.float() * mask).sum() / mask.sum()
    del output, losses
    loss.backward()
