"""A Python that has imported the slow packages, which takes seconds, and forks for each command of an environment.

This file is copied into the environment, and a .pth file there calls `delegate` in each process that starts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import zlib
from types import FrameType

# Of the environment, in no folder: the path of one may be too long for a socket.
_ADDRESS = f"\0warm-python {zlib.crc32(sys.prefix.encode())}"
_DELEGATED = ("tempo-megatron", "tempo-pretrain-gpt", "tempo-pretrain-bert", "pretrain_gpt.py")


def delegate() -> None:
    """Let the server run what this process was started for, if it is one of _DELEGATED, and exit as it does."""
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    if not words or os.path.basename(words[0]) not in _DELEGATED:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        if server.connect_ex(_ADDRESS):
            print("no warm Python listens", file=sys.stderr, flush=True)
            os._exit(1)
        socket.send_fds(server, [json.dumps([words, os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
        os._exit(int(server.recv(64) or 1))


def serve(*modules: str) -> None:
    """Import `modules`, say so, and run commands; this process itself never returns, only its forks do."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_ADDRESS)
        listener.listen(64)
        for module in modules:
            importlib.import_module(module)
        signal.signal(signal.SIGCHLD, _reap)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if command := os.fork():
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(command, 0)
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv, folder, environment = json.loads(asked)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _reap(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
