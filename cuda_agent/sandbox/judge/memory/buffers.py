"""Manages the memory that the judge shares with its workers, the processes that run a candidate or a reference task.

Each worker shares two memory areas with the judge. The worker can only read the input area, which holds inputs and a
candidate's weights. The worker writes to the output area, and the judge copies the outputs from there. A slot is the
room for the inputs and outputs of one call. Before every call the judge fills the slot's outputs, and the gaps beside
them, with poison (large numbers). After the call, poison in an output shows that the worker did not write it. A gap
without its poison shows that the worker wrote outside of its outputs. Writes beyond a gap are not detected.

``Area`` lies in CPU memory, and its tensors are NumPy arrays (bfloat16 as its 16 raw bits). ``device.Area`` lies in GPU
memory."""

import contextlib
import fcntl
import math
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy

from cuda_agent.sandbox.jail.processes import WorkerError
from cuda_agent.sandbox.wire import TaskSpec, Tensor

Array = numpy.ndarray[Any, Any]
DTYPES = {
    "float32": "f4", "float64": "f8", "float16": "f2", "bfloat16": "u2", "int64": "i8", "int32": "i4", "int16": "i2",
    "int8": "i1", "uint8": "u1", "bool": "u1", "complex64": "c8", "complex128": "c16",
}  # fmt: skip
_ALIGN = 256  # bytes: kernels may rely on the alignment of GPU allocations; vector instructions need less
_GAPS = 1 << 16  # bytes added to a spare area: the next candidate's gaps may be wider
_NOTHING = Tensor((0,), "uint8")
_MOST_SPARE = 256 << 20  # bytes
_F_ADD_SEALS, _SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1033, 1, 2, 4, 16


def byte_count(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * numpy.dtype(DTYPES[tensor.dtype]).itemsize


def call_bytes(spec: TaskSpec) -> int:
    """Returns the bytes of a task's inputs and outputs together."""
    return sum(byte_count(tensor) for tensor in (*spec.inputs, *spec.outputs))


class Area:
    """An area of shared CPU memory, with ``size`` bytes but at least one page. A worker maps it through the file
    descriptor ``self.descriptor``. If ``read_only`` is true, the worker cannot write to the area. If ``touched`` is
    true, the constructor allocates all pages at once but does not seal the size. The caller must then call ``fit``
    before it uses the area."""

    number = 0  # areas of a GPU have numbers

    def __init__(self, size: int, read_only: bool, touched: bool = False) -> None:
        self.size = max(size, mmap.PAGESIZE)
        self._read_only = read_only
        self.descriptor = os.memfd_create("area", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self.size)
        self._map = mmap.mmap(self.descriptor, self.size, mmap.MAP_SHARED | (mmap.MAP_POPULATE if touched else 0))
        self.bytes: Array = numpy.empty(0, numpy.uint8)
        if not touched:
            self.fit(size)

    def fit(self, size: int) -> None:
        """Shrinks the area to ``size`` bytes (at least one page) and seals its size, so that no process can resize it.
        A write past its last page then faults."""
        size = max(size, mmap.PAGESIZE)
        if size < self.size:
            self._map.resize(size)
            self.size = size
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL | (_SEAL_FUTURE_WRITE if self._read_only else 0)
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, seals)
        self.bytes = numpy.frombuffer(self._map, numpy.uint8)

    def view(self, offset: int, tensor: Tensor) -> Array:
        count = byte_count(tensor)
        return self.bytes[offset : offset + count].view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def write(self, offset: int, tensor: Tensor, values: Array) -> None:
        self.view(offset, tensor)[...] = values

    def read(self, offset: int, tensor: Tensor) -> Array:
        return self.view(offset, tensor).copy()

    def raw(self, offset: int, size: int) -> bytes:
        return self.bytes[offset : offset + size].tobytes()

    def poison(self, offset: int, size: int, pattern: bytes) -> None:
        """Fills ``size`` bytes with repeats of the 4-byte ``pattern``. ``offset`` and ``size`` are multiples of 4."""
        self.bytes[offset : offset + size].view(numpy.uint32)[...] = numpy.frombuffer(pattern, numpy.uint32)[0]

    def settle(self) -> None:
        """Does nothing. ``device.Area.settle`` waits until copies on a GPU are finished. On the CPU, ``read`` and
        ``write`` return only after the copy."""

    def close(self) -> None:
        del self.bytes
        with contextlib.suppress(BufferError):  # a view still uses the map, and frees it in the end
            self._map.close()
        os.close(self.descriptor)


class Spare:
    """A spare pair of areas (input and output) for the next candidate. ``make`` allocates the pair while the judge is
    idle, because allocation takes longer than the checks of a small task. Each area is at least as large as the largest
    that the last eight candidates needed. ``make`` allocates no pair above 256 MB."""

    def __init__(self) -> None:
        self._asked: deque[tuple[int, int]] = deque(maxlen=8)
        self._areas: tuple[Area, Area] | None = None

    def take(self, in_size: int, out_size: int) -> tuple[Area, Area]:
        self._asked.append((in_size, out_size))
        found, self._areas = self._areas, None
        if found:
            if found[0].size >= in_size and found[1].size >= out_size:
                found[0].fit(in_size)
                found[1].fit(out_size)
                return found
            for area in found:
                area.close()
        return Area(in_size, read_only=True), Area(out_size, read_only=False)

    def make(self) -> None:
        sizes = [max(asked) + _GAPS for asked in zip(*self._asked, strict=True)]
        if self._areas is None and sizes and sum(sizes) <= _MOST_SPARE:
            self._areas = Area(sizes[0], True, touched=True), Area(sizes[1], False, touched=True)

    def close(self) -> None:
        for area in self._areas or ():
            area.close()
        self._areas = None


