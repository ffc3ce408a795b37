"""Determines a device's peak rates, and a lower bound of a call's time that follows from them.

A GPU's rates are computed from values that the driver reports. A CPU's rate of memory copies is measured, because
virtual machines do not report it.

The lower bound is the time to write the call's outputs to memory. A call must write its outputs, because the judge
(the process that times calls) overwrites them before each call. Inputs do not count, because a call need not read them
entirely. The size of the last-level cache is subtracted, because that part of the outputs may still be in the cache
when the call ends."""

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from cuda_agent.sandbox import driver
from cuda_agent.sandbox.wire import TaskSpec

_MAJOR, _MINOR, _PROCESSORS = 75, 76, 16  # numbers of the driver's device attributes
_CLOCK_RATE, _MEMORY_CLOCK, _BUS_WIDTH = 13, 36, 37  # kHz, kHz, bits
_PER_CYCLE = 2  # transfers per memory clock: the driver counts all memories as double data rate
# Dense operations of one multiprocessor per cycle, by compute capability: those of its tensor cores where they support
# the type.  Capability 8.9 means data-centre boards; GeForce boards have half as many.
_OPERATIONS: dict[tuple[int, int], dict[str, int]] = {
    (7, 0): {"float64": 64, "float32": 128, "float16": 1024},
    (7, 5): {"float32": 128, "float16": 1024},
    (8, 0): {"float64": 128, "float32": 128, "tf32": 1024, "float16": 2048, "bfloat16": 2048},
    (8, 6): {"float32": 256, "tf32": 256, "float16": 512, "bfloat16": 512},
    (8, 9): {"float32": 256, "tf32": 512, "float16": 1024, "bfloat16": 1024},
    (9, 0): {"float64": 256, "float32": 256, "tf32": 2048, "float16": 4096, "bfloat16": 4096},
    (10, 0): {"float64": 128, "float32": 256, "tf32": 4096, "float16": 8192, "bfloat16": 8192},
}
_GPU_SLACK = 1.05  # memory is never faster than its clock; this allows for an error of the clock
_CPU_SLACK = 2.0  # a measured copy is no upper bound: reading alone is faster, and the machine may be busy
_COPY_ROUNDS, _COPY_BYTES = 5, (64 << 20, 256 << 20)
_FLOATING = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Peaks:
    """The peak rates of a device. ``bytes_per_second`` is the rate of its memory. ``operations`` maps a type, such as
    ``tf32``, to operations per second. ``cache_bytes`` is the size of the last-level cache. ``None`` means unknown.
    ``bytes_per_second`` may be too low: the true rate is at most ``slack`` times as high."""

    bytes_per_second: float | None = None
    cache_bytes: int | None = None
    slack: float = 1.0
    operations: dict[str, float] = field(default_factory=dict)

    def floor(self, written: int) -> float:
        """Returns the fewest seconds in which a call can write ``written`` bytes; 0 if no bound is known."""
        if not self.bytes_per_second or self.cache_bytes is None:
            return 0.0
        return max(0, written - self.cache_bytes) / (self.bytes_per_second * self.slack)

    def operations_for(self, spec: TaskSpec, precision: str = "") -> float | None:
        """Returns the peak operations per second for the first floating dtype in ``spec``, or ``None`` if unknown.
        Inputs come first, then weights, then outputs. If the dtype is float32, ``precision`` may name the precision at
        which the solution really computes, such as ``tf32``. The caller infers it from the solution's error."""
        types = [t.dtype for t in (*spec.inputs, *spec.weights.values(), *spec.outputs) if t.dtype in _FLOATING]
        kind = types[0] if types else ""
        if kind == "float32":
            kind = {"tf32": "tf32", "bf16": "bfloat16", "below bf16": "bfloat16"}.get(precision, kind)
        return self.operations.get(kind)


