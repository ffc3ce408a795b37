"""Runs first passes. A first pass runs a solution that needs a compiler, in a jailed worker that may start programs.

The worker writes to a folder in the cache. After the run, the sandbox replaces this folder by a copy of its regular
files. The second pass is the judged run. It reads these files at the same path and starts no program. The module
``worker.replay`` implements both passes in the worker. The files are untrusted, so only the jailed process that runs
the solution loads them. The sandbox does not detect a first pass that leaves the GPU in a bad state."""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuda_agent.machine import processor
from cuda_agent.sandbox.build import builder, toolchain
from cuda_agent.sandbox.formats.first_pass_watchdog import LEAST_MEMORY_MB, too_much, watchdog
from cuda_agent.sandbox.formats.solution_format import FirstPassTime
from cuda_agent.sandbox.jail import cgroups, jail, scratch
from cuda_agent.sandbox.jail.processes import JailedProcess, NotStarted, WorkerDied, WorkerError
from cuda_agent.sandbox.jail.warm_parent import WarmParent, compiling_parent, warm_parent
from cuda_agent.sandbox.messages import FrameTooLarge, WorkerOperation
from cuda_agent.sandbox.wire import NO_PROGRAMS, Status, Verdict, printable
from cuda_agent.tasks.task import Task

_ASKS = re.compile(r"\b(load_inline|cpp_extension|triton|_inductor)\b|\btorch\s*\.\s*compile\b|\bimport\s+compile\b")
_VERSION = 4
_FILE_MB = 256
_LEAST_SPACE = 64 << 20  # bytes of a disk, below which a failed pass is the machine's fault
_DOUBTED = ("wrong", "crash", "build_error")  # statuses that count only after a build with torch's own headers
_STAND_INS = Path(__file__).parent / "stand_ins"
_INCLUDE = re.compile(r"#\s*include\s*[<\"]((?:torch|ATen|c10|pybind11)(?!/headeronly|/dlpack)[\w/]*/\w+\.h)[>\"]")