class Buffers:
    """The input area and the output area of one worker, and the byte offsets of the tensors in them.

    Args:
        spec: The shapes and dtypes of the task's inputs, outputs and weights.
        slots: The number of slots. Each slot holds the inputs and outputs of one call.
        examples: The number of examples that a reference worker (which runs the task's own model) can make in one
            request. An example is a set of inputs with the model's outputs. If positive, the output area also has room
            for the examples and the weights, which the worker writes. The outputs of the first example lie in the first
            slot. Zero for a candidate's worker.
        fixed: Whether the gaps between tensors have a fixed width, so that offsets are the same in every run. Otherwise
            the widths are random.
        areas: A function that returns the two areas for their two sizes in bytes. By default the areas lie in CPU
            memory."""

    def __init__(
        self,
        spec: TaskSpec,
        slots: int,
        examples: int = 0,
        fixed: bool = False,
        areas: Callable[[int, int], tuple[Any, Any]] | None = None,
    ) -> None:
        self.spec = spec
        self._fixed = fixed
        self._sizes = [0, 0]  # of the input and the output area
        weights = list(spec.weights.values())
        self.weights = [] if examples else [self._place(0, t) for t in weights]
        self.slots: list[dict[str, list[int]]] = []
        self._rooms: list[range] = []  # of each slot: its bytes of the output area, gaps included
        self._patterns: dict[int, bytes] = {}  # poison of each slot that was filled
        for _ in range(slots):
            ins, begin = [self._place(0, t) for t in spec.inputs], self._sizes[1]
            self.slots.append({"in": ins, "out": [self._place(1, t) for t in spec.outputs]})
            self._rooms.append(range(begin, self._place(1, _NOTHING)))
        drawn = [[self._place(1, t) for t in spec.inputs] for _ in range(examples)]
        outs = [self.slots[0]["out"], *([self._place(1, t) for t in spec.outputs] for _ in drawn[1:])]
        self.examples = [[*ins, *out] for ins, out in zip(drawn, outs, strict=False)]
        self.value_weights = [self._place(1, t) for t in weights] if examples else []
        made: tuple[Any, Any] = (areas or Spare().take)(*self._sizes)
        self.input_area, self.output_area = made
        self.descriptors = [self.input_area.descriptor, self.output_area.descriptor]
        self.places = {  # for the worker: offsets and sizes in bytes, and the numbers of the two areas
            "layout": self.slots, "sizes": [self.input_area.size, self.output_area.size], "weights": self.weights,
            "areas": [self.input_area.number, self.output_area.number],
            "examples": self.examples, "value_weights": self.value_weights,
        }  # fmt: skip

    def _place(self, area: int, tensor: Tensor) -> int:
        """Reserves room for ``tensor`` in the input area (0) or the output area (1). Returns the offset in bytes."""
        start = self._sizes[area] + _ALIGN * (1 if self._fixed else 1 + secrets.randbelow(16))
        self._sizes[area] = start + -(-byte_count(tensor) // _ALIGN) * _ALIGN
        return start

    def fill(self, slot: int, inputs: Sequence[Any]) -> None:
        """Copies ``inputs`` into a slot. Then fills the slot's outputs, and the gaps before, between and after them,
        with poison: large numbers in a new random pattern. If times are simulated, the pattern is always the same,
        because a verdict may quote a value that was never written."""
        for offset, tensor, values in zip(self.slots[slot]["in"], self.spec.inputs, inputs, strict=True):
            self.input_area.write(offset, tensor, values)
        room = self._rooms[slot]
        drawn = range(4) if self._fixed else [secrets.randbelow(16) for _ in range(4)]
        self._patterns[slot] = pattern = bytes(0x60 + number for number in drawn)
        self.output_area.poison(room.start, len(room), pattern)
        self.output_area.settle()

    def outputs(self, slot: int) -> list[Any]:
        """Returns copies of the outputs that the worker wrote to a slot."""
        return self.values(self.slots[slot]["out"], self.spec.outputs)

    def written(self, slot: int) -> list[Any]:
        """Returns copies of the outputs that the worker wrote to a slot. Raises ``WorkerError`` if the worker also
        wrote to a gap beside an output."""
        room, pattern = self._rooms[slot], self._patterns.get(slot)
        begin = room.start
        for offset, tensor in zip([*self.slots[slot]["out"], room.stop], [*self.spec.outputs, _NOTHING], strict=True):
            size = offset - begin
            if pattern and self.output_area.raw(begin, size) != (pattern * (size // 4 + 2))[begin % 4 :][:size]:
                raise WorkerError("the solution wrote outside of its outputs")
            begin = offset + byte_count(tensor)
        return self.outputs(slot)

    def set_weights(self, weights: Sequence[Any]) -> None:
        for offset, tensor, values in zip(self.weights, self.spec.weights.values(), weights, strict=True):
            self.input_area.write(offset, tensor, values)

    def values(self, offsets: Sequence[int], tensors: Iterable[Tensor]) -> list[Any]:
        copies = [self.output_area.read(offset, tensor) for offset, tensor in zip(offsets, tensors, strict=True)]
        self.output_area.settle()
        return copies

    def close(self) -> None:
        self.input_area.close()
        self.output_area.close()
