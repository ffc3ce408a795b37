"""Provides the GPU to a worker: the CUDA context, the device's clock, and the executor of solutions in the plan format.

A solution in the plan format has no host code: ``plan.json`` lists its kernel launches, memsets and library calls. So
the CUDA events that time a call can be trusted. In the other formats, the solution's host code shares this process, so
the judge checks the event times against its own clock."""

import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_agent.sandbox import driver
from cuda_agent.sandbox.wire import DELAY_UNIT
from cuda_agent.sandbox.worker import library_nodes
from cuda_agent.sandbox.worker.shared_tensors import Slots

_CYCLES = 1.9e9  # approximate cycles of the delay kernel per second
_HEAD_START, _LONGEST_DELAY = 2e-5, 2e-2  # seconds
_KNOWN = 1 << 16  # values of the array that proves a context
_CELLS = {
    "f": ctypes.c_float, "d": ctypes.c_double, "i": ctypes.c_int32, "I": ctypes.c_uint32, "q": ctypes.c_int64,
    "Q": ctypes.c_uint64, "h": ctypes.c_int16, "H": ctypes.c_uint16, "b": ctypes.c_int8, "B": ctypes.c_uint8,
}  # fmt: skip


def open_gpu() -> None:
    """Creates the CUDA context and loads the clock's delay kernel. Must run before the process enters the jail (the
    restrictions for untrusted code), because the CUDA driver writes below ``/proc`` when it starts, and the jail
    forbids this."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def is_open(devices: str = "/dev/nvidia") -> bool:
    """Returns whether this process has opened a GPU. Forks of such a process cannot use the GPU. ``devices`` is the
    beginning of the paths of the GPU's files."""
    names: list[str] = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return any(name.startswith(devices) for name in names)


class DeviceClock:
    """Times a call between two CUDA events. A delay kernel runs first, while the host enqueues the call. So the device
    does not wait for the host between the events."""

    def __init__(self) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._host = 0.0

    def __call__(self, call: Callable[[], Any], extra: int = 0) -> tuple[Any, tuple[float, float]]:
        """Runs ``call`` after a delay of ``extra`` times ``DELAY_UNIT``. If ``extra`` is 0, estimates the delay from
        earlier calls. Returns the result, and two times in seconds: the device's time for the call, and the host's time
        to enqueue it."""
        delay = extra * DELAY_UNIT or min(1.5 * self._host + _HEAD_START, _LONGEST_DELAY)
        torch.cuda._sleep(int(delay * _CYCLES))
        begin = time.perf_counter()
        self._start.record()
        result = call()
        self._end.record()
        host = time.perf_counter() - begin
        self._host = max(host, 0.7 * self._host)
        torch.cuda.synchronize()
        return result, (self._start.elapsed_time(self._end) / 1e3, host)


def bind_plan(program: dict[str, Any], slots: Slots) -> Callable[[int], None]:
    """Loads the kernels of a plan (a solution in the plan format), and resolves their arguments for each slot (the
    buffers of one call). ``program`` is ``plan.Program`` as JSON with two more keys: ``image`` is the path of the
    cubin, and ``names`` maps the names of kernels and variables to their mangled names. Returns a function that runs
    the plan in the slot with the given number. Raises ``ValueError`` or ``TypeError`` if the plan gives a kernel wrong
    arguments or too much shared memory."""
    module = driver.Module(Path(program["image"]).read_bytes()) if program["image"] else None
    try:
        return _bound(program, slots, module)
    except Exception:
        if module:
            module.unload()
        raise


