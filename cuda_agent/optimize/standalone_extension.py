"""Part of an exported ``model_new.py``: the module ``cuda_extension`` of a work folder.  Needs PyTorch and ``g++``, or
``nvcc`` for a GPU.

The counterpart of ``binding_registry.h``, whose structures it mirrors.  Kernels of such a folder go to the default
stream; calls on another one wait for it and are waited for.
"""

import ctypes as _ctypes
import importlib.util as _importlib_util
import os as _os
import shutil as _shutil
import sys as _sys
import types as _types
from pathlib import Path as _Path
from typing import Any as _Any

import torch

from cuda_agent.optimize.standalone_plan import _built, _processor

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip


class _Value(_ctypes.Structure):
    _fields_ = [
        ("kind", _ctypes.c_long), ("integer", _ctypes.c_long), ("number", _ctypes.c_double), ("data", _ctypes.c_void_p),
        ("dims", _ctypes.c_long), ("dtype", _ctypes.c_long), ("handle", _ctypes.c_long),
        ("sizes", _ctypes.c_long * 8), ("strides", _ctypes.c_long * 8),
    ]  # fmt: skip


class _Argument(_ctypes.Structure):
    _fields_ = [("name", _ctypes.c_char_p), ("standard", _Value)]


class _Entry(_ctypes.Structure):
    pass


_Allocate = _ctypes.CFUNCTYPE(None, _ctypes.POINTER(_Value))
_Call = _ctypes.CFUNCTYPE(
    _ctypes.c_long, _ctypes.c_void_p, _Allocate, _ctypes.POINTER(_Value), _ctypes.c_long, _ctypes.POINTER(_Value),
    _ctypes.c_char_p,
)  # fmt: skip
_Entry._fields_ = [
    ("name", _ctypes.c_char_p), ("call", _Call), ("function", _ctypes.c_void_p), ("count", _ctypes.c_long),
    ("named", _ctypes.c_long), ("arguments", _Argument * 32), ("next", _ctypes.POINTER(_Entry)),
]  # fmt: skip


def _extension(files: dict[str, str], units: list[str], device: str, flags: list[str], uses: list[str]) -> _Any:
    """The module, built when this machine has not built it before."""
    command = [*_compiler(device, uses), *flags, *units, "-shared", "-o", "library.so"]
    if device == "cuda":
        command += [f"-Xlinker={_library(name)}" for name in uses]
    identity = _processor() if device == "cpu" else ""
    loaded = _ctypes.CDLL(str(_built(files, command, "library.so", identity) / "library.so"))
    loaded.cuda_extension_entries.restype = _ctypes.POINTER(_Entry)
    module = _types.ModuleType("cuda_extension")
    entry = loaded.cuda_extension_entries()
    while entry:
        name = entry.contents.name.decode()
        setattr(module, name, _function(entry.contents, name, device))
        entry = entry.contents.next
    return module


def _packages() -> list[_Path]:
    found = _importlib_util.find_spec("nvidia")
    return [_Path(place) for place in (found.submodule_search_locations or [])] if found else []


