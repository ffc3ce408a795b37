"""Measures whether rewards of ``quick`` mode stay right on a busy machine, with ten kernels.

    python benchmarks/sandbox_busy.py --evaluations 40 --loops 2

The task is an element-wise chain on 2048 x 1024 values. The kernels compute it between one and twelve times, so their
speed-ups over eager and ``torch.compile`` lie on both sides of 1. Every kernel is judged several times in ``quick``
mode, first on the machine as it is, then beside ``--loops`` processes that run endless loops. Before, between and
after, each kernel is judged once in ``strict`` mode on the machine as it is. The sources differ by a comment, so no
verdict comes from the cache.

A kernel's reward is known if its three strict rewards agree. A quick reward that differs from a known one is wrong. A
verdict ``infra`` is undecided.
"""

import argparse
import asyncio
import collections
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_TASK = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x * 1.5 + 0.25) * x
def get_inputs():
    return [torch.randn(2048, 1024)]
def get_init_inputs():
    return []
"""
_KERNEL = """// TAG
extern "C" void solve(long, long, const float* x, float* y, long n) {
    for (int repeat = 0; repeat < PASSES; repeat++) {
        for (long i = 0; i < n; i++) {
            const float t = x[i] * 1.5f + 0.25f;
            y[i] = (t > 0 ? t : 0) * x[i];
        }
        asm volatile("" ::: "memory");
    }
}
"""
_PLAN = '{"nodes": [{"kernel": "kernels/k.cpp", "function": "solve", "args": ["in0", "out0", "in0.numel"]}]}'
_PASSES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)


async def measure(evaluations: int, loops: int) -> None:
    from cuda_agent.config import SandboxConfig
    from cuda_agent.errors import TaskError
    from cuda_agent.sandbox.local import LocalSandbox
    from cuda_agent.sandbox.wire import Solution
    from cuda_agent.tasks.task import Task

    def solution(passes: int, tag: str) -> Solution:
        source = _KERNEL.replace("PASSES", str(passes)).replace("TAG", tag)
        return Solution("plan", {"plan.json": _PLAN, "kernels/k.cpp": source})

    task = Task("chain", _TASK)
    with tempfile.TemporaryDirectory() as cache:
        async with LocalSandbox(SandboxConfig(), Path(cache)) as sandbox:
            known: dict[int, set[int]] = {passes: set() for passes in _PASSES}
            quick: list[tuple[str, int, Any]] = []
            seconds: dict[str, list[float]] = {}

            async def strictly(number: int) -> None:
                for passes in _PASSES:
                    verdict = await sandbox.evaluate(task, solution(passes, f"strict {number}"), "strict")
                    known[passes].add(verdict.reward)
                    print(
                        f"{passes:3} passes  {_line(verdict)}  reward {verdict.reward}  {verdict.message}", flush=True
                    )

            await strictly(0)
            for index, (name, count) in enumerate((("as it is", 0), (f"{loops} loops beside", loops))):
                # Not forked: a copy of this process would hold the pipes of its compilers open.
                beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
                seconds[name] = []
                for number in range(evaluations):
                    passes = _PASSES[number % len(_PASSES)]
                    begin = time.perf_counter()
                    try:
                        verdict = await sandbox.evaluate(task, solution(passes, f"{name} {number}"))
                    except TaskError as error:
                        print(error)
                        continue
                    seconds[name].append(time.perf_counter() - begin)
                    quick.append((name, passes, verdict))
                for process in beside:
                    process.kill()
                await strictly(1 + index)
    tally = {name: collections.Counter[str]() for name in seconds}
    for name, passes, verdict in quick:
        right = verdict.reward in known[passes]
        outcome = "right" if right else "undecided" if verdict.status == "infra" else "wrong"
        tally[name][outcome if len(known[passes]) == 1 else "not known"] += 1
        if not right:
            print(f"    {name}: {passes} passes  {_line(verdict)}  reward {verdict.reward}  {verdict.message}")
    for name, count in tally.items():
        middle, last = statistics.median(seconds[name]), statistics.quantiles(seconds[name], n=20)[-1]
        print(f"{name}: {dict(count)}, {middle:.2f} s a verdict (p95 {last:.2f} s)")


def _line(verdict: Any) -> str:
    pairs = [(verdict.speedup_eager, verdict.interval), (verdict.speedup_compile, verdict.compile_interval)]
    known = [f"{factor:.2f}x ({ends[0]:.2f} to {ends[1]:.2f})" for factor, ends in pairs if factor and ends]
    return "  ".join([verdict.status, *known])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=40)
    parser.add_argument("--loops", type=int, default=2)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.evaluations, arguments.loops))


if __name__ == "__main__":
    main()
