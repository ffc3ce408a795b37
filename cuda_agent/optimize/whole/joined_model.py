"""Part of the ``model_new.py`` that ``join`` writes: replaces submodules of a model by solutions of their tasks.

All names here begin with an underscore, so that they do not clash with names in the model's source."""

import linecache as _linecache
import sys as _sys
import types as _types
from typing import Any as _Any

import torch


def _replace_parts(model: torch.nn.Module, parts: list[tuple[list[str], bool, str]], compiled: bool) -> None:
    """Replaces submodules of ``model``.  With ``compiled``, torch.compile compiles the rest of the model at its first
    call.

    Args:
        model: The model.
        parts: For each solution the names of the submodules that it replaces, whether its ``ModelNew`` takes over all
            attributes of such a submodule, and its source."""
    for names, takes_over, code in parts:
        old = model.get_submodule(names[0])
        solution = _solution(names[0], code, type(old))
        for name in names:
            parent, _, child = name.rpartition(".")
            new = _in_place_of(model.get_submodule(name), solution.ModelNew, takes_over)
            if compiled:
                new.forward = torch.compiler.disable(new.forward)  # type: ignore[method-assign]
            setattr(model.get_submodule(parent), child, new)
    if compiled:
        model.compile()


def _solution(name: str, code: str, kind: type) -> _Any:
    """Runs ``code``, the source of a solution, and returns it as a module.  The name ``Model`` in it is ``kind``, the
    class of the submodule that it replaces."""
    title, file = f"solution_of_{name.replace('.', '_')}", f"solution of {name}.py"
    module = _sys.modules[title] = _types.ModuleType(title)
    module.Model = kind  # type: ignore[attr-defined]
    _linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)  # Triton reads the source
    exec(compile(code, file, "exec"), module.__dict__)
    return module


def _in_place_of(old: torch.nn.Module, kind: _Any, takes_over: bool) -> torch.nn.Module:
    """Returns a module of the class ``kind`` that has the weights of ``old``.  With ``takes_over``, ``kind`` is a
    subclass of the class of ``old``, and the new module shares all its attributes."""
    if takes_over:
        new: torch.nn.Module = kind.__new__(kind)
        new.__dict__.update(old.__dict__)
        return new
    new = kind().train(old.training)
    new.load_state_dict(old.state_dict())
    return new
