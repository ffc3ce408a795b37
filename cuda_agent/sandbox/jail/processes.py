"""The judge's handles of untrusted processes: the warm parent, and its workers with their watchdog.

A worker that overruns its time, memory or threads is killed here, by the judge, who waits for it in short steps and
looks at it between them; nothing depends on the worker's cooperation.  Not covered: what is asked of a worker, and what
its answers mean.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.jail import jail, scratch
from cuda_agent.sandbox.jail.cgroups import ControlGroup, Groups
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.sandbox.messages import Reply, WorkerOperation, WorkerOptions, receive_frame, send_frame
from cuda_agent.sandbox.wire import printable

_STEP_MS = 20  # how often a worker that is waited for is looked at
_MOST_THREADS = 64
_GROUP_MB = 64  # beside a worker's own memory: what the kernel keeps for it, and cached files
_MOST_PROCESSES = 48  # below a worker that may start some: less than root's workers may have, and for everybody
_START_SECONDS = 30.0
_LEAVE_SECONDS = 5  # for a warm parent that was told to go
_STOP_SECONDS = 1.0  # until a process that was told to stop counts as one that cannot be
_END_SECONDS = 0.2  # for the threads of a process that was killed
_IDLE_NS = 200_000  # a thread that worked less was only started
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Memory given back after each call and mapped again in the next, or not, as fragmentation has it, doubles a time.
KEEPING_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
_PACKAGE = Path(__file__).resolve().parents[3]


class WorkerDied(Exception):
    """``reason``: timeout, memory, threads, processes, disk, crash, protocol, or killed (a SIGKILL not sent here)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotStarted(RuntimeError):
    """A worker did not get as far as closing its walls: our fault, never a candidate's."""


class WorkerError(Exception):
    """The untrusted code raised; the worker lives.  ``cheat``: it broke a rule that the worker knows."""

    cheat = False


def warm_parent(threads: int, log: Path, imports: Sequence[str] = ()) -> "WarmParent":
    """Started, and not yet ready.  ``imports``: further modules that it imports first.  It and its workers have as many
    processors as they may have threads: more would be an advantage over the baselines."""
    ours, theirs = socket.socketpair()
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent",
        "PYTHONPATH": str(_PACKAGE), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", **KEEPING_MEMORY, "USER": "worker", "LOGNAME": "worker",
    }  # fmt: skip
    with open(log, "ab") as errors, _processors(threads), theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cuda_agent.sandbox.worker.main", str(theirs.fileno()), *imports],
            env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            pass_fds=[theirs.fileno()], close_fds=True,
        )  # fmt: skip

    def end() -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_SECONDS)
        process.kill()
        process.wait()

    return WarmParent(process.pid, ours, end)


