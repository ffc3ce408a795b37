"""Runs one trial of a candidate, the solution under judgement: starts its worker, and checks and times its calls.

A worker is a jailed process that runs the candidate; the judge is the trusted process that starts the worker. On the
CPU the judge times a call from request to answer, and subtracts the time of a call that computes nothing. On a GPU the
worker reports times of the device's clock, and ``cross_check`` checks them if the worker runs the solution's host code.
Between the candidate's calls, the judge times "eager": the task's own model in eager PyTorch. Every timed call has new
inputs, and the judge checks its outputs, so no timed call can skip its work unnoticed."""

import contextlib
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.jail.processes import JailedProcess, NotStarted, WorkerDied, WorkerError, taking_turns
from cuda_agent.sandbox.judge import decisions, legality, strict
from cuda_agent.sandbox.judge.decisions import CandidateRefused
from cuda_agent.sandbox.judge.prepared import PoolEntry, PreparedTask
from cuda_agent.sandbox.judge.reference_client import at_precision, net, seconds_of_call
from cuda_agent.sandbox.judge.shared_context import SharedContext
from cuda_agent.sandbox.judge.timing import cost, occupancy
from cuda_agent.sandbox.judge.timing.cross_check import CrossCheck
from cuda_agent.sandbox.judge.worker_pool import WorkerPool
from cuda_agent.sandbox.messages import EvaluateRequest, WorkerOperation
from cuda_agent.sandbox.wire import FormatTraits, Verdict

_NULL_CALLS = (7, 2)  # empty calls of the first worker of a task and format, and of later ones
_ALL_ANCHORED = 5  # timed calls after each of which eager is timed; later after every second
_MORE_CALLS, _MORE_SECONDS = 4, 3.0  # most calls as a multiple of the usual most, and most seconds, while undecided
_OBSERVE_SECONDS = 5.0  # limit of one observed call, the profiler's start included
_STRAY = 1e-6  # share of a trial's timed values (one at least) that may be off by up to twice the tolerance
_DRIFT = 0.01  # relative drift of the eager anchor above which the baseline is measured again
_FINDING_SECONDS = 30.0  # added for a solution that compiled: torch.compile traces again to find its result
_ALONE_CALLS, _BESIDE = 3, {"cpu": 1.05, "cuda": 1.03}  # eager calls without the candidate; slowdown allowed beside it
_KEPT = "checked with the weights of the constructor alone: others make the reference's outputs not finite"
_BUSY = "calls of the same work differ much: the interval of the speed-up is wider than 20 %"
_FILES = ("runtime", "library", "image")  # files of a load request
_HARMLESS = ("ok", *decisions.BELIEVED)  # statuses of plans after which a shared context may live on


