"""Runs one first pass in a jailed worker that may start programs, and limits it.

While others time kernels, a first pass stands still: it holds the timing lease while it runs. On a GPU it does not hold
the lease while its compilers run, because they do not use the device."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cuda_agent.lease import Lease
from cuda_agent.sandbox.build import builder
from cuda_agent.sandbox.jail import cgroups, jail, scratch
from cuda_agent.sandbox.jail.descendants import deleted_bytes, descendants, memory_bytes, state
from cuda_agent.sandbox.jail.processes import JailedProcess, NotStarted, WorkerDied, WorkerError
from cuda_agent.sandbox.jail.warm_parent import WarmParent, compiling_parent, warm_parent
from cuda_agent.sandbox.messages import FrameTooLarge, WorkerOperation
from cuda_agent.sandbox.wire import Status, printable

# Limits for all its processes together. With torch's headers one compiler takes 2 GB, and a GPU's process as much.
_MEMORY_MB = {"cpu": 4096, "cuda": 8192}
_FILE_MB = 256
_FOLDER = {"cpu": (512, 4096), "cuda": (2048, 32_768)}  # MB and files; Triton writes ten files for each kernel
_LOOK = 0.3  # least seconds between checks of memory and folders; a check takes at most a twentieth of them
_BREATH = {"cpu": 1.0, "cuda": 0.2}  # seconds between pauses for a timing


class FirstPassFailed(Exception):
    """A solution failed in its first pass by its own fault. ``status`` becomes the verdict's status."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class FirstPassRunner:
    """Runs first passes, at most ``parallel`` at a time: callers hold ``slots``. ``scratch`` is a folder that jailed
    users can reach; ``lease`` is the folder of the timing lease."""

    def __init__(
        self, scratch: Path, lease: Path, device: str, threads: int, parallel: int = 2, train_mode: bool = False
    ) -> None:
        self._scratch, self._lease = scratch, lease
        self.device, self.threads, self.train_mode = device, threads, train_mode
        self.slots = asyncio.Semaphore(parallel)
        self._parent: WarmParent | None = None
        self._starting = threading.Lock()

    def run(self, folder: Path, environment: dict[str, str], request: dict[str, Any], seconds: float) -> None:
        """Runs one first pass in ``folder``, for at most ``seconds``. ``request`` is that of ``RUN_FIRST_PASS``. Raises
        ``FirstPassFailed`` if the solution is at fault, ``OSError`` if the machine is."""
        home = Path(tempfile.mkdtemp(prefix="worker-", dir=self._scratch))
        python = sys.prefix, sys.base_prefix
        policy = jail.JailPolicy(
            read=(*jail.SYSTEM_READ, *python), write=(str(folder), str(home)), execute=(*jail.SYSTEM_EXECUTE, *python),
            memory_mb=2 * _MEMORY_MB["cpu"] if self.device == "cpu" else 0,  # virtual memory of one process
            processes=256, file_mb=_FILE_MB, cpu_seconds=int(seconds * self.threads) + 60, one_group=True,
            shared_memory=self.device == "cuda", read_any=True,
        )  # fmt: skip
        options = {
            "role": "first_pass", "threads": self.threads, "folder": str(folder), "device": self.device,
            "train_mode": self.train_mode,
            # gcc checks whether an unprivileged user can reach its temporary folder; a cache may lie in a private home
            "environment": environment | {"TMPDIR": str(home)},
        }  # fmt: skip
        worker: JailedProcess | None = None
        with _Hold(self._lease) as hold:
            try:
                watch = _watch((folder, home), hold, self.device)
                worker = JailedProcess(
                    self._warm(), options, policy, _MEMORY_MB[self.device], home, cgroups.find(), watch
                )
                worker.wait_started()
                worker.seconds = seconds
                answer = worker.call(WorkerOperation.RUN_FIRST_PASS, request)
            except FrameTooLarge as error:
                raise FirstPassFailed("build_error", f"the solution is {error}") from None
            except (NotStarted, ConnectionError, ValueError) as lost:
                self.close()
                raise OSError(f"the first pass did not start: {lost}") from None
            except WorkerDied as death:
                status: Status = "timeout" if death.reason == "timeout" else "crash"
                raise FirstPassFailed(status, f"the solution, while it compiled, {death}") from death
            except WorkerError as error:
                raise FirstPassFailed("build_error", str(error)) from None
            finally:
                if worker:
                    with contextlib.suppress(ConnectionError):  # the warm parent has died, and the worker with it
                        worker.kill()
                scratch.remove(home)
        if answer is not None:
            raise FirstPassFailed("build_error", _explained(answer, folder))

    def _warm(self) -> WarmParent:
        with self._starting:
            if self._parent is None:
                log = self._scratch / "first-pass.log"
                self._parent = compiling_parent(lambda imports: warm_parent(self.threads, log, imports))
            return self._parent

    def close(self) -> None:
        with self._starting:
            if self._parent:
                self._parent.close()
            self._parent = None


