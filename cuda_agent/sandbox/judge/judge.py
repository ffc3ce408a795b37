"""The judge: trusted; owns seeds, buffers, clock and verdict, and imports neither task nor solution.

``python -m cuda_agent.sandbox.judge.judge FD`` answers one request at a time over a socket: the spec of a task, a
verdict of a solution (``trial``), a probe of a task.  Prepared tasks are kept, least recently used first out.  If a
worker dies from a signal that the judge did not send (the OOM killer, say), the evaluation is retried once.

Not covered: building (the client has it done before), and the caches of verdicts.
"""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cuda_agent.errors import TaskError
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.judge.buffers import byte_count
from cuda_agent.sandbox.judge.prepared import PreparedTask
from cuda_agent.sandbox.judge.reference_client import JudgeSettings, TaskKilled, memory_of
from cuda_agent.sandbox.judge.strict import strict_baselines
from cuda_agent.sandbox.judge.trial import CandidateRefused, Trial
from cuda_agent.sandbox.judge.worker_pool import WorkerPool
from cuda_agent.sandbox.wire import FormatTraits, Probe, Verdict, receive_frame, send_frame

_Answer = TypeVar("_Answer")
_MOST_PREPARED = {"cpu": 24, "cuda": 6}  # tasks kept ready, least recently used first out
_PROBE_SECONDS = 10  # of the device's health


