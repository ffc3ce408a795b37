"""Checks whether this machine meets the package's requirements. Each check gives one line, and a remedy if it fails."""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cuda_agent.config import SandboxConfig
from cuda_agent.machine import cores


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    text: str  # what was found
    mend: str = ""  # the remedy: a command or an instruction; empty if none is needed


def examine(store_uri: str, mlflow_uri: str) -> Iterator[Check]:
    """Yields the results of all checks.  A check that raises an exception counts as failed."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("system", _system),
        ("python", lambda: Check("python", True, platform.python_version())),
        ("headers", _headers),
        ("memory", _memory),
        ("processors", _processors),
        ("torch", lambda: _package("torch", "pip install torch")),
        ("transformers", lambda: _package("transformers", "pip install transformers")),
        ("compiler", _compiler),
        ("walls", _walls),
        ("store", lambda: _store(store_uri)),
        ("disk", lambda: _disk(store_uri)),
        ("mlflow", lambda: _mlflow(mlflow_uri)),
    ]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # a check that breaks is a finding, not a crash
            yield Check(name, False, not_checked(error))


def not_checked(error: Exception) -> str:
    """Returns the text of a check that raised ``error``: the error's type, and the first line of its message."""
    return f"could not be checked: {': '.join([type(error).__name__, *str(error).splitlines()[:1]])}"


def _system() -> Check:
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    linux = sys.platform == "linux"
    mend = "run it on Linux, or in a Linux container or virtual machine"
    return _check("system", linux, text if linux else unsupported(), mend)


def unsupported() -> str:
    """Returns the message for a system other than Linux: what the package can do there, and what needs Linux."""
    return (
        f"{platform.system()}: runs, reports and configurations can be read here; kernels run only on Linux, because "
        "the sandbox needs its Landlock and seccomp"
    )


def _check(name: str, ok: bool, text: str, mend: str = "") -> Check:
    return Check(name, ok, text, "" if ok else mend)


def _headers() -> Check:
    """Checks whether Python's C headers are installed.  ``torch.compile``, a baseline of the sandbox, needs them."""
    path = Path(sysconfig.get_path("include")) / "Python.h"
    text = str(path) if path.exists() else f"there is no {path}"
    return _check("headers", path.exists(), text, "apt-get install python3-dev   (dnf install python3-devel)")


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    limit = total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if os.path.exists(path) and (text := Path(path).read_text().strip()).isdigit():
            limit = min(limit, int(text) / 2**30)
    return _check(
        "memory", limit >= 7.5, f"{limit:.1f} GiB", "give this machine, or this container, 8 GiB: the demo needs them"
    )


def _processors() -> Check:
    count = cores()
    mend = "set sandbox.threads=1 policy.threads=1, and expect twice the time"
    return _check("processors", count >= 2, f"{count} core{'s' * (count != 1)}", mend)


def _package(name: str, mend: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, "not installed", mend)


def _compiler() -> Check:
    if (found := shutil.which("g++")) is None:
        return Check("compiler", False, "no g++", "apt-get install g++   (dnf install gcc-c++)")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "probe.cpp", f"{folder}/probe.so"
        source.write_text('#include <cmath>\nextern "C" float f(float x) { return std::exp(x); }\n')
        command = [found, "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-o", library, str(source)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=60)
    line = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20).stdout.splitlines()[0]
    text = line if built.returncode == 0 else f"{line}: it cannot build a library"
    return _check("compiler", built.returncode == 0, text, "apt-get install build-essential")


def _walls() -> Check:
    """Checks the sandbox's walls (protections such as seccomp): a process inside the sandbox attacks them. The check
    fails if a required wall does not hold."""
    from cuda_agent.sandbox.jail.jail import JailError, prove

    required = SandboxConfig().required_walls
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        try:
            weak = prove(required, Path(folder))
        except JailError as error:
            mend = "use Linux 5.13 or newer, with landlock in /sys/kernel/security/lsm"
            return Check("walls", False, str(error).splitlines()[0], mend)
    text = f"{', '.join(required)} hold against an attack"
    return Check("walls", True, text + (f"; not required, and missing: {', '.join(weak)}" if weak else ""))


def _store(uri: str) -> Check:
    """Checks that the store can be written. Leaves no folder that was not there before."""
    from cuda_agent.storage import StoreError, local_folder, open_store

    folder = local_folder(uri)
    made = [path for path in (folder, *folder.parents) if not path.exists()] if folder else []
    try:
        store = open_store(uri)
        store.put("doctor/probe", b"x")
        store.delete("doctor/probe")
    except StoreError as error:
        return Check("store", False, str(error).splitlines()[0], "check --store, its permissions and credentials")
    finally:
        for path in [made[0] / "doctor", *made] if made else []:
            with contextlib.suppress(OSError):  # something else was written there meanwhile
                path.rmdir()
    return Check("store", True, store.uri)


def _disk(uri: str) -> Check:
    from cuda_agent.storage import local_folder

    if (folder := local_folder(uri)) is None:
        return Check("disk", True, "not on this machine")
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / 2**30
    return _check("disk", free >= 3, f"{free:.1f} GiB free", "remove old runs with cuda-agent gc")


def _mlflow(uri: str) -> Check:
    package = _package("mlflow", "pip install mlflow")
    if not package.ok:
        return package
    if not uri.startswith("http"):
        return Check("mlflow", True, f"{package.text}; mlflow ui --backend-store-uri {uri}")
    from cuda_agent import mlflow_api

    try:
        return Check("mlflow", True, f"{uri}: {mlflow_api.try_out(uri)}")
    except Exception as error:
        refused, _, login = mlflow_api.refusal(error).partition(". ")
        text = f"{uri}: {refused}" if refused else f"{uri} does not answer ({error})"
        return Check("mlflow", False, text, login or "start it, or run with run.mlflow=off")
