"""Starts an untrusted process (a worker), sends it requests, and kills it if it exceeds its limits.

While a caller waits for an answer, a watchdog checks time, memory and threads of the process every 20 ms."""

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.jail import jail, scratch
from cuda_agent.sandbox.jail.cgroups import ControlGroup, Groups
from cuda_agent.sandbox.jail.descendants import deleted_bytes, descendants, memory_bytes, shared_bytes, state
from cuda_agent.sandbox.jail.warm_parent import WarmParent
from cuda_agent.sandbox.messages import Reply, WorkerOperation, receive_frame, send_frame
from cuda_agent.sandbox.wire import printable

_STEP_MS = 20  # time between two checks of a worker
_MOST_THREADS = 64
_GROUP_MB = 64  # added to a worker's memory limit for the kernel's structures and cached files
_MOST_PROCESSES = 48  # descendants of a worker that may start programs; below the limit that root sets
_START_SECONDS = 30.0
_STOP_SECONDS = 5.0  # longest wait until all threads of a process stand still
_STANDING = "TtZX"  # states of a thread that cannot run: stopped, traced, zombie, ended
_END_SECONDS = 0.2  # longest wait for the threads of a killed process to end
_LOOK_SECONDS = 0.3  # shortest time between two checks of a worker's folder; a check takes at most a twentieth of it
TOO_LONG = "did not finish in time"  # the end of a message about a time limit
_IDLE_NS = 200_000  # a thread with less processor time has not worked yet