class WarmParent:
    """The process that imported torch and forks workers.  ``end``: called when it was told to go, returns when it is
    gone."""

    def __init__(self, pid: int, channel: socket.socket, end: Callable[[], None]) -> None:
        self.pid = pid
        self._socket = channel
        self._end = end
        self._turn = threading.Lock()  # of those who ask it something, where they are several threads
        self.torch = ""

    def wait_ready(self) -> None:
        answer = receive_frame(self._socket).body
        if answer["threads"] != 1:
            raise RuntimeError(f"the warm parent has {answer['threads']} threads: its children could hang")
        self.torch = answer["torch"]

    def fork(self, options: WorkerOptions, fds: Sequence[int]) -> int:
        return int(self._ask(WorkerOperation.FORK_WORKER, options, fds)["pid"])

    def reap(self, pid: int) -> int:
        """The exit code of a worker that is dead or dying; negative: the signal."""
        return int(self._ask(WorkerOperation.REAP_WORKER, {"pid": pid})["status"])

    def branch(self, imports: Sequence[str]) -> "WarmParent":
        """Another one, not yet ready, which imports more and does not import torch again: forked from this one, which
        must outlive it."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = int(self._ask(WorkerOperation.FORK_PARENT, {"imports": [*imports]}, [theirs.fileno()])["pid"])

        def end() -> None:
            with contextlib.suppress(OSError):  # this one was killed, and that one is not ours to wait for
                ended = select.poll()
                descriptor = os.pidfd_open(pid)
                try:
                    ended.register(descriptor, select.POLLIN)
                    if not ended.poll(1000 * _LEAVE_SECONDS):
                        os.kill(pid, signal.SIGKILL)
                finally:
                    os.close(descriptor)
                self.reap(pid)

        return WarmParent(pid, ours, end)

    def _ask(self, operation: WorkerOperation, body: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        with self._turn:
            send_frame(self._socket, operation, body, fds=fds)
            return receive_frame(self._socket).body

    def close(self) -> None:
        self._socket.close()
        self._end()


@contextlib.contextmanager
def _processors(count: int) -> Iterator[None]:
    """What is started meanwhile gets ``count`` of this process's processors, the same ones each time."""
    all_of_them = sorted(os.sched_getaffinity(0))
    first = os.getpid() * count  # judges run side by side: others for each, where there are enough
    os.sched_setaffinity(0, {all_of_them[(first + i) % len(all_of_them)] for i in range(count)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_of_them)


class JailedProcess:
    """One jailed process, with the folder ``home`` that goes with it.  It serves once ``wait_started`` returned.
    ``seconds`` is what it may still spend running; waiting for it is what is counted.  ``overrun``: a further look of
    the watchdog, which names what it uses too much."""

    def __init__(
        self,
        parent: WarmParent,
        options: WorkerOptions,
        policy: jail.JailPolicy,
        memory_mb: int,
        home: Path,
        groups: Groups | None = None,
        overrun: "Callable[[JailedProcess], str] | None" = None,
    ) -> None:
        self._overrun = overrun
        self._parent = parent
        self._memory_mb = memory_mb
        self._home = home
        self._forks = policy.one_group
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(5.0)  # for one frame: one that stops in the middle is none
        self.seconds = 0.0
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._stopped = False
        try:
            self.pid = parent.fork({**options, "policy": asdict(policy)}, [theirs.fileno()])
        finally:
            theirs.close()
        self.alive = True
        self._private = 1 << 60
        self._group: ControlGroup | None = None
        if groups:  # it waits for its first request: nothing untrusted has run
            tasks = _MOST_PROCESSES * 8 if self._forks else 2 * _MOST_THREADS
            try:
                self._group = groups.make(memory_mb + _GROUP_MB, tasks)
                self._group.add(self.pid)
            except BaseException:
                self.kill()
                raise

    def wait_started(self) -> None:
        """Until its walls are closed; nothing untrusted has run yet."""
        self.seconds = _START_SECONDS
        try:
            self._answer()
        except (WorkerDied, WorkerError) as error:
            raise NotStarted(f"a worker {error} before it began") from None
        self._private = self._private_bytes()

    def hand_over(self, file: Path, name: str) -> str:
        """A file of the trusted cache, readable for this worker under its own folder; gives the path there."""
        place = self._home / f"{name}{file.suffix}"
        place.unlink(missing_ok=True)  # a copy would go through the link, into the cache
        try:
            os.link(file, place)
        except OSError:  # another file system
            shutil.copyfile(file, place)
        return str(place)

    def call(self, operation: WorkerOperation, body: Any = None, slot: int = 0, fds: Sequence[int] = ()) -> Any:
        """One request and its answer.  ``WorkerError``: the untrusted code raised.  ``WorkerDied``: it is gone."""
        self._go_on()
        try:
            send_frame(self._socket, operation, body, slot, fds)
        except OSError:
            raise self._died("crash") from None
        return self._answer()

    def timed(self, operation: WorkerOperation, slot: int, extra: int = 0) -> tuple[float, Any]:
        """Seconds from the request to the answer, by the judge's clock; and what the worker says.  The worker runs
        between the clock's two readings and at no other time: whoever fills its buffers first stops it (``stop``), and
        it stays stopped while its outputs are copied.  So it gains nothing by looking at inputs early, or by answering
        before it is done."""
        self.stop()
        if self._poll.poll(0):
            raise self._died("protocol" if self._said() else "crash")  # an answer that nobody asked for
        try:
            send_frame(self._socket, operation, slot=slot, extra=extra)
        except OSError:
            raise self._died("crash") from None
        start = time.perf_counter()
        self._go_on()
        if not self._poll.poll(_STEP_MS):
            self._wait()
        self.stop()
        end = time.perf_counter()
        answer = self._answer()
        if self._state() in "ZX":
            raise self._died("crash" if self._ends() else "protocol")  # main thread gone: another one answers
        return end - start, answer

    def stop(self) -> None:
        """It does nothing until the next request; returns when that is so."""
        if self.alive and not self._stopped:
            self._stopped = True
            self.signal(signal.SIGSTOP)
            deadline = time.monotonic() + _STOP_SECONDS
            while self._state() not in "TtZX" and time.monotonic() < deadline:
                os.sched_yield()

    def _go_on(self) -> None:
        if self._stopped:
            self._stopped = False
            self.signal(signal.SIGCONT)

    def _said(self) -> bool:
        """Whether something lies there to be read: the end of a stream counts as ready, too."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _ends(self) -> bool:
        """Whether all of it is dead or dying, and not its main thread alone."""
        deadline = time.monotonic() + _END_SECONDS
        while self._threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._threads() <= 1

    def _answer(self) -> Any:
        self._wait()
        try:
            frame = receive_frame(self._socket)
        except ConnectionError:
            raise self._died("crash") from None
        except (ValueError, TimeoutError):
            raise self._died("protocol") from None
        if frame.operation == Reply.ERROR:
            body = frame.body if isinstance(frame.body, dict) else {}
            error = WorkerError(printable(str(body.get("message", ""))[:2000]))
            error.cheat = bool(body.get("cheat"))
            raise error
        if frame.operation != Reply.RESULT:
            raise self._died("protocol")
        return frame.body

    def _wait(self) -> None:
        while True:
            start = time.perf_counter()
            ready = self._poll.poll(_STEP_MS)
            self.seconds -= time.perf_counter() - start
            self.watch()
            if ready:
                return
            if self.seconds <= 0:
                raise self._died("timeout")

    def watch(self) -> None:
        """Kill it when it uses too much."""
        if self._private_bytes() - self._private > self._memory_mb << 20:
            raise self._died("memory")
        if self._threads() > _MOST_THREADS:
            raise self._died("threads")
        if self._forks and len(descendants(self.pid, most=_MOST_PROCESSES)) > _MOST_PROCESSES:
            raise self._died("processes")
        if self._overrun and (what := self._overrun(self)):
            raise self._died(what)

    def _private_bytes(self) -> int:
        try:
            fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        except OSError:
            return 0
        return (int(fields[1]) - int(fields[2])) * _PAGE

    def _threads(self) -> int:
        try:
            return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[17])
        except OSError:
            return 0

    def _died(self, reason: str) -> WorkerDied:
        status, overran = self._killed(wait=0.2 if reason == "crash" else 0.0)
        if overran:
            reason = "memory"
        if reason == "crash":
            text = f"ended itself (exit {status})" if status >= 0 else f"was ended by {_name_of_signal(-status)}"
            if status == -signal.SIGSEGV:
                text += " (an address out of bounds, or a write to an input)"
            return WorkerDied("killed" if status == -signal.SIGKILL else reason, text)
        return WorkerDied(
            reason,
            {
                "timeout": "did not finish in time",
                "memory": f"used more than {self._memory_mb} MB",
                "processes": f"started more than {_MOST_PROCESSES} processes",
                "disk": "wrote too many or too large files",
                "threads": f"started more than {_MOST_THREADS} threads",
                "protocol": "answered nonsense",
            }[reason],
        )

    def signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def spread(self) -> None:
        """A processor of its own for each thread that works, where there are no more processors than such threads:
        the scheduler wakes a helper beside the busy main thread and may leave it there for whole calls, which then take
        twice as long.  Threads that never worked yet, and a process of one thread, keep their freedom."""
        processors = sorted(os.sched_getaffinity(self._parent.pid))
        busy = sorted(self._busy(), reverse=True)
        if len(busy) < len(processors) or len(busy) == 1:
            return
        for index, (_, thread) in enumerate(busy):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, [processors[index % len(processors)]])

    def gather(self) -> None:
        """All processors for all threads again."""
        processors = os.sched_getaffinity(self._parent.pid)
        for _, thread in self._busy():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, processors)

    def _busy(self) -> list[tuple[int, int]]:
        """(nanoseconds of work, thread) of the threads that worked."""
        found = []
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                worked = int(Path(f"/proc/{self.pid}/task/{thread}/schedstat").read_text().split()[0])
                if worked > _IDLE_NS:
                    found.append((worked, int(thread)))
        return found

    def kill(self, wait: float = 0.0) -> int:
        """End it, after up to ``wait`` seconds for it to end by itself; gives the exit code (negative: signal)."""
        return self._killed(wait)[0]

    def _killed(self, wait: float) -> tuple[int, bool]:
        """The same, and whether the kernel had ended it for want of memory."""
        if not self.alive:
            return 0, False
        self.alive = False
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and self._state() not in "ZX":
            time.sleep(0.001)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if self._forks:
            with contextlib.suppress(OSError):  # no group of its own: there was nothing to end
                os.killpg(self.pid, signal.SIGKILL)  # all at once: one by one, a fork bomb is faster
        self._socket.close()
        status = self._parent.reap(self.pid)
        scratch.remove(self._home)
        if self._group is None:
            return status, False
        overran = self._group.killed()
        self._group.close()
        return status, overran

    def _state(self) -> str:
        """R, S, D, T (stopped), Z (a zombie) ... as the kernel calls it."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb", 0) as file:
                return chr(file.read(512).rpartition(b") ")[2][0])
        except (OSError, IndexError):
            return "X"


def _name_of_signal(number: int) -> str:
    """Most real-time signals have none."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


@contextlib.contextmanager
def taking_turns(*workers: JailedProcess) -> Iterator[Callable[[JailedProcess], None]]:
    """``turn(worker)``: from now on only this one of ``workers`` may run, the others are stopped.  The idle threads of
    a library wait actively for milliseconds, and a candidate may leave threads behind: neither slows what is timed
    next."""
    running: JailedProcess | None = None

    def turn(worker: JailedProcess) -> None:
        nonlocal running
        if worker is running or worker not in workers:
            return
        for other in workers:
            if other is not worker:
                other.stop()
        worker.spread()
        running = worker

    try:
        yield turn
    finally:
        for worker in workers:
            worker.gather()
