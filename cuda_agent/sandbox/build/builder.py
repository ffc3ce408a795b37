"""Compiles C++ and CUDA sources, and caches the results under a hash of sources, compiler and options. The compilers
run in the jail, which restricts untrusted processes.

No build needs a GPU. If a C++ library has one source file and needs no extra options, the builder first tries a fast
build. This is the case for the CPU kernels of a plan (a solution format). A compiler that was started in advance
(module ``compiler``) does the fast build. To save time, the fast build omits the C++ library and the special functions
of ``<cmath>``, which few kernels need. If the fast build fails, a full build follows and reports the errors. There is
no full build if the fast build exceeds its time limit."""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_agent.lease import Lease
from cuda_agent.sandbox.build.compiler import Compiler, CompilerPool, Waiting
from cuda_agent.sandbox.build.toolchain import FLAGS, NVRTC_PROGRAM, Toolchain, find_nvcc, find_nvrtc, find_toolchain
from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.messages import KERNELS_LOG
from cuda_agent.sandbox.wire import printable

_DIAGNOSTICS = ("-fmax-errors=3", "-fdiagnostics-color=never", "-fno-diagnostics-show-option", "-ftemplate-depth=256")
_PRELUDE = "".join(f"#include <{name}>\n" for name in ("cmath", "algorithm", "cstdint", "cstring", "limits"))
# Its inline functions instantiate templates in every build, half of a small kernel's build time.
_LEAN_PRELUDE = "#define _GLIBCXX_BITS_SPECFUN_H 1\n" + _PRELUDE
_LEAN_LINK = ("-nodefaultlibs", "-fno-use-linker-plugin", "-lm", "-lc", "-lgcc")  # also halves the linker's time
_LIBRARY_MB = 64
_MESSAGE_LENGTH = 1200
_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)  # the machine's fault
_KILLED = "Killed signal terminated program"


class BuildError(Exception):
    """An error: the sources cannot be built. The message gives the reason, usually the first errors of the compiler. A
    fault of the machine, such as a full disk, raises ``OSError`` instead."""


class _TooLong(BuildError):
    """The compiler exceeded its time limit."""


class _Interrupted(Exception):
    """The caller that ran a build was cancelled, so the build has no result."""


class _Killed(BuildError):
    """The compiler was killed: by its limit of CPU time, by the system, or by an operator."""


_OUR_SECONDS = 120.0  # limit for the project's own code: precompiled headers, the plan runtime


@dataclass(frozen=True)
class _Order:
    """One build: ``command`` compiles ``files`` within ``seconds``. ``files`` maps file names to texts. Besides these
    files and the system's own, the jailed compiler may read the paths ``read``. The builder copies the result files
    ``products`` to the folder ``target``, and writes the compiler's messages to its file ``log``, unless that is
    empty."""

    command: list[str]
    files: Mapping[str, str]
    products: tuple[str, ...]
    target: Path
    read: tuple[str, ...]
    seconds: float
    log: str = ""


