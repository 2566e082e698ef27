"""Trains a model from a command line, for `tempo-pretrain-gpt`, `-bert` and `-t5`; an error is one sentence.

An error in the command line itself is reported before torch and deepspeed are imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tempo_megatron.beside import first_line, is_ours
from tempo_megatron.cluster.ranks import set_rank_environment
from tempo_megatron.training.rank_process import RankLog, find_launchers
from tempo_megatron.training.run.arguments import complete_run, parse_arguments
from tempo_megatron.training.run.checks import check_run, check_weights_fit
from tempo_megatron.training.run.deepspeed_config import read_deepspeed_config
from tempo_megatron.training.run.resume import read_saved_run
from tempo_megatron.training.run.run_config import RunConfig

if TYPE_CHECKING:
    from tempo_megatron.training.team import Team

# gloo's messages when a rank is gone. NCCL has none: the team ends its ranks.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
_MEETING_SECONDS = 60.0  # used if the command line, which sets this limit, is wrong
_REMEDY_SECONDS = 30.0  # the other ranks wait while one computes what would have fitted


def train(argv: Sequence[str] | None, family: str) -> int:
    """Trains a model of `family`; returns the exit code.

    An error is one sentence on rank 0. A bug also writes a traceback to the log of the rank that has it.
    """
    _ignore_known_warnings()
    return _Attempt(argv, family).make()


class _Attempt:
    """One start of the trainer in this process; it remembers how far it got before an error."""

    def __init__(self, argv: Sequence[str] | None, family: str) -> None:
        self.argv, self.family = argv, family
        self.run: RunConfig | None = None
        self.job: Any = None
        self.team: Team | None = None
        self.log = RankLog(0)

    def make(self) -> int:
        try:
            launcher = set_rank_environment()
            self.log.rank = int(os.environ["RANK"])
            args = self._meet()
            on_gpu = _prepare_device()  # before the next line, which imports deepspeed
            deepspeed_config = read_deepspeed_config(args.deepspeed_config)
            world_size, on_node = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))

            def decide_without(damaged: Mapping[str, str]) -> tuple[RunConfig, dict[str, Any] | None]:
                saved = read_saved_run(args, damaged)
                run = complete_run(args, deepspeed_config, saved, world_size=world_size, on_gpu=on_gpu)
                check_run(run)
                check_weights_fit(run, _measure_node(on_gpu), on_node)
                return run, saved

            self.run, saved = decide_without({})
            self.log.set_folder(self.run.log_dir)
            # This imports Megatron-core, which takes seconds and reads what _prepare_device has set.
            from tempo_megatron.training.job import Job, announce
            from tempo_megatron.training.loop import run_job
            from tempo_megatron.training.settle import settle

            settled, start = settle(self.run, saved, decide_without, self.team)
            self.job = Job(settled, start, launcher)
            announce(self.job)
            run_job(self.job)
        except KeyboardInterrupt:
            self._tell("it was interrupted (Ctrl-C)")
            return self._leave_at_once(130)
        except Exception as error:
            self._report(error)
            return self._leave_at_once(1)
        if self.team is not None:
            self.team.leave()
        return 0

    def _leave_at_once(self, code: int) -> int:
        """Exits without destroying the process group, which could wait for a rank that is gone."""
        if self.team is not None and self.team.is_watched:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code

    def _meet(self) -> argparse.Namespace:
        """Parses the arguments and meets the other ranks, even if the arguments are wrong."""
        try:
            args = parse_arguments(self.argv, self.family)
        except Exception:
            with contextlib.suppress(ValueError):
                self._join(_MEETING_SECONDS, _MEETING_SECONDS)
            raise
        self._join(args.distributed_timeout_minutes * 60.0, args.fault_timeout)
        return args

    def _join(self, timeout_s: float, fault_timeout: float) -> None:
        """Joins the other ranks. A run of one process without a launcher has none, and imports torch later."""
        if int(os.environ["WORLD_SIZE"]) > 1 or find_launchers():
            from tempo_megatron.training.team import Team

            self.team = Team.join(self.log, timeout_s=timeout_s, fault_timeout=fault_timeout)

    def _report(self, error: Exception) -> None:
        from tempo_megatron.training.team import AgreedError

        if self.team is not None and self.team.is_watched:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher's, as soon as a rank has ended: say why first
        agreed = isinstance(error, AgreedError)
        is_secondary = _follows_from_another(error) or (agreed and self.log.rank != 0)
        sentence = find_sentence_for_the_user(error)
        if self.run is not None and (of_memory := _explain_lack_of_memory(error, self.run, self.job)):
            is_secondary, sentence = False, of_memory
        else:
            has_file = self.log.write(traceback.format_exc())
            if sentence is None:
                sentence = f"{type(error).__name__}: {first_line(error)}"
                if has_file:
                    sentence += f" (traceback in {self.log.path})"
                else:
                    print(f"rank {self.log.rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            if self.log.rank == 0 and not is_secondary:
                if self.team is not None:
                    self.team.begin_to_end()
                print(f"error: {sentence}", file=sys.stderr, flush=True)
        self._tell(sentence, is_secondary=is_secondary)

    def _tell(self, sentence: str, *, is_secondary: bool = False) -> None:
        """Makes every rank end, and prints the cause on rank 0 unless it has been printed."""
        if self.team is None or not self.team.is_watched:
            if self.log.rank != 0 or is_secondary:
                print(f"error on rank {self.log.rank}: {sentence}", file=sys.stderr, flush=True)
            return
        self.team.fail(sentence, is_secondary=is_secondary)


def _follows_from_another(error: Exception) -> bool:
    """Whether an error shows that another rank is gone."""
    import torch.distributed as dist

    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def _explain_lack_of_memory(error: Exception, run: RunConfig, job: Any) -> str | None:
    """Reports the peak, and what would have fitted; returns a sentence for all ranks, None for any other error."""
    from tempo_megatron.memory.live.out_of_memory import is_out_of_memory, report_out_of_memory

    if not is_out_of_memory(error):
        return None
    from tempo_megatron.training.model import read_run

    padded_vocab_size, known = (None, run) if job is None else (job.start.vocabulary.padded_size, job.run)
    sentence = f"out of memory: {first_line(error)}"
    seconds = {"seconds": _REMEDY_SECONDS} if run.world_size > 1 else {}
    stage = int(os.environ["RANK"]) // (run.world_size // run.pipeline_model_parallel_size)
    report_out_of_memory(error, lambda: (read_run(known, padded_vocab_size), stage), run.save, **seconds)
    return sentence


def find_sentence_for_the_user(error: Exception) -> str | None:
    """Returns the text of a ValueError of this repository, or of DeepSpeed's about its JSON; None for a bug."""
    if _follows_from_another(error):
        return f"another rank has ended ({first_line(error)})"
    if type(error).__module__.startswith(("pydantic", "deepspeed.runtime.config")):
        return f"DeepSpeed refuses its JSON: {error}"
    if not isinstance(error, ValueError):
        return None
    if str(error).startswith("Caught ") and "DataLoader worker" in str(error):
        return str(error).strip().splitlines()[-1].partition(": ")[2]
    return str(error) if is_ours(error) else None


def _ignore_known_warnings() -> None:
    """Silences warnings of megatron-core and torch that come on every rank and that a user cannot act on."""
    for text in (
        "(Transformer Engine and )?Apex (is|are) not installed",
        "full scope is deprecated. Use empty cuda_graph_scope",
        "If you are using transformer_engine as the transformer implementation, the core_attn",
        "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base|_reduce_scatter_base)`",
    ):
        warnings.filterwarnings("ignore", message=text)


def _prepare_device() -> bool:
    """Sets what torch and deepspeed read when they are imported; returns whether this process uses a GPU."""
    # Megatron's overlap of tensor-parallel communication needs kernels to run in the order of their launch.
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
            # The ranks of a node share its cores, but torch would start a thread per core in each of them.
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    return on_gpu


def _measure_node(on_gpu: bool) -> int:
    """Returns the bytes of memory of this node, GPUs included."""
    import torch

    gpus = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count() * on_gpu)]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + sum(gpus)
