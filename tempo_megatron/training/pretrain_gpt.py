"""GPT pretraining with megatron-core and DeepSpeed: `deepspeed launch/pretrain_gpt.py --deepspeed_config ...`.

Everything that can be wrong with the command line is found before deepspeed is imported and the ranks meet.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from tempo_megatron.training.arguments import parse_arguments
from tempo_megatron.training.checks import check_arguments, data_parallel_size_of
from tempo_megatron.training.deepspeed_config import complete, read_deepspeed_config
from tempo_megatron.training.launch_env import set_rank_environment
from tempo_megatron.training.resume import read_saved_run, run_description, take_from_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Train; the exit code. A user's error is one sentence on rank 0, a bug a traceback on the rank that has it."""
    is_running = False
    _ignore_known_warnings()
    try:
        args = parse_arguments(argv)
        config = read_deepspeed_config(args.deepspeed_config)
        saved = read_saved_run(args)
        if saved is not None:
            take_from_checkpoint(args, config, saved)
        launcher = set_rank_environment()
        on_gpu = _prepare_device()
        world_size = int(os.environ["WORLD_SIZE"])
        config = complete(config, args, data_parallel_size_of(args, world_size))
        check_arguments(args, config, on_gpu)
        job = Job(args, config, saved, launcher, on_gpu)
        is_running = True
        job.run()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        rank, sentence = int(os.environ.get("RANK", "0")), _sentence_for_the_user(error)
        if sentence is None:
            print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        elif rank == 0 or is_running:
            print(
                f"error: {sentence}" if rank == 0 else f"error on rank {rank}: {sentence}", file=sys.stderr, flush=True
            )
        return 1
    return 0


def _sentence_for_the_user(error: Exception) -> str | None:
    """The text of a ValueError that this repository raised, or DeepSpeed about its JSON; None for a bug."""
    if not isinstance(error, ValueError):
        return None
    if type(error).__module__.startswith("pydantic"):
        return f"DeepSpeed refuses its JSON: {error}"
    if str(error).startswith("Caught ") and "DataLoader worker" in str(error):
        return str(error).strip().splitlines()[-1].partition(": ")[2]
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(error) if frame.f_globals.get("__name__", "").startswith(("tempo_megatron", "tempo_kernels")) else None


def _ignore_known_warnings() -> None:
    """What megatron-core and torch say on every rank and every run, and that no user of the trainer can act on."""
    for text in (
        "(Transformer Engine and )?Apex (is|are) not installed",
        "full scope is deprecated. Use empty cuda_graph_scope",
        "If you are using transformer_engine as the transformer implementation, the core_attn",
        "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base)`",
    ):
        warnings.filterwarnings("ignore", message=text)


def _prepare_device() -> bool:
    """Settings that torch and deepspeed read when they are imported; whether this process uses a GPU."""
    # Megatron's tensor parallel overlap relies on kernels being scheduled in the order they were launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        raise ValueError(
            f"this node has {torch.cuda.device_count()} GPUs but got {os.environ['LOCAL_WORLD_SIZE']} processes; "
            "start one process per GPU"
        )
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if "OMP_NUM_THREADS" not in os.environ:
            # The ranks of this node share its cores; torch would start a thread per core in each of them.
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    return on_gpu


