"""Runs a candidate worker: a process in which the judge checks and times one solution. On a GPU, one worker may run
several solutions in the plan format, one after the other.

``messages.WorkerOperation`` lists the judge's requests to workers. In this file, the *reference* is the task's own
model, with which the judge compares the solution."""

import ctypes
import itertools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_agent.sandbox.messages import Frame, WorkerOperation
from cuda_agent.sandbox.worker import library_nodes, observe
from cuda_agent.sandbox.worker.binding import OnlyTheExtension, Outputs, load_module
from cuda_agent.sandbox.worker.loop import WorkerLoop, build_model
from cuda_agent.sandbox.worker.replay import play_back
from cuda_agent.sandbox.worker.same_files import with_own_tmp
from cuda_agent.sandbox.worker.shared_tensors import (
    Slots,
    flatten,
    map_memory,
    owned,
    plain_value,
    rebuild,
    store,
    zeros,
)
from cuda_agent.sandbox.worker.triton_rule import only_triton
from cuda_agent.sandbox.worker.values.weights import PlainWeights

# By the name of a rule: makes the context in which each call of ``ModelNew`` runs.
RULES: dict[str, Callable[[Outputs], Callable[[], AbstractContextManager[Any]]]] = {
    "": lambda outputs: nullcontext,
    "extension": lambda outputs: OnlyTheExtension,
    "triton": only_triton,
}


