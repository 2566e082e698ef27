"""Patches Megatron-LM in memory for a run under `--use-tempo`; none of its files changes.

The constructors of its models build layers with Tempo's modules, and its schedules announce each micro batch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer import multi_latent_attention

from tempo_megatron.beside import is_ours
from tempo_megatron.megatron_lm import versions
from tempo_megatron.megatron_lm.planning import make_planner
from tempo_megatron.megatron_lm.report import BuiltModel, RunReport
from tempo_megatron.megatron_lm.samples import announce_micro_batch
from tempo_megatron.megatron_lm.versions import LaunchError, Model, get_hook, wrap_hook
from tempo_megatron.settings.arguments import Budget
from tempo_megatron.settings.config import TempoConfig
from tempo_megatron.slots.choose import Obstacles, Refusal
from tempo_megatron.slots.context_parallel import count_ranks_of_rows
from tempo_megatron.slots.dropout import tempoize_embedding
from tempo_megatron.slots.dropout_rng import list_dropouts
from tempo_megatron.slots.hybrid import tempoize_hybrid
from tempo_megatron.slots.layer_spec import tempoize
from tempo_megatron.slots.loss import choose_loss, tempoize_loss
from tempo_megatron.slots.megatron_versions import find_version, has_cuda_graphs, is_since
from tempo_megatron.slots.offload import Offloading, count_in_flight
from tempo_megatron.slots.report import check_built, report_on


def patch_models(version: str, tempo_config: TempoConfig, report: RunReport, budget: Budget | None = None) -> None:
    """Let Megatron's models be built with Tempo's modules, and let its schedules announce each micro batch.

    budget: the memory that a rank may hold; operations on "auto" are planned for it. None plans nothing.

    Raises LaunchError where a place is missing.
    """
    get_args = get_hook(versions.GET_ARGS, version)
    plan = make_planner(tempo_config, budget, report)
    wrappers: dict[versions.Patch, Callable[..., Any]] = {
        versions.BEGIN_MICRO_BATCH: functools.partial(begin_micro_batch, report, get_args),
        **dict.fromkeys(versions.PIPELINES, functools.partial(_publish_before_step, report)),
        versions.FULL_ITERATION: functools.partial(begin_whole_step, report, get_args),
    }
    for model in versions.MODELS:
        wrappers[model.constructor] = functools.partial(_construct, model, plan, get_args, report)
    for patch, wrapper in wrappers.items():
        if is_since(patch.since):
            wrap_hook(patch, version, wrapper)


def patch_steps(version: str, prefix: str, report: RunReport | None) -> None:
    """Let `--tempo-ledger` watch the first two training steps, with Tempo on or off (no report).

    Raises LaunchError where the place is missing.
    """
    get_args = get_hook(versions.GET_ARGS, version)
    observers: list[Any] = []

    def observe(train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from tempo_megatron.megatron_lm.run_reader import read_model
        from tempo_megatron.memory.live.run_ledger import RunObserver

        if not observers:
            run = get_args()
            observer = RunObserver(
                inspect.signature(train_step).bind(*args, **kwargs).arguments["model"],
                prefix,
                micro_batch_size=run.micro_batch_size,
                seq_length=run.seq_length,
                decoder_seq_length=getattr(run, "decoder_seq_length", None),
                read_run=lambda model: read_model(model, run, layers_only=True),
                engine=report.offloading.engine if report and report.offloading else None,
            )
            observers.append(observer)
        with observers[0].step():
            return train_step(*args, **kwargs)

    wrap_hook(versions.TRAIN_STEP, version, observe)


def begin_micro_batch(
    report: RunReport, get_args: Callable[[], Any], begin: Callable[..., Any], model: Any, microbatch_id: int
) -> Any:
    """Publish the report, and tell Tempo's dropout the samples, once a model draws masks; then `begin`."""
    report.publish_once()
    if microbatch_id == 0:
        report.say_what_moves()
    # Where no model draws masks, Megatron's tracker holds its own states only.
    if any(built.draws_masks for built in report.models):
        announce_micro_batch(get_args(), microbatch_id)
    return begin(model, microbatch_id)


