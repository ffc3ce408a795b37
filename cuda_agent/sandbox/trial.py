"""One trial: a candidate's worker, checked on secret inputs and then timed, and what ends it.

A candidate is checked on fresh secret inputs first; then it is timed by this process's own clock, from the request to
the answer and minus the empty call (measured before the candidate is loaded), interleaved with an eager anchor.  Every
call, timed or not, has inputs of its own and its outputs checked: there is no call that a candidate could recognise
and leave out.  Only here and in ``judge`` is a status decided.
"""

import contextlib
import math
import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_agent.sandbox import cost, strict
from cuda_agent.sandbox.buffers import byte_count
from cuda_agent.sandbox.crosscheck import CrossCheck
from cuda_agent.sandbox.oracle import net, seconds_of_call
from cuda_agent.sandbox.prepared import Entry, Prepared
from cuda_agent.sandbox.processes import Worker, WorkerDied, WorkerError, taking_turns
from cuda_agent.sandbox.wire import Verdict, baseline
from cuda_agent.sandbox.workshop import Workshop

_SLOTS_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}  # three slots for what is smaller, two for the rest
_NULL_CALLS = (7, 2)  # of the first worker of a task and lane, and of a later one
_FEWEST_TIMED = {"cpu": 4, "cuda": 12}  # calls on a GPU cost little beside the start of its worker
_ENOUGH_SECONDS = 0.2
_DRIFT = 0.01  # of the eager anchor: beyond it the baseline is measured anew
_FILES = ("runtime", "library", "image")  # of what is loaded
_STATUS = {
    "timeout": "timeout", "crash": "crash", "memory": "crash", "threads": "crash", "protocol": "crash",
    "processes": "crash", "killed": "crash",
}  # fmt: skip


