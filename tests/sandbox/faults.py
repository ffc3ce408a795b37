"""Defines the material of the fault drill: small tasks, and honest and faulty solutions of them in several formats.

Each fault lists the verdict statuses that are right for it. All tasks compute ``relu(x) * scale``, in different shapes,
so that every solution fits every task. ``drill`` runs the solutions."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cuda_agent.sandbox.wire import Format, Solution
from cuda_agent.tasks.task import Task

Make = Callable[[int], Solution]  # from a number that makes each solution one of its own


@dataclass(frozen=True)
class Fault:
    name: str
    make: Make
    right: frozenset[str]  # statuses
    kills: str = ""  # from outside: the process of ours that is killed meanwhile


_TASK = """
import torch
class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return torch.relu(x) * self.scale
def get_inputs():
    return [torch.randn(ROWS, COLUMNS)]
def get_init_inputs():
    return [SCALE]
"""


def tasks() -> list[Task]:
    return [
        Task(
            f"scale {rows}x{columns}",
            _TASK.replace("ROWS", str(rows)).replace("COLUMNS", str(columns)).replace("SCALE", str(scale)),
            ("torch.relu", "torch.mul"),
            "torch#2",
        )
        for rows, columns, scale in ((32, 128, 1.5), (64, 100, 0.5), (7, 33, 3.0))
    ]


_PYTHON = """
import ctypes, os, resource, signal, sys, tempfile, threading, time
import torch
BEFORE
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        FIRST
        return x.clamp_min(0) * self.scale