class Trial:
    """One run of a candidate. With ``shared``, its worker comes from this shared CUDA context and may go back to it."""

    def __init__(
        self,
        workers: WorkerPool,
        prepared: PreparedTask,
        request: EvaluateRequest,
        verdict: Verdict,
        shared: SharedContext | None = None,
    ) -> None:
        self._workers, self._settings, self._lease = workers, workers.settings, workers.lease
        self._prepared, self._memory, self._shared = prepared, prepared.memory, shared
        self._request = request
        self._traits = FormatTraits(**request["traits"])
        self._verdict = verdict
        self._next = prepared.base
        self._fixed = self._settings.clock == "model"
        self._null = 0.0
        self._cross: CrossCheck | None = None  # on a GPU, if the host code is the solution's
        self._anchor: float | None = None  # eager's median beside the candidate, if it counts
        self._worker: JailedProcess | None = None
        self._loaded = False
        self._buffers = prepared.candidate_buffers(self._traits.host_is_ours, shared.areas if shared else None)
        if prepared.oracle.kept:
            verdict.advice.append(_KEPT)
        self._audited = self._off = 0  # values of timed calls, and how many of them were off
        self._seen: list[list[Any]] = []  # outputs of earlier calls: a later call must not give them again

    def run(self, timed: bool) -> None:
        """Checks the candidate and, if ``timed``, times it. Raises ``CandidateRefused`` or ``TaskError``."""
        strictly = self._verdict.mode == "strict"
        self.start()
        (self.strict if strictly else self.check)()
        if timed and self._fixed:
            self._verdict.seconds = cost.candidate(self._request, self._prepared.spec, self._settings.threads)
        elif timed and strictly:
            self.strict_time()
        elif timed:
            self.time()
        if self._traits.untimed:
            self.observe()
        elif timed:
            said = self._verdict.strict or {}
            peaks, spec = self._prepared.peaks, self._prepared.spec
            self._verdict.peak_flops = peaks.operations_for(spec, said.get("precision", ""))
            self.observe()
            self.eager_alone()

    def start(self) -> None:
        """Starts the candidate's worker and loads the solution. In between, times calls that compute nothing: on the
        CPU, and on a GPU if it runs the solution's host code."""
        begin = time.perf_counter()
        on_gpu, prepared = self._settings.device == "cuda", self._prepared
        with self._lease.working(), self._judged():
            self._open()
        if self._settings.clock == "real" and not on_gpu:
            known, format = prepared.empty_candidate, self._request["format"]
            inputs = prepared.entry(self._next).inputs
            with self._lease.timing(), self._judged():
                calls = range(_NULL_CALLS[format in known])
                least = min(self._timed(inputs, WorkerOperation.RUN_EMPTY)[0] for _ in calls)
            self._null = known[format] = min(least, known.get(format, least))
        if on_gpu and not self._traits.host_is_ours:
            inputs = prepared.entry(self._next).inputs
            with self._lease.timing(), self._judged():
                host = prepared.oracle.host_seconds(inputs)
                empty = partial(self._chained, WorkerOperation.RUN_EMPTY_CHAIN)
                self._cross = CrossCheck(len(self._buffers.slots), lambda *chain: empty(*chain)[0], host)
        self._loaded = True
        with self._lease.working(), self._judged(decisions.LOADING):
            self._load()
        self._spent("start", begin)

    def _open(self, profiler: bool = False) -> None:
        """Starts a worker (or takes the shared one) and maps the buffers. ``profiler`` starts torch's profiler."""
        buffers, place = self._buffers, self._request["load"].get("place")
        start = partial(self._workers.candidate, place, profiler, self._verdict.mode == "strict")
        self._worker = worker = self._shared.take() if self._shared else start()
        worker.verified = self._settings.device == "cpu" or not self._traits.host_is_ours
        worker.seconds = self._settings.run_seconds + (_FINDING_SECONDS if place else 0.0)
        options = {
            "host_is_ours": self._traits.host_is_ours, "rule": self._traits.rule, "spec": buffers.spec.to_json(),
            "views": self._prepared.views,
        }  # fmt: skip
        worker.call(WorkerOperation.MAP_BUFFERS, options | buffers.places, fds=buffers.descriptors)

    def _load(self) -> None:
        worker, load = self._worker, self._request["load"]
        assert worker
        files = {name: worker.hand_over(Path(load[name]), name) for name in _FILES if load.get(name)}
        seeds = {"seed": self._prepared.weights_seed, "redrawn": self._prepared.oracle.redrawn}
        told = worker.call(WorkerOperation.LOAD_SOLUTION, load | files | seeds)
        if self._settings.device == "cuda":
            self._verdict.kernels = occupancy.of_solution(load, told)

    def check(self) -> None:
        begin = time.perf_counter()
        for number in range(self._settings.checks):
            outputs = self._call(entry := self._take(), f"in check {number + 1}")
            with self._lease.working():
                self._compare(entry, outputs, f"check {number + 1} of {self._settings.checks}")
            self._verdict.checks += 1
        self._verdict.checks += strict.check_kinds(self._prepared, self._call, self._settings)
        self._spent("check", begin)

    def strict(self) -> None:
        """Checks the candidate on every kind of inputs that the task allows, such as large or sparse ones. Also
        measures the errors of the candidate and of eager against the task's model in float64."""
        begin = time.perf_counter()
        verdict = self._verdict
        verdict.strict, wrong = strict.check(self._prepared, self._call, self._settings.tolerance)
        if wrong:
            raise CandidateRefused("wrong", wrong)
        verdict.checks = verdict.strict["inputs"]
        self._spent("check", begin)

    def strict_time(self) -> None:
        """Times the candidate and eager (in fp32) in turn, until the speed-up's interval is narrow or time is up."""
        verdict, yard = self._verdict, strict.strict_baselines(self._prepared)
        begin = time.perf_counter()
        with at_precision(self._prepared.oracle, "fp32"), self._alternating() as (candidate, eager, first):
            verdict.samples, anchors = strict.time_pairs(lambda: candidate()[1], lambda: eager(first))
            verdict.seconds = self._believed(statistics.median(verdict.samples))
        strict.report(verdict, anchors, yard)
        self._anchor = verdict.eager_seconds
        self._spent("time", begin)

    @contextlib.contextmanager
    def _alternating(self) -> Iterator[tuple[Callable[[], tuple[list[Any], float]], Callable[[list[Any]], float], Any]]:
        """Yields two functions and inputs for the second, and holds the timing lease. ``candidate()`` times and checks
        a call on new inputs; it returns these inputs and the seconds. ``eager(inputs)`` returns eager's seconds."""
        prepared, oracle, worker = self._prepared, self._prepared.oracle, self._worker
        assert worker
        workers = (worker, oracle.worker) if self._settings.device == "cpu" else ()
        with self._lease.timing(), taking_turns(*workers) as turn:
            turn(oracle.worker)
            first = prepared.entry(prepared.base).inputs
            empty = prepared.empty_call(oracle, first)

            def candidate() -> tuple[list[Any], float]:
                entry = self._take()
                turn(worker)
                with self._judged("in a timed call"):
                    seconds, outputs = self._timed(entry.inputs)
                self._compare(entry, outputs, "an audit of a timed call", audit=True)
                turn(oracle.worker)
                return entry.inputs, net(seconds, self._null)

            yield candidate, lambda inputs: net(oracle.seconds(inputs), empty), first

    def _believed(self, told: float) -> float:
        """Returns the seconds per call for the verdict. They are ``told`` (the median of the samples), or the judge's
        lower bound if ``told`` is clearly below that bound. Scales the samples so that their median is the result.
        Raises ``CandidateRefused`` if ``told`` is too far below it, or if the device cannot write outputs so fast. Does
        not check plans (solutions without host code). The caller holds the timing lease."""
        seconds, doubt = told, ""
        if self._cross:
            with self._judged("in a timed call"):
                seconds, doubt = self._cross.believe(told, self._chain)
            if doubt:
                self._doubt(doubt)
        if not self._traits.host_is_ours:
            doubt = self._prepared.below_physical_floor(seconds)
        if doubt:
            raise CandidateRefused("cheat", doubt)
        self._verdict.samples = [sample * seconds / told for sample in self._verdict.samples]
        return seconds

    def _doubt(self, doubt: str) -> None:
        """Ends the worker and raises ``CandidateRefused``: the judge's clock contradicts the worker's times. The status
        is ``infra`` if another process uses the device, and otherwise ``cheat`` with a second trial."""
        self.end()
        self._verdict.samples.clear()
        if self._memory.shared(self._prepared.peaks.bytes_per_second):
            raise CandidateRefused("infra", f"{decisions.TOO_BUSY}: another process uses the device")
        raise CandidateRefused("cheat", doubt, retryable=True)

    def observe(self) -> None:
        """Records in the verdict which kernels run, by extra calls after the timed ones. A failure only adds advice.
        Outside strict mode a plan needs no extra call, and other formats are observed only on request."""
        request, verdict = self._request, self._verdict
        plan, strict_mode = self._traits.host_is_ours, verdict.mode == "strict"
        nodes = request["load"]["nodes"] if plan else []
        if plan and (self._fixed or not strict_mode):
            verdict.ran = legality.of_plan(nodes)
            return
        if not strict_mode and not request.get("observe"):
            return
        begin = time.perf_counter()
        told, missing = self._observed(WorkerOperation.OBSERVE_OPERATORS)
        if plan:
            verdict.ran = legality.of_plan(nodes, told)
        else:
            library = b""
            with contextlib.suppress(OSError):
                library = Path(request["load"].get("library") or "").read_bytes()
            kernels: Any = None
            if strict_mode and self._settings.device == "cuda" and not missing:
                kernels, missing = self._profiled()
            ran = legality.of_call([kernels, told], request["files"].values(), library)
            if self._fixed:  # shares are times, and their order follows from times
                ran = sorted((replace(r, share=None) for r in ran), key=lambda r: (r.name, r.kind))
            verdict.ran = ran
            verdict.advice += legality.advice(verdict.ran, self._traits.own_work)
        if missing:
            verdict.advice.append(f"not observed: {missing}"[:300])
        self._spent("observe", begin)

    def _profiled(self) -> tuple[Any, str]:
        """Returns the kernels of one call and "", or ``None`` and the reason why they are unknown. Starts a new worker,
        because the profiler must start before the worker enters the jail."""
        self.end()
        try:
            with self._lease.working():
                self._open(profiler=True)
                self._load()
        except (WorkerDied, WorkerError, NotStarted) as error:
            return None, str(error)
        _, missing = self._observed(WorkerOperation.OBSERVE_KERNELS, first=True)
        return (None, missing) if missing else self._observed(WorkerOperation.OBSERVE_KERNELS)

    def _observed(self, operation: WorkerOperation, first: bool = False) -> tuple[Any, str]:
        """Runs one more call, of which the worker records operators or kernels. Returns its report and "", or ``None``
        and the reason why there is none. ``first`` lifts the limit ``_OBSERVE_SECONDS``."""
        worker = self._worker
        if worker is None or not worker.alive:
            return None, "the solution has ended"
        try:
            with self._lease.working():
                entry = self._take()
                worker.stop()
                slot = secrets.randbelow(len(self._buffers.slots))
                self._buffers.fill(slot, entry.inputs)
                if not first:
                    worker.seconds = min(self._settings.run_seconds, _OBSERVE_SECONDS)
                told = worker.call(operation, slot=slot)
                outputs, tensors = self._buffers.written(slot), self._prepared.spec.outputs
                wrong = self._memory.mismatch(entry.outputs, outputs, tensors, self._settings.tolerance)[0]
        except (WorkerDied, WorkerError, TaskError, driver.DriverError) as error:
            return None, str(error)
        return (None, f"another answer while it was observed: {wrong}") if wrong else (told, "")

    def _spent(self, phase: str, begin: float) -> None:
        """Adds the seconds since ``begin`` to those of ``phase`` in the verdict."""
        phases = self._verdict.phases
        phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - begin

    def time(self) -> None:
        """Times calls of the candidate, with calls of eager in between, until it is clear whether the candidate is 5 %
        faster than eager and ``torch.compile``. Raises ``CandidateRefused`` (``infra``) if that stays unclear."""
        begin = time.perf_counter()
        verdict, base, most = self._verdict, self._prepared.baselines, self._settings.timed_calls
        anchors: list[float] = []
        with self._alternating() as (candidate, eager, first):
            eager(first)
            for number in range(1, _MORE_CALLS * most + 1):
                inputs, seconds = candidate()
                verdict.samples.append(seconds)
                if number <= _ALL_ANCHORED or number % 2 == 0:
                    anchors.append(eager(inputs))
                elapsed = time.perf_counter() - begin
                speedups = decisions.speedups_of(verdict.samples, anchors, base.compile_share)
                undecided = decisions.is_undecided(speedups, decisions.spread(anchors))
                fewest = min(most, decisions.fewest_calls(self._settings.device, elapsed, speedups[0]))
                if number >= fewest and decisions.is_clear(speedups):
                    break
                if number >= most and (elapsed > _MORE_SECONDS or not undecided):
                    break
            verdict.seconds = self._believed(statistics.median(verdict.samples))
            speedups = decisions.speedups_of(verdict.samples, anchors, base.compile_share)
            undecided = undecided and decisions.is_undecided(speedups, decisions.spread(anchors))
            if base.eager and abs(statistics.median(anchors) / base.eager - 1) > _DRIFT:
                self._anchor = statistics.median([*anchors, eager(first), eager(first)])
                verdict.eager_seconds = self._anchor
                if verdict.compile_seconds is not None:
                    verdict.compile_seconds *= self._anchor / base.eager
        verdict.interval = [*speedups[0]]
        verdict.compile_interval = [*speedups[1]] if speedups[1:] else None
        self._spent("time", begin)
        if undecided:
            raise decisions.too_busy(speedups)
        if decisions.disagree(*speedups[0]):
            verdict.advice.append(_BUSY)

    def eager_alone(self) -> None:
        """Times eager again without the candidate. If eager is clearly faster alone, scales the verdict's baselines
        down, so a candidate gains nothing by slowing eager. Does nothing if they were timed without a candidate."""
        if self._anchor is None:
            return
        if not self._shared:
            self.end()  # GPU kernels of a stopped process keep running
        begin = time.perf_counter()
        verdict, prepared, oracle = self._verdict, self._prepared, self._prepared.oracle
        inputs = prepared.entry(prepared.base).inputs
        single = at_precision(oracle, "fp32") if verdict.strict else contextlib.nullcontext()
        with self._lease.timing(), single:
            empty = prepared.empty_call(oracle, inputs)
            alone = statistics.median(net(oracle.seconds(inputs), empty) for _ in range(_ALONE_CALLS))
        verdict.eager_seconds = verdict.eager_seconds or self._anchor
        decisions.scale_baselines(verdict, min(1.0, _BESIDE[self._settings.device] * alone / self._anchor))
        self._spent("time", begin)

    def _take(self) -> PoolEntry:
        """Returns the next pool entry: inputs that the candidate has not seen yet, with the expected outputs."""
        entry = self._prepared.entry(self._next)
        self._next += 1
        return entry

    def _timed(
        self, inputs: Sequence[Any], operation: WorkerOperation = WorkerOperation.RUN
    ) -> tuple[float, list[Any]]:
        assert self._worker
        slot = secrets.randbelow(len(self._buffers.slots))
        self._worker.stop()
        self._buffers.fill(slot, inputs)
        self._memory.flush()
        wall, told = self._worker.timed(operation, slot, self._cross.delay if self._cross else 0)
        outputs = self._buffers.written(slot)
        if self._cross:
            self._cross.heard(told[1])
        return seconds_of_call(self._settings.device, wall, told), outputs

    def _chain(self, count: int, delay: int) -> tuple[float, float]:
        """Runs a chain, ``count`` calls on different inputs in one request, after a ``delay`` in units of
        ``DELAY_UNIT``. Checks the outputs. Returns the wall seconds, and the host's seconds to enqueue the calls."""
        entries = [self._take() for _ in range(count)]
        assert self._worker
        self._worker.stop()
        for slot, entry in enumerate(entries):
            self._buffers.fill(slot, entry.inputs)
        wall, host, outputs = self._chained(WorkerOperation.RUN_CHAIN, count, delay)
        for entry, own in zip(entries, outputs, strict=True):
            self._compare(entry, own, "an audit of a timed call", audit=True)
        return wall, host

    def _chained(self, operation: WorkerOperation, count: int, delay: int) -> tuple[float, float, list[list[Any]]]:
        """Runs a chain of ``count`` calls, of the solution or empty ones by ``operation``. Returns the wall seconds
        until all outputs are copied, the host's seconds to enqueue the calls, and the outputs of each call."""
        assert self._worker
        self._worker.stop()
        self._memory.flush()
        begin = time.perf_counter()
        wall, told = self._worker.timed(operation, count, delay)
        seconds_of_call(self._settings.device, wall, told)  # refuses invalid numbers
        outputs = [self._buffers.written(slot) for slot in range(count)]
        return time.perf_counter() - begin, told[1], outputs

    def _call(self, entry: PoolEntry, when: str) -> list[Any]:
        with self._lease.working(), self._judged(when):
            return self._timed(entry.inputs)[1]

    @contextlib.contextmanager
    def _judged(self, when: str = "") -> Iterator[None]:
        """Converts a worker's death or error to ``CandidateRefused``. ``when`` ends the message: "in a timed call"."""
        try:
            yield
        except (WorkerDied, WorkerError) as error:
            raise decisions.refusal(error, self._loaded, when) from None

    def _compare(self, entry: PoolEntry, outputs: list[Any], when: str, audit: bool = False) -> None:
        prepared, verdict = self._prepared, self._verdict
        cap = math.inf if verdict.mode == "strict" else 1.0
        tolerance, tensors = self._settings.tolerance, prepared.spec.outputs
        message, error = self._memory.mismatch(entry.outputs, outputs, tensors, tolerance, cap)
        verdict.max_error = max(error, verdict.max_error or 0.0)
        good = not message
        if audit:
            self._audited += sum(math.prod(tensor.shape) for tensor in tensors)
            if message and not (far := self._memory.mismatch(entry.outputs, outputs, tensors, 2 * tolerance, cap)[0]):
                self._off += self._memory.values_off(entry.outputs, outputs, tensors, tolerance, cap)
                good = self._off <= max(1, _STRAY * self._audited)
        if audit and not good and verdict.mode == "strict":
            good = strict.excused(prepared, entry, outputs)
        if not good:
            stale = any(self._memory.same(outputs, earlier) for earlier in self._seen)
            if stale or audit:
                what = "the outputs of an earlier call were given again" if stale else "the outputs are wrong"
                raise CandidateRefused("cheat" if stale or far else "wrong", f"{when}: {what}: {message}")
            raise CandidateRefused("wrong", f"{when}: {message}")
        if len(self._seen) < 2:
            self._seen.append(outputs)

    def end(self) -> None:
        if self._worker:
            with self._lease.working():  # the device takes a while to release what the worker held
                self._worker.kill()

    def give_back(self) -> bool:
        """Gives the worker back to its shared CUDA context. Returns whether there is one and it computes correctly."""
        if not self._shared or not self._worker:
            return False
        worker, self._worker = self._worker, None
        with self._lease.working():
            return self._shared.give_back(worker, self._settings.run_seconds)

    def close(self) -> None:
        if self._verdict.status not in _HARMLESS or not self.give_back():
            self.end()
        if not self._shared:
            self._buffers.close()
        self._prepared.rotate(self._next - self._prepared.base)
