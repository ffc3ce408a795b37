"""The hardware of this machine: its processor, which builds and times depend on, and its GPUs."""

import hashlib
import platform
from pathlib import Path


def processor() -> str:
    """A digest of the processor's model and features, which ``-march=native`` and times depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in reversed(lines) if ":" in line}
    return hashlib.sha256("|".join(found.get(name, "") for name in wanted).encode()).hexdigest()[:16]


def gpus() -> int:
    """The number of GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()
