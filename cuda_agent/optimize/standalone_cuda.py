"""Part of an exported ``model_new.py``: runs a plan on an NVIDIA GPU.  Needs PyTorch with CUDA and NVRTC.

A plan is a list of nodes, such as kernel launches, that run in order.  Kernels run on PyTorch's current stream, and
only on the device that is current in the first call."""

import json as _json
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

import torch

from cuda_agent.optimize.standalone_plan import _built, _Kernels
from cuda_agent.sandbox import driver as _driver
from cuda_agent.sandbox.build import toolchain as _toolchain
from cuda_agent.sandbox.worker import gpu as _gpu


class _OnCuda(_Kernels):
    device = "cuda"

    def prepare(self) -> None:
        super().prepare()
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the context that the driver's calls below are for
        if self.sources:
            folder = self._compiled()
            module = _driver.Module((folder / "kernels.cubin").read_bytes())
            names = _json.loads((folder / "names.json").read_text())
        self.patches: list[tuple[_Any, str, int]] = []  # addresses that change by call
        self.steps: list[_Any] = []
        for node in self.program["nodes"]:
            self.steps.append(self._kernel(node, module, names) if "symbol" in node else node)

    def _compiled(self) -> _Path:
        major, minor = torch.cuda.get_device_capability()
        architecture = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        library, includes = _toolchain.nvrtc_files()
        request = {
            "library": library, "includes": includes, "architecture": architecture, "unit": "unit.cu",
            "expressions": self.program["expressions"],
        }  # fmt: skip
        files = self.sources | {"nvrtc.py": self.program["nvrtc"]}
        command = [_sys.executable, "-I", "-S", "nvrtc.py", _json.dumps(request)]
        return _built(files, command, "names.json")

    def _kernel(self, node: dict[str, _Any], module: _driver.Module, names: dict[str, str]) -> _driver.Launch:
        wide = bool(node["cluster"]) and node["cluster"][0] * node["cluster"][1] * node["cluster"][2] > 8
        function = module.function(names[node["symbol"]], node["shared"], wide)
        codes = module.constant(names[f"&{node['codes']}"]).split(b"\0")[0].decode()
        cells = _gpu._arguments(node, codes, lambda buffer: self.places.get(buffer.removeprefix("ws:"), 0))
        for cell, argument in zip(cells, node["args"], strict=True):
            kind, _, rest = argument.get("buffer", "ws:").partition(":")
            if kind != "ws":
                self.patches.append((cell, kind, int(rest)))
        shape = node["grid"], node["block"], cells, node["shared"], node["cluster"], node["cooperative"]
        return _driver.Launch(function, *shape)

    def launch(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        buffers = {"in": inputs, "out": outputs, "w": weights}
        for cell, kind, index in self.patches:
            cell.value = buffers[kind][index].data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        for step in self.steps:
            if isinstance(step, _driver.Launch):
                step._config.stream = stream
                step()
            elif "library" in step:
                self.library(step, buffers)
            else:
                self.memory(step["memset"], buffers).view(torch.uint8)[: step["bytes"]].fill_(step["value"])
