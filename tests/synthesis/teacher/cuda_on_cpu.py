"""Runs CUDA plans of the teacher on the CPU: the threads of a block are coroutines, and blocks run in turn.

A barrier or a shuffle switches to the next thread, so each thread reaches the barrier before any thread passes it. g++
compiles the kernels together with a header that defines the parts of CUDA that they use."""

import ctypes
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

HEADER = r"""
#include <math.h>
#include <string.h>
#include <ucontext.h>
#include <functional>
#include <vector>
#define __global__ static
#define __device__ static
#define __shared__ static
#define __launch_bounds__(n)
struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim;
struct alignas(16) float4 { float x, y, z, w; };
static float rsqrt(float v) { return 1 / sqrtf(v); }
alignas(16) static char shared_memory[1 << 20];
static ucontext_t scheduler;
static std::vector<ucontext_t> threads;
static float slots[1024];
static std::function<void()> body;
static unsigned running;
static std::vector<bool> ended;
static void hand_over() {
  unsigned own = running;
  swapcontext(&threads[own], &scheduler);
  threadIdx = {own, 0, 0};
}
static void __syncthreads() { hand_over(); }
static float __shfl_xor_sync(unsigned, float v, int k) {
  slots[threadIdx.x] = v;
  hand_over();
  float other = slots[threadIdx.x ^ k];
  hand_over();
  return other;
}
static void enter() {
  body();
  ended[running] = true;
  swapcontext(&threads[running], &scheduler);
}
static void launch(unsigned wide, unsigned high, unsigned block, std::function<void()> kernel) {
  static std::vector<std::vector<char>> stacks(1024, std::vector<char>(1 << 16));
  body = kernel;
  blockDim = {block, 1, 1};
  for (unsigned b = 0; b < wide * high; b++) {
    blockIdx = {b % wide, b / wide, 0};
    threads.assign(block, {});
    ended.assign(block, false);
    for (unsigned t = 0; t < block; t++) {
      getcontext(&threads[t]);
      threads[t].uc_stack.ss_sp = stacks[t].data();
      threads[t].uc_stack.ss_size = stacks[t].size();
      makecontext(&threads[t], enter, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (unsigned t = 0; t < block; t++)
        if (!ended[t]) {
          left = true, running = t, threadIdx = {t, 0, 0};
          swapcontext(&scheduler, &threads[t]);
        }
    }
  }
}
"""


def build(solutions: list[dict[str, str]], folder: Path, rows: int, columns: int) -> ctypes.CDLL:
    """Compiles each solution's kernels in its own namespace and loads the library. Its function ``run<k>(x, y, z)``
    launches the kernels of solution ``k`` as its plan says, for inputs of ``rows`` and ``columns``. Workspaces are
    filled with 1e9."""
    source = HEADER
    for k, files in enumerate(solutions):
        plan = json.loads(files["plan.json"])
        kernel = files["kernels/fused.cu"]
        for kind in ("float", "float4"):
            kernel = kernel.replace(f"extern __shared__ {kind} tile[];", f"{kind}* tile = ({kind}*)shared_memory;")
        names, calls = {"in0": "x", "in1": "y", "out0": "z"}, ""
        for name, item in plan.get("workspaces", {}).items():
            names[name] = f"{name}.data()"
            calls += f"  std::vector<float> {name}({number(item['size'], rows, columns)}, 1e9f);\n"
        for node in plan["nodes"]:
            assert number(node.get("shared", 0), rows, columns) <= 1 << 20
            listed = re.search(rf"{node['function']}\((.*)\) {{", kernel)
            assert listed
            arguments = ", ".join(
                f"({kind})({names.get(a) or number(a, rows, columns)})"
                for kind, a in zip(
                    (text.rpartition(" ")[0] for text in listed[1].split(", ")), node["args"], strict=True
                )
            )
            wide, high = (*(node["grid"] if isinstance(node["grid"], list) else [node["grid"]]), 1)[:2]
            grid = f"{number(wide, rows, columns)}, {number(high, rows, columns)}"
            calls += f"  launch({grid}, {node['block']}, [&] {{ k{k}::{node['function']}({arguments}); }});\n"
        source += (
            f"namespace k{k} {{\n{kernel}}}\n"
            f'extern "C" void run{k}(const float* x, const float* y, float* z) {{\n{calls}}}\n'
        )
    (folder / "all.cpp").write_text(source)
    flags = ["-O0", "-std=c++17", "-fPIC", "-shared", "-w"]
    subprocess.run(["g++", *flags, "all.cpp", "-o", "all.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "all.so"))


def number(expression: Any, rows: int, columns: int) -> int:
    """Returns the value of ``expression``, a size in a plan of the teacher, for inputs of ``rows`` and ``columns``."""
    text = str(expression).replace("in0.shape[0]", str(rows)).replace("in0.shape[1]", str(columns))
    text = text.replace("in0.numel", str(rows * columns))
    return int(eval(text, {"cdiv": lambda a, b: -(-a // b)}))


def call(library: ctypes.CDLL, k: int, inputs: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Runs solution ``k`` and returns its output, which has the shape of ``like``. The output is filled with 1e9 before
    the call."""
    output = torch.full_like(like, 1e9)
    getattr(library, f"run{k}")(*(ctypes.c_void_p(t.data_ptr()) for t in (inputs[0], inputs[-1], output)))
    return output
