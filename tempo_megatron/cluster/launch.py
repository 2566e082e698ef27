"""`tempo-megatron launch deepspeed ...`: runs an ordinary deepspeed command with checked hosts and a clean end.

It does what DeepSpeed's launcher leaves to the user. It checks the hosts before anything starts, finds rank 0's address
and the network interface, and passes variables on to the other hosts. On SIGTERM or Ctrl-C all ranks save and end, and
no rank trains on when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tempo_megatron.cluster import job_processes
from tempo_megatron.cluster.deepspeed_command import DeepSpeedCommand, read_command
from tempo_megatron.cluster.findings import judge
from tempo_megatron.cluster.remote_host import HostError, Ssh, run_on_hosts
from tempo_megatron.cluster.survey import DEFAULT_SECONDS, Survey, survey_hosts

_USAGE = """\
usage: {prog} deepspeed [OPTIONS OF DEEPSPEED] SCRIPT [ARGUMENTS OF SCRIPT]

The deepspeed command as you would type it, with a word before it. Before it starts, every host of its hostfile is
looked at (as `tempo-megatron doctor --hostfile` does, at most 10 s); one sentence says what is wrong, and nothing
starts. SIGTERM or Ctrl-C lets all ranks on all hosts save and end; a second one ends them at once. When it ends, no
process of the job is left on any host.

  {prog} --dry-run deepspeed ...    look at the hosts, print the command and its variables, start nothing
  {prog} --timeout 60 deepspeed ... give the hosts more than 10 seconds to answer"""

_SSH_SECONDS = 15.0
_POLL_SECONDS = 0.2
# After so long we ask again, for ranks that were still starting the first time.
_ASK_AGAIN_SECONDS = 3.0
# When a rank has failed, others may print the reason in this time. pdsh would wait until their timeout.
_SECONDS_FOR_OTHER_HOSTS = 10.0
# An ssh to a host that is cut off does not notice it: TCP waits for hours.
_SECONDS_FOR_SSH = 5.0
_HOST_FAILED = re.compile(rb"pdsh@\S+: \S+: ssh exited with exit code [1-9]")


def main(argv: Sequence[str] | None = None, prog: str = "tempo-megatron launch") -> int:
    """Checks the hosts, runs the command and cleans up; returns deepspeed's exit status, or 1 if a check fails."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE.format(prog=prog))
        return 0 if words else 2
    dry_run, seconds = False, DEFAULT_SECONDS
    while words and words[0].startswith("-"):
        option, _, value = words.pop(0).partition("=")
        if option == "--dry-run" and not value:
            dry_run = True
        elif option == "--timeout":
            seconds = _read_seconds(value or (words.pop(0) if words else ""))
        else:
            raise ValueError(
                f"{option} is given before deepspeed, expected --dry-run or --timeout; write it after deepspeed"
            )
    if not words or Path(words[0]).name != "deepspeed":
        raise ValueError(
            f"{words[0] if words else 'nothing'} is given, expected `{prog} deepspeed ...`; torchrun, mpirun and srun "
            "start as they are, and pass SIGTERM on to their ranks"
        )
    command = read_command(words[1:])
    ssh = Ssh(port=command.ssh_port, venv_script=command.venv_script)
    survey = None
    if command.hosts:
        files = (command.script,) if command.is_file else ()
        survey = survey_hosts(
            list(command.hosts),
            ssh,
            port=command.master_port,
            master_addr=command.master_addr,
            files=files,
            seconds=seconds,
        )
        findings = judge(survey)
        for finding in findings:
            print(finding, file=sys.stderr, flush=True)
        if any(finding.level == "error" for finding in findings):
            print("nothing was started", file=sys.stderr)
            return 1
    return _run(command, ssh, survey, dry_run)


def _read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise ValueError(f"--timeout is {text!r}, expected seconds above 0 and below an hour; correct it")
    return seconds


def _run(command: DeepSpeedCommand, ssh: Ssh, survey: Survey | None, dry_run: bool) -> int:
    job = uuid.uuid4().hex
    words = command.with_address(survey.address or "" if survey else "")
    own = {**choose_variables(job, survey, os.environ), **_read_users_variables()}
    print(f"{shlex.join(words)}\n  with {' '.join(f'{name}={value}' for name, value in own.items())}", flush=True)
    if dry_run:
        return 0
    with tempfile.TemporaryDirectory(prefix="tempo-launch-") as folder:
        file = Path(folder, "deepspeed_env")  # replaces the user's file and includes its variables
        file.write_text("".join(f"{name}={value}\n" for name, value in own.items()))
        environ = {**os.environ, "DS_ENV_FILE": str(file)}
        if survey is None:
            environ |= own
        # Start it with this command's Python, because DeepSpeed starts the ranks of all hosts by its own path.
        words[:1] = [sys.executable, "-m", "deepspeed.launcher.runner"]
        return _Job(job, words, environ, command, ssh).wait()


