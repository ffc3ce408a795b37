"""The Python module ``cuda_extension`` inside a candidate worker: calls into the library of the work folder.

The counterpart of ``binding_registry.h``, whose structure ``Value`` it mirrors.  It also holds the published rule that
``ModelNew.forward`` may create and reshape tensors but must compute with the extension: a check in the candidate's own
interpreter, so advisory against a determined cheat.
"""

import ctypes
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

_MOST_DIMS, _MOST_RESULTS = 8, 8
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


def load_module(library: str, names: list[str]) -> types.ModuleType:
    """The module, one function for each registered name."""
    handle = ctypes.CDLL(library)
    module = types.ModuleType("cuda_extension")
    for name in names:
        try:
            native = getattr(handle, f"cuda_extension_{name}")
        except AttributeError:  # its message holds the library's address
            raise ImportError(f"REGISTER_BINDING({name}, ...) is in no source that was compiled") from None
        setattr(module, name, _function(native, name))
    return module


def _function(native: Any, name: str) -> Callable[..., Any]:
    native.restype = ctypes.c_long
    live: list[torch.Tensor] = []  # arguments and allocations of the call under way, by handle

    def allocate(pointer: Any) -> None:
        value = pointer.contents
        tensor = torch.empty(value.sizes[: value.dims], dtype=_DTYPES[value.dtype])
        value.data, value.handle = tensor.data_ptr(), len(live)
        live.append(tensor)

    allocator = _Allocate(allocate)
    message = ctypes.create_string_buffer(256)
    results = (_Value * _MOST_RESULTS)()

    def call(*arguments: Any) -> Any:
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
            else:
                raise TypeError(f"{name}: an argument of type {type(argument).__name__}")
        count = native(allocator, values, ctypes.c_long(len(arguments)), results, message)
        if count < 0:
            raise RuntimeError(message.value.decode(errors="replace"))
        found = [live[results[i].handle] for i in range(count)]
        return None if not found else found[0] if count == 1 else tuple(found)

    call.__name__ = name
    return call


_ALLOWED_TEXT = """
    empty empty_like zeros zeros_like ones ones_like full full_like new_empty new_zeros new_ones new_full empty_strided
    __get__ size dim ndimension numel nelement stride storage_offset element_size data_ptr is_contiguous contiguous
    view view_as reshape flatten unflatten squeeze unsqueeze expand expand_as permute transpose movedim t detach
    is_floating_point get_device type to float double half bfloat16 long int bool __len__ __iter__ __getitem__ unbind
    requires_grad_ __repr__ __bool__ item dtype device shape
"""
_ALLOWED = frozenset(_ALLOWED_TEXT.split())


class OnlyTheExtension(TorchFunctionMode):
    """Refuses torch's operators, as the published rules do; tensors may be created, viewed and looked at."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _ALLOWED:
            name = resolve_name(func) or func.__name__
            raise Cheat(f"ModelNew.forward calls {name}: computing is the extension's part")
        return func(*args, **(kwargs or {}))


class Cheat(Exception):
    """The rules are broken."""
