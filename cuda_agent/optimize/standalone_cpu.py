"""Part of an exported ``model_new.py``: runs a plan on the CPU.  Needs PyTorch and ``g++``.

A plan is a list of nodes, such as kernel launches, that run in order.  The sandbox's executor (``runtime.cpp``) runs
the kernels.  It uses as many threads as PyTorch.  Kernels are compiled with the sandbox's compiler flags."""

import ctypes as _ctypes
import itertools as _itertools
from typing import Any as _Any

import torch

from cuda_agent import machine as _machine
from cuda_agent.optimize.standalone_plan import _built, _Kernels, _loaded


class _Node(_ctypes.Structure):
    _fields_ = [
        ("kernel", _ctypes.c_void_p), ("grid", _ctypes.c_long), ("args", _ctypes.c_void_p),
        ("target", _ctypes.c_void_p), ("bytes", _ctypes.c_long), ("value", _ctypes.c_int),
    ]  # fmt: skip


class _OnCpu(_Kernels):
    """Runs a plan on the CPU.  PyTorch runs the library nodes (matrix products and convolutions).  The executor,
    ``runtime.cpp``, runs all kernels and memsets between two library nodes in one call."""

    def prepare(self) -> None:
        super().prepare()
        program = self.program
        runtime = self._library({"runtime.cpp": program["runtime"]}, "runtime.cpp")
        self.runtime = _loaded(_ctypes.CDLL, runtime)
        self.runtime.run.argtypes = [_ctypes.c_void_p, _ctypes.c_long]
        kernels = _loaded(_ctypes.CDLL, self._library(self.sources, "unit.cpp")) if self.sources else None
        self.keep: list[_Any] = []
        self.patches: list[tuple[_Any, _Any, str, int]] = []  # addresses that change by call
        self.steps: list[_Any] = []
        for ours, items in _itertools.groupby(program["nodes"], lambda node: "library" not in node):
            listed = list(items)
            self.steps += [self._nodes(listed, kernels)] if ours else listed
        self.runtime.start(_ctypes.c_long(torch.get_num_threads()))

    def _library(self, files: dict[str, str], unit: str) -> str:
        command = ["g++", *self.program["flags"], unit, "-shared", "-o", "library.so"]
        return str(_built(files, command, "library.so", _machine.processor()) / "library.so")

    def _nodes(self, items: list[dict[str, _Any]], kernels: _Any) -> _Any:
        nodes = (_Node * len(items))()
        for node, item in zip(nodes, items, strict=True):
            if "memset" in item:
                node.bytes, node.value = item["bytes"], item["value"]
                self._place(node, "target", item["memset"])
                continue
            pointers = (_ctypes.c_void_p * max(1, len(item["args"])))()
            for position, argument in enumerate(item["args"]):
                if "buffer" in argument:
                    self._place(pointers, position, argument["buffer"])
                else:
                    kind = _ctypes.c_double if "float" in argument else _ctypes.c_long
                    cell = kind(argument.get("float", argument.get("int", 0)))
                    self.keep.append(cell)
                    pointers[position] = _ctypes.addressof(cell)
            self.keep.append(pointers)
            node.kernel = _ctypes.cast(getattr(kernels, item["symbol"]), _ctypes.c_void_p).value
            node.grid, node.args = item["grid"], _ctypes.addressof(pointers)
        return nodes

    def _place(self, holder: _Any, where: _Any, buffer: str) -> None:
        kind, _, rest = buffer.partition(":")
        if kind == "ws":
            _set(holder, where, self.places[rest])
        else:
            self.patches.append((holder, where, kind, int(rest)))

    def launch(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        buffers = {"in": inputs, "out": outputs, "w": weights}
        addresses = {kind: [tensor.data_ptr() for tensor in tensors] for kind, tensors in buffers.items()}
        for holder, where, kind, index in self.patches:
            _set(holder, where, addresses[kind][index])
        for step in self.steps:
            if isinstance(step, dict):
                self.library(step, buffers)
            else:
                self.runtime.run(_ctypes.addressof(step), len(step))


def _set(holder: _Any, where: _Any, address: int) -> None:
    if isinstance(where, str):
        setattr(holder, where, address)
    else:
        holder[where] = address
