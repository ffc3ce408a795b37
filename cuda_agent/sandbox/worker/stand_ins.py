"""Lets ``load_inline`` and ``load`` of ``torch.utils.cpp_extension`` compile in seconds, against stand-ins for torch's
headers.

Torch writes and runs its build as always, with its own flags; only the folder of torch's headers is another one. If
that build fails, or its library is not a module, torch builds with its own headers. The second pass takes the same way,
because it replays the same builds. The stand-ins are ``cuda_agent/sandbox/formats/stand_ins``."""

import contextlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_FOLDER, _USED = "stand-ins", "used"
_LIGHT = ("torch/headeronly", "ATen/dlpack.h")  # headers of torch that the stand-ins include


def write_headers(place: Path, headers: Mapping[str, str]) -> None:
    """Writes the stand-ins ``headers`` (texts by path) into the folder ``place`` of a first pass."""
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


def offer(place: Path) -> None:
    """Makes builds of ``torch.utils.cpp_extension`` try the stand-ins in the folder ``place``, if there are any."""
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
        except Exception:
            if first:
                with contextlib.suppress(OSError):
                    used.unlink()
            versions.pop(arguments["name"], None)
            if before is not None:
                versions[arguments["name"]] = before
        finally:
            changed.include_paths = include_paths
        return build(*given, **options)

    changed._jit_compile = built
