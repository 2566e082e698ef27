"""Builds one training run from its parts, and trains it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tempo_megatron.cpu import use_cpu
from tempo_megatron.models.build import build_layer
from tempo_megatron.models.stage import list_chunks
from tempo_megatron.slots.check import LayerChecks
from tempo_megatron.slots.choose import choose
from tempo_megatron.slots.offload import count_in_flight, offload_layers
from tempo_megatron.training import checkpoint, engine, metrics, model, ranks
from tempo_megatron.training.banner import find_versions, write_banner
from tempo_megatron.training.checkpoint import describe_run, seed_all
from tempo_megatron.training.checkpoint_files.folder import LATEST
from tempo_megatron.training.facts import collect_facts, identify_data
from tempo_megatron.training.loop import Trainer
from tempo_megatron.training.planning import plan_memory
from tempo_megatron.training.plots import plot_losses
from tempo_megatron.training.run.resume import describe_changes
from tempo_megatron.training.run.run_config import RunConfig
from tempo_megatron.training.tasks.datasets import build_datasets, load_vocabulary
from tempo_megatron.training.tasks.task import Task
from tempo_megatron.training.throughput import Throughput
from tempo_megatron.training.watch.team import Team


def get_task(family: str) -> Task:
    """Returns the Task of a family of models."""
    if family == "bert":
        from tempo_megatron.training.tasks.masked import MaskedTask

        return MaskedTask()
    if family == "t5":
        from tempo_megatron.training.tasks.spans import SpanTask

        return SpanTask()
    assert family == "gpt"
    from tempo_megatron.training.tasks.next_token import NextTokenTask

    return NextTokenTask()


class Job:
    """One training run, from its process groups to its plot.

    Args:
        run: checked.
        saved: the description of the checkpoint to resume from; None for a run that starts.
        launcher: for the banner.
        decide_without: decides the run without damaged checkpoints.
        team: the other ranks; None if there are none.
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
        self.save_folder = ranks.claim_save_folder(run)
        self.task = get_task(run.model.family)
        self.vocabulary = load_vocabulary(run, self.task)
        if team is not None:
            team.compare(collect_facts(run, self.vocabulary), run.distributed_timeout_minutes * 60.0)
        if not run.on_gpu:
            use_cpu()
        self.device = ranks.initialize_distributed(run)
        if self.save_folder is not None:
            ranks.check_all_ranks_share(self.save_folder.path)
        # Settings
        run, saved, pretrained = ranks.choose_checkpoint(run, saved, decide_without)
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
        self.progress = self.checkpoints.load(saved) if saved else checkpoint.Progress()
        if pretrained is not None:
            checkpoint.load_pretrained(self.engine, run, pretrained, self.description)
        self.log = metrics.RunLog(
            run,
            self.engine.monitors,
            is_first_rank=dist.get_rank() == 0,
            first_iteration=self.progress.iteration,
            resumes=saved is not None,
        )
        self._announce(saved, launcher)

    def _announce(self, saved: dict[str, Any] | None, launcher: str) -> None:
        run = self.run
        banner = write_banner(
            run,
            self.choices,
            self.tempo_report,
            launcher=launcher,
            device=self.device,
            padded_vocab_size=self.vocabulary.padded_size,
            parameters=self.parameters,
            optimizer_name=self.engine.optimizer_name,
            settings=self.engine.read_settings(),
            activation=model.describe_activation(run.model, self.description["gelu_form"]),
            plan=self.plan,
            offloading=self.offloading,
        )
        self.log.say(banner)
        if saved is not None:
            for damage in self._set_aside(saved):
                self.log.say(damage)
            named = "" if saved["named"] else f", the newest checkpoint there: no file {LATEST} names one"
            self.log.say(f"going on after step {self.progress.iteration} of {run.load}{named}")
            if run.pretrained_checkpoint:
                self.log.say(f"the weights are that step's, and no longer those of {run.pretrained_checkpoint}")
            if self.progress.iteration == run.train_iters and not run.eval_only:
                self.log.say(f"none of the {run.train_iters} steps is left to train; raise --train-iters for more")
            for line in describe_changes(saved, self.settings):
                self.log.say(line)
        elif run.load:
            self.log.say(f"{run.load} holds no checkpoint yet; starting anew")
        self.log.record(
            "run",
            after_iteration=self.progress.iteration,
            versions=find_versions(),
            device=self.device.type,
            world_size=run.world_size,
            parameters=self.parameters,
            tempo=dataclasses.asdict(run.tempo),
            plan=self.plan and self.plan.as_record(),
            slots=self.tempo_report.as_dict()["slots"],
            settings=self.engine.read_settings(),
            **self.description,
        )

    def _set_aside(self, saved: dict[str, Any]) -> Iterator[str]:
        """Renames the newer checkpoints that were not whole, if this run saves there; yields a sentence for each."""
        assert self.run.load is not None
        passed_over, renamed = saved["passed_over"], []
        folder = self.save_folder
        saves_there = folder is not None and folder.path.resolve() == Path(self.run.load).resolve()
        if passed_over and saves_there and dist.get_rank() == 0:
            assert folder is not None
            renamed = folder.set_aside(passed_over, saved["checkpoint"])
        for name, (_, reason) in itertools.zip_longest(renamed, passed_over.items()):
            yield f"{reason}{f'; it is called {name} now' if name else ''}; the checkpoint before it is taken"

    def train(self) -> None:
        """Trains to the end or to a reason to stop, draws the losses and leaves the process group."""
        run = self.run
        trainer = Trainer(
            run,
            self.engine,
            self.task.make_forward_step(run, self.device),
            self.datasets,
            self.task.make_collate(self.vocabulary),
            self.progress,
            self.checkpoints,
            self.log,
            Throughput(run, self.vocabulary.padded_size, self.device),
            self.device,
            self.offloading,
        )
        reason = trainer.evaluate() if run.eval_only else trainer.train()
        self.log.say(f"{reason} after step {self.progress.iteration}")
        self.log.close()
        if run.loss_plot and dist.get_rank() == 0:
            assert run.metrics_file is not None
            if any(record["kind"] == "train" for record in metrics.read_metrics(run.metrics_file)):
                plot_losses({"stock" if run.tempo.is_off else "tempo": run.metrics_file}, run.loss_plot)
                print(f"loss curve in {run.loss_plot}", flush=True)
            else:
                print(f"no loss curve: {run.metrics_file} has no step, none was left to train", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        if self.save_folder is not None:
            self.save_folder.unlock()
