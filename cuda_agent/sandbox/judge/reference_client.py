"""The judge's client of a reference worker: inputs, expected outputs, times and counts of one task."""

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.jail.processes import JailedProcess, WorkerDied, WorkerError
from cuda_agent.sandbox.judge import device as gpu_memory
from cuda_agent.sandbox.judge import host as cpu_memory
from cuda_agent.sandbox.judge.buffers import DTYPES, byte_count
from cuda_agent.sandbox.messages import JudgeSettings, WorkerOperation
from cuda_agent.sandbox.wire import TaskSpec, span

_COMPILE_SECONDS = 300.0  # of a large model, with nothing cached, on a busy machine
_OPENING_SECONDS = 10.0  # at least, for a task: what it imports may come from a cold disk
Views = list[list[int] | None]  # of outputs: strides of one that the reference gives as a view
_FLOATING = ("float32", "float16", "bfloat16")


def memory_of(device: str) -> Any:
    """The module with buffers and comparisons for this device: ``host`` or ``device``."""
    return gpu_memory if device == "cuda" else cpu_memory


def seconds_of_call(device: str, wall: float, told: Any) -> float:
    """Seconds of one call. ``wall``: by the judge's clock, from the request to the answer. ``told``: on a GPU, the
    worker's [seconds of the device, seconds of the host]. Raises ``WorkerError`` if it is no such pair, or a part of it
    exceeds ``wall``."""
    if device == "cpu":
        return wall
    match told:
        case [float(seconds), float(host)] if 0 < seconds <= wall and 0 < host <= wall:
            return seconds
    raise WorkerError(f"the device's clock says {str(told)[:60]} of a call that took {wall:.6f} s")


def net(seconds: float, empty: float) -> float:
    """``seconds`` minus the seconds of an empty call, at least a tenth of ``seconds``: noise must not yield a time near
    zero."""
    return max(seconds - empty, seconds / 10)


class TaskKilled(TaskError):
    """The reference worker died from a signal that the judge did not send (the OOM killer, say)."""


