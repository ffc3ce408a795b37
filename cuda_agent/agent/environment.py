"""Defines the environment of an episode: one task, a work folder, tools, and the judgement of the solution.

``async with KernelEnvironment(...) as environment`` opens the work folder. ``call`` runs one tool call. ``finish``
judges the solution in the folder and returns the verdict.

The player makes the tool calls. There are three kinds of players: a policy that samples token ids (``agent.loop``), a
model behind a chat API (``agent.chat_rollout`` and ``optimize.attempt``), and the policy of an external trainer
(package ``environments``)."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Literal, Self

from cuda_agent.agent.prompt import agent_messages
from cuda_agent.agent.skill import skill_text
from cuda_agent.agent.tools import TOOLS, Style, describe, describe_restored, failed, merit, solution_of
from cuda_agent.sandbox.client import Sandbox, WorkFolder
from cuda_agent.sandbox.wire import CommandResult, Format, Mode, Solution, ToolResult, Verdict
from cuda_agent.spans import add_phases, span
from cuda_agent.tasks.task import Task

_CHANGING = ("Write", "Edit", "MultiEdit", "NotebookEdit")  # after these, a repeated verify is not a loop
LOOP = 3  # the same call this many times counts as a loop


class SandboxFault(Exception):
    """The sandbox failed twice to judge one solution. The solution is not the cause.

    ``verdict`` is the result of the second try. Its status is ``infra`` (infrastructure fault)."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


