"""Runs a compiler in the jail, which restricts untrusted processes. A compiler may be started in advance, before its
source exists.

For a small kernel, g++ spends most of its time on its own start in the jail and on reading the precompiled standard
headers. A ``Waiting`` compiler has already done this work. The last line of its main file includes a named pipe, and
the compiler waits for the content of the pipe. ``Waiting.go`` writes an ``#include`` of the kernel's source to the
pipe, and the compilation starts."""

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cuda_agent.sandbox.jail import jail

_LOG_BYTES = 1 << 20  # bytes of a compiler's messages that are read
_MAIN, _SOURCE = "@main.cpp", "@source"  # ``builder`` refuses such names in a solution
_START_SECONDS = 10.0


class Compiler:
    """A running compiler: a jailed process with the command line ``command`` and the current folder ``work``."""

    def __init__(self, policy: jail.JailPolicy, command: Sequence[str], work: Path) -> None:
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TMPDIR": str(work), "HOME": str(work)}
        # The messages go to a file, so the limit on file sizes holds for them, too.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                jail.command(policy, command), cwd=work, env=environment, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._log.close()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def finish(self, seconds: float) -> tuple[int, str]:
        """Waits at most ``seconds`` until the compiler ends, then kills what still runs of it and of its child
        processes. Returns the exit status and the messages. Raises ``TimeoutError`` if the compiler did not end in
        time."""
        with self._log:
            try:
                ended = _ends(self._process, seconds)
            finally:
                self.end()
            if not ended:
                raise TimeoutError
            self._log.seek(0)
            return self._process.returncode, self._log.read(_LOG_BYTES).decode(errors="replace")

    def end(self) -> None:
        """Kills the compiler and all processes that it started."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
            self._process.wait()


def _ends(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Returns whether ``process`` ends within ``seconds``. Uses ``pidfd_open`` if possible, because ``Popen.wait``
    polls and notices the end late."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # some kernels lack this call
        deadline = time.monotonic() + seconds
        # WNOWAIT: the ended process keeps its id, which is that of its group, until ``Compiler.end`` has used it.
        while (ended := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return ended is not None
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


class Waiting(Compiler):
    """A running compiler that has read the file ``header`` and waits for the rest of its source. ``command`` is the
    compiler with its flags. ``last`` holds arguments that follow the source file, such as libraries. The constructor
    raises ``OSError`` if the compiler ends early, or if it does not wait for its source within 10 s."""

    def __init__(
        self, policy: jail.JailPolicy, command: Sequence[str], work: Path, header: str, last: Sequence[str] = ()
    ) -> None:
        self.work = work
        (work / _MAIN).write_text(f'#include "{header}"\n#include "{_SOURCE}"\n')
        os.mkfifo(work / _SOURCE)
        super().__init__(policy, [*command, f"./{_MAIN}", *last], work)
        try:
            self._pipe = self._opened()
        except BaseException:
            self.end()
            self._log.close()
            raise

    def _opened(self) -> int:
        """Waits until the compiler opens the named pipe from which it reads the rest of its source. Returns a file
        descriptor for writing to the pipe. Closing the descriptor marks the end of the source."""
        deadline = time.monotonic() + _START_SECONDS
        while self.alive and time.monotonic() < deadline:
            try:
                return os.open(self.work / _SOURCE, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
            time.sleep(0.002)
        raise OSError(errno.ECHILD, "a compiler that was started ahead does not wait for its source")

    def go(self, unit: str) -> None:
        """Makes the waiting compiler compile ``unit``, a file in ``work``."""
        os.unlink(self.work / _SOURCE)  # only this compiler reads the pipe, and only once
        try:
            os.write(self._pipe, f'#include "{unit}"\n'.encode())
        finally:
            os.close(self._pipe)
            self._pipe = -1

    def discard(self) -> None:
        """Ends the compiler and removes its folder."""
        self.end()
        self._log.close()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        shutil.rmtree(self.work, ignore_errors=True)


class CompilerPool:
    """Keeps one ``Waiting`` compiler ready. A thread that lives as long as the pool starts all compilers, because a
    jailed process is killed when the thread that started it ends."""

    def __init__(self, start: Callable[[], Waiting]) -> None:
        self._start = start
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._next: Future[Waiting] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts a compiler in the background, unless one is ready or starting."""
        with self._lock:
            if self._next is None and not self._closed:
                self._next = self._thread.submit(self._start)

    def take(self) -> Waiting:
        """Returns a waiting compiler. The caller must call its ``discard`` after use. Raises ``OSError`` if a compiler
        does not start, or if two compilers in a row have ended while they waited."""
        for _ in (1, 2):
            with self._lock:
                following, self._next = self._next, None
            waiting = (following or self._thread.submit(self._start)).result()
            if waiting.alive:
                return waiting
            waiting.discard()  # the compiler was killed while it waited
        raise OSError(errno.ECHILD, "compilers that were started ahead end by themselves")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            following, self._next = self._next, None
        if following:
            with contextlib.suppress(OSError):
                following.result().discard()
        self._thread.shutdown()