def _bound(program: dict[str, Any], slots: Slots, module: driver.Module | None) -> Callable[[int], None]:
    workspaces: dict[str, torch.Tensor] = {}
    for name, workspace in program["workspaces"].items():
        memory = torch.zeros(max(workspace["bytes"], 1), dtype=torch.uint8, device="cuda")
        if any(pattern := bytes.fromhex(workspace["pattern"])) and workspace["bytes"]:
            word = torch.tensor(list(pattern), dtype=torch.uint8, device="cuda")
            memory.view(-1, len(pattern)).copy_(word)
        workspaces[name] = memory
    places = {name: memory.data_ptr() for name, memory in workspaces.items()}
    functions: list[tuple[ctypes.c_void_p | None, str]] = []
    for node in program["nodes"]:
        if "symbol" not in node:
            functions.append((None, ""))
            continue
        assert module
        if node["shared"] > (limit := driver.shared_memory_limit()):
            raise ValueError(f"{node['symbol']}: {node['shared']} bytes of shared memory, a block has at most {limit}")
        wide = math.prod(node["cluster"] or ()) > 8
        function = module.function(program["names"][node["symbol"]], node["shared"], wide)
        codes = module.constant(program["names"][f"&{node['codes']}"]).split(b"\0")[0].decode()
        functions.append((function, codes))

    def bind(slot: int) -> list[Callable[[], Any]]:
        address = partial(slots.address, slot, places)
        steps: list[Callable[[], Any]] = []
        for node, (function, codes) in zip(program["nodes"], functions, strict=True):
            if "memset" in node:
                steps.append(partial(driver.fill_bytes, address(node["memset"]), node["value"], node["bytes"]))
            elif "library" in node:
                steps.append(library_nodes.bind(node, partial(slots.tensor_of, address), "cuda"))
            else:
                assert function
                cells = _arguments(node, codes, address)
                shape = node["grid"], node["block"], cells, node["shared"], node["cluster"], node["cooperative"]
                steps.append(driver.Launch(function, *shape))
        return steps

    bound = [bind(slot) for slot in range(len(slots.layout))]

    def run(slot: int) -> None:
        for step in bound[slot]:
            step()

    run.steps, run.keep, run.module = bound, workspaces, module  # type: ignore[attr-defined]
    run.resources = [driver.resources(function) if function else None for function, _ in functions]  # type: ignore[attr-defined]
    return run


def unload_plan(run: Callable[[int], None] | None) -> None:
    """Removes a plan (a solution in the plan format) from the CUDA context, so that the process can load another plan.
    ``run`` is ``bind_plan``'s result, or ``None`` if ``bind_plan`` failed. Raises ``RuntimeError`` if the context is
    damaged."""
    torch.cuda.synchronize()
    if run and (module := run.module):  # type: ignore[attr-defined]
        module.unload()
    if run is None or run.keep:  # type: ignore[attr-defined]
        getattr(run, "keep", {}).clear()
        torch.cuda.empty_cache()
    known = torch.arange(_KNOWN, dtype=torch.int32)
    if not torch.equal((known.to("cuda") * 3 + 1).cpu(), known * 3 + 1):
        raise RuntimeError("the context no longer computes correctly")


def _arguments(node: dict[str, Any], codes: str, address: Callable[[str], int]) -> list[Any]:
    """Returns the arguments of a plan's kernel node as ctypes values. ``codes`` holds one letter per argument, for its
    type. Raises ``TypeError`` if the arguments do not match the letters."""
    if len(codes) != len(node["args"]):
        raise TypeError(f"{node['symbol']} takes {len(codes)} arguments, the plan gives {len(node['args'])}")
    cells: list[Any] = []
    for position, (code, argument) in enumerate(zip(codes, node["args"], strict=True)):
        if "buffer" in argument:
            if code != "p":
                raise TypeError(f"{node['symbol']}: argument {position} is no pointer, the plan gives a buffer")
            cells.append(ctypes.c_uint64(address(argument["buffer"])))
            continue
        if code not in _CELLS:
            what = "a pointer" if code == "p" else "of a type that a plan cannot give"
            raise TypeError(f"{node['symbol']}: argument {position} is {what}, the plan gives a number")
        value = argument.get("float", argument.get("int"))
        cells.append(_CELLS[code](value if code in "fd" else int(value)))
    return cells