class Builder:
    """Runs builds, at most ``parallel`` at a time, and caches the results in ``folder``. Compilers work below
    ``scratch``, a folder that jailed processes can enter even if they run as other users. ``seconds`` and ``memory_mb``
    limit one build.

    ``lease`` is the folder of the timing lease, a lock that keeps other work away while a kernel is timed. A build
    holds this lock in shared mode, so that no kernel is timed during the build. If ``lease`` is None, builds take no
    lock. This is for kernels on a GPU, whose times builds do not disturb."""

    def __init__(
        self, folder: Path, scratch: Path, lease: Path | None, seconds: float, memory_mb: int, parallel: int = 2
    ) -> None:
        self._folder, self._scratch, self._lease = folder, scratch, lease
        self._seconds, self._memory_mb = seconds, memory_mb
        self._slots = asyncio.Semaphore(parallel)
        self._under_way: dict[str, asyncio.Future[Path]] = {}
        self._toolchain: Toolchain | None = None
        self._preparing = asyncio.Lock()
        self._ahead: CompilerPool | None = CompilerPool(self._start_ahead)

    def close(self) -> None:
        """Kills the unused compiler that was started in advance."""
        if self._ahead:
            self._ahead.close()

    async def toolchain(self) -> Toolchain:
        """Returns the C++ compiler and the folders of its precompiled headers. The first call precompiles the headers.
        Raises ``CompilerMissing`` if there is no g++."""
        async with self._preparing:
            if self._toolchain is None:
                found = await asyncio.to_thread(find_toolchain)
                homes = [await self._precompiled(found, text) for text in (_PRELUDE, _LEAN_PRELUDE)]
                self._toolchain = Toolchain(found.compiler, found.identity, *map(str, homes))
            return self._toolchain

    async def _precompiled(self, tools: Toolchain, prelude: str) -> Path:
        key = hashlib.sha256(f"{tools.identity}|{tools.compiler}|{prelude}".encode()).hexdigest()[:32]
        home = self._folder / "prelude" / key
        if not (home / "prelude.h.gch").exists():
            command = [tools.compiler, *FLAGS, "-x", "c++-header", "prelude.h", "-o", "prelude.h.gch"]
            products = "prelude.h", "prelude.h.gch"
            await self._compile(_Order(command, {"prelude.h": prelude}, products, home, (), _OUR_SECONDS))
        return home

    async def library(
        self, files: Mapping[str, str], units: Sequence[str], extra: Sequence[str] = (), ours: bool = False
    ) -> Path:
        """Compiles the sources ``units`` to a shared library and returns its path. ``files`` maps the names of all
        sources and included files to their texts. ``extra`` holds further compiler options. ``ours`` marks
        the project's own sources, which get a longer time limit. Raises ``BuildError`` or ``CompilerMissing``."""
        tools = await self.toolchain()
        command = [
            tools.compiler, *FLAGS, *_DIAGNOSTICS, "-include", f"{tools.includes}/prelude.h", *extra, *units,
            "-shared", "-Wl,--no-undefined", "-o", "library.so",
        ]  # fmt: skip
        parts = [tools.identity, *units, *extra]
        unit = units[0] if len(units) == 1 and not extra and not ours else ""
        seconds = _OUR_SECONDS if ours else self._seconds
        built = await self._built(parts, command, files, ("library.so",), (tools.includes,), unit, seconds)
        return built / "library.so"

    async def kernels(
        self, files: Mapping[str, str], unit: str, expressions: Sequence[str], architecture: str
    ) -> tuple[Path, dict[str, str]]:
        """Builds ``unit``, a CUDA source without host code, to a cubin for ``architecture`` (such as ``sm_90a``).
        Returns the cubin's path, and a dictionary from each of ``expressions`` (C++ names such as ``scale<float, 4>``)
        to its mangled name. Raises ``BuildError`` or ``CompilerMissing``."""
        tools = find_nvrtc()
        request = {
            "library": tools.library, "includes": tools.includes, "architecture": architecture, "unit": unit,
            "expressions": list(expressions),
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", str(NVRTC_PROGRAM), json.dumps(request)]
        parts = [tools.identity, architecture, unit, *expressions]
        read = (str(Path(tools.library).parent), *tools.includes, str(NVRTC_PROGRAM))
        folder = await self._built(parts, command, files, ("kernels.cubin", "names.json"), read)
        return folder / "kernels.cubin", json.loads((folder / "names.json").read_text())

    async def extension(
        self,
        files: Mapping[str, str],
        units: Sequence[str],
        architecture: str,
        libraries: Sequence[str],
        extra: Sequence[str] = (),
    ) -> Path:
        """Compiles the CUDA and C++ sources ``units`` with nvcc to a shared library and returns its path. The file
        ``KERNELS_LOG`` beside it tells the resources of its kernels. ``libraries`` may hold ``cublas`` and ``cudnn``.
        ``extra`` holds compiler options. Raises ``BuildError`` or ``CompilerMissing``."""
        tools = find_nvcc()
        defined = ["-DCUDA_EXTENSION_ON_CUDA", *(["-DCUDA_EXTENSION_USES_CUBLAS"] if "cublas" in libraries else [])]
        code = architecture.removeprefix("sm_")
        command = [
            tools.compiler, "-gencode", f"arch=compute_{code},code=sm_{code}", "-O3", "--use_fast_math", "-std=c++20",
            "--threads", "2", "-Xcompiler", "-fPIC,-O3,-fmax-errors=3", "-Xptxas", "-v", *defined, *extra,
            *(f"-I{folder}" for folder in tools.includes), *(f"-L{folder}" for folder in tools.places),
            *units, "-shared", "-o", "library.so",
            *(f"-Xlinker={path}" for name in libraries for path in tools.libraries(name)),  # nvcc refuses lib*.so.13
        ]  # fmt: skip
        parts = [tools.identity, architecture, *units, *extra, *libraries]
        return (await self._built(parts, command, files, ("library.so",), (), log=KERNELS_LOG)) / "library.so"

    async def _built(
        self,
        parts: Sequence[str],
        command: list[str],
        files: Mapping[str, str],
        products: tuple[str, ...],
        read: tuple[str, ...],
        unit: str = "",
        seconds: float = 0.0,
        log: str = "",
    ) -> Path:
        """Returns the folder with ``products``. The folder comes from the cache (key: ``parts`` and ``files``), from a
        running build with the same key, or from a new run of ``command``. If ``unit`` is given, it names the only
        source. Then a compiler that was started in advance tries to build it first, and ``command`` runs only if this
        fails. Raises ``BuildError`` if the sources do not build."""
        content = [*parts, *(f"{name}\0{files[name]}" for name in sorted(files))]
        key = hashlib.sha256("\0\0".join(content).encode(errors="surrogatepass")).hexdigest()
        done, failed = self._folder / key[:2] / key, self._folder / key[:2] / f"{key}.error"
        if done.exists():
            return done
        if failed.exists():
            raise BuildError(failed.read_text() or "the build failed")
        while key in self._under_way:
            try:
                return await asyncio.shield(self._under_way[key])
            except _Interrupted:  # the caller that built it was cancelled: this one builds it
                pass
        future: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._under_way[key] = future
        try:
            order = _Order(command, files, products, done, read, seconds or self._seconds, log)
            if not (unit and await self._compiled_ahead(unit, order)):
                try:
                    await self._compile(order)
                except _Killed:  # the cause may be outside the build: try once more
                    await self._compile(order)
            future.set_result(done)
            return done
        except BaseException as error:
            if isinstance(error, BuildError) and not isinstance(error, _Killed) and "limit" not in str(error):
                with contextlib.suppress(OSError):
                    failed.parent.mkdir(parents=True, exist_ok=True)
                    written = failed.with_suffix(f".{os.getpid()}")
                    written.write_text(str(error))
                    os.replace(written, failed)
            future.set_exception(error if isinstance(error, Exception) else _Interrupted())
            future.exception()
            raise
        finally:
            del self._under_way[key]

    async def _compile(self, order: _Order) -> None:
        async with self._slots:
            work = Path(tempfile.mkdtemp(prefix="build-", dir=self._scratch))
            try:
                write_files(work, order.files)
                _keep(work, order, await asyncio.to_thread(self._run, order, work))
            finally:
                shutil.rmtree(work, ignore_errors=True)

    @contextlib.contextmanager
    def _beside_timing(self) -> Iterator[None]:
        """Holds the timing lease (a lock) in shared mode, so that no kernel is timed inside the context. Without a
        lease, does nothing."""
        with contextlib.ExitStack() as held:
            if self._lease is not None:
                held.enter_context(held.enter_context(contextlib.closing(Lease(self._lease))).working())
            yield

    def _run(self, order: _Order, work: Path) -> str:
        """Runs the compiler in the folder ``work`` and returns its messages."""
        with self._beside_timing():
            compiler = Compiler(self._policy(work, order.read, order.seconds), order.command, work)
            return self._finish(compiler, work, order.seconds)

    async def _compiled_ahead(self, unit: str, order: _Order) -> bool:
        if not self._ahead:
            return False
        async with self._slots:
            try:
                await asyncio.to_thread(self._run_ahead, self._ahead, unit, order)
            except _TooLong:
                raise
            except (BuildError, OSError):  # the full way may succeed, and reports better errors
                return False
            return True

    def _run_ahead(self, ahead: CompilerPool, unit: str, order: _Order) -> None:
        waiting = ahead.take()
        try:
            write_files(waiting.work, order.files)
            with self._beside_timing():
                waiting.go(unit)
                ahead.start()  # start it now, before this build's result is timed
                self._finish(waiting, waiting.work, self._seconds)
            _keep(waiting.work, order)
        finally:
            waiting.discard()

    def _start_ahead(self) -> Waiting:
        tools = self._toolchain
        assert tools
        command = [
            tools.compiler, *FLAGS, *_DIAGNOSTICS, "-pipe", "-shared", "-Wl,--no-undefined", "-o", "library.so",
        ]  # fmt: skip
        work = Path(tempfile.mkdtemp(prefix="build-", dir=self._scratch))
        policy = self._policy(work, (tools.lean,), self._seconds)
        try:
            with self._beside_timing():
                return Waiting(policy, command, work, f"{tools.lean}/prelude.h", _LEAN_LINK)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise

    def _policy(self, work: Path, read: Sequence[str], seconds: float) -> jail.JailPolicy:
        python = sys.prefix, sys.base_prefix
        return jail.JailPolicy(
            read=(*jail.SYSTEM_READ, *python, *read), write=(str(work),), execute=(*jail.SYSTEM_EXECUTE, *python),
            memory_mb=self._memory_mb, file_mb=_LIBRARY_MB, cpu_seconds=int(seconds) + 1, read_any=True,
        )  # fmt: skip

    def _finish(self, compiler: Compiler, work: Path, seconds: float) -> str:
        try:
            status, errors = compiler.finish(seconds)
        except TimeoutError:
            raise _TooLong(f"the build exceeds its limit of {seconds:g} s") from None
        if status != 0 and shutil.disk_usage(work).free < _LIBRARY_MB << 20:
            raise OSError(errno.ENOSPC, "too little space left for a build", str(work))
        if status == -signal.SIGKILL or (status != 0 and _KILLED in errors):
            raise _Killed(first_errors(errors))
        if status != 0:
            raise BuildError(first_errors(errors))
        return errors


def _keep(work: Path, order: _Order, messages: str = "") -> None:
    """Copies the result files of ``order`` from the folder ``work`` to ``order.target``, which appears atomically.
    ``messages`` are those of the compiler."""
    target = order.target
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        for name in order.products:
            _take(work / name, staged / name)
        if order.log:
            (staged / order.log).write_text(messages, errors="replace")
        os.replace(staged, target)
    except BaseException as error:
        shutil.rmtree(staged, ignore_errors=True)
        if not (isinstance(error, OSError) and target.exists()):  # otherwise another process was first
            raise


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes untrusted source files into an empty folder. Raises ``BuildError`` if a name or a text is invalid."""
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
            if getattr(error, "errno", None) in _OURS:
                raise
            reason = error.strerror if isinstance(error, OSError) else "not a possible name or text"
            raise BuildError(f"{printable(name[:200])}: cannot be written: {reason}") from None


def _take(source: Path, target: Path) -> None:
    """Copies ``source``, a file that the jailed compiler wrote. Raises ``BuildError`` if the file is missing or is a
    symbolic link."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise BuildError("the compiler left no library") from None
    with os.fdopen(descriptor, "rb") as file:
        target.write_bytes(file.read(_LIBRARY_MB << 20))


_ERROR = re.compile(
    r"^(?P<where>[^\s:(][^:(]*((:\d+)+|\(\d+\)))?:? ?(catastrophic |fatal )?error( #[\w-]+)?: (?P<what>.*)$"
)


def has_errors(text: str) -> bool:
    return any(_ERROR.match(line) or "undefined reference to" in line for line in text.splitlines())


def first_errors(text: str) -> str:
    """Returns the first errors in ``text`` (a compiler's messages), with the source lines that they report."""
    lines = [line[:_MESSAGE_LENGTH] for line in text.splitlines()]  # a candidate's own text can make a line of 1 MB
    kept: list[str] = []
    for number, line in enumerate(lines):
        if match := _ERROR.match(line):
            where = match["where"] or ""
            kept.append(f"{where}: error: {match['what']}" if where else f"error: {match['what']}")
            for following in lines[number + 1 : number + 3]:
                code = re.sub(r"^\d+ \|\s*", "", following.strip())
                if following[:1].isspace() and code and code[0] != "^":
                    kept.append(f"    {code}")
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
