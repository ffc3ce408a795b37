"""The fork server: a process that imports torch and transformers once, and then forks a process for each stage.

A stage therefore does not wait for these imports.  The fork is safe, because the server runs no tensor operations and
has no threads except those of OpenBLAS, which restarts its threads after a fork.

No process is left behind.  If the executor (the process that started the server) ends, Linux kills the server.  If the
server ends, Linux kills the stages' processes.  When a stage ends, the server kills the stage's process group.

Executor and server exchange JSON objects, one per packet of a socket."""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from cuda_agent.errors import EXIT_BUG, EXIT_RETRY
from cuda_agent.machine import die_with_parent

PRELOAD = ("torch", "transformers", "transformers.models.qwen3.modeling_qwen3")
_POLL_SECONDS = 0.02  # interval of the checks for ended stages
_PACKET = 1 << 16  # bytes


class Spawner:
    """The executor's connection to the fork server.  Use it from one thread.  Linux kills the server when this thread
    ends, so the thread must live until ``close``."""

    def __init__(self, preload: tuple[str, ...] = PRELOAD) -> None:
        self._preload = preload
        self._server: subprocess.Popen[bytes] | None = None
        self._running: set[str] = set()

    def open(self) -> None:
        """Starts the fork server if it is not running.  Does not wait for the server's imports."""
        if self._server is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-P", "-m", "cuda_agent.pipeline.spawn", str(os.getpid()), *self._preload],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # the terminal's Ctrl-C is for the executor alone
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                )

    def start(self, name: str, order: dict[str, Any], log: Path) -> None:
        """Starts the process of stage ``name``.  The process's stdout and stderr go to the file ``log``.  ``order`` has
        the fields of ``stage_main.StageOrder``."""
        self.open()
        self._running.add(name)
        self._tell({"start": name, "order": order, "log": str(log)})

    def signal(self, name: str, number: int) -> None:
        """Sends signal ``number`` to the process of stage ``name``; does nothing if the stage has ended."""
        if name in self._running:
            self._tell({"signal": name, "number": int(number)})

    def wait(self, seconds: float) -> dict[str, int]:
        """Waits at most ``seconds`` until a stage ends.  Returns a map from the names of ended stages to their exit
        codes.  The map is empty if no stage ended.  If SIGKILL or SIGTERM ended the stage, or if the server ended, the
        code is 75 (try again).  If another signal N ended the stage, the code is -N."""
        if self._server is None or not select.select([self._socket], [], [], seconds)[0]:
            return {}
        if packet := _receive(self._socket):
            code = packet["code"]
            ended = {packet["ended"]: EXIT_RETRY if -code in (signal.SIGKILL, signal.SIGTERM) else code}
        else:
            self.close()
            ended = dict.fromkeys(self._running, EXIT_RETRY)
        self._running -= ended.keys()
        return ended

    def close(self) -> None:
        """Makes the server kill all running stages and end.  Waits until the server has ended."""
        if self._server is not None:
            self._socket.close()
            self._server.wait()
            self._server = None

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # ``wait`` notices a dead server
            self._socket.send(json.dumps(message).encode())


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    try:
        packet = channel.recv(_PACKET)
    except ConnectionResetError:
        return None
    return json.loads(packet) if packet else None


def serve(parent: int, preload: list[str]) -> None:
    """Runs the fork server in this process.  The process's stdin is a socket that connects it to the executor.  When
    the executor closes the socket, the server kills all stages and returns.  ``parent`` is the executor's process id,
    and ``preload`` names the modules to import first."""
    # The executor passes signals on.  When a pod is deleted, Argo's executor sends SIGTERM to each process in it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    for module in (*preload, "cuda_agent.pipeline.stage_main"):
        importlib.import_module(module)
    channel = socket.socket(fileno=0)  # closed in the stages, whose stdin is replaced
    children: dict[int, str] = {}
    while True:
        if select.select([channel], [], [], _POLL_SECONDS if children else None)[0]:
            message = _receive(channel)
            if message is None:
                for pid in children:
                    _kill_group(pid)
                return
            if "start" in message:
                children[_fork(message)] = message["start"]
            else:
                for pid, name in children.items():
                    if name == message["signal"]:
                        os.kill(pid, message["number"])
        for pid, name in list(children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill_group(pid)
                del children[pid]
                channel.send(json.dumps({"ended": name, "code": os.waitstatus_to_exitcode(status)}).encode())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _fork(message: dict[str, Any]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in the parent too, so that the group exists before it can be killed
        return pid
    code = EXIT_BUG
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the stage has its handler
        die_with_parent(server)
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        from cuda_agent.pipeline.stage_main import StageOrder, run_stage

        code = run_stage(StageOrder(**message["order"]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # neither cleans up the server's objects nor returns into its loop
    return 0


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