class Refused(Exception):
    """Ends a trial: the candidate's fault.  ``doubtful``: or it may be another's; then it gets a second trial."""

    def __init__(self, status: Any, message: str, doubtful: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.doubtful = doubtful


class Trial:
    """One candidate worker, from start to the last timed call."""

    def __init__(self, workshop: Workshop, prepared: Prepared, request: dict[str, Any], verdict: Verdict) -> None:
        self._settings = workshop.settings
        self._lease = workshop.lease
        self._workshop = workshop
        self._memory = prepared.memory
        self._prepared = prepared
        self._request = request
        self._verdict = verdict
        self._next = prepared.base
        self._fixed = self._settings.clock == "model"
        self._null = 0.0
        self._cross: CrossCheck | None = None  # on a GPU, in the lanes whose host code is not ours
        self._worker: Worker | None = None
        self._loaded = False
        spec = prepared.spec
        size = sum(byte_count(t) for t in (*spec.inputs, *spec.outputs))
        slots = 3 if size <= _SLOTS_BYTES[self._settings.device] else 2
        self._buffers = self._memory.Buffers(spec, slots=slots, fixed=self._fixed)
        self._buffers.set_weights(prepared.oracle.weights)
        self._seen: list[list[Any]] = []  # outputs of earlier calls: a later call must not give them again

    def run(self, timed: bool) -> None:
        """Start, check and, if ``timed``, time.  Raises ``Refused``."""
        strictly = self._verdict.mode == "strict"
        self.start()
        if strictly:
            self.strict()
        else:
            self.check()
        if timed and self._fixed:
            self._verdict.seconds = self.cost()
        elif timed and strictly:
            self.strict_time()
        elif timed:
            self.time()

    def start(self) -> None:
        """Fork, time the empty call, load."""
        begin = time.perf_counter()
        request, buffers = self._request, self._buffers
        options = {
            "lane": request["lane"],
            "spec": buffers.spec.to_json(),
            "layout": buffers.layout,
            "weights": buffers.weights,
            "sizes": buffers.sizes,
        }
        with self._lease.working():
            self._worker = worker = self._workshop.candidate()
        worker.seconds = self._settings.run_seconds
        load = request["load"] | {
            name: worker.hand_over(Path(request["load"][name]), name) for name in _FILES if request["load"].get(name)
        }
        with self._lease.working(), self._judged():
            worker.call("B", options, fds=buffers.descriptors)
        if self._settings.clock == "real" and self._settings.device == "cpu":
            known, lane = self._prepared.empty_candidate, request["lane"]
            inputs = self._prepared.entry(self._next).inputs
            with self._lease.timing(), self._judged():
                least = min(self._timed(inputs, kind="N")[0] for _ in range(_NULL_CALLS[lane in known]))
            self._null = known[lane] = min(least, known.get(lane, least))
        if self._settings.device == "cuda" and request["lane"] != "plan":
            with self._lease.timing(), self._judged():
                self._cross = CrossCheck(self._empty_wall)
        self._loaded = True
        try:
            with self._lease.working(), self._judged("while it was loaded"):
                worker.call("L", load | {"seed": self._prepared.weights_seed})
        except WorkerError as error:
            raise Refused("build_error", str(error)) from None
        self._verdict.phases["start"] = time.perf_counter() - begin

    def check(self) -> None:
        begin = time.perf_counter()
        for number in range(self._settings.checks):
            entry = self._take()
            with self._lease.working():
                outputs = self._call(entry.inputs, f"in check {number + 1}")
                self._compare(entry, outputs, f"check {number + 1} of {self._settings.checks}")
            self._verdict.checks += 1
        self._verdict.phases["check"] = time.perf_counter() - begin

    def strict(self) -> None:
        """Check on inputs of many kinds, with errors against double precision."""
        begin = time.perf_counter()
        prepared, verdict = self._prepared, self._verdict

        def call(entry: Entry, when: str) -> list[Any]:
            with self._lease.working():
                return self._call(entry.inputs, when)

        verdict.strict, wrong = strict.check(prepared, call, self._settings.tolerance)
        if wrong:
            raise Refused("wrong", wrong)
        verdict.checks = verdict.strict["inputs"]
        verdict.phases["check"] = time.perf_counter() - begin

    def strict_time(self) -> None:
        """Time in turn with eager, in single precision, until the speed-up's interval is narrow."""
        prepared, verdict = self._prepared, self._verdict
        yard = strict.yardstick(prepared)
        begin = time.perf_counter()
        assert self._worker and verdict.strict
        oracle = prepared.oracle
        oracle.precision("fp32")
        alternating = (self._worker, oracle.worker) if self._settings.device == "cpu" else ()
        with self._lease.timing(), taking_turns(*alternating) as turn:
            turn(oracle.worker)
            first = prepared.entry(prepared.base, timing=True)
            empty = prepared.empty_call(oracle, first.inputs)

            def candidate() -> float:
                entry = self._take(timing=True)
                assert self._worker
                turn(self._worker)
                with self._judged("in a timed call"):
                    seconds, outputs = self._timed(entry.inputs)
                self._compare(entry, outputs, "an audit of a timed call", audit=True)
                turn(oracle.worker)
                return net(seconds, self._null)

            def eager() -> float:
                return net(oracle.seconds(first.inputs), empty)

            try:
                verdict.samples, anchors = strict.time_pairs(candidate, eager)
            finally:
                if oracle.alive:
                    oracle.precision("default")
        verdict.seconds = self._believed(statistics.median(verdict.samples))
        verdict.eager_seconds = statistics.median(anchors)
        drift = verdict.eager_seconds / yard["seconds"][baseline("eager", "fp32")]
        baselines = {name: seconds * drift for name, seconds in yard["seconds"].items()}
        verdict.compile_seconds = baselines.get(baseline("compile", "fp32"))
        own = verdict.strict["kinds"].get("normal")
        verdict.strict |= {
            "baselines": baselines,
            "failed": yard["failed"],
            "interval": strict.interval(verdict.samples, anchors),
            "eager_errors": yard["errors"],
            "precision": strict.precision_of(own, yard["errors"]) if own is not None else "",
        }
        verdict.phases["time"] = time.perf_counter() - begin

    def _believed(self, told: float) -> float:
        """Raises ``Refused`` when the judge's own clock does not allow a median that the device's clock gave."""
        if not self._cross:
            return told
        seconds, doubt = self._cross.believe(told)
        if doubt:
            raise Refused("cheat", doubt)
        return seconds

    def cost(self) -> float:
        request, spec, threads = self._request, self._prepared.spec, self._settings.threads
        if request["lane"] == "plan":
            return cost.plan(request["load"], spec, request["files"], threads)
        return cost.extension(spec, request["files"], threads)

    def time(self) -> None:
        """Time as few calls as tell whether the candidate is 5 % faster, against an interleaved eager anchor."""
        begin = time.perf_counter()
        prepared, verdict = self._prepared, self._verdict
        fewest = _FEWEST_TIMED[self._settings.device]
        first = prepared.entry(prepared.base).inputs
        eager: list[float] = []
        assert self._worker
        candidate, reference = self._worker, prepared.oracle.worker
        alternating = (candidate, reference) if self._settings.device == "cpu" else ()
        with self._lease.timing(), taking_turns(*alternating) as turn:
            turn(reference)
            empty = prepared.empty_call(prepared.oracle, first)
            prepared.oracle.seconds(first)
            for number in range(self._settings.timed_calls):
                entry = self._take(timing=True)
                turn(candidate)
                with self._judged("in a timed call"):
                    seconds, outputs = self._timed(entry.inputs)
                self._compare(entry, outputs, "an audit of a timed call", audit=True)
                verdict.samples.append(net(seconds, self._null))
                turn(reference)
                if number % 2 == 0:
                    eager.append(net(prepared.oracle.seconds(entry.inputs), empty))
                if time.perf_counter() - begin > _ENOUGH_SECONDS:
                    fewest = min(fewest, _FEWEST_TIMED["cpu"])  # slow calls differ by less
                if number + 1 >= fewest and self._clear(verdict.samples, eager):
                    break
            baseline = prepared.baselines.eager or 0.0
            if baseline and abs(statistics.median(eager) / baseline - 1) > _DRIFT:
                for _ in range(2):
                    eager.append(net(prepared.oracle.seconds(first), empty))
                drift = statistics.median(eager) / baseline
                verdict.eager_seconds = baseline * drift
                if verdict.compile_seconds is not None:
                    verdict.compile_seconds *= drift
        verdict.seconds = self._believed(statistics.median(verdict.samples))
        verdict.phases["time"] = time.perf_counter() - begin

    def _clear(self, samples: Sequence[float], eager: Sequence[float]) -> bool:
        """Whether more calls could still change what is more than 5 % faster than what."""
        mine, anchor = statistics.median(samples), statistics.median(eager)
        spread = statistics.median(abs(s - mine) for s in samples) / mine
        spread += statistics.median(abs(s - anchor) for s in eager) / anchor
        base = self._prepared.baselines
        rivals = [anchor]
        if base.compile is not None and base.eager:
            rivals.append(base.compile * anchor / base.eager)
        return all(abs(mine / (0.95 * rival) - 1) > 0.03 + 2 * spread for rival in rivals)

    # ------------------------------------------------------------------------------------------------------------ calls

    def _take(self, timing: bool = False) -> Entry:
        """The next inputs that this candidate has not seen.  ``timing``: the lease is held already."""
        entry = self._prepared.entry(self._next, timing)
        self._next += 1
        return entry

    def _timed(self, inputs: Sequence[Any], kind: str = "R") -> tuple[float, list[Any]]:
        assert self._worker
        slot = secrets.randbelow(len(self._buffers.slots))
        self._worker.stop()
        self._buffers.fill(slot, inputs)
        self._memory.flush()
        begin = time.perf_counter()
        wall, told = self._worker.timed(kind, slot, self._cross.delay if self._cross else 0)
        outputs = self._buffers.outputs(slot)
        seconds = seconds_of_call(self._settings.device, wall, told)
        if self._cross:
            self._cross.add(time.perf_counter() - begin, told[1])
        return seconds, outputs

    def _empty_wall(self, delay: int) -> float:
        """Seconds from the request of an empty call until its outputs are copied."""
        assert self._worker
        self._worker.stop()
        self._memory.flush()
        begin = time.perf_counter()
        self._worker.timed("N", 0, delay)
        self._buffers.outputs(0)
        return time.perf_counter() - begin

    def _call(self, inputs: Sequence[Any], when: str) -> list[Any]:
        with self._judged(when):
            return self._timed(inputs)[1]

    @contextlib.contextmanager
    def _judged(self, when: str = "") -> Any:
        try:
            yield
        except WorkerDied as death:
            if not self._loaded:  # nothing untrusted has run in it
                raise Refused("infra", f"a worker {death} before the solution was loaded", doubtful=True) from None
            killed = death.reason == "killed"  # by the system, by an operator, or by itself
            raise Refused(_STATUS[death.reason], f"the solution {death} {when}".strip(), killed) from None
        except WorkerError as error:
            if when == "while it was loaded":
                raise
            if not self._loaded:
                raise Refused("infra", f"a worker, before the solution was loaded: {error}", doubtful=True) from None
            raise Refused("cheat" if error.cheat else "crash", f"{error} {when}".strip()) from None

    def _compare(self, entry: Entry, outputs: list[Any], when: str, audit: bool = False) -> None:
        prepared, verdict = self._prepared, self._verdict
        cap = math.inf if verdict.mode == "strict" else 1.0
        tolerance, tensors = self._settings.tolerance, prepared.spec.outputs
        message, error = self._memory.mismatch(entry.outputs, outputs, tensors, tolerance, cap)
        verdict.max_error = max(error, verdict.max_error or 0.0)
        if message:
            stale = any(self._memory.same(outputs, earlier) for earlier in self._seen)
            if stale or audit:
                what = "the outputs of an earlier call were given again" if stale else "the outputs are wrong"
                raise Refused("cheat", f"{when}: {what}: {message}")
            raise Refused("wrong", f"{when}: {message}")
        if len(self._seen) < 2:
            self._seen.append(outputs)

    def end(self) -> None:
        if self._worker:
            self._worker.kill()

    def close(self) -> None:
        self.end()
        self._buffers.close()
        self._prepared.rotate(self._next - self._prepared.base)
