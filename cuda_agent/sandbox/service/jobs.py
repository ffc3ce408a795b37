"""Holds the queue of jobs of the sandbox service, and estimates when a full queue has room.

Requests with the same content share one job. Each job is assigned to one *place*: a judge (a process that checks and
times solutions) or the builder (which compiles solutions). A place takes only a few jobs at once; the others wait in
the queue. Queued jobs start in the order of their priority. An urgent job overtakes queued jobs, but not running ones.
The module reads no clock, starts no asyncio task and does no I/O."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cuda_agent.sandbox.protocol import ServiceError

State = Literal["queued", "running", "done", "failed", "cancelled"]
Kind = Literal["evaluate", "probe", "spec", "build"]
_LEARNING = 0.2  # weight of the newest interval in the running mean
_LONGEST_WAIT = 10.0  # seconds: a longer estimate is unreliable, and asking again is cheap


@dataclass(eq=False)
class Job:
    """A request to the service and its state. ``place`` identifies the judge process or the builder to which the job is
    assigned. Equal requests share one job; ``interest`` counts the requests that were not withdrawn."""

    id: str
    kind: Kind
    place: Hashable
    priority: int
    size: int  # bytes of the request
    request: Any  # dropped when the job ends
    submitted: float
    interest: int = 1
    state: State = "queued"
    started: float | None = None
    ended: float | None = None
    result: dict[str, Any] | None = None
    error: dict[str, str] | None = None  # kind and message
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    def to_json(self) -> dict[str, Any]:
        names = ("id", "kind", "state", "priority", "submitted", "started", "ended", "result", "error")
        return {name: getattr(self, name) for name in names}


class Queue:
    """Queues jobs and keeps finished jobs. ``places`` maps each judge process, and the builder, to the number of jobs
    that it may run at once. ``most_jobs`` limits the number of queued jobs, ``most_bytes`` the total size of their
    requests, and ``kept`` the number of finished jobs that are kept. Whenever the state of a job changes, the queue
    calls ``changed`` with this job."""

    def __init__(
        self,
        places: Mapping[Hashable, int],
        most_jobs: int = 256,
        most_bytes: int = 256 << 20,
        kept: int = 2048,
        changed: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self._free = dict(places)
        self._most_jobs, self._most_bytes, self._kept = most_jobs, most_bytes, kept
        self._changed = changed
        self._alive: dict[str, Job] = {}  # queued or running, in their order of arrival
        self._over: OrderedDict[str, Job] = OrderedDict()
        self._turned_away = 0  # submissions refused since the queue last had room for all
        self._interval = 1.0  # seconds between two finished jobs under load, at first a guess
        self._busy_since = 0.0

    def _waiting(self) -> list[Job]:
        """Returns the queued jobs in the order in which they start."""
        return sorted((job for job in self._alive.values() if job.state == "queued"), key=lambda job: -job.priority)

    @property
    def queued(self) -> int:
        return len(self._waiting())

    @property
    def running(self) -> int:
        return len(self._alive) - self.queued

    def find(self, id: str) -> Job | None:
        return self._alive.get(id) or self._over.get(id)

    def position(self, job: Job) -> int:
        """Returns how many jobs are queued ahead of ``job`` for the same judge or builder."""
        return [other for other in self._waiting() if other.place == job.place].index(job)

    def submit(
        self, id: str, kind: Kind, place: Hashable, priority: int, size: int, request: Any, now: float
    ) -> tuple[Job, bool]:
        """Returns the job with this ``id`` (a digest of the request), and whether the job is new. Reuses a job that is
        queued or running, or that ended with a valid verdict (the sandbox itself did not fail). Otherwise queues a new
        job. Raises ``ServiceError`` if the queue is full."""
        if job := self._alive.get(id):
            job.interest += 1
            if job.state == "queued":
                job.priority = max(job.priority, priority)
            return job, False
        if (old := self._over.get(id)) and _stands(old):
            self._over.move_to_end(id)
            return old, False
        waiting = self._waiting()
        if len(waiting) >= self._most_jobs or sum(job.size for job in waiting) + size > self._most_bytes:
            self._turned_away += 1
            wait = self.room_in()
            raise ServiceError(
                429, "full", f"the queue is full; there should be room in {wait:.0f} s", retry_after=wait
            )
        job = self._alive[id] = Job(id, kind, place, priority, size, request, now)
        self._over.pop(id, None)
        self._enter(job, "queued", now)
        return job, True

    def take(self, now: float) -> Job | None:
        """Finds the first queued job whose judge or builder can take another job, and marks the job as running. Returns
        this job, or ``None`` if there is none."""
        job = next((job for job in self._waiting() if self._free[job.place] > 0), None)
        if job is not None:
            if not self.running:
                self._busy_since = now
            self._free[job.place] -= 1
            job.started = now
            self._enter(job, "running", now)
        return job

    def finish(
        self, job: Job, now: float, result: dict[str, Any] | None = None, error: dict[str, str] | None = None
    ) -> None:
        self._free[job.place] += 1
        self._interval += _LEARNING * (now - self._busy_since - self._interval)
        self._busy_since = now
        if not job.interest:
            self._end(job, "cancelled", now)
        else:
            job.result, job.error = result, error
            self._end(job, "done" if result is not None else "failed", now)

    def cancel(self, job: Job, now: float) -> None:
        """Withdraws one submission of ``job``. If this was the last submission and the job is queued, the job ends. A
        running job continues, because judges cannot be interrupted. The result of a withdrawn job is kept only if the
        job is submitted again before it ends."""
        if job.over or not job.interest:
            return
        job.interest -= 1
        if job.interest == 0 and job.state == "queued":
            self._end(job, "cancelled", now)

    def hand_back(self, now: float, kind: str, message: str) -> None:
        """Fails every queued job with the error (``kind``, ``message``), so that clients turn to another server."""
        for job in self._waiting():
            job.error = {"kind": kind, "message": message}
            self._end(job, "failed", now)

    def room_in(self) -> float:
        """Returns an estimate of the seconds until the full queue has room for a client that is refused now. The
        estimate assumes that each finished job makes room for one client, and that clients refused earlier come
        first."""
        return min(max(1.0, self._interval * self._turned_away), _LONGEST_WAIT)

    def _end(self, job: Job, state: State, now: float) -> None:
        job.ended, job.request = now, None
        del self._alive[job.id]
        self._over[job.id] = job
        while len(self._over) > self._kept:
            self._over.popitem(last=False)
        self._enter(job, state, now)

    def _enter(self, job: Job, state: State, now: float) -> None:
        leaves = job.state == "queued" and state != "queued"
        job.state = state
        if leaves:
            self._turned_away = max(0, self._turned_away - 1) if self.queued else 0
        job.events.append({"event": state, "at": now})
        self._changed(job)


def _stands(job: Job) -> bool:
    """Returns whether a later equal request gets the finished ``job`` instead of a new one. This is true only for a
    verdict whose status is not ``infra`` (a failure of the sandbox). Errors are not reused, because the load of the
    machine may have caused them. Probes and specs are not reused, because they are cheap."""
    return job.kind == "evaluate" and job.result is not None and job.result.get("status") != "infra"
