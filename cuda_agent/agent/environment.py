"""The multi-turn tool environment of one task: work folder, tools, bad-pattern flags, final verdict.

``async with KernelEnvironment(...) as environment`` opens the folder; ``call`` runs one tool call, ``finish`` judges
the solution in the folder.  The player is separate: a policy by token ids (``loop``), a model behind a text interface
(``chat_rollout``), or an external trainer (``environments``).

Not covered: budgets, tokenized prompts, and training data.
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Literal, Self

from cuda_agent.agent.prompt import agent_messages
from cuda_agent.agent.skill import skill_text
from cuda_agent.agent.tools import TOOL_NAMES, Style, describe, failed, solution_of
from cuda_agent.sandbox.client import Sandbox, WorkFolder
from cuda_agent.sandbox.wire import Format, ToolResult, Verdict
from cuda_agent.tasks.task import Task

_CHANGING = ("Write", "Edit", "MultiEdit")  # after one of these, a repeated verify is not a loop
_LOOP = 3  # repetitions of the same call that count as a loop


class SandboxFault(Exception):
    """The sandbox failed twice; the player is not at fault."""


class KernelEnvironment:
    """The environment of one episode.  ``files``: the solution at the last ``collect``; ``best``: the verdict of the
    best state so far; ``flags``: bad patterns seen ("malformed_call", "unknown_tool", "loop")."""

    def __init__(
        self,
        task: Task,
        sandbox: Sandbox,
        format: Format = "plan",
        device: Literal["cpu", "cuda"] = "cpu",
        style: Style = "full",
    ) -> None:
        self.task, self.sandbox = task, sandbox
        self.format, self.device, self.style = format, device, style
        self.files: dict[str, str] = {}
        self.best: Verdict | None = None
        self.flags: set[str] = set()
        self._seen: Counter[str] = Counter()
        self._opened: AbstractAsyncContextManager[WorkFolder] | None = None
        self._folder: WorkFolder | None = None

    def messages(self) -> list[dict[str, Any]]:
        """Returns the first messages of the conversation: system and user."""
        return agent_messages(self.task, self.style, self.format, self.device)

    async def __aenter__(self) -> Self:
        """Opens the work folder.

        Raises:
            WorkspaceLost: The work folder is lost; all methods that use it raise this too.
        """
        files = {"model.py": self.task.code, "SKILL.md": skill_text(self.format, self.device)}
        self._opened = self.sandbox.workspace(files, frozenset(files), self._command)
        self._folder = await self._opened.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._opened is not None
        self._folder = None
        return await self._opened.__aexit__(kind, error, trace)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Runs one tool call and returns its result.  A mistake of the player gives a result too."""
        assert self._folder is not None, "the work folder is not open"
        if name not in TOOL_NAMES:
            self.flags.add("unknown_tool")
            return f"error: there is no tool {name[:40]!r}"
        key = f"{name} {_canonical(arguments)}"
        self._seen[key] += 1
        if self._seen[key] >= _LOOP:
            self.flags.add("loop")
        result = await self._folder.call(name, arguments)
        if name in _CHANGING and not result.error and self._seen[key] == 1:
            self._seen = Counter({k: n for k, n in self._seen.items() if k.startswith(_CHANGING)})
        return result.text

    async def collect(self) -> dict[str, str]:
        """Returns the files of the solution in the folder."""
        assert self._folder is not None, "the work folder is not open"
        self.files = dict(solution_of(await self._folder.files(), self.format).files)
        return self.files

    async def finish(self) -> Verdict:
        """Judges the solution in the folder.

        Raises:
            SandboxFault: The sandbox failed twice.
            TaskError: The task cannot be run.
        """
        return await self.judge(await self.collect())

    async def judge(self, files: Mapping[str, str]) -> Verdict:
        """Judges the solution in ``files``, and keeps the best verdict of the trajectory.  A sandbox fault is retried
        once.

        Raises:
            SandboxFault: The sandbox failed twice.
            TaskError: The task cannot be run.
        """
        solution = solution_of(files, self.format)
        verdict = await self.sandbox.evaluate(self.task, solution, "quick")
        if verdict.status == "infra":
            verdict = await self.sandbox.evaluate(self.task, solution, "quick")
        if verdict.status == "infra":
            raise SandboxFault(verdict.message)
        if self.best is None or _merit(verdict) > _merit(self.best):
            self.best = verdict
        return verdict

    async def _command(self, name: str, argv: list[str], files: dict[str, str]) -> ToolResult:
        """Runs compile, verify or profile when the workspace's shell calls it."""
        verdict = await self.judge(files)
        return ToolResult(describe(verdict, name, self.style), failed(verdict, name))


def _merit(verdict: Verdict) -> tuple[float, float]:
    return float(verdict.reward or 0), verdict.speedup_compile or verdict.speedup_eager or 0.0


def _canonical(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(arguments, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return repr(sorted(arguments))
