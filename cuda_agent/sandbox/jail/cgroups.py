"""Limits the memory and the number of tasks (processes and threads) of each worker with Linux control groups. A worker
is a process that runs untrusted code.

In version 1 of control groups, a worker has two groups: one of the controller ``memory`` and one of the controller
``pids``. They are children of the groups of the process that uses this module (the caller). In version 2, a worker has
one group. It is a child of the caller's group if that group can have children with limits. Otherwise it is a sibling of
the caller's group. A group that holds processes cannot have children with limits. A systemd service therefore needs
``Delegate=yes`` and ``DelegateSubgroup=``, which puts its processes into a subgroup of the service's group.

The caller may lack the permission to create groups, for example in a restricted pod. Then only the watchdog in the
module ``processes`` and the jail's resource limits apply."""

import contextlib
import itertools
import os
import time
from pathlib import Path

PREFIX = "cuda-agent-worker-"  # process ids of the judge's parent and the judge follow, then a number
_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_GONE_SECONDS = 1.0  # time for the kernel to release a group after its processes were killed


class ControlGroup:
    """The control group of one worker. ``folders`` maps the controllers ``memory`` and ``pids`` to the group's
    folders."""

    def __init__(self, folders: dict[str, Path], version: int) -> None:
        self._folders = folders
        self._version = version

    def add(self, pid: int) -> None:
        for folder in {*self._folders.values()}:
            (folder / "cgroup.procs").write_text(str(pid))

    def killed(self) -> bool:
        """Returns whether the OOM killer has killed a process of the group."""
        file = "memory.events" if self._version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):
            for line in (self._folders["memory"] / file).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1]) > 0
        return False

    def close(self) -> None:
        """Waits until the group's processes have ended, and removes the group's folders. Gives up on a folder after one
        second."""
        for folder in {*self._folders.values()}:
            deadline = time.monotonic() + _GONE_SECONDS
            while not _removed(folder) and time.monotonic() < deadline:
                time.sleep(0.002)


_numbers = itertools.count()  # of all ``Groups``: two groups of this process never share a folder


class Groups:
    """Creates the control groups of workers (processes that run untrusted code). ``places`` maps the controllers
    ``memory`` and ``pids`` to the folders in which the groups are made. The constructor removes groups from these
    folders if the process that made them has ended."""

    def __init__(self, places: dict[str, Path], version: int) -> None:
        self._places = places
        self.version = version
        for place in {*places.values()}:
            _sweep(place)

    def make(self, memory_mb: int, tasks: int) -> ControlGroup:
        name = f"{PREFIX}{os.getppid()}-{os.getpid()}-{next(_numbers)}"
        folders = {controller: place / name for controller, place in self._places.items()}
        for folder in {*folders.values()}:
            folder.mkdir()
        limit = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        (folders["memory"] / limit).write_text(str(memory_mb << 20))
        if self.version == 2:
            with contextlib.suppress(OSError):  # the kernel has no swap
                (folders["memory"] / "memory.swap.max").write_text("0")
        (folders["pids"] / "pids.max").write_text(str(tasks))
        return ControlGroup(folders, self.version)


def find(root: Path = _ROOT, own: Path = _OWN) -> Groups | None:
    """Returns a ``Groups`` object, or ``None`` if this process may not create control groups with limits of memory and
    tasks (processes and threads). ``root`` is the folder where control groups are mounted. ``own`` is the file that
    lists the groups of this process."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    places = {}
    for _, controllers, path in lines:
        for controller in {*controllers.split(",")} & {"memory", "pids"}:
            place = root / controller / path.lstrip("/")
            if not place.is_dir():  # inside a container the mount may show only this process's group
                place = root / controller
            places[controller] = place
    if len(places) == 2 and all(_makes(place) for place in places.values()):
        return Groups(places, 1)
    for _, controllers, path in lines:
        if controllers:
            continue
        for mount in (root, root / "unified"):
            here = mount / path.lstrip("/")
            for place in (here, here.parent):
                if (place / "cgroup.procs").exists() and _switched_on(place) and _makes(place):
                    return Groups({"memory": place, "pids": place}, 2)
    return None


def _switched_on(place: Path) -> bool:
    """Enables limits of memory and tasks (processes and threads) for the children of the control group ``place``.
    Returns whether both limits are enabled."""
    switch = place / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if not {"memory", "pids"} <= {*switch.read_text().split()}:
            switch.write_text("+memory +pids")
        return {"memory", "pids"} <= {name.lstrip("+") for name in switch.read_text().split()}
    return False


def _makes(place: Path) -> bool:
    probe = place / f"{PREFIX}{os.getppid()}-{os.getpid()}-probe"
    try:
        probe.mkdir(exist_ok=True)
    except OSError:
        return False
    return _removed(probe)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _sweep(place: Path) -> None:
    """Removes the workers' groups in ``place`` if the process that made them has ended. Keeps groups that still hold
    processes."""
    for folder in place.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[1]
        if not Path(f"/proc/{pid}").exists():
            _removed(folder)
