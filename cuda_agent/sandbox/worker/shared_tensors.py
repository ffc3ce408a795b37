"""Maps the judge's shared memory as tensors in a worker (the process that runs a task or a solution). Also converts the
arguments of models to and from JSON."""

import ctypes
import json
import math
import mmap
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cuda_agent.sandbox import driver
from cuda_agent.sandbox.wire import span


class Slots:
    """The memory that the judge shares with a worker, mapped in the worker. A slot is the room for the inputs and
    outputs of one call. All slots share the weights. The worker cannot write to inputs and weights.
    ``self.inputs[slot]`` and ``self.outputs[slot]`` list the addresses of a slot's tensors. ``self.weights`` lists the
    addresses of the weights."""

    def __init__(
        self, spec: dict[str, Any], places: dict[str, Any], fds: list[int], device: str, before: "Slots | None" = None
    ) -> None:
        """Maps the input area, which the worker can only read, and the output area, which it can also write.

        Args:
            spec: The shapes and dtypes of the tensors, as the JSON of a ``TaskSpec``.
            places: The sizes of the areas and the offsets of the tensors in bytes
                (``judge.memory.buffers.Buffers.places``). ``places["layout"]`` has one item per slot:
                ``{"in": [offsets], "out": [offsets]}``.
            fds: The descriptors of the two areas. The constructor closes them.
            device: ``cpu`` or ``cuda``.
            before: The slots of the previous solution in this process, if any. On a GPU, their mappings are used again
                if they lie in the same areas, and removed otherwise."""
        layout, sizes = places["layout"], places["sizes"]
        self._numbers = places["areas"]
        self._areas: list[driver.Shared] = []
        if device == "cuda":
            if before and before._numbers == self._numbers:
                self._areas = before._areas
            else:
                for area in before._areas if before else ():
                    area.close()
                self._areas = [driver.Shared(sizes[0], fds[0], driver.READ), driver.Shared(sizes[1], fds[1])]
            base_in, base_out = (area.address for area in self._areas)
        else:
            base_in = map_memory(fds[0], sizes[0], writable=False)
            base_out = map_memory(fds[1], sizes[1], writable=True)
        self.written = base_out
        self.given = range(base_in, base_in + sizes[0])  # addresses of inputs and weights
        for descriptor in fds:
            os.close(descriptor)
        self.layout = layout
        self.device = device
        self.inputs = [[base_in + offset for offset in slot["in"]] for slot in layout]
        self.outputs = [[base_out + offset for offset in slot["out"]] for slot in layout]
        self.weights = [base_in + offset for offset in places["weights"]]
        self._spec = spec

    def address(self, slot: int, workspaces: Mapping[str, int], buffer: str) -> int:
        """Returns the address of a buffer of a plan (a solution that lists kernel launches). ``buffer`` names an input,
        an output or a weight by its index (``in:0``, ``out:0``, ``w:0``), or a workspace (``ws:name``). ``slot``
        selects the inputs and outputs. ``workspaces`` maps the names of workspaces to their addresses."""
        kind, _, rest = buffer.partition(":")
        if kind == "ws":
            return workspaces[rest]
        return {"in": self.inputs[slot], "out": self.outputs[slot], "w": self.weights}[kind][int(rest)]

    def tensor(self, address: int, tensor: dict[str, Any]) -> torch.Tensor:
        return tensor_at(address, tensor, self.device)

    def tensor_of(self, address: Callable[[str], int], tensor: dict[str, Any]) -> torch.Tensor:
        """Returns a tensor over a buffer of a plan (a solution that lists kernel launches). It serves a matrix product
        or a convolution that a library computes. ``tensor`` holds the buffer's name, the shape and the dtype.
        ``address`` is a function that returns the address of a buffer from its name."""
        return self.tensor(address(tensor["buffer"]), tensor)

    def input_tensors(self, slot: int) -> list[torch.Tensor]:
        return [self.tensor(a, t) for a, t in zip(self.inputs[slot], self._spec["inputs"], strict=True)]

    def output_tensors(self, slot: int) -> list[torch.Tensor]:
        return [self.tensor(a, t) for a, t in zip(self.outputs[slot], self._spec["outputs"], strict=True)]

    def weight_tensors(self) -> dict[str, torch.Tensor]:
        spec = self._spec["weights"]
        return {name: self.tensor(a, spec[name]) for a, name in zip(self.weights, spec, strict=True)}


