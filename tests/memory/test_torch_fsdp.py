"""The estimate of a micro batch under torch's FSDP against Megatron's own wrapper of it, on the CPU: it is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import exhaustive
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed.torch_fully_sharded_data_parallel_config import TorchFullyShardedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_layer import TransformerLayer
from peak_cases import AUTO, OFF, Step, build, find_loss, make_run, start_anew
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

from tempo_megatron import use_cpu
from tempo_megatron.memory.estimate.estimate import estimate_ranks
from tempo_megatron.memory.estimate.torch_fsdp import count_initial_bytes, count_sharded_states
from tempo_megatron.memory.fake_tensors import simulate_layout
from tempo_megatron.memory.run import OptimizerSettings, TorchFsdp
from tempo_megatron.memory.simulated.phases import Parameter
from tempo_megatron.memory.storages import PeakBytes, count_storage_bytes
from tempo_megatron.slots import dropout_rng

SCALARS_BYTES = 32


class OutputLayer(ColumnParallelLinear):
    """Of a model, alone."""


UNITS = {TransformerLayer, LanguageModelEmbedding, RotaryEmbedding, OutputLayer}
FULL = ("full",)


class Resized(PeakBytes):
    """PeakBytes that sees memory which FSDP takes from a storage and gives back to it."""

    def resize(self, tensor: Tensor, num_bytes: int) -> None:
        made = self._alive.get(tensor.untyped_storage()._cdata)
        if made is None:
            return
        self._upper_bound += num_bytes - made.num_bytes
        made.num_bytes = num_bytes
        self.raise_peak(0)


def gather_alike(_: Any, output_tensor: Tensor, input_tensor: Tensor, **__: Any) -> None:
    """Every rank has what this one has."""
    size = input_tensor.numel()
    for part in output_tensor.split(size)[1:]:
        part.copy_(input_tensor)


def measure(step: Step, ranks: int, reshards: bool, num_micro_batches: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of weights, gradients, micro batch and all that a step's last forward and backward make, at most."""
    from_group = DeviceMesh.from_group
    monkeypatch.setattr(DeviceMesh, "from_group", lambda group, _: from_group(group, "cpu"))
    monkeypatch.setattr(_fsdp_collectives.DefaultAllGather, "__call__", gather_alike)
    use_cpu()
    with torch.compiler.set_stance("force_eager"), simulate_layout(1, ranks):
        model_parallel_cuda_manual_seed(1)
        model, make_batch = build(step)
        start_anew()
        # Of local modules all linears are of the output layer's class, so that none would be a unit; of Transformer
        # Engine's this one is.
        model.config.transformer_impl = "local"
        model.output_layer.__class__ = OutputLayer
        settings = TorchFullyShardedDataParallelConfig(reshard_after_forward=reshards)
        wrapped = TorchFullyShardedDataParallel(model.config, settings, model, UNITS)
        shards = [parameter.to_local() for parameter in wrapped.parameters()]
        inputs, mask = make_batch()
        there = [*shards, *(value for value in (*inputs.values(), mask) if value is not None)]
        with Resized(*there, *wrapped.buffers()) as seen:
            for module, name in (
                (_fsdp_param, "alloc_storage"),
                (_fsdp_param, "free_storage"),
                (_fsdp_param_group, "alloc_storage"),
            ):
                function = getattr(module, name)

                def resize(tensor: Tensor, function: Any = function) -> None:
                    function(tensor)
                    seen.resize(tensor, tensor.untyped_storage().nbytes())

                monkeypatch.setattr(module, name, resize)
            for number in range(num_micro_batches):
                dropout_rng.set_micro_batch(5, number * step.micro_batch_size)
                seen.begin_phase()
                find_loss(wrapped, inputs, mask).backward()
        found = seen.peak + count_storage_bytes({id(t): t for t in there}.values())
    monkeypatch.undo()
    return found


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize(
    ("step", "ranks", "reshards", "num_micro_batches"),
    [
        (Step("llama", True, OFF), 4, True, 2),
        (Step("llama", True, AUTO, recompute=FULL), 3, True, 1),
        *exhaustive(
            [Step("llama", False, OFF), 4, True, 1],
            [Step("llama", True, AUTO), 3, True, 2],
            [Step("llama", True, OFF, torch.float32), 4, False, 1],
            [Step("llama", True, OFF, recompute=FULL), 4, True, 2],
            [Step("llama", False, AUTO, recompute=FULL), 1, True, 1],
            [Step("gqa", True, AUTO), 4, False, 2],
        ),
    ],
    ids=str,
)
def test_the_peak_of_a_micro_batch_is_estimated(
    step: Step, ranks: int, reshards: bool, num_micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measure(step, ranks, reshards, num_micro_batches, monkeypatch)
    fsdp = TorchFsdp(reshards=reshards, is_made_on_gpu=False)
    optimizer = OptimizerSettings(distributed=False, torch_fsdp=fsdp)
    run = make_run(step, optimizer=optimizer, data_parallel=ranks, num_micro_batches=num_micro_batches)
    (rank,) = estimate_ranks(run)
    assert rank.moment not in ("optimizer step", "sharding of the model")
    assert abs(rank.peak_bytes - rank.parts["optimizer states"] - measured) <= SCALARS_BYTES


def test_a_rank_has_its_part_of_padded_rows_and_gradients_wait_for_vectors() -> None:
    words, matrix, vector = (
        Parameter((10, 4), is_matrix=False),
        Parameter((8, 4), is_matrix=True),
        Parameter((8,), False),
    )
    of = [words, matrix, vector], torch.bfloat16, 4
    own = (12 * 4 + 8 * 4 + 8) // 4
    states = count_sharded_states(*of, accumulates=True)
    assert (states.weights, states.optimizer_states, states.standing_gradients) == (2 * own, 12 * own, 2 * own)
    assert states.gradients == states.gradients_at_rest == 4 * own
    # The layer's part in bf16 is there when all but the vector is converted.
    assert states.step_transient == 2 * (8 + 2) - 4 * 2
    assert count_initial_bytes(*of) == 2 * (40 + 32 + 8 + 12)
    whole = count_sharded_states(of[0], torch.float32, 4, accumulates=False)
    assert (whole.optimizer_states, whole.standing_gradients, whole.step_transient) == (8 * own, 0, 0)
