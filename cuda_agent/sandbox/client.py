"""Defines the interface of the sandbox, which judges solutions and runs the tools of agents. ``LocalSandbox`` does this
work on this machine. ``RemoteSandbox`` sends the work to servers."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from cuda_agent.config import SandboxConfig as SandboxConfig
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.remote import RemoteSandbox
from cuda_agent.sandbox.wire import Mode, Solution, ToolResult, Verdict
from cuda_agent.sandbox.workspace.client import Commands
from cuda_agent.tasks.task import Task


class WorkFolder(Protocol):
    """An open workspace: an agent's work folder, with tools that read and change it. The folder is on this machine or
    on a server."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult: ...

    async def files(self) -> dict[str, str]: ...


class Sandbox(Protocol):
    """The part of a sandbox's interface that the tools of an agent use. ``LocalSandbox`` and ``RemoteSandbox``
    implement it."""

    async def evaluate(self, task: Task, solution: Solution, mode: Mode = "quick") -> Verdict: ...

    def verdict_key(self, task: Task, solution: Solution, mode: Mode) -> str: ...

    def workspace(
        self, files: dict[str, str], protected: frozenset[str], commands: Commands
    ) -> AbstractAsyncContextManager[WorkFolder]: ...


def open_sandbox(config: SandboxConfig, cache: Path, compiled: bool = True) -> LocalSandbox | RemoteSandbox:
    """Returns a ``RemoteSandbox`` for the servers in ``config.servers``. If there are none, returns a ``LocalSandbox``,
    which stores builds and verdicts below the folder ``cache``. If ``compiled`` is false, a ``LocalSandbox`` compares
    solutions with eager PyTorch alone. The caller enters the result with ``async with``."""
    return RemoteSandbox(config) if config.servers else LocalSandbox(config, cache, compiled)
