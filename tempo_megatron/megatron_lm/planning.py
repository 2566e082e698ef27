"""Plans the memory budget of a Megatron-LM run when its first model is built.

By then the run's TransformerConfig is fixed, and with it Megatron's recomputation, which stays as written. Only the
values of Tempo's operations are planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tempo_megatron.megatron_lm.report import RunReport
from tempo_megatron.megatron_lm.versions import Model
from tempo_megatron.settings.arguments import Budget
from tempo_megatron.settings.config import TempoConfig

_REMEDY = (
    "raise the budget, --tensor-model-parallel-size or --pipeline-model-parallel-size, lower --micro-batch-size, or "
    "let Megatron recompute (tempo-megatron plan says what)"
)
# Fields of a TransformerConfig that ModelShape lacks. A layer can be measured only if they have these values.
_NEUTRAL = {
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "layernorm_zero_centered_gamma": False,
}


def make_planner(
    tempo_config: TempoConfig, budget: Budget | None, report: RunReport
) -> Callable[[Model, dict[str, Any], Any], TempoConfig]:
    """Returns a function of a model, the arguments that it is built with, and Megatron's own arguments or None, which
    returns the model's TempoConfig.

    At its first call rank 0 plans for the budget, if there is one, and every rank gets the plan or the error: all ranks
    build a model. The report gets the plan's description.

    It raises ValueError where nothing fits, or the planner does not know the run.
    """
    if budget is None:
        return lambda *_: tempo_config
    chosen: TempoConfig | None = None

    def choose(model: Model, arguments: dict[str, Any], run: Any) -> TempoConfig:
        nonlocal chosen
        if chosen is not None:
            return chosen
        if run is None:
            raise ValueError(
                "a memory budget is given, and Megatron's arguments, which say the sizes, are not initialized in this "
                "script; leave it out"
            )
        from tempo_megatron.memory.live.aside import plan_for_all_ranks

        plan = plan_for_all_ranks(
            lambda: _make_request(model.name, arguments, run, tempo_config, budget.host_bytes), budget.device_bytes
        )
        report.plan = f"{plan.describe()}, as written: it is not planned here"
        chosen = dataclasses.replace(plan.tempo, check=tempo_config.check)
        return chosen

    return choose


def _make_request(name: str, arguments: dict[str, Any], run: Any, tempo_config: TempoConfig, host_bytes: int) -> Any:
    import torch

    from tempo_megatron.megatron_lm.run_reader import read_configured_run
    from tempo_megatron.memory.live.aside import share_host
    from tempo_megatron.memory.megatron.read_run import find_unknown
    from tempo_megatron.memory.plan.gpu import find_gpu
    from tempo_megatron.memory.plan.planner import PlanRequest

    config = arguments["config"]
    unknown = find_unknown(name, config, run) or _find_unplanned(config)
    if unknown is not None:
        raise ValueError(f"the run has {unknown}; leave the memory budget out, and give the operations their values")
    return PlanRequest(
        run=read_configured_run(name, config, arguments, run, tempo_config),
        gpu=find_gpu(torch.cuda.get_device_name() if torch.cuda.is_available() else None),
        host_bytes=share_host(host_bytes),
        recompute=None,
        remedy=_REMEDY,
    )


def _find_unplanned(config: Any) -> str | None:
    """A setting that the planner does not support although the estimate does."""
    if config.virtual_pipeline_model_parallel_size is not None:
        return "virtual pipeline stages"
    if (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage) != (None, None):
        return "pipeline stages of unequal layers"
    # Versions of Megatron that lack a field have it at its neutral value.
    found = (name for name, neutral in _NEUTRAL.items() if getattr(config, name, neutral) != neutral)
    return next((f"{name} {getattr(config, name)}, which no ModelShape has" for name in found), None)