def _publish_before_step(report: RunReport, run_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A step of all stages of a pipeline, which first publish a report of all of them."""
    report.gather_once(parallel_state.get_pipeline_model_parallel_group(check_initialized=False))
    report.publish_once()
    return run_step(*args, **kwargs)


def begin_whole_step(
    report: RunReport, get_args: Callable[[], Any], run_step: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Tell Tempo's dropout the step's first sample, then `run_step`: the schedule says no micro batch in a replay of
    the graph of a whole step, whose dropouts add their distance to that sample."""
    if any(built.draws_masks for built in report.models) and not kwargs.get("forward_only"):
        announce_micro_batch(get_args(), 0)
    return run_step(*args, **kwargs)


def _construct(
    model: Model,
    plan: Callable[[Model, dict[str, Any], Any], TempoConfig],
    get_args: Callable[[], Any],
    report: RunReport,
    construct: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Megatron's constructor of a model, whose specs Tempo replaces first."""
    given = inspect.signature(construct).bind(*args, **kwargs)
    given.apply_defaults()
    names = (*model.specs, *model.specs.values(), *model.patterns)
    if missing := [name for name in names if name not in given.arguments]:
        raise LaunchError(
            f"the constructor of {model.name} has no argument {' or '.join(missing)}, which --use-tempo takes hold of; "
            "leave --use-tempo out"
        )
    try:
        run = get_args()
    except AssertionError:  # in a script that initializes none
        run = None
    try:
        _refuse_latent_attention(given.arguments["config"])
        tempo_config = plan(model, given.arguments, run)
        found = _replace_specs(model, given.arguments, tempo_config, run)
        construct(*given.args, **given.kwargs)
        _finish_model(args[0], found, tempo_config)
        _offload(args[0], tempo_config, run, report)
    except ValueError as error:
        if type(error) is not ValueError or not is_ours(error):
            raise  # Megatron's or the user's own, which its traceback explains
        raise LaunchError(f"--use-tempo: {error}") from error
    if model.has_causal_mask and found.knows_its_mask:
        was_left_out = any(built.leaves_mask_out for built in report.models)
        found.leaves_mask_out = _leave_mask_out(run) or was_left_out
    report.add(found, given.arguments["config"], run)
    report.checks.add(args[0], found.tempo_config)

    def publish(*_: Any) -> None:
        handle.remove()
        report.publish_once()

    # A loop without Megatron's schedules begins no micro batch; the first forward publishes as well.
    handle = args[0].register_forward_pre_hook(publish)


def _refuse_latent_attention(config: Any) -> None:
    """Raise ValueError where Megatron's latent attention asks for a class of Transformer Engine's that is not there."""
    is_concerned = is_since("0.16") and not is_since("0.17")
    if not getattr(config, "multi_latent_attention", False) or not is_concerned:
        return
    if multi_latent_attention.HAVE_TE and not isinstance(multi_latent_attention.TELinear, type):
        raise ValueError(
            "multi_latent_attention is on and Transformer Engine is not installed, where megatron-core "
            f"{find_version()} ends in a TypeError, with Tempo and without; expected 0.14, 0.15 or one "
            "since 0.17; install such a megatron-core, or Transformer Engine"
        )


def _replace_specs(model: Model, arguments: dict[str, Any], tempo_config: TempoConfig, run: Any) -> BuiltModel:
    """Replace the specs among a constructor's arguments by Tempo's."""
    found = BuiltModel(name=model.name, tempo_config=tempo_config)
    for spec_name, config_name in model.specs.items():
        config, spec = arguments[config_name], arguments[spec_name]
        obstacles = find_obstacles(config, run)
        replace = functools.partial(tempoize, vp_stage=arguments.get("vp_stage"), obstacles=obstacles)
        if model.patterns:
            pattern = next((arguments[name] for name in model.patterns if arguments[name] is not None), None)
            arguments[spec_name] = made = tempoize_hybrid(spec, config, tempo_config, pattern, obstacles=obstacles)
            block = made.params["block"]
        else:
            arguments[spec_name] = block = replace(spec, config, tempo_config)
        found.add_block(block, config, block.choices)
        if arguments.get(model.prediction_spec) is not None:
            arguments[model.prediction_spec] = replace(arguments[model.prediction_spec], config, tempo_config)
    return found


def _finish_model(model: Any, found: BuiltModel, tempo_config: TempoConfig) -> None:
    """Replace what no spec names: the embedding's dropout and the loss head."""
    check_built(model)
    tempoize_embedding(model, found.tempo_config)
    loss, reason = choose_loss(model, tempo_config)
    found.tempo_config = dataclasses.replace(found.tempo_config, loss=loss)
    if reason is not None:
        found.reasons["loss"] = reason
    tempoize_loss(model, found.tempo_config)
    found.report = report_on(model)


def _offload(model: Any, tempo_config: TempoConfig, run: Any, report: RunReport) -> None:
    """Let the layers of a model move what they keep to the host."""
    if not tempo_config.offloads:
        return
    if report.offloading is None:
        num_chunks = getattr(run, "virtual_pipeline_model_parallel_size", None) or 1
        number = 1 if run is None else count_in_flight(get_num_microbatches(), num_chunks)
        report.offloading = Offloading(num_in_flight=number)
    report.offloading.add(model, tempo_config)


def find_obstacles(config: Any, run: Any) -> Obstacles:
    """Why operations cannot be had in a run of Megatron-LM's; `run` is Megatron's arguments, or None."""
    to_masks, to_chunks = _find_obstacles_to_masks(config, run), _find_obstacle_to_chunks(config, run)
    return {**to_masks, **to_chunks, **_find_obstacle_to_packing(config, run)}


def _find_obstacles_to_masks(config: Any, run: Any) -> Obstacles:
    """Why operations cannot draw masks, if Tempo cannot know which samples a micro batch holds."""
    if run is None:
        reason = "Megatron's arguments, which say what samples a mask is drawn for, are not initialized in this script"
        remedy = "call initialize_megatron of megatron.training"
    elif has_cuda_graphs(config) and not is_since(versions.GRAPHS_SINCE):
        since = f"since megatron-core {versions.GRAPHS_SINCE}, not {find_version()}"
        reason, remedy = f"CUDA graphs are on, in which Tempo draws masks {since}", "leave CUDA graphs off"
    else:
        return {}
    return dict.fromkeys(list_dropouts(config), Refusal(reason, remedy))


def _find_obstacle_to_chunks(config: Any, run: Any) -> Obstacles:
    """Why attention on a GPU cannot draw masks for the chunks of context-parallel ranks, whose columns must begin at a
    multiple of 8."""
    if config.context_parallel_size == 1 or config.attention_dropout == 0 or not getattr(run, "seq_length", None):
        return {}
    num_chunks = 2 * count_ranks_of_rows(config, getattr(run, "hierarchical_context_parallel_sizes", None))
    chunk = run.seq_length / num_chunks
    if num_chunks == 2 or chunk % 8 == 0:
        return {}
    if not (torch.cuda.is_available() and torch.empty(0, dtype=torch.uint8, device="cuda").is_cuda):
        return {}
    reason = (
        f"seq_length {run.seq_length} gives context_parallel_size {config.context_parallel_size} chunks of {chunk:g} "
        "tokens, and attention with dropout on a GPU takes multiples of 8"
    )
    return {"attention": Refusal(reason, f"pad it to a multiple of {8 * num_chunks}, or take cp_comm_type a2a")}


def _find_obstacle_to_packing(config: Any, run: Any) -> Obstacles:
    """Why attention cannot keep to the documents of packed rows, if its stage is not told where they begin; and why no
    masks can be drawn for them, if they are cut over context-parallel ranks."""
    stages = config.pipeline_model_parallel_size
    if not getattr(run, "sft", False):
        return {}
    if config.context_parallel_size > 1 and config.hidden_dropout > 0:
        reason = (
            f"sft is on with context_parallel_size {config.context_parallel_size} and hidden_dropout "
            f"{config.hidden_dropout:g}, and Megatron's scripts do not say which samples the packed documents are"
        )
        return dict.fromkeys(("dropout", "attention"), Refusal(reason, "set hidden_dropout to 0"))
    if stages == 1 or is_since("0.17"):
        return {}
    reason = (
        f"sft is on with {stages} pipeline stages, and megatron-core {find_version()} tells the first one "
        "alone where packed documents begin"
    )
    return {"attention": Refusal(reason, "pack on one stage, or take Megatron 0.19")}


def _leave_mask_out(run: Any) -> bool:
    """Stop the data loader from making masks that only hide the future. Returns whether it did so.

    With a mask, attention would not take the causal path, which skips the hidden half.
    """
    if getattr(run, "reset_attention_mask", False) or not getattr(run, versions.MASK_ARGUMENT, False):
        return False
    setattr(run, versions.MASK_ARGUMENT, False)
    return True
