"""Prepares a task: starts its reference worker, keeps a secret pool of inputs, and measures baselines.

A task is a PyTorch model that solutions must replace. The reference worker is a jailed process that runs this model.
The baselines are the model's times in eager PyTorch and with ``torch.compile``. All candidates (the solutions under
judgement) share the task's spec (the shapes and dtypes of its tensors), baselines and pool. The pool holds inputs and
the model's outputs for them. After every trial (one run of a candidate), new inputs replace the used ones. Every trial
also gets new values for some weights (``worker.values.weights``). The judge chooses every seed; the reference worker
only turns seeds into values. With simulated times (``sandbox.clock=model``), seeds and pool are fixed, so that
repeated runs agree bit for bit."""

import contextlib
import hmac
import math
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.machine import processor
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.jail.processes import TOO_LONG, WorkerDied, WorkerError, taking_turns
from cuda_agent.sandbox.judge.baselines import Baselines, baselines_file, read_baselines
from cuda_agent.sandbox.judge.decisions import share_of
from cuda_agent.sandbox.judge.memory.buffers import byte_count, call_bytes
from cuda_agent.sandbox.judge.reference_client import ReferenceClient, TaskKilled, Views, at_precision, memory_of, net
from cuda_agent.sandbox.judge.timing import cost, cross_check, roofline
from cuda_agent.sandbox.judge.worker_pool import WorkerPool

_BASELINE_CALLS, _BASELINE_SECONDS = 25, 0.6  # most calls, and most seconds, of one round
_EMPTY_CALLS = (4, 1)  # number of empty calls the first time, and later
_FEW_TIMED = {"cpu": 5, "cuda": 8}  # timed calls of a candidate whose time is clear early
_BASELINE_ROUNDS, _STEADY = 6, 0.05  # most rounds; one suffices if its calls differ by less than this
_SLOTS, _CONTEXT_BYTES = 2, 600 << 20  # slots of a reference; what a process with a CUDA context takes
_CAREFUL_ROUNDS = 12  # most rounds if ``careful``


@dataclass
class PoolEntry:
    """One set of inputs, and the outputs of the task's model for them. ``inputs`` holds one array per
    input tensor. ``outputs``, and ``exact`` (the outputs in float64), hold one array per output tensor. ``index`` is
    the entry's number in the task's pool (a secret supply of such sets), or -1 if the entry is not in the pool."""

    index: int
    inputs: list[Any]  # the judge's own copies: numpy arrays, or ``device.Array``
    outputs: list[Any]
    exact: list[Any] | None = None  # outputs in double precision (strict mode)
    weights: int = 0  # how often weights had been redrawn when ``outputs`` were computed; -1: no outputs yet


