"""Starts and controls the warm parent: a process that imports torch once, and then forks jailed workers."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.messages import WorkerOperation, receive_frame, send_frame

_LEAVE_SECONDS = 5  # from the end of a warm parent's stream to SIGKILL
# Without these settings, glibc may return memory after a call and map it again in the next, which doubles a time.
KEEPING_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
_PACKAGE = Path(__file__).resolve().parents[3]
# Imported by warm parents of workers that compile. The second import takes most of the time of a small model's
# compilation if its graph is cached.
_COMPILING = ("cuda_agent.sandbox.worker.compiling", "torch._inductor.compile_fx")


def chosen_gpus() -> dict[str, str]:
    """Returns this process's environment variables that limit CUDA to some GPUs. All processes of a sandbox need these
    variables. Without them, CUDA takes the machine's first GPU."""
    return {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in os.environ}


def warm_parent(threads: int, log: Path, imports: Sequence[str] = (), pinned: bool = True) -> "WarmParent":
    """Starts a warm parent: a process that imports torch and the modules ``imports``, and then forks workers. It is
    ready when its ``wait_ready`` returns. It writes errors to the file ``log``. Each worker computes with ``threads``
    threads. If ``pinned`` is true, all workers run on the same processors, as many as ``threads``. A solution then
    cannot use more processors than the model that it is compared with. If ``pinned`` is false, workers may use every
    processor."""
    ours, theirs = socket.socketpair()
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent",
        "PYTHONPATH": str(_PACKAGE), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", **KEEPING_MEMORY, **chosen_gpus(), "USER": "worker", "LOGNAME": "worker",
    }  # fmt: skip
    with open(log, "ab") as errors, _processors(threads) if pinned else contextlib.nullcontext(), theirs:
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


def compiling_parent(start: Callable[[Sequence[str]], "WarmParent"]) -> "WarmParent":
    """Returns a warm parent (a process that imports modules once, and then forks workers) whose workers use
    ``torch.compile``. Waits until it is ready. ``start`` starts a warm parent that imports the given modules.

    If possible, the parent imports ``torch._inductor.compile_fx``, because this import takes long. With some versions
    of torch, the import opens the GPU or starts a thread. Forked workers then could not use the GPU, or could hang.
    With such a version, each worker imports the module instead."""
    parent = start(_COMPILING)
    with contextlib.suppress(RuntimeError):  # more than one thread
        parent.wait_ready()
        if not parent.opened_gpu:
            return parent
    parent.close()
    parent = start(_COMPILING[:1])
    parent.wait_ready()
    return parent


class WarmParent:
    """A process that imports torch and forks workers. Thread-safe. Methods raise ``ConnectionError`` if the process has
    ended."""

    def __init__(self, pid: int, channel: socket.socket, end: Callable[[], None]) -> None:
        self.pid = pid
        self._socket = channel
        self._end = end
        self._turn = threading.Lock()
        self.torch = ""  # torch's version, once the parent is ready
        self.opened_gpu = False  # whether it opened the GPU, so that its workers cannot use the GPU

    def wait_ready(self) -> None:
        """Blocks until the parent has imported torch. Raises ``RuntimeError`` if it then has more than one thread,
        because workers forked from it could hang."""
        if self.torch:
            return
        answer = receive_frame(self._socket).body
        if answer["threads"] != 1:
            raise RuntimeError(f"the warm parent has {answer['threads']} threads: its children could hang")
        self.torch, self.opened_gpu = answer["torch"], answer["opened_gpu"]

    def fork(self, options: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Forks a worker with these ``options``. The worker gets copies of the descriptors ``fds``; the first is its
        socket. Returns the worker's process id."""
        return int(self._ask(WorkerOperation.FORK_WORKER, options, fds)["pid"])

    def reap(self, pid: int) -> int:
        """Waits for a worker that is dead or dying. Returns its exit code, or the negative number of the signal that
        ended it."""
        return int(self._ask(WorkerOperation.REAP_WORKER, {"pid": pid})["status"])

    def branch(self, imports: Sequence[str]) -> "WarmParent":
        """Forks a second warm parent, which also imports the modules ``imports``. Returns the second parent. The caller
        must close the second parent before this one."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = int(self._ask(WorkerOperation.FORK_PARENT, {"imports": [*imports]}, [theirs.fileno()])["pid"])

        def end() -> None:
            with contextlib.suppress(OSError):  # this process was killed, and the branch is no longer its child
                with open(os.pidfd_open(pid), "rb", buffering=0) as ended:
                    if not select.select([ended], [], [], _LEAVE_SECONDS)[0]:
                        os.kill(pid, signal.SIGKILL)
                self.reap(pid)

        return WarmParent(pid, ours, end)

    def _ask(self, operation: WorkerOperation, body: Mapping[str, Any], fds: Sequence[int] = ()) -> Any:
        with self._turn:
            send_frame(self._socket, operation, body, fds=fds)
            return receive_frame(self._socket).body

    def close(self) -> None:
        """Ends the warm parent and waits for its end."""
        self._socket.close()
        self._end()


@contextlib.contextmanager
def _processors(count: int) -> Iterator[None]:
    all_of_them = sorted(os.sched_getaffinity(0))
    first = os.getpid() * count  # concurrent judges use different processors where there are enough
    os.sched_setaffinity(0, {all_of_them[(first + i) % len(all_of_them)] for i in range(count)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, all_of_them)
