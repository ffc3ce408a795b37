"""Makes the text of the file SKILL.md in the work folder, which tells a model the rules for its solution.

There is one text for each device (cpu or cuda) and each solution format, such as a Triton module. The sandbox enforces
the rules in the text, and some that the text does not mention."""

from collections.abc import Callable

from cuda_agent.format_names import Format

_GOAL = """# Make this PyTorch model fast

`model.py` defines `Model`, `get_inputs()` and `get_init_inputs()`. Write a solution that computes what `Model.forward`
computes, as fast as you can{device}. It is timed against eager PyTorch and against `torch.compile`: being more than 5 %
faster than both is the least to aim for, and more is better.

## What counts
1. Correct: for inputs that you have not seen, drawn as `get_inputs()` draws them, every output has the shape and
   dtype of the reference and agrees within 1e-2 absolute plus 1e-2 relative. A wrong solution scores below any slow
   one.
2. Fast: the time of one call, with fresh inputs every call.
The files in the folder when you stop are what is judged.

## Not allowed
- Changing `model.py` or this file; they are restored.
- Calling PyTorch, or another library's operators, to do the work.
- Keeping results from one call to the next, reading inputs of another call, doing less work when timed, or looking for
  the clock or the checker. Such a solution counts as a failure.

## Commands (in Bash)
- `compile` builds what is in the folder and prints the first errors.
- `verify` builds it and checks the outputs.
- `profile` builds, checks and times it, and prints how many times faster it is than eager and than `torch.compile`.
- `restore` puts the best solution that these commands have found back into the folder.
There is no network, and the folder's own address differs from run to run: use relative paths. Temporary files go to
`$TMPDIR`.

## How to work
1. Read `model.py`. Note shapes, dtypes, how many bytes must be read and written, and how much arithmetic there is.
2. Write the simplest correct solution, and `verify` it.
3. Improve one thing at a time, and `profile` after each: first do less work (algebra, fusing every pass over memory
   into one), then use the hardware (contiguous access, vectors, all cores, cache tiles), then tune sizes.
4. Go back (`restore`) when a change does not pay. Leave only the final files.
"""

_PLAN = """
## The form of a solution: `plan.json` and `kernels/*.cpp`
`plan.json` lists nodes that run in order; kernels are C++ functions that get a block's number, the number of blocks,
and then the arguments of the node:
```json
{"nodes": [{"kernel": "kernels/fused.cpp", "function": "fused", "grid": 8, "args": ["in0", "out0", "in0.numel"]}]}
```
```cpp
#include <cmath>
void fused(long block, long grid, const float* x, float* y, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) y[i] = std::sqrt(std::fabs(x[i]));
}
```
- Buffers: `in0`, `in1`, ... are the inputs (contiguous), `out0`, ... the outputs, `"w:<name>"` a weight by its name
  in the state_dict, `init0`, ... the plain numbers that `get_init_inputs()` returns. Workspaces of your own:
  `"workspaces": {"tmp": {"size": "in0.numel", "dtype": "float32", "init": 0}}`.
- `grid`, sizes and number arguments are integers or expressions such as `"in0.shape[0] // 4"`, `"cdiv(in0.numel,
  1024)"`, `min`, `max`, `select(condition, a, b)`. Plain numbers arrive as `long` (integers) or `double`.
- Blocks run in any order, spread over the threads; a node begins when the one before has ended.
- `{"memset": "out0", "value": 0}` is a node too. `"function": "fused<8>"` names a template. Conditions that shapes
  must meet go into `"guards": ["in0.shape[1] % 8 == 0"]`.
- Matrix products and convolutions may be left to the library, with the arithmetic that you name (`fp32`, `fp16`,
  `bf16`; `tf32` on a GPU): `{"library": "gemm", "a": "in0", "b": "w:linear.weight", "c": "tmp", "m": 64, "n": 32, "k":
  16, "transpose_b": true, "compute": "fp32"}` and `{"library": "convolution", "input": "in0", "weight":
  "w:conv.weight", "bias": "w:conv.bias", "output": "out0", "stride": 2, "padding": [1, 1]}` (also `dilation`, `groups`,
  `transposed`, `output_padding`; `input_shape` and `weight_shape` where the buffer is a workspace).
- Built with `g++ -O3 -march=native -ffast-math -std=c++17`.
"""

