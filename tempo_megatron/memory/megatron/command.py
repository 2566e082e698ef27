"""The command that starts a training script of Megatron-LM: where it stands, and its parts.

    pretrain_gpt.py ARGS...
    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 pretrain_gpt.py ARGS...
    deepspeed --num_gpus 8 pretrain_bert.py ARGS...

It is given behind --, in a shell script, or as the test case of a functional test. `read_command` reads what it says
of a run.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tempo_megatron.extras import check_installed

MODELS = {"gpt": "GPTModel", "hybrid": "GPTModel", "bert": "BertModel", "t5": "T5Model"}
"""Family of a script -> the class of its model, as Megatron calls it."""

# Folders of Megatron-LM's functional tests.
_OF_IMAGES = ("multimodal-llava", "mimo")

_SCRIPTS = {"gpt": "gpt", "bert": "bert", "t5": "t5", "hybrid": "hybrid", "mamba": "hybrid"}
"""What a script is called after -> its family. A HybridModel is a GPT whose layers are of several kinds."""

_EXPECTED = f"{', '.join(f'pretrain_{name}.py' for name in list(_SCRIPTS)[:-1])} or pretrain_mamba.py"
_SCRIPT = re.compile(r"(?:.*[/_])?pretrain_(\w+)\.py")

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name, and that of torch 2.9 and later, which counts where both are set."""
SETTINGS = (WORKSPACE, *ALLOCATORS)
"""What may stand before a command, of what its environment sets."""

# In one line, so that bash counts lines as the script does. A command of Python is noted as how many words it has, then
# the words, each with a NUL behind it, in one write: the programs of a pipeline run at once.
_PRELUDE = (
    'command_not_found_handle() { [[ "$* " == *".py "* ]] || return 0; '
    f"for NAME in {' '.join(SETTINGS)}; do "
    '[[ -z ${!NAME+set} ]] || set -- "$NAME=${!NAME}" "$@"; done; '
    'printf "%s\\0" $# "$@" >&FD; }; '
    'exec() { "$@"; }; command() { "$@"; }; cd() { :; }; '
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command taken apart."""

    launcher: tuple[str, ...]
    """What stands before the script."""

    script: str
    family: str
    """gpt, bert, t5 or hybrid."""

    options: tuple[str, ...]
    """What stands behind the script."""

    world_size: int | None
    """As the launcher says."""


def split_command(words: Sequence[str]) -> Command:
    """Raises ValueError where it starts no script whose model is known."""
    place = next((place for place, word in enumerate(words) if _SCRIPT.fullmatch(word)), None)
    if place is None:
        raise ValueError(f"the command names no training script of Megatron-LM; write it from {_EXPECTED} on")
    family = _SCRIPTS.get(_SCRIPT.sub(r"\1", words[place]))
    if family is None:
        raise ValueError(f"{words[place]} trains a model that the estimate does not know; expected {_EXPECTED}")
    launcher = tuple(words[:place])
    return Command(launcher, words[place], family, tuple(words[place + 1 :]), _count_ranks(launcher))


def _count_ranks(launcher: Sequence[str]) -> int | None:
    """What torchrun or deepspeed would start; None where nothing says it."""
    numbers = []
    for option, names in (("--nproc-per-node", "nproc[-_]per[-_]node|num_gpus"), ("--nnodes", "nnodes|num_nodes")):
        found = re.findall(rf"(?:^| )--(?:{names})[ =]?(\S*)", " ".join(launcher))
        if found and not re.fullmatch("[1-9][0-9]*", found[-1]):
            said = found[-1] or "without a value"
            raise ValueError(f"{option} of the launcher is {said}; expected a number, or --world-size beside it")
        numbers.append(int(found[-1]) if found else None)
    gpus, nodes = numbers
    return gpus and gpus * (nodes or 1)


def spell_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """The words of MODEL_ARGS, as Megatron-LM's tests/functional_tests/shell_test_utils/_run_training.sh makes them.

    `true` is a switch, `[a b]` several values, and whatever else, `false` among it, one value. A value in brackets
    that YAML reads as a list is such a list, and so are whole numbers without brackets: until cb12e3dea4 (April 2025)
    the script took those apart, and no option takes them as one word. The script reads a value twice as a shell does,
    by xargs and by eval: `Et*2\\\\|tL` in the file is Et*2|tL.

    Raises ValueError for a quote that does not end.
    """
    words: list[str] = []
    for name, value in arguments.items():
        words.append(name)
        if isinstance(value, list):
            words += [word for each in value for word in _read_as_shell(name, str(each))]
        elif isinstance(value, bool):
            words += [] if value else ["false"]
        elif value != "true":
            text = " ".join(_read_as_shell(name, str(value)))
            if re.fullmatch(r"\[[^]]+\]|\d+( \d+)+", text):
                words += _read_as_shell(name, text.strip("[]"))
            else:
                is_quoted = " " in text or re.fullmatch(r"\([^)]+\)", text)
                words += _read_as_shell(name, f'"{text}"' if is_quoted else text)
    return words


def _read_as_shell(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise ValueError(f"{name} of the test case is {text}, whose last quote does not end; correct it") from None


def find_in_script(file: str, words: Sequence[str], world_size: int | None, seconds: float = 20) -> Command:
    """The one command of a shell script that trains.

    Args:
        file: the script.
        words: its own arguments.
        world_size: GPUs of the whole run, in place of what the script's launcher says of its nodes, which is mostly a
            place to fill in; None keeps that.
        seconds: in which the script ends.

    Raises ValueError where there is no command, or several that differ.
    """
    started = _read_script(file, words, seconds)
    training = {tuple(each) for each in started if any(_SCRIPT.fullmatch(word) for word in each)}
    if len(training) != 1:
        raise ValueError(
            f"--script {file} starts {len(training) or 'no'} command{'s' if training else ''} of {_EXPECTED}, "
            "and one is expected; give it behind -- instead"
        )
    command = split_command(training.pop())
    if world_size is None:
        return command
    settings = [word for word in command.launcher if word.partition("=")[0] in SETTINGS]
    return dataclasses.replace(command, launcher=(*settings, "python"), world_size=None)


def _read_script(file: str, words: Sequence[str], seconds: float) -> list[list[str]]:
    """The words of each command that runs a file of Python in a script.

    Scripts such as Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh put a command together in arrays and
    behind conditions, which only a shell reads as a shell does. So bash reads the script, restricted (no file is
    written) and with no folder to find programs in: it hands the words of each to a function, which notes them. What a
    program would print is empty.

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
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"--script {file} does not end within {seconds} s; give the command behind --") from None
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


