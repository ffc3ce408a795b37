"""Part of an exported ``model_new.py``: the code that runs a plan, and helpers that the format ``extension`` also uses.

A plan is a list of nodes, such as kernel launches, that run in order.  This module has the parts that a CPU and a GPU
share; ``standalone_cpu`` and ``standalone_cuda`` launch the kernels.  An exported file does not import cuda-agent, so
it contains a copy of this source (see ``export``), beside the code of the task or the solution.  All names here begin
with an underscore, so that they do not clash with names in that code.

An exported plan is for inference.  It accepts only inputs with the shapes and types of the task's ``get_inputs()``, and
only the same plain arguments (such as numbers).  Other inputs raise a ValueError."""

import hashlib as _hashlib
import inspect as _inspect
import math as _math
import os as _os
import shutil as _shutil
import subprocess as _subprocess
import sys as _sys
import tempfile as _tempfile
import threading as _threading
import types as _types
from pathlib import Path as _Path
from typing import Any as _Any

import torch

from cuda_agent.sandbox.worker import library_nodes as _library_nodes

_lock = _threading.Lock()


class _Kernels:
    """Runs the kernels of a solution.  A call computes what the reference, the task's ``Model.forward``, computes.

    The first call also runs the reference, to learn how the outputs are nested.  Subclasses launch the kernels.

    Args:
        program: The compiled plan: the nodes to run, the workspaces (scratch buffers), and descriptions of all tensors.
        sources: The kernels' source files, by path.
        reference: The function ``Model.forward`` of the task."""

    device = "cpu"

    def __init__(self, program: dict[str, _Any], sources: dict[str, str], reference: _Any) -> None:
        self.program, self.sources, self.reference = program, sources, reference
        self.form: _Any = None  # how outputs are nested: as the reference nests them, in the first call
        self.places: dict[str, int] = {}
        self.workspaces: dict[str, torch.Tensor] = {}

    def __call__(self, model: _Any, args: tuple[_Any, ...]) -> _Any:
        with torch.no_grad():
            if self.form is None:
                form = self.reference(model, *args)
                self.prepare()
                self.form = form
            inputs = [x if x.is_contiguous() else x.contiguous() for x in self.tensors(args)]
            if model._weights is None:
                model._weights = self.weights(model)
            outputs = [
                torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                for shape, dtype in self.program["outputs"]
            ]
            with _lock:
                self.launch(inputs, outputs, [w if w.is_contiguous() else w.contiguous() for w in model._weights])
            return _nested(self.form, iter(outputs))

    def tensors(self, args: tuple[_Any, ...]) -> list[torch.Tensor]:
        """Returns the tensors in ``args``, including those in nested lists, in order.  Raises ValueError if ``args``
        differs from the arguments for which the kernels were made."""
        found: list[torch.Tensor] = []
        self._match(self.program["arguments"], list(args), found)
        for index, (tensor, (shape, dtype)) in enumerate(zip(found, self.program["inputs"], strict=True)):
            got = list(tensor.shape), tensor.dtype, tensor.device.type
            if got != (shape, getattr(torch, dtype), self.device):
                raise ValueError(
                    f"input {index} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                    f"these kernels were made for torch.{dtype} {shape} on {self.device}"
                )
        return found

    def _match(self, wanted: list[_Any], given: list[_Any], found: list[torch.Tensor]) -> None:
        if len(wanted) != len(given):
            raise ValueError(f"{len(given)} arguments; these kernels were made for {len(wanted)}")
        for want, value in zip(wanted, given, strict=True):
            if isinstance(want, list) and isinstance(value, list | tuple):
                self._match(want, list(value), found)
            elif isinstance(want, list) or ("tensor" in want and not isinstance(value, torch.Tensor)):
                kind = "a list" if isinstance(want, list) else "a tensor"
                raise ValueError(f"an argument is {value!r}; these kernels were made for {kind}")
            elif "tensor" in want:
                found.append(value)
            elif not _equal(value, want["value"]):
                raise ValueError(f"an argument is {value!r}; these kernels were made for {want['value']!r}")

    def weights(self, model: _Any) -> list[torch.Tensor]:
        """Returns the parameters and buffers of ``model`` that the plan uses, in the plan's order.  Raises ValueError
        if one of them has another shape, type or device than the kernels were made for."""
        state = model.state_dict(keep_vars=True)
        for name, (shape, dtype) in self.program["weights"].items():
            weight = state[name]
            if list(weight.shape) != shape or weight.dtype != getattr(torch, dtype):
                raise ValueError(
                    f"{name} is {weight.dtype} {list(weight.shape)}; these kernels were made for torch.{dtype} {shape}"
                )
            if weight.device.type != self.device:
                raise ValueError(f"{name} is on {weight.device}; these kernels run on {self.device}")
        return [state[name].detach() for name in self.program["weights"]]

    def prepare(self) -> None:
        """Allocates the plan's workspaces (scratch buffers) and writes their initial values.  Subclasses also build the
        kernels."""
        for name, workspace in self.program["workspaces"].items():
            pattern = bytes.fromhex(workspace["pattern"])
            memory = torch.zeros(max(workspace["bytes"], 1), dtype=torch.uint8, device=self.device)
            if any(pattern) and workspace["bytes"]:
                memory.view(-1, len(pattern)).copy_(torch.tensor(list(pattern), dtype=torch.uint8, device=self.device))
            self.workspaces[name] = memory
            self.places[name] = memory.data_ptr()

    def launch(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def library(self, node: dict[str, _Any], buffers: dict[str, list[torch.Tensor]]) -> None:
        """Runs ``node``, a matrix product or convolution, with the same PyTorch functions and settings as the sandbox.
        Then restores PyTorch's previous settings for matrix products.  ``buffers`` maps ``in``, ``out`` and ``w`` to
        the inputs, outputs and weights."""
        matmul, names = torch.backends.cuda.matmul, ("tf32", "fp16_reduced_precision_reduction",
                                                     "bf16_reduced_precision_reduction")  # fmt: skip
        before = {f"allow_{name}": getattr(matmul, f"allow_{name}") for name in names}

        def operand(item: dict[str, _Any]) -> torch.Tensor:
            flat = self.memory(item["buffer"], buffers).view(getattr(torch, item["dtype"]))
            return flat[: _math.prod(item["shape"])].view(item["shape"])

        try:
            _library_nodes.bind(node, operand, self.device)()
        finally:
            for name, value in before.items():
                setattr(matmul, name, value)

    def memory(self, buffer: str, buffers: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        """Returns a buffer of the plan as a flat tensor.  ``buffer`` is its name: ``in:0`` is the first input,
        ``ws:tmp`` the workspace ``tmp``.  ``buffers`` maps ``in``, ``out`` and ``w`` to the inputs, outputs and
        weights."""
        kind, _, rest = buffer.partition(":")
        return (self.workspaces[rest] if kind == "ws" else buffers[kind][int(rest)]).view(-1)


def _module(name: str, source: str) -> _Any:
    """Executes the Python code ``source`` as a new module with the name ``f"model_new {name}"``, and returns the
    module.  ``name`` is the name of the module, within cuda-agent, from which the code was copied."""
    module = _sys.modules[f"model_new {name}"] = _types.ModuleType(f"model_new {name}")  # dataclasses look it up here
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    return module


def _loaded(load: _Any, *arguments: _Any) -> _Any:
    """Returns ``load(*arguments)``, which loads a library.  A library that is linked with ``-ffast-math`` turns off
    denormals (numbers next to zero) in the thread that loads it; if they were on, this function turns them on again."""
    on = _sys.float_info.min / 2 > 0
    try:
        return load(*arguments)
    finally:
        if on:
            torch.set_flush_denormal(False)


def _nested(form: _Any, outputs: _Any) -> _Any:
    if isinstance(form, torch.Tensor):
        return next(outputs)
    if isinstance(form, bool | int | float):
        return next(outputs).item()
    if isinstance(form, dict):
        items = {key: _nested(value, outputs) for key, value in form.items()}
        return items if type(form) is dict else type(form)(**items)
    if isinstance(form, list | tuple):
        parts = [_nested(value, outputs) for value in form]
        return type(form)(*parts) if hasattr(form, "_fields") else type(form)(parts)
    return form


def _check_init(model: type, wanted: list[_Any], args: tuple[_Any, ...], kwargs: dict[str, _Any]) -> None:
    """Checks the arguments with which a model is constructed.  Raises ValueError if a plain argument, such as a number,
    differs from the one for which the kernels were made.

    Args:
        model: The class of the model.
        wanted: Descriptions of the arguments from ``get_init_inputs()``: ``{"value": ...}`` for a plain one.  Others
            are not compared.
        args: The given positional arguments.
        kwargs: The given keyword arguments."""
    signature = _inspect.signature(model)
    given, made = signature.bind(*args, **kwargs), signature.bind(*wanted)
    for bound in (given, made):
        bound.apply_defaults()
    values, items = ([*bound.args, *bound.kwargs.values()] for bound in (given, made))
    if len(values) != len(items):
        raise ValueError(f"{len(values)} constructor arguments; these kernels were made for {len(items)}")
    for value, item in zip(values, items, strict=True):
        described = any(item is of for of in wanted)  # otherwise it is a default
        if described and "value" not in item:
            continue  # a tensor
        if not _equal(value, want := item["value"] if described else item):
            raise ValueError(f"a constructor argument is {value!r}; these kernels were made for {want!r}")


def _equal(value: _Any, want: _Any) -> bool:
    """Returns whether two arguments are equal.  A tuple equals a list with the same items, NaN equals NaN, and a tensor
    equals only itself."""
    if isinstance(value, torch.Tensor) or isinstance(want, torch.Tensor):
        return value is want
    if isinstance(value, list | tuple) and isinstance(want, list | tuple):
        return len(value) == len(want) and all(map(_equal, value, want))
    return bool(value == want or (value != value and want != want))


def _built(files: dict[str, str], command: list[str], product: str, identity: str = "") -> _Path:
    """Returns a folder in the user's cache that holds the file ``product``.  If there is no such folder, runs
    ``command`` in a folder with ``files`` to make the product.  ``identity``, such as a processor's name, is part of
    the cache key.  Raises RuntimeError if the product cannot be made."""
    key = _hashlib.sha256(repr((sorted(files.items()), command, identity)).encode()).hexdigest()[:32]
    cache = _Path(_os.environ.get("XDG_CACHE_HOME") or _Path.home() / ".cache") / "model_new" / key
    if (cache / product).exists():
        return cache
    try:
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        work = _Path(_tempfile.mkdtemp(dir=cache.parent))
    except OSError as error:
        message = f"kernels are built in {cache.parent}, where nothing can be written: set XDG_CACHE_HOME ({error})"
        raise RuntimeError(message) from None
    try:
        for name, text in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_text(text)
        try:
            done = _subprocess.run(command, cwd=work, capture_output=True, text=True)
        except OSError as error:
            raise RuntimeError(f"the kernels are built with {command[0]}, which does not start here: {error}") from None
        if done.returncode or not (work / product).exists():
            raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-4000:]}")
        try:
            work.rename(cache)
        except OSError:  # another process was faster
            if not (cache / product).exists():
                raise
    finally:
        _shutil.rmtree(work, ignore_errors=True)
    return cache
