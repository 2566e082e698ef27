"""Brings Tempo into the Trainer of transformers: Trainer(..., callbacks=[TempoCallback(seed=1)])."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tempo_torch.tempoize import is_tempoized, read_step, set_step, tempoize
from tempo_torch.versions import OLDEST_VERSIONS, check_versions


class TempoCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Gives the Trainer's model to tempoize before anything wraps it, and continues the masks after a checkpoint.

    A model that was given to tempoize before stays as it is. A `model_init` has to call tempoize itself.

    Args:
        choices: the arguments of `tempoize`; `seed` is the Trainer's own where it is not given.
    """

    def __init__(self, **choices: Any) -> None:
        self._choices = choices
        self._model: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Calls tempoize, before the Trainer wraps the model."""
        check_versions(OLDEST_VERSIONS)
        if getattr(args, "use_liger_kernel", False):
            raise ValueError(
                "use_liger_kernel is set together with TempoCallback, and both replace forwards of the model; "
                "expected one of them; leave the other out"
            )
        if model is not None and not is_tempoized(model):
            tempoize(model, **{"seed": args.seed, **self._choices})

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Continues the count of forwards, after a checkpoint was loaded, if any."""
        if not is_tempoized(model):
            raise ValueError(
                "the Trainer has made a new model, as with model_init, which TempoCallback does not see; expected a "
                "model_init that returns a model that was given to tempoize; call tempoize in model_init"
            )
        self._model = model
        saved = (state.stateful_callbacks or {}).get(type(self).__name__, {})
        set_step(model, *(saved.get("step") or (0, None)))

    def state(self) -> dict[str, Any]:
        """Returns what the Trainer saves in its own state: the arguments, and the step of the masks."""
        step = None if self._model is None else read_step(self._model)
        return {"args": self._choices, "attributes": {}, "step": step}
