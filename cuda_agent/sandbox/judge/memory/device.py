"""Provides buffers and comparisons on the GPU, in the judge's CUDA context; ``host`` provides the same on the CPU.

The judge allocates the areas (memory regions) that it shares with a worker, and exports them as file descriptors. A
worker maps inputs and weights read-only. If the worker writes to them, the worker crashes, and the judge's context
remains intact. The judge copies outputs to memory that is not shared. It compares them on the device with the kernels
in ``check.cu``, by the rules of the module ``check``. Call ``open_judge`` before the other functions."""

import contextlib
import ctypes
import functools
import itertools
import math
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from cuda_agent.sandbox import driver
from cuda_agent.sandbox.judge.memory import buffers
from cuda_agent.sandbox.judge.memory.buffers import byte_count
from cuda_agent.sandbox.judge.timing.cross_check import LONGEST_CHAIN
from cuda_agent.sandbox.wire import Tensor

_BLOCK = 256
_POOL_BYTES = 8 << 30
SLOTS_BYTES = 1 << 30  # inputs and outputs of the largest task with three slots
# Dtypes that are compared as values of another dtype: its name, and the number of values.
_REAL = {"complex64": ("float32", 2), "complex128": ("float64", 2), "bool": ("uint8", 1)}
_NUMBERS = {
    "float32": "f", "float64": "d", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B",
}  # fmt: skip
_LEAST_AREA, _MOST_IDLE = 2 << 20, 4 << 30  # bytes of one area, and of all closed areas that are kept
_FOUND = struct.Struct("QQd")
_PARTS, _WHOLES, _WHOLE_SECONDS = 50, 12, 5e-3  # see ``shared``; the device changes processes after about 2 ms
_FAR_ABOVE = 8  # a fill that takes so many times its floor has waited for other processes


class Array:
    """A buffer of ``size`` bytes in the judge's device memory. The driver keeps freed memory for later arrays, because
    a new allocation makes the process wait for the device."""

    def __init__(self, size: int) -> None:
        self.size, self.address = size, 0
        self.address = driver.take(size)

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(driver.DriverError):  # the context has failed, and its memory ends with it
                driver.give_back(self.address)


