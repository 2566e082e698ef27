"""Asks other hosts questions over ssh, each within a deadline; host.py runs there and answers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tempo_megatron.cluster import host as host_program

_NO_FOLDER, _NO_PYTHON, _NO_VENV_SCRIPT = 81, 82, 83
_CONNECT_SECONDS = 5
# What ssh prints, and what to do about it.
_SSH_ERRORS = (
    (
        "Could not resolve hostname",
        "its name is not known here; correct it in the hostfile, or add it to DNS or /etc/hosts",
    ),
    ("Permission denied", "ssh asks for a password; let `ssh-copy-id {host}` give it this user's key"),
    (
        "Host key verification failed",
        "its ssh key is not known here or has changed; `ssh {host}` once by hand says which",
    ),
    ("Connection refused", "no ssh server listens there; start sshd, or give its port with --ssh_port"),
    ("timed out", "it is down, or a firewall is between; start it, or remove its line from the hostfile"),
    ("No route to host", "it is down or in another network; start it, or remove its line from the hostfile"),
    ("Network is unreachable", "no route leads there; set one, or remove its line from the hostfile"),
)


class HostError(Exception):
    """Says what is wrong with one host and what to do, without its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ssh:
    """How to reach the hosts and which folder and Python to use there, as DeepSpeed's pdsh launcher would."""

    port: int | None = None
    folder: str = dataclasses.field(default_factory=os.getcwd)
    python: str = sys.executable
    venv_script: str | None = None

    def make_command(self, host: str, program: str, *arguments: str) -> list[str]:
        """Makes the command that runs `program` on `host` in this folder, by this Python, asking for no password."""
        paths = os.pathsep.join([self.folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        steps = [
            f"cd {shlex.quote(self.folder)} 2>/dev/null || exit {_NO_FOLDER}",
            *self._enter_venv(),
            f"test -x {shlex.quote(self.python)} || exit {_NO_PYTHON}",
            f"PYTHONPATH={shlex.quote(paths)} exec {shlex.join([self.python, '-u', '-c', program, *arguments])}",
        ]
        # pdsh reads this variable too: options that make one work make the other work.
        options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
        port = [] if self.port is None else ["-p", str(self.port)]
        settings = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", *port, *options]
        # The remote login shell may not be a POSIX shell, so run sh explicitly.
        return ["ssh", "-T", *settings, host, shlex.join(["exec", "sh", "-c", "; ".join(steps)])]

    def _enter_venv(self) -> list[str]:
        # A POSIX shell exits if it cannot read the file to source, so test for it first.
        script = shlex.quote(self.venv_script or "")
        return [f"test -r {script} || exit {_NO_VENV_SCRIPT}", f". {script}"] if self.venv_script else []

    def explain(self, host: str, code: int, said: str) -> str:
        """Explains why a command of make_command ended with this exit code."""
        if code == _NO_FOLDER:
            return f"the folder {self.folder} is not there; share it, or copy it to the same path"
        if code == _NO_PYTHON:
            return f"{self.python} is not there; install the same environment at the same path, or share it"
        if code == _NO_VENV_SCRIPT:
            return f"--venv_script {self.venv_script} cannot be read there; correct it"
        last = said.strip().splitlines()[-1] if said.strip() else f"exit code {code}"
        for sign, remedy in _SSH_ERRORS:
            if sign in said:
                return f"ssh does not get there ({last}): {remedy.format(host=host)}"
        if code == 255:
            return f"ssh does not get there ({last}); make `ssh {host} true` work without a password"
        return f"{self.python} does not start there ({last}); make `ssh {host} {self.python} -V` work"


class HostConnection:
    """A running host.py on one host; a context manager that ends it."""

    def __init__(self, host: str, ssh: Ssh) -> None:
        self.host, self._ssh, self._received = host, ssh, b""
        program = Path(host_program.__file__).read_text(encoding="utf-8") + "\nanswer_questions()\n"
        try:
            self._process = subprocess.Popen(
                ssh.make_command(host, program),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to this process, which ends them
            )
        except FileNotFoundError as error:
            raise HostError("there is no ssh here; install openssh-client") from error

    def ask(self, deadline: float, kind: str, **question: Any) -> dict[str, Any]:
        """Returns the host's answer. Raises HostError if there is none at time.monotonic() == deadline."""
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"kind": kind, **question}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its output says why
        while True:
            line = self._read_line(deadline)
            if line.startswith(host_program.ANSWER):
                answer: dict[str, Any] = json.loads(line[len(host_program.ANSWER) :])
                return answer

    def _read_line(self, deadline: float) -> str:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise HostError(
                        "it did not answer in time; start without it, or give it longer with --timeout SECONDS"
                    )
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise HostError(self._explain_end())
                self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line.decode("utf-8", "replace")

    def _explain_end(self) -> str:
        assert self._process.stderr
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        os.set_blocking(self._process.stderr.fileno(), False)
        said = (self._process.stderr.read() or b"").decode("utf-8", "replace")
        return self._ssh.explain(self.host, self._process.poll() or 0, said)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def __enter__(self) -> HostConnection:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()


def run_on_hosts(arguments: dict[str, list[str]], ssh: Ssh, program: str, seconds: float) -> dict[str, str | HostError]:
    """Runs a Python program on all hosts at once; returns what each printed within `seconds`, or why it did not run.

    `arguments` maps each host to the program's arguments there.
    """

    def run(host: str) -> str | HostError:
        try:
            done = subprocess.run(
                ssh.make_command(host, program, *arguments[host]),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return HostError(f"it did not answer within {seconds:.0f} s")
        except FileNotFoundError:
            return HostError("there is no ssh here; install openssh-client")
        return HostError(ssh.explain(host, done.returncode, done.stderr)) if done.returncode else done.stdout

    with ThreadPoolExecutor(max_workers=len(arguments)) as threads:
        return dict(zip(arguments, threads.map(run, arguments), strict=True))
