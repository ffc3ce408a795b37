"""Computes the cache key of the verdict on a solution: a hash of everything that the verdict depends on."""

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from cuda_agent.config import WHERE_JUDGED, SandboxConfig
from cuda_agent.machine import processor
from cuda_agent.sandbox.build import toolchain
from cuda_agent.sandbox.wire import Mode, Solution
from cuda_agent.tasks.task import Task

_HERE = Path(__file__).parent
_JUDGING = ("build", "formats", "jail", "judge", "worker")  # folders whose code a verdict depends on, beside this one
_THIS_ROOM = ("local.py", "verdict_key.py", "judge_process.py", "messages.py", "wire.py", "driver.py")
_TOP = ("format_names.py", "lease.py", "machine.py", "syntax.py")  # modules of the package itself


def verdict_key(config: SandboxConfig, made: Sequence[str], task: Task, solution: Solution, mode: Mode) -> str:
    """Returns the key under which a verdict is cached: a sha256 as hexadecimal digits. ``made`` describes the
    environment of the verdict. Its first item names the GPU and its driver, and is empty on a CPU. The other items are
    the versions that ``software`` returns."""
    settings = config.model_dump(exclude={"required_walls", "format", *WHERE_JUDGED})
    machine = processor() if config.clock == "real" else ""
    key = json.dumps([task.digest, solution.digest, mode, settings, machine, made, code_version()])
    return hashlib.sha256(key.encode()).hexdigest()


def software(device: str) -> list[str]:
    """Returns the versions of torch and of the compilers that solutions for ``device`` may use."""
    return [importlib.metadata.version("torch"), *toolchain.identities(device)]


@lru_cache
def code_version() -> str:
    """Returns a hash of the code that builds and judges solutions. A cached verdict is valid for this code only."""
    digest = hashlib.sha256()
    for path in files():
        digest.update(f"{path.relative_to(_HERE.parent)}".encode() + path.read_bytes())
    return digest.hexdigest()


def files() -> list[Path]:
    """Returns the source files that ``code_version`` hashes, sorted."""
    found = [*(_HERE / name for name in _THIS_ROOM), *(_HERE.parent / name for name in _TOP)]
    found += [path for room in _JUDGING for path in (_HERE / room).rglob("*")]
    return sorted(path for path in found if path.suffix in (".py", ".cpp", ".cu", ".h"))
