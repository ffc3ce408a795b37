"""Limits the memory and the files of a first pass (a run of a solution that may start compilers). While another process
times a kernel, stops the worker, which is the process that runs the solution.

A process must hold the timing lease, which is a lock, exclusively to time a kernel. A first pass holds the lease in
shared mode. If another process waits to time a kernel, the worker is stopped and the lease is released. The worker
continues after the kernel has been timed. On a GPU, the lease is also released while the worker's compilers run,
because they do not use the device. The worker is not stopped for this."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from cuda_agent.lease import Lease
from cuda_agent.sandbox.jail import scratch
from cuda_agent.sandbox.jail.descendants import deleted_bytes, descendants, memory_bytes, state
from cuda_agent.sandbox.jail.processes import JailedProcess

# MiB that a first pass may use even if the sandbox allows less: one compiler takes 2 GB with torch's headers, and a
# GPU's process as much.
LEAST_MEMORY_MB = {"cpu": 4096, "cuda": 8192}
_FOLDER = {"cpu": (512, 4096), "cuda": (2048, 32_768)}  # MB and files; Triton writes ten files for each kernel
_LOOK = 0.3  # least seconds between checks of memory and folders; a check takes at most a twentieth of them
_LEAST_RUN = {"cpu": 1.0, "cuda": 0.2}  # seconds between two stops


@contextmanager
def watchdog(
    folders: Sequence[Path], lease: Path, device: str, memory_mb: int
) -> Iterator[Callable[[JailedProcess], str]]:
    """Holds the timing lease (a lock) in shared mode during the ``with`` block, and yields a function that checks a
    worker. ``lease`` is the folder of the lease. ``folders`` are the folders to which the worker writes.

    The worker's ``JailedProcess`` (its handle in this process) calls the function regularly. The function returns
    ``memory`` if the programs that the worker started use more than ``memory_mb`` MiB together, ``disk`` if the
    worker's files are too large or too many, and otherwise an empty string. If another process waits to time a kernel,
    the function stops the worker, releases the lease until the kernel has been timed, and lets the worker continue.
    Before each such stop, the worker runs for at least ``_LEAST_RUN`` seconds. On a GPU, the function also releases the
    lease while the worker's compilers run."""
    look = ran = time.monotonic()
    look += _LOOK
    devices = {folder.stat().st_dev for folder in folders}
    works = True  # whether the lease is held
    with closing(Lease(lease)) as handle, ExitStack() as held:
        held.enter_context(handle.working())

        def overrun(worker: JailedProcess) -> str:
            nonlocal look, ran, works
            now = time.monotonic()
            if device == "cuda" and _compiles(worker.pid):
                held.close()
                works = False
            elif not works or (now - ran > _LEAST_RUN[device] and handle.wanted):
                worker.signal_all(signal.SIGSTOP)
                if works:
                    handle.pause()
                else:
                    held.enter_context(handle.working())
                worker.signal_all(signal.SIGCONT)
                ran, works = time.monotonic(), True
            if now > look:
                begin = time.monotonic()
                if sum(memory_bytes(pid)[1] for pid in descendants(worker.pid)) > memory_mb << 20:
                    return "memory"
                if any(too_much(one, device) for one in folders):
                    return "disk"
                if deleted_bytes(worker.pid, devices) > _FOLDER[device][0] << 20:
                    return "disk"
                look = time.monotonic() + max(_LOOK, 20 * (time.monotonic() - begin))
            return ""

        yield overrun


def _compiles(pid: int) -> bool:
    """Returns whether a program that the process ``pid`` started is running."""
    return any(state(f"/proc/{child}/stat") in "RD" for child in descendants(pid))


def too_much(folder: Path, device: str) -> str:
    """Returns a message if ``folder`` exceeds a limit (bytes, files or depth) or cannot be read. Otherwise returns an
    empty string."""
    return scratch.too_much(folder, *_FOLDER[device])