class _Hold:
    """Holds the timing lease in ``folder`` inside its context until ``release``: no kernel is timed meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._lease = Lease(folder)
        self._held = contextlib.ExitStack()
        self.held = False

    def __enter__(self) -> "_Hold":
        self._acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._lease.close()

    def _acquire(self) -> None:
        self._held.enter_context(self._lease.working())
        self.held = True

    def release(self) -> None:
        self._held.close()
        self.held = False

    def pause(self) -> None:
        """Releases the lease for a moment, so that waiting processes can time a kernel."""
        self.release()
        self._acquire()


def _watch(folders: Sequence[Path], hold: _Hold, device: str) -> Callable[[JailedProcess], str]:
    """Returns a function that the watchdog of a first pass calls again and again. The function returns ``memory`` or
    ``disk`` if the worker exceeds that limit, otherwise an empty string. It also lets others time kernels. Every
    ``_BREATH`` seconds it stops the worker while it calls ``hold.pause``. On a GPU it releases the lease for as long as
    programs of the worker run: compilers do not use the device."""
    breathed = time.monotonic()
    look = breathed + _LOOK
    devices = {folder.stat().st_dev for folder in folders}

    def overrun(worker: JailedProcess) -> str:
        nonlocal look, breathed
        now = time.monotonic()
        if device == "cuda" and _compiles(worker.pid):
            hold.release()
        elif not hold.held or now - breathed > _BREATH[device]:
            _signal_group(worker, signal.SIGSTOP)
            hold.pause()
            _signal_group(worker, signal.SIGCONT)
            breathed = time.monotonic()
        if now > look:
            begin = time.monotonic()
            if sum(memory_bytes(pid)[1] for pid in descendants(worker.pid)) > _MEMORY_MB[device] << 20:
                return "memory"
            if any(too_much(one, device) for one in folders):
                return "disk"
            if deleted_bytes(worker.pid, devices) > _FOLDER[device][0] << 20:
                return "disk"
            look = time.monotonic() + max(_LOOK, 20 * (time.monotonic() - begin))
        return ""

    return overrun


def _compiles(pid: int) -> bool:
    """Returns whether a program that the process ``pid`` started is running."""
    return any(state(f"/proc/{child}/stat") in "RD" for child in descendants(pid))


def _signal_group(worker: JailedProcess, number: int) -> None:
    with contextlib.suppress(OSError):  # the worker joins its process group shortly after its start
        os.killpg(worker.pid, number)


def too_much(folder: Path, device: str) -> str:
    """Returns what exceeds the limit of bytes or files in ``folder``, or an empty string."""
    return scratch.too_much(folder, *_FOLDER[device])


def _explained(answer: Any, folder: Path) -> str:
    """Returns the first compiler errors in the worker's ``answer``, or else the exception that the solution raised."""
    said = answer if isinstance(answer, dict) else {}
    log, error = (str(said.get(key, "")).replace(f"{folder}/", "") for key in ("log", "error"))
    return builder.first_errors(log) if builder.has_errors(log) else printable(error)[:1200]
