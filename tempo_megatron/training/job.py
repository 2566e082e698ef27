"""Builds a settled run from its parts, and says what it is: its banner, its checkpoint, its record of settings."""

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
from tempo_megatron.extras import is_installed
from tempo_megatron.models.build import build_layer
from tempo_megatron.models.stage import list_chunks
from tempo_megatron.settings.operations import OPERATIONS
from tempo_megatron.slots.check import LayerChecks
from tempo_megatron.slots.choose import Choices
from tempo_megatron.slots.offload import count_in_flight, offload_layers
from tempo_megatron.training import checkpoint, engine, metrics, model
from tempo_megatron.training.checkpoint_files.folder import LATEST
from tempo_megatron.training.run.deepspeed_config import offloads_optimizer
from tempo_megatron.training.run.resume import describe_changes
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.settle import Start
from tempo_megatron.training.tasks.datasets import build_datasets
from tempo_megatron.words.deepspeed_json import find_unknown_keys


class Job:
    """One training run: its model, data, engine, checkpoints and log, ready to train."""

    def __init__(self, run: RunConfig, start: Start, launcher: str) -> None:
        self.run, self.start, self.launcher = run, start, launcher
        checkpoint.seed_all(run.seed)
        built = model.build_model(run, start.transformer_config, start.choices, start.vocabulary.padded_size)
        self.datasets = build_datasets(run, start.task, start.vocabulary.tokenizer)
        self.tempo_report = model.report_on_all(built, start.choices)
        self.engine = engine.Engine(built, run)  # it marks what tensor parallelism divides
        self.parameters = model.count_all_parameters(built, run.tensor_model_parallel_size)
        chunks = list_chunks(built)
        num_in_flight = count_in_flight(run.num_micro_batches, run.num_chunks)
        self.offloading = offload_layers(chunks, run.tempo, num_in_flight=num_in_flight)
        checks = LayerChecks(lambda line: self.log.say(line), build_layer)
        for chunk in chunks:
            checks.add(chunk, run.tempo)
        self.description = checkpoint.describe_run(
            run,
            start.vocabulary,
            zero_stage=self.engine.zero_stage,
            optimizer=self.engine.optimizer_name,
            gelu_form=model.get_gelu_form(run.model, start.transformer_config),
            **start.identity,
        )
        self.checkpoints = checkpoint.Checkpoints(
            self.engine, start.settings, self.description, self.datasets.sample_parts
        )
        self.progress = self.checkpoints.load(start.saved) if start.saved else checkpoint.Progress()
        if start.pretrained is not None:
            checkpoint.load_pretrained(self.engine, start.pretrained, self.description)
        self.log = metrics.RunLog(
            run,
            self.engine.monitors,
            is_first_rank=dist.get_rank() == 0,
            first_iteration=self.progress.iteration,
            resumes=start.saved is not None,
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
    run, start, say = job.run, job.start, job.log.say
    saved, plan = start.saved, start.plan
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
        for line in describe_changes(saved, start.settings):
            say(line)
    elif run.load:
        say(f"{run.load} holds no checkpoint yet; starting anew")
    job.log.record(
        "run",
        after_iteration=job.progress.iteration,
        versions=find_versions(),
        device=start.device.type,
        world_size=run.world_size,
        parameters=job.parameters,
        tempo=dataclasses.asdict(run.tempo),
        plan=plan and plan.as_record(),
        slots=job.tempo_report.as_dict()["slots"],
        settings=job.engine.read_settings(),
        **job.description,
    )


def _set_aside(job: Job, saved: Mapping[str, Any]) -> Iterator[str]:
    """Renames the newer checkpoints that were not whole, if this run saves there; yields a sentence for each."""
    passed_over, renamed, folder = saved["passed_over"], [], job.start.save_folder
    saves_there = folder is not None and folder.path.resolve() == Path(str(job.run.load)).resolve()
    if passed_over and saves_there and dist.get_rank() == 0:
        assert folder is not None
        renamed = folder.set_aside(passed_over, saved["checkpoint"])
    for name, (_, reason) in itertools.zip_longest(renamed, passed_over.items()):
        yield f"{reason}{f'; it is called {name} now' if name else ''}; the checkpoint before it is taken"


def write_banner(job: Job) -> str:
    """Returns one line per subject, from the packages to Tempo."""
    run, start, settings = job.run, job.start, job.engine.read_settings()
    device = start.device
    activation = model.describe_activation(run.model, job.description["gelu_form"])
    tp, dp = run.tensor_model_parallel_size, run.data_parallel_size
    parallel = f"TP {tp}{' + SP' if run.sequence_parallel else ''}, "
    if run.pipeline_model_parallel_size > 1:
        chunks = f" x {run.num_chunks} chunks" if run.num_chunks > 1 else ""
        parallel += f"PP {run.pipeline_model_parallel_size}{chunks}, "
    ramp = ""
    if run.rampup_batch_size is not None:
        first, increment, samples = run.rampup_batch_size
        ramp = f"; {first} at first, {increment} more at a time over {samples} samples"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"
    accumulated = run.deepspeed.get("data_types", {}).get("grad_accum_dtype") or run.precision
    offload = ", optimizer offloaded" if offloads_optimizer(run.deepspeed) else ""
    rows = {
        "packages": ", ".join(f"{name} {version}" for name, version in find_versions().items()),
        "layout": f"{run.world_size} x {name} by {job.launcher}: {parallel}DP {dp}",
        "model": f"{job.parameters:,} parameters, {run.model.summarize()}, vocabulary {start.vocabulary.padded_size}, "
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
        "tempo": _describe_tempo(run, start.choices),
    }
    if job.offloading.num_layers:
        rows["offload"] = job.offloading.describe()
    if start.plan is not None:
        rows["plan"] = start.plan.describe()
    if not run.tempo.is_off or start.choices.reasons:
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
