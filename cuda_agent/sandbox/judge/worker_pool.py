"""Starts the jailed workers of one judge, and keeps a worker ready for the next candidate."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda_agent.lease import Lease
from cuda_agent.machine import processor
from cuda_agent.sandbox.jail import cgroups, jail
from cuda_agent.sandbox.jail.processes import JailedProcess, NotStarted, WorkerDied, WorkerError, within
from cuda_agent.sandbox.jail.warm_parent import WarmParent, compiling_parent, warm_parent
from cuda_agent.sandbox.judge.memory import buffers
from cuda_agent.sandbox.judge.reference_client import ReferenceClient
from cuda_agent.sandbox.judge.shared_context import SharedContext
from cuda_agent.sandbox.messages import JudgeSettings

_KNOWN = 2  # version of the folder that compiling workers share
# MB and number of files in the folders of reference workers, without and with the right to compile: on a GPU
# max-autotune keeps some files of each of the dozens of kernels that it tries for a matrix product.
_FOLDER, _COMPILERS_FOLDER = (64, 1024), (2048, 32_768)
# Hardware queues of a CUDA context. With few, it is made and released in a third of the time, but kernels on several
# streams may wait for each other.
_FEW_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"}
_LEAST_RUN, _DRAIN = 0.05, 0.02  # seconds between two stops, and for work that the device has already begun
_WARM_UP = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + 1
get_inputs, get_init_inputs = lambda: [torch.randn(64, 64)], lambda: []
"""


