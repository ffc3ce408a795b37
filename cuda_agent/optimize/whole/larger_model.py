"""Part of the tasks that ``tasks`` writes: loads the larger model, whose source is a text in these tasks."""

import linecache
import sys
import types
from typing import Any

import torch


def load(code: str, file: str) -> types.ModuleType:
    """Runs ``code`` as a module and returns the module.  ``file`` is its file name in messages."""
    name = file.removesuffix(".py")
    module = sys.modules[name] = types.ModuleType(name)
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)  # inspect.getsource works
    exec(compile(code, file, "exec"), module.__dict__)
    return module


def leaves(value: Any) -> list[Any]:
    """Returns ``value``, or the items of nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else [value]


def placed(device: str, value: Any) -> Any:
    """Returns ``value`` with its tensors, also those in lists, on ``device``."""
    if isinstance(value, list | tuple):
        return [placed(device, item) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
