"""Builds one training run from its parts, and says what it is: its banner, its checkpoint, its record of settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tempo_megatron.cluster.installation import describe_implementation
from tempo_megatron.cluster.versions import find_version
from tempo_megatron.cpu import use_cpu
from tempo_megatron.extras import is_installed
from tempo_megatron.models.build import build_layer
from tempo_megatron.models.stage import list_chunks
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.check import LayerChecks
from tempo_megatron.slots.choose import Choices, choose
from tempo_megatron.slots.offload import count_in_flight, offload_layers
from tempo_megatron.training import checkpoint, engine, metrics, model, ranks
from tempo_megatron.training.checkpoint_files.folder import LATEST
from tempo_megatron.training.run.deepspeed_config import offloads_optimizer
from tempo_megatron.training.run.resume import describe_changes
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import build_datasets, load_vocabulary
from tempo_megatron.training.tasks.masked import MaskedTask, SpanTask
from tempo_megatron.training.tasks.task import NextTokenTask, Task
from tempo_megatron.training.team import Team
from tempo_megatron.words.deepspeed_json import find_unknown_keys

TASKS: dict[str, Task] = {"gpt": NextTokenTask(), "bert": MaskedTask(), "t5": SpanTask()}
"""Of each family of models."""


class Job:
    """One training run: its ranks, settings, model, data, engine, checkpoints and log, ready to train.

    `run` is checked. `saved` describes the checkpoint that it resumes from; None for a run that starts.
    """

    def __init__(
        self,
        run: RunConfig,
        saved: dict[str, Any] | None,
        launcher: str,
        decide_without: ranks.Decide,
        team: Team | None = None,
    ) -> None:
        # Ranks
        self.launcher = launcher
        self.save_folder = ranks.claim_save_folder(run)
        self.task = TASKS[run.model.family]
        self.vocabulary = load_vocabulary(run, self.task)
        if team is not None:
            team.compare(ranks.collect_facts(run, self.vocabulary), run.distributed_timeout_minutes * 60.0)
        if not run.on_gpu:
            use_cpu()
        self.device = ranks.initialize_distributed(run)
        if self.save_folder is not None:
            ranks.check_all_ranks_share(self.save_folder.path)
        # Settings
        run, self.saved, pretrained = ranks.choose_checkpoint(run, saved, decide_without)
        self.settings = dataclasses.asdict(run)  # saved with "auto", so that a resumed run adapts anew
        run, self.plan = model.plan_memory(run, self.vocabulary.padded_size)
        checkpoint.seed_all(run.seed)
        transformer_config = model.build_transformer_config(run)
        self.choices = choose(transformer_config, run.tempo)
        # From here on run.tempo holds no "auto".
        self.run = run = dataclasses.replace(run, tempo=self.choices.config)
        # Model and data
        built = model.build_model(run, transformer_config, self.choices, self.vocabulary.padded_size)
        self.datasets = build_datasets(run, self.task, self.vocabulary.tokenizer)
        self.tempo_report = model.report_on_all(built, self.choices)
        # Engine
        self.engine = engine.Engine(built, run)  # it marks what tensor parallelism divides
        self.parameters = model.count_all_parameters(built, run.tensor_model_parallel_size)
        self.offloading = offload_layers(
            list_chunks(self.engine.deepspeed.module),
            run.tempo,
            num_in_flight=count_in_flight(run.num_micro_batches, run.num_chunks),
        )
        checks = LayerChecks(lambda line: self.log.say(line), build_layer)
        for chunk in list_chunks(self.engine.deepspeed.module):
            checks.add(chunk, run.tempo)
        # Checkpoints and log
        self.description = checkpoint.describe_run(
            run,
            self.vocabulary,
            zero_stage=self.engine.zero_stage,
            optimizer=self.engine.optimizer_name,
            gelu_form=model.get_gelu_form(run.model, transformer_config),
            **ranks.identify_data(run, self.vocabulary.tokenizer),
        )
        self.checkpoints = checkpoint.Checkpoints(
            run, self.engine, self.settings, self.description, self.datasets.sample_parts
        )
        self.progress = self.checkpoints.load(self.saved) if self.saved else checkpoint.Progress()
        if pretrained is not None:
            checkpoint.load_pretrained(self.engine, run, pretrained, self.description)
        self.log = metrics.RunLog(
            run,
            self.engine.monitors,
            is_first_rank=dist.get_rank() == 0,
            first_iteration=self.progress.iteration,
            resumes=self.saved is not None,
        )


_PACKAGES = ("torch", "megatron-core", "deepspeed", "triton")
_OPTIONAL = {"Apex": "apex", "Transformer Engine": "transformer_engine"}


def find_versions() -> dict[str, str]:
    """Returns the version of each package that decides what a run computes; "-" if it is not installed."""
    versions = {package: find_version(package) or "-" for package in _PACKAGES}
    optional = {name: "yes" if is_installed(module) else "no" for name, module in _OPTIONAL.items()}
    return {"python": platform.python_version(), **versions, **optional}


def announce(job: Job) -> None:
    """Logs the banner, what the run goes on from and what has changed since, and the record of the run."""
    run, saved, say = job.run, job.saved, job.log.say
    say(write_banner(job))
    if saved is not None:
        for damage in _set_aside(job, saved):
            say(damage)
        named = "" if saved["named"] else f", the newest checkpoint there: no file {LATEST} names one"
        say(f"going on after step {job.progress.iteration} of {run.load}{named}")
        if run.pretrained_checkpoint:
            say(f"the weights are that step's, and no longer those of {run.pretrained_checkpoint}")
        if job.progress.iteration == run.train_iters and not run.eval_only:
            say(f"none of the {run.train_iters} steps is left to train; raise --train-iters for more")
        for line in describe_changes(saved, job.settings):
            say(line)
    elif run.load:
        say(f"{run.load} holds no checkpoint yet; starting anew")
    job.log.record(
        "run",
        after_iteration=job.progress.iteration,
        versions=find_versions(),
        device=job.device.type,
        world_size=run.world_size,
        parameters=job.parameters,
        tempo=dataclasses.asdict(run.tempo),
        plan=job.plan and job.plan.as_record(),
        slots=job.tempo_report.as_dict()["slots"],
        settings=job.engine.read_settings(),
        **job.description,
    )


def _set_aside(job: Job, saved: dict[str, Any]) -> Iterator[str]:
    """Renames the newer checkpoints that were not whole, if this run saves there; yields a sentence for each."""
    passed_over, renamed, folder = saved["passed_over"], [], job.save_folder
    saves_there = folder is not None and folder.path.resolve() == Path(str(job.run.load)).resolve()
    if passed_over and saves_there and dist.get_rank() == 0:
        assert folder is not None
        renamed = folder.set_aside(passed_over, saved["checkpoint"])
    for name, (_, reason) in itertools.zip_longest(renamed, passed_over.items()):
        yield f"{reason}{f'; it is called {name} now' if name else ''}; the checkpoint before it is taken"


def write_banner(job: Job) -> str:
    """Returns one line per subject, from the packages to Tempo."""
    run, device, settings = job.run, job.device, job.engine.read_settings()
    activation = model.describe_activation(run.model, job.description["gelu_form"])
    tp, dp = run.tensor_model_parallel_size, run.data_parallel_size
    parallel = f"TP {tp}{' + SP' if run.sequence_parallel else ''}, "
    if run.pipeline_model_parallel_size > 1:
        chunks = f" x {run.num_chunks} chunks" if run.num_chunks > 1 else ""
        parallel += f"PP {run.pipeline_model_parallel_size}{chunks}, "
    ramp = ""
    if run.rampup_batch_size is not None:
        start, increment, samples = run.rampup_batch_size
        ramp = f"; {start} at first, {increment} more at a time over {samples} samples"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"
    accumulated = run.deepspeed.get("data_types", {}).get("grad_accum_dtype") or run.precision
    offload = ", optimizer offloaded" if offloads_optimizer(run.deepspeed) else ""
    rows = {
        "packages": ", ".join(f"{name} {version}" for name, version in find_versions().items()),
        "layout": f"{run.world_size} x {name} by {job.launcher}: {parallel}DP {dp}",
        "model": f"{job.parameters:,} parameters, {run.model.summarize()}, vocabulary {job.vocabulary.padded_size}, "
        f"{activation}",
        "dropout": f"attention {run.model.attention_dropout:g}, hidden {run.model.hidden_dropout:g}",
        "batch": f"global {run.global_batch_size} = micro {run.micro_batch_size} x DP {dp} x "
        f"{run.num_micro_batches} accumulated{ramp}",
        "deepspeed": f"{run.deepspeed_config}: ZeRO {job.engine.zero_stage}, {run.precision}, "
        f"gradients accumulated in {accumulated}, {job.engine.optimizer_name}{offload}",
        "optimizer": f"AdamW, betas {' '.join(f'{beta:g}' for beta in settings['adam_betas'])}, "
        f"eps {settings['adam_eps']:g}, weight decay {settings['weight_decay']:g}, clipping {settings['clip_grad']:g}",
        "schedule": _describe_schedule(run),
        "recompute": _describe_recomputation(run),
        "data": " ".join(run.data_path),
        "tempo": _describe_tempo(run, job.choices),
    }
    if job.offloading.num_layers:
        rows["offload"] = job.offloading.describe()
    if job.plan is not None:
        rows["plan"] = job.plan.describe()
    if not run.tempo.is_off or job.choices.reasons:
        rows["replaced"] = job.tempo_report.describe_counts()
        rows["left"] = "\n".join(job.tempo_report.describe_left()) or "nothing"
    for operation in OPERATIONS.values():
        values = sorted(run.tempo.values_of(operation.name) - {"off"})
        if operation.has_banner_line and values:
            rows[operation.name] = "; ".join(
                describe_implementation(operation.name, device.type, value) for value in values
            )
    if ignored := find_unknown_keys(run.deepspeed):
        rows["ignored"] = f"DeepSpeed does not read {', '.join(ignored)} of {run.deepspeed_config}"
    width = max(map(len, rows))
    indent = "\n" + " " * (width + 2)
    return "\n".join(f"{name:<{width}}  {indent.join(text.splitlines())}" for name, text in rows.items())


def _describe_schedule(run: RunConfig) -> str:
    decay = "" if run.lr_decay_style == "constant" else f" to {run.min_lr:g} at step {run.lr_decay_iters}"
    then = f"then {run.lr_decay_style}{decay}"
    if run.lr_wsd_decay_iters is not None:
        stable = run.lr_decay_iters - run.lr_wsd_decay_iters
        then = f"stable to step {stable}, then {run.lr_wsd_decay_style}{decay}"
    return f"learning rate {run.lr:g}, warm-up {run.lr_warmup_iters} steps, {then}"


def _describe_recomputation(run: RunConfig) -> str:
    if run.recompute_granularity == "full":
        return f"full, {run.recompute_method}, {run.recompute_num_layers} layers"
    if run.recompute_granularity == "selective":
        return f"selective, {' '.join(run.recompute_modules or ('core_attn',))}"
    return "none"


def _describe_tempo(run: RunConfig, choices: Choices) -> str:
    def write(value: Any) -> str:
        return json.dumps(value, default=dict) if isinstance(value, Mapping) else str(value).lower()

    block = run.deepspeed.get("tempo")
    said = "none" if block is None else " ".join(f"{key}={write(value)}" for key, value in block.items())
    rest = "; what they leave out: the checkpoint" if run.sample_parts else ""
    return f"{choices.describe()} (arguments: {run.tempo_arguments}; block: {said}{rest})"
