"""Measures what the service costs: an evaluation over HTTP compared with one in process, and many submissions at once.

    python benchmarks/service.py --solutions 40 --storm 500

Times of kernels are simulated, so that only the work around them is measured. The same solutions are judged by a
sandbox in this process and by ``cuda-agent sandbox serve`` on this machine, in turn; one build serves all of them. Then
a storm of plans is submitted at once. They are refused before a build, so this part measures the queue itself.
"""

import argparse
import asyncio
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuda_agent.config import SandboxConfig
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.remote import RemoteSandbox
from cuda_agent.sandbox.wire import Solution
from cuda_agent.tasks.task import Task

CODE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(32, 128)]
def get_init_inputs():
    return []
"""
KERNEL = """
void relu(long block, long grid, const float* x, float* y, long n) {
  for (long i = n * block / grid; i < n * (block + 1) / grid; i++) y[i] = x[i] > 0 ? x[i] : 0;
}
"""
TASK = Task("relu", CODE, ("torch.relu",), "torch#1")


def solution(number: int, nodes: bool = True) -> Solution:
    node = {"kernel": "kernels/relu.cpp", "function": "relu", "args": ["in0", "out0", "in0.numel"]}
    plan = {"nodes": [node] if nodes else [], "guards": [f"{number} == {number}"]}
    return Solution("plan", {"plan.json": json.dumps(plan), "kernels/relu.cpp": KERNEL})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solutions", type=int, default=40)
    parser.add_argument("--storm", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as (address, pid):
        asyncio.run(compare(address, Path(folder), options.solutions))
        asyncio.run(storm(address, pid, options.storm))


async def compare(address: str, folder: Path, count: int) -> None:
    async with (
        LocalSandbox(SandboxConfig(clock="model"), folder / "here") as here,
        RemoteSandbox(SandboxConfig(clock="model", servers=[address])) as there,
    ):
        for sandbox in (here, there):
            await sandbox.evaluate(TASK, solution(-1))
        seconds: dict[str, list[float]] = {"in process": [], "over HTTP": [], "over HTTP, known": []}
        for number in range(count):  # in turn, because the machine's speed varies
            seconds["in process"].append(await timed(here, number))
            seconds["over HTTP"].append(await timed(there, number))
            seconds["over HTTP, known"].append(await timed(there, number))
        for name, values in seconds.items():
            print(f"{name:17} p50 {1e3 * statistics.median(values):6.1f} ms  p95 {1e3 * quantile(values):6.1f} ms")
        pairs = zip(seconds["over HTTP"], seconds["in process"], strict=True)
        print(f"difference        p50 {1e3 * statistics.median(far - near for far, near in pairs):6.1f} ms")


async def timed(sandbox: Any, number: int) -> float:
    begin = time.perf_counter()
    verdict = await sandbox.evaluate(TASK, solution(number))
    assert verdict.status == "ok", verdict.message
    return time.perf_counter() - begin


async def storm(address: str, pid: int, count: int) -> None:
    before = resident(pid)
    async with RemoteSandbox(SandboxConfig(clock="model", servers=[address])) as there:
        begin = time.perf_counter()
        verdicts = await asyncio.gather(*(there.evaluate(TASK, solution(n, nodes=False)) for n in range(count)))
        spent = time.perf_counter() - begin
    assert {verdict.status for verdict in verdicts} == {"build_error"}
    print(f"{count} at once: {spent:.1f} s, {count / spent:.0f} a second; {(resident(pid) - before) >> 20} MiB more")


def quantile(values: list[float], share: float = 0.95) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def resident(pid: int) -> int:
    """Returns the resident memory of a process in bytes."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """Starts a server, waits until it is ready, and yields its address and its process id."""
    os.environ["CUDA_AGENT_SANDBOX_TOKEN"] = secrets.token_hex(16)
    command = [
        sys.executable,
        "-m",
        "cuda_agent.cli",
        "sandbox",
        "serve",
        "--port",
        "0",
        "--cache",
        str(folder / "there"),
    ]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen([*command, "sandbox.clock=model"], stderr=log, stdout=log)
    try:
        while not (found := re.search(r"listening on (\S+)", (folder / "log").read_text())):
            assert server.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        while " ready: " not in (folder / "log").read_text():
            time.sleep(0.1)
        yield found[1], server.pid
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
