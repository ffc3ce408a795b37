"""Measures the sandbox on a GPU: evaluations per hour, where their time goes, and how well a speed-up can be repeated.

    python benchmarks/sandbox_gpu.py --solutions 30 --repeats 20 --json gpu.json

Every solution is built, checked and timed anew, because its source differs. The tasks are prepared before, which is
timed separately. The solutions of each format are judged one after the other. Then twice as many are judged at once,
with builds in parallel.

    python benchmarks/sandbox_gpu.py --tasks 48 --solutions 30

With ``--tasks`` the benchmark measures only one thing: verdicts per second for many tasks. It judges ``--solutions``
different solutions of one ``--format`` per task, in random order and all at once. They are compiled beforehand.
Baselines of torch.compile are left out, because a task needs them only once.

    python benchmarks/sandbox_gpu.py --tasks 48 --solutions 12 --teacher

With ``--teacher`` the tasks and the designs of the solutions are those of the scripted teacher, not one kernel that is
always right. About a quarter of these designs are refused. Early in training, a quarter to a third of a policy's plans
are refused.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cuda_agent.config import SandboxConfig
from cuda_agent.sandbox.judge.baselines import baselines_file
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Format, Solution, Verdict
from cuda_agent.synthesis.teacher import family, teacher
from cuda_agent.synthesis.teacher.cuda_parts import KERNEL as KERNEL_FILE
from cuda_agent.tasks.task import Task

TASK = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, rounds):
        super().__init__()
        self.rounds = rounds

    def forward(self, x):
        for _ in range(self.rounds):
            x = torch.tanh(x * 1.1 + 0.1)
        return x

def get_inputs():
    return [torch.randn({rows}, 4096)]

def get_init_inputs():
    return [{rounds}]
"""
KERNEL = """
#include <cuda_runtime.h>
__device__ float step(float v) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(v * 1.1f + 0.1f));
  return y;
}
__global__ void chain(const float4* __restrict__ x, float4* __restrict__ y, long n, int rounds) {
  for (long i = blockIdx.x * (long)blockDim.x + threadIdx.x; i < n; i += (long)gridDim.x * blockDim.x) {
    float4 v = x[i];
    for (int r = 0; r < rounds; r++) {
      v.x = step(v.x); v.y = step(v.y); v.z = step(v.z); v.w = step(v.w);
    }
    y[i] = v;
  }
}
"""
LAUNCH = """
extern "C" void chain_launcher(const float* x, float* y, long n, int rounds, int config, cudaStream_t stream) {
  chain<<<132 * 8, config ? config : 256, 0, stream>>>((const float4*)x, (float4*)y, n / 4, rounds);
}
"""
BINDING = """
#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
#include <ATen/cuda/CUDAContext.h>
#include "../binding_registry.h"
extern "C" void chain_launcher(const float* x, float* y, long n, int rounds, int config, cudaStream_t stream);
static torch::Tensor chain_forward(torch::Tensor x, int64_t rounds, int64_t config) {
  TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "a contiguous CUDA tensor is expected");
  auto y = torch::empty_like(x);
  chain_launcher(x.data_ptr<float>(), y.data_ptr<float>(), x.numel(), rounds, config, at::cuda::getCurrentCUDAStream());
  return y;
}
static void register_chain(pybind11::module& m) {
  m.def("chain_forward", &chain_forward, py::arg("x"), py::arg("rounds"), py::arg("config") = 0);
}
REGISTER_BINDING(chain, register_chain);
"""
MODEL = """
import torch
import torch.nn as nn
{import_}
class ModelNew(nn.Module):
    def __init__(self, rounds):
        super().__init__()
        self.rounds = rounds

    def forward(self, x):
        {body}
"""
PLAN = {
    "nodes": [
        {
            "kernel": "kernels/chain.cu", "function": "chain",
            "args": ["in0", "out0", "in0.numel // 4", "init0"],
        }
    ]
}  # fmt: skip
PHASES = ("start", "check", "time", "prepare", "cleanup")
SIZES = {"20 us": (1024, 16, 132 * 8, 256), "200 us": (8192, 24, 132 * 8, 256), "2 ms": (8192, 32, 66, 64)}
# rows, rounds, and the plan's blocks and threads; the plan of "2 ms" leaves half of the device idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--solutions", type=int, default=30, help="of a format, one after the other; then twice as many at once"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=0, help="measure one format for so many tasks, and nothing else")
    parser.add_argument("--format", choices=("plan", "extension", "python"), default="plan")
    parser.add_argument("--teacher", action="store_true", help="with --tasks: tasks and designs of the teacher")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        if options.tasks:
            made = teachers_tasks(options.tasks) if options.teacher else chains(options.tasks, options.format)
            print(json.dumps(asyncio.run(many_tasks(*made, options.solutions, Path(cache))), indent=1))
            return
        answer = asyncio.run(measure(options.solutions, options.repeats, Path(cache)))
    for name, row in answer["formats"].items():
        phases = "  ".join(f"{phase} {p50:.3f}/{p95:.3f}" for phase, (p50, p95) in row["phases"].items())
        print(f"{name:10} p50 {row['p50']:.3f} s  p95 {row['p95']:.3f} s  | {phases}  | {row['statuses']}")
        print(f"{'':10} at once: {row['hourly']:.0f} an hour; the device held {100 * row['held']:.0f} % of the time")
    print("preparing a task:", "  ".join(f"{name} {seconds:.1f} s" for name, seconds in answer["prepare"].items()))
    for name, row in answer["repeat"].items():
        print(
            f"{name:7} {row['seconds'] * 1e6:8.1f} us  x {row['speedup']:.3f}  spread {100 * row['spread']:.2f} %  "
            f"rewards {row['rewards']}"
        )
    strict = answer["strict"]
    print(f"strict: {statistics.median(strict['seconds']):.1f} s, its preparation {strict['prepare']:.1f} s")
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1))