"""


def python(number: int, first: str = "pass", before: str = "") -> Solution:
    body = first.strip().replace("\n", "\n        ")
    code = _PYTHON.replace("FIRST", body).replace("BEFORE", before)
    return Solution("python", {"model_new.py": code + f"# {number}\n"})


# ----------------------------------------------------------------------------------------------------- C++ (device cpu)

_HEADERS = "".join(
    f"#include <{name}>\n"
    for name in (
        "algorithm", "cstdlib", "cstring", "fcntl.h", "pthread.h", "signal.h", "stdexcept", "sys/mman.h", "unistd.h",
    )
)  # fmt: skip
_CPU_KERNEL = """
void chain(long block, long grid, const float* x, float* y, long n, double scale) {
  FIRST
  long low = n * block / grid, high = n * (block + 1) / grid;
  for (long i = low; i < high; i++) y[i] = std::max(x[i], 0.0f) * (float)scale;
}
"""
_NODE = {"function": "chain", "args": ["in0", "out0", "in0.numel", "init0"]}
_MODEL = """
import torch
import cuda_extension
class ModelNew(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return cuda_extension.chain(x, self.scale)
"""
_CPU_BINDING = """
#include "../binding_registry.h"
void chain(long block, long grid, const float* x, float* y, long n, double scale);
static Tensor forward(const Tensor& x, double scale) {
  Tensor y = empty({x.size(0), x.size(1)});
  chain(0, 1, x.data<float>(), y.data<float>(), x.size(0) * x.size(1), scale);
  return y;
}
REGISTER_BINDING(chain, forward);
"""


def cpu_plan(number: int, first: str = "", before: str = "") -> Solution:
    source = _HEADERS + before + _CPU_KERNEL.replace("FIRST", first) + f"// {number}\n"
    plan = {"nodes": [_NODE | {"kernel": "kernels/chain.cpp", "grid": 4}]}
    return Solution("plan", {"plan.json": json.dumps(plan), "kernels/chain.cpp": source})


def cpu_extension(number: int, first: str = "", before: str = "") -> Solution:
    source = _HEADERS + before + _CPU_KERNEL.replace("FIRST", first) + f"// {number}\n"
    files = {"model_new.py": _MODEL, "kernels/chain.cpp": source, "kernels/chain_binding.cpp": _CPU_BINDING}
    return Solution("extension", files)


_EARLY = "__attribute__((constructor)) static void early() { DO }\n"
_TAKE = """static void take(long bytes) {
  volatile char* hog = (volatile char*)malloc(bytes);
  for (long i = 0; i < bytes; i += 4096) hog[i] = 1;
}
"""
_NATIVE: dict[str, tuple[str, str, str]] = {  # name: right statuses, first thing the kernel does, before the kernel
    "null pointer": ("crash", "*(volatile int*)8 = 1;", ""),
    "far out of bounds": ("crash", "y[1L << 40] = 1;", ""),
    "write to an input": ("crash", "((volatile float*)x)[n / 2] = 1;", ""),
    "endless loop": ("timeout", "for (volatile long turn = 0;; turn = turn + 1);", ""),
    "division by zero": ("crash", "volatile int zero = 0, one = 1; one = one / zero;", ""),
    "exception": ("crash", 'throw std::runtime_error("odd");', ""),
    # On a busy machine the limit of time may come before that of memory.
    "many small allocations": ("crash timeout", "for (;;) take(1 << 20);", _TAKE),
    "one huge allocation": ("crash", "take(1L << 42);", _TAKE),
    "stack overflow": (
        "crash",
        "y[0] = dive(x, n);",
        "__attribute__((noinline)) float dive(const float* x, long n) {\n"
        "  volatile float a[4096]; a[n % 4096] = x[0]; return dive(x, n + 1) + a[(n + 1) % 4096];\n}\n",
    ),
    "thread bomb": (
        "crash timeout",
        "pthread_t t; while (!pthread_create(&t, 0, wait_forever, 0)); for (;;) pause();",
        "static void* wait_forever(void*) { for (;;) pause(); }\n",
    ),
    "fork bomb": ("ok", "for (int i = 0; i < 10000; i++) fork();", ""),
    "exit(0)": ("crash", "exit(0);", ""),
    "_exit(0)": ("crash", "_exit(0);", ""),
    "abort": ("crash", "abort();", ""),
    "kills itself": ("crash", "kill(getpid(), SIGKILL);", ""),
    "ends itself politely": ("crash", "kill(getpid(), SIGTERM);", ""),
    "stops itself": ("timeout", "kill(getpid(), SIGSTOP); for (;;) pause();", ""),
    "swallows its faults": (
        "timeout crash",
        "signal(SIGSEGV, nothing); *(volatile int*)8 = 1;",
        "static void nothing(int) {}\n",
    ),
    "closes all descriptors": ("crash", "for (int f = 0; f < 4096; f++) close(f);", ""),
    "answers nonsense": (
        "crash cheat wrong",
        "if (block == 0) for (int f = 3; f < 32; f++) (void)!write(f, noise, sizeof noise);",
        'static const char noise[] = "\\x7f\\x7f\\x7f\\x7f\\x7f\\x7f\\x7f\\x7f nonsense";\n',
    ),
    "fills the temporary folder": (
        "ok",
        'if (block == 0) for (const char* name : {"filled", "/tmp/filled", "/dev/shm/filled", "/var/tmp/filled"}) {'
        " int f = open(name, O_CREAT | O_WRONLY, 0600); if (f < 0) continue;"
        " char page[4096]; for (long i = 0; i < 1 << 24 && write(f, page, sizeof page) > 0; i++); close(f); }",
        "",
    ),
    "exit while it is loaded": ("crash", "", _EARLY.replace("DO", "_exit(0);")),
    "hangs while it is loaded": ("timeout", "", _EARLY.replace("DO", "for (;;) pause();")),
}  # fmt: skip
_BOMBS = {  # sources that never finish compiling
    "template recursion": "template <long D, long N> struct Bomb { static const long v = Bomb<D - 1, 2 * N>::v"
    " + Bomb<D - 1, 2 * N + 1>::v; };\ntemplate <long N> struct Bomb<0, N> { static const long v = N; };\n"
    "long bomb = Bomb<40, 1>::v;\n",
    "endless include": "#include __FILE__\n#include __FILE__\n",
    "huge array": "char bomb[1L << 32] = {1};\n",
    "macro expansion": "".join(
        f"#define A{n} {' '.join([f'A{n - 1}'] * 10)}\n" if n else "#define A0 1,\n" for n in range(11)
    )
    + "int bomb[] = { A10 };\n",
    "assembler repetition": 'asm(".rept 2000000000\\n.quad 1\\n.endr");\n',
}
_FREE: dict[str, tuple[str, str, str]] = {  # the same in Python, on either device
    "endless loop": ("timeout", "while True: pass", ""),
    "os._exit(0)": ("crash", "os._exit(0)", ""),
    "os._exit(0) at import": ("crash", "pass", "os._exit(0)"),
    "sys.exit(0)": ("crash", "sys.exit(0)", ""),
    "sys.exit(0) at import": ("build_error", "pass", "sys.exit(0)"),
    "keyboard interrupt": ("crash", "raise KeyboardInterrupt", ""),
    "an exception that cannot be told": (
        "crash", "raise Odd", "class Odd(BaseException):\n    def __str__(self): raise self",
    ),
    "an exception that never ends": (
        "timeout", "raise Odd", "class Odd(BaseException):\n    def __str__(self):\n        while True: pass",
    ),
    "a connection error": ("crash", "raise ConnectionResetError", ""),
    "abort": ("crash", "os.abort()", ""),
    "kills itself": ("crash", "os.kill(os.getpid(), signal.SIGKILL)", ""),
    "stops itself": ("timeout", "os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: time.sleep(1)", ""),
    "uses up its processor time": (
        "crash timeout", "resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", "",
    ),
    "null pointer": ("crash", "ctypes.string_at(0)", ""),
    "many small allocations": ("crash timeout", "hog = [b'1' * ((1 << 20) + n) for n in range(1 << 20)]", ""),
    "one huge allocation": ("crash", "torch.ones(1 << 42)", ""),
    "deep recursion": ("crash", "(dive := lambda: dive())()", "sys.setrecursionlimit(1 << 30)"),
    "thread bomb": (
        "crash timeout",
        "while True: threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        "",
    ),
    "fork bomb": ("crash", "while True: os.fork()", ""),
    "fork bomb at import": ("build_error", "pass", "while True: os.fork()"),
    "starts a program": ("crash", "os.execv('/bin/sh', ['sh', '-c', 'sleep 1000'])", ""),
    "closes all descriptors": ("crash", "os.closerange(0, 4096)", ""),
    "answers nonsense": ("crash cheat wrong", "for d in range(3, 64):\n    try: os.write(d, b'\\x7f' * 64)\n"
        "    except OSError: pass", ""),
    "fills the temporary folder": (
        "ok", "for name in (tempfile.gettempdir(), '/tmp', '/dev/shm', '/var/tmp'):\n"
        "    try:\n        with open(name + '/filled', 'wb') as file:\n"
        "            for _ in range(1 << 16): file.write(bytes(1 << 20))\n    except OSError: pass", "",
    ),
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- CUDA

_CUDA_KERNEL = """
#include <cuda_runtime.h>
#include <cassert>
#include <cstdint>
BEFORE
__global__ void chain(const float* __restrict__ x, float* __restrict__ y, int64_t n, float scale) {
  FIRST
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
    y[i] = fmaxf(x[i], 0.0f) * scale;
}
"""
_CUDA_LAUNCHER = """
extern "C" void chain_launcher(const float* x, float* y, int64_t n, float scale, cudaStream_t stream) {
  chain<<<8, 128, 0, stream>>>(x, y, n, scale);
}
"""
_CUDA_BINDING = """
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
#include <ATen/cuda/CUDAContext.h>
#include <cstdlib>
#include "../binding_registry.h"
extern "C" void chain_launcher(const float* x, float* y, int64_t n, float scale, cudaStream_t stream);
static torch::Tensor forward(torch::Tensor x, double scale) {
  FIRST
  auto y = torch::empty_like(x);
  chain_launcher(x.data_ptr<float>(), y.data_ptr<float>(), x.size(0) * x.size(1), static_cast<float>(scale),
                 at::cuda::getCurrentCUDAStream());
  return y;
}
static void register_chain(pybind11::module& m) { m.def("chain", &forward); }
REGISTER_BINDING(chain, register_chain);
"""


def cuda_plan(number: int, first: str = "", before: str = "", shared: int = 0) -> Solution:
    source = _CUDA_KERNEL.replace("FIRST", first).replace("BEFORE", before) + f"// {number}\n"
    node = _NODE | {"kernel": "kernels/chain.cu", "grid": 8, "block": 128} | ({"shared": shared} if shared else {})
    return Solution("plan", {"plan.json": json.dumps({"nodes": [node]}), "kernels/chain.cu": source})


def cuda_extension(number: int, first: str = "", before: str = "", host: str = "") -> Solution:
    source = _CUDA_KERNEL.replace("FIRST", first).replace("BEFORE", before) + _CUDA_LAUNCHER + f"// {number}\n"
    binding = _CUDA_BINDING.replace("FIRST", host)
    return Solution(
        "extension", {"model_new.py": _MODEL, "kernels/chain.cu": source, "kernels/chain_binding.cpp": binding}
    )


_KERNELS: dict[str, tuple[str, str, str]] = {
    "null pointer": ("crash", "*(volatile int*)8 = 1;", ""),
    "far out of bounds": ("crash", "y[1ll << 40] = 1;", ""),
    "write to an input": ("crash", "((volatile float*)x)[n / 2] = 1;", ""),
    "misaligned address": ("crash", "*(volatile int*)((char*)y + 1) = 1;", ""),
    "endless kernel": ("timeout", "for (volatile int turn = 0;; turn = turn + 1);", ""),
    "trap": ("crash", "__trap();", ""),
    "assertion": ("crash", "assert(n < 0);", ""),
    "stack overflow": (
        "crash",
        "y[0] = dive(x, n);",
        "__device__ __noinline__ float dive(const float* x, int64_t n) {\n"
        "  volatile float a[1024]; a[n % 1024] = x[0]; return n < 0 ? x[0] : dive(x, n + 1) + a[(n + 1) % 1024];\n}\n",
    ),
    "waits for a block that never comes": (
        "timeout",
        "while (atomicAdd(&arrived, 0) < 1000000) ;",
        "__device__ int arrived;\n",
    ),
}
_ON_THE_GPU: dict[str, tuple[str, str, str]] = {  # the python format
    "endless kernel": ("timeout", "torch.cuda._sleep(1 << 60)", ""),
    "device assertion": ("crash", "x.flatten()[torch.full((1,), 1 << 30, device='cuda')].clone()", ""),
    "more than the device has": ("crash", "torch.empty(1 << 42, dtype=torch.uint8, device='cuda')", ""),
    "takes the device's memory and keeps it": (
        "ok crash",
        "free = torch.cuda.mem_get_info()[0]\n"
        "hog.append(torch.empty(max(free - (64 << 20), 1), dtype=torch.uint8, device='cuda'))",
        "hog = []",
    ),
}


# ------------------------------------------------------------------------------------------------------------------ all


def honest(device: str) -> dict[Format, Make]:
    """Returns format -> function. The function makes a solution that is right for every task, from a number that makes
    its source unique."""
    if device == "cuda":
        return {"plan": cuda_plan, "extension": cuda_extension, "python": python}
    return {"plan": cpu_plan, "extension": cpu_extension, "python": python}


def faults(device: str) -> list[Fault]:
    """Returns every kind of fault, once for each format that can have it."""

    def of(table: dict[str, tuple[str, str, str]], format: str, make: Callable[..., Solution]) -> list[Fault]:
        return [
            Fault(f"{format}: {name}", partial(make, first=first, before=before), frozenset(right.split()))
            for name, (right, first, before) in table.items()
        ]

    found = of(_FREE, "python", python)
    if device == "cpu":
        found += of(_NATIVE, "plan", cpu_plan) + of(_NATIVE, "extension", cpu_extension)
        found += of({name: ("build_error", "", text) for name, text in _BOMBS.items()}, "plan", cpu_plan)
    else:
        found += of(_KERNELS, "plan", cuda_plan) + of(_KERNELS, "extension", cuda_extension)
        found += of(_ON_THE_GPU, "python", python)
        found += of(
            {n: ("build_error", "", _BOMBS[n]) for n in ("template recursion", "macro expansion")}, "plan", cuda_plan
        )
        more = partial(cuda_plan, shared=1_000_000)
        found.append(Fault("plan: more shared memory than a block has", more, frozenset({"build_error"})))
        for what in ("exit(0)", "abort()", "*(volatile int*)8 = 1"):
            host = partial(cuda_extension, host=what + ";")
            found.append(Fault(f"extension: {what} on the host", host, frozenset({"crash"})))
    slow = partial(python, first="time.sleep(0.1)")  # honest, and long enough to be hit
    for process in ("candidate", "reference", "spare worker", "warm parent", "judge"):
        found.append(Fault(f"outside: {process} killed", slow, frozenset({"ok"}), kills=process))
    return found
