"""A prepared task: its reference worker, a rotating secret pool of inputs with the oracle's outputs, and its baselines.

A candidate pays only for itself: spec, weights, pool and baselines are here already.  The judge chooses every seed; the
reference worker only turns seeds into values.  Under the model clock seeds and pool are fixed, so that two runs agree
bit for bit.  Not covered: candidates.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuda_agent.lease import Lease
from cuda_agent.sandbox import build, cost, jail
from cuda_agent.sandbox.buffers import DTYPES, Array, Buffers, byte_count
from cuda_agent.sandbox.processes import WarmParent, Worker, WorkerDied, WorkerError, taking_turns
from cuda_agent.sandbox.wire import TaskError, TaskSpec

_CLOCK = 2  # of what is measured: a baseline taken in another way is none
_POOL_BYTES = 48 << 20  # most memory for one task's pool
_COMPILE_SECONDS = 120.0
_BASELINE_CALLS, _BASELINE_SECONDS = 15, 0.4  # of one round: whichever comes first
_EMPTY_CALLS = 4
_BASELINE_ROUNDS, _STEADY = 3, 0.05  # another round when calls differ by more than this (median deviation)
_COMPILING = "cuda_agent.sandbox.compiling"  # imported by the warm parent of compiling workers, never here

_WARM_UP = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + 1
def get_inputs():
    return [torch.randn(64, 64)]
def get_init_inputs():
    return []
"""


@dataclass(frozen=True)
class Settings:
    """What judge and pool need of the configuration, and where they may put things."""

    threads: int
    checks: int
    tolerance: float
    timed_calls: int
    run_seconds: float
    memory_mb: int
    clock: str
    required_walls: tuple[str, ...]
    cache: str  # survives; only trusted processes write it
    scratch: str  # private folders of workers
    lease: str


def net(seconds: float, empty: float) -> float:
    """A time without the empty call.  What is left is at least a tenth: more than that the clock cannot resolve, and a
    time near zero must not come out of noise."""
    return max(seconds - empty, seconds / 10)


@dataclass
class Entry:
    index: int
    inputs: list[Array]
    outputs: list[Array]


@dataclass
class Baselines:
    """Seconds per call, medians; ``None`` where they were not measured."""

    eager: float | None = None
    compile: float | None = None
    compile_error: str = ""
    compile_tried: bool = False


