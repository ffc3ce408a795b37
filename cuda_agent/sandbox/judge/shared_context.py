"""Lets one candidate worker serve many plans on a GPU, one after the other.

A plan is a solution without host code: the sandbox launches its kernels. Making and releasing a CUDA context takes
longer than judging a short plan, and a device makes one context at a time. The worker can unload a plan completely, but
the plan's kernels may damage the context, so that a correct later plan fails. After a plan that is not correct, the
judge therefore tests whether the context still computes correctly. If it does not, the judge repeats the plan in a new
context. The judge also repeats a plan in a new context to confirm a crash, a timeout, an accusation of cheating, or a
new best time."""

from collections.abc import Callable
from pathlib import Path

from cuda_agent.sandbox.jail.processes import JailedProcess, WorkerDied, WorkerError
from cuda_agent.sandbox.judge.memory.device import SLOTS_BYTES, Area, pair
from cuda_agent.sandbox.messages import EvaluateRequest, JudgeSettings, WorkerOperation
from cuda_agent.sandbox.wire import FormatTraits

_MOST_SERVED = 64  # plans that one context serves
_SAME = 0.95  # a time is a new best only below this share of the best; rewards differ by as much


def may_share(request: EvaluateRequest, settings: JudgeSettings, size: int) -> bool:
    """Returns whether the solution in ``request`` may run in a CUDA context that other solutions also use. It must be
    a plan (a solution without host code) that is judged in quick mode on a GPU with real, not simulated, times. Three
    kinds of plans always get a new context:

    - Plans with library calls: other plans' kernels could damage the library's memory in the context.
    - Plans with kernels that call ``malloc``: they could leave too little of the context's heap to later plans.
    - Plans for tasks with more than 1 GiB of inputs and outputs (``size`` bytes)."""
    return (
        settings.device == "cuda"
        and settings.clock == "real"
        and size <= SLOTS_BYTES
        and request["mode"] == "quick"
        and FormatTraits(**request["traits"]).host_is_ours
        and not any("library" in node for node in request["load"]["nodes"])
        and not _allocates(request["load"].get("image", ""))
    )


def _allocates(image: str) -> bool:
    """Returns whether a kernel in the cubin file ``image`` may call ``malloc``. Searches the file for this name."""
    return bool(image) and b"malloc" in Path(image).read_bytes()


def is_best(seconds: float | None, best: float | None) -> bool:
    """Returns whether ``seconds`` is more than 5 % below ``best``, the task's best time so far. If ``best`` is
    ``None``, any time counts as best. Returns False if ``seconds`` is ``None``."""
    return seconds is not None and (best is None or seconds < _SAME * best)


class SharedContext:
    """Keeps one candidate worker (a process that runs solutions) and the memory areas that the judge shares with it.
    Many plans use the worker's CUDA context, one after the other. The argument ``start`` is a function that starts a
    new worker."""

    def __init__(self, start: Callable[[], JailedProcess]) -> None:
        self._start = start
        self._worker: JailedProcess | None = None
        self._areas: tuple[Area, Area] | None = None
        self.served = 0  # plans that the worker's context has run

    def areas(self, in_size: int, out_size: int) -> tuple[Area, Area]:
        """Returns an input area and an output area of at least these sizes in bytes, filled with zeros. Replaces both
        areas if one is too small."""
        before = [area.size for area in self._areas or ()] or [0, 0]
        if in_size > before[0] or out_size > before[1]:
            self._drop_areas()
            self._areas = pair(max(in_size, before[0]), max(out_size, before[1]))
        assert self._areas
        for area in self._areas:
            area.wipe()
        return self._areas

    def _drop_areas(self) -> None:
        for area in self._areas or ():
            area.close()
        self._areas = None

    @property
    def used(self) -> bool:
        """Returns whether ``take`` will return a worker that has run a plan before."""
        return self._worker is not None and self._worker.alive and self.served > 0

    def take(self) -> JailedProcess:
        """Returns the kept worker if it is alive, else a new one. The caller gives the worker back or kills it. Raises
        ``NotStarted`` if a new worker does not start."""
        worker, self._worker = self._worker, None
        if worker is None or not worker.alive:
            self.served = 0
            worker = self._start()
        return worker

    def give_back(self, worker: JailedProcess, seconds: float) -> bool:
        """Takes ``worker`` back after a plan. Returns whether the worker unloads the plan within ``seconds`` and then
        computes a known result. Ends the worker if it does not, or if it has served 64 plans."""
        self.served += 1
        proven = worker.alive
        if proven:
            worker.seconds = seconds
            try:
                worker.call(WorkerOperation.UNLOAD_SOLUTION)
            except (WorkerDied, WorkerError):
                proven = False
        if proven and self.served < _MOST_SERVED:
            self._worker = worker
        else:
            worker.kill()
        return proven

    def end(self) -> None:
        if self._worker:
            self._worker.kill()
        self._worker, self.served = None, 0
        self._drop_areas()
