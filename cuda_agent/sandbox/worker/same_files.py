"""Makes the second pass of a solution find the files of the first pass. The first pass may start compilers. The second
pass is the judged run (see ``replay``).

A solution may write its sources when it is imported, or compile in a new temporary folder. In the second pass, the
first pass's folder is read-only. Therefore temporary files get the same names in both passes, and writes to the folder
do nothing in the second pass. The sandbox's security does not depend on this code."""

import builtins
import io
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OF_COMPILERS = ("extensions", "inductor", "triton")  # subfolders in which compilers remove files
_SYSTEM_TMP = re.compile(r"(?<![\w./])/tmp(?=[/\"'])")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def with_own_tmp(code: str, place: Path) -> str:
    """Returns the source ``code`` with ``{place}/tmp`` instead of the system's ``/tmp``. Solutions may not write to
    ``/tmp``."""
    return _SYSTEM_TMP.sub(lambda _: f"{place}/tmp", code)


def keep_files(place: Path, replayed: bool) -> None:
    """Patches the file functions of this process, so that the second pass of a solution (the judged run) finds the
    files of the first pass (the run that may start compilers). ``place`` is the folder of the first pass.

    - The n-th temporary file with the same prefix, suffix and folder has the same name in both passes.
    - ``tempfile`` removes no files, and no file in ``place`` is removed.
    - If ``replayed`` is true (in the second pass), writes to ``place`` do nothing, because the files exist already.

    The compilers' subfolders of ``place`` are an exception: files in them can be removed and written as usual."""
    counts: Counter[tuple[Any, ...]] = Counter()
    inside = _inside(place)

    def named(folder: Any, prefix: Any, suffix: Any) -> str:
        counts[folder, prefix, suffix] += 1
        return os.path.join(folder, f"{prefix}{counts[folder, prefix, suffix]:08}{suffix}")

    def make_folder(suffix: str | None = None, prefix: str | None = None, dir: str | None = None) -> str:
        path = named(dir or tempfile.gettempdir(), prefix or "tmp", suffix or "")
        os.makedirs(path, 0o700, exist_ok=True)
        return os.path.abspath(path)

    def make_file(folder: Any, prefix: Any, suffix: Any, flags: int, kind: type) -> tuple[int, Any]:
        path = os.path.abspath(named(*(os.fsdecode(part) for part in (folder, prefix, suffix))))
        return os.open(path, flags & ~os.O_EXCL, 0o600), path if kind is str else os.fsencode(path)

    changed: Any = tempfile
    changed.mkdtemp, changed._mkstemp_inner = make_folder, make_file
    kept = tempfile.NamedTemporaryFile
    changed.NamedTemporaryFile = lambda *given, **options: kept(*given, **(options | {"delete": False}))
    changed.TemporaryDirectory._rmtree = classmethod(lambda *_, **__: None)
    for owner, name in ((os, "remove"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
        _skip(owner, name, inside)
    if replayed:
        for name in ("rename", "replace"):
            _skip(os, name, inside)
        _discard_writes(inside)


def _inside(place: Path) -> Callable[[Any], bool]:
    own = f"{place}{os.sep}"
    of_compilers = tuple(f"{own}{name}{os.sep}" for name in _OF_COMPILERS)

    def inside(path: Any) -> bool:
        """Returns whether ``path`` lies in the folder ``place``, but not in a compiler's subfolder."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        whole = os.path.abspath(os.fsdecode(path))
        return whole.startswith(own) and not whole.startswith(of_compilers)

    return inside


def _skip(owner: Any, name: str, inside: Callable[[Any], bool]) -> None:
    """Makes the function ``owner.name`` do nothing if ``inside`` is true for its first argument."""
    real = getattr(owner, name)
    setattr(owner, name, lambda path, *more, **options: None if inside(path) else real(path, *more, **options))


def _discard_writes(inside: Callable[[Any], bool]) -> None:
    """Makes ``open`` and ``os.open`` write to /dev/null instead of to files for which ``inside`` is true."""
    whole, bare = io.open, os.open

    def opened(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        lost = any(letter in mode for letter in "wax+") and inside(file)
        return whole(os.devnull if lost else file, mode.replace("x", "w") if lost else mode, *more, **options)

    def opened_bare(path: Any, flags: int, *more: Any, **options: Any) -> int:
        return bare(os.devnull, os.O_RDWR) if flags & _WRITES and inside(path) else bare(path, flags, *more, **options)

    changed: Any = builtins
    changed.open = opened
    io.open = opened
    os.open = opened_bare  # type: ignore[assignment]