async def measure(solutions: int, repeats: int, cache: Path) -> dict[str, Any]:
    tasks = {name: task(rows, rounds) for name, (rows, rounds, _, _) in SIZES.items()}
    answer: dict[str, Any] = {"prepare": {}, "formats": {}, "repeat": {}}
    async with LocalSandbox(SandboxConfig(device="cuda", memory_mb=8192, timed_calls=24), cache) as sandbox:
        for name, one in tasks.items():
            begin = time.perf_counter()
            probe = await sandbox.probe(one)
            answer["prepare"][name] = time.perf_counter() - begin
            if probe.error:
                raise SystemExit(f"{name}: {probe.error}")
        formats: tuple[Format, ...] = ("plan", "extension", "python")
        for format in formats:
            answer["formats"][format] = await bench(sandbox, tasks, format, solutions)
        for name, one in tasks.items():
            verdicts = [await sandbox.evaluate(one, solution("plan", name, 10_000 + i)) for i in range(repeats)]
            speedups = [v.speedup_eager or 0.0 for v in verdicts]
            answer["repeat"][name] = {
                "seconds": statistics.median(v.seconds or 0.0 for v in verdicts),
                "speedup": statistics.median(speedups),
                "spread": (max(speedups) - min(speedups)) / statistics.median(speedups),
                "rewards": {str(r): sum(v.reward == r for v in verdicts) for r in {v.reward for v in verdicts}},
                "all": speedups,
            }
        name = "200 us"
        seconds = []
        for number in range(4):  # the first verdict also measures baselines at every precision
            begin = time.perf_counter()
            verdict = await sandbox.evaluate(tasks[name], solution("plan", name, 20_000 + number), "strict")
            seconds.append(time.perf_counter() - begin)
            if verdict.status != "ok":
                raise SystemExit(f"strict: {verdict.status}: {verdict.message}")
        answer["strict"] = {"prepare": seconds[0], "seconds": seconds[1:]}
    return answer


Make = Callable[[Task, int], Solution]  # makes solution number N of a task


def chains(count: int, format: Format) -> tuple[list[Task], Make]:
    """Returns ``count`` tasks of chained tanh, and a function that makes a right solution of one format from a task and
    a number."""
    rng = random.Random(0)
    sizes = rng.sample([(rows, rounds) for rows in (256, 512, 1024, 2048, 4096) for rounds in range(2, 25)], count)

    def made(task: Task, number: int) -> Solution:
        if format != "plan":
            return solution(format, "20 us", number)
        node = PLAN["nodes"][0] | {"grid": rng.choice((132, 264, 528, 1056)), "block": rng.choice((128, 256, 512))}
        files = {"plan.json": json.dumps({"nodes": [node]}), "kernels/chain.cu": f"// {number}\n{KERNEL}"}
        return Solution("plan", files)

    return [task(*size) for size in sizes], made


def teachers_tasks(count: int) -> tuple[list[Task], Make]:
    """Returns ``count`` tasks of the teacher's family, and a function that makes a plan with a random design from a
    task and a number."""
    rng = random.Random(0)

    def made(task: Task, number: int) -> Solution:
        files = teacher.solve(task, rng, "cuda").files
        return Solution("plan", files | {KERNEL_FILE: f"// {number}\n{files[KERNEL_FILE]}"})

    return [family.sample_task(rng, "cuda") for _ in range(count)], made