class FirstPassFailed(Exception):
    """A solution failed in its first pass, and the fault is the solution's. ``status`` becomes the verdict's status."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def time_for_python(files: Mapping[str, str], device: str) -> FirstPassTime:
    """Returns when a solution in the format ``python`` gets a first pass (a run that may start compilers). The result
    is ``before`` if the source mentions a compiler. Then the first pass precedes the judged run. Otherwise the result
    is ``when refused``. Then a first pass runs only if the judged run fails because it may not start a program or make
    a file."""
    return "before" if asks(files.get("model_new.py", "")) else "when refused"


def asks(code: str) -> bool:
    """Returns whether the Python source ``code`` mentions a compiler, such as Triton or ``torch.compile``. Such a
    solution probably needs a first pass (a run that may start compilers)."""
    return _ASKS.search(code) is not None


def was_refused(verdict: Verdict) -> bool:
    """Returns whether the judged run failed before any check because it could not start a program or make a file."""
    return verdict.status != "ok" and not verdict.checks and not verdict.samples and NO_PROGRAMS in verdict.message


def is_in_doubt(verdict: Verdict, place: Mapping[str, Any] | None) -> bool:
    """Returns whether stand-ins may have caused the failure that ``verdict`` reports. Stand-ins are short headers that
    replace torch's headers in a first pass (a run that may start compilers). ``place`` is the dictionary that the first
    pass returned, or ``None`` if there was no first pass."""
    return verdict.status in _DOUBTED and place is not None and _used_stand_ins(Path(place["folder"]))


def _used_stand_ins(folder: Path) -> bool:
    return (folder / "stand-ins" / "used").exists()


class FirstPass:
    """Runs first passes (runs of solutions that may start compilers) and keeps their results in ``folder``. Each first
    pass takes at most ``seconds``. It may use ``memory_mb`` MiB, and always as much as compilers usually need. At most
    ``parallel`` first passes run at the same time. ``scratch`` is a folder that jailed processes can reach. ``lease``
    is the folder of the timing lease, a lock that a process must hold exclusively to time a kernel."""

    def __init__(
        self, folder: Path, scratch: Path, lease: Path, seconds: float, memory_mb: int, device: str, threads: int,
        train_mode: bool, parallel: int,
    ) -> None:  # fmt: skip
        self._folder, self._scratch, self._lease, self._seconds = folder, scratch, lease, seconds
        self._memory_mb = max(LEAST_MEMORY_MB[device], memory_mb)
        self._device, self._threads, self._train_mode = device, threads, train_mode
        self._slots = asyncio.Semaphore(parallel)
        self._parent: WarmParent | None = None
        self._starting = threading.Lock()

    async def __call__(
        self, task: Task, files: Mapping[str, str], architecture: str, more: Mapping[str, str], own_headers: bool
    ) -> dict[str, Any]:
        """Runs the first pass of a solution (a run that may start compilers), unless the cache holds its results.
        Returns a dictionary: ``folder`` is the folder of the results, and ``environment`` holds the variables with
        which the second pass (the judged run) finds the results. The argument ``more`` holds environment variables for
        both passes. If ``own_headers`` is true, compilers get torch's own headers instead of short stand-ins. Raises
        ``FirstPassFailed`` for a fault of the solution, and ``OSError`` for a fault of the machine."""
        async with self._slots:
            return await asyncio.to_thread(self._cached, task, dict(files), architecture, dict(more), own_headers)

    def _cached(
        self, task: Task, files: dict[str, str], architecture: str, more: dict[str, str], own_headers: bool
    ) -> dict[str, Any]:
        environment = _toolchain(architecture) | more
        headers = {} if own_headers else stand_ins(files)
        torch = importlib.metadata.version("torch")
        versions = [_VERSION, torch, sys.version, processor(), self._threads, self._train_mode]
        versions += toolchain.identities(self._device)
        parts = [versions, self._device, architecture, sorted(environment.items()), task.digest, sorted(files.items())]
        parts += [sorted(headers.items())]
        name = hashlib.sha256(json.dumps([*parts, str(self._folder)]).encode(errors="surrogatepass")).hexdigest()
        folder = self._folder / name[:2] / name
        done = folder.with_suffix(".done")
        environment |= _folders(folder)
        if not done.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with open(folder.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another job or process may run the same solution
                if not done.exists():
                    self._make(folder, environment, task, files, headers)
                    done.touch()
        return {"folder": str(folder), "environment": environment}

    def _make(
        self, folder: Path, environment: dict[str, str], task: Task, files: dict[str, str], headers: dict[str, str]
    ) -> None:
        request = {"task": task.code, "code": files["model_new.py"], "headers": headers}

        def run(**more: Any) -> None:
            self._run(folder, environment, request | more)

        try:
            _fill(folder, files)
            try:
                run()
            except FirstPassFailed as failure:
                if _used_stand_ins(folder):  # only an error with torch's own headers counts
                    _fill(folder, files)
                    run(headers={})
                elif isinstance(failure.__cause__, WorkerDied) and failure.__cause__.reason == "killed":
                    run()  # the cause may be outside the solution: try once more
                else:
                    raise
            _freeze(folder, self._device)
        except BaseException:
            scratch.remove(folder)
            raise

    def _run(self, folder: Path, environment: dict[str, str], request: dict[str, Any]) -> None:
        """Runs one first pass in ``folder``. ``request`` is the body of the message ``RUN_FIRST_PASS`` to the worker.
        Raises ``FirstPassFailed`` for a fault of the solution, and ``OSError`` for a fault of the machine."""
        home = Path(tempfile.mkdtemp(prefix="worker-", dir=self._scratch))
        python = sys.prefix, sys.base_prefix
        policy = jail.JailPolicy(
            read=(*jail.SYSTEM_READ, *python), write=(str(folder), str(home)), execute=(*jail.SYSTEM_EXECUTE, *python),
            memory_mb=2 * self._memory_mb if self._device == "cpu" else 0,  # virtual memory of one process
            processes=256, file_mb=_FILE_MB, cpu_seconds=int(self._seconds * self._threads) + 60, one_group=True,
            shared_memory=self._device == "cuda", read_any=True,
        )  # fmt: skip
        options = {
            "role": "first_pass", "threads": self._threads, "folder": str(folder), "device": self._device,
            "train_mode": self._train_mode,
            # gcc checks whether an unprivileged user can reach its temporary folder; a cache may lie in a private home
            "environment": environment | {"TMPDIR": str(home)},
        }  # fmt: skip
        worker: JailedProcess | None = None
        with watchdog((folder, home), self._lease, self._device, self._memory_mb) as overrun:
            try:
                worker = JailedProcess(self._warm(), options, policy, self._memory_mb, home, cgroups.find(), overrun)
                worker.wait_started()
                worker.seconds = self._seconds
                answer = worker.call(WorkerOperation.RUN_FIRST_PASS, request)
                if answer is not None:
                    _require_space(folder, home)
            except FrameTooLarge as error:
                raise FirstPassFailed("build_error", f"the solution is {error}") from None
            except (NotStarted, ConnectionError, ValueError) as lost:
                self.close()
                raise OSError(f"the first pass did not start: {lost}") from None
            except WorkerDied as death:
                status: Status = "timeout" if death.reason == "timeout" else "crash"
                raise FirstPassFailed(status, f"the solution, while it compiled, {death}") from death
            except WorkerError as error:
                _require_space(folder, home)
                raise FirstPassFailed("build_error", str(error)) from None
            finally:
                if worker:
                    with contextlib.suppress(ConnectionError):  # the warm parent has died, and the worker with it
                        worker.kill()
                scratch.remove(home)
        if answer is not None:
            raise FirstPassFailed("build_error", _explained(answer, folder))

    def _warm(self) -> WarmParent:
        with self._starting:
            if self._parent is None:
                log = self._scratch / "first-pass.log"
                self._parent = compiling_parent(lambda imports: warm_parent(self._threads, log, imports))
            return self._parent

    def close(self) -> None:
        """Ends the warm parent, which is the process that forks the workers."""
        with self._starting:
            if self._parent:
                self._parent.close()
            self._parent = None


def _require_space(*folders: Path) -> None:
    """Raises OSError if the disk of one of ``folders`` is nearly full: then a failed pass says nothing about the
    solution."""
    for folder in folders:
        if shutil.disk_usage(folder).free < _LEAST_SPACE:
            raise OSError(errno.ENOSPC, "too little space left for a first pass", str(folder))


def stand_ins(files: Mapping[str, str]) -> dict[str, str]:
    """Returns short stand-ins (text by path) for the torch headers that the solution's sources include. The result is
    empty if no source names ``load_inline`` or ``cpp_extension``."""
    text = "\n".join(files.values())
    if not re.search(r"\b(load_inline|cpp_extension)\b", text):
        return {}
    made = {f"stand_in/{header.name}": header.read_text() for header in sorted(_STAND_INS.glob("*.h"))}
    for name in {"torch/extension.h", "torch/types.h", *_INCLUDE.findall(text)}:
        kind = "module" if re.search("extension|pybind|python", name) else "cuda" if "cuda" in name else "types"
        made[name] = f"#include <stand_in/{kind}.h>\n"
    return made


def _fill(folder: Path, files: Mapping[str, str]) -> None:
    """Creates ``folder`` anew, with the solution's files except ``model_new.py``."""
    scratch.remove(folder)
    folder.mkdir()
    try:
        builder.write_files(folder, {name: text for name, text in files.items() if name != "model_new.py"})
    except builder.BuildError as error:
        raise FirstPassFailed("build_error", str(error)) from None


