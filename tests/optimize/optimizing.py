"""A task, solutions of it, and runs of `optimize` against a scripted server."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import Script, Served, call, serve

from cuda_agent.agent.progress import Event
from cuda_agent.config import SandboxConfig
from cuda_agent.optimize import search
from cuda_agent.optimize.folder import SearchOrder
from cuda_agent.optimize.search import SearchOutcome, optimize
from cuda_agent.optimize.search_environment import Terms
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.local import LocalSandbox
from tests.optimize.problem import KERNEL, MODEL


def plan(grid: int) -> str:
    node = {"kernel": "kernels/fused.cpp", "function": "fused", "grid": grid, "args": ["in0", "out0", "in0.numel"]}
    return json.dumps({"nodes": [node]})


WRITE = {
    "calls": [call("Write", path="kernels/fused.cpp", content=KERNEL), call("Write", path="plan.json", content=plan(8))]
}
PROFILE = {"calls": [call("Bash", command="profile")]}
DONE = [{"text": "Nothing more is to be gained."}]
SANDBOX = SandboxConfig(clock="model", memory_mb=600)
TERMS = Terms(turns=12, context=20_000, answer_tokens=2000, target=1.01)


class SharedSandbox:
    """One sandbox for many runs, so that its processes import torch once.  A search that is stopped kills the sandbox's
    judges; the next run then gets a new sandbox."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.runner, self.opened = cache, asyncio.Runner(), contextlib.AsyncExitStack()
        self.sandbox: LocalSandbox | None = None

    @contextlib.asynccontextmanager
    async def open(self, settings: SandboxConfig, cache: Path) -> AsyncIterator[LocalSandbox]:
        assert cache == self.cache
        killed = self.sandbox and any(judge._killed for judge in self.sandbox._judges)
        if self.sandbox is None or killed or self.sandbox.config != settings:
            await self.opened.aclose()
            self.sandbox = await self.opened.enter_async_context(open_sandbox(settings, cache))
        yield self.sandbox

    def close(self) -> None:
        self.runner.run(self.opened.aclose())
        self.runner.close()


class Run:
    """Calls `optimize` in ``folder`` against a scripted server.  ``events`` holds the events of the last call."""

    def __init__(
        self, folder: Path, cache: Path, sandbox: SandboxConfig = SANDBOX, shared: SharedSandbox | None = None
    ) -> None:
        self.folder, self.cache, self.sandbox, self.events = folder, cache, sandbox, list[Event]()
        self.shared = shared
        self.served: Served | None = None

    def __call__(self, script: Script, *, resume: bool = False, stop_at: Any = None, **changes: Any) -> SearchOutcome:
        terms = {name: value for name, value in changes.items() if name in Terms.__dataclass_fields__}
        rest = {name: value for name, value in changes.items() if name not in terms}
        self.folder.mkdir(parents=True, exist_ok=True)
        source = self.folder / "model.py"
        if not source.exists():
            source.write_text(MODEL)
        self.events.clear()

        async def work(url: str) -> SearchOutcome:
            stop = asyncio.Event()

            def watch(event: Event) -> None:
                self.events.append(event)
                if stop_at and stop_at(event):
                    stop.set()

            order = SearchOrder(**({"base_url": url, "model": "scripted", "terms": replace(TERMS, **terms)} | rest))
            return await optimize(order, self.sandbox, self.cache, source, self.folder / "out", resume, watch, stop)

        with serve(script) as self.served, pytest.MonkeyPatch.context() as patch:
            if self.shared is None:
                return asyncio.run(work(self.served.url))
            patch.setattr(search, "open_sandbox", self.shared.open)
            return self.shared.runner.run(work(self.served.url))

    def kinds(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    def results(self) -> str:
        """Returns what the tools and the agent loop answered to the model."""
        return "\n".join(
            event["message"]["content"] for event in self.kinds("message") if event["message"]["role"] != "assistant"
        )
