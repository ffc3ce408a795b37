"""Whether rewards of ``quick`` hold on a busy machine: ten kernels, judged idle and beside endless loops.

    python benchmarks/sandbox_busy.py --evaluations 40 --loops 2

The task is an element-wise chain on 2048 x 1024 values.  The kernels compute it between one and twelve times, so their
speed-ups over eager and ``torch.compile`` lie on both sides of 1.  Mode ``strict`` gives the known speed-ups, on the
machine as it is.  Then every kernel is judged several times in ``quick``, first as it is, then beside the loops.  Each
verdict is new: the sources differ by a comment.

A reward that differs from the one of the strict speed-up counts as wrong, a verdict ``infra`` as undecided.
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
            known: dict[int, Any] = {}
            for passes in _PASSES:
                known[passes] = verdict = await sandbox.evaluate(task, solution(passes, "strict"), "strict")
                print(f"{passes:3} passes  {_line(verdict)}  reward {verdict.reward}  {verdict.message}", flush=True)
            for name, count in (("as it is", 0), (f"{loops} loops beside", loops)):
                # Not forked: a copy of this process would hold the pipes of its compilers open.
                beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
                tally: collections.Counter[str] = collections.Counter()
                seconds = []
                for number in range(evaluations):
                    passes = _PASSES[number % len(_PASSES)]
                    begin = time.perf_counter()
                    try:
                        verdict = await sandbox.evaluate(task, solution(passes, f"{name} {number}"))
                    except TaskError as error:
                        print(error)
                        continue
                    seconds.append(time.perf_counter() - begin)
                    right = verdict.reward == known[passes].reward
                    outcome = "undecided" if verdict.status == "infra" else "right" if right else "wrong"
                    tally[outcome] += 1
                    if outcome != "right":
                        said = f"{_line(verdict)}  reward {verdict.reward} for {known[passes].reward}"
                        print(f"    {name}: {passes} passes  {said}  {verdict.message}", flush=True)
                for process in beside:
                    process.kill()
                middle, last = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
                print(f"{name}: {dict(tally)}, {middle:.2f} s a verdict (p95 {last:.2f} s)", flush=True)


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
