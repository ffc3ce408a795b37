"""Provides running sandboxes that the tests of one process share, with a task and solutions for it."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.config import SandboxConfig
from cuda_agent.exploits.session import decided
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.wire import Probe, Solution, Verdict
from cuda_agent.tasks.task import Task
from tests import made_once

CHAIN = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return torch.relu(x) * self.scale

def get_inputs():
    return [torch.randn(32, 128)]

def get_init_inputs():
    return [1.5]
"""

KERNEL = """
#include <algorithm>
void chain(long block, long grid, const float* x, float* y, long n, double scale) {
  long low = n * block / grid, high = n * (block + 1) / grid;
  for (long i = low; i < high; i++) y[i] = std::max(x[i], 0.0f) * (float)scale;
}
"""

PLAN = {
    "nodes": [
        {
            "kernel": "kernels/chain.cpp",
            "function": "chain",
            "grid": 4,
            "args": ["in0", "out0", "in0.numel", "init0"],
        }
    ]
}


def task(code: str = CHAIN, name: str = "chain") -> Task:
    return Task(name, code, ("torch.relu", "torch.mul"), "torch#2")


def plan_solution(kernel: str = KERNEL, plan: Any = PLAN) -> Solution:
    return Solution("plan", {"plan.json": json.dumps(plan), "kernels/chain.cpp": kernel})


class Loop:
    """An event loop in its own thread, for synchronous tests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(300)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Running(Loop):
    """A sandbox in the event loop of its own thread, for synchronous tests."""

    def __init__(self, config: SandboxConfig, cache: Path, compiled: bool = True) -> None:
        super().__init__()
        self.sandbox = LocalSandbox(config, made_once.share(cache), compiled)
        self.wait(self.sandbox.__aenter__())

    def evaluate(self, task: Task, solution: Solution, **more: Any) -> Verdict:
        """Returns the verdict on ``solution``. While the verdict says that the machine is too busy, judges again, up to
        ten times in all."""
        return self.wait(decided(lambda: self.sandbox.evaluate(task, solution, **more)))

    def probe(self, task: Task, compile: bool = False) -> Probe:
        return self.wait(self.sandbox.probe(task, compile))

    def know_compile_time(self, task: Task) -> None:
        """Writes invented times of torch.compile, also for strict mode, into all baselines that the sandbox has stored,
        those of ``task`` included. So the tests compile nothing."""
        self.probe(task)
        strict = {
            "seconds": {"eager_fp32": 1e-4, "compile_fp32": 1e-3},
            "shares": {"compile_fp32": [9.9, 10.0, 10.1]},
            "errors": {"fp32": 1e-6},
        }
        known = {
            "compile": 1e-3,
            "compile_tried": True,
            "strict": strict | {"failed": {"max_autotune_fp32": "not tried"}},
        }
        for baseline in (self.sandbox.cache / "baselines").glob("*.json"):
            baseline.write_text(json.dumps(json.loads(baseline.read_text()) | known))
        self.wait(asyncio.to_thread(self.sandbox._judges[0].close))  # a new judge reads them

    def close(self) -> None:
        self.wait(self.sandbox.__aexit__())
        super().close()


def one_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets sandboxes start only one judge, because a second one would import torch again."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        one_judge(patch)
        running = Running(
            SandboxConfig(clock="model", run_seconds=2.0, memory_mb=400), tmp_path_factory.mktemp("cache")
        )
    yield running
    running.close()


@pytest.fixture(scope="session")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yields a sandbox with a real clock, in which the torch.compile baseline of ``task()`` is stored already."""
    with pytest.MonkeyPatch.context() as patch:
        one_judge(patch)
        running = Running(SandboxConfig(clock="real", timed_calls=5, memory_mb=400), tmp_path_factory.mktemp("timed"))
    running.know_compile_time(task())
    yield running
    running.close()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    """Yields a function that starts further sandboxes, which are closed at the end of the test."""
    started: list[Running] = []

    def make(cache: Path | None = None, compiled: bool = True, **settings: Any) -> Running:
        one_judge(monkeypatch)
        started.append(Running(SandboxConfig(**settings), cache or tmp_path / "cache", compiled))
        return started[-1]

    yield make
    for one in started:
        one.close()
