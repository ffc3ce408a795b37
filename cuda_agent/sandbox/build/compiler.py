"""One run of a compiler in the jail; and one that was started ahead, before anybody knew its source.

Most of what g++ does for a small kernel does not depend on the kernel: starting in the jail, reading the precompiled
standard headers.  A ``Waiting`` compiler has done that.  The program it compiles ends with the inclusion of a named
pipe; whoever has a source writes its name there.  It is as jailed as any other compiler, serves one build, and has read
nothing untrusted before.

Not covered: what is built and with which flags, where it goes, and what a failure means (``build``).
"""

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

_LOG_BYTES = 1 << 20  # of a compiler's messages that are looked at
_MAIN, _SOURCE = "@main.cpp", "@source"  # no file of a solution is named like that: see ``build``
_START_SECONDS = 10.0


class Compiler:
    """Started in ``work``, with whatever is there."""

    def __init__(self, policy: jail.JailPolicy, command: Sequence[str], work: Path) -> None:
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TMPDIR": str(work), "HOME": str(work)}
        # What the compiler says goes to a file: the limit on files holds for it, too.
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
        """Its exit status, and what it said.  ``TimeoutError`` after ``seconds``.  Nothing of it is left either way."""
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
        """Kill it, with what it started."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
            self._process.wait()


def _ends(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for a process.  ``Popen.wait`` sleeps in longer and longer steps, and finds out a third later."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # not in every kernel
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.returncode is not None
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


class Waiting(Compiler):
    """``command``: the compiler and its flags, to which the program's name is added, and then ``last``; ``header``:
    what it reads at once.  It owns the folder ``work``.  It is made when it waits for its source, and ``OSError`` says
    that it does not get there."""

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
        """The writing end, which can be opened when there is a reader.  Held until ``go``: closed, it is the end of the
        source."""
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
        """Compile ``unit``, a file that is in ``work`` by now."""
        os.unlink(self.work / _SOURCE)  # nobody else waits for a second source
        try:
            os.write(self._pipe, f'#include "{unit}"\n'.encode())
        finally:
            os.close(self._pipe)
            self._pipe = -1

    def discard(self) -> None:
        """End it, and remove its folder."""
        self.end()
        self._log.close()
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        shutil.rmtree(self.work, ignore_errors=True)


class CompilerPool:
    """Keeps one compiler started ahead.  They are children of one thread, since a jailed process ends with the thread
    that started it."""

    def __init__(self, start: Callable[[], Waiting]) -> None:
        self._start = start
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._next: Future[Waiting] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to start one, unless that is done."""
        with self._lock:
            if self._next is None and not self._closed:
                self._next = self._thread.submit(self._start)

    def take(self) -> Waiting:
        """The caller discards it.  ``OSError`` when none can be started."""
        for _ in (1, 2):
            with self._lock:
                following, self._next = self._next, None
            waiting = (following or self._thread.submit(self._start)).result()
            if waiting.alive:
                return waiting
            waiting.discard()  # somebody ended it while nobody watched
        raise OSError(errno.ECHILD, "compilers that were started ahead end by themselves")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            following, self._next = self._next, None
        if following:
            with contextlib.suppress(OSError):
                following.result().discard()
        self._thread.shutdown()
