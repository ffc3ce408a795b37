"""Part of an exported ``model_new.py``: builds the module ``cuda_extension``, through which a solution of the format
``extension`` calls its kernels.  Needs PyTorch and ``g++``, or ``nvcc`` for a GPU.

The kernels run on CUDA's default stream.  If another stream is current, the kernels wait for earlier work on that
stream, and later work on that stream waits for the kernels."""

import sys as _sys
from typing import Any as _Any

import torch

from cuda_agent import machine as _machine
from cuda_agent.optimize.standalone_plan import _built, _loaded, _lock
from cuda_agent.sandbox.build import toolchain as _toolchain
from cuda_agent.sandbox.worker import binding as _binding


class _Fresh:
    """An allocator that gives an extension new memory for every tensor."""

    watch = None

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)


def _extension(files: dict[str, str], units: list[str], device: str, flags: list[str], uses: list[str]) -> _Any:
    command = [*_compiler(device, uses), *flags, *units, "-shared", "-o", "library.so"]
    identity = _machine.processor() if device == "cpu" else ""
    library = str(_built(files, command, "library.so", identity) / "library.so")
    module = _loaded(_binding.load_module, library, _Fresh(device))
    for name, function in list(vars(module).items()):
        if callable(function):
            setattr(module, name, _checked(function, device))
    return module


def _compiler(device: str, uses: list[str]) -> list[str]:
    if device == "cpu":
        return ["g++"]
    major, minor = torch.cuda.get_device_capability()
    code = f"{major}{minor}" + ("a" if major >= 9 else "")
    nvcc = _toolchain.find_nvcc()
    folders = [*(f"-I{folder}" for folder in nvcc.includes), *(f"-L{folder}" for folder in nvcc.places)]
    linked = [f"-Xlinker={library}" for name in uses for library in nvcc.libraries(name)]
    return [nvcc.compiler, "-gencode", f"arch=compute_{code},code=sm_{code}", *folders, *linked]


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
    """A context for work on the default stream.  The work waits for earlier work on the current stream.  Later work on
    the current stream waits for the work in this context."""

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
    """Runs ``code`` in the namespace ``names``.  There, ``import cuda_extension`` imports ``module``."""
    before = _sys.modules.get("cuda_extension")
    _sys.modules["cuda_extension"] = module
    try:
        exec(compile(code, "model_new.py", "exec"), names)
    finally:
        if before is None:
            del _sys.modules["cuda_extension"]
        else:
            _sys.modules["cuda_extension"] = before
