"""The candidate worker: runs one solution, in any lane, and dies."""

import contextlib
import ctypes
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from cuda_agent.sandbox.binding import OnlyTheExtension, Outputs, load_module
from cuda_agent.sandbox.serving import Worker, run_module
from cuda_agent.sandbox.slots import Slots, flatten, map_memory, rebuild, store
from cuda_agent.sandbox.wire import Frame


class Candidate(Worker):
    """Runs one solution.  It is started before anybody knows which one: first come the buffers (``B``), then the empty
    call may be timed, and then the solution is loaded (``L``)."""

    def __init__(self, channel: socket.socket, options: dict[str, Any], fds: list[int]) -> None:
        super().__init__(channel, options, fds)
        self._commands = {"B": self.take_buffers}

    def take_buffers(self, frame: Frame) -> None:
        self._options = options = self._options | frame.body
        self._slots = Slots(
            options["spec"], options["layout"], options["weights"], frame.fds, options["sizes"], options["device"]
        )
        # On the CPU its time is subtracted, so it holds nothing that a solution could leave out, such as copying
        # outputs to their place.  On a GPU it goes into a bound that must not be too high: it does all of that.
        self._commands = {"N": self.empty_call if options["device"] == "cuda" else lambda frame: None}
        self._commands["L"] = self.load_plan if options["lane"] == "plan" else self.load_model

    def empty_call(self, frame: Frame) -> Any:
        targets = self._slots.output_tensors(frame.slot)
        _, times = self._clocked(lambda: None, frame.extra)
        store([torch.zeros_like(target) for target in targets], targets)
        torch.cuda.synchronize()
        return times

    def load_plan(self, frame: Frame) -> None:
        if self._options["device"] == "cuda":
            from cuda_agent.sandbox import gpu

            run = gpu.bind_plan(frame.body, self._slots)
        else:
            run = bind_plan(frame.body, self._slots, self._options["threads"])
        self._commands["R"] = lambda call: self._clocked(lambda: run(call.slot))[1]

    def load_model(self, frame: Frame) -> None:
        """``ModelNew`` of the extension lane, with its library and the rule to compute with it alone; or of the python
        lane, free to use torch.  Built with the random numbers that built the reference, and given its weights."""
        spec, restricted = self._options["spec"], self._options["lane"] == "extension"
        numbers = range(len(self._slots.layout))
        given = [rebuild(spec["arguments"], self._slots.input_tensors(slot)) for slot in numbers]
        outputs = Outputs([self._slots.output_tensors(slot) for slot in numbers], self._options["device"])
        if restricted:
            sys.modules["cuda_extension"] = load_module(frame.body["library"], outputs)
        torch.manual_seed(frame.body["seed"])
        module = run_module("model_new", frame.body["code"], "model_new.py")
        if not hasattr(module, "ModelNew"):
            raise AttributeError("model_new.py defines no ModelNew")
        model = module.ModelNew(*[item["value"] for item in spec["init"]]).eval().to(self._options["device"])
        weights = self._slots.weight_tensors()
        if restricted or model.state_dict().keys() == weights.keys():  # KernelBench's own solutions may rename them
            model.load_state_dict(weights, strict=True)

        def run(call: Frame) -> Any:
            outputs.begin(call.slot)
            with OnlyTheExtension() if restricted else contextlib.nullcontext():
                results, times = self._clocked(lambda: model(*given[call.slot]), call.extra)
            outputs.store(flatten(results))
            if self._options["device"] == "cuda":
                torch.cuda.synchronize()
            return times

        self._commands["R"] = run


class _Node(ctypes.Structure):
    """Mirrors ``struct node`` of runtime.cpp: a kernel, or a memset when ``kernel`` is null."""

    _fields_ = [
        ("kernel", ctypes.c_void_p), ("grid", ctypes.c_long), ("args", ctypes.c_void_p),
        ("target", ctypes.c_void_p), ("bytes", ctypes.c_long), ("value", ctypes.c_int),
    ]  # fmt: skip


def bind_plan(program: dict[str, Any], slots: Slots, threads: int) -> Callable[[int], None]:
    """Load the libraries and resolve the program's arguments to addresses, once a slot.  ``program`` is
    ``plan.Program`` as JSON.  A scalar argument is an 8-byte cell; a buffer argument is its address."""
    runtime = ctypes.CDLL(program["runtime"])
    library = ctypes.CDLL(program["library"]) if program["library"] else None
    keep: list[Any] = []
    workspaces: dict[str, int] = {}
    for name, workspace in program["workspaces"].items():
        workspaces[name] = map_memory(-1, max(workspace["bytes"], 1), writable=True)
        if workspace["pattern"].strip("0"):
            pattern = bytes.fromhex(workspace["pattern"])
            content = pattern * (workspace["bytes"] // len(pattern))
            ctypes.memmove(workspaces[name], content, len(content))

    def bind(slot: int) -> Any:
        def address(buffer: str) -> int:
            return slots.address(slot, buffer, workspaces)

        nodes = (_Node * len(program["nodes"]))()
        for node, item in zip(nodes, program["nodes"], strict=True):
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

    bound = [bind(slot) for slot in range(len(slots.layout))]
    runtime.start(ctypes.c_long(threads))
    execute = runtime.run
    execute.argtypes = [ctypes.c_void_p, ctypes.c_long]
    execute.restype = None
    count = len(program["nodes"])

    def run(slot: int) -> None:
        execute(ctypes.addressof(bound[slot]), count)

    run.keep = keep  # type: ignore[attr-defined]
    return run
