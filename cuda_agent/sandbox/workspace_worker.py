"""The workspace's process: every shell and file tool of one agent runs here, inside the jail.

``python -m cuda_agent.sandbox.workspace_worker FD FOLDER`` is the warm parent: light (no torch), one thread, it forks a
worker for every workspace, and cleans up behind it: folder, and whatever the shell left running.  A worker closes the
jail around itself, then serves its client over one socket.  Each shell command runs in a jail inside that jail: it
cannot reach its worker, ``/proc``, or anything but the workspace's folder and read-only system folders.

``compile``, ``verify`` and ``profile`` are small scripts on the shell's PATH.  They hand their request to the worker
through a FIFO, the worker passes it to the client over the open call, and the answer returns the same way.

Not covered: what those commands do, background commands (whatever still runs when a command returns is killed), process
substitution in the shell (``<(...)`` needs ``/proc``), and machines whose Landlock cannot confine signals (ABI below
6), where a shell of the same user may kill its own worker.
"""

import contextlib
import ctypes
import errno
import gc
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cuda_agent.sandbox import jail
from cuda_agent.sandbox.wire import Frame, receive_frame, send_frame
from cuda_agent.sandbox.workspace_files import Folder, Refused, disk_use

COMMANDS = ("compile", "verify", "profile")
_SHELL = "/bin/bash"
_STATE_FD = 198  # of a shell: where it leaves its folder and exported variables
_MEMORY_TICK, _WAITING_TICK, _DISK_TICK = 0.1, 0.3, 0.5  # seconds between looks at what a command uses
_ASKS = 20  # answered requests of one shell command
_STATE_BYTES, _REQUEST_BYTES, _ANSWER_BYTES = 32 << 10, 8 << 10, 32 << 10
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36

# $1 restores folder and variables, $2 is the command; on the way out the state is left behind.
_WRAPPER = 'eval "$1"; trap \'{ printf "cd -- %q\\n" "$PWD"; export -p; } >&198 2>/dev/null\' EXIT; eval "$2"'
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
class Limits:
    """Of one workspace.  A shell command's seconds do not count while compile, verify or profile is being answered."""

    shell_seconds: float = 30.0
    output_chars: int = 30_000  # of one tool's text; the middle is cut
    memory_mb: int = 1024  # of all processes of a shell command together
    processes: int = 64
    disk_mb: int = 256


# ---------------------------------------------------------------------------------------------------------- warm parent


def main() -> None:
    """Serves ``O`` (open: a number, and a socket's descriptor) and ``C`` (close: the number) until the stream ends."""
    control, root = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake = _wake_on_child()
    gc.collect()
    gc.freeze()
    workers: dict[int, int] = {}  # number -> pid
    helpers: set[int] = set()  # pids that remove folders
    closed: set[int] = set()
    send_frame(control, "=")
    while True:
        strays = [pid for pid in _children(os.getpid()) if pid not in helpers and pid not in workers.values()]
        _kill(strays)
        ready, _, _ = select.select([control.fileno(), wake], [], [], 0.05 if strays or closed else None)
        if wake in ready:
            _drain(wake)
        for pid in _reap():
            helpers.discard(pid)
            workers = {number: worker for number, worker in workers.items() if worker != pid}
        if control.fileno() in ready:
            try:
                frame = receive_frame(control, max_fds=1)
            except ConnectionError:
                break
            number = int(frame.body)
            folder = f"{root}/{number}"
            if frame.kind == "O":
                os.mkdir(folder, 0o700)
                workers[number] = _fork(partial(_worker, frame.fds[0], folder))
            elif number in workers:
                _kill([workers[number]])
                closed.add(number)
            else:
                closed.add(number)
            for descriptor in frame.fds:
                os.close(descriptor)
        for number in closed - workers.keys():
            closed.discard(number)
            helpers.add(_fork(partial(_remove, f"{root}/{number}")))
    deadline = time.monotonic() + 10
    while (left := _children(os.getpid())) and time.monotonic() < deadline:
        _kill(left)
        _reap()
        time.sleep(0.01)
    _remove(root)


