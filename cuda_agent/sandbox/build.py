"""The builder: C++ sources to a shared library, in the jail, cached by content.

The key of a build is its sources, the flags, the compiler's version and the processor.  A header of a few common
standard headers is precompiled once: most of a small kernel's build time is spent in ``<cmath>`` and ``<algorithm>``.
The compiler runs with limits on time, memory, processes and files; what it says is cut to the first errors, each with
its source line.  Not covered: CUDA, and whether the library does anything sensible.
"""

import asyncio
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_agent.lease import Lease
from cuda_agent.sandbox import jail
from cuda_agent.sandbox.wire import printable

FLAGS = ("-O3", "-march=native", "-ffast-math", "-std=c++17", "-fPIC", "-pthread", "-fopenmp-simd")
_DIAGNOSTICS = ("-fmax-errors=3", "-fdiagnostics-color=never", "-fno-diagnostics-show-option", "-ftemplate-depth=256")
_PRELUDE = "".join(f"#include <{name}>\n" for name in ("cmath", "algorithm", "cstdint", "cstring", "limits"))
_LIBRARY_MB = 64
_MESSAGE_LENGTH = 1200
_LOG_BYTES = 1 << 20  # of a compiler's messages that are looked at


class BuildError(Exception):
    """The sources do not build; the message is the compiler's, cut to what helps."""


class CompilerMissing(RuntimeError):
    """There is no C++ compiler, or it does not work inside the jail."""


@dataclass(frozen=True)
class Toolchain:
    compiler: str
    version: str
    processor: str
    includes: str = ""  # folder of the precompiled prelude

    @property
    def identity(self) -> str:
        return f"{self.version}|{self.processor}|{' '.join(FLAGS)}"


