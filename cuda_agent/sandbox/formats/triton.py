"""Builds solutions in the triton format: one ``model_new.py`` whose ``ModelNew`` computes with kernels of
``triton.jit``.

On a GPU, a solution has two passes. The first pass may start compilers. It compiles and autotunes the kernels, and
stores the results. The second pass loads these results. It is the run that is judged. On the CPU, there is only the
judged run. Triton's interpreter runs the kernels, and nothing is timed. ``worker.triton_rule`` checks that
``ModelNew.forward`` computes only with such kernels."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from cuda_agent.errors import SandboxUnready
from cuda_agent.sandbox.formats.python import check_module
from cuda_agent.sandbox.formats.solution_format import FirstPassTime, SolutionError, Toolchain
from cuda_agent.sandbox.wire import TaskSpec

UNTIMED = "on the CPU Triton's interpreter checks correctness only; speed needs a GPU"
# Autotuning measures times, which only the first pass may do: its choice is cached with the kernels.
ENVIRONMENT = {"cpu": {"TRITON_INTERPRET": "1"}, "cuda": {"TRITON_CACHE_AUTOTUNING": "1"}}


async def build(files: Mapping[str, str], spec: TaskSpec, tools: Toolchain) -> dict[str, Any]:
    """Checks the solution and returns the request that makes a worker (the process that runs the solution) load it.
    Raises ``SolutionError`` for an invalid solution, and ``SandboxUnready`` if the package triton is missing."""
    if importlib.util.find_spec("triton") is None:
        raise SandboxUnready("sandbox.format=triton needs the package triton: pip install triton")
    tree = check_module(files, spec)
    try:
        found = any(kernels(tree))
    except (RecursionError, MemoryError) as error:
        raise SolutionError(f"model_new.py is nested too deep: {error}") from None
    if not found:
        raise SolutionError("model_new.py has no kernel: a function with the decorator @triton.jit")
    return {"code": files["model_new.py"]}


def kernels(tree: ast.Module) -> Iterator[str]:
    """Yields the names of functions with the decorator ``triton.jit``. The module may import ``triton.jit`` under
    another name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                written = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
                first, dot, rest = written.partition(".")
                if names.get(first, "") + dot + rest in ("triton.jit", "triton.runtime.jit.jit"):
                    yield node.name


def first_pass_time(files: Mapping[str, str], device: str) -> FirstPassTime:
    """Returns when a triton solution gets a first pass (a run that may start compilers). The result is ``before`` on a
    GPU: the first pass precedes the judged run. It is ``never`` on the CPU."""
    return "before" if device == "cuda" else "never"
