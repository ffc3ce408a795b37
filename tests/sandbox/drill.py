"""Runs the fault drill: faulty and honest evaluations in random order. Reports what they leave behind.

After each fault, an honest solution of the same task is evaluated in the same judge. The time until its right verdict
is the fault's recovery. Some faults come from outside: the drill kills a process of the sandbox during an honest
evaluation, and the verdict must still be right. ``faults`` defines the faults. Attacks on the verdict and faults of the
machine are not part of the drill."""

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.config import SandboxConfig
from cuda_agent.sandbox.jail import cgroups
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Solution
from cuda_agent.tasks.task import Task
from tests.sandbox.faults import Fault, Make, faults, honest, python, tasks

RECOVERY = 15.0  # seconds within which the next evaluation on the device must have come back right
_PARALLEL = {"cpu": 3, "cuda": 2}  # a device does one thing at a time: more would only wait
_LONGEST = 240.0  # seconds: an evaluation that takes longer counts as lost
_SET_CHILD_SUBREAPER = 36


@dataclass
class Outcome:
    """The outcome of one evaluation. ``right`` lists the statuses that are right for its ``kind``. ``status`` is empty
    if there was no verdict."""

    kind: str
    task: str
    right: list[str]
    status: str
    message: str
    seconds: float
    recovery: float | None = None  # of a fault: seconds from its verdict to that of the honest one after it


@dataclass
class Report:
    device: str
    clock: str
    seed: int
    user: int
    seconds: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)  # processes, temporary files ... that should be gone
    groups: int = 0  # version of the control groups that limit workers; 0: there are none

    def problems(self) -> list[str]:
        """Returns a line for everything that went wrong; empty if nothing did."""
        found = [f"lost: {o.kind} on {o.task}: {o.message}" for o in self.outcomes if not o.status]
        found += [
            f"wrong: {o.kind} on {o.task} is {o.status}, not {' or '.join(o.right)}: {o.message}"
            for o in self.outcomes
            if o.status and o.status not in o.right
        ]
        found += [
            f"late: {o.recovery:.1f} s after {o.kind}" for o in self.outcomes if o.recovery and o.recovery > RECOVERY
        ]
        return found + [f"left behind: {kind}: {name}" for kind, names in self.left.items() for name in names]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"problems": self.problems()}


def draw(evaluations: int, seed: int, device: str) -> list[list[tuple[str, Fault | None, Make, Task]]]:
    """Draws a list of sequences of evaluations. Most sequences are a fault and then an honest solution of the same
    task; the others are an honest solution alone. No fault comes a second time before all have come once. An evaluation
    is a tuple: its kind, the fault (None for an honest solution), a function that makes the solution, and the task."""
    rng = random.Random(seed)
    formats, catalogue, every = honest(device), faults(device), tasks()
    bag: list[Fault] = []
    drawn: list[list[tuple[str, Fault | None, Make, Task]]] = []
    left = evaluations
    while left:
        task = rng.choice(every)
        format = rng.choice(sorted(formats))
        unit: list[tuple[str, Fault | None, Make, Task]] = [(f"honest {format}", None, formats[format], task)]
        if left >= 2 and rng.random() < 0.95:
            bag = bag or rng.sample(catalogue, len(catalogue))
            fault = bag.pop()
            unit.insert(0, (fault.name, fault, fault.make, task))
        drawn.append(unit)
        left -= len(unit)
    return drawn


def settings(device: str, clock: str) -> SandboxConfig:
    """Returns settings with short limits, so that hangs and bombs end soon, and with the memory that torch needs."""
    memory_mb = 768 if device == "cpu" else 4096
    return SandboxConfig(
        device=device,  # type: ignore[arg-type]
        clock=clock,  # type: ignore[arg-type]
        run_seconds=3.0 if device == "cpu" else 4.0,
        build_seconds=8.0 if device == "cpu" else 20.0,
        memory_mb=memory_mb,
    )