def _folders(folder: Path) -> dict[str, str]:
    """Returns environment variables that make compilers write below ``folder``. Both passes must use the same path,
    because the compilers' cache keys contain it."""
    return {
        "HOME": str(folder), "TMPDIR": str(folder), "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_HOME": str(folder),
        "TRITON_CACHE_DIR": f"{folder}/triton", "LIBRARY_PATH": f"{folder}/links",
    }  # fmt: skip


def _toolchain(architecture: str) -> dict[str, str]:
    """Returns environment variables that tell compilers where the tools are, and for which ``architecture`` to
    build."""
    found = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "MAX_JOBS": "2"}
    with contextlib.suppress(toolchain.CompilerMissing):
        home = Path(toolchain.find_nvcc().compiler).resolve().parents[1]
        found |= {"CUDA_HOME": str(home), "PATH": f"{home}/bin:{found['PATH']}"}
    if architecture:
        code = architecture.removeprefix("sm_")
        digits = code.rstrip("af")
        found["TORCH_CUDA_ARCH_LIST"] = f"{digits[:-1]}.{digits[-1]}{code[len(digits) :]}"
    return found


def _freeze(folder: Path, device: str) -> None:
    """Replaces ``folder`` by a copy that holds only its regular files and subfolders, owned by this process's user.
    Raises ``FirstPassFailed`` if ``folder`` exceeds a limit (bytes, files or depth), or if something in it cannot be
    read. ``device`` (``cpu`` or ``cuda``) determines the limits."""
    if what := too_much(folder, device):
        raise FirstPassFailed("build_error", f"the solution left {what} where it compiled")
    staged = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        staged.chmod(0o755)
        for entry, _ in scratch.entries(folder):
            target = staged / os.path.relpath(entry.path, folder)
            if entry.is_dir(follow_symlinks=False):
                target.mkdir()
                target.chmod(0o755)
            elif entry.is_file(follow_symlinks=False):
                _copy(entry.path, target)
    except PermissionError:
        scratch.remove(staged)
        why = "the solution left a file or folder that cannot be read where it compiled"
        raise FirstPassFailed("build_error", why) from None
    except BaseException:
        scratch.remove(staged)
        raise
    scratch.remove(folder)
    os.rename(staged, folder)


def _copy(source: str, target: Path) -> None:
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file, open(target, "wb") as copy:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            shutil.copyfileobj(file, copy)
    target.chmod(0o644)


def _explained(answer: Any, folder: Path) -> str:
    """Returns a message that tells the solution's author why the first pass failed. It holds the first compiler errors
    in the log, or the solution's exception if the log has none. ``answer`` is the worker's answer, with the keys
    ``log`` and ``error``."""
    said = answer if isinstance(answer, dict) else {}
    log, error = (str(said.get(key, "")).replace(f"{folder}/", "") for key in ("log", "error"))
    return builder.first_errors(log) if builder.has_errors(log) else printable(error)[:1200]
