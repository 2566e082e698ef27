"""Tempo in the Trainer of transformers: Trainer(..., callbacks=[TempoCallback(seed=1)])."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tempo_torch.tempoize import set_step, tempoize


class TempoCallback(TrainerCallback):  # type: ignore[misc]
    """Gives the Trainer's model to tempoize before anything wraps it, and lets masks go on where a checkpoint ended.

    Args:
        choices: the arguments of `tempoize`; `seed` is the Trainer's own where it is not given.
    """

    def __init__(self, **choices: Any) -> None:
        self._choices = choices

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Before the Trainer wraps the model."""
        if model is None:
            raise ValueError(
                "the Trainer has no model when it is made, as with model_init; expected a model; give it to tempoize "
                "in model_init, and leave TempoCallback out"
            )
        tempoize(model, **{"seed": args.seed, **self._choices})

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """After a checkpoint was loaded, if one was."""
        set_step(model, state.global_step * args.gradient_accumulation_steps)