def _fork(body: Callable[[], None]) -> int:
    """A child that runs ``body`` and is gone."""
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


def _remove(folder: str) -> None:
    """Programs do it: a hostile tree can be deeper than Python's recursion, and its folders may be closed."""
    for program in (["rm", "-rf", folder], ["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]) * 3:
        if not os.path.lexists(folder):
            return
        pid = os.fork()
        if pid == 0:
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 2)
            with contextlib.suppress(OSError):
                os.execv("/bin/" + program[0], program)
            os._exit(127)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _worker(descriptor: int, folder: str) -> None:
    """Becomes one workspace."""
    signal.set_wakeup_fd(-1)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 4096)
    os.setsid()
    client = socket.socket(fileno=descriptor)
    opening = receive_frame(client).body
    limits = Limits(**opening["limits"])
    jail.enter(
        jail.Policy(
            read=(*jail.SYSTEM_READ, "/proc"),
            write=(folder,),
            execute=(*jail.SYSTEM_EXECUTE, folder),
            memory_mb=limits.memory_mb,
            processes=limits.processes,
        )
    )
    os.umask(0o077)
    for name in ("work", "tmp", "pipes", "bin"):
        os.mkdir(f"{folder}/{name}")
    files: dict[str, str] = opening["files"]
    work = Folder(f"{folder}/work", {name: files.get(name) for name in opening["protected"]})
    work.fill(files)
    session = Session(client, folder, work, limits)
    send_frame(client, "=")
    session.serve()


# -------------------------------------------------------------------------------------------------------------- session


class Session:
    """One workspace: answers ``c`` (a tool call) and ``f`` (the files) with ``=``; asks ``?`` and is answered ``a``."""

    def __init__(self, client: socket.socket, folder: str, files: Folder, limits: Limits) -> None:
        self.client, self.folder, self.files, self.limits = client, folder, files, limits
        self.shell = Shell(folder, limits, files, client)

    def serve(self) -> None:
        while True:
            frame = receive_frame(self.client)
            if frame.kind == "c":
                text, error = self._call(frame.body["tool"], frame.body["arguments"])
                send_frame(self.client, "=", {"text": text, "error": error})
            elif frame.kind == "f":
                self.files.restore()
                send_frame(self.client, "=", self.files.collect())

    def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        try:
            values = checked(tool, arguments)
            if tool == "Bash":
                return self._bash(**values)
            if tool == "Grep":
                return self._grep(**values), False
            if tool == "TodoWrite":
                return "ok", False
            method = {"Read": "read", "Write": "write", "Edit": "edit", "MultiEdit": "multi_edit", "Glob": "glob"}[tool]
            return cut(getattr(self.files, method)(**values), self.limits.output_chars), False
        except Refused as refused:
            return self._presented(f"error: {refused}"), True
        except ConnectionError:
            raise
        except (OSError, ValueError, RecursionError, MemoryError) as error:  # whatever a hostile folder provokes
            return self._presented(f"error: {type(error).__name__}: {error}")[:500], True

    def _bash(self, command: str, timeout: float | None = None) -> tuple[str, bool]:
        if not command.strip():
            raise Refused("command is empty")
        if len(command.encode(errors="replace")) > 100_000 or "\0" in command:
            raise Refused("the command is too long or not text")
        seconds = min(timeout or self.limits.shell_seconds, self.limits.shell_seconds)
        outcome = self.shell.run([_SHELL, "-c", _WRAPPER, "bash", self.shell.state, command], seconds)
        changed = self.files.restore()
        notes = [outcome.killed] if outcome.killed else []
        notes += [f"{name} is protected: its content was restored" for name in changed]
        text = self._presented("\n".join([*filter(None, [outcome.output.rstrip("\n")]), *(f"[{n}]" for n in notes)]))
        failed = outcome.code != 0 or bool(outcome.killed)
        return text or (f"exit code {outcome.code}" if failed else "(no output)"), failed

    def _grep(self, pattern: str, path: str = ".", glob: str | None = None) -> str:
        base = self.files.resolve(path)
        only = [f"--include={glob}"] if glob else []
        outcome = self.shell.run(["/bin/grep", "-rnIHsE", "-D", "skip", *only, "-e", pattern, "--", base], 5.0)
        if outcome.killed:
            raise Refused(outcome.killed)
        if outcome.code > 1:
            raise Refused(outcome.output.strip()[:500] or "the pattern cannot be used")
        lines = sorted(line.removeprefix("./") for line in outcome.output.splitlines())
        return self._presented("\n".join(lines)) or "(no matches)"

    def _presented(self, text: str) -> str:
        """The folder's own address is nobody's business, and differs from run to run."""
        return text.replace(self.files.root, "~").replace(f"{self.folder}/tmp", "$TMPDIR").replace(self.folder, "~/..")


