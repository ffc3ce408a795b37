"""Builds solutions in CUDA Agent's extension format: a work folder with ``model_new.py`` and C++ or CUDA files.
``model_new.py`` calls the compiled functions through the module ``cuda_extension``.

``binding_registry.h`` is the header with which C++ files add functions to ``cuda_extension``. A C++ file with this
header compiles in under a second. With torch's headers, it would take most of a minute. Therefore an ``#include`` of a
torch or pybind11 header finds ``torch_surface.h`` instead. This header declares the types of torch that bindings need,
but no operators."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.formats.python import check_module
from cuda_agent.sandbox.formats.rules import tokens
from cuda_agent.sandbox.formats.solution_format import SolutionError, Toolchain
from cuda_agent.sandbox.wire import TaskSpec

_HERE = Path(__file__).parent
HEADER, _SURFACE = "binding_registry.h", "torch_surface.h"
_FIXED = ("binding.cpp", HEADER)  # files of the published folder that the sandbox replaces
_SOURCES = {"cpu": (".cpp", ".cc", ".h", ".hpp"), "cuda": (".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh")}
_UNITS = (".cpp", ".cc", ".cu")
# Without \s at a line's start: over a run of newlines its time would grow with the square of the run.
_FOREIGN = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]((?:torch|ATen|c10|pybind11)/[^>\"]*)[>\"]", re.MULTILINE)
_BINDING = re.compile(r"\bREGISTER_BINDING\s*\(\s*\w")


def header() -> str:
    """Returns the text of ``binding_registry.h``, the header with which C++ files bind functions to Python."""
    return (_HERE / HEADER).read_text()


async def build(files: Mapping[str, str], spec: TaskSpec, tools: Toolchain) -> dict[str, Any]:
    """Compiles the C++ or CUDA files to a library. Returns the request that makes a worker (the process that runs the
    solution) load the library and ``model_new.py``. Raises ``SolutionError`` if a file is missing or invalid,
    ``BuildError`` if the files do not compile, or ``CompilerMissing``."""
    check_module(files, spec)
    built, units, libraries = sources_of(files, tools.device)
    extra = ("-I.", "-Isurface")
    if tools.architecture:
        library = await tools.builder.extension(built, units, tools.architecture, libraries, extra)
    else:
        library = await tools.builder.library(built, units, (*extra, "-fopenmp"))
    return {"library": str(library), "code": files["model_new.py"]}


def sources_of(files: Mapping[str, str], device: str) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns three values: the texts of sources and headers by name, the names of the sources to compile, and the
    NVIDIA libraries to link (``cublas``, ``cudnn``). Among the headers are short stand-ins for the headers of torch and
    pybind11. Raises ``SolutionError`` if there is nothing to compile, if no source binds a function to Python with
    ``REGISTER_BINDING``, or if a CUDA source includes a header of torch or pybind11."""
    endings = _SOURCES[device]
    sources = {name: text for name, text in files.items() if name.endswith(endings) and Path(name).name not in _FIXED}
    units = sorted(name for name in sources if name.endswith(_UNITS))
    if not units:
        raise SolutionError(f"there is no kernels/*{'.cu' if device == 'cuda' else '.cpp'}")
    if not any(_BINDING.search(text) for text in sources.values()):
        raise SolutionError("no REGISTER_BINDING in any source: cuda_extension would be empty")
    foreign: set[str] = set()
    for name in sorted(sources):
        found = _FOREIGN.findall(sources[name])
        if found and name.endswith((".cu", ".cuh")):
            raise SolutionError(f"{name}: <{found[0]}> may not be included in a .cu file; bind it in a *_binding.cpp")
        foreign.update(found)
    built = sources | {name: (_HERE / name).read_text() for name in (HEADER, _SURFACE)}
    built |= {f"surface/{name}": f'#pragma once\n#include "{_SURFACE}"\n' for name in foreign}
    libraries = ("cublas", "cudnn") if device == "cuda" else ()
    return built, units, [name for name in libraries if any(_names(source, name) for source in sources.values())]


def _names(source: str, library: str) -> bool:
    """Returns whether the code of ``source`` names ``library``; its comments and strings do not count."""
    said = (token.text for token in tokens(source) if token.kind in ("include", "name"))
    return library in source and any(library in text for text in said)
