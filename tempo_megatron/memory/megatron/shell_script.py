"""Finds the training command in a shell script, without starting it.

Scripts such as Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh put a command together in arrays and behind
conditions, which only a shell reads as a shell does. So bash reads the script, restricted (no file is written) and with
no folder to find programs in: it hands the words of each to a function, which notes them. What a program would print is
empty.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name, and that of torch 2.9 and later, which counts where both are set."""
SETTINGS = (WORKSPACE, *ALLOCATORS)
"""What may stand before a command, of what its environment sets."""

_SECONDS = 20
# In one line, so that bash counts lines as the script does. A command of Python is noted as how many words it has, then
# the words, each with a NUL behind it, in one write: the programs of a pipeline run at once.
_PRELUDE = (
    'command_not_found_handle() { [[ "$* " == *".py "* ]] || return 0; '
    f"for NAME in {' '.join(SETTINGS)}; do "
    '[[ -z ${!NAME+set} ]] || set -- "$NAME=${!NAME}" "$@"; done; '
    'printf "%s\\0" $# "$@" >&FD; }; '
    'exec() { "$@"; }; command() { "$@"; }; cd() { :; }; '
)


def read_script(file: str, words: Sequence[str]) -> list[list[str]]:
    """The words of each command that runs a file of Python in a script.

    Args:
        file: the script, for bash.
        words: its own arguments.

    Raises ValueError where bash is missing, cannot read the script to its end, would have to write a file, or
    stops before it starts anything.
    """
    bash = shutil.which("bash")
    if bash is None:
        raise ValueError("--script needs bash, which is not in PATH; give the command behind -- instead")
    text = Path(file).read_text(encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BASH")}
    with tempfile.TemporaryFile() as found:
        try:
            done = subprocess.run(
                [bash, "-r", "-c", _PRELUDE.replace("FD", str(found.fileno())) + text, file, *words],
                env={**environment, "PATH": os.devnull},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=[found.fileno()],
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"--script {file} does not end within {_SECONDS} s; give the command behind --") from None
        found.seek(0)
        noted = found.read().decode(errors="surrogateescape")
    complaints = done.stderr.decode(errors="replace").splitlines()
    fatal = [line for line in complaints if "restricted" in line][:1] or complaints[-1:] * bool(done.returncode)
    if fatal:
        raise ValueError(
            f"--script {file} cannot be read without running it ({fatal[0]}); give the command itself behind --"
        )
    if not noted and done.returncode:
        said = " ".join(done.stdout.decode(errors="replace").splitlines()[-2:]) or f"exit status {done.returncode}"
        raise ValueError(
            f"--script {file} stops before it starts a training script ({said}); give its own arguments behind --, in "
            "the folder that it expects"
        )
    rest = iter(noted.split("\0")[:-1])
    return [list(itertools.islice(rest, int(count))) for count in rest]