_STRING, _NUMBER, _INTEGER, _BOOLEAN, _EDITS, _TODOS = (
    "text",
    "a number",
    "an integer",
    "true or false",
    "edits",
    "todos",
)
_PARAMETERS: dict[str, dict[str, str]] = {  # a name that ends in "?" may be left out
    "Bash": {"command": _STRING, "timeout?": _NUMBER, "description?": _STRING},
    "Read": {"path": _STRING, "offset?": _INTEGER, "limit?": _INTEGER},
    "Write": {"path": _STRING, "content": _STRING},
    "Edit": {"path": _STRING, "old_string": _STRING, "new_string": _STRING, "replace_all?": _BOOLEAN},
    "MultiEdit": {"path": _STRING, "edits": _EDITS},
    "Glob": {"pattern": _STRING, "path?": _STRING},
    "Grep": {"pattern": _STRING, "path?": _STRING, "glob?": _STRING},
    "TodoWrite": {"todos": _TODOS},
}


def checked(tool: str, arguments: Any, parameters: dict[str, str] | None = None) -> dict[str, Any]:
    """The arguments of a call, of the right types; ``Refused`` names what is wrong.  Text such as "3" and "true"
    counts as the number or truth value it spells, because calls in XML carry text only."""
    parameters = parameters or _PARAMETERS.get(tool)
    if parameters is None:
        raise Refused(f"there is no tool {tool[:40]!r}")
    if not isinstance(arguments, dict):
        raise Refused(f"{tool} needs named arguments")
    names = {name.rstrip("?"): kind for name, kind in parameters.items()}
    if unknown := sorted(map(str, arguments.keys() - names.keys())):
        raise Refused(f"{tool} has no parameter {unknown[0][:40]!r}")
    if missing := [name for name in parameters if not name.endswith("?") and name not in arguments]:
        raise Refused(f"{tool} needs {missing[0]}")
    values = {name: _typed(tool, name, names[name], value) for name, value in arguments.items() if value is not None}
    values.pop("description", None)
    return values


def _typed(tool: str, name: str, kind: str, value: Any) -> Any:
    wrong = Refused(f"{tool}: {name} must be {kind}")
    if kind == _STRING:
        if not isinstance(value, str):
            raise wrong
        return value
    if kind == _BOOLEAN:
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        if not isinstance(value, bool):
            raise wrong
        return value
    if kind in (_NUMBER, _INTEGER):
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else -1.0
        except (ValueError, OverflowError):
            number = -1.0
        if not 0 < number < 1e9 or (kind == _INTEGER and number != int(number)):
            raise Refused(f"{tool}: {name} must be {kind} above zero")
        return int(number) if kind == _INTEGER else number
    if not isinstance(value, list) or len(value) > 100:
        raise Refused(f"{tool}: {name} must be a list")
    if kind == _EDITS:
        parameters = _PARAMETERS["Edit"]
        return [checked("edit", item, {k: v for k, v in parameters.items() if k != "path"}) for item in value]
    return [checked("todo", item, {"content": _STRING, "status": _STRING, "id?": _STRING}) for item in value]


