"""Provides replacements for the processes around the judge: a reference, a worker pool and a candidate's worker.

They run in the test's process. The reference's task doubles its input. The judge's buffers, comparisons and decisions
are the real ones."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from cuda_agent.lease import Lease
from cuda_agent.sandbox.judge.memory.buffers import Spare
from cuda_agent.sandbox.judge.shared_context import SharedContext
from cuda_agent.sandbox.messages import JudgeSettings, WorkerOperation
from cuda_agent.sandbox.wire import TaskSpec, Tensor

LENGTH = 64
SPEC = TaskSpec(
    inputs=(Tensor((LENGTH,), "float32"),),
    outputs=(Tensor((LENGTH,), "float32"),),
    weights={},
    arguments=({"tensor": 0},),
    init=(),
)


def settings_in(folder: Path, **more: Any) -> JudgeSettings:
    lease = folder / "lease"
    lease.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "threads": 1, "checks": 3, "tolerance": 1e-2, "timed_calls": 4, "run_seconds": 2.0, "memory_mb": 400,
        "clock": "model", "required_walls": (), "cache": str(folder), "scratch": str(folder), "lease": str(lease),
    }  # fmt: skip
    return JudgeSettings(**(values | more))


class Reference:
    """A replacement for ``ReferenceClient``.  The task doubles its input."""

    def __init__(
        self, _worker: Any = None, _code: str = "", _seed: int = 0, settings: JudgeSettings | None = None
    ) -> None:
        self.on_gpu = settings is not None and settings.device == "cuda"
        self.alive = True
        self.spec = SPEC
        self.weights: list[Any] = []
        self.redrawn, self.kept = None, False
        self.seeds: list[int] = []
        self.asked: list[int] = []  # numbers of examples
        self.precisions: list[str] = []
        self.worker = self
        self.takes = 3.0

    def inputs(self, seed: int, kind: str = "normal") -> list[Any] | None:
        self.seeds.append(seed)
        if kind == "sparse":
            return None
        return [numpy.random.default_rng(abs(seed)).standard_normal(LENGTH).astype(numpy.float32)]

    def outputs(self, inputs: list[Any]) -> list[Any]:
        return [2 * inputs[0]]

    @property
    def batch(self) -> int:
        return 4 if self.on_gpu else 1

    def examples(self, seeds: Sequence[int]) -> list[tuple[list[Any], list[Any]]]:
        self.asked.append(len(seeds))
        inputs = [self.inputs(seed) or [] for seed in seeds]
        return [(one, self.outputs(one)) for one in inputs]

    def exact(self, inputs: list[Any]) -> list[Any]:
        return [2 * inputs[0].astype(numpy.float64)]

    def mutant(self, inputs: list[Any], how: dict[str, Any]) -> list[Any] | None:
        return [0 * inputs[0]] if how["kind"] == "zeros" else None

    def seconds(self, inputs: list[Any], null: bool = False) -> float:
        return 1.0 if null else self.takes

    def precision(self, name: str) -> None:
        self.precisions.append(name)

    def count(self, inputs: list[Any]) -> tuple[int, int]:
        return 1, 2 * 4 * LENGTH

    def account(self, inputs: list[Any]) -> tuple[int, int, list[list[int] | None]]:
        return 10, 4 * LENGTH, [None]

    def close(self) -> None:
        self.alive = False

    def spread(self, apart: bool = True) -> None: ...

    def processor(self) -> int:
        return 0

    def stop(self) -> None: ...


class Worker:
    """A replacement for a candidate's ``JailedProcess``.  ``compute(number of the call, inputs)`` returns the outputs,
    or None for no outputs, or raises the error with which the process would fail."""

    def __init__(self, compute: Callable[[int, Any], Any]) -> None:
        self.alive, self.seconds, self.calls = True, 0.0, 0
        self.operations: list[WorkerOperation] = []
        self.fails_at: dict[WorkerOperation, Exception] = {}
        self.buffers: Any = None
        self._compute = compute

    def call(self, operation: WorkerOperation, body: Any = None, slot: int = 0, fds: Sequence[int] = ()) -> Any:
        self.operations.append(operation)
        if operation in self.fails_at:
            raise self.fails_at[operation]
        return None

    def timed(self, operation: WorkerOperation, slot: int, extra: int = 0) -> tuple[float, Any]:
        self.call(operation)
        if operation == WorkerOperation.RUN:
            self.calls += 1
            places, tensor = self.buffers.slots[slot], SPEC.inputs[0]
            given = self.buffers.input_area.view(places["in"][0], tensor)
            if (answer := self._compute(self.calls, given)) is not None:
                self.buffers.output_area.view(places["out"][0], tensor)[...] = answer
        return 1.0, None

    def hand_over(self, file: Path, name: str) -> str:
        return str(file)

    def kill(self) -> None:
        self.alive = False

    def stop(self) -> None: ...

    def spread(self, apart: bool = True) -> None: ...

    def processor(self) -> int:
        return 0


class Pool:
    """A replacement for ``WorkerPool``."""

    torch = "0"

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings, self.lease, self.areas = settings, Lease(Path(settings.lease)), Spare()
        self.spares = 0
        self.worker: Any = None
        self.compilers: list[Any] = []
        self.shared = SharedContext(self.candidate)

    def reference(self) -> Any:
        return None

    def candidate(self, place: Any = None, profiler: bool = False, strictly: bool = False) -> Any:
        return self.worker

    def compiler(self) -> tuple[Any, str]:
        return self.compilers.pop(0), ""

    def start_spare(self) -> None:
        self.spares += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.lease.close()
