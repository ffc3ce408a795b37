"""The extension format: the published work folder (``model_new.py``, ``kernels/``, ``*_binding.cpp``), on CPU and GPU.

The folder's C++ is built against our own small ``binding_registry.h`` in place of torch's headers (well under a second
instead of most of a minute); includes of torch and pybind11 find ``torch_surface.h``, which has what bindings need of
them and no operators.  What it registers becomes the Python module ``cuda_extension`` of the worker (``binding``).
``.cu`` files go through nvcc and may not include torch at all, as published.
"""

import ast
import re
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.build.builder import Builder
from cuda_agent.sandbox.wire import TaskSpec

_HERE = Path(__file__).parent
HEADER, _SURFACE = "binding_registry.h", "torch_surface.h"
_FIXED = ("binding.cpp", HEADER)  # of the published folder; ours stand in for them
_SOURCES = {"cpu": (".cpp", ".cc", ".h", ".hpp"), "cuda": (".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh")}
_UNITS = (".cpp", ".cc", ".cu")
_FOREIGN = re.compile(r"^\s*#\s*include\s*[<\"]((?:torch|ATen|c10|pybind11)/[^>\"]*)[>\"]", re.MULTILINE)
_BINDING = re.compile(r"^\s*REGISTER_BINDING\(\s*(\w+)\s*,", re.MULTILINE)


class ExtensionError(ValueError):
    """What is wrong with the work folder: for its author."""


def header() -> str:
    """The text of our ``binding_registry.h``."""
    return (_HERE / HEADER).read_text()


async def prepare(files: dict[str, str], spec: TaskSpec, builder: Builder, architecture: str = "") -> dict[str, Any]:
    """Build, for the CPU or for a GPU of this ``architecture``; what the worker is told to load.  Raises
    ``ExtensionError`` or ``build.BuildError``."""
    check_module(files, spec)
    device = "cuda" if architecture else "cpu"
    built, units, libraries = sources_of(files, device)
    extra = ("-I.", "-Isurface")
    if architecture:
        library = await builder.extension(built, units, architecture, libraries, extra)
    else:
        library = await builder.library(built, units, (*extra, "-fopenmp"))
    return {"library": str(library), "code": files["model_new.py"]}


def sources_of(files: dict[str, str], device: str) -> tuple[dict[str, str], list[str], list[str]]:
    """What is compiled, with what stands in for torch's headers; which of it are units; and the vendor's libraries that
    it uses.  Raises ``ExtensionError``."""
    endings = _SOURCES[device]
    sources = {name: text for name, text in files.items() if name.endswith(endings) and Path(name).name not in _FIXED}
    units = sorted(name for name in sources if name.endswith(_UNITS))
    if not units:
        raise ExtensionError(f"there is no kernels/*{'.cu' if device == 'cuda' else '.cpp'}")
    if not any(_BINDING.search(text) for text in sources.values()):
        raise ExtensionError("no REGISTER_BINDING in any source: cuda_extension would be empty")
    foreign: set[str] = set()
    for name in sorted(sources):
        found = _FOREIGN.findall(sources[name])
        if found and name.endswith((".cu", ".cuh")):
            raise ExtensionError(f"{name}: <{found[0]}> may not be included in a .cu file; bind it in a *_binding.cpp")
        foreign.update(found)
    built = sources | {name: (_HERE / name).read_text() for name in (HEADER, _SURFACE)}
    built |= {f"surface/{name}": f'#pragma once\n#include "{_SURFACE}"\n' for name in foreign}
    text = "".join(sources.values())
    return built, units, [name for name in ("cublas", "cudnn") if device == "cuda" and name in text]


def check_module(files: dict[str, str], spec: TaskSpec) -> None:
    """Raises ``ExtensionError`` unless there is a model_new.py that parses, and ``ModelNew`` can get its arguments."""
    if "model_new.py" not in files:
        raise ExtensionError("there is no model_new.py")
    try:
        ast.parse(files["model_new.py"])
    except SyntaxError as error:
        raise ExtensionError(f"model_new.py:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ExtensionError(f"model_new.py: {error}") from None
    for index, item in enumerate(spec.init):
        if "opaque" in item:
            raise ExtensionError(
                f"init argument {index} of the task is a {item['opaque']}: this format needs plain values"
            )
