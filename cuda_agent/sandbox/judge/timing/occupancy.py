"""Computes how many blocks of a kernel a multiprocessor of the GPU holds at once, and which resource limits them.

The numbers are those of NVIDIA's occupancy calculator for compute capability 7.0 and newer: registers are given to
warps in units of 256, and shared memory to blocks in units of 128 bytes (256 before 8.0). A kernel's carve-out of the
L1 cache is taken to be the largest. Clusters are not covered."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_agent.sandbox import driver
from cuda_agent.sandbox.messages import KERNELS_LOG
from cuda_agent.sandbox.wire import KernelUse, printable

_WARP = 32
_REGISTER_UNIT, _WARP_UNIT = 256, 4
_ASSUMED = 256  # threads of a block of a kernel whose launch is not known
_LOG_BYTES, _SYMBOL = 1 << 18, 2000  # what is read of a report, and of a mangled name in it
_ENTRY = "Compiling entry function '"
_MOST, _LONGEST = 16, 120  # kernels of a solution, and characters of a name
_PROCESSORS, _THREADS, _SHARED, _REGISTERS, _BLOCKS, _RESERVED = 16, 39, 81, 82, 106, 111  # device attributes


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor of a GPU holds at most, and how many there are."""

    registers: int = 65536
    threads: int = 2048
    blocks: int = 32
    shared_bytes: int = 233472
    reserved_bytes: int = 1024  #: shared memory that the system takes for each block
    count: int = 1


def of_gpu() -> Multiprocessor:
    """Returns the limits of the GPU that this process has opened."""
    wanted = _REGISTERS, _THREADS, _BLOCKS, _SHARED, _RESERVED, _PROCESSORS
    return Multiprocessor(*map(driver.attribute, wanted))


def blocks_at_once(threads: int, registers: int, shared_bytes: int, limits: Multiprocessor) -> tuple[int, str]:
    """Returns how many blocks a multiprocessor holds at once, and the resource that limits them: "threads",
    "registers", "shared memory" or "blocks". Of equal limits the first counts.

    Args:
        threads: Threads of a block.
        registers: Registers of a thread.
        shared_bytes: Shared memory of a block, static and dynamic."""
    warps = math.ceil(threads / _WARP)
    for_warp = math.ceil(max(registers, 1) * _WARP / _REGISTER_UNIT) * _REGISTER_UNIT
    held_warps = limits.registers // for_warp // _WARP_UNIT * _WARP_UNIT
    unit = 128 if limits.reserved_bytes else 256  # capability 8.0 and newer reserves some for each block
    for_block = math.ceil((shared_bytes + limits.reserved_bytes) / unit) * unit
    most = {
        "threads": limits.threads // _WARP // warps,
        "registers": held_warps // warps,
        "shared memory": limits.shared_bytes // for_block if for_block else limits.blocks,
        "blocks": limits.blocks,
    }
    limit = min(most, key=lambda name: most[name])
    return most[limit], limit


def of_solution(load: dict[str, Any], told: object) -> list[KernelUse]:
    """Returns the resources of a solution's kernels on the GPU that this process has opened. ``load`` is its request to
    be loaded, and ``told`` the worker's answer, which counts for a plan only: the host code of other formats is not the
    sandbox's, and could forge it."""
    if "nodes" in load:
        return of_plan(load["nodes"], told, of_gpu())
    library = load.get("library")
    if not library:
        return []
    try:
        with open(Path(library).parent / KERNELS_LOG, "rb") as file:
            return of_log(file.read(_LOG_BYTES).decode(errors="replace"), of_gpu())
    except OSError:  # built by an earlier version
        return []


def of_plan(nodes: Sequence[dict[str, Any]], told: object, limits: Multiprocessor) -> list[KernelUse]:
    """Returns the resources of the kernels of a plan, each launch of the same form once. ``nodes`` are those of the
    plan. ``told`` is the worker's report: for each node the registers of a thread, and the bytes of local and of
    static shared memory, or ``None``. Returns nothing for an invalid report."""
    if not isinstance(told, list) or len(told) != len(nodes):
        return []
    found: dict[KernelUse, None] = {}
    for node, numbers in zip(nodes, told, strict=True):
        match numbers:
            case [int(registers), int(local), int(static)] if min(registers, local, static) >= 0 and "symbol" in node:
                found[_use(node, registers, local, static, limits)] = None
    return [*found][:_MOST]


def of_log(log: str, limits: Multiprocessor) -> list[KernelUse]:
    """Returns the resources of the kernels in ``log``, what nvcc's assembler prints with ``-v``."""
    found: dict[KernelUse, None] = {}
    for part in log.split(_ENTRY)[1:]:
        symbol, _, text = part.partition("'")
        if registers := _number(text, "registers"):
            node = {"symbol": _plain(symbol[:_SYMBOL]), "grid": [0], "block": [_ASSUMED], "shared": 0}
            local, shared = _number(text, "bytes stack frame"), _number(text, "bytes smem")
            found[_use(node, registers, local, shared, limits)] = None
    return [*found][:_MOST]


def _number(text: str, unit: str) -> int:
    match = re.search(rf"(\d{{1,9}}) {unit}\b", text)
    return int(match[1]) if match else 0


def _plain(symbol: str) -> str:
    """Returns the function's name in a mangled ``symbol``: ``fused`` for ``_ZN1a5fusedILi4EEvPf``."""
    rest, name = re.sub(r"^_ZN?", "", symbol), symbol
    while symbol.startswith("_Z") and (match := re.match(r"\d{1,4}", rest)):
        size = int(match[0])
        name, rest = rest[match.end() :][:size], rest[match.end() + size :]
    return name


def _use(node: dict[str, Any], registers: int, local: int, static: int, limits: Multiprocessor) -> KernelUse:
    threads, grid, shared = math.prod(node["block"]), math.prod(node["grid"]), static + node["shared"]
    blocks, limit = blocks_at_once(threads, registers, shared, limits)
    return KernelUse(
        name=printable(node["symbol"])[:_LONGEST],
        grid=grid,
        block=threads,
        registers=registers,
        local_bytes=local,
        shared_bytes=shared,
        occupancy=blocks * math.ceil(threads / _WARP) * _WARP / limits.threads,
        limit=limit,
        waves=grid / (blocks * limits.count) if blocks else 0.0,
    )