async def many_tasks(tasks: list[Task], make: Make, solutions: int, cache: Path) -> dict[str, Any]:
    rng = random.Random(0)
    config = SandboxConfig(device="cuda", memory_mb=8192)
    async with LocalSandbox(config, cache) as sandbox:
        for one in tasks:  # marks torch.compile's baseline as tried, so that it is not measured
            file = baselines_file(sandbox._settings, one.digest, torch.__version__)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"compile_tried": True}))
        verdicts: list[Verdict] = []

        async def judge(one: Task, solution: Solution) -> None:
            verdicts.append(await sandbox.evaluate(one, solution))
            if len(verdicts) % 96 == 0:
                seconds, last = time.perf_counter() - begin, verdicts[-96:]
                spent = {name: statistics.fmean(v.phases.get(name, 0.0) for v in last) for name in PHASES}
                phases = "  ".join(f"{name} {seconds:.3f}" for name, seconds in spent.items())
                print(f"{len(verdicts)} verdicts in {seconds:.1f} s, means of the last 96: {phases}", flush=True)

        begin = time.perf_counter()
        await asyncio.gather(*(judge(one, make(one, -1)) for one in tasks))  # prepares the tasks
        print(f"{len(tasks)} tasks prepared in {time.perf_counter() - begin:.0f} s", flush=True)
        verdicts.clear()
        order = [(one, make(one, number)) for number in range(solutions) for one in tasks]
        rng.shuffle(order)
        specs = {one.name: await sandbox.spec(one) for one in tasks}
        begin = time.perf_counter()
        await asyncio.gather(*(sandbox.build(solution, specs[one.name]) for one, solution in order))
        print(f"{len(order)} solutions compiled in {time.perf_counter() - begin:.0f} s", flush=True)
        begin = time.perf_counter()
        await asyncio.gather(*(judge(*item) for item in order))
        seconds = time.perf_counter() - begin
    return {
        "a second": len(verdicts) / seconds,
        "phases": {name: statistics.median(v.phases.get(name, 0.0) for v in verdicts) for name in ("build", *PHASES)},
        "means": {name: statistics.fmean(v.phases.get(name, 0.0) for v in verdicts) for name in PHASES},
        "statuses": {status: sum(v.status == status for v in verdicts) for status in {v.status for v in verdicts}},
        "held": {
            status: statistics.fmean(sum(v.phases.get(name, 0.0) for name in PHASES) for v in of)
            for status in {v.status for v in verdicts}
            for of in [[v for v in verdicts if v.status == status]]
        },
        "messages": sorted({v.message for v in verdicts if v.message})[:5],
        "eager": sorted(v.eager_seconds or 0.0 for v in verdicts)[:: max(1, len(verdicts) // 8)],
    }


async def bench(sandbox: LocalSandbox, tasks: dict[str, Task], format: Format, count: int) -> dict[str, Any]:
    verdicts: list[Verdict] = []
    whole: list[float] = []

    async def one(number: int) -> None:
        name = list(tasks)[number % len(tasks)]
        begin = time.perf_counter()
        verdicts.append(await sandbox.evaluate(tasks[name], solution(format, name, number)))
        whole.append(time.perf_counter() - begin)

    await one(count)  # a warm-up: the first solution of a format takes longer
    verdicts.clear()
    whole.clear()
    for number in range(count):
        await one(number)
    alone = sorted(whole)
    if failed := [v for v in verdicts if v.status != "ok"]:
        raise SystemExit(f"{format}: {failed[0].status}: {failed[0].message}")
    phases = {name: sorted(v.phases[name] for v in verdicts) for name in verdicts[0].phases}
    before = len(verdicts)
    begin = time.perf_counter()
    await asyncio.gather(*(one(1000 + number) for number in range(2 * count)))
    seconds = time.perf_counter() - begin
    held = sum(v.phases[name] for v in verdicts[before:] for name in PHASES if name in v.phases)
    return {
        "p50": statistics.median(alone),
        "p95": alone[int(0.95 * len(alone))],
        "phases": {name: (statistics.median(s), s[int(0.95 * len(s))]) for name, s in phases.items()},
        "hourly": 3600 * 2 * count / seconds,
        "held": held / seconds,
        "statuses": {status: sum(v.status == status for v in verdicts) for status in {v.status for v in verdicts}},
    }


def task(rows: int, rounds: int) -> Task:
    code = TASK.replace("{rows}", str(rows)).replace("{rounds}", str(rounds))
    return Task(f"tanh_{rows}_{rounds}", code, ("torch.tanh",), "bench")


def solution(format: Format, size: str, number: int) -> Solution:
    """Returns the ``number``-th solution of a format for the task of this ``size``. All numbers have the same kernel; a
    comment makes their sources differ."""
    note = f"// {number}\n"
    _, _, blocks, threads = SIZES[size]
    if format == "plan":
        node = PLAN["nodes"][0] | {"grid": str(blocks), "block": threads}
        return Solution("plan", {"plan.json": json.dumps({"nodes": [node]}), "kernels/chain.cu": note + KERNEL})
    if format == "python":
        loop = "for _ in range(self.rounds):\n            x = (x * 1.1).add_(0.1).tanh_()\n"
        body = f"{loop}        return x  # {number}"
        return Solution("python", {"model_new.py": MODEL.replace("{import_}", "").replace("{body}", body)})
    body = "return cuda_extension.chain_forward(x, self.rounds)"
    return Solution(
        "extension",
        {
            "model_new.py": MODEL.replace("{import_}", "import cuda_extension").replace("{body}", body),
            "kernels/chain.cu": note + KERNEL + LAUNCH,
            "kernels/chain_binding.cpp": note + BINDING,
        },
    )


if __name__ == "__main__":
    main()
