"""Runs the shell commands of a workspace (an agent's work folder) one after the other, within limits.

This code runs in the worker, the jailed process of one workspace. Each command runs in a second jail inside the
worker's jail. The current folder and the exported variables persist between commands.

``compile``, ``verify``, ``profile`` and ``restore`` are scripts on the shell's PATH. A script sends a request to the
worker through a FIFO. The worker forwards the request to its client (module ``client``), which runs the command outside
the jail. The client's answer is a text and new contents of some files. The worker changes these files and sends the
text to the script through another FIFO. The agent's programs can forge all data that comes from a shell, so the worker
checks it."""

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import socket
import stat
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.jail.descendants import descendants, memory_bytes
from cuda_agent.sandbox.messages import WorkspaceOperation, receive_frame, send_frame
from cuda_agent.sandbox.wire import CommandResult
from cuda_agent.sandbox.workspace.files import Folder, ToolRefused, disk_use

COMMANDS = ("compile", "verify", "profile", "restore")
BASH = "/bin/bash"
_STATE_FD = 198  # descriptor to which a shell writes its folder and exported variables
_MEMORY_TICK, _WAITING_TICK, _DISK_TICK = 0.1, 0.3, 0.5  # seconds between checks of a command's use
_ASKS = 20  # most answered requests of one shell command
_PATIENCE = 200  # rounds that kill forking processes one by one, to spare background commands
_STATE_BYTES, _REQUEST_BYTES, _ANSWER_BYTES = 32 << 10, 8 << 10, 32 << 10
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36

# $1 restores folder and variables, $2 is the command; on exit the state is saved.
WRAPPER = 'eval "$1"; trap \'{ printf "cd -- %q\\n" "$PWD"; export -p; } >&198 2>/dev/null\' EXIT; eval "$2"'
_STUB = """#!/bin/bash
# Asks the sandbox and prints its answer.
reply={pipes}/$$
mkfifo -m 600 "$reply" && exec 197<>"$reply" || exit 125
printf '%s\\037' "$$" "${{0##*/}}" "$@" $'\\036' > {pipes}/requests
IFS= read -r -d '' status <&197
IFS= read -r -d '' text <&197
printf '%s\\n' "$text"
exit "$status"
"""


@dataclass(frozen=True)
class CommandLimits:
    """The limits of the commands in one workspace. ``shell_seconds`` limits the run time of a foreground command. Time
    in which the command waits for compile, verify, profile or restore does not count."""

    shell_seconds: float = 30.0
    output_chars: int = 30_000  # of one tool's text; the middle is cut
    memory_mb: int = 1024  # limit for all processes of a shell command together
    processes: int = 64
    disk_mb: int = 256
    background_seconds: float = 600.0


@dataclass
class CommandOutcome:
    code: int
    output: str
    killed: str = ""  # the reason, if it was killed


