"""Asks the reference worker of a task for inputs, expected outputs, times and operator counts.

A reference worker is a jailed process that runs the task's own model."""

import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cuda_agent.errors import TaskError
from cuda_agent.sandbox import driver
from cuda_agent.sandbox.jail.processes import JailedProcess, WorkerDied, WorkerError
from cuda_agent.sandbox.judge.memory import device as gpu_memory
from cuda_agent.sandbox.judge.memory import host as cpu_memory
from cuda_agent.sandbox.judge.memory.buffers import DTYPES, byte_count, call_bytes
from cuda_agent.sandbox.messages import JudgeSettings, WorkerOperation
from cuda_agent.sandbox.wire import TaskSpec, span

_COMPILE_SECONDS = 600.0  # limit; the largest models of KernelBench take minutes
_OPENING_SECONDS = 10.0  # lower bound of the limit for opening a task, which may import from a cold disk
Views = list[list[int] | None]  # for each output: its strides if the reference returns a view, else None
_MOST_EXAMPLES, _EXAMPLES_BYTES = 8, 128 << 20  # inputs with outputs that one request may ask for on a GPU
_SHORT = 0.02  # processor seconds of a call below which it gets one thread where its time does not count
_FLOATING = ("float32", "float16", "bfloat16")


def memory_of(device: str) -> Any:
    """Returns the module for buffers and comparisons: ``memory.device`` for "cuda", ``memory.host`` for "cpu"."""
    return gpu_memory if device == "cuda" else cpu_memory


def seconds_of_call(device: str, wall: float, told: Any) -> float:
    """Returns the seconds of one call in a worker. On the CPU, these are ``wall``, the seconds from request to answer
    by the judge's clock. On a GPU, they are the first number of ``told``, the worker's report: [seconds on the device,
    seconds that the host needed to enqueue the call]. Raises ``WorkerError`` if ``told`` has another form, or if a
    number in it is not positive or exceeds ``wall``."""
    if device == "cpu":
        return wall
    match told:
        case [float(seconds), float(host)] if 0 < seconds <= wall and 0 < host <= wall:
            return seconds
    raise WorkerError(f"the device's clock says {str(told)[:60]} of a call that took {wall:.6f} s")


def net(seconds: float, empty: float) -> float:
    """Returns ``seconds`` (the measured time of a call) minus ``empty`` (the time of a call that computes nothing).
    Returns at least a tenth of ``seconds``, so that noise cannot make a time almost zero."""
    return max(seconds - empty, seconds / 10)


class TaskKilled(TaskError):
    """The reference worker died from a SIGKILL that the judge did not send, for example by the system's OOM killer."""


