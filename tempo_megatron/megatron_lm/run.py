"""Runs a training script of Megatron-LM's, unmodified, with `--use-tempo` among its arguments.

Megatron comes from the checkout around the script, or from site-packages: since 0.17 the package megatron-core brings
megatron.training too.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tempo_megatron.beside import is_ours
from tempo_megatron.cluster.ranks import set_rank_environment
from tempo_megatron.extras import MissingExtraError, is_installed
from tempo_megatron.megatron_lm import options
from tempo_megatron.megatron_lm.versions import ADD_ARGUMENTS, LaunchError, wrap_hook

if TYPE_CHECKING:
    from tempo_megatron.megatron_lm.report import RunReport
    from tempo_megatron.memory.run import Run

_SECONDS_FOR_RANK_0 = 3

_USAGE = """\
usage: {prog} [--megatron-root DIR] [TEMPO'S ARGUMENTS] SCRIPT [ARGUMENTS OF THE SCRIPT]

Run SCRIPT, such as pretrain_gpt.py of a Megatron-LM checkout, with the Tempo arguments beside its own:
{prog} pretrain_gpt.py ... --use-tempo. Without --use-tempo it runs as it is. A script with a parser of its own,
which does not know them, takes them in front: {prog} --use-tempo script.py ...

  --megatron-root DIR  the checkout; without it the folder around SCRIPT that holds megatron/core and megatron/training,
                       or, where there is none, an installed megatron.training
  SCRIPT --help        lists all arguments, Tempo's among them"""


def main(argv: Sequence[str] | None = None, prog: str = "run_megatron.py") -> int:
    """Run the script; the exit status. A user's mistake is one sentence on rank 0's stderr and status 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE.format(prog=prog))
        return 0 if argv else 2
    # megatron-core says so once per module and rank.
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
    try:
        root, script, arguments, of_tempo = split_command_line(argv)
        report = _prepare(root, script, [*of_tempo, *arguments])
    except (LaunchError, MissingExtraError) as error:
        if _find_rank() == 0:
            print(f"{prog}: {error}", file=sys.stderr, flush=True)
        return 2
    sys.argv = [str(script), *arguments]
    try:
        _run_script(script, report, prog)
    except LaunchError as error:
        rank = _find_rank()
        if rank != 0:
            # As a rule every rank finds the same, and a launcher ends the others once rank 0 has said it; a stage of a
            # pipeline can be the only one that has what is wrong.
            time.sleep(_SECONDS_FOR_RANK_0)
        print(f"{prog}{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        from tempo_megatron.memory.live.out_of_memory import is_out_of_memory, report_out_of_memory

        if not is_out_of_memory(error):
            raise
        report_out_of_memory(error, lambda: _read_run(root))
        return 1
    return 0


def _run_script(script: Path, report: RunReport | None, prog: str) -> None:
    """Run it as Python would. A report that no forward has published is published at its end.

    Raises LaunchError where a model begins to train that Tempo does not know.
    """
    try:
        runpy.run_path(str(script), run_name="__main__")
    except (Exception, SystemExit) as end:
        # `--help` ends so, and builds nothing.
        if report is not None and report.models and isinstance(end, SystemExit) and not end.code:
            report.publish_once()
        if _find_rank() == 0 and not is_ours(end) and _is_about_tempo(end):
            hint = (
                f"{script.name} has a parser of its own that does not know Tempo's arguments; expected them before the "
                f"script; write {prog} --use-tempo {script.name} ..."
            )
            print(f"{prog}: {hint}", file=sys.stderr, flush=True)
        raise
    if report is not None and report.models:
        report.publish_once()
    elif report is not None and _find_rank() == 0:
        # What the script did is done, and its status stays.
        from tempo_megatron.megatron_lm.report import NOTHING_TO_REPLACE

        print(f"{prog}: {NOTHING_TO_REPLACE}", file=sys.stderr, flush=True)


def _is_about_tempo(error: BaseException) -> bool:
    """Whether an error, or what it arose from, names arguments of Tempo's, as that of a parser that refuses them.

    argparse prints what it does not know and ends the process; its frame has the words still.
    """
    words = [
        word
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") == "argparse"
        for word in frame.f_locals.get("argv") or ()
    ]
    if not options.TEMPO_OPTIONS.isdisjoint(re.findall(r"--[\w-]+", " ".join([str(error), *words]))):
        return True
    return error.__context__ is not None and _is_about_tempo(error.__context__)


def _read_run(root: Path | None) -> tuple[Run, int]:
    """The run as the estimate knows it, and the pipeline stage of this rank. Raises ValueError where it does not."""
    if root is not None and _is_megatron_deepspeed(root):
        raise ValueError("the run is Megatron-DeepSpeed's, and what is known is Megatron-LM")
    from megatron.core import parallel_state
    from megatron.training.global_vars import get_args

    from tempo_megatron.megatron_lm.run_reader import read_built_run

    return read_built_run(get_args()), parallel_state.get_pipeline_model_parallel_rank()


def _find_rank() -> int:
    """This process's, also before the launcher's variables are put into torch's."""
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
    return int(next((os.environ[name] for name in names if os.environ.get(name, "").isdecimal()), "0"))


def _prepare(root: Path | None, script: Path, arguments: list[str]) -> RunReport | None:
    """Replace what `--use-tempo` replaces; what will say so, where Tempo is on."""
    tempo_config, budget, report_file, ledger = options.read_options(arguments)
    if _find_rank() == 0:
        options.check_outputs(report_file, ledger)
    try:
        set_rank_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    # As Python does for a script, and with the checkout before an installed megatron-core.
    sys.path[:0] = [str(script.parent)] if root in (None, script.parent) else [str(script.parent), str(root)]
    version, root = _find_megatron(root)
    if _is_megatron_deepspeed(root):
        from tempo_megatron.megatron_lm.megatron_deepspeed import patch_scripts

        if ledger is not None:
            raise LaunchError(
                f"--tempo-ledger looks at Megatron-LM's training steps, and {root} is Megatron-DeepSpeed; leave it out"
            )

        if budget is not None:
            raise LaunchError(
                "a memory budget is given, and it is planned for our trainer and Megatron-LM, not Megatron-DeepSpeed; "
                "leave it out"
            )
        patch_scripts(tempo_config, report_file, options.add_tempo_options)
        return None
    wrap_hook(ADD_ARGUMENTS, version, lambda add, parser: options.add_options(add(parser)))
    if tempo_config.is_off and ledger is None:
        return None
    # What patches touch is imported here and not before: the checkout's, now that it comes first.
    from tempo_megatron.megatron_lm.patches import patch_models, patch_steps
    from tempo_megatron.megatron_lm.report import RunReport

    report = None if tempo_config.is_off else RunReport(version, root, report_file)
    if ledger is not None:
        patch_steps(version, ledger, report)
    if report is not None:
        patch_models(version, tempo_config, report, budget)
    return report


def split_command_line(argv: list[str]) -> tuple[Path | None, Path, list[str], list[str]]:
    """The checkout, None where Megatron is installed instead, the script, the script's arguments, and those of Tempo's
    that stand before it."""
    root_given, launcher_arguments = None, []
    rest, of_tempo = list(argv), []
    while rest and rest[0].startswith("-"):
        if not rest[0].startswith("--local_rank") and (taken := options.take_options(rest)):
            of_tempo += taken
            continue
        option, equals, value = rest.pop(0).partition("=")
        if option == "--megatron-root" and (equals or rest):
            root_given = Path(value if equals else rest.pop(0)).resolve()
        elif option == "--local_rank" and equals:
            # The deepspeed launcher puts it first.
            launcher_arguments.append(f"{option}={value}")
        else:
            raise LaunchError(
                f"{option} comes before the script; expected --megatron-root DIR, Tempo's arguments or the script; "
                "write the script's arguments after it"
            )
    if not rest:
        raise LaunchError("no script is given; expected one of a Megatron-LM checkout, such as pretrain_gpt.py")
    script = Path(rest[0]).resolve()
    if not script.is_file():
        raise LaunchError(f"{rest[0]} is not a file; expected a script of a Megatron-LM checkout, as pretrain_gpt.py")
    return _find_root(script, root_given), script, [*rest[1:], *launcher_arguments], of_tempo


def _find_root(script: Path, given: Path | None) -> Path | None:
    for folder in (given,) if given else script.parents:
        if (folder / "megatron" / "core").is_dir() and (
            (folder / "megatron" / "training").is_dir() or _is_megatron_deepspeed(folder)
        ):
            return folder
    if given:
        raise LaunchError(f"--megatron-root is {given}, which holds no megatron/core and megatron/training; correct it")
    if is_installed("megatron.core") and is_installed("megatron.training"):
        return None
    raise LaunchError(
        f"no folder around {script} holds megatron/core and megatron/training, and megatron.training is not installed; "
        'give a Megatron-LM checkout with --megatron-root DIR, or pip install "megatron-core[training]>=0.17"'
    )


def _is_megatron_deepspeed(root: Path) -> bool:
    return (root / "megatron" / "model" / "transformer.py").is_file() and (root / "megatron" / "arguments.py").is_file()


def _find_megatron(root: Path | None) -> tuple[str, Path]:
    """The version of Megatron-core, and the folder of the package megatron: the checkout, where there is one."""
    import megatron.core

    found = Path(megatron.core.__file__ or "").resolve().parent
    if root is not None and root not in found.parents:
        raise LaunchError(f"megatron.core was imported from {found}, expected it in {root}; start a new process")
    return str(getattr(megatron.core, "__version__", "0.2.0")), root or found.parent.parent
