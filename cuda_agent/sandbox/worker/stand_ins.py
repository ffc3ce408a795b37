"""Makes ``torch.utils.cpp_extension`` compile in seconds, with short header files (stand-ins) in place of torch's
headers.

The stand-ins lie in ``cuda_agent/sandbox/formats/stand_ins``. Torch first runs its usual build with them. If this build
fails, or if its library cannot be imported, torch builds again with its own headers. The second build is omitted if the
errors of the first build show that the second would fail, too. A build that makes no Python module uses only torch's
headers. All builds run in a first pass (a run that may start compilers). The judged run does not build, but gets the
recorded results (see ``replay``)."""

import contextlib
import inspect
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_FOLDER, _USED = "stand-ins", "used"
_FAILED = "FAILED:"  # ninja's line before the output of a command that failed
# g++: load_inline binds a function by a line of C++ that it writes itself, and no source declares this function.
_UNBOUND = re.compile(
    r"error: '(\w+)' was not declared in this scope[^\n]*\n[^\n]*m\.def\(\"\1\", torch::wrap_pybind_function\(\1\)"
)
_TWICE = re.compile(r"error: redefinition of '[^'\n]*\bPyInit_|multiple definition of `PyInit_")
_LIGHT = ("torch/headeronly", "ATen/dlpack.h")  # headers of torch that the stand-ins include


def write_headers(place: Path, headers: Mapping[str, str]) -> None:
    """Writes stand-ins (short headers that replace torch's headers) into ``place``, the folder of a first pass (a run
    that may start compilers). ``headers`` maps their paths to their texts. Also links the headers of torch that the
    stand-ins include. Does nothing if ``headers`` is empty."""
    if not headers:
        return
    for name, text in headers.items():
        path = place / _FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in _LIGHT:
        path = place / _FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(Path(torch.__file__).parent / "include" / name)


def _fails_anyway(said: str, folder: Path) -> bool:
    """Returns whether a build that failed with the stand-ins (short headers) would also fail with torch's own headers.
    ``said`` is the output of the failed build. Files in ``folder`` cache the results of searches in torch's headers.
    The result is true in two cases:

    - The Python module is defined twice.
    - The first error of a compiler says that a function is not declared, the build binds this function to Python, and
      torch's headers do not contain its name."""
    for output in said.split(_FAILED)[1:]:
        if found := _TWICE.search(output) or _UNBOUND.search(output):
            first = output.find("error: ")
            if found.re is _TWICE or (first == found.start() and not _in_headers(found[1], folder)):
                return True
    return False


def _in_headers(name: str, folder: Path) -> bool:
    """Returns whether a header of torch holds the word ``name``. A file in ``folder`` caches a negative result."""
    mark = folder / f"undeclared-{name}"
    if mark.exists():
        return False
    word = re.compile(rb"\b%s\b" % name.encode())
    headers = (Path(torch.__file__).parent / "include").rglob("*.h*")
    if any(name.encode() in (text := path.read_bytes()) and word.search(text) for path in headers if path.is_file()):
        return True
    with contextlib.suppress(OSError):
        mark.touch()
    return False


def offer(place: Path) -> None:
    """Makes builds of ``torch.utils.cpp_extension`` try the stand-ins (short headers that replace torch's headers)
    first. ``place`` is the folder of a first pass (a run that may start compilers), with the stand-ins from
    ``write_headers``. Does nothing if this folder holds no stand-ins."""
    folder = place / _FOLDER
    if not folder.is_dir():
        return
    import torch.utils.cpp_extension as extensions

    changed: Any = extensions
    build, include_paths = changed._jit_compile, changed.include_paths
    signature, versions = inspect.signature(build), changed.JIT_EXTENSION_VERSIONER.entries
    torchs = os.path.join(os.path.dirname(torch.__file__), "")

    def stand_in_paths(*given: Any, **options: Any) -> list[str]:
        return [str(folder), *(path for path in include_paths(*given, **options) if not path.startswith(torchs))]

    def built(*given: Any, **options: Any) -> Any:
        arguments = signature.bind(*given, **options).arguments
        if not arguments["is_python_module"] or arguments.get("with_sycl") or arguments.get("is_standalone"):
            return build(*given, **options)
        directory = os.path.join(arguments["build_directory"], _FOLDER)
        # A library of torch's own build depends on all of torch, and so finds cuBLAS without naming it.
        libraries = ["-Wl,--no-as-needed", *(arguments["extra_ldflags"] or [])]
        other = arguments | {"build_directory": directory, "extra_ldflags": libraries}
        before, used = versions.get(arguments["name"]), folder / _USED
        first = not used.exists()
        changed.include_paths = stand_in_paths
        try:
            os.makedirs(directory, exist_ok=True)
            with contextlib.suppress(OSError):  # the second pass may not write
                used.touch()  # now, because the library may end this process when it is loaded
            return build(**other)
        except Exception as error:
            if first:
                with contextlib.suppress(OSError):
                    used.unlink()
            versions.pop(arguments["name"], None)
            if before is not None:
                versions[arguments["name"]] = before
            if _fails_anyway(str(error), folder):
                raise
        finally:
            changed.include_paths = include_paths
        return build(*given, **options)

    changed._jit_compile = built