async def drill(evaluations: int, seed: int, device: str, clock: str, cache: Path) -> Report:
    """Runs ``evaluations`` evaluations, a few at a time, and returns their report. No other process should use the
    folder ``TMPDIR`` meanwhile: all new files in this folder count as left behind."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become children of ours, and are seen
    groups = cgroups.find()
    report = Report(device, clock, seed, os.geteuid(), groups=groups.version if groups else 0)
    before = _present()
    begin = time.monotonic()
    async with LocalSandbox(settings(device, clock), cache) as sandbox:
        for task in tasks():  # what is made once a task or machine is no part of a recovery
            await sandbox.evaluate(task, python(-1))
        numbers = iter(range(seed * 1_000_000, seed * 1_000_000 + evaluations))
        units = iter(draw(evaluations, seed, device))
        rng = random.Random(seed)

        async def stream() -> None:
            for unit in units:
                fault: Outcome | None = None
                for kind, what, make, task in unit:
                    right = sorted(what.right) if what else ["ok"]
                    ended = time.monotonic()
                    killing = (
                        asyncio.create_task(_kill(sandbox, task, what.kills, rng)) if what and what.kills else None
                    )
                    outcome = await _evaluated(sandbox, kind, right, task, make(next(numbers)))
                    if killing:
                        await killing
                    report.outcomes.append(outcome)
                    if fault and outcome.status == "ok":
                        fault.recovery = time.monotonic() - ended
                    fault = outcome if what else None

        await asyncio.gather(*(stream() for _ in range(_PARALLEL[device])))
    report.seconds = time.monotonic() - begin
    for _ in range(100):  # what was told to end may need a moment, in a GPU's driver some seconds
        report.left = {kind: sorted(names - before[kind]) for kind, names in _present().items() if names - before[kind]}
        if not report.left:
            break
        await asyncio.sleep(0.1)
    return report


async def _evaluated(sandbox: LocalSandbox, kind: str, right: list[str], task: Task, solution: Solution) -> Outcome:
    begin = time.monotonic()
    status = message = ""
    try:
        verdict = await asyncio.wait_for(sandbox.evaluate(task, solution), _LONGEST)
        status, message = verdict.status, verdict.message
    except Exception as error:  # an evaluation without a verdict is lost, whatever the reason
        message = f"{type(error).__name__}: {error}"
    return Outcome(kind, task.name, right, status, message, time.monotonic() - begin)


# ----------------------------------------------------------------------------------------------------- from the outside


async def _kill(sandbox: LocalSandbox, task: Task, what: str, rng: random.Random) -> None:
    """Kills one process of the sandbox while the judge of ``task`` works. ``what`` is "judge", "warm parent",
    "reference", "candidate" or "spare worker". A spare worker is killed at once."""
    judge = sandbox._judge(task)
    while what != "spare worker" and not judge._lock.locked():
        await asyncio.sleep(0.005)
    await asyncio.sleep(rng.random() * (0.0 if what == "spare worker" else 0.5))
    process = judge._process
    if process is None:
        return
    victims = [process.pid]
    if what != "judge":
        victims = _children(process.pid, b"cuda_agent.sandbox.worker.main")[:1]  # the first: that of plain workers
    if what not in ("judge", "warm parent") and victims:
        workers = _children(victims[0])
        victims = workers[:1] if what == "reference" else workers[-1:]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(parent: int, words: bytes = b"") -> list[int]:
    """Returns the ids of the child processes of ``parent`` whose command line contains ``words``, oldest first."""
    found: list[tuple[int, int]] = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and words.replace(b" ", b"\0") in (folder / "cmdline").read_bytes():
                found.append((int(fields[19]), int(folder.name)))
    return [pid for _, pid in sorted(found)]


def _present() -> dict[str, set[str]]:
    """Returns the things that exist now and that an evaluation may leave behind: kind -> names."""
    descriptors = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.add(f"{name} {os.readlink(f'/proc/self/fd/{name}').partition(':')[0]}")
    return {
        "process": {f"{pid} {_command(pid)}" for pid in _descendants(os.getpid())},
        "shared memory": {*os.listdir("/dev/shm")} if os.path.isdir("/dev/shm") else set(),
        "control group": {str(p) for p in Path("/sys/fs/cgroup").glob(f"**/{cgroups.PREFIX}{os.getpid()}-*")},
        "temporary": {str(p) for p in Path(tempfile.gettempdir()).iterdir()},
        "descriptor": {d for d in descriptors if not d.endswith("/fd")},
    }


def _descendants(pid: int) -> list[int]:
    """Returns the living descendants of a process.  Reaps dead ones, which became children of this process."""
    found = []
    for child in _children(pid):
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        else:
            found += [child, *_descendants(child)]
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "?"