class WorkerDied(Exception):
    """Reports that a worker (a jailed process that runs untrusted code) has ended. ``reason`` says why:

    - ``timeout``, ``memory``, ``threads``, ``processes`` or ``disk``: the worker exceeded this limit.
    - ``crash``: it exited, or a signal other than SIGKILL ended it.
    - ``killed``: a SIGKILL from outside this module ended it, or it closed its socket but did not exit.
    - ``protocol``: it sent an invalid answer and was killed.
    - ``running``: it did not stop within 5 s after SIGSTOP and was killed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotStarted(RuntimeError):
    """A worker (a jailed process) failed before its jail was complete. No untrusted code has run at that point, so the
    cause lies in the infrastructure."""


class WorkerError(Exception):
    """The untrusted code raised an error; its worker still runs."""

    cheat = False  # whether the code broke a rule that the worker checks


class JailedProcess:
    """A handle of a jailed process, which has a private folder. Callers call ``wait_started`` before the first request.

    Attributes:
        seconds: Time limit for the answer, to be set before each request. Waiting for the answer reduces it.
        verified: Whether ``stop`` waits until no thread of the process runs (default: true). May be false if the
            process gains nothing from running on after ``stop``.
        gives_way: Whether ``overrun``, a check by the watchdog, may pause the process (default: false)."""

    def __init__(
        self,
        parent: WarmParent,
        options: Mapping[str, Any],
        policy: jail.JailPolicy,
        memory_mb: int,
        home: Path,
        groups: Groups | None = None,
        overrun: "Callable[[JailedProcess], str] | None" = None,
        lent: Sequence[int] = (),
    ) -> None:
        """Forks the process from ``parent``.

        Args:
            parent: The warm parent, a process that has imported torch.
            options, policy: Options of the worker, and the access that its jail allows.
            memory_mb: Limit in MiB of the growth of the process's private memory after the start.
            home: The process's private folder, which ``kill`` removes.
            groups: Creates a control group that limits memory, processes and threads. ``None``: no such limits.
            overrun: A further check by the watchdog. It returns the reason to kill the process, or an empty string.
            lent: File descriptors. The process holds copies of them until its jail is complete."""
        self._overrun = overrun
        self._parent = parent
        self._memory_mb = memory_mb
        self._home = home
        self._forks = policy.one_group
        self._shares = policy.shared_memory
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(5.0)  # limit for one frame: an incomplete frame is invalid
        self.seconds, self.verified, self.gives_way = 0.0, True, False
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._stopped = False  # whether the last signal was SIGSTOP
        self._still = False  # whether all threads were seen standing still since that signal
        self._ran_on: WorkerDied | None = None
        self._watched = 0.0  # when the watchdog last looked
        with theirs:
            self.pid = parent.fork({**options, "policy": asdict(policy)}, [theirs.fileno(), *lent])
        self.alive = True  # this object has not killed it
        self._private = 1 << 60
        self._group: ControlGroup | None = None
        if groups:  # the process waits for its first request: no untrusted code has run
            tasks = _MOST_PROCESSES * 8 if self._forks else 2 * _MOST_THREADS
            try:
                self._group = groups.make(memory_mb + _GROUP_MB, tasks)
                self._group.add(self.pid)
            except BaseException:
                self.kill()
                raise

    def wait_started(self) -> "JailedProcess":
        """Waits until the process has entered its jail, and returns this object. Raises ``NotStarted`` if the process
        ends before that, or is not ready after 30 s."""
        self.seconds = _START_SECONDS
        try:
            self._answer()
        except (WorkerDied, WorkerError) as error:
            raise NotStarted(f"a worker {error} before it began") from None
        self._private = self._private_bytes()
        return self

    def hand_over(self, file: Path, name: str) -> str:
        """Links or copies ``file`` into the worker's folder. The new file name is ``name`` plus the suffix of ``file``.
        Returns the new path."""
        place = self._home / f"{name}{file.suffix}"
        place.unlink(missing_ok=True)  # a copy would follow the link and write to the cache
        try:
            os.link(file, place)
        except OSError:  # on another file system
            shutil.copyfile(file, place)
        return str(place)

    def call(self, operation: WorkerOperation, body: Any = None, slot: int = 0, fds: Sequence[int] = ()) -> Any:
        """Sends one request and returns the body of its answer. Then stops the process until the next request. Raises
        ``WorkerError`` if untrusted code fails, and ``WorkerDied`` if the worker ends, exceeds a limit or sends an
        invalid answer."""
        self._go_on()
        try:
            send_frame(self._socket, operation, body, slot, fds)
        except OSError:
            raise self._died("crash") from None
        try:
            return self._answer()
        finally:  # between requests a worker takes no processor time from another worker that is timed
            self._halt()

    def timed(self, operation: WorkerOperation, slot: int, extra: int = 0) -> tuple[float, Any]:
        """Sends one request and times it with this process's clock. The worker runs only between the two readings of
        the clock. It is stopped while callers fill its inputs and copy its outputs. So it cannot gain time by reading
        inputs early or by answering early.

        Args:
            slot: Number of the set of buffers that the call uses. For a chain of calls, the number of calls instead.
            extra: Delay before the call on a GPU, in units of ``DELAY_UNIT``. With 0, the worker chooses the delay.

        Returns:
            The seconds from the request to the answer, and the answer's body.

        Raises:
            WorkerError: Untrusted code fails.
            WorkerDied: The worker ends, exceeds a limit or sends an invalid answer."""
        self._stand()
        with contextlib.suppress(OSError):  # threads with precedence could keep this process from ending them
            limit = round(1e6 * max(self.seconds + 1, 1))
            resource.prlimit(self.pid, resource.RLIMIT_RTTIME, (limit, limit))
        if self._poll.poll(0):
            raise self._died("protocol" if self._said() else "crash")  # an answer without a request
        try:
            send_frame(self._socket, operation, slot=slot, extra=extra)
        except OSError:
            raise self._died("crash") from None
        start = time.perf_counter()
        self._go_on()
        if not self._poll.poll(_STEP_MS):
            self._wait()
        end = self._stand()
        answer = self._answer()
        if self._state() in "ZX":
            raise self._died("crash" if self._ends() else "protocol")  # another thread answered
        return end - start, answer

    def stop(self) -> float:
        """Stops the process with SIGSTOP until the next request.

        If ``self.verified`` is true, waits until no thread runs, and returns the time (``time.perf_counter``) at which
        the process stood still. If a thread still runs after 5 s, kills the process; the next request then raises
        ``WorkerDied``. If ``self.verified`` is false, does not wait, and returns the time of the signal."""
        self._halt()
        end = time.perf_counter()
        deadline = end + _STOP_SECONDS
        while self.verified and self.alive and not self._still:
            still = self._state() in _STANDING
            end = time.perf_counter()  # before the states of the other threads are read, which takes a while
            self._still = still and self._all_stand()
            if end > deadline:
                self._ran_on = self._died("running")
            elif not self._still:
                os.sched_yield()
        return end

    def _stand(self) -> float:
        end = self.stop()
        if self._ran_on:
            raise self._ran_on
        return end

    def _halt(self) -> None:
        """Sends SIGSTOP, but does not wait until the process has stopped."""
        if self.alive and not self._stopped:
            self._stopped, self._still = True, False
            self._signal(signal.SIGSTOP)

    def _go_on(self) -> None:
        if self._ran_on:
            raise self._ran_on
        if self.alive and self._stopped:
            self._stopped = False
            self._signal(signal.SIGCONT)

    def _all_stand(self) -> bool:
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")
        except OSError:
            return True
        return all(state(f"/proc/{self.pid}/task/{thread}/stat") in _STANDING for thread in threads)

    def _said(self) -> bool:
        """Returns whether the process has sent data that is not read yet. Returns false at the end of the stream."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _ends(self) -> bool:
        """Returns whether the whole process ends within 0.2 s, and not only its main thread."""
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
            now = time.perf_counter()
            self.seconds -= now - start
            if now - self._watched > _STEP_MS / 1e3:  # short requests follow each other, and reading /proc takes long
                self._watch()
                self._watched = time.perf_counter()
            if ready:
                return
            if self.seconds <= 0:
                raise self._died("timeout")

    def _watch(self) -> None:
        """Kills the process and raises ``WorkerDied`` if the process uses too much of a resource."""
        if self._private_bytes() - self._private > self._memory_mb << 20:
            raise self._died("memory")
        if self._threads() > _MOST_THREADS:
            raise self._died("threads")
        if self._forks and len(descendants(self.pid, most=_MOST_PROCESSES)) > _MOST_PROCESSES:
            raise self._died("processes")
        if self._overrun and (what := self._overrun(self)):
            raise self._died(what)

    def _private_bytes(self) -> int:
        return memory_bytes(self.pid)[1] + (shared_bytes(self.pid) if self._shares else 0)

    def _threads(self) -> int:
        try:
            return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[17])
        except OSError:
            return 0

    def _died(self, reason: str) -> WorkerDied:
        status, overran = self.kill(wait=0.2 if reason == "crash" else 0.0)
        if overran:
            reason = "memory"
        if reason == "crash":
            text = f"ended itself (exit {status})" if status >= 0 else f"was ended by {_name_of_signal(-status)}"
            if status == -signal.SIGSEGV:
                text += " (an address out of bounds, or a write to an input)"
            return WorkerDied("killed" if status == -signal.SIGKILL else reason, text)
        texts = {
            "timeout": TOO_LONG,
            "memory": f"used more than {self._memory_mb} MB",
            "processes": f"started more than {_MOST_PROCESSES} processes",
            "disk": "wrote too many or too large files",
            "threads": f"started more than {_MOST_THREADS} threads",
            "protocol": "answered nonsense",
            "running": f"ran on for {_STOP_SECONDS:g} s after it was stopped",
        }
        return WorkerDied(reason, texts[reason])

    def signal_all(self, number: int) -> None:
        """Sends a signal to the process. If the process may start programs, the signal also reaches the programs that
        it started."""
        with contextlib.suppress(ProcessLookupError):  # a process joins its group shortly after its start
            (os.killpg if self._forks else os.kill)(self.pid, number)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def spread(self, apart: bool = True) -> None:
        """Binds each busy thread of the worker to one processor, or removes these bindings if ``apart`` is false.
        Without bindings, two threads may share a processor, and calls then take twice as long. A thread is busy if it
        has used more than 0.2 ms of processor time. Binds nothing if there are fewer busy threads than processors, or
        only one busy thread.

        If permitted, also gives all threads of the worker a real-time priority, or removes it if ``apart`` is false.
        This priority is higher than that of other programs and of this process. If it equalled that of this process, a
        thread that wakes would move to another processor."""
        processors = sorted(os.sched_getaffinity(self._parent.pid))
        busy: list[tuple[int, int]] = []  # nanoseconds of processor time, thread
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                worked = int(Path(f"/proc/{self.pid}/task/{thread}/schedstat").read_text().split()[0])
                if worked > _IDLE_NS:
                    busy.append((worked, int(thread)))
                _give_precedence(int(thread), 2 if apart else 0)
        if apart and (len(busy) < len(processors) or len(busy) == 1):
            return
        for index, (_, number) in enumerate(sorted(busy, reverse=True)):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(number, [processors[index % len(processors)]] if apart else processors)

    def processor(self) -> int:
        """Returns the number of the processor on which the main thread ran last. Raises ``OSError`` if the process has
        ended."""
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[36])

    def kill(self, wait: float = 0.0) -> tuple[int, bool]:
        """Waits up to ``wait`` seconds for the process to end by itself, then kills it. Returns its exit code (or the
        negative number of the signal that ended it), and whether the OOM killer ended a process of its control group.
        Returns (0, False) if ``kill`` was called before."""
        if not self.alive:
            return 0, False
        self.alive = False
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and self._state() not in "ZX":
            time.sleep(0.001)
        self._signal(signal.SIGKILL)
        if self._forks:
            with contextlib.suppress(OSError):  # the process leads no group
                os.killpg(self.pid, signal.SIGKILL)  # kills all at once: a fork bomb outruns single kills
        self._socket.close()
        status = self._parent.reap(self.pid)
        scratch.remove(self._home)
        if self._group is None:
            return status, False
        overran = self._group.killed()
        self._group.close()
        return status, overran

    def _state(self) -> str:
        return state(f"/proc/{self.pid}/stat")


