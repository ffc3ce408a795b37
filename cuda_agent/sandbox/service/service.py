"""Runs a ``LocalSandbox`` as a service with a queue. The HTTP server is in the module ``app``.

The service takes no work until a test of its jail (the isolation of untrusted code) has passed. It gives the sandbox
only as many jobs as the sandbox can run at once. The other jobs wait in the queue, where an urgent job can overtake
them. Several servers do not share a queue. A restart of the server empties its queue."""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cuda_agent.errors import SandboxUnready, TaskError
from cuda_agent.sandbox import protocol
from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.protocol import AnyRequest, Build, ServiceError
from cuda_agent.sandbox.service.jobs import Job, Queue
from cuda_agent.sandbox.service.metrics import Metrics
from cuda_agent.sandbox.service.workspaces import Rooms
from cuda_agent.sandbox.wire import CommandResult, Verdict
from cuda_agent.sandbox.workspace.client import WorkspaceLost

Role = Literal["workspace", "build", "evaluate"]
ROLES: tuple[Role, ...] = ("workspace", "build", "evaluate")
_AT_ONCE = 2  # jobs per place: one is judged while the next one is built
_STARTING = "starting"  # a kind of refusal, and the beginning of its reason
_AGAIN_SECONDS = 5.0  # seconds between attempts to become ready, and between searches for unused workspaces
_log = logging.getLogger("cuda_agent.sandbox")


@dataclass(frozen=True)
class ServiceLimits:
    queue: int = 256  # most jobs that wait
    workspaces: int = 64  # most open workspaces
    idle_seconds: float = 600.0  # time after which an unused workspace is closed
    drain_seconds: float = 60.0  # longest wait for running work after SIGTERM
    recycle_after: int = 0  # verdicts after which the process ends, so that a fresh one replaces it; 0: never
    recycle_on_cheat: bool = False  # whether the verdict ``cheat`` ends the process, too
    open_metrics: bool = False  # whether /metrics needs no token


