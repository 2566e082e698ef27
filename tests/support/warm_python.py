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
# By how the names of scripts and modules begin.
_DELEGATED = tuple("tempo pretrain_gpt.py prepare_data.py deepspeed torchrun operations.py megatron_model.py".split())


def delegate() -> None:
    """Let the server run what this process was started for, if it is one of _DELEGATED, and exit as it does."""
    words = [word for word in sys.orig_argv[1:] if word != "-u"]
    name = words[1] if words[:1] == ["-m"] else os.path.basename(words[0]) if words else ""
    if not name.startswith(_DELEGATED):
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
    words, folder, environment = json.loads(asked)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, folder if is_module else os.path.dirname(os.path.realpath(sys.argv[0])))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def _reap(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
