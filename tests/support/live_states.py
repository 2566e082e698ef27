"""What the live optimizer of each rank holds, written beside the checkpoints, and put together to the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

KEYS = ("weight", "exp_avg", "exp_avg_sq")


def keep_states() -> None:
    """In a rank: let every load and every save write what the live optimizer holds beside the checkpoints."""
    from tempo_megatron.training.checkpoint import Checkpoints

    load, save = Checkpoints.load, Checkpoints.save

    def load_and_dump(self: Checkpoints, *args: Any) -> Any:
        progress = load(self, *args)
        dump(self.engine, Path(self.run.metrics_file).parent / "loaded")
        return progress

    def save_and_dump(self: Checkpoints, progress: Any) -> None:
        save(self, progress)
        dump(self.engine, Path(self.run.metrics_file).parent / f"saved{progress.iteration}")

    Checkpoints.load, Checkpoints.save = load_and_dump, save_and_dump  # type: ignore[method-assign]


def dump(engine: Any, folder: Path) -> None:
    """Write whole parameters of this tensor-parallel rank with their moments, the bits of the model's too."""
    import deepspeed
    from megatron.core import parallel_state

    module, optimizer = engine.deepspeed.module, engine.deepspeed.optimizer
    if engine.zero_stage in (1, 2):
        # It links them in the first step, when some may not exist yet.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    states = {}
    for name, parameter in module.named_parameters():
        dimension = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        if engine.zero_stage == 0:
            values = [parameter.data, *(optimizer.state[parameter][key] for key in KEYS[1:])]
        else:
            values = [deepspeed.utils.safe_get_full_fp32_param(parameter)]
            values += [deepspeed.utils.safe_get_full_optimizer_state(parameter, key) for key in KEYS[1:]]
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_stage == 3):
            live = parameter.detach().clone()
        assert torch.equal(live, values[0].view(live.shape).to(live.dtype)), name
        states[name] = dimension, [value.detach().clone().view(live.shape) for value in values]
    if parallel_state.get_data_parallel_rank() == 0:
        folder.mkdir(exist_ok=True, parents=True)
        torch.save(states, folder / f"{parallel_state.get_tensor_model_parallel_rank()}.pt")


def join(folder: Path, is_gated: bool = False) -> dict[str, torch.Tensor]:
    """Name and key -> whole tensor of what dump wrote. A gated fc1 has its gates first, then its values.

    What tensor-parallel ranks each hold whole is the same on all of them.
    """
    ranks = [torch.load(path) for path in sorted(folder.glob("*.pt"))]
    whole = {}
    for name, (dimension, _) in ranks[0].items():
        for number, key in enumerate(KEYS):
            parts = [rank[name][1][number] for rank in ranks]
            if dimension is None:
                assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
                whole[f"{name} {key}"] = parts[0]
            elif is_gated and "linear_fc1" in name:
                halves = [part.chunk(2) for part in parts]
                whole[f"{name} {key}"] = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
            else:
                whole[f"{name} {key}"] = torch.cat(parts, dim=dimension)
    return whole
