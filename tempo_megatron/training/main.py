"""What the programs of the trainer share: from a command line to a run, an exit code and one sentence for an error.

Everything that can be wrong with the command line is found before deepspeed is imported and the ranks meet.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tempo_megatron.launch_env import set_rank_environment
from tempo_megatron.training.arguments import parse_arguments
from tempo_megatron.training.checks import check_run
from tempo_megatron.training.deepspeed_config import read_deepspeed_config
from tempo_megatron.training.resume import read_saved_run
from tempo_megatron.training.run_config import RunConfig, complete_run

# What gloo says where a rank is gone. NCCL says nothing: the launcher ends its ranks.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def train(argv: Sequence[str] | None, family: str) -> int:
    """Train a model of `family`; the exit code.

    A user's error is one sentence on rank 0, a bug a traceback on the rank that has it.
    """
    is_running = False
    run: RunConfig | None = None
    job: Any = None
    _ignore_known_warnings()
    try:
        args = parse_arguments(argv, family)
        deepspeed_config = read_deepspeed_config(args.deepspeed_config)
        saved = read_saved_run(args)
        launcher = set_rank_environment()
        on_gpu = _prepare_device()
        world_size = int(os.environ["WORLD_SIZE"])

        def decide(saved: dict[str, Any] | None) -> RunConfig:
            run = complete_run(args, deepspeed_config, saved, world_size=world_size, on_gpu=on_gpu)
            check_run(run)
            return run

        def decide_without(damaged: Mapping[str, str]) -> tuple[RunConfig, dict[str, Any] | None]:
            older = read_saved_run(args, damaged)
            return decide(older), older

        run = decide(saved)
        # It imports deepspeed and Megatron-core, which takes seconds and reads what _prepare_device has set.
        from tempo_megatron.training.job import Job

        job = Job(run, saved, launcher, decide_without)
        is_running = True
        job.train()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if run is not None and _explain_lack_of_memory(error, run, job):
            return 1
        rank, sentence = int(os.environ.get("RANK", "0")), _find_sentence_for_the_user(error)
        if sentence is None:
            print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        elif rank == 0 or is_running:
            print(
                f"error: {sentence}" if rank == 0 else f"error on rank {rank}: {sentence}", file=sys.stderr, flush=True
            )
        return 1
    return 0


def _explain_lack_of_memory(error: Exception, run: RunConfig, job: Any) -> bool:
    """Say what stood at the peak and what would have fitted, where memory is what ended."""
    from tempo_megatron.memory.out_of_memory import is_out_of_memory, report_out_of_memory

    if not is_out_of_memory(error):
        return False
    from tempo_megatron.training.job import make_order

    vocab_size = run.model.vocab_size if job is None else job.vocabulary.padded_size
    order = None if vocab_size is None else make_order(run if job is None else job.run, vocab_size)
    report_out_of_memory(error, order, run.save)
    return True


def _find_sentence_for_the_user(error: Exception) -> str | None:
    """The text of a ValueError that this repository raised, or DeepSpeed about its JSON; None for a bug."""
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER):
        return f"another rank has ended, and says why ({str(error).strip().splitlines()[0]})"
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