def read_test_case(file: str, words: Sequence[str]) -> Command:
    """The command of a model_config.yaml of Megatron-LM's functional tests, behind the words that name its script.

    Without these the script is called as the case's folder. Raises ValueError where that is a model of images, which a
    script of its own trains, and for a file that has no MODEL_ARGS.
    """
    check_installed("--megatron-yaml", "train", "yaml")
    import yaml  # type: ignore[import-untyped]

    folders = Path(file).absolute().parts[:-1]
    of_images = next((part for part in folders if part in _OF_IMAGES), None)
    if of_images and not words:
        raise ValueError(
            f"--megatron-yaml {file} is a test of {of_images}, a model of images, which the estimate does not know; "
            "name the script behind --, such as -- pretrain_gpt.py, to follow the language model alone"
        )
    family = next((part for part in reversed(folders) if part in _SCRIPTS), "gpt")
    command = split_command(words or [f"pretrain_{family}.py"])
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--megatron-yaml {file} is not valid YAML ({reason}); correct it") from error
    content = content if isinstance(content, dict) else {}
    arguments, environment = content.get("MODEL_ARGS"), content.get("ENV_VARS")
    if not isinstance(arguments, dict):
        raise ValueError(f"--megatron-yaml {file} has no MODEL_ARGS; give a model_config.yaml of Megatron-LM's tests")
    environment = environment if isinstance(environment, dict) else {}
    launcher = command.launcher
    if settings := [f"{name}={environment[name]}" for name in SETTINGS if name in environment]:
        launcher = (*settings, *(launcher or ("python",)))
    spelled = spell_arguments({str(name): value for name, value in arguments.items()})
    return dataclasses.replace(command, launcher=launcher, options=(*command.options, *spelled))


def drop_options(words: Sequence[str], beginnings: tuple[str, ...]) -> list[str]:
    """The words without the options that begin so, and their values."""
    found, is_dropped = [], False
    for word in words:
        if word.startswith("--"):
            is_dropped = word.startswith(beginnings)
        if not is_dropped:
            found.append(word)
    return found
