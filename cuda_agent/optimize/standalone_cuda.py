"""Part of an exported ``model_new.py``: a plan on an NVIDIA GPU.  Needs PyTorch with CUDA, whose NVRTC compiles it.

Kernels go to PyTorch's current stream.  One device: the one that is current in the first call.
"""

import ctypes as _ctypes
import importlib.util as _importlib_util
import json as _json
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

import torch

from cuda_agent.optimize.standalone_plan import _built, _Kernels

_CELLS: dict[str, _Any] = {
    "f": _ctypes.c_float, "d": _ctypes.c_double, "i": _ctypes.c_int32, "I": _ctypes.c_uint32, "q": _ctypes.c_int64,
    "Q": _ctypes.c_uint64, "h": _ctypes.c_int16, "H": _ctypes.c_uint16, "b": _ctypes.c_int8, "B": _ctypes.c_uint8,
}  # fmt: skip


class _Attribute(_ctypes.Structure):
    _fields_ = [("id", _ctypes.c_int), ("padding", _ctypes.c_char * 4), ("value", _ctypes.c_uint * 16)]


class _Launch(_ctypes.Structure):
    _fields_ = [
        ("grid", _ctypes.c_uint * 3), ("block", _ctypes.c_uint * 3), ("shared", _ctypes.c_uint),
        ("stream", _ctypes.c_void_p), ("attributes", _ctypes.POINTER(_Attribute)), ("count", _ctypes.c_uint),
    ]  # fmt: skip


class _OnCuda(_Kernels):
    device = "cuda"

    def prepare(self) -> None:
        super().prepare()
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the context that the driver's calls below are for
        self.driver = _ctypes.CDLL("libcuda.so.1")
        module = _ctypes.c_void_p()
        if self.sources:
            folder = self._compiled()
            self._call("cuModuleLoadData", _ctypes.byref(module), (folder / "kernels.cubin").read_bytes())
            names = _json.loads((folder / "names.json").read_text())
        self.keep: list[_Any] = []
        self.patches: list[tuple[_Any, str, int]] = []  # a cell for an address of this call, and which one
        self.steps: list[_Any] = []
        for node in self.program["nodes"]:
            self.steps.append(self._kernel(node, module, names) if "symbol" in node else node)

    def _compiled(self) -> _Path:
        major, minor = torch.cuda.get_device_capability()
        architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        library, includes = _nvrtc()
        request = {
            "library": library, "includes": includes, "architecture": architecture, "unit": "unit.cu",
            "expressions": self.program["expressions"],
        }  # fmt: skip
        files = self.sources | {"nvrtc.py": self.program["nvrtc"]}
        command = [_sys.executable, "-I", "-S", "nvrtc.py", _json.dumps(request)]
        return _built(files, command, "names.json")

    def _call(self, name: str, *arguments: _Any) -> None:
        code = getattr(self.driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def _kernel(self, node: dict[str, _Any], module: _Any, names: dict[str, str]) -> tuple[_Any, _Any, _Any]:
        """Its function, launch configuration and arguments."""
        function = _ctypes.c_void_p()
        self._call("cuModuleGetFunction", _ctypes.byref(function), module, names[node["symbol"]].encode())
        if node["shared"] > 48 << 10:
            self._call("cuFuncSetAttribute", function, 8, node["shared"])
        if node["cluster"] and node["cluster"][0] * node["cluster"][1] * node["cluster"][2] > 8:
            self._call("cuFuncSetAttribute", function, 14, 1)
        place, size = _ctypes.c_uint64(), _ctypes.c_size_t()
        symbol = names[f"&{node['codes']}"].encode()
        self._call("cuModuleGetGlobal_v2", _ctypes.byref(place), _ctypes.byref(size), module, symbol)
        content = _ctypes.create_string_buffer(size.value)
        self._call("cuMemcpyDtoH_v2", content, place, size)
        codes = content.raw.split(b"\0")[0].decode()
        if len(codes) != len(node["args"]):
            raise TypeError(f"{node['symbol']} takes {len(codes)} arguments, the plan gives {len(node['args'])}")
        cells: list[_Any] = []
        for code, argument in zip(codes, node["args"], strict=True):
            if "buffer" in argument:
                kind, _, rest = argument["buffer"].partition(":")
                cells.append(_ctypes.c_uint64(self.places[rest] if kind == "ws" else 0))
                if kind != "ws":
                    self.patches.append((cells[-1], kind, int(rest)))
            else:
                value = argument.get("float", argument.get("int"))
                cells.append(_CELLS[code](value if code in "fd" else int(value)))
        pointers = (_ctypes.c_void_p * max(1, len(cells)))(*(_ctypes.addressof(cell) for cell in cells))
        wanted = [(4, node["cluster"])] if node["cluster"] else []
        wanted += [(2, [1])] if node["cooperative"] else []
        attributes = (_Attribute * max(1, len(wanted)))()
        for attribute, (number, values) in zip(attributes, wanted, strict=False):
            attribute.id, attribute.value = number, (_ctypes.c_uint * 16)(*values)
        config = _Launch(
            (_ctypes.c_uint * 3)(*node["grid"]), (_ctypes.c_uint * 3)(*node["block"]), node["shared"], None,
            attributes, len(wanted),
        )  # fmt: skip
        self.keep += [cells, attributes]
        return function, config, pointers

    def launch(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        buffers = {"in": inputs, "out": outputs, "w": weights}
        for cell, kind, index in self.patches:
            cell.value = buffers[kind][index].data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        for step in self.steps:
            if isinstance(step, tuple):
                step[1].stream = stream
                self._call("cuLaunchKernelEx", _ctypes.byref(step[1]), step[0], step[2], None)
            elif "library" in step:
                self.library(step, buffers)
            else:
                kind, _, rest = step["memset"].partition(":")
                memory = self.workspaces[rest] if kind == "ws" else buffers[kind][int(rest)]
                place, count = _ctypes.c_uint64(memory.data_ptr()), _ctypes.c_size_t(step["bytes"])
                value = _ctypes.c_ubyte(step["value"])
                self._call("cuMemsetD8Async", place, value, count, _ctypes.c_void_p(stream))


def _nvrtc() -> tuple[str, list[str]]:
    """The library that PyTorch brought, or a toolkit's, and the folders of CUDA's headers."""
    found = _importlib_util.find_spec("nvidia")
    packages = [_Path(place) for place in (found.submodule_search_locations or [])] if found else []
    homes = [home for place in packages for home in sorted(place.glob("cu[0-9]*"), reverse=True)]
    homes += [place / "cuda_nvrtc" for place in packages] + [_Path("/usr/local/cuda")]
    for home in homes:
        for library in sorted(home.glob("lib*/libnvrtc.so.*")):
            includes = [home / "include", *(place / "cuda_runtime" / "include" for place in packages)]
            return str(library), [str(folder) for folder in includes if folder.is_dir()]
    raise RuntimeError("no libnvrtc: neither beside PyTorch nor in /usr/local/cuda")
