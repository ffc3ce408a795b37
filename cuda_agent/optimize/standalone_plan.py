"""Part of an exported ``model_new.py``: what every plan needs around its kernels, with nothing but PyTorch.

Exported files hold this source as it is (``export``), so all of its names begin with an underscore, and it imports
nothing of this package.  Kernels were made for shapes, types and plain arguments of ``get_inputs()``; others are
refused in words.  Inference only.
"""

import hashlib as _hashlib
import math as _math
import os as _os
import shutil as _shutil
import subprocess as _subprocess
import tempfile as _tempfile
import threading as _threading
from pathlib import Path as _Path
from typing import Any as _Any

import torch

_lock = _threading.Lock()


class _Kernels:
    """Runs a program in the place of ``reference``, the forward of ``Model``.  Subclasses launch."""

    device = "cpu"

    def __init__(self, program: dict[str, _Any], sources: dict[str, str], reference: _Any) -> None:
        self.program, self.sources, self.reference = program, sources, reference
        self.form: _Any = None  # how outputs are nested: as the reference nests them, in the first call
        self.places: dict[str, int] = {}
        self.workspaces: dict[str, torch.Tensor] = {}

    def __call__(self, model: _Any, args: tuple[_Any, ...]) -> _Any:
        with torch.no_grad():
            if self.form is None:
                self.form = self.reference(model, *args)
                self.prepare()
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
        """The inputs in order, checked."""
        found: list[torch.Tensor] = []
        self._match(self.program["arguments"], list(args), found)
        for index, (tensor, (shape, dtype)) in enumerate(zip(found, self.program["inputs"], strict=True)):
            if (
                list(tensor.shape) != shape
                or tensor.dtype != getattr(torch, dtype)
                or tensor.device.type != self.device
            ):
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
            elif value != want["value"]:
                raise ValueError(f"an argument is {value!r}; these kernels were made for {want['value']!r}")

    def weights(self, model: _Any) -> list[torch.Tensor]:
        """The parameters and buffers, in the order of the program."""
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
        """Workspaces with their first content; then what subclasses build."""
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
        """A matrix product or a convolution of the vendor's library, in the arithmetic that the node names."""

        def operand(role: str) -> torch.Tensor:
            item = node["tensors"][role]
            kind, _, rest = item["buffer"].partition(":")
            memory = self.workspaces[rest] if kind == "ws" else buffers[kind][int(rest)]
            flat = memory.view(-1).view(getattr(torch, item["dtype"]))
            return flat[: _math.prod(item["shape"])].view(item["shape"])

        tf32 = node["compute"] == "tf32"
        half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(node["compute"])
        if node["library"] == "gemm":
            a, b, c = operand("a"), operand("b"), operand("c")
            if half:
                a, b = a.to(half), b.to(half)
            a = a.transpose(1, 2) if node["transpose_a"] else a
            b = b.transpose(1, 2) if node["transpose_b"] else b
            matmul = torch.backends.cuda.matmul
            before = matmul.allow_tf32
            matmul.allow_tf32 = tf32
            try:
                if a.dtype != c.dtype:
                    c.copy_(torch.bmm(a, b))
                elif len(c) == 1:
                    torch.mm(a[0], b[0], out=c[0])
                else:
                    torch.bmm(a, b, out=c)
            finally:
                matmul.allow_tf32 = before
            return
        given, weight = operand("input"), operand("weight")
        bias = operand("bias") if "bias" in node["tensors"] else None
        if half:
            given, weight, bias = given.to(half), weight.to(half), bias.to(half) if bias is not None else None
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
            operand("output").copy_(
                torch.ops.aten.convolution(
                    given, weight, bias, node["stride"], node["padding"], node["dilation"], node["transposed"],
                    node["output_padding"], node["groups"],
                )
            )  # fmt: skip


def _nested(form: _Any, outputs: _Any) -> _Any:
    """The outputs, nested like ``form``."""
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


def _check_init(wanted: list[_Any], args: tuple[_Any, ...]) -> None:
    """Plain arguments of the constructor are those that the kernels were made for."""
    for item, value in zip(wanted, args, strict=False):
        if "value" in item and item["value"] != (list(value) if isinstance(value, tuple) else value):
            raise ValueError(f"a constructor argument is {value!r}; these kernels were made for {item['value']!r}")


def _built(files: dict[str, str], command: list[str], product: str, identity: str = "") -> _Path:
    """The folder that holds ``product`` of ``command``, run on ``files``; kept by content in the user's cache."""
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


def _processor() -> str:
    """What ``-march=native`` stands for."""
    try:
        lines = _Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}))