class Candidate(WorkerLoop):
    """Runs a solution for the judge. Before it loads the solution, it maps the judge's buffers and answers empty calls,
    which run no model. The judge times empty calls to measure the overhead of a call."""

    def map_buffers(self, frame: Frame) -> None:
        self._options = options = self._options | frame.body
        before = getattr(self, "_slots", None)
        self._slots = Slots(options["spec"], options, frame.fds, options["device"], before)
        # On the CPU the empty call's time is subtracted, so an empty call does no work that a solution could leave out,
        # such as copying outputs. On a GPU empty chains do copy: they give a bound that must not be too high.
        load = self.load_plan if options["host_is_ours"] else self.load_model
        self._commands = {WorkerOperation.LOAD_SOLUTION: load}
        if options["device"] == "cuda":
            self._commands[WorkerOperation.RUN_EMPTY_CHAIN] = self.empty_chain
        else:
            self._commands[WorkerOperation.RUN_EMPTY] = lambda frame: None

    def empty_chain(self, frame: Frame) -> Any:
        """Runs a chain of empty calls, which run no model. A chain is a series of calls that the host enqueues without
        waiting between them. Here ``frame.slot`` is the number of calls. An empty call only copies zeros to the
        outputs. Where the task's own model returns a view, the zeros have the strides of this view. Returns two times
        in seconds: the device's time for the chain, and the host's time to enqueue it."""
        slots = [self._slots.output_tensors(slot) for slot in range(frame.slot)]
        views = self._options["views"]
        results = [[zeros(*pair) for pair in zip(targets, views, strict=True)] for targets in slots]

        def enqueue() -> None:
            for targets, found in zip(slots, results, strict=True):
                store(found, targets)

        return self._finished(enqueue, frame)

    def _finished(self, enqueue: Callable[[], None], frame: Frame) -> Any:
        """Calls ``enqueue`` and waits for the device. Returns the device's seconds, and the host's seconds to
        enqueue."""
        times = self._clocked(enqueue, frame.extra)[1]
        torch.cuda.synchronize()
        return times

    def load_plan(self, frame: Frame) -> list[list[int] | None]:
        """Loads a plan. On a GPU, returns ``driver.resources`` of each node, or ``None`` where a node is no kernel."""
        if self._options["device"] == "cuda":
            from cuda_agent.sandbox.worker import gpu

            self._commands[WorkerOperation.UNLOAD_SOLUTION] = lambda call: self.unload_plan(None)
            run = gpu.bind_plan(frame.body, self._slots)
        else:
            run = bind_plan(frame.body, self._slots, self._options["threads"])
        self._commands[WorkerOperation.RUN] = lambda call: self._clocked(lambda: run(call.slot))[1]
        self._commands[WorkerOperation.UNLOAD_SOLUTION] = lambda call: self.unload_plan(run)
        steps = run.steps  # type: ignore[attr-defined]
        self._commands[WorkerOperation.OBSERVE_OPERATORS] = lambda call: observe.seconds_of(
            steps[call.slot], self._options["device"]
        )
        return getattr(run, "resources", [])

    def unload_plan(self, run: Callable[[int], None] | None) -> None:
        """Unloads a plan (a solution in the plan format) from a GPU. ``run`` is the function that runs the plan, or
        ``None`` if the plan could not be loaded. Afterwards the worker can take the next plan's buffers."""
        from cuda_agent.sandbox.worker import gpu

        self._clocked = gpu.DeviceClock()
        self._commands = {WorkerOperation.MAP_BUFFERS: self.map_buffers}
        gpu.unload_plan(run)

    def load_model(self, frame: Frame) -> None:
        """Builds the solution's ``ModelNew`` with the random seed of the reference (the task's own model). If the
        weights of both models have the same names, ``ModelNew`` gets the reference's values. Formats with a rule for
        ``ModelNew.forward`` require the same names. If the names differ, the weights keep the constructor's values. In
        this case, if the judge gave new random values to the reference's plain weights (such as weights of ones, see
        ``PlainWeights``), the plain weights of ``ModelNew`` are redrawn with the same seed."""
        spec, restricted = self._options["spec"], bool(self._options["rule"])
        os.environ.update(frame.body["environment"])
        numbers = range(len(self._slots.layout))
        given = [rebuild(spec["arguments"], self._slots.input_tensors(slot)) for slot in numbers]
        outputs = Outputs([self._slots.output_tensors(slot) for slot in numbers], self._options["device"])
        if "library" in frame.body:
            sys.modules["cuda_extension"] = load_module(frame.body["library"], outputs)
        code = frame.body["code"]
        if frame.body.get("place"):
            place = Path(frame.body["place"]["folder"])
            play_back(place)
            code = with_own_tmp(code, place)
        torch.manual_seed(frame.body["seed"])
        model = build_model(code, [plain_value(item) for item in spec["init"]], self._options)
        weights = self._slots.weight_tensors()
        rule = RULES[self._options["rule"]](outputs)
        given_places, views = self._slots.given, self._options["views"]
        if restricted or model.state_dict().keys() == weights.keys():
            model.load_state_dict(weights, strict=True)
        elif (redrawn := frame.body["redrawn"]) is not None:
            PlainWeights(model).draw(redrawn)

        def run(call: Frame) -> Any:
            outputs.begin(call.slot)
            with rule():
                results, times = self._clocked(lambda: answer(call.slot), call.extra)
            outputs.store(flatten(results))
            self.settle()
            return times

        def answer(slot: int) -> Any:
            """Runs one call and returns its outputs. On a GPU, copies each output that is not contiguous or that lies
            in the memory of the inputs and weights. The copy is part of the timed call. Otherwise a call that only
            makes a view would look too fast. Does not copy an output that is a view in the reference (the task's own
            model)."""
            results = model(*given[slot])
            if self._options["device"] == "cpu":
                return results
            with torch._C.DisableTorchFunction():  # the rule applies to the solution only
                found = flatten(results)
                return [
                    owned(result, given_places) if view is None else result
                    for result, view in itertools.zip_longest(found, views[: len(found)])
                ]

        def observed(call: Frame, watch: Callable[[Callable[..., Any]], Any]) -> Any:
            """Calls ``watch`` with a function that runs the model once. Returns the result of ``watch``, a report."""
            results: list[Any] = []

            def watched(seen: observe.Operators | None = None) -> None:
                outputs.watch = seen.add if seen else None
                with rule():
                    results.append(model(*given[call.slot]))

            outputs.begin(call.slot)
            try:
                told = watch(watched)
            finally:
                outputs.watch = None
            outputs.store(flatten(results[0]))
            self.settle()
            return told

        def enqueue(count: int) -> None:
            for slot in range(count):
                outputs.begin(slot)
                with rule():
                    results = answer(slot)
                outputs.store(flatten(results))

        self._commands[WorkerOperation.RUN] = run
        self._commands[WorkerOperation.RUN_CHAIN] = lambda call: self._finished(lambda: enqueue(call.slot), call)
        self._commands[WorkerOperation.OBSERVE_OPERATORS] = lambda call: observed(
            call, lambda it: observe.operators(it, self._options["device"])
        )
        self._commands[WorkerOperation.OBSERVE_KERNELS] = lambda call: observed(call, observe.kernels)