def choose_variables(job: str, survey: Survey | None, environ: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Returns variables for every rank's environment, beside those that DeepSpeed passes on (PYTHON..., NCCL...).

    A variable that is set here gets the same value everywhere. The interface is added if all hosts have the same.
    """
    chosen = {job_processes.JOB_VARIABLE: job}
    passed_on = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_EXTENSIONS_DIR")
    chosen |= {name: environ[name] for name in passed_on if environ.get(name)}
    if survey is not None:
        # DeepSpeed looks for ninja and compilers in PATH, which is shorter in an ssh session.
        chosen["PATH"] = environ.get("PATH", os.defpath)
        interfaces = {surveyed.interface for surveyed in survey.answered}
        if len(interfaces) == 1 and (interface := interfaces.pop()):
            chosen.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not any(surveyed.facts.get("gpus") for surveyed in survey.answered):
            chosen.setdefault("DS_ACCELERATOR", "cpu")
    return chosen


def _read_users_variables() -> dict[str, str]:
    """Reads what DeepSpeed would: the file in the home folder, then the one in this folder, whose values win.

    Unlike DeepSpeed it skips empty lines, at which DeepSpeed fails, and comments, which would hide the rest of
    DeepSpeed's command.
    """
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    variables: dict[str, str] = {}
    for path in dict.fromkeys([Path.home() / name, Path(name).absolute()]):
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            variable, equals, value = line.strip().partition("=")
            if variable.startswith("#") or not line.strip():
                continue
            if not equals or not variable.strip().isidentifier():
                raise ValueError(f"{path} has the line {line!r}, expected NAME=VALUE; correct it")
            variables[variable.strip()] = value.strip()
    return variables


class _Job:
    """A running deepspeed command, and the way to its ranks on every host."""

    def __init__(
        self, job: str, words: list[str], environ: dict[str, str], command: DeepSpeedCommand, ssh: Ssh
    ) -> None:
        self._job, self._ssh, self._hosts = job, ssh, [host.name for host in command.hosts]
        self._requests = 0
        self._asked: dict[str, list[int]] = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note_request)
        # In a session of its own, so that Ctrl-C reaches only this process, which then asks the ranks to stop.
        self._process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        self._failed_at: float | None = None
        self._reader = threading.Thread(target=self._pass_errors_on, daemon=True)
        self._reader.start()

    def _note_request(self, number: int, frame: FrameType | None) -> None:
        self._requests += 1

    def _pass_errors_on(self) -> None:
        """Copies the command's standard error, and notes when pdsh reports there that a host's ranks failed."""
        assert self._process.stderr
        for line in self._process.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
            if self._failed_at is None and _HOST_FAILED.match(line):
                self._failed_at = time.monotonic()

    def wait(self) -> int:
        """Waits for the command's end and returns the exit status."""
        asked_at = -_ASK_AGAIN_SECONDS
        ended_at: float | None = None
        while self._process.poll() is None:
            failed = self._failed_at is not None and time.monotonic() > self._failed_at + _SECONDS_FOR_OTHER_HOSTS
            if self._requests > 1:
                self._process.kill()
            elif ended_at is not None and time.monotonic() > ended_at + _SECONDS_FOR_SSH:
                self._kill_launcher()
            elif failed and ended_at is None:
                self._say("the ranks of a host have failed; those of the others are ended")
                self._send("end", {})
                ended_at = time.monotonic()
            elif self._requests and time.monotonic() > asked_at + _ASK_AGAIN_SECONDS:
                self._ask_ranks_to_stop()
                asked_at = time.monotonic()
            time.sleep(_POLL_SECONDS)
        code = self._process.wait()
        self._reader.join(1)
        if ended_at is not None:
            self._kill_launcher()
            return 1
        left = sum(len(processes) for processes in self._send("end", {}).values())
        self._kill_launcher()  # ends pdsh and its ssh if their parent was killed
        if left:
            self._say(f"ended {left} processes that deepspeed left behind")
        if code < 0:
            return 128 - code
        # The launcher reports success even if its child was killed.
        return 1 if left and not code else code

    def _kill_launcher(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask_ranks_to_stop(self) -> None:
        new = self._send("stop", self._asked)
        for host, processes in new.items():
            self._asked.setdefault(host, []).extend(processes)
        if count := sum(map(len, new.values())):
            self._say(f"asked {count} ranks to save and end; once more ends them at once")

    def _send(self, request: str, asked: dict[str, list[int]]) -> dict[str, list[int]]:
        """Sends a request of job_processes.py, "stop" or "end", to all hosts; returns the processes signalled."""
        if not self._hosts:
            if request == "stop":
                return {"": job_processes.ask_ranks_to_stop(self._job, set(asked.get("", [])))}
            return {"": job_processes.end_processes(self._job)}
        program = Path(job_processes.__file__).read_text(encoding="utf-8") + "\nrun_request()\n"
        arguments = {host: [request, self._job, *map(str, asked.get(host, []))] for host in self._hosts}
        found: dict[str, list[int]] = {}
        for host, answer in run_on_hosts(arguments, self._ssh, program, _SSH_SECONDS).items():
            if isinstance(answer, HostError):
                self._say(f"{host}: its ranks could not be told to {request}: {answer}")
            else:
                found[host] = [int(word) for word in answer.rpartition("processes")[2].split()]
        return found

    @staticmethod
    def _say(text: str) -> None:
        print(f"tempo-megatron launch: {text}", file=sys.stderr, flush=True)
