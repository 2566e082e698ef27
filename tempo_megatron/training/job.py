"""Builds one training run from its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from tempo_megatron.cpu import use_cpu
from tempo_megatron.models.build import build_layer
from tempo_megatron.models.stage import list_chunks
from tempo_megatron.slots.check import LayerChecks
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.offload import count_in_flight, offload_layers
from tempo_megatron.training import checkpoint, engine, metrics, model, ranks
from tempo_megatron.training.checkpoint import describe_run, seed_all
from tempo_megatron.training.facts import collect_facts, identify_data
from tempo_megatron.training.planning import plan_memory
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import build_datasets, load_vocabulary
from tempo_megatron.training.tasks.masked import MaskedTask, SpanTask
from tempo_megatron.training.tasks.next_token import NextTokenTask
from tempo_megatron.training.tasks.task import Task
from tempo_megatron.training.watch.team import Team

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
            team.compare(collect_facts(run, self.vocabulary), run.distributed_timeout_minutes * 60.0)
        if not run.on_gpu:
            use_cpu()
        self.device = ranks.initialize_distributed(run)
        if self.save_folder is not None:
            ranks.check_all_ranks_share(self.save_folder.path)
        # Settings
        run, self.saved, pretrained = ranks.choose_checkpoint(run, saved, decide_without)
        self.settings = dataclasses.asdict(run)  # saved with "auto", so that a resumed run adapts anew
        run, self.plan = plan_memory(run, self.vocabulary.padded_size)
        seed_all(run.seed)
        transformer_config = model.build_transformer_config(run)
        self.choices = choose(transformer_config, run.tempo)
        # From here on run.tempo holds no "auto".
        self.run = run = dataclasses.replace(run, tempo=self.choices.config)
        # Model, data, engine
        built = model.build_model(run, transformer_config, self.choices, self.vocabulary.padded_size)
        self.datasets = build_datasets(run, self.task, self.vocabulary.tokenizer)
        self.tempo_report = model.report_on_all(built, self.choices)
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
        self.description = describe_run(
            run,
            self.vocabulary,
            zero_stage=self.engine.zero_stage,
            optimizer=self.engine.optimizer_name,
            gelu_form=model.get_gelu_form(run.model, transformer_config),
            **identify_data(run, self.vocabulary.tokenizer),
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