def below_physical_floor(seconds: float, eager: float, written: int, peaks: Peaks) -> str:
    """Returns why a call cannot write ``written`` bytes of outputs in ``seconds``, or an empty string if it can. The
    reason is a lower bound that follows from ``peaks``. A bound above ``eager`` is ignored. ``eager`` is the measured
    seconds of a call in eager PyTorch that writes the same outputs, so a higher bound must be wrong."""
    floor = peaks.floor(written)
    if not seconds < floor <= eager:
        return ""
    return (
        f"{seconds * 1e6:.1f} us are less than the {floor * 1e6:.1f} us in which the device can write "
        f"{written / 1e6:.0f} MB of outputs: not all of the work is in the time"
    )


def of_gpu() -> Peaks:
    """Returns the peaks of the GPU that this process has opened. A rate is unknown if the driver does not report
    the values for it, or if ``_OPERATIONS`` does not contain the GPU's compute capability."""
    major, minor, processors = (driver.attribute(which) for which in (_MAJOR, _MINOR, _PROCESSORS))
    clock = driver.attribute(_CLOCK_RATE) * 1e3
    memory = _PER_CYCLE * driver.attribute(_MEMORY_CLOCK) * 1e3 * driver.attribute(_BUS_WIDTH) / 8
    cycle = _OPERATIONS.get((major, minor), {})
    operations = {kind: count * processors * clock for kind, count in cycle.items() if clock}
    return Peaks(memory or None, driver.l2_bytes() or None, _GPU_SLACK, operations)


def of_cpu(threads: int, file: Path, quiet: Callable[[], AbstractContextManager[None]], again: bool = False) -> Peaks:
    """Returns the CPU's peaks from the cache ``file``. Measures them if the file is missing or unreadable, or if
    ``again`` is true, and writes the file. The measurement uses ``threads`` threads and runs in the context
    ``quiet()``, which keeps other processes from disturbing it. If ``again``, the result is the higher of the old and
    the new copy rate, because other programs can only slow copies down."""
    known = 0.0
    with suppress(OSError, ValueError, TypeError):
        kept = Peaks(**json.loads(file.read_text()))
        if not again:
            return kept
        known = kept.bytes_per_second or 0.0
    cache = cache_bytes(Path("/sys/devices/system/cpu"), sorted(os.sched_getaffinity(0)))
    with quiet():
        peaks = Peaks(max(known, copy_bytes_per_second(threads, cache or 0)), cache, _CPU_SLACK)
    keep(file, asdict(peaks))
    return peaks


def keep(file: Path, measured: dict[str, Any]) -> None:
    """Writes ``measured`` to ``file`` as JSON. Ignores errors such as a full disk: the file is only a cache."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(measured, new)
        os.replace(new.name, file)


def copy_bytes_per_second(threads: int, cache: int = 0) -> float:
    """Returns the bytes per second that ``threads`` threads together read and write when they copy arrays. Each thread
    copies one array. All source arrays together take four times ``cache`` bytes, but at least 64 MiB and at most
    256 MiB."""
    least, most = _COPY_BYTES
    count = min(max(4 * cache, least), most) // threads
    areas = [(numpy.ones(count, numpy.uint8), numpy.zeros(count, numpy.uint8)) for _ in range(threads)]
    best = 0.0
    for _ in range(_COPY_ROUNDS):
        workers = [threading.Thread(target=numpy.copyto, args=(target, source)) for source, target in areas]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, 2 * count * threads / (time.perf_counter() - begin))
    return best


def cache_bytes(folder: Path, processors: Sequence[int]) -> int | None:
    """Returns the total bytes of the last-level caches of ``processors``, or ``None`` if they are unknown. ``folder``
    is Linux's ``/sys/devices/system/cpu``."""
    found: dict[tuple[int, str], int] = {}
    for processor in processors:
        for index in folder.glob(f"cpu{processor}/cache/index*"):
            try:
                level, size, shared = ((index / n).read_text().strip() for n in ("level", "size", "shared_cpu_list"))
                unit = {"K": 10, "M": 20, "G": 30}[size[-1]]
                found[int(level), shared] = int(size[:-1]) << unit
            except (OSError, ValueError, KeyError, IndexError):
                return None
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None