class WorkerPool:
    """Starts the jailed workers of one judge. Owns the workers' private folders and their warm parents. A warm parent
    is a process that has imported torch and forks workers."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.lease = Lease(Path(settings.lease))  # the judge has one thread, so it needs one lease
        self._log = Path(settings.scratch) / "workers.log"
        self._groups = cgroups.find()
        self._plain = warm_parent(settings.threads, self._log, pinned=not settings.prober)
        self._compiling: WarmParent | None = None
        self._spare: JailedProcess | None = None
        self.areas = buffers.Spare()  # for candidates on the CPU
        self.shared = SharedContext(self.candidate)

    @property
    def torch(self) -> str:
        self._plain.wait_ready()
        return self._plain.torch

    def candidate(
        self, place: dict[str, Any] | None = None, profiler: bool = False, strictly: bool = False
    ) -> JailedProcess:
        """Starts a worker for one solution, or returns the spare worker. The worker can read its private folder, and
        can write only to the memory for outputs. ``place`` describes the results of the solution's first pass, an
        earlier run that may start compilers. If ``place`` is given, the worker can also read these results.
        ``profiler`` starts torch's profiler; the caller does not time such a worker. With ``strictly`` (strict mode) or
        ``place``, the worker's CUDA context has the default number of hardware queues, otherwise one. Raises
        ``NotStarted``."""
        if place:
            return self._locked(place, profiler)
        queues = strictly and self.settings.device == "cuda"
        spare, self._spare = (None, self._spare) if profiler or queues else (self._spare, None)
        if spare is not None and spare.alive:
            with contextlib.suppress(NotStarted):  # the spare worker died while it waited
                return spare.wait_started()
        return self._start_candidate(profiler=profiler, queues=queues).wait_started()

    def start_spare(self) -> None:
        """Begins to start a spare worker for the next candidate, unless one exists, and returns at once. Until the new
        worker is ready, it holds the timing lease, so that no process times a kernel. On a GPU, the start of a worker
        would disturb such a timing."""
        if self._spare is None or not self._spare.alive:
            with self.lease.lent() as lent:
                self._spare = self._start_candidate(lent=(lent,))

    def _start_candidate(self, **more: Any) -> JailedProcess:
        assert self.torch
        home = self._home()
        home.chmod(0o755)
        policy = jail.JailPolicy(read=(str(home),), file_mb=0)
        return self._start(self._plain, "candidate", policy, home, **more)

    def reference(self) -> JailedProcess:
        """Starts a worker that runs one task's model. Libraries may create caches in the worker's small private
        folder."""
        assert self.torch
        home = self._home()
        policy = jail.JailPolicy(write=(str(home),), file_mb=16)
        watch = _giving_way(self.lease, within(home, *_FOLDER))
        return self._start(self._plain, "reference", policy, home, watch).wait_started()

    def compiler(self) -> tuple[JailedProcess, str]:
        """Starts a reference worker (a worker that runs a task's model) that may run compilers. Returns the worker, and
        the folder with results of an earlier compilation. The worker can read this folder and so compiles faster."""
        if self.settings.device == "cuda":
            self._parent_that_compiles()  # its imports take seconds, but not the device: they need no lease
        known = str(self._known())
        with self.lease.working():
            return self._start_compiler(self._home(), (known,)), known

    def _locked(self, place: dict[str, Any], profiler: bool) -> JailedProcess:
        """Starts a worker for a solution that needs compilers. The compilers ran in the solution's first pass, an
        earlier run. The worker can read the results in ``place``, but cannot start programs itself."""
        home = self._home()
        policy = jail.JailPolicy(read=(str(home), place["folder"]), file_mb=0)
        parent, where = self._parent_that_compiles(), {name: place[name] for name in ("folder", "environment")}
        return self._start(parent, "candidate", policy, home, profiler=profiler, **where).wait_started()

    def _parent_that_compiles(self) -> WarmParent:
        if self._compiling is None:
            assert self.torch  # ready
            self._compiling = compiling_parent(self._plain.branch)
        return self._compiling

    def _start_compiler(self, home: Path, read: tuple[str, ...] = ()) -> JailedProcess:
        execute = (*jail.SYSTEM_EXECUTE, *jail.PYTHON)
        policy = jail.JailPolicy(read=read, write=(str(home),), execute=execute, file_mb=256, one_group=True)
        watch = _giving_way(self.lease, within(home, *_COMPILERS_FOLDER))
        return self._start(self._parent_that_compiles(), "reference", policy, home, watch, queues=True).wait_started()

    def _home(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="worker-", dir=self.settings.scratch))

    def _start(
        self,
        parent: WarmParent,
        role: str,
        policy: jail.JailPolicy,
        home: Path,
        watch: Callable[[JailedProcess], str] | None = None,
        queues: bool = False,
        lent: Sequence[int] = (),
        **more: Any,
    ) -> JailedProcess:
        settings = self.settings
        policy = replace(
            policy,
            read=(*jail.SYSTEM_READ, *jail.PYTHON, *policy.read),
            # Virtual memory (the watchdog limits resident memory); the CUDA driver maps more than any limit.
            memory_mb=2 * settings.memory_mb if settings.device == "cpu" else 0,
            shared_memory=settings.device == "cuda",
            cpu_seconds=int(settings.run_seconds * settings.threads * 4) + 60 if role == "candidate" else 1 << 20,
            read_any=True,
        )
        folder = str(home)
        environment = {
            "TMPDIR": folder, "HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_HOME": folder, "TRITON_CACHE_DIR": f"{folder}/triton",
        }  # fmt: skip
        if not queues:
            environment |= _FEW_QUEUES
        options = {
            "role": role, "threads": settings.threads, "folder": folder, "environment": environment,
            "device": settings.device, "train_mode": settings.train_mode, **more,
        }  # fmt: skip
        return JailedProcess(parent, options, policy, settings.memory_mb, home, self._groups, watch, lent)

    def _known(self) -> Path:
        """Returns the folder of compilation results that workers with compilers share. If it is missing, makes it: a
        warm-up compiles a small model."""
        key = hashlib.sha256(f"{_KNOWN}|{self.torch}|{processor()}|{sys.version}".encode()).hexdigest()[:32]
        known = Path(self.settings.cache) / "inductor" / key
        if known.exists():
            return known
        known.parent.mkdir(parents=True, exist_ok=True)
        with open(known.parent / f"{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two judges that start at the same time, one warms up
            if known.exists():
                return known
            home = self._home()
            with self.lease.working():
                oracle = ReferenceClient(self._start_compiler(home), _WARM_UP, 0, self.settings)
                with contextlib.suppress(WorkerError, WorkerDied):  # a compiler that fails here fails for the task too
                    oracle.compile(oracle.inputs(0) or [], "")
            staged = Path(tempfile.mkdtemp(dir=known.parent))
            with contextlib.suppress(FileNotFoundError):
                shutil.copytree(home / "known", staged, dirs_exist_ok=True)
            oracle.close()
            os.replace(staged, known)
        return known

    def close(self) -> None:
        self.areas.close()
        self.shared.end()
        if self._spare:
            self._spare.kill()
        if self._compiling:
            self._compiling.close()
        self._plain.close()


def _giving_way(lease: Lease, check: Callable[[JailedProcess], str]) -> Callable[[JailedProcess], str]:
    """Wraps ``check``, a function that the watchdog of ``JailedProcess`` calls regularly. If another process waits to
    time a kernel, and if the worker's flag ``gives_way`` is set, the returned function first pauses the worker until
    the other process is done. It then calls ``check`` and returns the result. It must be called inside
    ``lease.working``."""
    ran = time.monotonic()

    def checked(worker: JailedProcess) -> str:
        nonlocal ran
        if worker.gives_way and lease.wanted and time.monotonic() - ran > _LEAST_RUN:
            worker.signal_all(signal.SIGSTOP)
            time.sleep(_DRAIN)
            lease.pause()
            worker.signal_all(signal.SIGCONT)
            ran = time.monotonic()
        return check(worker)

    return checked