_PLAN_CUDA = """
## The form of a solution: `plan.json` and `kernels/*.cu`
`plan.json` lists nodes that run in order on one stream; kernels are CUDA, compiled by NVRTC for the GPU that is there.
There is no host code: the launcher reads the plan.
```json
{"nodes": [{"kernel": "kernels/fused.cu", "function": "fused<4>", "grid": "cdiv(in0.numel, 1024)", "block": 256,
            "args": ["in0", "out0", "in0.numel"]}]}
```
```cuda
template <int PER_THREAD> __global__ void fused(const float* x, float* y, long n) {
  long first = (blockIdx.x * (long)blockDim.x + threadIdx.x) * PER_THREAD;
  for (int i = 0; i < PER_THREAD; i++) if (first + i < n) y[first + i] = sqrtf(fabsf(x[first + i]));
}
```
- A node has `grid` and `block` (one to three numbers), and may have `"shared"` (bytes of dynamic shared memory),
  `"cluster"` (one to three numbers) and `"cooperative": true`.
- Buffers: `in0`, `in1`, ... are the inputs (contiguous), `out0`, ... the outputs, `"w:<name>"` a weight by its name
  in the state_dict, `init0`, ... the plain numbers that `get_init_inputs()` returns. Workspaces of your own:
  `"workspaces": {"tmp": {"size": "in0.numel", "dtype": "float32", "init": 0}}`.
- Extents, sizes and number arguments are integers or expressions such as `"in0.shape[0] // 4"`, `"cdiv(in0.numel,
  1024)"`, `min`, `max`, `select(condition, a, b)`. Numbers arrive with the type that the kernel declares.
- `{"memset": "out0", "value": 0}` is a node too. Conditions that shapes must meet go into `"guards": ["in0.shape[1] % 8
  == 0"]`.
- Headers of CUDA (`cuda_fp16.h`, `cuda_bf16.h`, `mma.h`, `cooperative_groups.h`) are found; host headers are not
  needed.
- Matrix products and convolutions may be left to the library, with the arithmetic that you name (`fp32`, `tf32`,
  `fp16`, `bf16`): `{"library": "gemm", "a": "in0", "b": "w:linear.weight", "c": "tmp", "m": 64, "n": 32, "k": 16,
  "transpose_b": true, "compute": "tf32"}` and `{"library": "convolution", "input": "in0", "weight": "w:conv.weight",
  "bias": "w:conv.bias", "output": "out0", "stride": 2, "padding": [1, 1]}` (also `dilation`, `groups`, `transposed`,
  `output_padding`; `input_shape` and `weight_shape` where the buffer is a workspace).
- Built for the GPU at hand with `-std=c++17 --use_fast_math`.
"""

_EXTENSION = """
## The form of a solution: `model_new.py` and `kernels/`
`model_new.py` defines `class ModelNew` with the signature and the parameter names of `Model` (the state_dict is
loaded into it); its forward calls functions of the module `cuda_extension` only, besides creating and reshaping
tensors.
```python
import torch
import cuda_extension

class ModelNew(torch.nn.Module):
    def forward(self, x):
        return cuda_extension.fused_forward(x)
```
`kernels/{source}` hold the kernels and `kernels/*_binding.cpp` their bindings:
```cpp
#include "binding_registry.h"
{declaration}
static Tensor fused_forward(Tensor x) {
  check(x.dtype() == Float32 && x.is_contiguous(), "fused: a contiguous float32 tensor is expected");
  Tensor y = empty_like(x);
  fused(x.data<float>(), y.data<float>(), x.numel(){stream});
  return y;
}
REGISTER_BINDING(fused_forward, fused_forward);
```
Arguments are `Tensor`, `double`, `float`, `long`, `int`, `bool`; results `Tensor`, `Tensors` (`add`) or nothing;
`empty` takes an array of sizes and a dtype. `torch/types.h` and its like are understood too, without operators.
"""
_OF_CPU = {"{source}": "*.cpp", "{declaration}": "void fused(const float* x, float* y, long n);", "{stream}": ""}
_OF_CUDA = {
    "{source}": "*.cu",
    "{declaration}": "#include <cuda_runtime_api.h>\n"
    'extern "C" void fused(const float* x, float* y, long n, cudaStream_t stream);  // kernels/fused.cu launches',
    "{stream}": ", nullptr",
}

_PYTHON = """
## The form of a solution: `model_new.py`
One file that defines `class ModelNew` with the signature and the parameter names of `Model`. Its verdict is advisory.
It may compile (`load_inline`, Triton, `torch.compile`): that happens once before it is judged. When it is judged no
program can be started and nothing can be written; it finds what it compiled.
"""

_TRITON = """
## The form of a solution: `model_new.py` with kernels of Triton
One file that defines `class ModelNew` with the signature and the parameter names of `Model` (the state_dict is loaded
into it). Its forward computes with kernels of `triton.jit` only, besides creating and reshaping tensors.
```python
import torch
import triton
import triton.language as tl

@triton.jit
def fused(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.sqrt(tl.abs(tl.load(x + i, mask=i < n))), mask=i < n)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        fused[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y
```
- Kernels are compiled, and `triton.autotune` chooses its configuration, in one call before the solution is judged, on
  inputs of the same shapes. When it is judged no program can be started: compile nothing that this call does not need.
- Matrix products are `tl.dot`. Operators of PyTorch are refused, in grid functions and hooks of the kernels too.
"""
_TRITON_ON_CPU = """- On the CPU Triton's interpreter checks correctness only: no time is taken. Keep grids small.
"""


def _of_extension(device: str) -> str:
    text = _EXTENSION
    for mark, filling in (_OF_CPU if device == "cpu" else _OF_CUDA).items():
        text = text.replace(mark, filling)
    return text


# The form of a solution, by format and then by device.
_FORMS: dict[Format, Callable[[str], str]] = {
    "plan": lambda device: _PLAN if device == "cpu" else _PLAN_CUDA,
    "extension": _of_extension,
    "python": lambda device: _PYTHON,
    "triton": lambda device: _TRITON + (_TRITON_ON_CPU if device == "cpu" else ""),
}


def skill_text(format: Format = "plan", device: str = "cpu") -> str:
    """Returns the text of SKILL.md for solutions in ``format`` that run on ``device`` (cpu or cuda)."""
    on = " on the CPU of this machine" if device == "cpu" else " on its GPU"
    return _GOAL.replace("{device}", on) + _FORMS[format](device)
