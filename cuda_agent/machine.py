"""Describes this machine's processor, GPUs and memory.  ``die_with_parent`` makes this process end with its parent."""

import contextlib
import ctypes
import hashlib
import os
import platform
import signal
import time
from pathlib import Path

from cuda_agent.errors import EXIT_RETRY

_PR_SET_PDEATHSIG = 1


def processor() -> str:
    """Returns a digest of the processor's model and features.  Kernels' times and ``-march=native`` depend on these.
    If Linux does not report them, returns the machine type, such as ``x86_64``."""
    if not (found := processor_facts()):
        return platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return hashlib.sha256("|".join(found.get(name, "") for name in wanted).encode()).hexdigest()[:16]


def processor_facts() -> dict[str, str]:
    """Returns facts about the first processor, such as ``model name``; empty if ``/proc/cpuinfo`` cannot be read."""
    with contextlib.suppress(OSError):
        pairs = (line.partition(":") for line in reversed(Path("/proc/cpuinfo").read_text().splitlines()))
        return {name.strip(): fact.strip() for name, colon, fact in pairs if colon}
    return {}


def cores() -> int:
    """Returns the number of processors that this process may use."""
    count = os.cpu_count() or 1
    return min(count, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else count


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def memory_bytes(device: str) -> int:
    """Returns the memory of ``device`` in bytes.  For "cuda" this is the memory of the first GPU, or 80 GB on a machine
    without a GPU.  For "cpu" it is the memory of this machine, or the limit of its container if that is lower."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).total_memory if gpus() else 80 * 10**9
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit ("max")
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return whole


def oom_kills() -> int:
    """Returns how often Linux has killed a process of this container for lack of memory; 0 if that is unknown."""
    for file in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(file).read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def began() -> int:
    """Returns when this process began, in nanoseconds since 1970.  Where Linux does not report it, returns the time of
    the call."""
    with contextlib.suppress(OSError, IndexError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine started
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time_ns() - round(age * 1e9)
    return time.time_ns()


def die_with_parent(parent: int | None = None) -> None:
    """Makes Linux kill this process when its parent ends.  ``parent`` is the expected pid of the parent (None: any).
    If the actual pid differs, the expected parent has ended already, and this process exits at once."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent not in (None, os.getppid()):
        os._exit(EXIT_RETRY)