def find_toolchain(compiler: str = "g++") -> Toolchain:
    """Raises ``CompilerMissing``."""
    path = shutil.which(compiler)
    if path is None:
        raise CompilerMissing(f"no C++ compiler: {compiler!r} is not on PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    return Toolchain(path, version, processor())


def processor() -> str:
    """What ``-march=native`` and a time depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in reversed(lines) if ":" in line}
    return hashlib.sha256("|".join(found.get(name, "") for name in wanted).encode()).hexdigest()[:16]


class Builder:
    """``folder``: the cache.  ``scratch``: a folder that jailed users can reach.  At most ``parallel`` builds run."""

    def __init__(
        self, folder: Path, scratch: Path, lease: Path, seconds: float, memory_mb: int, parallel: int = 2
    ) -> None:
        self._folder = folder
        self._scratch = scratch
        self._lease = lease
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._slots = asyncio.Semaphore(parallel)
        self._under_way: dict[str, asyncio.Future[Path]] = {}
        self._toolchain: Toolchain | None = None
        self._preparing = asyncio.Lock()

    async def toolchain(self) -> Toolchain:
        """The compiler, with the prelude precompiled."""
        async with self._preparing:
            if self._toolchain is None:
                found = await asyncio.to_thread(find_toolchain)
                key = hashlib.sha256(f"{found.identity}|{found.compiler}|{_PRELUDE}".encode()).hexdigest()[:32]
                home = self._folder / "prelude" / key
                if not (home / "prelude.h.gch").exists():
                    command = [found.compiler, *FLAGS, "-x", "c++-header", "prelude.h", "-o", "prelude.h.gch"]
                    await self._compile(command, {"prelude.h": _PRELUDE}, ("prelude.h", "prelude.h.gch"), home, ())
                self._toolchain = Toolchain(found.compiler, found.version, found.processor, str(home))
            return self._toolchain

    async def library(self, files: Mapping[str, str], units: Sequence[str], extra: Sequence[str] = ()) -> Path:
        """The shared library of ``units``, some of ``files`` (the others may be included).  Raises ``BuildError``."""
        tools = await self.toolchain()
        parts = [tools.identity, *units, *extra, *(f"{name}\0{files[name]}" for name in sorted(files))]
        key = hashlib.sha256("\0\0".join(parts).encode(errors="surrogatepass")).hexdigest()
        done, failed = self._folder / key[:2] / f"{key}.so", self._folder / key[:2] / f"{key}.error"
        if done.exists():
            return done
        if failed.exists():
            raise BuildError(failed.read_text())
        if key in self._under_way:
            return await asyncio.shield(self._under_way[key])
        future: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._under_way[key] = future
        try:
            command = [
                tools.compiler, *FLAGS, *_DIAGNOSTICS, "-include", f"{tools.includes}/prelude.h", *extra, *units,
                "-shared", "-Wl,--no-undefined", "-o", "library.so",
            ]  # fmt: skip
            target = done.with_suffix("")
            await self._compile(command, files, ("library.so",), target, (tools.includes,))
            os.replace(target / "library.so", done)
            target.rmdir()
            future.set_result(done)
            return done
        except BaseException as error:
            if isinstance(error, BuildError) and "limit" not in str(error):
                failed.parent.mkdir(parents=True, exist_ok=True)
                failed.write_text(str(error))
            future.set_exception(error if isinstance(error, Exception) else BuildError("the build was interrupted"))
            future.exception()
            raise
        finally:
            del self._under_way[key]

    async def _compile(
        self, command: list[str], files: Mapping[str, str], products: Sequence[str], target: Path, read: Sequence[str]
    ) -> None:
        """Run the compiler on ``files`` and move ``products`` to ``target``, whole or not at all."""
        async with self._slots:
            lease = Lease(self._lease)
            work = Path(tempfile.mkdtemp(prefix="build-", dir=self._scratch))
            try:
                _write(work, files)
                policy = jail.Policy(
                    read=(*jail.SYSTEM_READ, *read),
                    write=(str(work),),
                    execute=jail.SYSTEM_EXECUTE,
                    memory_mb=self._memory_mb,
                    file_mb=_LIBRARY_MB,
                    cpu_seconds=int(self._seconds) + 1,
                    read_any=True,
                )
                await asyncio.to_thread(self._run, lease, jail.command(policy, command), work)
                target.parent.mkdir(parents=True, exist_ok=True)
                staged = Path(tempfile.mkdtemp(dir=target.parent))
                for name in products:
                    _take(work / name, staged / name)
                try:
                    os.replace(staged, target)
                except OSError:  # another process was first
                    shutil.rmtree(staged)
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def _run(self, lease: Lease, command: list[str], work: Path) -> None:
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TMPDIR": str(work)}
        with lease.working(), tempfile.TemporaryFile() as log:  # a file: the limit on files holds for it, too
            process = subprocess.Popen(
                command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(self._seconds)
            except subprocess.TimeoutExpired:
                raise BuildError(f"the build exceeds its limit of {self._seconds:g} s") from None
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    process.kill()
                process.wait()
            log.seek(0)
            errors = log.read(_LOG_BYTES).decode(errors="replace")
        if process.returncode != 0:
            raise BuildError(first_errors(errors))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        if (path.is_absolute() and not path.is_relative_to(folder)) or ".." in Path(name).parts:
            raise BuildError(f"{printable(name)}: a path must stay inside the work folder")
        if name.startswith(("-", "@")):
            raise BuildError(f"{printable(name)}: to the compiler this is an option and not a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except (OSError, ValueError) as error:  # a name too long, a file that is also a folder, half a character
            raise BuildError(f"{printable(name)}: cannot be written: {printable(str(error))}") from None


def _take(source: Path, target: Path) -> None:
    """Copy what the jailed compiler made; never follow a link it may have left."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise BuildError("the compiler left no library") from None
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_LIBRARY_MB << 20)
    with open(target, "wb") as copy:
        copy.write(content)


_ERROR = re.compile(r"^(?P<where>[^\s:][^:]*(:\d+)+)?:? ?(fatal )?error: (?P<what>.*)$")


def first_errors(text: str) -> str:
    """The compiler's first errors, each with its source line; notes, carets and instantiation chains are left out."""
    lines = text.splitlines()
    kept: list[str] = []
    for number, line in enumerate(lines):
        if match := _ERROR.match(line):
            where = match["where"] or ""
            kept.append(f"{where}: error: {match['what']}" if where else f"error: {match['what']}")
            for following in lines[number + 1 : number + 3]:
                if source := re.match(r"^\s+\d+ \|(.*)$", following):
                    kept.append("    " + source[1].strip())
                    break
        elif match := re.search(r"undefined reference to .*", line):
            kept.append(f"error: {match[0]}")
        if len(kept) >= 6:
            break
    if not kept:
        if "Cannot allocate memory" in text or "out of memory" in text or "bad_alloc" in text or "Killed" in text:
            return "the build exceeds its limit of memory"
        kept = [line for line in lines if line.strip()][-3:] or ["the compiler failed without a message"]
    return "\n".join(map(printable, kept))[:_MESSAGE_LENGTH]