class ReferenceClient:
    """Sends requests to the reference worker of one task, the jailed process that runs the task's model. Owns this
    worker and the memory that the judge shares with it. Inputs, outputs and weights are lists with one array per tensor
    of the spec: NumPy arrays on the CPU, ``device.Array`` on a GPU. Methods raise ``TaskError`` if the task fails. They
    raise its subclass ``TaskKilled`` if a SIGKILL from outside the judge ended the worker."""

    def __init__(self, worker: JailedProcess, code: str, weights_seed: int, settings: JudgeSettings) -> None:
        self.worker = worker
        self._limit = settings.run_seconds
        self._host = self._least = math.inf  # fewest seconds of a call: of the host, and by ``seconds_of_call``
        self._threads = settings.threads
        self._compiled = False
        self._buffers: Any = None  # ``Buffers`` of the module that ``memory_of`` returns
        self._exact: Any = None
        self.redrawn: int | None = None  # seed of ``draw_weights``, if any weight differs from the constructor's
        self.kept = False  # whether redrawn weights would make outputs infinite or NaN
        self._device, self._memory = settings.device, memory_of(settings.device)
        worker.verified = self._device == "cpu"  # on a GPU nothing that a reference does between requests is timed
        try:
            self._open(code, weights_seed, settings)
        except BaseException:
            self.close()
            raise

    def _open(self, code: str, weights_seed: int, settings: JudgeSettings) -> None:
        task = {"code": code, "seed": weights_seed}
        with self._giving_way():
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
            call, fixed = call_bytes(self.spec), settings.clock == "model"
            slots, examples = min(2, self._memory.slots(call)), 1
            if settings.device == "cuda":
                examples = max(1, min(_MOST_EXAMPLES, _EXAMPLES_BYTES // max(1, call)))
            self._buffers = self._memory.Buffers(self.spec, slots=slots, examples=examples, fixed=fixed)
        except driver.DriverError:
            raise TaskError(f"the task's tensors take {size >> 20} MB, more than the device has left") from None
        buffers = self._buffers
        self._ask(WorkerOperation.MAP_BUFFERS, buffers.places, fds=buffers.descriptors)
        self.weights = buffers.values(buffers.value_weights, list(self.spec.weights.values()))

    @property
    def alive(self) -> bool:
        return self.worker.alive

    def draw_weights(self, seed: int | None) -> bool:
        """Redraws, from ``seed``, the weights that the model's constructor does not draw at random, such as a bias of
        zeros. If the new weights give more infinite or NaN outputs than the constructor's weights, restores the
        constructor's values and sets ``self.kept`` to true. If ``seed`` is ``None``, only restores the constructor's
        values. Returns whether the model has such weights. If it has, outputs that were computed before this call are
        outdated."""
        if seed is not None:
            self._buffers.fill(0, self.inputs(seed) or [])
        answer = self._ask(WorkerOperation.DRAW_WEIGHTS, {"seed": seed})
        offsets, tensors = self._buffers.value_weights, list(self.spec.weights.values())
        try:
            changed, self.kept = [range(len(tensors))[i] for i in answer["changed"]], bool(answer["kept"])
        except (IndexError, KeyError, TypeError) as error:  # the task's own process says so
            raise TaskError(f"the task gave no account of its weights: {error}") from None
        values = self._buffers.values([offsets[i] for i in changed], [tensors[i] for i in changed])
        for position, value in zip(changed, values, strict=True):
            self.weights[position] = value
        self.redrawn = seed if changed and not self.kept else None
        return bool(changed)

    def inputs(self, seed: int, kind: str = "normal") -> list[Any] | None:
        """Returns inputs of ``kind`` (one of ``wire.KINDS``), drawn from ``seed``. Returns ``None`` if the task has no
        inputs of this kind."""
        if not self._ask(WorkerOperation.DRAW_INPUTS, {"seed": seed, "kind": kind}):
            return None
        inputs = self.spec.inputs
        return self._buffers.values(self._buffers.examples[0][: len(inputs)], inputs)

    def outputs(self, inputs: list[Any]) -> list[Any]:
        """Returns the model's outputs for ``inputs``. Short calls on the CPU use one thread, because on a busy machine
        several threads would mostly wait for each other. A compiled model always uses all its threads, because another
        number of threads would cause a recompilation."""
        short = self._device == "cpu" and not self._compiled and self._least * self._threads < _SHORT
        self._on(inputs, WorkerOperation.RUN, {"threads": 1} if short else None)
        return self._buffers.outputs(0)

    def examples(self, seeds: Sequence[int]) -> list[tuple[list[Any], list[Any]]]:
        """Returns a pair for each of ``seeds``: normal inputs drawn from the seed, and the model's outputs for them.
        One request for many seeds is faster than many requests, because the GPU then switches between judge and worker
        only once."""
        found: list[tuple[list[Any], list[Any]]] = []
        count, tensors = len(self.spec.inputs), (*self.spec.inputs, *self.spec.outputs)
        while rest := seeds[len(found) : len(found) + self.batch]:
            self._ask(WorkerOperation.DRAW_AND_RUN, {"seeds": list(rest)}, least=len(rest) * self._limit)
            offsets = [offset for places in self._buffers.examples[: len(rest)] for offset in places]
            values = self._buffers.values(offsets, tensors * len(rest))
            drawn = [values[i : i + len(tensors)] for i in range(0, len(values), len(tensors))]
            found += [(one[:count], one[count:]) for one in drawn]
        return found

    @property
    def batch(self) -> int:
        """The largest number of seeds that ``examples`` sends to the worker in one request."""
        return len(self._buffers.examples)

    def seconds(self, inputs: list[Any], null: bool = False) -> float:
        """Times one call of the model on ``inputs`` and returns the seconds. If ``null`` (CPU only), times a call that
        computes nothing instead."""
        slot = secrets.randbelow(len(self._buffers.slots))
        self.worker.stop()
        self._buffers.fill(slot, inputs)
        self._memory.flush()
        self.worker.seconds = self._limit
        with _of_the_task():
            wall, told = self.worker.timed(WorkerOperation.RUN_EMPTY if null else WorkerOperation.RUN, slot)
            seconds = seconds_of_call(self._device, wall, told)
        if told:
            self._host = min(self._host, told[1])
        if not null:
            self._least = min(self._least, seconds)
        return seconds

    def host_seconds(self, inputs: list[Any]) -> float:
        """Returns the least time so far, in seconds, that the host has needed to enqueue a call on the GPU. If no call
        was timed before, times three calls first."""
        for _ in range(3 if self._host == math.inf else 0):  # the first calls also start libraries
            self.seconds(inputs)
        return self._host

    def precision(self, name: str) -> None:
        """Sets the precision of matrix products and convolutions in all later calls: ``default``, ``fp32``, ``tf32`` or
        ``bf16``."""
        self._ask(WorkerOperation.SET_PRECISION, {"precision": name})

    def exact(self, inputs: list[Any]) -> list[Any] | None:
        """Returns the model's outputs for ``inputs``, computed in float64. Call ``outputs`` with the same ``inputs``
        first. Returns ``None`` if the float64 outputs or those of the call of ``outputs`` contain an infinite or NaN
        value. Raises ``TaskError`` if the model cannot run in float64."""
        if self._exact is None:
            wide = [replace(t, dtype="float64") if t.dtype in _FLOATING else t for t in self.spec.outputs]
            spec = replace(self.spec, inputs=(), outputs=tuple(wide), weights={})
            self._exact = buffers = self._memory.Buffers(spec, slots=1)
            self._ask(WorkerOperation.MAP_EXACT, buffers.places | {"spec": spec.to_json()}, fds=buffers.descriptors)
        return self._exact.outputs(0) if self._on(inputs, WorkerOperation.RUN_EXACT) else None

    def mutant(self, inputs: list[Any], how: dict[str, Any]) -> list[Any] | None:
        """Returns wrong outputs for ``inputs``, to test whether the judge's comparison rejects them. ``how`` describes
        how to make them (see ``worker.values.mutants``). Returns ``None`` if the task has no wrong outputs of this
        kind. Call ``outputs`` with the same ``inputs`` first, because some kinds of wrong outputs are made from its
        result."""
        self._buffers.fill(0, inputs)
        return self._buffers.outputs(0) if self._ask(WorkerOperation.RUN_MUTANT, how) else None

    def compile(self, inputs: list[Any], known: str, mode: str = "") -> None:
        """Compiles the model with torch.compile's ``mode`` (empty: the default) for all later calls, and runs it on
        ``inputs``. A warm-up is an earlier compilation of a small model, whose stored results make later compilations
        faster. ``known`` is the folder with these results; if it is empty, this call is itself the warm-up. Raises
        ``WorkerError`` if compilation fails, ``WorkerDied`` if the worker dies."""
        self._compiled = True
        self._buffers.fill(0, inputs)
        self.worker.seconds = _COMPILE_SECONDS
        with self._giving_way():
            self.worker.call(WorkerOperation.COMPILE_TASK, {"known": known, "mode": mode})

    def count(self, inputs: list[Any]) -> tuple[int, int]:
        """Returns the number of operators in one call of the model, and the bytes that they read and write."""
        answer = self._on(inputs, WorkerOperation.COUNT_OPERATORS)
        try:
            return int(answer["operators"]), int(answer["bytes"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TaskError(f"the task gave no count of a call: {error}") from None

    def account(self, inputs: list[Any]) -> tuple[int, int, Views]:
        """Returns three facts about one call of the model: the number of floating-point operations (0 if unknown), the
        number of bytes that the call must write for its outputs, and the strides of outputs that are views (as the
        function ``views`` returns them)."""
        answer = self._on(inputs, WorkerOperation.ACCOUNT)
        most = sum(byte_count(t) for t in self.spec.outputs)
        try:
            return max(0, int(answer["flops"])), min(max(0, int(answer["written"])), most), views(answer, self.spec)
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # the task's own process may report anything
            raise TaskError(f"the task gave no account of a call: {error}") from None

    def _on(self, inputs: list[Any], operation: WorkerOperation, body: Any = None) -> Any:
        self._buffers.fill(0, inputs)
        return self._ask(operation, body)

    def _ask(self, operation: WorkerOperation, body: Any = None, fds: Sequence[int] = (), least: float = 0.0) -> Any:
        self.worker.seconds = max(self._limit, least)
        with _of_the_task():
            return self.worker.call(operation, body, fds=fds)

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        """Lets other processes time kernels during a long request. Inside the context, the worker's watchdog pauses
        the worker while another process times a kernel (see ``worker_pool._giving_way``)."""
        self.worker.gives_way = True
        try:
            yield
        finally:
            self.worker.gives_way = False

    def close(self) -> None:
        self.worker.kill()
        for buffers in (self._buffers, self._exact):
            if buffers:
                buffers.close()


def views(answer: Any, spec: TaskSpec) -> Views:
    """Checks a worker's report of which outputs of the task's model are views of inputs or weights. The report is
    ``answer["views"]``: for each output its strides in elements, or ``None`` if the output is not a view. Returns a
    list with one item per output:

    - ``None`` if the output is not a view, or spans more memory than all inputs and weights together.
    - An empty list if elements of the output share memory, as after ``expand``.
    - The strides otherwise.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for an invalid report."""
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
    """Makes the model of ``oracle`` compute at the precision ``name`` inside the context, and at ``default`` after
    it."""
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
