"""Provides the Python module ``cuda_extension`` to a solution in the extension format. Such a solution consists of
``model_new.py`` and C++ or CUDA files. The functions of ``cuda_extension`` call the library that is built from these
files.

This file also checks a rule of the format: ``ModelNew.forward`` may create and reshape tensors with torch, but must
compute with the extension. The check runs in the same interpreter as the solution, so a deliberate attack can evade it.
The structure ``_Value`` has the layout of ``Value`` in ``binding_registry.h``."""

import ctypes
import math
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from cuda_agent.sandbox.wire import ALLOWED
from cuda_agent.sandbox.worker.shared_tensors import store

_MOST_DIMS, _MOST_RESULTS, _MOST_ARGUMENTS = 8, 8, 32
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class _Value(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_long), ("integer", ctypes.c_long), ("number", ctypes.c_double), ("data", ctypes.c_void_p),
        ("dims", ctypes.c_long), ("dtype", ctypes.c_long), ("handle", ctypes.c_long),
        ("sizes", ctypes.c_long * _MOST_DIMS), ("strides", ctypes.c_long * _MOST_DIMS),
    ]  # fmt: skip


_Allocate = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Value))


class _Argument(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("standard", _Value)]


class _Entry(ctypes.Structure):
    pass


_Call = ctypes.CFUNCTYPE(
    ctypes.c_long, ctypes.c_void_p, _Allocate, ctypes.POINTER(_Value), ctypes.c_long, ctypes.POINTER(_Value),
    ctypes.c_char_p,
)  # fmt: skip
_Entry._fields_ = [
    ("name", ctypes.c_char_p), ("call", _Call), ("function", ctypes.c_void_p), ("count", ctypes.c_long),
    ("named", ctypes.c_long), ("arguments", _Argument * _MOST_ARGUMENTS), ("next", ctypes.POINTER(_Entry)),
]  # fmt: skip