def _compiler(device: str, uses: list[str]) -> list[str]:
    if device == "cpu":
        return ["g++"]
    homes = [home for place in _packages() for home in sorted(place.glob("cu[0-9]*"), reverse=True)]
    toolkit = _Path(_os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    major, minor = torch.cuda.get_device_capability()
    code = f"{major}{minor}" + ("a" if major >= 9 else "")
    for compiler in (_shutil.which("nvcc"), toolkit / "bin" / "nvcc", *(home / "bin" / "nvcc" for home in homes)):
        if compiler and _os.access(compiler, _os.X_OK):
            includes = [place / "cudnn" / "include" for place in _packages()]
            places = []
            if any(str(compiler).startswith(str(place)) for place in _packages()):
                includes += [home / "include" for home in homes]
                places = [home / "lib" for home in homes]
            return [
                str(compiler), "-gencode", f"arch=compute_{code},code=sm_{code}",
                *(f"-I{folder}" for folder in includes if folder.is_dir()), *(f"-L{folder}" for folder in places),
            ]  # fmt: skip
    raise RuntimeError("no nvcc: neither on PATH, nor in CUDA_HOME, nor beside PyTorch")


def _library(name: str) -> str:
    for place in (*_packages(), _Path("/usr/local/cuda/lib64"), _Path("/usr/lib/x86_64-linux-gnu")):
        if found := sorted(place.glob(f"**/lib{name}.so*")):
            return str(found[0])
    raise RuntimeError(f"lib{name} is not installed")


def _function(entry: _Any, name: str, device: str) -> _Any:
    native, function, count = entry.call, entry.function, entry.count
    names = [entry.arguments[i].name.decode() for i in range(entry.named)]
    plain = [entry.arguments[i].standard for i in range(entry.named)]
    standard = {n: {2: v.integer, 3: v.number}.get(v.kind, ...) for n, v in zip(names, plain, strict=True)}

    def call(*given: _Any, **named: _Any) -> _Any:
        arguments = list(given)
        for wanted in names[len(given) :]:
            value = named.pop(wanted, standard[wanted])
            if value is ...:
                raise TypeError(f"{name}: the argument {wanted} is missing")
            arguments.append(value)
        if named or len(arguments) != count:
            raise TypeError(f"{name} takes {count} arguments")
        live: list[torch.Tensor] = []  # arguments and allocations of this call, by handle

        def allocate(pointer: _Any) -> None:
            value = pointer.contents
            tensor = torch.empty(value.sizes[: value.dims], dtype=_DTYPES[value.dtype], device=device)
            value.data, value.handle = tensor.data_ptr(), len(live)
            live.append(tensor)

        values, results = (_Value * max(1, len(arguments)))(), (_Value * 8)()
        message = _ctypes.create_string_buffer(256)
        for value, argument in zip(values, arguments, strict=False):
            if isinstance(argument, torch.Tensor):
                if argument.device.type != device:
                    raise ValueError(f"{name}: a tensor on {argument.device}; this was made for {device}")
                value.kind, value.data, value.dims = 1, argument.data_ptr(), argument.dim()
                value.dtype, value.handle = _DTYPES.index(argument.dtype), len(live)
                value.sizes[: value.dims], value.strides[: value.dims] = argument.shape, argument.stride()
                live.append(argument)
            elif isinstance(argument, int):
                value.kind, value.integer = 2, int(argument)
            elif isinstance(argument, float):
                value.kind, value.number = 3, argument
            elif argument is not None:
                raise TypeError(f"{name}: an argument of type {type(argument).__name__}")
        with torch.no_grad(), _OnDefaultStream(device):
            made = native(function, _Allocate(allocate), values, len(arguments), results, message)
        if made < 0:
            raise RuntimeError(message.value.decode(errors="replace"))
        found = [live[results[i].handle] for i in range(made)]
        return None if not found else found[0] if made == 1 else tuple(found)

    call.__name__ = name
    return call


class _OnDefaultStream:
    """What PyTorch's current stream holds comes before, and what follows on it after."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        if self.device == "cuda":
            self.current, self.default = torch.cuda.current_stream(), torch.cuda.default_stream()
            if self.current != self.default:
                self.default.wait_stream(self.current)

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda" and self.current != self.default:
            self.current.wait_stream(self.default)


def _with_extension(module: _Any, code: str, names: dict[str, _Any]) -> None:
    """Runs ``code``, which imports ``cuda_extension``, in ``names``."""
    before = _sys.modules.get("cuda_extension")
    _sys.modules["cuda_extension"] = module
    try:
        exec(compile(code, "model_new.py", "exec"), names)
    finally:
        if before is None:
            del _sys.modules["cuda_extension"]
        else:
            _sys.modules["cuda_extension"] = before