class Service:
    """An async context manager that queues requests and runs them in ``sandbox``. The caller must have entered
    ``sandbox`` (with ``async with``) before. ``roles`` lists the kinds of work that the service accepts."""

    def __init__(self, sandbox: LocalSandbox, roles: tuple[Role, ...], limits: ServiceLimits) -> None:
        self.sandbox, self.roles, self.limits = sandbox, roles, limits
        self.rooms = Rooms(sandbox, limits.workspaces, limits.idle_seconds)
        self.metrics = Metrics()
        self.unready = f"{_STARTING}: the walls are not proven yet"  # empty: ready
        self.draining = False
        self.needs_recycle = asyncio.Event()  # set when the limit of verdicts or a cheat calls for a fresh process
        self._verdicts = 0
        self._changes: dict[str, asyncio.Event] = {}  # by job id, while a client waits; set when the job changes
        places: dict[Hashable, int] = {judge: _AT_ONCE for judge in range(sandbox.judges)}
        self.queue = Queue(places | {"build": _AT_ONCE}, limits.queue, changed=self._wake)
        self._work: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Service":
        self._keeper = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._keeper, *self._work):
            task.cancel()
        await asyncio.gather(self._keeper, *self._work, return_exceptions=True)
        await self.rooms.close_all()

    async def _keep(self) -> None:
        """Every few seconds, calls ``prove`` if the service is not ready, and closes unused workspaces."""
        while True:
            try:
                if self.unready:
                    await self.prove()
                self.metrics.workspaces_idle.inc(await self.rooms.sweep())
            except Exception:  # a workspace that cannot be closed must not end this loop
                _log.exception("while looking after the service")
            await asyncio.sleep(_AGAIN_SECONDS)

    async def prove(self) -> None:
        """Tests the jail (the isolation of untrusted code). Also tests the compiler for the roles ``evaluate`` and
        ``build``, the device for ``evaluate``, and a new workspace for ``workspace``. Sets ``self.unready`` to the
        reason why the service cannot take work, or to an empty string if all tests pass."""
        try:
            if "evaluate" in self.roles:
                await self.sandbox.ready()
            else:
                with tempfile.TemporaryDirectory() as folder:
                    Path(folder).chmod(0o755)
                    walls = tuple(self.sandbox.config.required_walls)
                    await asyncio.to_thread(jail.prove, walls, Path(folder))
                if "build" in self.roles:
                    await self.sandbox.prove_compiler()
            if "workspace" in self.roles:
                async with self.sandbox.workspace({}, frozenset(), _nothing):
                    pass
        except (SandboxUnready, jail.JailError, WorkspaceLost) as error:
            self.unready = str(error)
            _log.error("not ready: %s", error)
        except Exception as error:
            self.unready = f"{type(error).__name__}: {error}"
            _log.exception("not ready")
        else:
            if self.unready:
                _log.info("ready: %s", ", ".join(self.roles))
            self.unready = ""

    def admit(self, role: Role) -> None:
        """Raises ``ServiceError`` unless the service takes new work of the kind ``role``."""
        if role not in self.roles:
            raise ServiceError(404, "role", f"this server has no role {role} (it has {', '.join(self.roles)})")
        if self.draining:
            raise ServiceError(503, "draining", "this server is going away", retry_after=5.0)
        if self.unready:
            kind = _STARTING if self.unready.startswith(_STARTING) else "unready"
            raise ServiceError(503, kind, self.unready, retry_after=_AGAIN_SECONDS)

    def submit(self, request: AnyRequest, size: int) -> Job:
        """Queues a request of ``size`` bytes and returns its job. If an equal request has a job already, returns that
        job. Raises ``ServiceError`` if the service does not take the request."""
        self.admit("build" if isinstance(request, Build) else "evaluate")
        protocol.agree(request.settings, self.sandbox.config)
        kind = request.kind
        place: Hashable = "build" if isinstance(request, Build) else self.sandbox.judge_of(request.task.task())
        try:
            job, new = self.queue.submit(request.key(), kind, place, request.priority, size, request, time.time())
        except ServiceError:
            self.metrics.rejected.labels("full").inc()
            raise
        self.metrics.submitted.labels(kind, str(new).lower()).inc()
        self._dispatch()
        return job

    async def wait(self, job: Job, seconds: float | None) -> None:
        """Waits until the job is over, but at most ``seconds``. ``None`` sets no limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not job.over:
                    await self._change(job)

    async def events(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """Yields all events of the job, past and new, until the job is over. The last event also holds the job."""
        shown = 0
        while True:
            while shown < len(job.events):
                shown += 1
                yield job.events[shown - 1] | ({"job": job.to_json()} if job.over and shown == len(job.events) else {})
            if job.over:
                return
            await self._change(job)

    def cancel(self, job: Job) -> None:
        self.queue.cancel(job, time.time())

    async def _change(self, job: Job) -> None:
        await self._changes.setdefault(job.id, asyncio.Event()).wait()

    def _wake(self, job: Job) -> None:
        if event := self._changes.pop(job.id, None):
            event.set()

    def _dispatch(self) -> None:
        while not self.draining and (job := self.queue.take(time.time())):
            task = asyncio.create_task(self._run(job))
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    async def _run(self, job: Job) -> None:
        result: dict[str, Any] | None = None
        error: dict[str, str] | None = {"kind": "infra", "message": "the service was stopped"}
        try:
            result, error = await self._answer(job.request), None
        except TaskError as wrong:
            error = {"kind": "task", "message": str(wrong)}
        except SandboxUnready as missing:
            error = {"kind": "unready", "message": str(missing)}
            await self.prove()
        except Exception as fault:
            _log.exception("job %s", job.id)
            error = {"kind": "infra", "message": f"the service failed: {type(fault).__name__}"}
        finally:
            self.queue.finish(job, time.time(), result, error)
            self._count(job, error)
            self._dispatch()

    async def _answer(self, request: AnyRequest) -> dict[str, Any]:
        match request:
            case protocol.EvaluateRequest():
                verdict = await self.sandbox.evaluate(request.task.task(), request.solution.solution(), request.mode)
                self._count_verdict(verdict)
                return verdict.to_json()
            case protocol.ProbeRequest():
                return (await self.sandbox.probe(request.task.task(), request.compile)).to_json()
            case protocol.SpecRequest():
                return (await self.sandbox.spec(request.task.task())).to_json()
            case Build():
                message = await self.sandbox.build(request.solution.solution(), request.spec)
                return {"status": "build_error" if message else "ok", "message": message}

    def _count(self, job: Job, error: dict[str, str] | None) -> None:
        assert job.started is not None and job.ended is not None
        self.metrics.phase_seconds.labels(job.kind, "queue").observe(job.started - job.submitted)
        self.metrics.phase_seconds.labels(job.kind, "run").observe(job.ended - job.started)
        if error and error["kind"] in ("infra", "unready"):
            self.metrics.infra_faults.inc()

    def _count_verdict(self, verdict: Verdict) -> None:
        self.metrics.verdicts.labels(verdict.format, verdict.status).inc()
        if verdict.status == "infra":
            self.metrics.infra_faults.inc()
        if not verdict.cached:
            self._verdicts += 1
            cheated = verdict.status == "cheat" and self.limits.recycle_on_cheat
            if cheated or self._verdicts == self.limits.recycle_after:
                self.needs_recycle.set()
            for phase, seconds in verdict.phases.items():
                self.metrics.phase_seconds.labels("evaluate", phase).observe(seconds)

    def metrics_text(self) -> bytes:
        metrics, queue = self.metrics, self.queue
        metrics.queue_length.set(queue.queued)
        metrics.running.set(queue.running)
        metrics.workspaces.set(len(self.rooms))
        metrics.ready.set(not self.unready)
        metrics.draining.set(self.draining)
        metrics.room_in_seconds.set(queue.room_in())
        return metrics.text()

    async def drain(self) -> None:
        """Refuses new work, fails queued jobs, and waits at most ``drain_seconds`` for running jobs and workspaces.
        Then cancels the remaining jobs."""
        self.draining = True
        self.queue.hand_back(time.time(), "draining", "the server is going away; bring it to another one")
        _log.info("draining: %d running, %d workspaces", self.queue.running, len(self.rooms))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.drain_seconds):
                while self.queue.running or len(self.rooms):
                    await asyncio.sleep(0.05)
        if self._work:
            _log.warning("%d jobs were cut off after %g s", len(self._work), self.limits.drain_seconds)
            for task in self._work:
                task.cancel()
            self.sandbox.kill()


async def _nothing(name: str, argv: list[str], files: dict[str, str]) -> CommandResult:
    return CommandResult("", error=True)