class Workshop:
    """Starts jailed workers: keeps the warm parents and the private folders."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._log = Path(settings.scratch) / "workers.log"
        self._plain = WarmParent(settings.threads, self._log)
        self._compiling: WarmParent | None = None
        self._ready = False

    @property
    def torch(self) -> str:
        if not self._ready:
            self._plain.wait_ready()
            self._ready = True
        return self._plain.torch

    def candidate(self, options: dict[str, Any], fds: list[int], read: tuple[str, ...]) -> Worker:
        """A single-use worker that can write nothing but its outputs."""
        assert self.torch
        cpu_seconds = int(self.settings.run_seconds * self.settings.threads * 4) + 60
        return self._start(
            self._plain, {"role": "candidate", **options}, fds, jail.Policy(read=read, file_mb=0), cpu_seconds
        )

    def reference(self) -> Worker:
        """A worker for one task, with a small private folder: libraries make their cache folders when imported."""
        assert self.torch
        return self._start(self._plain, {"role": "reference"}, [], jail.Policy(file_mb=16), home=self._home())

    def compiler(self) -> tuple[Worker, str]:
        """A reference worker that may run the C++ compiler, and the folder of what the warm-up found out."""
        if self._compiling is None:
            self._compiling = WarmParent(self.settings.threads, self._log, (_COMPILING,))
            self._compiling.wait_ready()
        known = str(self._known())
        return self._start_compiler(self._home(), (known,)), known

    def _start_compiler(self, home: Path, read: tuple[str, ...] = ()) -> Worker:
        assert self._compiling
        execute = (*jail.SYSTEM_EXECUTE, sys.prefix, sys.base_prefix)
        policy = jail.Policy(read=read, execute=execute, file_mb=256)
        return self._start(self._compiling, {"role": "reference"}, [], policy, home=home)

    def _home(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="worker-", dir=self.settings.scratch))

    def _start(
        self,
        parent: WarmParent,
        options: dict[str, Any],
        fds: list[int],
        policy: jail.Policy,
        cpu_seconds: int = 1 << 20,
        home: Path | None = None,
    ) -> Worker:
        settings = self.settings
        policy = replace(
            policy,
            read=(*jail.SYSTEM_READ, sys.prefix, sys.base_prefix, *policy.read),
            write=(str(home),) if home else (),
            memory_mb=2 * settings.memory_mb,  # virtual; what is really used is the watchdog's business
            cpu_seconds=cpu_seconds,
            read_any=True,
        )
        folder = str(home or settings.scratch)
        environment = {"TMPDIR": folder, "HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        options = {"threads": settings.threads, "folder": folder, "environment": environment} | options
        return Worker(parent, options, policy, settings.memory_mb, fds, home)

    def _known(self) -> Path:
        """What compiling workers share, made by a trusted warm-up when this machine's cache has none."""
        key = hashlib.sha256(f"{self.torch}|{build.processor()}|{sys.version}".encode()).hexdigest()[:32]
        known = Path(self.settings.cache) / "inductor" / key
        if known.exists():
            return known
        known.parent.mkdir(parents=True, exist_ok=True)
        with open(known.parent / f"{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two judges start at the same time; one of them does it
            if known.exists():
                return known
            home = self._home()
            oracle = Oracle(self._start_compiler(home), _WARM_UP, 0, self.settings)
            with contextlib.suppress(WorkerError, WorkerDied):  # compiling fails here: then it will for the task
                oracle.compile(oracle.inputs(0), "")
            staged = Path(tempfile.mkdtemp(dir=known.parent))
            if (home / "headers").exists():
                shutil.copytree(home / "headers", staged / "headers")
            facts = home / "facts.json"
            (staged / "facts.json").write_text(facts.read_text() if facts.exists() else '{"isa": {}, "header": {}}')
            oracle.close()
            os.replace(staged, known)
        return known

    def close(self) -> None:
        self._plain.close()
        if self._compiling:
            self._compiling.close()


class Oracle:
    """A reference worker of one task, which it owns, and its buffers.  Every failure of the task is a ``TaskError``."""

    def __init__(self, worker: Worker, code: str, weights_seed: int, settings: Settings) -> None:
        self.worker = worker
        self._limit = settings.run_seconds
        self._buffers: Buffers | None = None
        try:
            self._open(code, weights_seed, settings)
        except BaseException:
            self.close()
            raise

    def _open(self, code: str, weights_seed: int, settings: Settings) -> None:
        answer = self._ask("T", {"code": code, "seed": weights_seed})
        try:
            self.spec = TaskSpec.from_json(answer)
            tensors = (*self.spec.inputs, *self.spec.outputs, *self.spec.weights.values())
            foreign = {t.dtype for t in tensors} - DTYPES.keys()
            size = 0 if foreign else sum(byte_count(t) for t in tensors)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise TaskError("the task answered nonsense") from None
        if foreign:
            raise TaskError(f"the task has tensors of {', '.join(sorted(foreign))}, which are not supported here")
        if size > settings.memory_mb << 20:
            raise TaskError(f"the task's tensors take {size >> 20} MB, more than the limit of {settings.memory_mb} MB")
        self._buffers = buffers = Buffers(self.spec, slots=2, values=True, fixed=settings.clock == "model")
        layout = {"layout": buffers.layout, "values": buffers.value_inputs, "weights": buffers.value_weights}
        self._ask("M", layout, fds=buffers.descriptors)
        self.weights = buffers.values(buffers.value_weights, list(self.spec.weights.values()))

    @property
    def alive(self) -> bool:
        return self.worker.alive

    def inputs(self, seed: int) -> list[Array]:
        self._ask("G", {"seed": seed})
        assert self._buffers
        return self._buffers.values(self._buffers.value_inputs, self.spec.inputs)

    def outputs(self, inputs: list[Array]) -> list[Array]:
        assert self._buffers
        self._buffers.fill(0, inputs)
        self._ask("R", slot=0)
        return self._buffers.outputs(0)

    def seconds(self, inputs: list[Array], null: bool = False) -> float:
        """One timed call (``null``: of nothing), buffers refilled before the clock starts."""
        assert self._buffers
        slot = secrets.randbelow(2)
        self.worker.stop()
        self._buffers.fill(slot, inputs)
        self.worker.seconds = self._limit
        with _of_the_task():
            return self.worker.timed("N" if null else "R", slot)

    def compile(self, inputs: list[Array], known: str) -> None:
        """Calls are the compiled model's from here on.  ``WorkerError`` when torch.compile fails."""
        assert self._buffers
        self._buffers.fill(0, inputs)
        self.worker.seconds = _COMPILE_SECONDS
        self.worker.call("C", {"known": known}, slot=0)

    def count(self, inputs: list[Array]) -> tuple[int, int]:
        """Operators of one call and the bytes they touch."""
        assert self._buffers
        self._buffers.fill(0, inputs)
        answer = self._ask("O", slot=0)
        return int(answer["operators"]), int(answer["bytes"])

    def _ask(self, kind: str, body: Any = None, slot: int = 0, fds: list[int] | None = None) -> Any:
        self.worker.seconds = self._limit
        with _of_the_task():
            return self.worker.call(kind, body, slot, fds or ())

    def close(self) -> None:
        self.worker.kill()
        if self._buffers:
            self._buffers.close()


@contextmanager
def _of_the_task() -> Iterator[None]:
    try:
        yield
    except (WorkerError, WorkerDied) as error:
        raise TaskError(f"the task {error}" if isinstance(error, WorkerDied) else str(error)) from None


class Prepared:
    """One task, ready for candidates."""

    def __init__(self, code: str, digest: str, workshop: Workshop) -> None:
        settings = workshop.settings
        self._fixed = settings.clock == "model"
        self._secret = digest.encode() if self._fixed else secrets.token_bytes(16)
        self._settings = settings
        self._workshop = workshop
        self._code = code
        self._digest = digest
        self._lease = Lease(Path(settings.lease))
        with self._lease.working():
            self.oracle = Oracle(workshop.reference(), code, self.weights_seed, settings)
        self.spec = self.oracle.spec
        size = sum(byte_count(t) for t in (*self.spec.inputs, *self.spec.outputs))
        self._pool: list[Entry | None] = [None] * max(
            2, min(settings.checks + settings.timed_calls, _POOL_BYTES // max(1, size))
        )
        self.base = 0
        self._empty = float("inf")
        self.empty_candidate: dict[str, float] = {}  # the same of candidates, by lane
        self.baselines = self._load()

    @property
    def weights_seed(self) -> int:
        """The random numbers that the model is built with; no inputs come of it."""
        return self._seed(-1)

    @property
    def pool_size(self) -> int:
        return len(self._pool)

    def rotate(self) -> None:
        """Retire one entry: the next evaluation sees a new one."""
        if not self._fixed:
            self.base += 1

    def entry(self, index: int, timing: bool = False) -> Entry:
        """Inputs and oracle outputs number ``index``; made when the pool does not hold them.  ``timing``: the caller
        holds the timing lease."""
        place = index % len(self._pool)
        entry = self._pool[place]
        if entry is None or entry.index != index:
            with contextlib.nullcontext() if timing else self._lease.working():
                inputs = self.oracle.inputs(self._seed(index))
                entry = self._pool[place] = Entry(index, inputs, self.oracle.outputs(inputs))
        return entry

    def _seed(self, index: int) -> int:
        return int.from_bytes(hmac.digest(self._secret, str(index).encode(), "sha256")[:7])

    def measure(self, compile: bool) -> None:
        """Fill in the baselines that are missing; with the model clock they are costs."""
        if self._fixed:
            counts = self.oracle.count(self.entry(0).inputs)
            self.baselines.eager = cost.eager(*counts, self._settings.threads)
            self.baselines.compile = cost.compiled(self.spec, *counts, self._settings.threads)
            self.baselines.compile_tried = True
            return
        if compile and not self.baselines.compile_tried:
            self._measure_compile()
            self._save()
        elif self.baselines.eager is None:
            self.baselines.eager = self._medians(self.oracle)[0]
            self._save()

    def _measure_compile(self) -> None:
        inputs = self.entry(self.base).inputs
        worker, known = self._workshop.compiler()
        with self._lease.working():
            oracle = Oracle(worker, self._code, self.weights_seed, self._settings)
            try:
                oracle.compile(inputs, known)
            except (WorkerError, WorkerDied) as error:
                self.baselines.compile_error = f"torch.compile: {error}"
        if not self.baselines.compile_error:
            self.baselines.eager, self.baselines.compile = self._medians(self.oracle, oracle)
        elif self.baselines.eager is None:
            self.baselines.eager = self._medians(self.oracle)[0]
        oracle.close()
        self.baselines.compile_tried = True

    def empty_call(self, oracle: Oracle, inputs: list[Array]) -> float:
        """Seconds of a reference call that computes nothing.  The least ever seen: on a busy machine an empty call may
        take long, and what is subtracted from a time must never be more than what was really in it."""
        least = min(oracle.seconds(inputs, null=True) for _ in range(_EMPTY_CALLS))
        self._empty = min(self._empty, least)
        return self._empty

    def _medians(self, *oracles: Oracle) -> list[float]:
        """Median seconds of one call of each reference, interleaved, the empty call subtracted."""
        entries = [self.entry(self.base + i).inputs for i in range(min(3, self.pool_size))]
        best = [float("inf")] * len(oracles)

        def seconds(oracle: Oracle, inputs: list[Array]) -> float:
            turn(oracle.worker)
            return oracle.seconds(inputs)

        with self._lease.timing(), taking_turns(*(oracle.worker for oracle in oracles)) as turn:
            empty = float("inf")
            for oracle in oracles:
                for inputs in entries[:2]:
                    seconds(oracle, inputs)
                empty = min(empty, self.empty_call(oracle, entries[0]))
            for _ in range(_BASELINE_ROUNDS):  # a burst of other work on the machine must not stay in the cache
                rows: list[list[float]] = []
                end = time.monotonic() + _BASELINE_SECONDS
                while len(rows) < 3 or (len(rows) < _BASELINE_CALLS and time.monotonic() < end):
                    rows.append([seconds(oracle, entries[len(rows) % len(entries)]) for oracle in oracles])
                middles = [statistics.median(column) for column in zip(*rows, strict=True)]
                if middles[0] < best[0]:
                    best = middles
                if statistics.median(abs(row[0] - middles[0]) for row in rows) < _STEADY * middles[0]:
                    break
        return [net(seconds, empty) for seconds in best]

    def _file(self) -> Path:
        how = [_CLOCK, self._workshop.torch, build.processor(), self._settings.threads]
        key = json.dumps([self._digest, *how])
        return Path(self._settings.cache) / "baselines" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _load(self) -> Baselines:
        if self._fixed:
            return Baselines()
        try:
            return Baselines(**json.loads(self._file().read_text()))
        except (OSError, ValueError, TypeError):
            return Baselines()

    def _save(self) -> None:
        file = self._file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(vars(self.baselines), new)
        os.replace(new.name, file)

    def close(self) -> None:
        self.oracle.close()