class Area(driver.Shared):
    """An area of GPU memory that the judge shares with a worker. Copies to and from the area are asynchronous;
    ``settle`` waits for them. ``close`` usually keeps the area for later workers, because the driver needs much time to
    make a new one."""

    _idle: ClassVar[dict[int, list["Area"]]] = {}  # closed areas by size; no process but this one maps them
    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.number = next(self._numbers)  # no other area has it

    @classmethod
    def of(cls, size: int) -> "Area":
        """Returns an area of at least ``size`` bytes: a closed one if possible, else a new one. Rounds ``size`` up to a
        multiple of 2 MB, or above 32 MB to a larger step of at most an eighth of ``size``."""
        step = max(_LEAST_AREA, 1 << max(0, size.bit_length() - 4))
        size = -(-max(size, 1) // step) * step
        idle = cls._idle.get(size)
        return idle.pop() if idle else cls(size)

    def write(self, offset: int, tensor: Tensor, values: Array) -> None:
        driver.copy(self.address + offset, values.address, byte_count(tensor))

    def read(self, offset: int, tensor: Tensor) -> Array:
        array = Array(byte_count(tensor))
        driver.copy(array.address, self.address + offset, array.size)
        return array

    def raw(self, offset: int, size: int) -> bytes:
        return driver.read(self.address + offset, size)

    def poison(self, offset: int, size: int, pattern: bytes) -> None:
        driver.fill_words(self.address + offset, int.from_bytes(pattern, "little"), size // 4)

    def settle(self) -> None:
        driver.synchronize()

    def wipe(self) -> None:
        driver.fill_bytes(self.address, 0, self.size)
        driver.synchronize()

    def close(self) -> None:
        self.wipe()
        if sum(size * len(areas) for size, areas in self._idle.items()) + self.size > _MOST_IDLE:
            super().close()
        else:
            self._idle.setdefault(self.size, []).append(self)


def pair(in_size: int, out_size: int) -> tuple[Area, Area]:
    """Returns an area for inputs and one for outputs. If the second does not fit, closes the first."""
    first = Area.of(in_size)
    try:
        return first, Area.of(out_size)
    except BaseException:
        first.close()
        raise


Buffers = functools.partial(buffers.Buffers, areas=pair)


class _Judge:
    """Holds the comparison kernels, memory for their results, and memory that is filled to flush the L2 cache."""

    def __init__(self, image: bytes) -> None:
        self.module = driver.Module(image)
        self.found = driver.allocate(_FOUND.size)
        self.sums = driver.allocate(16)
        self.flush_bytes = 2 * driver.l2_bytes()
        self.flushed = driver.allocate(self.flush_bytes)

    def run(self, name: str, count: int, *arguments: int | float) -> None:
        blocks = max(1, min(-(-count // (4 * _BLOCK)), 2048))
        cells = [ctypes.c_double(a) if isinstance(a, float) else ctypes.c_uint64(a) for a in arguments]
        driver.Launch(self.module.function(name), (blocks, 1, 1), (_BLOCK, 1, 1), cells)()

    def clear(self) -> None:
        driver.write(self.found, _FOUND.pack(0, (1 << 64) - 1, 0.0))
        driver.fill_words(self.sums, 0, 4)

    def answer(self) -> tuple[int, int, float]:
        wrong, first, largest = _FOUND.unpack(driver.read(self.found, _FOUND.size))
        return wrong, first, largest


_judge: _Judge | None = None


def open_judge(kernels: Path) -> None:
    """Opens the GPU and loads ``kernels``, the cubin of ``check.cu``. Raises ``driver.NoDevice`` without a GPU."""
    global _judge
    driver.open_device()
    driver.keep_freed()
    _judge = _Judge(kernels.read_bytes())


def _ours() -> _Judge:
    assert _judge, "open_judge comes first"
    return _judge


def slots(size: int) -> int:
    """Returns the number of slots of a worker's buffers, for a task whose inputs and outputs take ``size`` bytes. A
    slot holds the inputs and outputs of one call."""
    return 3 if size <= SLOTS_BYTES else 2 if size <= pool_bytes() // 2 else 1


def pool_bytes() -> int:
    """Returns the most bytes that one task's pool of inputs and expected outputs may take."""
    return min(_POOL_BYTES, driver.memory_bytes()[1] // 16)


def prepared_bytes() -> int:
    """Returns the most bytes of device memory that all prepared tasks (the tasks that the judge keeps ready) may hold
    together. The rest is for candidates."""
    return driver.memory_bytes()[1] // 2


def policy_bytes() -> int:
    """Returns the bytes that the judge leaves free for a policy (a language model) on the same device, besides the
    memory that the policy already holds."""
    return driver.memory_bytes()[1] // 8


def free_bytes() -> int:
    """Returns the free bytes of the device. Memory that ``trim`` would free does not count as free."""
    return driver.memory_bytes()[0]


def chained_slots(size: int) -> int:
    """Returns the number of slots in the memory that a candidate shares with the judge, if the candidate runs chains
    (several calls in one request). A slot holds the inputs and outputs of one call, which take ``size`` bytes. The
    largest tasks get one slot, because the device also holds the judge's copies of inputs and outputs."""
    if size > driver.memory_bytes()[1] // 12:
        return 1
    return min(max(2, 3 * SLOTS_BYTES // max(1, size)), LONGEST_CHAIN)


def trim() -> None:
    """Releases to the device all memory that no array and no area uses."""
    while Area._idle:
        for area in Area._idle.popitem()[1]:
            super(Area, area).close()
    driver.trim()


def flush() -> None:
    """Overwrites the L2 cache and resets its persisting lines, so that the next call reads from device memory."""
    driver.forget_persisting_lines()
    driver.fill_bytes(_ours().flushed, secrets.randbelow(256), _ours().flush_bytes)
    driver.synchronize()


def shared(peak: float | None) -> bool:
    """Returns whether another process uses the device now. Processes that share a device take turns of some
    milliseconds each. A short piece of work may fit into one turn, but a long piece spans several turns and includes
    the turns of the other processes. The function therefore times both, and passes the times to ``takes_turns``.
    ``peak`` is the memory's peak rate in bytes/s, or ``None`` if unknown."""

    def wall(fills: int) -> float:
        begin = time.perf_counter()
        for _ in range(fills):
            driver.fill_bytes(_ours().flushed, 0, _ours().flush_bytes)
        driver.synchronize()
        return time.perf_counter() - begin

    part = min(wall(1) for _ in range(_PARTS))
    fills = math.ceil(_WHOLE_SECONDS / part)
    whole = min(wall(fills) for _ in range(_WHOLES))
    return takes_turns(part, whole / fills, _ours().flush_bytes / peak if peak else math.inf)


def takes_turns(part: float, of_whole: float, floor: float) -> bool:
    """Returns whether the device seems to divide its time between this process and others. This is so if fills in a
    row take longer per fill than a single fill, or if a single fill takes far longer than ``floor``.

    Args:
        part: Shortest time of a single fill of a buffer, in seconds. On an H100 it is 45 us, or 45 to 1,000 us while
            another process uses the device.
        of_whole: Shortest time per fill when many fills run in a row, in seconds. On an H100 it is 35 us, or 58 to
            230 us while another process uses the device.
        floor: Time of one fill at the memory's peak rate, in seconds (31 us on an H100)."""
    return of_whole > part or part > _FAR_ABOVE * floor


def healthy() -> bool:
    """Returns whether a comparison of arrays with known contents gives the expected result. This tests memory, a kernel
    launch and a copy to the host."""
    ones, twos, tensors = Array(4096), Array(4096), [Tensor((1024,), "float32")]
    for array, word in ((ones, 0x3F800000), (twos, 0x40000000)):
        driver.fill_words(array.address, word, 1024)
    driver.synchronize()
    return not mismatch([ones], [ones], tensors, 0.1)[0] and bool(mismatch([ones], [twos], tensors, 0.1)[0])


def mismatch(
    expected: Sequence[Array], actual: Sequence[Array], tensors: Sequence[Tensor], tolerance: float, cap: float = 1.0
) -> tuple[str, float]:
    """Compares ``actual`` with ``expected`` on the device, as ``check.mismatch`` does on the CPU."""
    largest = 0.0
    for index, (want, have, tensor) in enumerate(zip(expected, actual, tensors, strict=True)):
        message, difference, _ = _compare(want, have, tensor, tolerance, cap)
        largest = max(largest, difference)
        if message:
            return f"output {index}{list(tensor.shape)}: {message}", largest
    return "", largest


def agree(expected: Sequence[Array], actual: Sequence[Array], tensors: Sequence[Tensor], tolerance: float) -> bool:
    """Returns whether ``mismatch`` finds no difference."""
    return not mismatch(expected, actual, tensors, tolerance)[0]


def values_off(
    expected: Sequence[Array], actual: Sequence[Array], tensors: Sequence[Tensor], tolerance: float, cap: float = 1.0
) -> int:
    """Returns how many values of ``actual`` differ from ``expected`` by more than ``mismatch`` allows."""
    return sum(_compare(*pair, tolerance, cap)[2] for pair in zip(expected, actual, tensors, strict=True))


def _compare(want: Array, have: Array, tensor: Tensor, tolerance: float, cap: float) -> tuple[str, float, int]:
    judge, (dtype, count) = _ours(), _real(tensor)
    if not count:
        return "", 0.0, 0
    judge.clear()
    floating = dtype.startswith(("float", "bfloat"))
    if floating:
        judge.run(f"moments_{dtype}", count, want.address, count, judge.sums)
    limits = float(tolerance), float(cap), judge.sums, judge.found
    judge.run(f"check_{dtype}", count, want.address, have.address, count, *limits)
    wrong, first, largest = judge.answer()
    if not wrong:
        return "", largest, 0
    values = f"first at {first}: {_number(have, dtype, first):.6g} instead of {_number(want, dtype, first):.6g}"
    how = f"are off by more than the tolerance {tolerance:g}" if floating else "differ"
    return f"{wrong} of {count} values {how}, {values}", largest, wrong


def _real(tensor: Tensor) -> tuple[str, int]:
    dtype, parts = _REAL.get(tensor.dtype, (tensor.dtype, 1))
    return dtype, parts * math.prod(tensor.shape)


def _number(array: Array, dtype: str, index: int) -> float:
    if dtype == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + driver.read(array.address + 2 * index, 2))[0])
    size = struct.calcsize(_NUMBERS[dtype])
    return float(struct.unpack("<" + _NUMBERS[dtype], driver.read(array.address + size * index, size))[0])


def same(first: Sequence[Array], second: Sequence[Array]) -> bool:
    """Returns whether two lists of arrays are equal bit for bit."""
    raw = [Tensor((array.size,), "uint8") for array in first]
    return not mismatch(first, second, raw, 0.0)[0]


def distance(have: Array, exact: Array, tensor: Tensor) -> tuple[float, float]:
    """Returns sum((have - exact) ** 2) and sum(exact ** 2) for floating dtypes, else zeros. ``exact`` is in float64."""
    if not tensor.dtype.startswith(("float", "bfloat")) or not have.size:
        return 0.0, 0.0
    judge, (dtype, count) = _ours(), _real(tensor)
    judge.clear()
    judge.run(f"distance_{dtype}", count, have.address, exact.address, count, judge.sums)
    off, norm = struct.unpack("dd", driver.read(judge.sums, 16))
    return off, norm
