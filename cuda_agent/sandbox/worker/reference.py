"""Runs a reference worker: the process that runs the ``Model`` and ``get_inputs`` of a task. The random seeds come from
the judge, the process that checks and times solutions."""

import contextlib
import copy
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.overrides import TorchFunctionMode

from cuda_agent.sandbox.messages import Frame
from cuda_agent.sandbox.worker import observe
from cuda_agent.sandbox.worker.loop import WorkerLoop, run_module
from cuda_agent.sandbox.worker.shared_tensors import Slots, describe, draw, flatten, is_plain, plain, rebuild, store
from cuda_agent.sandbox.worker.values import mutants
from cuda_agent.sandbox.worker.values.input_kinds import vary
from cuda_agent.sandbox.worker.values.weights import PlainWeights

_MANY_MODULES = 50  # above it, a model has hundreds of kernels


class Reference(WorkerLoop):
    """Answers the judge's requests about one task. Each public method answers the request (a ``WorkerOperation``) of
    the same name. ``frame.body`` holds the arguments of a request. ``frame.slot`` is the number of a slot, the shared
    buffers for the inputs and outputs of one call."""

    def __init__(self, channel: socket.socket, options: dict[str, Any]) -> None:
        super().__init__(channel, options)
        self._last: list[torch.Tensor] = []
        self._device: str = options["device"]
        self._autocast = False
        self._double: torch.nn.Module | None = None

    def open_task(self, frame: Frame) -> dict[str, Any]:
        """Imports the task, builds its model, runs the model once on fresh inputs, and returns the task's spec (a
        ``TaskSpec`` as JSON). Raises ``AttributeError``, ``TypeError`` or ``ValueError`` if the source is not a valid
        task."""
        torch.manual_seed(frame.body["seed"])
        module = run_module("task", frame.body["code"], "model.py")
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not hasattr(module, name):
                raise AttributeError(f"the task defines no {name}")
        init = module.get_init_inputs()
        if not isinstance(init, list | tuple):
            raise TypeError("get_init_inputs() must give a list")
        self._model = module.Model(*init)
        if not isinstance(self._model, torch.nn.Module):
            raise TypeError("Model is no torch.nn.Module")
        self._model.train(self._options["train_mode"]).to(self._device)
        self._call: Callable[..., Any] = self._model
        self._build = lambda: module.Model(*init).train(self._options["train_mode"]).to(self._device)
        self._plain = PlainWeights(self._model)
        self._get_inputs = module.get_inputs
        self._arguments, tensors = draw(self._get_inputs, self._device)
        given = [t.clone() for t in tensors]
        versions = [t._version for t in given]
        outputs = flatten(self._model(*rebuild(self._arguments, given)))
        if versions != [t._version for t in given]:
            raise ValueError("forward() changes its inputs in place, which a task may not")
        if not outputs:
            raise TypeError("forward() gives no tensor")
        self._state = {k: v for k, v in self._model.state_dict().items() if isinstance(v, torch.Tensor)}
        self._spec: dict[str, Any] = {
            "inputs": [describe(t) for t in tensors],
            "outputs": [describe(t) for t in outputs],
            "weights": {name: describe(t) for name, t in self._state.items()},
            "arguments": self._arguments,
            "init": [plain(v) if is_plain(v) else {"opaque": type(v).__name__} for v in init],
            "parameter_count": sum(p.numel() for p in self._model.parameters()),
        }
        return self._spec

    def map_buffers(self, frame: Frame) -> None:
        """Maps the judge's shared memory. Then writes the weights to the output area, the part of this memory that the
        worker can write and the judge reads."""
        if self._device == "cuda":
            torch.cuda.empty_cache()  # of the first call's tensors; the largest tasks do not fit beside them
        self._slots = Slots(self._spec, frame.body, frame.fds, self._device)
        self._examples, self._places = frame.body["examples"], frame.body["value_weights"]
        self._write_weights(range(len(self._places)))

    def _write_weights(self, positions: Iterable[int]) -> None:
        tensors = list(self._state.values())
        for position in positions:
            tensor = tensors[position]
            self._slots.tensor(self._slots.written + self._places[position], describe(tensor)).copy_(tensor)
        self.settle()

    def draw_weights(self, frame: Frame) -> dict[str, Any]:
        """Draws new values for the model's plain weights, which its constructor does not draw at random, such as a bias
        of zeros (see ``PlainWeights``). If the request's seed is ``None``, restores the constructor's values instead.
        Also restores them if the new values give more infinite or NaN outputs for the inputs of ``frame.slot`` than the
        constructor's values give. Writes the values to the output area (the shared memory that the worker can write).
        Returns a dictionary: ``changed`` lists the positions of the plain weights in the state dict. ``kept`` is true
        if the constructor's values were kept because of such outputs."""
        changed = [i for i, t in enumerate(self._state.values()) if t.data_ptr() in self._plain.addresses]
        seed, kept = frame.body["seed"], False
        if changed:
            self._plain.draw(seed)
            if seed is not None and (broken := self._not_finite(frame.slot)):
                self._plain.draw(None)
                kept = self._not_finite(frame.slot) < broken
                self._plain.draw(None if kept else seed)
            self._double = None
            self._write_weights(changed)
        return {"changed": changed, "kept": kept}

    def _not_finite(self, slot: int) -> int:
        outputs = flatten(self._model(*rebuild(self._arguments, self._slots.input_tensors(slot))))
        return sum(int((~torch.isfinite(tensor)).sum()) for tensor in outputs)

    def draw_inputs(self, frame: Frame) -> bool:
        """Draws inputs with the request's seed and writes them to the output area (the shared memory that the worker
        can write). Returns false if the task has no inputs of the requested kind (see ``values.input_kinds``). Uses one
        CPU thread. With more threads, torch's idle threads would spin, that is, keep their cores busy, for some
        milliseconds afterwards."""
        with _threads(1):
            found = self._draw_inputs(frame.body["seed"], frame.body["kind"], self._example(0)[0])
        self.settle()
        return found

    def _draw_inputs(self, seed: int, kind: str, targets: list[torch.Tensor]) -> bool:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)  # a candidate would know a state that it shares as another fork
        varied = vary(draw(self._get_inputs, self._device)[1], kind)
        if varied is None:
            return False
        store(varied, targets)
        return True

    def _example(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the tensors of one example (a set of inputs with the model's outputs) in the output area, the shared
        memory that the worker can write. The first list holds the inputs, the second list the outputs. ``number``
        selects the example."""
        tensors, count = (*self._spec["inputs"], *self._spec["outputs"]), len(self._spec["inputs"])
        places = zip(self._examples[number], tensors, strict=True)
        made = [self._slots.tensor(self._slots.written + offset, tensor) for offset, tensor in places]
        return made[:count], made[count:]

    def draw_and_run(self, frame: Frame) -> None:
        """Draws inputs with each seed in the request and runs the model on them. The inputs have the values that the
        task's own code draws (kind ``normal``). Writes the inputs and the outputs to the output area (the shared memory
        that the worker can write)."""
        for number, seed in enumerate(frame.body["seeds"]):
            inputs, outputs = self._example(number)
            self._draw_inputs(seed, "normal", inputs)
            store(flatten(self._call(*rebuild(self._arguments, inputs))), outputs)
        self.settle()

    def run(self, frame: Frame) -> Any:
        """Runs the model on the inputs of the slot ``frame.slot`` (the buffers of one call), and writes the outputs to
        this slot. The request may set the number of CPU threads. On a GPU, returns two times in seconds: the device's
        time for the call, and the host's time to enqueue it. On the CPU, returns ``None``."""
        with _threads(frame.body["threads"]) if frame.body else contextlib.nullcontext():
            return self._run(frame)

    def _run(self, frame: Frame) -> Any:
        arguments = rebuild(self._arguments, self._slots.input_tensors(frame.slot))
        with torch.autocast(self._device, torch.bfloat16, enabled=self._autocast):
            results, times = self._clocked(lambda: self._call(*arguments))
        self._last = flatten(results)
        targets = self._slots.output_tensors(frame.slot)
        if self._autocast:
            self._last = [result.to(target.dtype) for result, target in zip(self._last, targets, strict=True)]
        store(self._last, targets)
        self.settle()
        return times

    def run_empty(self, frame: Frame) -> None:
        """Does the work of ``run`` except the model's call: builds the arguments and copies outputs. The judge
        subtracts the time of this request from the time of ``run``."""
        rebuild(self._arguments, self._slots.input_tensors(frame.slot))
        if not self._last:
            self._last = [torch.zeros_like(t) for t in self._slots.output_tensors(frame.slot)]
        store(self._last, self._slots.output_tensors(frame.slot))

    def compile_task(self, frame: Frame) -> None:
        """Compiles the model with ``torch.compile`` and runs it once. Later calls of ``run`` use the compiled model.
        ``known`` in the request is a folder with stored results of TorchInductor, which speed up compilation (see
        ``compiling``). An earlier process, the warm-up, stored them. If ``known`` is empty, this process is the warm-up
        and stores the results. A large model on a GPU is compiled by several processes. All other models are compiled
        by this process alone, because TorchInductor's processes start slowly."""
        from cuda_agent.sandbox.worker import compiling

        known = frame.body["known"]
        with contextlib.suppress(AttributeError):
            compiling.share(Path(known or f"{os.environ['TMPDIR']}/known"), record=not known)
        if self._device == "cuda" and sum(1 for _ in self._model.modules()) > _MANY_MODULES:
            torch._inductor.config.compile_threads = min(4, os.cpu_count() or 1)
        self._call = torch.compile(self._model, mode=frame.body["mode"] or None)
        self._run(frame)

    def set_precision(self, frame: Frame) -> None:
        """Sets the precision of matrix products and convolutions in later calls of ``run``: ``default`` (PyTorch's
        default), ``fp32``, ``tf32`` or ``bf16`` (autocast)."""
        wanted = frame.body["precision"]
        torch.backends.cuda.matmul.allow_tf32 = wanted == "tf32"
        torch.backends.cudnn.allow_tf32 = wanted in ("tf32", "default")
        self._autocast = wanted == "bf16"

    def map_exact(self, frame: Frame) -> None:
        """Maps the shared memory to which ``run_exact`` writes the model's outputs in double precision."""
        self._exact = Slots(frame.body["spec"], frame.body, frame.fds, self._device)

    def run_exact(self, frame: Frame) -> bool:
        """Runs the model in double precision on the inputs of ``frame.slot``, and writes the outputs to the memory of
        ``map_exact``. Returns whether the outputs of this run and of the last ``run`` are all finite."""
        if self._double is None:
            self._double = copy.deepcopy(self._model).double()
        given = [t.double() if t.is_floating_point() else t for t in self._slots.input_tensors(frame.slot)]
        results = flatten(self._double(*rebuild(self._arguments, given)))
        targets = self._exact.output_tensors(0)
        store([result.to(target.dtype) for result, target in zip(results, targets, strict=True)], targets)
        finite = all(bool(torch.isfinite(t).all()) for t in (*self._last, *targets) if t.is_floating_point())
        self.settle()
        return finite

    def run_mutant(self, frame: Frame) -> bool:
        """Writes wrong outputs (a mutant, which is a wrong answer made on purpose) for the inputs of ``frame.slot``.
        The last ``run`` must have had the same inputs, because some kinds of mutants are made from its outputs. Returns
        false if the task has no mutant of the requested kind."""
        how, given, model = frame.body, self._slots.input_tensors(frame.slot), None
        match how["kind"]:
            case "weights":
                if (model := mutants.redraw(self._model, self._build, how)) is None:
                    return False
            case "bf16":
                model, given = mutants.in_bfloat16(self._model, given)
        wrong = flatten(model(*rebuild(self._arguments, given))) if model else mutants.spoil(how, self._last, given)
        targets = self._slots.output_tensors(frame.slot)
        store([tensor.to(target.dtype) for tensor, target in zip(wrong, targets, strict=True)], targets)
        self.settle()
        return True

    def account(self, frame: Frame) -> dict[str, Any]:
        """Runs the model once and returns three facts about this call. ``flops`` is the number of floating-point
        operations (0 if unknown). ``written`` is the number of bytes that the call must write for its outputs.
        ``views`` has one item per output: its strides if the output counts as a view (see ``observe.views``), else
        ``None``."""
        given = self._slots.input_tensors(frame.slot)
        flops, answer = observe.flops(lambda: self._model(*rebuild(self._arguments, given)))
        results, memory = flatten(answer), [*given, *self._state.values()]
        written, views = observe.written_bytes(results, memory), observe.views(results, memory)
        return {"flops": flops, "written": written, "views": views}

    def count_operators(self, frame: Frame) -> dict[str, int]:
        """Runs the model once. Returns the number of operators that return a single tensor which is not a view
        (``operators``), and the number of bytes that they read and write (``bytes``). From these numbers, the judge
        computes simulated times, which replace measured times in tests."""
        total = {"operators": 0, "bytes": 0}

        class Counter(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                seen = [t for t in _leaves((*args, *(kwargs or {}).values(), result)) if isinstance(t, torch.Tensor)]
                if isinstance(result, torch.Tensor) and result._base is None:  # a view costs nothing
                    total["operators"] += 1
                    total["bytes"] += sum(t.numel() * t.element_size() for t in seen)
                return result

        arguments = rebuild(self._arguments, self._slots.input_tensors(frame.slot))
        with Counter():
            self._model(*arguments)
        return total


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