class ReferenceClient:
    """Owns a reference worker of one task, and its buffers.  Arrays are ``numpy`` arrays on the CPU and
    ``device.Array`` on a GPU, one a tensor of the spec.

    Raises:
        TaskError: from every method, where the task fails.
        TaskKilled: where its worker died from a signal that the judge did not send.
    """

    def __init__(self, worker: JailedProcess, code: str, weights_seed: int, settings: JudgeSettings) -> None:
        self.worker = worker
        self._limit = settings.run_seconds
        self._host = math.inf
        self._buffers: Any = None  # of the module ``memory_of`` gives
        self._exact: Any = None
        self._device, self._memory = settings.device, memory_of(settings.device)
        try:
            self._open(code, weights_seed, settings)
        except BaseException:
            self.close()
            raise

    def _open(self, code: str, weights_seed: int, settings: JudgeSettings) -> None:
        task = {"code": code, "seed": weights_seed}
        answer = self._ask(WorkerOperation.OPEN_TASK, task, least=_OPENING_SECONDS)
        try:
            self.spec = TaskSpec.from_json(answer)
            tensors = (*self.spec.inputs, *self.spec.outputs, *self.spec.weights.values())
            foreign = {t.dtype for t in tensors} - DTYPES.keys()
            size = 0 if foreign else sum(byte_count(t) for t in tensors)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise TaskError("the task answered nonsense") from None
        if foreign:
            raise TaskError(f"the task has tensors of {', '.join(sorted(foreign))}, which are not supported here")
        if settings.device == "cpu" and size > settings.memory_mb << 20:
            raise TaskError(f"the task's tensors take {size >> 20} MB, more than the limit of {settings.memory_mb} MB")
        try:
            self._buffers = self._memory.Buffers(self.spec, slots=2, values=True, fixed=settings.clock == "model")
        except driver.DriverError:
            raise TaskError(f"the task's tensors take {size >> 20} MB, more than the device has left") from None
        buffers = self._buffers
        self._ask(WorkerOperation.MAP_BUFFERS, buffers.places, fds=buffers.descriptors)
        self.weights = buffers.values(buffers.value_weights, list(self.spec.weights.values()))

    @property
    def alive(self) -> bool:
        return self.worker.alive

    def inputs(self, seed: int, kind: str = "normal") -> list[Any] | None:
        """Input values drawn under ``seed``; None if the task's inputs have no values of this kind (``wire.KINDS``)."""
        if not self._ask(WorkerOperation.DRAW_INPUTS, {"seed": seed, "kind": kind}):
            return None
        return self._buffers.values(self._buffers.value_inputs, self.spec.inputs)

    def outputs(self, inputs: list[Any]) -> list[Any]:
        """Eager's outputs for these inputs."""
        self._on(inputs, WorkerOperation.RUN)
        return self._buffers.outputs(0)

    def seconds(self, inputs: list[Any], null: bool = False) -> float:
        """Seconds of one call (``null``: of a call that computes nothing).  Buffers are refilled before the clock
        starts."""
        slot = secrets.randbelow(2)
        self.worker.stop()
        self._buffers.fill(slot, inputs)
        self._memory.flush()
        self.worker.seconds = self._limit
        with _of_the_task():
            wall, told = self.worker.timed(WorkerOperation.RUN_EMPTY if null else WorkerOperation.RUN, slot)
            seconds = seconds_of_call(self._device, wall, told)
        if told:
            self._host = min(self._host, told[1])
        return seconds

    def host_seconds(self, inputs: list[Any]) -> float:
        """The fewest seconds that the host has needed to enqueue a call on the GPU."""
        for _ in range(3 if self._host == math.inf else 0):  # first calls start libraries
            self.seconds(inputs)
        return self._host

    def precision(self, name: str) -> None:
        """How matrix products compute from here on: default, fp32, tf32, bf16."""
        self._ask(WorkerOperation.SET_PRECISION, {"precision": name})

    def exact(self, inputs: list[Any]) -> list[Any] | None:
        """Outputs computed in double precision (float64 in place of every floating dtype); None when those or eager's
        own (``outputs`` came before, with the same inputs) are not finite.  ``TaskError`` when the model cannot."""
        if self._exact is None:
            wide = [replace(t, dtype="float64") if t.dtype in _FLOATING else t for t in self.spec.outputs]
            spec = replace(self.spec, inputs=(), outputs=tuple(wide), weights={})
            self._exact = buffers = self._memory.Buffers(spec, slots=1)
            self._ask(WorkerOperation.MAP_EXACT, buffers.places | {"spec": spec.to_json()}, fds=buffers.descriptors)
        return self._exact.outputs(0) if self._on(inputs, WorkerOperation.RUN_EXACT) else None

    def compile(self, inputs: list[Any], known: str, mode: str = "") -> None:
        """Calls are the compiled model's from here on.  ``WorkerError`` when torch.compile fails."""
        self._buffers.fill(0, inputs)
        self.worker.seconds = _COMPILE_SECONDS
        self.worker.call(WorkerOperation.COMPILE_TASK, {"known": known, "mode": mode})

    def count(self, inputs: list[Any]) -> tuple[int, int]:
        """The number of operators of one call, and the bytes they read and write."""
        answer = self._on(inputs, WorkerOperation.COUNT_OPERATORS)
        return int(answer["operators"]), int(answer["bytes"])

    def account(self, inputs: list[Any]) -> tuple[int, int, Views]:
        """Floating-point operations of one call (0: not known), the bytes that it writes for its outputs, and the
        strides of outputs that are views."""
        answer = self._on(inputs, WorkerOperation.ACCOUNT)
        most = sum(byte_count(t) for t in self.spec.outputs)
        try:
            return max(0, int(answer["flops"])), min(max(0, int(answer["written"])), most), views(answer, self.spec)
        except (KeyError, TypeError, ValueError) as error:  # the task's own process says so
            raise TaskError(f"the task gave no account of a call: {error}") from None

    def _on(self, inputs: list[Any], operation: WorkerOperation) -> Any:
        self._buffers.fill(0, inputs)
        return self._ask(operation)

    def _ask(self, operation: WorkerOperation, body: Any = None, fds: Sequence[int] = (), least: float = 0.0) -> Any:
        self.worker.seconds = max(self._limit, least)
        with _of_the_task():
            return self.worker.call(operation, body, fds=fds)

    def close(self) -> None:
        self.worker.kill()
        for buffers in (self._buffers, self._exact):
            if buffers:
                buffers.close()


def views(answer: Any, spec: TaskSpec) -> Views:
    """What a worker tells of its ``views``, as far as copies of that form can be made: strides of one whose elements
    lie within the memory of all inputs and weights, no strides of one whose elements share memory (a solution may copy
    it from anywhere), ``None`` of any other, as if it had been written.  ``ValueError``, ``TypeError`` for nonsense."""
    room = sum(byte_count(tensor) for tensor in (*spec.inputs, *spec.weights.values()))
    found: Views = []
    for strides, tensor in zip(answer["views"], spec.outputs, strict=True):
        if strides is not None:
            if not all(type(stride) is int and stride >= 0 for stride in strides):
                raise ValueError(f"strides {strides!r}")
            reach, count = span(tensor.shape, strides), math.prod(tensor.shape)
            strides = [] if reach < count else strides if reach * byte_count(tensor) <= room * count else None
        found.append(strides)
    return found


@contextmanager
def at_precision(oracle: ReferenceClient, name: str) -> Iterator[None]:
    """Let the reference compute at this precision inside the context."""
    oracle.precision(name)
    try:
        yield
    finally:
        if oracle.alive:
            oracle.precision("default")


@contextmanager
def _of_the_task() -> Iterator[None]:
    try:
        yield
    except WorkerError as error:
        raise TaskError(str(error)) from None
    except WorkerDied as death:
        raise (TaskKilled if death.reason == "killed" else TaskError)(f"the task {death}") from None
