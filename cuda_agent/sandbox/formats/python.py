"""Builds solutions in the python format. Other formats use this module to check their ``model_new.py``.

A solution in this format has KernelBench's form: one file that defines ``ModelNew`` and may use torch freely."""

import ast
from collections.abc import Mapping
from typing import Any

from cuda_agent import syntax
from cuda_agent.sandbox.formats.solution_format import SolutionError, Toolchain
from cuda_agent.sandbox.wire import TaskSpec


async def build(files: Mapping[str, str], spec: TaskSpec, tools: Toolchain) -> dict[str, Any]:
    """Checks ``model_new.py`` and returns the request that makes a worker (the process that runs the solution) load the
    file. Raises ``SolutionError`` for the same reasons as ``check_module``."""
    check_module(files, spec)
    return {"code": files["model_new.py"]}


def check_module(files: Mapping[str, str], spec: TaskSpec) -> ast.Module:
    """Parses ``model_new.py`` and returns its syntax tree. Raises ``SolutionError`` if the file is missing or does not
    parse. Also raises it if an argument of the task's constructor is not a plain value: a number, a string, a bool,
    ``None``, or a list or dictionary of these."""
    if "model_new.py" not in files:
        raise SolutionError("there is no model_new.py")
    try:
        tree = syntax.parse(files["model_new.py"])
    except SyntaxError as error:
        raise SolutionError(f"model_new.py:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise SolutionError(f"model_new.py: {error}") from None
    for index, item in enumerate(spec.init):
        if "opaque" in item:
            raise SolutionError(
                f"init argument {index} of the task is a {item['opaque']}: this format needs plain values"
            )
    return tree
