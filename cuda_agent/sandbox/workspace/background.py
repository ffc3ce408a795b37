"""Runs background commands of a workspace, the jailed process that runs an agent's tools. Each command has a keeper: a
child of the workspace's process.

The keeper starts the command in a jail like that of a foreground command, and collects the command's output. The keeper
kills all processes of the command on request, at a limit, when the command's main process ends, or when the workspace
has ended. The keeper adopts the command's orphaned processes. Otherwise the workspace's process would adopt them, and
would kill them when a foreground command ends. A background command gets no input. Unlike a foreground command, it does
not find the sandbox's commands, such as ``verify``, on its PATH."""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.sandbox.workspace import shell as processes
from cuda_agent.sandbox.workspace.files import ToolRefused
from cuda_agent.sandbox.workspace.shell import Output, Shell, drain

MOST = 4  # commands at once
_TICK = 0.1  # seconds between checks of a command's use
_ANSWER_SECONDS = 10.0


# A request to a keeper: one byte, so that a read of the pipe never returns half a request.
_STATE, OUTPUT, KILL = b"s", b"o", b"k"


class Backgrounds:
    """The background commands of one workspace. The agent gets an id for each command, such as ``bg1``."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._channels: dict[str, tuple[int, int]] = {}  # descriptors: of answers, of requests
        self._keepers: dict[str, int] = {}
        self._started = 0

    def start(self, command: str) -> str:
        """Starts a background command and returns its id. Raises ``ToolRefused`` if too many are running."""
        asked = {name: self._ask(channel, _STATE) for name, channel in self._channels.items()}
        for name in [name for name, answer in asked.items() if answer is None]:
            self._forget(name)
        running = [name for name, answer in asked.items() if answer and answer["running"]]
        if len(running) >= MOST:
            raise ToolRefused(f"{', '.join(running)} are running: at most {MOST} in the background")
        self._started += 1
        name = f"bg{self._started}"
        requests, asks = os.pipe()  # the jail grants no sockets
        answers, tells = os.pipe()
        others = [asks, answers, *(number for channel in self._channels.values() for number in channel)]
        pid = processes.fork(lambda: _keep(self._shell, requests, tells, others, command))
        os.close(requests)
        os.close(tells)
        self._channels[name], self._keepers[name] = (answers, asks), pid
        self._shell.keepers.add(pid)
        return name

    def tell(self, name: str, request: bytes) -> str:
        """Returns the state of the command ``name``, and its output since the last call. If ``request`` is ``KILL``,
        first kills the command. Otherwise ``request`` is ``OUTPUT``. Raises ``ToolRefused`` if there is no such
        command."""
        if name not in self._channels:
            known = ", ".join(self._channels) or "none"
            raise ToolRefused(f"there is no background command {name[:20]!r} (there are: {known})")
        answer = self._ask(self._channels[name], request)
        if answer is None:
            self._forget(name)
            return "[it is gone]"
        text = str(answer["text"]).rstrip("\n")
        return "\n".join(filter(None, [text, f"[{answer['state']}]"]))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends all background commands inside the context, so that file tools and timings are not disturbed."""
        stopped: set[int] = set()
        for _ in range(20):
            found = {pid for keeper in self._keepers.values() for pid in descendants(keeper)} - stopped
            if not found:
                break
            stopped |= found
            processes.kill(found, signal.SIGSTOP)
        try:
            yield
        finally:
            processes.kill(stopped, signal.SIGCONT)

    @staticmethod
    def _ask(channel: tuple[int, int], request: bytes) -> dict[str, Any] | None:
        """Sends ``request`` to a keeper (the process that runs one command) and returns its answer. ``channel`` holds
        two descriptors: the first to read answers, the second to write requests. Returns ``None`` if the keeper does
        not answer."""
        answers, asks = channel
        said = b""
        try:
            os.write(asks, request)
            while not said.endswith(b"\n"):
                if not select.select([answers], [], [], _ANSWER_SECONDS)[0] or not (part := os.read(answers, 1 << 16)):
                    return None
                said += part
            return dict(json.loads(said))
        except (OSError, ValueError):
            return None

    def _forget(self, name: str) -> None:
        for descriptor in self._channels.pop(name):
            os.close(descriptor)
        self._shell.keepers.discard(self._keepers.pop(name))


def _keep(shell: Shell, requests: int, tells: int, others: list[int], command: str) -> NoReturn:
    """Runs the keeper of ``command`` (the process that starts the command and collects its output) in this forked child
    of the workspace's process. Never returns. Reads one-byte requests from the descriptor ``requests``, and writes
    answers as lines of JSON to the descriptor ``tells``. First closes ``others``, the inherited descriptors that belong
    to the parent."""
    for descriptor in others:
        os.close(descriptor)
    shell.client.close()
    shell.alone = False  # a signal to all processes would reach the workspace's process
    shell.keepers.clear()
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    wake = processes.wake_on_child()
    out_read, out_write = os.pipe()
    null = os.open("/dev/null", os.O_WRONLY)
    environment = shell.environment | {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    program = [processes.BASH, "-c", processes.WRAPPER, "bash", shell.state, command]
    pid = processes.fork(lambda: shell.become(program, out_write, null, environment))
    os.close(out_write)
    os.set_blocking(out_read, False)
    output, state, streams = Output(shell.limits.output_chars), "", [out_read]
    began = time.monotonic()

    def end(why: str) -> str:
        shell.end(pid)
        output.add(drain(out_read))
        return why

    while True:
        watched = [requests, wake, *streams]
        ready, _, _ = select.select(watched, [], [], _TICK if not state else None)
        if out_read in ready:
            said = drain(out_read)
            output.add(said)
            if not said:
                streams.clear()
        if wake in ready:
            drain(wake)
        code = processes.reap().get(pid)
        if not state and code is not None:
            state = end(f"ended with exit code {code}")
        elif not state:
            elapsed = time.monotonic() - began
            if overuse := shell.overuse(elapsed, shell.limits.background_seconds, disk=True):
                state = end(overuse)
        if requests in ready:
            kind = os.read(requests, 1)
            if not kind:  # the workspace is gone
                shell.end(pid)
                os._exit(0)
            if kind == KILL and not state:
                state = end("killed")
            told = {"running": not state, "text": "", "state": state or "running"}
            if kind != _STATE:
                told["text"] = output.text()
                output = Output(shell.limits.output_chars)
            _write(tells, json.dumps(told).encode() + b"\n")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