# ---------------------------------------------------------------------------------------------------------------- shell


@dataclass
class Outcome:
    code: int
    output: str
    killed: str = ""  # why, when it was


@dataclass
class _Output:
    """The first and the last bytes of a stream."""

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
    """Runs programs one after the other, each with all it starts in a jail inside this process's own."""

    def __init__(self, folder: str, limits: Limits, files: Folder, client: socket.socket) -> None:
        self.folder, self.limits, self.files, self.client = folder, limits, files, client
        self.state = ""  # what restores folder and variables
        work, self.pipes = f"{folder}/work", f"{folder}/pipes"
        self.policy = jail.Policy(
            write=(work, f"{folder}/tmp", self.pipes),
            execute=(*jail.SYSTEM_EXECUTE, work, f"{folder}/bin"),
            cpu_seconds=max(1, int(limits.shell_seconds) * 2),
        )
        self.environment = {
            "PATH": f"{folder}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": work,
            "TMPDIR": f"{folder}/tmp",
            "LANG": "C.UTF-8",
        }
        for name in COMMANDS:
            path = f"{folder}/bin/{name}"
            with open(path, "w") as file:
                file.write(_STUB.format(pipes=self.pipes))
            os.chmod(path, 0o700)
        _prctl(_PR_SET_DUMPABLE, 0)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.wake = _wake_on_child()
        self.asked = 0
        self.alone = _signals_stay_inside()

    def run(self, program: list[str], seconds: float) -> Outcome:
        """Until it ends, or is killed for what it uses.  Afterwards nothing that it started is alive."""
        requests = self._requests()
        out_read, out_write = os.pipe()
        state_read, state_write = os.pipe()
        pid = _fork(lambda: self._become(program, out_write, state_write))
        os.close(out_write)
        os.close(state_write)
        for descriptor in (out_read, state_read):
            os.set_blocking(descriptor, False)
        output, state, request = _Output(self.limits.output_chars), bytearray(), bytearray()
        waiting: list[list[str]] = []  # requests of compile, verify, profile: the first one is being answered
        asks, used, killed, code = 0, 0.0, "", None
        last = looked = measured = time.monotonic()
        try:
            streams = [self.client.fileno(), requests, self.wake, out_read, state_read]
            while code is None:
                ready, _, _ = select.select(streams, [], [], _WAITING_TICK if waiting else _MEMORY_TICK)
                now = time.monotonic()
                used, last = used + (0.0 if waiting else now - last), now
                output.add(said := _drain(out_read))
                state += (left := _drain(state_read))[: _STATE_BYTES + 1 - len(state)]
                for stream, data in ((out_read, said), (state_read, left)):
                    if stream in ready and not data:
                        streams.remove(stream)  # its last writer is gone
                if self.wake in ready:
                    _drain(self.wake)
                code = _reap().get(pid)
                if self.client.fileno() in ready:
                    frame = receive_frame(self.client)
                    if frame.kind == "a" and waiting and frame.slot == self.asked % 256:
                        self._answer(waiting.pop(0)[0], frame)
                        self._ask(waiting)
                for fields in _records(request, _drain(requests)):
                    asks += 1
                    if asks > _ASKS:
                        refusal = {"text": "too many requests in one command", "error": True}
                        self._answer(fields[0], Frame("a", 0, refusal, []))
                        continue
                    waiting.append(fields)
                    if len(waiting) == 1:
                        self._ask(waiting)
                if code is None and (used > seconds or now - looked > _MEMORY_TICK):
                    disk = now - measured > _DISK_TICK
                    killed, looked, measured = self._overuse(used, seconds, disk), now, now if disk else measured
                    if killed:
                        break
        finally:
            self._end(pid)
        output.add(_drain(out_read))
        state += _drain(state_read)[: _STATE_BYTES + 1 - len(state)]
        for descriptor in (out_read, state_read, requests):
            os.close(descriptor)
        if state and len(state) <= _STATE_BYTES and not killed:
            self.state = state.decode(errors="replace").replace("\0", "")
        return Outcome(code if code is not None else -signal.SIGKILL, output.text(), killed)

    def _become(self, program: list[str], out: int, state: int) -> None:
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.dup2(state, _STATE_FD)
        os.dup2(null, 0)
        os.closerange(3, _STATE_FD)
        os.closerange(_STATE_FD + 1, 4096)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            os.chdir(self.files.root)
            resource.setrlimit(resource.RLIMIT_CPU, (self.policy.cpu_seconds, self.policy.cpu_seconds))
            jail.narrow(self.policy)
            os.execve(program[0], program, self.environment)
        except (OSError, ValueError, jail.JailError) as error:
            os.write(2, f"{program[0]}: {error}\n".encode())
            os._exit(126)

    def _overuse(self, used: float, seconds: float, disk: bool) -> str:
        """Why the command must be killed, or nothing."""
        if used > seconds:
            return f"killed after {seconds:g} s"
        pids = _descendants(os.getpid())
        if len(pids) > self.limits.processes:
            return f"killed: more than {self.limits.processes} processes"
        if sum(map(_resident, pids)) > self.limits.memory_mb << 20:
            return f"killed: more than {self.limits.memory_mb} MiB of memory"
        if disk and disk_use(self.folder, self.limits.disk_mb << 20) > self.limits.disk_mb << 20:
            return f"killed: more than {self.limits.disk_mb} MiB on disk"
        return ""

    def _end(self, pid: int) -> None:
        """Kills all that is left of a command."""
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        for _ in range(1000):
            if self.alone:
                with contextlib.suppress(OSError):
                    os.kill(-1, signal.SIGKILL)  # all at once: nothing can fork faster than this
            left = _descendants(os.getpid())
            _kill(left)
            _reap()
            if not left:
                return
            time.sleep(0.001)

    # ------------------------------------------------------------------------------------- compile, verify and profile

    def _requests(self) -> int:
        """The FIFO that stubs write to, anew: the shell before may have left anything in its place."""
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
            send_frame(self.client, "?", body, slot=self.asked % 256)

    def _answer(self, pid: str, frame: Frame) -> None:
        """To the stub with this process id; if it is gone, to nobody."""
        path = f"{self.pipes}/{pid}"
        text = cut(frame.body["text"], _ANSWER_BYTES // 4).replace("\0", "").encode(errors="replace")
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                    os.write(descriptor, (b"1" if frame.body["error"] else b"0") + b"\0" + text + b"\0")
            finally:
                os.close(descriptor)
                os.unlink(path)


def _records(pending: bytearray, data: bytes) -> Iterable[list[str]]:
    """Well-formed requests: process id, command, arguments.  Anything else that a shell writes here is dropped."""
    pending += data
    *records, rest = bytes(pending).split(b"\x1e")
    pending[:] = rest[-_REQUEST_BYTES:]
    for record in records:
        fields = record.decode(errors="replace").removeprefix("\x1f").removesuffix("\x1f").split("\x1f")
        if len(fields) >= 2 and fields[0].isascii() and fields[0].isdigit() and fields[1] in COMMANDS:
            yield fields[:20]


# ------------------------------------------------------------------------------------------------------------ processes


def cut(text: str, limit: int) -> str:
    """At most about ``limit`` characters: the middle goes."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n[{len(text) - limit} characters cut]\n{text[-(limit // 2) :]}"


def _wake_on_child() -> int:
    """A descriptor that becomes readable when a child ends."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


def _drain(descriptor: int) -> bytes:
    """What can be read now, at most 1 MiB."""
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


def _reap() -> dict[int, int]:
    """Exit codes of the children that have ended, by process id."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _signals_stay_inside() -> bool:
    """Whether the jail keeps this process's signals to itself and what it starts."""
    try:
        os.kill(os.getppid(), 0)
    except PermissionError:
        return jail.landlock_abi() >= 6
    return False


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def _descendants(pid: int) -> list[int]:
    found = _children(pid)
    for child in found:
        found += _children(child)  # grows while it is walked
    return found


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