class KernelEnvironment:
    """The environment of one episode.

    Attributes:
        files: The player's files (text by path), as ``collect`` last read them. A new work folder starts with these
            files.
        best: The best verdict of quick mode so far, or None. Quick is the judge's usual mode. Verdicts of other modes,
            such as strict, do not count.
        best_files: The files of the solution whose verdict is ``best``.
        flags: The bad patterns in the player's turns so far ("malformed_call", "unknown_tool", "loop").
        repeated: How many times the latest tool call has been made with the same arguments (for BashOutput: and the
            same result). The first call counts as 1. A call of an unknown tool or with unparsed arguments gives 0.
            Calls of Write, Edit, MultiEdit and NotebookEdit are counted from the start, calls of other tools from the
            latest change of the files. There are two signs of a change. One is a successful call of one of these four
            tools with new arguments. The other is that compile, verify or profile finds the files in a state in which
            none of these commands found them before, because Bash can change files, too.
        waiting: A function that takes no arguments and returns a context manager. ``judge`` enters it while it waits
            for a verdict. The agent loop uses it to suspend the episode's deadline. The default does nothing."""

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
        self.tools = [tool["function"]["name"] for tool in TOOLS]
        self.files: dict[str, str] = {}
        self.best: Verdict | None = None
        self.best_files: dict[str, str] = {}
        self.flags: set[str] = set()
        self.repeated = 0
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._given = {"model.py": task.code, "SKILL.md": skill_text(format, device)}
        self._seen: Counter[str] = Counter()
        self._commanded: set[int] = set()  # hashes of the files that commands found
        self._opened: AbstractAsyncContextManager[WorkFolder] | None = None
        self._folder: WorkFolder | None = None

    def messages(self) -> list[dict[str, Any]]:
        """Returns the first messages of the conversation: system and user."""
        return agent_messages(self.task, self.style, self.format, self.device)

    @property
    def solution(self) -> Solution:
        return solution_of(self.files, self.format)

    async def __aenter__(self) -> Self:
        """Opens the work folder. Methods that use the folder raise WorkspaceLost if the folder is lost."""
        self._opened = self.sandbox.workspace({**self.files, **self._given}, frozenset(self._given), self.command)
        self._folder = await self._opened.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        assert self._opened is not None
        self._folder = None
        return await self._opened.__aexit__(*raised)

    async def call(self, name: str, arguments: Mapping[str, Any] | None) -> ToolResult:
        """Runs the tool ``name`` and returns its result. ``arguments`` is None if the player's text could not be
        parsed. For an unknown tool or wrong arguments, the result is an error message.

        Raises:
            WorkspaceLost: The work folder is lost.
            SandboxFault, TaskError: The tool ran compile, verify or profile, and ``judge`` raised this exception."""
        assert self._folder is not None, "the work folder is not open"
        self.repeated = 0
        if name not in self.tools:
            self.flags.add("unknown_tool")
            known = f"; there are {', '.join(self.tools)}" if self.style == "full" else ""
            return ToolResult(f"error: there is no tool {name[:40]!r}{known}", error=True)
        if arguments is None:
            self.flags.add("malformed_call")
            return ToolResult("error: the arguments are no JSON object", error=True)
        key = f"{name} {_canonical(arguments)}"
        with span(f"tool {name}"):
            result = await self._folder.call(name, arguments)
        if name == "BashOutput":
            key += result.text  # to ask again is no loop if there is an answer
        self._seen[key] += 1  # after the call, in which ``command`` may reset the counts
        self.repeated = self._seen[key]
        if self.repeated >= LOOP:
            self.flags.add("loop")
        if name in _CHANGING and not result.error and self.repeated == 1:
            self._forget_calls()
        return result

    async def collect(self) -> Solution:
        """Reads the work folder into ``files``. Returns the solution that the files contain. Raises WorkspaceLost."""
        assert self._folder is not None, "the work folder is not open"
        found = await self._folder.files()
        self.files = {path: text for path, text in found.items() if path not in self._given}
        return self.solution

    async def finish(self) -> Verdict:
        """Judges the solution in the work folder and returns the verdict. Raises WorkspaceLost if the work folder is
        lost, and SandboxFault or TaskError as ``judge`` does."""
        return await self.judge(await self.collect())

    async def judge(self, solution: Solution, mode: Mode = "quick") -> Verdict:
        """Judges ``solution`` and returns the verdict. If the sandbox fails, tries once more. In quick mode, the
        verdict replaces ``self.best`` if it is better. The function ``merit`` defines which verdict is better.

        Raises:
            SandboxFault: The sandbox failed twice.
            TaskError: The task cannot be run."""
        for _ in range(2):
            with self.waiting(), span("evaluate", mode=mode) as facts:
                verdict = await self.sandbox.evaluate(self.task, solution, mode)
                facts["status"] = verdict.status
                if not verdict.cached:
                    add_phases(verdict.phases)
            if verdict.status != "infra":
                break
        else:
            raise SandboxFault(verdict)
        if mode == "quick" and (self.best is None or merit(verdict) > merit(self.best)):
            self.best, self.best_files = verdict, solution.files
        return verdict

    async def command(self, name: str, argv: list[str], files: dict[str, str]) -> CommandResult:
        """Runs the command ``name``, which the player called in the work folder's shell, and returns its result.

        The commands compile, verify and profile judge the solution. The command restore replaces the files of the
        solution by those of the best solution so far.

        Args:
            name: compile, verify, profile or restore.
            argv: The command's arguments, which are ignored.
            files: The files in the work folder (text by path).

        Raises:
            SandboxFault, TaskError: ``judge`` raised this exception."""
        if name == "restore":
            return self._restored(solution_of(files, self.format).files)
        if (found := hash(frozenset(files.items()))) not in self._commanded:
            self._commanded.add(found)
            self._forget_calls()
        before = self.best
        verdict = await self.judge(solution_of(files, self.format))
        return CommandResult(describe(verdict, name, self.style, before), failed(verdict, name))

    def _restored(self, files: dict[str, str]) -> CommandResult:
        """Returns the result of the command restore. ``files`` are those of the solution that is now in the folder."""
        best = self.best_files
        if self.best is None or self.best.status != "ok":
            return CommandResult(describe_restored(None, self.style), error=True)
        changes: dict[str, str | None] = {path: text for path, text in best.items() if files.get(path) != text}
        changes |= {path: None for path in files.keys() - best.keys()}
        return CommandResult(describe_restored(self.best, self.style), files=changes)

    def _forget_calls(self) -> None:
        self._seen = Counter({k: n for k, n in self._seen.items() if k.startswith(_CHANGING)})


def _canonical(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(arguments, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return repr(sorted(arguments))
