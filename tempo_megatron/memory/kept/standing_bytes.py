"""Counts the persistent memory of a run: weights, gradients and optimizer states.

torch's optimizers tell when they step, whoever wraps them (DeepSpeed's ZeRO, Megatron's distributed optimizer): what
they step with are the gradients, and what they remember afterwards are the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tempo_megatron.memory.storages import find_storages

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"


class StandingBytes:
    """Looks at the first step of every optimizer of a run until `close`.

    Args:
        models: of this rank; their parameters are the weights. What an optimizer steps besides (float32 copies) counts
            as its states.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
        self._gradients: dict[int, int] = {}
        self._states: dict[int, int] = {}
        self._seen: set[int] = set()
        self._hooks = [
            register_optimizer_step_pre_hook(self._note_gradients),
            register_optimizer_step_post_hook(self._note_states),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def count(self) -> dict[str, int]:
        """Bytes by kind; gradients and states are 0 while no optimizer has stepped."""
        found = {**self.list_lasting(), GRADIENTS: self._gradients}
        return {kind: sum(storages.values()) for kind, storages in found.items()}

    def list_lasting(self) -> dict[str, dict[int, int]]:
        """The storages of weights and states, as find_storages has them."""
        return {WEIGHTS: find_storages(self._list_parameters()), STATES: self._states}

    def _list_parameters(self) -> list[Tensor]:
        return [parameter for model in self._models for parameter in model.parameters()]

    def _note_gradients(self, optimizer: Any, *_: Any) -> None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [getattr(p, name, None) for p in (*self._list_parameters(), *stepped) for name in ("grad", "main_grad")]
        self._gradients |= find_storages(grad for grad in grads if isinstance(grad, Tensor))

    def _note_states(self, optimizer: Any, *_: Any) -> None:
        weights = find_storages(self._list_parameters())
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        remembered = [value for state in optimizer.state.values() for value in state.values()]
        found = find_storages(t for t in (*stepped, *remembered) if isinstance(t, Tensor))
        self._states |= {key: size for key, size in found.items() if key not in weights}
