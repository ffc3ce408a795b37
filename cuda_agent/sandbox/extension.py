"""The extension lane: the published work folder on the CPU (``model_new.py``, ``kernels/*.cpp``, ``*_binding.cpp``).

The folder's C++ is built against our own small ``binding_registry.h`` in place of torch's headers (0.2 s instead of
most of a minute), and its registered functions become the Python module ``cuda_extension`` of the worker (``binding``).
Not covered: sources that include torch or pybind11; they are refused with a hint.
"""

import ast
import re
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.build import Builder
from cuda_agent.sandbox.wire import TaskSpec

HEADER = "binding_registry.h"
_SOURCES = (".cpp", ".cc", ".h", ".hpp")
_FOREIGN = re.compile(r"^\s*#\s*include\s*[<\"]((torch|ATen|c10|pybind11)/[^>\"]*)[>\"]", re.MULTILINE)
_BINDING = re.compile(r"^\s*REGISTER_BINDING\(\s*(\w+)\s*,", re.MULTILINE)


class ExtensionError(ValueError):
    """What is wrong with the work folder: for its author."""


async def prepare(files: dict[str, str], spec: TaskSpec, builder: Builder) -> tuple[dict[str, Any], list[str]]:
    """Build; what the worker is told to load, and the paths it must be able to read.  Raises ``ExtensionError`` or
    ``build.BuildError``."""
    check_module(files, spec)
    sources = {name: text for name, text in files.items() if name.endswith(_SOURCES) and Path(name).name != HEADER}
    units = sorted(name for name in sources if name.endswith((".cpp", ".cc")) and name != "binding.cpp")
    if not units:
        raise ExtensionError("there is no kernels/*.cpp")
    names: list[str] = []
    for name in sorted(sources):
        if found := _FOREIGN.search(sources[name]):
            raise ExtensionError(f"{name}: <{found[1]}> is not available on cpu; include {HEADER} and use its Tensor")
        names += _BINDING.findall(sources[name])
    if not names:
        raise ExtensionError("no REGISTER_BINDING in any source: cuda_extension would be empty")
    header = (Path(__file__).parent / HEADER).read_text()
    built = {**{name: sources[name] for name in sources if name != "binding.cpp"}, HEADER: header}
    library = await builder.library(built, units, extra=("-I.", "-fopenmp"))
    load = {"library": str(library), "names": sorted(set(names)), "code": files["model_new.py"]}
    return load, [str(library)]


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
                f"init argument {index} of the task is a {item['opaque']}: this lane needs plain values"
            )
