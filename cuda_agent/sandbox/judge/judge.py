"""Runs the judge, the trusted process that decides whether a solution of a task is correct, and how fast it is.

The judge owns seeds, buffers, clock and verdict. It runs no code of tasks or solutions itself: jailed workers do.
``python -m cuda_agent.sandbox.judge.judge FD`` answers a client's requests one at a time, over the socket with the file
descriptor ``FD``. There are four requests: for a task's spec (shapes and dtypes), for a measurement of a task's
baselines (the times of the task's model), for a probe (a run without a solution), and for the verdict on a solution."""

import ctypes
import functools
import os
import re
import signal
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from cuda_agent.errors import TaskError
from cuda_agent.machine import die_with_parent
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.jail.processes import NotStarted
from cuda_agent.sandbox.judge import mutants
from cuda_agent.sandbox.judge.baselines import Baselines
from cuda_agent.sandbox.judge.decisions import BELIEVED, CandidateRefused
from cuda_agent.sandbox.judge.memory.buffers import call_bytes
from cuda_agent.sandbox.judge.prepared import PreparedTask
from cuda_agent.sandbox.judge.reference_client import TaskKilled, memory_of
from cuda_agent.sandbox.judge.shared_context import is_best, may_share
from cuda_agent.sandbox.judge.strict import strict_baselines
from cuda_agent.sandbox.judge.trial import Trial
from cuda_agent.sandbox.judge.worker_pool import WorkerPool
from cuda_agent.sandbox.messages import (
    MOST_BESIDE,
    EvaluateRequest,
    FrameTooLarge,
    JudgeRequest,
    JudgeSettings,
    Reply,
    TaskSource,
    receive_frame,
    send_frame,
)
from cuda_agent.sandbox.wire import FormatTraits, Probe, Verdict

_Answer = TypeVar("_Answer")
_MOST_PREPARED = {"cpu": 24, "cuda": 64}  # most prepared tasks; the least recently used one is removed first
_MOST_OF_A_PROBER = 4 << 30  # most bytes that prepared tasks hold on the device
_SHORT_OF_MEMORY = "out of (device )?memory|more than the device has left"  # in errors of torch, driver and judge
_PROBE_SECONDS = 10  # limit of a health probe of the device
_RANDOM = "; but the task's own outputs for the same inputs differ from call to call, so no solution can match them"


def _short_of_memory(error: Exception) -> bool:
    said = driver.explain(error) if isinstance(error, driver.DriverError) else str(error)
    return bool(re.search(_SHORT_OF_MEMORY, said))


def _is_random(prepared: PreparedTask) -> bool:
    """Returns whether the task's own outputs differ from call to call. Returns False if the candidate leaves no memory
    to find out: its verdict is not the task's fault."""
    try:
        return not prepared.repeats()
    except (TaskError, driver.DriverError):
        return False


