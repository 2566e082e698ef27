"""The memory budget of a Megatron-LM run: what its layers keep is planned when its first model is built.

The run's TransformerConfig stands by then, and Megatron's recomputation with it: that stays as written, and the values
of Tempo's operations are planned.
"""

from __future__ import annotations

from typing import Any

from tempo_megatron.config import TempoConfig
from tempo_megatron.megatron_lm.report import Report
from tempo_megatron.megatron_lm.versions import Model
from tempo_megatron.memory.formula import refuse_unknown_settings

_REMEDY = (
    "raise the budget, --tensor-model-parallel-size or --pipeline-model-parallel-size, lower --micro-batch-size, or "
    "let Megatron recompute (tempo-megatron plan says what)"
)
_FAMILIES = {"GPTModel": "gpt", "BertModel": "bert"}


class Planning:
    """What becomes of a run's TempoConfig.

    Args:
        tempo_config: as written.
        budget: bytes that a rank may hold; None plans nothing.
        report: is told of the plan.
    """

    def __init__(self, tempo_config: TempoConfig, budget: int | None, report: Report) -> None:
        self._tempo_config, self._budget, self._report = tempo_config, budget, report

    def choose(self, model: Model, arguments: dict[str, Any], run: Any) -> TempoConfig:
        """The values for a model that is built with `arguments` in a run of Megatron's arguments `run`.

        The first time, rank 0 plans and every rank gets its plan or its error. All ranks build a model.

        Raises ValueError where nothing fits, or the planner does not know the run.
        """
        if self._budget is None:
            return self._tempo_config
        import torch.distributed as dist

        from tempo_megatron.memory.plan_run import plan_beside

        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [plan_beside(self._make_question(model, arguments, run), self._budget)]
            except ValueError as error:
                found = [f"memory budget: {error}"]
        dist.broadcast_object_list(found, src=0)
        (plan,) = found
        if isinstance(plan, str):
            raise ValueError(plan)
        self._tempo_config, self._budget = plan.tempo, None
        self._report.plan = f"{plan.describe()}, as written: it is not planned here"
        return self._tempo_config

    def _make_question(self, model: Model, arguments: dict[str, Any], run: Any) -> Any:
        import torch

        from tempo_megatron.memory.estimate import RankLayout
        from tempo_megatron.memory.model_states import OptimizerSettings
        from tempo_megatron.memory.plan_request import Question, read_written_recomputation
        from tempo_megatron.memory.plan_run import find_gpu

        config, stages = arguments["config"], run.pipeline_model_parallel_size
        _check(model, config, run)
        on_gpu = torch.cuda.is_available()
        stock = getattr(run, "transformer_impl", "local")
        samples = run.micro_batch_size * run.data_parallel_size
        written = read_written_recomputation(
            config.recompute_granularity,
            config.recompute_method,
            config.recompute_num_layers,
            config.recompute_modules,
            config.num_layers // stages,
        )
        return Question(
            shape=_read_shape(model, arguments, run),
            layout=RankLayout(
                tensor_parallel=config.tensor_model_parallel_size,
                pipeline_parallel=stages,
                data_parallel=run.data_parallel_size,
                sequence_parallel=config.sequence_parallel,
                micro_batch_size=run.micro_batch_size,
                num_micro_batches=max(1, run.global_batch_size // samples),
                dtype=config.params_dtype,
                stock=stock if on_gpu and stock == "transformer_engine" else "local" if on_gpu else "cpu",
            ),
            optimizer=OptimizerSettings(distributed=run.use_distributed_optimizer),
            gpu=find_gpu(torch.cuda.get_device_name() if on_gpu else None),
            tempo=self._tempo_config,
            remedy=_REMEDY,
            **(written or {"recompute": frozenset(), "is_written": True}),
        )


def _check(model: Model, config: Any, run: Any) -> None:
    """Raise ValueError for what the planner does not know."""
    name = model.place.partition(":")[2]
    obstacles = {
        f"a {name}, and the planner knows GPTModel and BertModel": name not in _FAMILIES,
        "layers of experts": bool(config.num_moe_experts),
        "latent attention": bool(getattr(config, "multi_latent_attention", False)),
        f"context parallel size {config.context_parallel_size}": config.context_parallel_size > 1,
        "virtual pipeline stages": config.virtual_pipeline_model_parallel_size is not None,
        "pipeline stages of unequal layers": any(
            getattr(config, name, None) is not None
            for name in (
                "num_layers_in_first_pipeline_stage",
                "num_layers_in_last_pipeline_stage",
                "pipeline_model_parallel_layout",
            )
        ),
        "weights sharded by Megatron-FSDP": bool(getattr(run, "use_megatron_fsdp", False)),
        f"the optimizer {run.optimizer}, and the planner knows adam": run.optimizer != "adam",
        "optimizer states on the host": bool(getattr(run, "optimizer_cpu_offload", False)),
        "float8": bool(getattr(config, "fp8", None)),
    }
    found = next((words for words, stands in obstacles.items() if stands), None)
    if found is not None:
        raise ValueError(f"the run has {found}; leave the memory budget out, and give the operations their values")
    refuse_unknown_settings(config)


def _read_shape(model: Model, arguments: dict[str, Any], run: Any) -> Any:
    from tempo_megatron.models.shape import make_shape
    from tempo_megatron.slots.mlp import describe_activation

    config, name = arguments["config"], model.place.partition(":")[2]
    values = {
        field: getattr(config, field)
        for field in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "qk_layernorm",
            "window_size",
            "add_bias_linear",
            "attention_dropout",
            "hidden_dropout",
        )
    }
    shared = arguments["share_embeddings_and_output_weights"]
    return make_shape(
        **values,
        # Megatron's is of all linears, or of q, k and v only.
        add_qkv_bias=config.add_qkv_bias and not config.add_bias_linear,
        family=_FAMILIES[name],
        activation=describe_activation(config),
        seq_length=run.seq_length,
        max_position_embeddings=arguments["max_sequence_length"],
        # As this run pads it.
        vocab_size=arguments["vocab_size"],
        make_vocab_size_divisible_by=1,
        position_embedding_type=arguments["position_embedding_type"],
        untie_embeddings_and_output_weights=not shared,
        num_tokentypes=arguments.get("num_tokentypes") or 0,
        add_binary_head=bool(arguments.get("add_binary_head", False)),
    )