class Outputs:
    """Allocates the tensors that an extension creates. Places the outputs of a call directly in the judge's output
    memory, so that no copy is timed. This works if every call allocates tensors in the same order. For example, if the
    third tensor of the previous call became output 0, the third tensor of this call gets the judge's memory of output
    0. ``store`` copies all other outputs. ``targets[slot]`` lists the output tensors of a slot (the buffers of one
    call)."""

    def __init__(self, targets: list[list[torch.Tensor]], device: str = "cpu") -> None:
        self._targets = targets
        self._device = device
        self._slot = 0
        self._made: list[int] = []  # addresses, in the order of this call's allocations
        self._wanted: dict[int, int] = {}  # place in the order of allocations -> index of the output
        self.watch: Callable[[str, str, float], None] | None = None  # called for every call of the extension

    def begin(self, slot: int) -> None:
        self._slot = slot
        self._made.clear()

    def empty(self, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        index = self._wanted.get(len(self._made))
        target = None if index is None else self._targets[self._slot][index]
        if target is not None and target.dtype == dtype and target.numel() == math.prod(sizes):
            tensor = target.view(sizes)
        else:
            tensor = torch.empty(sizes, dtype=dtype, device=self._device)
        self._made.append(tensor.data_ptr())
        return tensor

    def store(self, results: list[torch.Tensor]) -> None:
        targets = self._targets[self._slot]
        places = [t.data_ptr() for t in targets]
        for index, (result, place) in enumerate(zip(results, places, strict=False)):
            if result.data_ptr() in places and not (result.data_ptr() == place and result.is_contiguous()):
                # Another output's memory, which may be written first, or another order of this output's.
                results[index] = result.clone()
        self._wanted = {
            self._made.index(result.data_ptr()): index
            for index, result in enumerate(results)
            if result.numel() and result.is_contiguous() and result.data_ptr() in self._made
        }
        store(results, targets)


def load_module(library: str, outputs: Outputs) -> types.ModuleType:
    """Loads the shared library at the path ``library``. Returns the module ``cuda_extension`` with the functions that
    the library registers."""
    handle = ctypes.CDLL(library)
    handle.cuda_extension_entries.restype = ctypes.POINTER(_Entry)
    module = types.ModuleType("cuda_extension")
    entry = handle.cuda_extension_entries()
    while entry:
        name = entry.contents.name.decode()
        setattr(module, name, _function(entry.contents, name, outputs))
        entry = entry.contents.next
    return module


def _function(entry: _Entry, name: str, outputs: Outputs) -> Callable[..., Any]:
    native, function, count = entry.call, entry.function, entry.count
    names = [entry.arguments[i].name.decode() for i in range(entry.named)]
    defaults = {name: entry.arguments[i].standard for i, name in enumerate(names)}
    standard = {n: d.integer if d.kind == 2 else d.number for n, d in defaults.items() if d.kind in (2, 3)}
    live: list[torch.Tensor] = []  # arguments and allocations of the call under way, by handle

    def allocate(pointer: Any) -> None:
        value = pointer.contents
        tensor = outputs.empty(value.sizes[: value.dims], _DTYPES[value.dtype])
        value.data, value.handle = tensor.data_ptr(), len(live)
        live.append(tensor)

    allocator = _Allocate(allocate)
    message = ctypes.create_string_buffer(256)
    results = (_Value * _MOST_RESULTS)()

    def call(*given: Any, **named: Any) -> Any:
        arguments = _complete(name, given, named, names, standard, count)
        live.clear()
        values = (_Value * max(1, len(arguments)))()
        for value, argument in zip(values, arguments, strict=False):
            if isinstance(argument, torch.Tensor):
                if argument.dim() > _MOST_DIMS or argument.dtype not in _CODES:
                    raise TypeError(f"{name}: a {argument.dtype} tensor of {argument.dim()} dimensions")
                value.kind, value.data, value.dims = 1, argument.data_ptr(), argument.dim()
                value.dtype, value.handle = _CODES[argument.dtype], len(live)
                value.sizes[: value.dims], value.strides[: value.dims] = argument.shape, argument.stride()
                live.append(argument)
            elif isinstance(argument, int):
                value.kind, value.integer = 2, int(argument)
            elif isinstance(argument, float):
                value.kind, value.number = 3, argument
            elif argument is not None:
                raise TypeError(f"{name}: an argument of type {type(argument).__name__}")
        begin = time.perf_counter() if outputs.watch else 0.0
        made = native(function, allocator, values, len(arguments), results, message)
        if outputs.watch:
            outputs.watch(name, "own", time.perf_counter() - begin)
        if made < 0:
            raise RuntimeError(message.value.decode(errors="replace"))
        found = [live[results[i].handle] for i in range(made)]
        live.clear()
        return None if not found else found[0] if made == 1 else tuple(found)

    call.__name__ = name
    return call


def _complete(
    name: str, given: tuple[Any, ...], named: dict[str, Any], names: list[str], standard: dict[str, Any], count: int
) -> list[Any]:
    """Returns the arguments of a call of the extension's function ``name``, in the order of its parameters. ``given``
    and ``named`` are the positional and the keyword arguments. ``names`` holds the names of the parameters, and
    ``standard`` holds default values. Raises ``TypeError`` if an argument is missing, if a keyword is unknown, or if
    the number of arguments is not ``count``."""
    arguments = list(given)
    for wanted in names[len(given) :]:
        if wanted not in named and wanted not in standard:
            raise TypeError(f"{name}: the argument {wanted} is missing")
        arguments.append(named.pop(wanted) if wanted in named else standard[wanted])
    if named:
        raise TypeError(f"{name}: there is no argument {next(iter(named))}")
    if len(arguments) != count:
        raise TypeError(f"{name}: wrong number of arguments: {len(arguments)} instead of {count}")
    return arguments


class OnlyTheExtension(TorchFunctionMode):
    """A context that raises ``Cheat`` when an operator of torch is called. Operators that create, view or inspect
    tensors (``wire.ALLOWED``) are permitted."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ALLOWED:
            name = resolve_name(func) or func.__name__
            raise Cheat(f"ModelNew.forward calls {name}: computing is the extension's part")
        return func(*args, **(kwargs or {}))


class Cheat(Exception):
    """The solution breaks a rule of its format."""