def _name_of_signal(number: int) -> str:
    """Returns a signal's name, or its number if it has no name."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def within(folder: Path, megabytes: int, files: int) -> Callable[[JailedProcess], str]:
    """Returns a function that checks a worker's use of the disk, for the argument ``overrun`` of ``JailedProcess``. The
    function returns ``disk`` if a limit is exceeded or ``folder`` cannot be read, else an empty string. ``files``
    limits the number of entries below ``folder``. ``megabytes`` limits their total size, and separately the size of
    deleted files that the worker holds open. Entries may lie at most 16 levels below ``folder``."""
    pause, devices = 0.0, {folder.stat().st_dev}  # the judge's own shared memory has another device

    def overrun(worker: JailedProcess) -> str:
        nonlocal pause
        if (now := time.monotonic()) < pause:
            return ""
        full = scratch.too_much(folder, megabytes, files) or deleted_bytes(worker.pid, devices) > megabytes << 20
        pause = time.monotonic() + max(_LOOK_SECONDS, 20 * (time.monotonic() - now))
        return "disk" if full else ""

    return overrun


def _give_precedence(thread: int, rank: int) -> None:
    """Gives ``thread`` (0: the calling thread) the real-time priority ``rank``, if this process may do so. Rank 0
    removes the priority. A low nice value is not enough: another running program could still keep the processor for
    milliseconds."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_RR if rank else os.SCHED_OTHER, os.sched_param(rank))


@contextlib.contextmanager
def taking_turns(*workers: JailedProcess) -> Iterator[Callable[[JailedProcess], None]]:
    """Context manager for timing several workers in turn. Gives this process a real-time priority, if permitted, and
    yields a function ``turn``. Callers call ``turn(worker)`` whenever the next request goes to a different worker than
    the last one. ``turn`` stops all other ``workers`` to free their processors, and calls ``worker.spread``. It also
    moves this process to the processor of ``worker``. The end of the context resets all priorities and bindings."""
    running: JailedProcess | None = None

    def turn(worker: JailedProcess) -> None:
        nonlocal running
        if worker is running or worker not in workers:
            return
        for other in workers:
            if other is not worker:
                other.stop()
        worker.spread()
        # The judge fills the worker's inputs: if another processor held them in its caches, a call would take longer.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, [worker.processor()])
        running = worker

    processors = os.sched_getaffinity(0)
    for worker in workers:
        worker.stop()  # a process of a lower rank may not get the processor that it needs to stop
    try:
        _give_precedence(0, 1 if workers else 0)
        yield turn
    finally:
        _give_precedence(0, 0)
        os.sched_setaffinity(0, processors)
        for worker in workers:
            worker.spread(apart=False)