class PreparedTask:
    """A task that is ready for candidates, the solutions under judgement. A reference worker runs the task's model.
    Methods that run the model raise ``TaskError`` if the model fails. They hold the timing lease (``lease``), so that
    no other process times a kernel meanwhile. Only callers of ``exact`` and ``empty_call`` must hold the lease
    themselves. A reference worker that opens or compiles a model pauses whenever another process wants to time a
    kernel."""

    def __init__(self, code: str, digest: str, workers: WorkerPool) -> None:
        settings = workers.settings
        self._fixed = settings.clock == "model"
        self._secret = digest.encode() if self._fixed else secrets.token_bytes(16)
        self.settings = settings
        self.memory = memory_of(settings.device)
        self._fresh = 0
        self._inexact = False  # whether the model cannot run in double precision
        self._workers = workers
        self._code = code
        self._digest = digest
        self.lease = workers.lease
        self.weights_seed = self._seed(-1)  # no inputs are drawn from this seed
        self.best: float | None = None  # seconds of the fastest solution that a new context has confirmed
        self.mutants: dict[str, float | None] | None = None  # see ``mutants.survey``; None: not asked yet
        with self.lease.working():
            self.oracle = ReferenceClient(workers.reference(), code, self.weights_seed, settings)
        self.spec = self.oracle.spec
        self._call_bytes = size = call_bytes(self.spec)
        self._weight_bytes = sum(byte_count(tensor) for tensor in self.spec.weights.values())
        calls = settings.checks + settings.timed_calls + (cross_check.CALLS if settings.device == "cuda" else 0)
        self.pool_size = max(1, min(calls, self.memory.pool_bytes() // max(1, size)))
        self._pool: dict[int, PoolEntry] = {}  # a ring: an entry's place is its number modulo ``pool_size``
        self._varied: dict[str, PoolEntry | None] = {}  # inputs of the kinds that quick mode checks, by kind
        self._plain = bool(self.spec.weights)  # whether the next trial's weights may have to be drawn
        self._weights = 0  # how many times other weights were drawn
        self._varies = False  # whether every trial has other weights
        self.base = 0
        self._empty = math.inf
        self.empty_candidate: dict[str, float] = {}  # least seconds of a candidate's empty call, by format
        self.baselines = Baselines() if self._fixed else read_baselines(self._file())
        self.peaks = roofline.Peaks()

    def draw_weights(self) -> None:
        """Redraws some weights for the next trial of a candidate: those that the model's constructor does not draw at
        random. Does nothing if there are no such weights, or if they have been redrawn since the last trial. With
        simulated times, all trials share the same weights."""
        if self._plain:
            with self.lease.working():
                changed = self.oracle.draw_weights(self._variation())
            self._weights += changed
            self._plain = False
            self._varies = changed and not self._fixed

    def candidate_buffers(self, host_is_ours: bool, areas: Callable[[int, int], Any] | None) -> Any:
        """Makes the memory that the judge shares with one candidate, and writes the weights of the candidate's trial
        to it. The memory has slots; each slot holds the inputs and outputs of one call.

        Args:
            host_is_ours: Whether the sandbox's own code launches the kernels. If false on a GPU, the memory has enough
                slots for a chain (several calls in one request).
            areas: Returns an input area and an output area for two sizes in bytes. ``None`` means the device's
                default.

        Returns:
            ``Buffers`` of the module ``memory.host`` or ``memory.device``."""
        memory, chains = self.memory, self.settings.device == "cuda" and not host_is_ours
        slots = memory.chained_slots(self._call_bytes) if chains else memory.slots(self._call_bytes)
        areas = areas or (self._workers.areas.take if self.settings.device == "cpu" else None)
        made = {"areas": areas} if areas else {}
        with self.lease.working():
            buffers = memory.Buffers(self.spec, slots=slots, fixed=self._fixed, **made)
            self.draw_weights()
            buffers.set_weights(self.oracle.weights)
        return buffers

    def _variation(self) -> int | None:
        """Returns the seed for the weights that are redrawn for one trial. The seed is fixed if times are simulated."""
        return self.weights_seed if self._fixed else secrets.randbits(56)

    def rotate(self, used: int) -> None:
        """Replaces the inputs and weights that the last trial used, so that the next candidate cannot know them. Drops
        the ``used`` oldest entries of the pool (at least one), and calls ``draw_weights``. Also makes the entries that
        the next trial usually needs. Does nothing with simulated times."""
        if self._fixed:
            return
        self.base += max(1, used)
        self._plain = self._varies
        self._pool = {place: entry for place, entry in self._pool.items() if entry.index >= self.base}
        if self.oracle.alive:
            with contextlib.suppress(TaskError, driver.DriverError):  # the next evaluation meets the error again
                self.draw_weights()
                self._make_ahead()

    def drop_pool(self) -> None:
        """Frees all kept inputs and outputs. Pool entries that are needed later are drawn again from the same seeds."""
        self._pool.clear()
        self._varied.clear()

    def _make_ahead(self) -> None:
        """Makes the pool entries that the next trial usually needs. On the CPU, draws all inputs before it computes
        any outputs. After each computation, torch's idle threads spin for some milliseconds and would slow down the
        drawing."""
        calls = self.settings.checks + _FEW_TIMED[self.settings.device]
        ahead = range(self.base, self.base + min(self.pool_size, calls))
        self._draw([index for index in ahead if self._drawn(index) is None])
        for index in ahead:
            self.entry(index)

    def _drawn(self, index: int) -> PoolEntry | None:
        entry = self._pool.get(index % self.pool_size)
        return entry if entry and entry.index == index else None

    def _draw(self, numbers: Sequence[int]) -> None:
        """Draws the inputs of the pool entries with these ``numbers``. On a GPU, also computes the outputs of these
        entries."""
        seeds = [self._seed(number) for number in numbers]
        with self.lease.working():
            if self.settings.device == "cuda":
                drawn, weights = self.oracle.examples(seeds), self._weights
            else:
                drawn, weights = [(self.oracle.inputs(seed) or [], []) for seed in seeds], -1
        for number, example in zip(numbers, drawn, strict=True):
            self._pool[number % self.pool_size] = PoolEntry(number, *example, weights=weights)

    def entry(self, index: int) -> PoolEntry:
        """Returns the pool entry with the number ``index`` (from 0), with outputs for the current weights. Draws the
        entry if it is missing. On a GPU, also draws the entries that follow it, in the same request to the reference
        worker."""
        if (entry := self._drawn(index)) is None:
            self._draw(range(index, index + min(self.oracle.batch, self.pool_size)))
            entry = self._pool[index % self.pool_size]
        if entry.weights != self._weights:
            with self.lease.working():
                entry.outputs, entry.weights = self.oracle.outputs(entry.inputs), self._weights
        return entry

    def fresh(self, kind: str) -> PoolEntry | None:
        """Draws new inputs of ``kind`` (one of ``wire.KINDS``) that are not in the pool. The returned entry also holds
        the model's outputs, and in ``exact`` its outputs in float64. Returns ``None`` if the task has no inputs of
        this kind. For the kind ``normal``, ``exact`` is ``None`` if the model cannot run in float64 or its outputs are
        not finite. For any other kind, returns ``None`` in this case, and also if the model raises an error."""
        self._fresh += 1
        with self.lease.working():
            try:
                inputs = self.oracle.inputs(self._seed(-1 - self._fresh), kind)
                if inputs is None:
                    return None
                outputs = self.oracle.outputs(inputs)
            except TaskError:
                if kind == "normal" or not self.oracle.alive:
                    raise
                return None  # such as the inverse of a singular matrix
            exact = self.exact(inputs)
        return PoolEntry(-1, inputs, outputs, exact) if exact is not None or kind == "normal" else None

    def varied(self, kind: str) -> PoolEntry | None:
        """Returns new inputs of ``kind`` with outputs, as ``fresh`` does. Reuses them until the weights change,
        because drawing takes long. The reuse does not help a candidate that memorizes these inputs, because it must
        also pass checks on new inputs."""
        entry = self._varied.get(kind)
        if kind not in self._varied or (entry and entry.weights != self._weights):
            entry = self.fresh(kind)
            self._varied[kind] = entry = entry and replace(entry, weights=self._weights)
        return entry

    def exact(self, inputs: list[Any]) -> list[Any] | None:
        """Returns the model's outputs for ``inputs``, computed in float64. The last call of the reference worker must
        have been ``outputs`` with the same ``inputs``. Returns ``None`` if the model cannot run in float64, or if the
        float64 outputs or those of that last call contain an infinite or NaN value. The caller holds the timing
        lease."""
        if not self._inexact:
            try:
                return self.oracle.exact(inputs)
            except TaskKilled:
                raise
            except TaskError:
                self._inexact = True
        return None

    def outputs_at(self, inputs: list[Any], precision: str) -> list[Any]:
        """Returns the outputs of the task's model in eager PyTorch for ``inputs``, computed at ``precision`` (default,
        fp32, tf32 or bf16)."""
        with self.lease.working(), at_precision(self.oracle, precision):
            return self.oracle.outputs(inputs)

    def repeats(self) -> bool:
        """Returns whether a second call of the task's model on the same inputs gives the same outputs, within the
        tolerance."""
        with self.lease.working():
            first = self.entry(self.base)
            again = self.oracle.outputs(first.inputs)
            return not self.memory.mismatch(first.outputs, again, self.spec.outputs, self.settings.tolerance)[0]

    def compiled(self, mode: str, precision: str) -> ReferenceClient:
        """Returns a new reference client whose model is compiled with torch.compile's ``mode`` and computes at
        ``precision``. The caller closes the client.

        Raises:
            WorkerError: torch.compile fails, or took too long in an earlier measurement.
            WorkerDied: The worker dies while it compiles.
            TaskError: The task fails."""
        if self.baselines.compile_error.endswith(TOO_LONG):
            raise WorkerError(TOO_LONG)
        inputs = self.entry(self.base).inputs
        worker, known = self._workers.compiler()
        with self.lease.working(), contextlib.ExitStack() as failed:
            oracle = ReferenceClient(worker, self._code, self.weights_seed, self.settings)
            failed.callback(oracle.close)
            oracle.precision(precision)
            oracle.compile(inputs, known, mode)
            failed.pop_all()
        return oracle

    def _seed(self, index: int) -> int:
        return int.from_bytes(hmac.digest(self._secret, str(index).encode(), "sha256")[:7])

    def measured(self, mode: str) -> bool:
        """Returns whether all baselines that a verdict of ``mode`` needs are known. With simulated times, returns
        True."""
        return self._fixed or self.baselines.known(mode)

    def measure(self, compile: bool) -> None:
        """Measures the seconds per call of the model in eager PyTorch. If ``compile``, also measures those with
        ``torch.compile``, unless ``settings.compiled`` is false, and counts the model's floating-point operations and
        the bytes of outputs that it writes. Skips known values, but may measure eager again beside ``torch.compile``.
        With simulated times, computes both times from the model's operators instead."""
        if self._fixed:
            with self.lease.working():
                counts = self.oracle.count(self.entry(0).inputs)
            self.baselines.eager = cost.eager(*counts, self.settings.threads)
            self.baselines.compile = cost.compiled(self.spec, *counts, self.settings.threads)
            self.baselines.compile_tried = True
            return
        self.read_baselines()
        if compile and not self.baselines.compile_tried:
            self._measure_compile()
            self.save()
            if not self.settings.prober:
                self._make_ahead()  # the first candidate should not wait
        elif self.baselines.eager is None:
            self.baselines.eager = statistics.median(self.samples(self.oracle)[0])
            self.save()
        if compile and (base := self.baselines).views is None:
            try:
                with self.lease.working():
                    base.flops, base.written, base.views = self.oracle.account(self.entry(self.base).inputs)
            except TaskError:
                if not self.oracle.alive:
                    raise
                base.flops, base.written, base.views = 0, 0, []  # a model that does not run under observation
            self.save()
        if not self.peaks.bytes_per_second:
            self.peaks = self._peaks()

    def _peaks(self, again: bool = False) -> roofline.Peaks:
        if self.settings.device == "cuda":
            return roofline.of_gpu()
        key = f"{processor()}-{self.settings.threads}"
        file = Path(self.settings.cache) / "peaks" / f"{key}.json"
        return roofline.of_cpu(self.settings.threads, file, self.lease.timing, again)

    def below_physical_floor(self, seconds: float) -> str:
        """Checks whether the device can write the outputs of the task's model within ``seconds``. Returns the reason
        why it cannot, or an empty string if it can."""
        numbers = seconds, self.baselines.eager or 0.0, self.baselines.written or 0
        if doubt := roofline.below_physical_floor(*numbers, self.peaks):
            self.peaks = self._peaks(again=True)  # the first measurement may come from a busy machine
            doubt = roofline.below_physical_floor(*numbers, self.peaks)
        return doubt

    @property
    def bytes(self) -> int:
        """The approximate number of bytes that the task holds on the device. Counts the pool, the inputs that
        ``varied`` keeps (each with outputs in two precisions), the input and output buffers shared with the reference
        worker, the model's weights with torch's working memory, and the CUDA context."""
        calls = len(self._pool) + 3 * len(self._varied) + _SLOTS + self.oracle.batch + 1
        return calls * self._call_bytes + 3 * self._weight_bytes + _CONTEXT_BYTES

    @property
    def candidate_bytes(self) -> int:
        """The approximate bytes that a candidate needs on the device, including the judge's copies of its outputs."""
        calls = self.memory.slots(self._call_bytes) + 3
        return calls * self._call_bytes + 3 * self._weight_bytes + 2 * _CONTEXT_BYTES

    @property
    def views(self) -> Views:
        """One item per output of the task's model: its strides if the output is known to be a view of an input or a
        weight, else ``None``. An empty list instead of strides marks a view whose elements share memory."""
        known, count = self.baselines.views, len(self.spec.outputs)
        return known if known and len(known) == count else [None] * count

    def _measure_compile(self) -> None:
        base = self.baselines
        if not self.settings.compiled:
            base.eager, base.compile_tried = statistics.median(self.samples(self.oracle)[0]), True
            return
        for last in (False, True):
            try:
                oracle = self.compiled("", "default")
            except (WorkerError, WorkerDied) as error:
                if isinstance(error, WorkerDied) and error.reason == "killed" and not last:
                    continue  # the result would be kept for good, but the task may not have caused the kill
                base.compile_error = f"torch.compile: {error}"
                base.eager = statistics.median(self.samples(self.oracle)[0]) if base.eager is None else base.eager
            else:
                try:
                    eager, compiled = self.samples(self.oracle, oracle)
                    base.eager, base.compile = statistics.median(eager), statistics.median(compiled)
                    base.share = share_of(compiled, eager)
                except TaskError as error:  # for example, it compiles again for other values of the inputs
                    base.compile_error = f"torch.compile: {error}"
                    base.eager = statistics.median(self.samples(self.oracle)[0])  # raises if eager is at fault
                finally:
                    self.close(oracle)
            break
        base.compile_tried = True

    def empty_call(self, oracle: ReferenceClient, inputs: list[Any]) -> float:
        """Times calls of ``oracle`` that compute nothing. Returns the shortest time so far, in seconds; on a GPU,
        returns 0. The caller subtracts the result from the times of real calls. The shortest time is the safe choice:
        subtracting more would make real calls look too fast. The caller holds the timing lease."""
        if self.settings.device == "cuda":
            return 0.0  # the device's clock runs during the call only
        calls = _EMPTY_CALLS[self._empty < math.inf]
        self._empty = min(self._empty, *(oracle.seconds(inputs, null=True) for _ in range(calls)))
        return self._empty

    def samples(self, *oracles: ReferenceClient, careful: bool = False) -> list[list[float]]:
        """Times calls of the reference clients ``oracles`` in turn, in several rounds. Returns for each client the
        seconds of the calls in its best round, each minus the time of an empty call. The best round is the one with
        the least median, because other work on the machine only slows calls down. Timing ends after the first round in
        which the calls of each client vary little, or after round 6. If ``careful``, it ends when the two best medians
        of each client agree within 5 %, or after round 12."""
        entries = [self.entry(self.base + i).inputs for i in range(min(3, self.pool_size))]
        rounds: list[list[tuple[float, ...]]] = []  # of each round, the calls' seconds by reference

        def seconds(oracle: ReferenceClient, inputs: list[Any]) -> float:
            turn(oracle.worker)
            return oracle.seconds(inputs)

        workers = [oracle.worker for oracle in oracles if self.settings.device == "cpu"]
        with self.lease.timing(), taking_turns(*workers) as turn:
            empty = float("inf")
            for oracle in oracles:
                for inputs in entries[:2]:
                    seconds(oracle, inputs)
                empty = min(empty, self.empty_call(oracle, entries[0]))
            for _ in range(_CAREFUL_ROUNDS if careful else _BASELINE_ROUNDS):
                rows: list[list[float]] = []
                end = time.monotonic() + _BASELINE_SECONDS
                while len(rows) < 3 or (len(rows) < _BASELINE_CALLS and time.monotonic() < end):
                    rows.append([seconds(oracle, entries[len(rows) % len(entries)]) for oracle in oracles])
                columns = list(zip(*rows, strict=True))
                rounds.append(columns)
                medians = [[statistics.median(column) for column in columns] for columns in rounds]
                if all(map(_agree, zip(*medians, strict=True)) if careful else map(_steady, columns)):
                    break
        best = [min(of_one, key=statistics.median) for of_one in zip(*rounds, strict=True)]
        return [[net(seconds, empty) for seconds in column] for column in best]

    def close(self, oracle: ReferenceClient | None = None) -> None:
        """Ends the reference worker of ``oracle`` (default: the task's own reference client)."""
        with self.lease.working():
            (oracle or self.oracle).close()

    def read_baselines(self, mode: str = "quick") -> None:
        """Reads the baselines from the cache, where another judge process may have saved them. Does nothing if those
        that ``mode`` needs are known (``measured``)."""
        if not self.measured(mode):
            self.baselines = read_baselines(self._file())

    def _file(self) -> Path:
        return baselines_file(self.settings, self._digest, self._workers.torch)

    def save(self) -> None:
        """Writes the baselines to the cache, where other judge processes read them. Does nothing if times are
        simulated."""
        if not self._fixed:
            roofline.keep(self._file(), vars(self.baselines))


def _steady(calls: Sequence[float]) -> bool:
    middle = statistics.median(calls)
    return statistics.median(abs(seconds - middle) for seconds in calls) < _STEADY * middle


def _agree(rounds: Sequence[float]) -> bool:
    best, *others = sorted(rounds)
    return bool(others) and others[0] <= (1 + _STEADY) * best