class _Node(ctypes.Structure):
    """Mirrors ``struct node`` of ``runtime.cpp``: the launch of a kernel, or a memset if ``kernel`` is null."""

    _fields_ = [
        ("kernel", ctypes.c_void_p), ("grid", ctypes.c_long), ("args", ctypes.c_void_p),
        ("target", ctypes.c_void_p), ("bytes", ctypes.c_long), ("value", ctypes.c_int),
    ]  # fmt: skip


def bind_plan(program: dict[str, Any], slots: Slots, threads: int) -> Callable[[int], None]:
    """Loads a plan (a solution in the plan format) on the CPU, and resolves the arguments of its kernels for each slot
    (the buffers of one call). An argument is the address of a buffer, or of an 8-byte cell with a scalar. ``program``
    is ``plan.Program`` as JSON. ``threads`` is the number of threads that run a kernel. Returns a function that runs
    the plan in the slot with the given number. The attribute ``steps`` of the returned function has a list for each
    slot, with one function per node of the plan (a launch of a kernel, a library call or a memset)."""
    runtime = ctypes.CDLL(program["runtime"])
    library = ctypes.CDLL(program["library"]) if program["library"] else None
    keep: list[Any] = []
    workspaces: dict[str, int] = {}
    for name, workspace in program["workspaces"].items():
        workspaces[name] = map_memory(-1, max(workspace["bytes"], 1), writable=True)
        if any(pattern := bytes.fromhex(workspace["pattern"])):
            content = pattern * (workspace["bytes"] // len(pattern))
            ctypes.memmove(workspaces[name], content, len(content))

    def bind(slot: int) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]]]:
        """Returns two lists of functions for one slot. Calling all functions of either list runs the plan. A function
        of the first list runs one library node (a matrix product or a convolution), or a series of other nodes. A
        function of the second list runs one node."""
        address = partial(slots.address, slot, workspaces)
        steps: list[Callable[[], Any]] = []
        each: list[Callable[[], Any]] = []
        for ours, items in itertools.groupby(program["nodes"], lambda item: "library" not in item):
            if ours:
                nodes = executor_nodes(list(items), address)
                keep.append(nodes)
                begin, size = ctypes.addressof(nodes), ctypes.sizeof(_Node)
                steps.append(partial(execute, begin, len(nodes)))
                each += [partial(execute, begin + size * index, 1) for index in range(len(nodes))]
            else:
                products = [library_nodes.bind(item, partial(slots.tensor_of, address), "cpu") for item in items]
                steps += products
                each += products
        return steps, each

    def executor_nodes(items: list[dict[str, Any]], address: Callable[[str], int]) -> Any:
        nodes = (_Node * len(items))()
        for node, item in zip(nodes, items, strict=True):
            if "memset" in item:
                node.target, node.bytes, node.value = address(item["memset"]), item["bytes"], item["value"]
                continue
            pointers = (ctypes.c_void_p * max(1, len(item["args"])))()
            for position, argument in enumerate(item["args"]):
                if "buffer" in argument:
                    pointers[position] = address(argument["buffer"])
                else:
                    kind = ctypes.c_double if "float" in argument else ctypes.c_long
                    cell = kind(argument.get("float", argument.get("int", 0)))
                    keep.append(cell)
                    pointers[position] = ctypes.addressof(cell)
            keep.append(pointers)
            node.kernel = ctypes.cast(getattr(library, item["symbol"]), ctypes.c_void_p).value
            node.grid, node.args = item["grid"], ctypes.addressof(pointers)
        return nodes

    execute = runtime.run
    execute.argtypes = [ctypes.c_void_p, ctypes.c_long]
    execute.restype = None
    bound = [bind(slot) for slot in range(len(slots.layout))]
    runtime.start(ctypes.c_long(threads))

    def run(slot: int) -> None:
        for step in bound[slot][0]:
            step()

    run.keep = keep  # type: ignore[attr-defined]
    run.steps = [each for _, each in bound]  # type: ignore[attr-defined]
    return run