def _once_more(method: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Wraps a method of ``Judge`` so that a failed call is repeated once. There are three cases:

    - A SIGKILL from outside the judge ended the reference worker, the process that runs the task's model.
    - A worker did not start.
    - The device lacked memory, and ``make_room`` freed some.

    If the driver lacks memory and the call is not repeated, or fails again, the method raises ``TaskError``."""

    def once_more(judge: "Judge", *arguments: Any) -> _Answer:
        try:
            return method(judge, *arguments)
        except (TaskKilled, NotStarted):
            pass
        except (TaskError, driver.DriverError) as error:
            if not judge.make_room(error):
                raise
        return method(judge, *arguments)

    @functools.wraps(method)
    def asked(judge: "Judge", *arguments: Any) -> _Answer:
        try:
            return once_more(judge, *arguments)
        except driver.DriverError as error:
            if _short_of_memory(error):
                raise TaskError(f"the task needs more memory than the device has left ({error})") from None
            raise

    return asked


class Judge:
    """Answers one client's requests. Keeps the tasks of earlier requests ready for later ones, each as a
    ``PreparedTask``. Methods raise ``TaskError`` if the task itself does not run. Only ``probe`` returns this error in
    its answer instead."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self._workers = WorkerPool(settings)
        self._prepared: OrderedDict[str, PreparedTask] = OrderedDict()
        self._latest = ""  # digest of the task that was asked for last
        self._trial: Trial | None = None
        self._cleanup_seconds = 0.0  # seconds of the last ``cleanup``
        self.memory = memory_of(settings.device)

    def prepared(self, task: TaskSource) -> PreparedTask:
        """Returns the ``PreparedTask`` of ``task`` (the task with a worker that runs its model), kept from an earlier
        request or new. If memory is short, frees the inputs and outputs that other prepared tasks keep for reuse. If
        that is not enough, or if there are too many prepared tasks, closes other tasks, the least recently used one
        first. Raises ``TaskError`` if the task fails, or if it is too large for a prober (a judge that only runs tasks
        without solutions)."""
        self._latest = digest = task["digest"]
        found = self._prepared.pop(digest, None)
        if found is not None and not found.oracle.alive:
            found.close()
            found = None
        found = found or PreparedTask(task["code"], digest, self._workers)
        if self.settings.prober and call_bytes(found.spec) > MOST_BESIDE:
            found.close()
            raise TaskError("the task is too large to run beside others")
        self._prepared[digest] = found
        most, wanted = self.memory.prepared_bytes(), found.candidate_bytes + self.memory.policy_bytes()
        number = _MOST_PREPARED[self.settings.device]
        if self.settings.prober:
            most, wanted, number = _MOST_OF_A_PROBER, 0, 2

        def short() -> bool:
            return self.held_bytes > most or self.memory.free_bytes() < wanted

        if self.memory.free_bytes() < wanted:
            self._trim()
        for other in [*self._prepared.values()][:-1]:  # to draw inputs again takes less time than to open a task again
            if not short():
                break
            other.drop_pool()
            if self.memory.free_bytes() < wanted:
                self._trim()
        while len(self._prepared) > 1 and (len(self._prepared) > number or short()):
            self._prepared.popitem(last=False)[1].close()
            self._trim()
        return found

    def _trim(self) -> None:
        with self._workers.lease.working():
            self.memory.trim()

    @property
    def held_bytes(self) -> int:
        """The approximate bytes that prepared tasks hold on the device."""
        return sum(one.bytes for one in self._prepared.values())

    def make_room(self, error: Exception) -> bool:
        """Closes all prepared tasks to free device memory, under two conditions: ``error`` reports a lack of GPU
        memory, and tasks other than the requested one are prepared. Returns whether it closed them."""
        short = self.settings.device == "cuda" and _short_of_memory(error)
        if not short or self._prepared.keys() <= {self._latest}:
            return False
        self.cleanup()
        self._workers.shared.end()
        self.release()
        return True

    @_once_more
    def spec(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the ``TaskSpec`` of the task in ``request``, as JSON."""
        return self.prepared(request["task"]).spec.to_json()

    # ---------------------------------------------------------------------------------------------------------- verdict

    @_once_more
    def evaluate(self, request: EvaluateRequest) -> dict[str, Any]:
        """Returns the ``Verdict`` on the built solution in ``request``, as JSON."""
        self.cleanup()  # needed if the last evaluation ended with an error of the task
        started, before, settings = time.perf_counter(), self._cleanup_seconds, self.settings
        traits = FormatTraits(**request["traits"])
        verdict = Verdict(
            "ok", request["format"], request["mode"], settings.device, settings.clock,  # type: ignore[arg-type]
            advisory=traits.advisory, untimed=traits.untimed,
        )  # fmt: skip
        prepared = self.prepared(request["task"])
        if request["again"] and not traits.untimed:
            prepared.baselines = Baselines()
            prepared.save()  # else they would be read again
        prepared.read_baselines(verdict.mode)
        # If baselines are missing, an untimed trial comes first: a wrong solution does not wait for their measurement,
        # and no candidate runs during it.
        known, measuring = prepared.measured(verdict.mode), {}
        for timed in (False,) if traits.untimed else (True,) if known else (False, True):
            if timed:
                self.cleanup()
                begin, prepared = time.perf_counter(), self.prepared(request["task"])
                prepared.measure(compile=True)
                if verdict.mode == "strict" and settings.clock == "real":
                    strict_baselines(prepared)
                measuring = {} if known else {"baselines": time.perf_counter() - begin}
            if self._tried(request, verdict, timed):
                self._tried(request, verdict, timed, again=True)
            if verdict.status != "ok":
                break
        spent = verdict.phases | measuring
        rest = time.perf_counter() - started - sum(spent.values())
        verdict.phases = {} if settings.clock == "model" else spent | {"prepare": rest, "cleanup": before}
        return verdict.to_json()

    def _tried(self, request: EvaluateRequest, verdict: Verdict, timed: bool, again: bool = False) -> bool:
        """Runs one trial: loads and checks the solution in ``request``, and times it if ``timed`` is true. Fills in
        ``verdict``. Returns whether the solution needs a second trial. ``again`` marks a second trial, which never runs
        in a CUDA context that other solutions use, too."""
        self.cleanup()
        # The samples stay: a candidate that ends its first trial must not get a second draw of its time. Samples of a
        # used context are dropped below, because an earlier plan may have damaged the context.
        verdict.status, verdict.message, verdict.checks, verdict.max_error = "ok", "", 0, None
        verdict.ran, verdict.advice, verdict.kernels = [], [], []
        verdict.interval, verdict.compile_interval = None, None
        verdict.seconds = None
        prepared = self.prepared(request["task"])
        base, spec = prepared.baselines, prepared.spec
        if not verdict.untimed:
            verdict.eager_seconds, verdict.compile_seconds = base.eager, base.compile
        verdict.bytes, verdict.flops = call_bytes(spec), base.flops or None
        verdict.peak_bytes_per_second = prepared.peaks.bytes_per_second
        sharing = request, self.settings, call_bytes(spec)
        shared = self._workers.shared if not again and may_share(*sharing) else None
        used = shared is not None and shared.used
        self._trial = trial = Trial(self._workers, prepared, request, verdict, shared)
        try:
            trial.run(timed)
        except CandidateRefused as refusal:
            verdict.status, verdict.message = refusal.status, str(refusal)
            if refusal.status == "wrong" and _is_random(prepared):
                verdict.message += _RANDOM
            if used:
                verdict.samples.clear()
            doubted = used and not (refusal.status in BELIEVED and trial.give_back())
            return self.make_room(refusal) or refusal.retryable or doubted
        except TaskKilled:
            raise
        except (TaskError, driver.DriverError) as error:
            trial.end()
            if self.make_room(error):
                return True
            prepared = self.prepared(request["task"])  # raises if the task or the device is at fault
            with prepared.lease.working():
                prepared.oracle.outputs(prepared.entry(prepared.base).inputs)
            verdict.status, verdict.message = "crash", f"beside the solution, and only there, the task fails: {error}"
            return True
        if is_best(verdict.seconds, prepared.best):
            if used:
                verdict.samples.clear()
                return True
            prepared.best = verdict.seconds
        return False

    def cleanup(self) -> None:
        """Ends the last trial and starts a worker for the next candidate. Usually runs while no client waits."""
        trial, self._trial = self._trial, None
        if trial:
            begin = time.perf_counter()
            self._workers.start_spare()
            with self._workers.lease.working():
                trial.close()
            self._workers.areas.make()
            self._cleanup_seconds = time.perf_counter() - begin

    # ----------------------------------------------------------------------------------------------- without a solution

    @_once_more
    def measure(self, request: dict[str, Any]) -> None:
        """Measures the baselines of the task in ``request`` that a verdict of the request's mode needs and that are not
        known: the seconds per call of the task's model in eager PyTorch and with ``torch.compile``."""
        prepared = self.prepared(request["task"])
        prepared.draw_weights()  # as for every candidate
        prepared.read_baselines(request["mode"])
        prepared.measure(compile=True)
        if request["mode"] == "strict":
            strict_baselines(prepared)

    def probe(self, request: dict[str, Any]) -> dict[str, Any]:
        """Runs the task in ``request`` without a solution. Returns a ``Probe`` as JSON. If the task fails, the probe
        holds the error message."""
        try:
            return self._probe(request["task"], request["compile"]).to_json()
        except TaskError as error:
            return Probe(error=str(error)).to_json()

    @_once_more
    def _probe(self, task: TaskSource, compile: bool) -> Probe:
        prepared = self.prepared(task)
        spec = prepared.spec
        if prepared.mutants is None:
            prepared.draw_weights()  # as for every candidate
        deterministic = prepared.repeats()
        prepared.measure(compile)
        if prepared.mutants is None:
            prepared.mutants = mutants.survey(prepared)
        return Probe(
            error=prepared.baselines.compile_error if compile else "",
            deterministic=deterministic,
            mutants=prepared.mutants,
            eager_seconds=prepared.baselines.eager,
            compile_seconds=prepared.baselines.compile,
            inputs=list(spec.inputs),
            outputs=list(spec.outputs),
            parameter_count=spec.parameter_count,
        )

    def healthy(self) -> bool:
        """Returns whether the device works: a comparison of arrays with known contents must give the expected result.
        If that takes longer than 10 s, SIGALRM ends this process."""
        with self._workers.lease.working():
            signal.alarm(_PROBE_SECONDS)
            try:
                return bool(self.memory.healthy())
            except driver.DriverError:
                return False
            finally:
                signal.alarm(0)

    def close(self) -> None:
        self.cleanup()
        self.release()
        self._workers.close()

    def release(self) -> None:
        """Closes all prepared tasks and frees their device memory."""
        while self._prepared:
            self._prepared.popitem()[1].close()
        self._trim()

    def rest(self, keep: bool) -> None:
        """Frees unused device memory after a request to a prober (a judge that only runs tasks without solutions). Also
        closes the prepared tasks, unless ``keep`` is true and they hold at most 4 GiB."""
        if not keep or self.held_bytes > _MOST_OF_A_PROBER:
            self.release()
        else:
            self._trim()


def main() -> None:
    """Serves a client until it closes the socket. The program's first argument is the socket's file descriptor."""
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: processes of the same user cannot read this memory
    die_with_parent()
    client = socket.socket(fileno=int(sys.argv[1]))
    judge = Judge(JudgeSettings(**receive_frame(client).body))

    def refuse(kind: Literal["jail", "device", "task"], message: str) -> None:
        send_frame(client, Reply.ERROR, {"kind": kind, "message": message})

    try:
        breaches = jail.prove(judge.settings.required_walls, Path(judge.settings.scratch))
        if judge.settings.device == "cuda":
            with judge._workers.lease.working():
                judge.memory.open_judge(Path(judge.settings.kernels))
    except jail.JailError as error:
        refuse("jail", str(error))
        return
    except driver.NoDevice as error:  # the device worked when the sandbox opened it, before its judges
        refuse("device", str(error))
        return
    device = f"the device {judge.settings.device} {judge.settings.identity}".strip()
    if not judge.healthy():
        refuse("device", f"{device} fails its health probe")
        os._exit(1)
    send_frame(client, Reply.RESULT, {"breaches": breaches, "torch": judge._workers.torch})
    handlers: dict[str, Callable[[Any], Any]] = {
        JudgeRequest.EVALUATE: judge.evaluate, JudgeRequest.PROBE: judge.probe, JudgeRequest.SPEC: judge.spec,
        JudgeRequest.MEASURE: judge.measure,
    }  # fmt: skip
    while True:
        try:
            frame = receive_frame(client)
        except ConnectionError:
            judge.close()
            return
        try:
            answer = handlers[frame.operation](frame.body)
            send_frame(client, Reply.RESULT, answer)
        except (TaskError, FrameTooLarge) as error:
            refuse("task", str(error))
            judge.cleanup()
            kept = False
        else:
            judge.cleanup()
            kept = frame.operation != JudgeRequest.MEASURE
            failed = frame.operation == JudgeRequest.EVALUATE and answer["status"] in ("crash", "timeout")
            if failed and not judge.healthy():
                print(f"{device} failed its health probe", file=sys.stderr, flush=True)
                os._exit(1)  # the client starts a new judge; the workers end with this process
        if judge.settings.prober:
            judge.rest(kept)


if __name__ == "__main__":
    main()