def _once_more(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Ask again when the task's worker was killed by nobody here: the second time it is the task's doing."""

    @functools.wraps(method)
    def asked(*arguments: Any) -> _Answer:
        with contextlib.suppress(TaskKilled):
            return method(*arguments)
        return method(*arguments)

    return asked


def _forget(verdict: Verdict) -> None:
    """Before another trial.  What was timed stays, so that nobody gets a second draw of a time by ending the first."""
    verdict.status, verdict.message, verdict.checks, verdict.max_error = "ok", "", 0, None
    verdict.ran, verdict.advice = [], []


class Judge:
    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self._workers = WorkerPool(settings)
        self._lease = self._workers.lease
        self._prepared: OrderedDict[str, PreparedTask] = OrderedDict()
        self._trial: Trial | None = None
        self._cleanup_seconds = 0.0  # seconds of the last ``cleanup``
        self.memory = memory_of(settings.device)

    def prove(self) -> dict[str, str]:
        return jail.prove(self.settings.required_walls, Path(self.settings.scratch))

    def prepared(self, task: dict[str, str]) -> PreparedTask:
        digest = task["digest"]
        found = self._prepared.pop(digest, None)
        if found is not None and not found.oracle.alive:
            found.close()
            found = None
        if found is None:
            found = PreparedTask(task["code"], digest, self._workers)
        self._prepared[digest] = found
        while len(self._prepared) > _MOST_PREPARED[self.settings.device]:
            self._prepared.popitem(last=False)[1].close()
        return found

    @_once_more
    def spec(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.prepared(request["task"]).spec.to_json()

    # ---------------------------------------------------------------------------------------------------------- verdict

    @_once_more
    def evaluate(self, request: dict[str, Any]) -> dict[str, Any]:
        """The verdict of a built solution, as JSON."""
        self.cleanup()  # where the last one ended in an error of the task
        before = self._cleanup_seconds
        settings = self.settings
        traits = FormatTraits(**request["traits"])
        verdict = Verdict(
            "ok", request["format"], request["mode"], settings.device, settings.clock,  # type: ignore[arg-type]
            advisory=traits.advisory, untimed=traits.untimed,
        )  # fmt: skip
        # Who is refused does not wait for baselines, and no candidate is there while they are measured.
        known = self.prepared(request["task"]).measured(verdict.mode)
        for timed in (False,) if traits.untimed else (True,) if known else (False, True):
            if timed:
                prepared = self.prepared(request["task"])
                prepared.measure(compile=True)
                if verdict.mode == "strict":
                    strict_baselines(prepared)
            if self._tried(request, verdict, timed):
                self.cleanup()
                _forget(verdict)
                self._tried(request, verdict, timed)
            if timed or traits.untimed or verdict.status != "ok":
                break
            self.cleanup()
            _forget(verdict)
        verdict.phases["cleanup"] = before
        if self.settings.clock == "model":
            verdict.phases = {}
        return verdict.to_json()

    def _tried(self, request: dict[str, Any], verdict: Verdict, timed: bool) -> bool:
        """Fill in ``verdict`` by one trial; whether the candidate should have another one.  ``cleanup`` ends it."""
        prepared = self.prepared(request["task"])
        base, spec = prepared.baselines, prepared.spec
        if not verdict.untimed:
            verdict.eager_seconds, verdict.compile_seconds = base.eager, base.compile
        verdict.bytes, verdict.flops = sum(byte_count(t) for t in (*spec.inputs, *spec.outputs)), base.flops or None
        verdict.peak_bytes_per_second = prepared.peaks.bytes_per_second
        self._trial = trial = Trial(self._workers, prepared, request, verdict)
        try:
            trial.run(timed)
        except CandidateRefused as refusal:
            verdict.status, verdict.message = refusal.status, str(refusal)
            return refusal.retryable
        except TaskKilled:
            raise
        except (TaskError, driver.DriverError) as error:
            trial.end()
            prepared = self.prepared(request["task"])  # raises when it is the task, or the device, after all
            prepared.oracle.outputs(prepared.entry(prepared.base).inputs)
            verdict.status, verdict.message = "crash", f"beside the solution, and only there, the task fails: {error}"
            return True
        return False

    def cleanup(self) -> None:
        """End the last trial and prepare the next one, when nobody waits for it."""
        trial, self._trial = self._trial, None
        if trial:
            begin = time.perf_counter()
            self._workers.start_spare()
            trial.close()
            self._workers.areas.make()
            self._cleanup_seconds = time.perf_counter() - begin

    # ------------------------------------------------------------------------------------------------------------ probe

    def probe(self, request: dict[str, Any]) -> dict[str, Any]:
        """What running the task shows, as JSON; never raises for the task's sake."""
        try:
            return self._probe(request["task"], request["compile"]).to_json()
        except TaskError as error:
            return Probe(error=str(error)).to_json()

    @_once_more
    def _probe(self, task: dict[str, str], compile: bool) -> Probe:
        prepared = self.prepared(task)
        spec, tolerance, memory = prepared.spec, self.settings.tolerance, self.memory
        first, second = prepared.entry(prepared.base), prepared.entry(prepared.base + 1)
        with self._lease.working():
            again = prepared.oracle.outputs(first.inputs)
        probe = Probe(
            deterministic=not memory.mismatch(first.outputs, again, spec.outputs, tolerance)[0],
            constant=any(memory.constant(a, t) for a, t in zip(first.outputs, spec.outputs, strict=True)),
            indistinguishable=not memory.mismatch(first.outputs, second.outputs, spec.outputs, tolerance)[0],
            inputs=list(spec.inputs),
            outputs=list(spec.outputs),
            parameter_count=spec.parameter_count,
        )
        prepared.measure(compile)
        probe.eager_seconds, probe.compile_seconds = prepared.baselines.eager, prepared.baselines.compile
        if compile:
            probe.error = prepared.baselines.compile_error
        return probe

    def healthy(self) -> bool:
        """Whether the device still computes a known answer, in this process's own context.  Where it does not answer at
        all, the alarm ends this process."""
        signal.alarm(_PROBE_SECONDS)
        try:
            return bool(self.memory.healthy())
        except driver.DriverError:
            return False
        finally:
            signal.alarm(0)

    def close(self) -> None:
        self.cleanup()
        for prepared in self._prepared.values():
            prepared.close()
        self._workers.close()


def main() -> None:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody of the same user reads this memory
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # die with the client
    client = socket.socket(fileno=int(sys.argv[1]))
    fields = receive_frame(client).body
    judge = Judge(JudgeSettings(**(fields | {"required_walls": tuple(fields["required_walls"])})))
    try:
        breaches = judge.prove()
        if judge.settings.device == "cuda":
            judge.memory.open_judge(Path(judge.settings.kernels))
    except (jail.JailError, driver.NoDevice) as error:
        send_frame(client, "!", {"kind": "jail", "message": str(error)})
        return
    device = f"the device {judge.settings.device} {judge.settings.identity}".strip()
    if not judge.healthy():
        send_frame(client, "!", {"kind": "device", "message": f"{device} fails its health probe"})
        os._exit(1)
    send_frame(client, "=", {"breaches": breaches, "torch": judge._workers.torch})
    handlers = {"E": judge.evaluate, "P": judge.probe, "S": judge.spec}
    while True:
        try:
            frame = receive_frame(client)
        except ConnectionError:
            judge.close()
            return
        try:
            answer = handlers[frame.kind](frame.body)
        except TaskError as error:
            send_frame(client, "!", {"kind": "task", "message": str(error)})
            judge.cleanup()
        else:
            send_frame(client, "=", answer)
            judge.cleanup()
            if frame.kind == "E" and answer["status"] in ("crash", "timeout") and not judge.healthy():
                print(f"{device} failed its health probe", file=sys.stderr, flush=True)
                os._exit(1)  # the client begins again with a new process; workers end with this one


if __name__ == "__main__":
    main()
