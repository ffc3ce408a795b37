"""Lets one candidate worker serve many plans on a GPU, one after the other.

Making and releasing a CUDA context takes longer than judging a short plan, and a device makes one context at a time. A
plan holds no host code, so the worker can unload it completely. But kernels may damage the context. So a refusal or a
new best time in a used context counts only if a trial in a new context confirms it."""

import contextlib
from collections.abc import Callable

from cuda_agent.sandbox.jail.processes import JailedProcess, WorkerDied, WorkerError
from cuda_agent.sandbox.judge.memory.device import SLOTS_BYTES, Area
from cuda_agent.sandbox.messages import EvaluateRequest, JudgeSettings, WorkerOperation
from cuda_agent.sandbox.wire import FormatTraits

_MOST_SERVED = 64  # plans that one context serves
_SAME = 0.95  # a time is a new best only below this share of the best; rewards differ by as much


def may_share(request: EvaluateRequest, settings: JudgeSettings, best: float | None, size: int) -> bool:
    """Returns whether the solution in ``request`` may run in a used context: a plan of kernels and memsets in quick
    mode. Kernels could damage the memory that a library keeps in the context. The first solution of a task (``best`` is
    ``None``) gets a new context. So does a task with very large inputs and outputs (``size`` bytes)."""
    return (
        settings.device == "cuda"
        and settings.clock == "real"
        and best is not None
        and size <= SLOTS_BYTES
        and request["mode"] == "quick"
        and FormatTraits(**request["traits"]).host_is_ours
        and not any("library" in node for node in request["load"]["nodes"])
    )


def is_best(seconds: float | None, best: float | None) -> bool:
    """Returns whether ``seconds`` is clearly less than ``best``, the task's best time so far."""
    return seconds is not None and (best is None or seconds < _SAME * best)


class SharedContext:
    """Keeps the worker with the shared context, and its areas of memory. ``start`` starts a candidate worker."""

    def __init__(self, start: Callable[[], JailedProcess]) -> None:
        self._start = start
        self._worker: JailedProcess | None = None
        self._areas: tuple[Area, Area] | None = None
        self.served = 0  # plans that the context has run

    def areas(self, in_size: int, out_size: int) -> tuple[Area, Area]:
        """Returns the input area and the output area, filled with zeros. Replaces both if one is too small."""
        before = [area.size for area in self._areas or ()] or [0, 0]
        if in_size > before[0] or out_size > before[1]:
            self._drop_areas()
            self._areas = Area.of(max(in_size, before[0])), Area.of(max(out_size, before[1]))
        assert self._areas
        for area in self._areas:
            area.wipe()
        return self._areas

    def _drop_areas(self) -> None:
        for area in self._areas or ():
            area.close()
        self._areas = None

    def take(self) -> JailedProcess:
        """Returns the worker, or a new one. The caller gives it back or kills it. Raises ``NotStarted``."""
        worker, self._worker = self._worker, None
        if worker is None or not worker.alive:
            self.served = 0
            worker = self._start()
        return worker

    def give_back(self, worker: JailedProcess, seconds: float) -> None:
        """Takes ``worker`` back after a plan, which the worker must unload within ``seconds``. Ends the worker if that
        fails, or if it has served enough plans."""
        self.served += 1
        if worker.alive and self.served < _MOST_SERVED:
            worker.seconds = seconds
            with contextlib.suppress(WorkerDied, WorkerError):
                worker.call(WorkerOperation.UNLOAD_SOLUTION)
                self._worker = worker
                return
        worker.kill()

    def end(self) -> None:
        if self._worker:
            self._worker.kill()
        self._worker, self.served = None, 0
        self._drop_areas()
