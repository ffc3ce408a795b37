"""The fork server of stage processes: it imports torch and transformers once and forks a process for each stage.

A stage starts in milliseconds instead of the seconds that its imports take.  The server never runs a tensor operation
and starts no thread (OpenBLAS starts threads on import and restarts them after a fork), so its fork is as good as a
fresh process.  When a process dies, its children die too: server and stages ask the kernel for SIGKILL when their
parent dies, and the process group of a stage is killed when the stage ends.

Not covered: grandchildren that leave the process group; they have to watch their parent (the sandbox does).
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from cuda_agent.errors import EXIT_RETRY
from cuda_agent.machine import die_with_parent

PRELOAD = ("torch", "transformers", "transformers.models.qwen3.modeling_qwen3")


class Spawner:
    """The executor's end of the server; use it from one thread, which must outlive it."""

    def __init__(self, preload: tuple[str, ...] = PRELOAD) -> None:
        self._preload = preload
        self._server: subprocess.Popen[bytes] | None = None
        self._running: set[str] = set()
        self._text = b""

    def open(self) -> None:
        """Starts the server unless it runs; ``start`` does so too.  Its imports run while the caller goes on."""
        if self._server is None:
            command = [sys.executable, "-P", "-m", "cuda_agent.pipeline.spawn", str(os.getpid()), *self._preload]
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C is for the executor alone
                bufsize=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
            self._text = b""

    def start(self, name: str, order: str, log: Path) -> None:
        """Starts a stage.  ``order`` is ``stage_main.StageOrder`` as JSON; stdout and stderr go to ``log``."""
        self.open()
        self._running.add(name)
        self._tell({"start": name, "order": order, "log": str(log)})

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to one stage; does nothing when it has ended."""
        if name in self._running:
            self._tell({"signal": name, "number": int(number)})

    def wait(self, seconds: float) -> dict[str, int]:
        """Returns the exit codes of the stages that ended within ``seconds``.  A killed stage (SIGKILL, SIGTERM) has
        code 75 (try again), as have all stages of a dead server; another signal gives its negative number."""
        if self._server is None or self._server.stdout is None:
            return {}
        ended: dict[str, int] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._server.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return {}
        data = os.read(self._server.stdout.fileno(), 1 << 16)
        self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            code = os.waitstatus_to_exitcode(answer["status"])
            ended[answer["ended"]] = EXIT_RETRY if -code in (signal.SIGKILL, signal.SIGTERM) else code
        if not data:
            self._server.wait()
            self._server = None
            ended |= {name: EXIT_RETRY for name in self._running if name not in ended}
        self._running -= ended.keys()
        return ended

    def close(self) -> None:
        """Kills the server and all running stages."""
        if self._server is not None:
            assert self._server.stdin is not None and self._server.stdout is not None
            self._server.stdin.close()
            self._server.wait()
            self._server.stdout.close()
            self._server = None

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._server is not None and self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``wait`` finds out
            self._server.stdin.write(json.dumps(message).encode() + b"\n")


def serve(parent: int, preload: list[str]) -> None:
    """Runs the server's loop: orders on stdin, ends of stages on stdout, one JSON object per line."""
    die_with_parent(parent)
    gc.disable()  # imported modules stay, so collecting them is wasted time
    for module in (*preload, "cuda_agent.pipeline.stage_main"):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    children: dict[int, str] = {}
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(read_end, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == read_end:
                    os.read(read_end, 4096)
                    continue
                data = os.read(0, 1 << 16)
                if not data:
                    for pid in children:
                        _kill_group(pid)
                    return
                text += data
            *lines, text = text.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "start" in message:
                    children[_fork(message, (read_end, write_end))] = message["start"]
                else:
                    for pid, name in children.items():
                        if name == message["signal"]:
                            os.kill(pid, message["number"])
            _reap(children)


def _reap(children: dict[int, str]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        _kill_group(pid)
        os.write(1, json.dumps({"ended": children.pop(pid), "status": status}).encode() + b"\n")


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _fork(message: dict[str, Any], close: tuple[int, int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # in the parent too, so that the group exists before a kill of it
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from cuda_agent.pipeline.stage_main import StageOrder, run_stage

        code = run_stage(StageOrder(**json.loads(message["order"])))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # without clean-up of the server's objects or a return into its loop
    return 0


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