class Job:
    """One training run, from its process groups to its plot.

    Args:
        args: checked.
        config: the completed DeepSpeed configuration.
        saved: the description of the checkpoint to go on from, None for a run that starts.
        launcher: for the banner.
        on_gpu: whether this process has a GPU.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        config: dict[str, Any],
        saved: dict[str, Any] | None,
        launcher: str,
        on_gpu: bool,
    ) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        from tempo_megatron import arguments as tempo_arguments
        from tempo_megatron.cpu import use_cpu
        from tempo_megatron.training import checkpoint, engine, metrics, model
        from tempo_megatron.training.data_identity import data_identity
        from tempo_megatron.training.datasets import build_datasets, load_tokenizer
        from tempo_megatron.training.rng_state import seed_all

        self.args, self.on_gpu = args, on_gpu
        self.save_folder = checkpoint.claim_save_folder(args)
        tempo_config = tempo_arguments.tempo_config_from(args, config)
        self.label = "stock" if tempo_config.is_off else "tempo"
        tokenizer = load_tokenizer(args)
        if not on_gpu:
            use_cpu()
        self.device = engine.initialize_distributed(args, on_gpu)
        if self.save_folder is not None:
            checkpoint.check_all_ranks_share(self.save_folder.path)
        checkpoint.check_all_ranks_load(saved, args.load)
        seed_all(args.seed)
        transformer_config = model.transformer_config(args, on_gpu)
        transformer_config.embedding_init_method = engine.also_for_partitioned(transformer_config.embedding_init_method)
        with engine.construction_context(config):
            gpt = model.build_model(args, transformer_config, tempo_config, args.padded_vocab_size)
        self.datasets = build_datasets(args, tokenizer)
        self.parameters = model.count_parameters(gpt, args.tensor_model_parallel_size)
        self.engine = engine.Engine(gpt, args, config)
        self.forward_step = model.ForwardStep(transformer_config, tempo_config, args.seq_length, self.device)
        gelu_form = "tanh" if transformer_config.bias_activation_fusion else "erf"
        self.description = run_description(
            args,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            zero_stage=self.engine.zero_stage,
            optimizer=self.engine.optimizer_name,
            gelu_form=gelu_form,
            **data_identity(args, tokenizer),
        )
        self.checkpoints = checkpoint.Checkpoints(args, self.engine, self.description, on_gpu)
        self.progress = self.checkpoints.load(saved) if saved else checkpoint.Progress()
        self.report = metrics.Report(
            args,
            is_first_rank=dist.get_rank() == 0,
            first_iteration=self.progress.iteration,
            resumes=saved is not None,
        )
        self._announce(config, tempo_config, launcher, gelu_form, saved)

    def _announce(
        self,
        config: dict[str, Any],
        tempo_config: Any,
        launcher: str,
        gelu_form: str,
        saved: dict[str, Any] | None,
    ) -> None:
        import dataclasses

        from tempo_megatron.training.banner import run_banner, versions
        from tempo_megatron.training.checkpoint_folder import LATEST

        world_size = int(os.environ["WORLD_SIZE"])
        banner = run_banner(
            self.args,
            config,
            tempo_config,
            launcher=launcher,
            device=self.device,
            world_size=world_size,
            parameters=self.parameters,
            optimizer_name=self.engine.optimizer_name,
            settings=self.engine.settings(),
            gelu_form=gelu_form,
        )
        self.report.say(banner)
        if saved is not None:
            named = "" if saved["named"] else f", the newest checkpoint there: no file {LATEST} names one"
            self.report.say(f"going on after step {self.progress.iteration} of {self.args.load}{named}")
        elif self.args.load:
            self.report.say(f"{self.args.load} holds no checkpoint yet; starting anew")
        self.report.record(
            "run",
            after_iteration=self.progress.iteration,
            versions=versions(),
            device=self.device.type,
            world_size=world_size,
            parameters=self.parameters,
            tempo=dataclasses.asdict(tempo_config),
            settings=self.engine.settings(),
            **self.description,
        )

    def run(self) -> None:
        import torch.distributed as dist

        from tempo_megatron.training.loop import Trainer
        from tempo_megatron.training.plots import plot_losses

        args = self.args
        trainer = Trainer(
            args,
            self.engine,
            self.forward_step,
            self.datasets,
            self.progress,
            self.checkpoints,
            self.report,
            self.device,
        )
        reason = trainer.train()
        self.report.say(f"{reason} after step {self.progress.iteration}")
        self.report.close()
        if args.loss_plot and dist.get_rank() == 0:
            plot_losses({self.label: args.metrics_file}, args.loss_plot)
            print(f"loss curve in {args.loss_plot}", flush=True)
        dist.barrier()
        dist.destroy_process_group()
        if self.save_folder is not None:
            self.save_folder.unlock()


if __name__ == "__main__":
    sys.exit(main())