@dataclass
class Output:
    """The output of a command, cut to its first and last bytes: at most ``limit`` bytes in all. ``dropped`` is the
    number of bytes cut out between them."""

    limit: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def add(self, data: bytes) -> None:
        room = self.limit // 2 - len(self.head)
        self.head += data[: max(room, 0)]
        self.tail += data[max(room, 0) :]
        if (excess := len(self.tail) - self.limit // 2) > 0:
            del self.tail[:excess]
            self.dropped += excess

    def text(self) -> str:
        middle = f"\n[{self.dropped} bytes cut]\n".encode() if self.dropped else b""
        return bytes(self.head + middle + self.tail).decode(errors="replace").replace("\0", "")


class Shell:
    """Runs foreground programs of the agent one after the other. This process is in a jail. Each program and its
    children run in a second jail inside this one."""

    def __init__(self, folder: str, limits: CommandLimits, files: Folder, client: socket.socket) -> None:
        self.folder, self.limits, self.files, self.client = folder, limits, files, client
        self.state = ""  # shell code that restores folder and variables
        work, self.pipes = f"{folder}/work", f"{folder}/pipes"
        self.policy = jail.JailPolicy(
            write=(work, f"{folder}/tmp", self.pipes),
            execute=(*jail.SYSTEM_EXECUTE, work, f"{folder}/bin"),
            cpu_seconds=max(1, int(limits.shell_seconds) * 2),
        )
        path = f"{folder}/bin:/usr/local/bin:/usr/bin:/bin"
        self.environment = {"PATH": path, "HOME": work, "TMPDIR": f"{folder}/tmp", "LANG": "C.UTF-8"}
        for name in COMMANDS:
            path = f"{folder}/bin/{name}"
            with open(path, "w") as file:
                file.write(_STUB.format(pipes=self.pipes))
            os.chmod(path, 0o700)
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.wake = wake_on_child()
        self.asked = 0
        self.alone = _signals_stay_inside()
        self.keepers: set[int] = set()  # children that outlive a foreground command, with their descendants
        self.paused: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # while a time may be taken

    def run(self, program: list[str], seconds: float) -> CommandOutcome:
        """Runs a program until it ends or exceeds a limit, then kills its remaining processes. ``seconds`` limits the
        run time. Time in which the program waits for compile, verify, profile or restore does not count."""
        requests = self._requests()
        out_read, out_write = os.pipe()
        state_read, state_write = os.pipe()
        pid = fork(lambda: self.become(program, out_write, state_write, self.environment))
        os.close(out_write)
        os.close(state_write)
        for descriptor in (out_read, state_read):
            os.set_blocking(descriptor, False)
        output, state, request = Output(self.limits.output_chars), bytearray(), bytearray()
        waiting: list[list[str]] = []  # requests of ``COMMANDS``; the first one is being answered
        quiet = contextlib.ExitStack()  # open while a request is being answered
        asks, used, killed, code = 0, 0.0, "", None
        last = looked = measured = time.monotonic()
        try:
            streams = [self.client.fileno(), requests, self.wake, out_read, state_read]
            while code is None:
                ready, _, _ = select.select(streams, [], [], _WAITING_TICK if waiting else _MEMORY_TICK)
                now = time.monotonic()
                used, last = used + (0.0 if waiting else now - last), now
                output.add(said := drain(out_read))
                state += (left := drain(state_read))[: _STATE_BYTES + 1 - len(state)]
                for stream, data in ((out_read, said), (state_read, left)):
                    if stream in ready and not data:
                        streams.remove(stream)  # the stream's last writer has ended
                if self.wake in ready:
                    drain(self.wake)
                code = reap().get(pid)
                if self.client.fileno() in ready:
                    frame = receive_frame(self.client)
                    answers = frame.operation == WorkspaceOperation.COMMAND_RESULT
                    if answers and waiting and frame.slot == self.asked % 256:
                        self._answer(waiting.pop(0)[0], CommandResult(**frame.body))
                        self._ask(waiting)
                        if not waiting:
                            quiet.close()
                for fields in _records(request, drain(requests)):
                    asks += 1
                    if asks > _ASKS:
                        self._answer(fields[0], CommandResult("too many requests in one command", error=True))
                        continue
                    waiting.append(fields)
                    if len(waiting) == 1:
                        quiet.enter_context(self.paused())
                        self._ask(waiting)
                if code is None and (used > seconds or now - looked > _MEMORY_TICK):
                    disk = now - measured > _DISK_TICK
                    killed, looked, measured = self.overuse(used, seconds, disk), now, now if disk else measured
                    if killed:
                        break
        finally:
            quiet.close()
            self.end(pid)
        output.add(drain(out_read))
        state += drain(state_read)[: _STATE_BYTES + 1 - len(state)]
        for descriptor in (out_read, state_read, requests):
            os.close(descriptor)
        if state and len(state) <= _STATE_BYTES and not killed:
            self.state = state.decode(errors="replace").replace("\0", "")
        return CommandOutcome(code if code is not None else -signal.SIGKILL, output.text(), killed)

    def become(self, program: list[str], out: int, state: int, environment: dict[str, str]) -> None:
        """Replaces this process, a forked child, by the jailed ``program``. The program's output and errors go to the
        descriptor ``out``. When a shell exits, it writes its current folder and exported variables to the descriptor
        ``state``."""
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        for descriptor, number in ((null, 0), (out, 1), (out, 2), (state, _STATE_FD)):
            os.dup2(descriptor, number)
        os.closerange(3, _STATE_FD)
        os.closerange(_STATE_FD + 1, 4096)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.chdir(self.files.root)
            resource.setrlimit(resource.RLIMIT_CPU, (self.policy.cpu_seconds, self.policy.cpu_seconds))
            jail.narrow(self.policy)
            os.execve(program[0], program, environment)
        except (OSError, ValueError, jail.JailError) as error:
            os.write(2, f"{program[0]}: {error}\n".encode())
            os._exit(126)

    def overuse(self, used: float, seconds: float, disk: bool) -> str:
        """Returns the reason to kill the running command, such as "killed after 30 s", or an empty string if no limit
        is exceeded. The command has run for ``used`` seconds, and at most ``seconds`` are allowed. Checks the disk use
        only if ``disk`` is true."""
        if used > seconds:
            return f"killed after {seconds:g} s"
        pids = descendants(os.getpid())
        if len(pids) > self.limits.processes:
            return f"killed: more than {self.limits.processes} processes"
        if sum(memory_bytes(pid)[0] for pid in pids) > self.limits.memory_mb << 20:
            return f"killed: more than {self.limits.memory_mb} MiB of memory"
        if disk and disk_use(self.folder, self.limits.disk_mb << 20) > self.limits.disk_mb << 20:
            return f"killed: more than {self.limits.disk_mb} MiB on disk"
        return ""

    def end(self, pid: int) -> None:
        """Kills all remaining processes of the command with the process id ``pid``. Background commands survive, unless
        some of these processes are still alive after many attempts."""
        kill([-pid])
        for attempt in range(1000):
            if self.alone and (not self.keepers or attempt > _PATIENCE):
                kill([-1])  # kills all at once: forking cannot outrun this signal
            left = descendants(os.getpid(), self.keepers)
            kill(left)
            reap()
            if not left:
                return
            time.sleep(0.001)

    def _requests(self) -> int:
        """Makes the FIFO through which scripts such as verify send requests, and returns its descriptor. Each program
        gets a new FIFO, because the previous program may have replaced the old one."""
        path = f"{self.pipes}/requests"
        for folder in (self.files.root, f"{self.folder}/tmp", self.pipes):
            os.chmod(folder, 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, f"{self.folder}/tmp/{time.monotonic_ns()}")
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _ask(self, waiting: list[list[str]]) -> None:
        if waiting:
            _, name, *argv = waiting[0]
            self.asked += 1
            self.files.restore()
            body = {"name": name, "argv": argv, "files": self.files.collect()}
            send_frame(self.client, WorkspaceOperation.RUN_COMMAND, body, slot=self.asked % 256)

    def _answer(self, pid: str, result: CommandResult) -> None:
        """Changes the files that ``result`` names. Then sends the result to the script (such as verify) with the
        process id ``pid``, if this script still waits. If a file cannot be changed, sends an error instead of the
        result."""
        try:
            self.files.put(result.files)
        except ToolRefused as refused:
            result = CommandResult(f"error: {refused}", error=True)
        path = f"{self.pipes}/{pid}"
        text = cut(result.text, _ANSWER_BYTES // 4).replace("\0", "").encode(errors="replace")
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    os.write(descriptor, (b"1" if result.error else b"0") + b"\0" + text + b"\0")
            finally:
                os.close(descriptor)
                os.unlink(path)


def _records(pending: bytearray, data: bytes) -> Iterable[list[str]]:
    """Adds ``data`` to ``pending``, a buffer for the bytes of requests from scripts such as verify. Yields each
    complete request as [process id, command, *arguments]. Skips malformed requests. An incomplete last request stays in
    ``pending``."""
    pending += data
    *records, rest = bytes(pending).split(b"\x1e")
    pending[:] = rest[-_REQUEST_BYTES:]
    for record in records:
        fields = record.decode(errors="replace").removeprefix("\x1f").removesuffix("\x1f").split("\x1f")
        if len(fields) >= 2 and fields[0].isascii() and fields[0].isdigit() and fields[1] in COMMANDS:
            yield fields[:20]


# ------------------------------------------------------------------------------------------------------------ processes


def cut(text: str, limit: int) -> str:
    """Returns ``text``. If it is longer than ``limit`` characters, cuts its middle so that about ``limit`` characters
    remain."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[{len(text) - limit} characters cut]\n{text[-(limit // 2) :]}"


def wake_on_child() -> int:
    """Returns a descriptor that becomes readable when a child process ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def drain(descriptor: int) -> bytes:
    """Reads the bytes that are available at ``descriptor``, at most about 1 MiB, and returns them."""
    data = bytearray()
    while len(data) < 1 << 20:
        try:
            part = os.read(descriptor, 1 << 16)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                break
            raise
        if not part:
            break
        data += part
    return bytes(data)


def reap() -> dict[int, int]:
    """Returns the exit codes of the child processes that have ended since the last call, by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _signals_stay_inside() -> bool:
    """Returns whether the jail confines signals to this process and its children."""
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return jail.landlock_abi() >= 6
    return False


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def fork(body: Callable[[], None]) -> int:
    """Forks a child that runs ``body`` and exits. Returns the child's process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
    except ConnectionError:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(70)
    os._exit(0)
