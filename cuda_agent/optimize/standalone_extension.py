"""Part of an exported ``model_new.py``: the module ``cuda_extension`` of a work folder.  Needs PyTorch and ``g++``, or
``nvcc`` for a GPU.

Kernels of such a folder go to the default stream; calls on another one wait for it and are waited for.
"""

import importlib.util as _importlib_util
import os as _os
import shutil as _shutil
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

import torch

from cuda_agent.optimize.standalone_plan import _built, _lock, _processor
from cuda_agent.sandbox.worker import binding as _binding


class _Fresh:
    """Gives an extension new memory for what it allocates."""

    watch = None

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)


def _extension(files: dict[str, str], units: list[str], device: str, flags: list[str], uses: list[str]) -> _Any:
    """The module, built when this machine has not built it before."""
    command = [*_compiler(device, uses), *flags, *units, "-shared", "-o", "library.so"]
    if device == "cuda":
        command += [f"-Xlinker={_library(name)}" for name in uses]
    identity = _processor() if device == "cpu" else ""
    library = str(_built(files, command, "library.so", identity) / "library.so")
    module = _binding.load_module(library, _Fresh(device))  # type: ignore[arg-type]
    for name, function in list(vars(module).items()):
        if callable(function):
            setattr(module, name, _checked(function, device))
    return module


def _packages() -> list[_Path]:
    found = _importlib_util.find_spec("nvidia")
    return [_Path(place) for place in (found.submodule_search_locations or [])] if found else []


def _compiler(device: str, uses: list[str]) -> list[str]:
    if device == "cpu":
        return ["g++"]
    homes = [home for place in _packages() for home in sorted(place.glob("cu[0-9]*"), reverse=True)]
    toolkit = _Path(_os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    major, minor = torch.cuda.get_device_capability()
    code = f"{major}{minor}" + ("a" if major >= 9 else "")
    for compiler in (_shutil.which("nvcc"), toolkit / "bin" / "nvcc", *(home / "bin" / "nvcc" for home in homes)):
        if compiler and _os.access(compiler, _os.X_OK):
            includes = [place / "cudnn" / "include" for place in _packages()]
            places = []
            if any(str(compiler).startswith(str(place)) for place in _packages()):
                includes += [home / "include" for home in homes]
                places = [home / "lib" for home in homes]
            return [
                str(compiler), "-gencode", f"arch=compute_{code},code=sm_{code}",
                *(f"-I{folder}" for folder in includes if folder.is_dir()), *(f"-L{folder}" for folder in places),
            ]  # fmt: skip
    raise RuntimeError("no nvcc: neither on PATH, nor in CUDA_HOME, nor beside PyTorch")


def _library(name: str) -> str:
    for place in (*_packages(), _Path("/usr/local/cuda/lib64"), _Path("/usr/lib/x86_64-linux-gnu")):
        if found := sorted(place.glob(f"**/lib{name}.so*")):
            return str(found[0])
    raise RuntimeError(f"lib{name} is not installed")


def _checked(function: _Any, device: str) -> _Any:
    def call(*given: _Any, **named: _Any) -> _Any:
        for argument in (*given, *named.values()):
            if isinstance(argument, torch.Tensor) and argument.device.type != device:
                message = f"{function.__name__}: a tensor on {argument.device}; this was made for {device}"
                raise ValueError(message)
        with _lock, torch.no_grad(), _OnDefaultStream(device):
            return function(*given, **named)

    return call


class _OnDefaultStream:
    """What PyTorch's current stream holds comes before, and what follows on it after."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        if self.device == "cuda":
            self.current, self.default = torch.cuda.current_stream(), torch.cuda.default_stream()
            if self.current != self.default:
                self.default.wait_stream(self.current)

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda" and self.current != self.default:
            self.current.wait_stream(self.default)


def _with_extension(module: _Any, code: str, names: dict[str, _Any]) -> None:
    """Runs ``code``, which imports ``cuda_extension``, in ``names``."""
    before = _sys.modules.get("cuda_extension")
    _sys.modules["cuda_extension"] = module
    try:
        exec(compile(code, "model_new.py", "exec"), names)
    finally:
        if before is None:
            del _sys.modules["cuda_extension"]
        else:
            _sys.modules["cuda_extension"] = before