def map_memory(descriptor: int, size: int, writable: bool) -> int:
    """Maps ``size`` bytes of the shared memory with the file descriptor ``descriptor``, and returns the address. If
    ``descriptor`` is -1, maps new memory that no other process shares. Raises ``MemoryError`` if the mapping fails."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    kind = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    kind |= mmap.MAP_POPULATE  # so that no first touch of a page is timed
    address = _libc.mmap(None, size, protection, kind, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"{size} bytes cannot be mapped")
    return int(address)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def tensor_at(address: int, tensor: dict[str, Any], device: str) -> torch.Tensor:
    """Returns a tensor with the shape and dtype of ``tensor`` over memory at ``address``. The memory must stay
    mapped."""
    dtype: torch.dtype = getattr(torch, tensor["dtype"])
    count = math.prod(tensor["shape"])
    if count == 0:
        return torch.empty(tensor["shape"], dtype=dtype, device=device)
    if device == "cuda":
        form = {"data": (address, False), "shape": (count * dtype.itemsize,), "typestr": "|u1", "version": 3}
        foreign = types.SimpleNamespace(__cuda_array_interface__=form)
        return torch.as_tensor(foreign, device="cuda").view(dtype).view(tensor["shape"])
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(tensor["shape"])


def flatten(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a model's result, in order. A number becomes a tensor without dimensions, and ``None`` is
    left out. Lists, tuples and dictionaries are flattened. Raises ``TypeError`` for other values."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, bool | int | float):
        return [torch.tensor(value)]
    if isinstance(value, dict | list | tuple):
        return [t for item in (value.values() if isinstance(value, dict) else value) for t in flatten(item)]
    if value is None:
        return []
    raise TypeError(f"an output of type {type(value).__name__}")


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def store(results: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if len(results) != len(targets):
        raise ValueError(f"{len(results)} outputs instead of {len(targets)}")
    for index, (result, target) in enumerate(zip(results, targets, strict=True)):
        if result.shape != target.shape or result.dtype != target.dtype:
            forms = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (result, target)]
            raise ValueError(f"output {index} is {forms[0]} instead of {forms[1]}")
        if result.data_ptr() != target.data_ptr() or not result.is_contiguous():
            target.copy_(result)


def zeros(target: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """Returns zeros with the shape and dtype of ``target``, and with ``strides`` if given."""
    if not strides:
        return torch.zeros_like(target)
    return target.new_zeros(span(target.shape, strides)).as_strided(target.shape, strides)


def owned(result: torch.Tensor, given: range) -> torch.Tensor:
    """Returns ``result`` if it is contiguous and does not begin in ``given``, the addresses of the inputs and weights.
    Otherwise returns a contiguous copy."""
    if result.is_contiguous() and result.data_ptr() not in given:
        return result
    return result.clone(memory_format=torch.contiguous_format)


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def plain(value: Any) -> dict[str, Any]:
    """Returns a plain value (see ``is_plain``) as JSON: ``{"value": value}``. JSON has no tuples, so a value with
    tuples gets a second entry, ``typed``, which tells them from lists."""
    kept = _typed(value)
    return {"value": value} | ({"typed": kept} if '{"tuple": ' in json.dumps(kept) else {})


def plain_value(item: dict[str, Any]) -> Any:
    """Returns the value that ``plain`` has made JSON of."""
    return _untyped(item["typed"]) if "typed" in item else item["value"]


def _typed(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_typed(item) for item in value]}
    return {"dict": {key: _typed(item) for key, item in value.items()}} if isinstance(value, dict) else value


def _untyped(kept: Any) -> Any:
    if not isinstance(kept, dict):
        return kept
    ((kind, items),) = kept.items()
    if kind == "dict":
        return {key: _untyped(item) for key, item in items.items()}
    values = [_untyped(item) for item in items]
    return tuple(values) if kind == "tuple" else values


def argument_of(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns an argument of a model as JSON: ``{"tensor": index}``, ``{"value": plain value}``, or a list of such
    items. Appends the argument's tensors to ``tensors``; the indices refer to this list. Raises ``TypeError`` if the
    argument holds anything but plain values, tensors and lists."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if is_plain(value):
        return plain(value)
    if isinstance(value, list | tuple):
        return [argument_of(item, tensors) for item in value]
    raise TypeError(f"get_inputs() gives a {type(value).__name__}; tensors, numbers and lists of them are supported")


def draw(get_inputs: Callable[[], Any], device: str) -> tuple[list[Any], list[torch.Tensor]]:
    """Draws arguments with a task's ``get_inputs``. Returns the arguments as JSON (see ``argument_of``), and their
    tensors on ``device``. Raises ``TypeError`` if the arguments are not supported."""
    with torch.device(device):  # creating tensors on the device is much faster than moving them
        values = get_inputs()
    if not isinstance(values, list | tuple):
        raise TypeError("get_inputs() must give a list")
    tensors: list[torch.Tensor] = []
    arguments = [argument_of(value, tensors) for value in values]
    if any(tensor.layout != torch.strided or tensor.is_quantized for tensor in tensors):
        raise TypeError("get_inputs() gives a sparse or quantized tensor")
    return arguments, [t.detach().to(device).contiguous().resolve_conj().resolve_neg() for t in tensors]


def rebuild(argument: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(argument, list):
        return [rebuild(item, tensors) for item in argument]
    return tensors[argument["tensor"]] if "tensor" in argument else plain_value(argument)
