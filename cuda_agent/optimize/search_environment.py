"""Answers the tool calls of one attempt of a search (``attempt.Attempt``), and holds the attempt's settings, ``Terms``.

Tools run in the sandbox: this process executes nothing that the model writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cuda_agent.agent.environment import LOOP, KernelEnvironment, Sandbox, SandboxFault
from cuda_agent.agent.progress import Findings, Goal, Tell, difference, factor
from cuda_agent.agent.tools import Style, describe, failed, limiter, merit, solution_of
from cuda_agent.optimize.lessons import Lesson, choose, quoted
from cuda_agent.optimize.profile_text import profile_lines
from cuda_agent.sandbox.wire import CommandResult, Format, Mode, Solution, ToolResult, Verdict
from cuda_agent.tasks.task import Task

_CHANGING = ("Write", "Edit", "MultiEdit", "NotebookEdit", "Bash", "KillBash")


@dataclass(frozen=True)
class Terms:
    """The settings of one attempt.  The limits on tokens refer to the token counts of the model's server."""

    format: Format = "plan"
    device: Literal["cpu", "cuda"] = "cpu"
    style: Style = "full"
    turns: int = 60  #: maximum number of turns
    context: int = 65536  #: maximum number of tokens of the conversation and the answer together
    answer_tokens: int = 8192  #: maximum number of tokens of one answer
    target: float = 1.05  #: speed-up over the faster of eager and torch.compile
    until: float | None = None  #: share of the speed of light at which the search stops, too; None: no share
    temperature: float = 1.0
    seed: int = 0

    @property
    def goal(self) -> Goal:
        return Goal(self.target, self.until)


class SearchEnvironment(KernelEnvironment):
    """The environment of attempt number ``attempt``: it runs the model's tool calls, and reports events through
    ``tell``.  The model's commands, such as "verify", judge its solution in quick mode, the usual mode.  If the
    solution reaches the target, the command also judges it in strict mode, which is slower and more thorough.
    ``lessons`` are those of earlier searches: the command profile tells fitting ones.  ``judged`` are the digests of
    the solutions that were judged.  ``faults`` counts the failures of the sandbox since its last successful
    judgement."""

    def __init__(
        self,
        task: Task,
        sandbox: Sandbox,
        terms: Terms,
        findings: Findings,
        attempt: int,
        tell: Tell,
        lessons: Sequence[Lesson] = (),
    ) -> None:
        super().__init__(task, sandbox, terms.format, terms.device, terms.style)
        self.terms, self.findings, self.attempt, self.tell = terms, findings, attempt, tell
        self.turn = self.faults = 0
        self._lessons, self._told = lessons, list[Lesson]()
        self.judged: set[str] = set()
        mine = [find for find in findings.by_digest.values() if find.attempt == attempt]  # before a resume
        if earlier := max(mine, key=lambda find: merit(find.quick), default=None):
            self.best, self.best_files = earlier.quick, earlier.solution.files

    async def call(self, name: str, arguments: Mapping[str, Any] | None) -> ToolResult:
        if self.findings.reached:
            return ToolResult("[not run: the target is reached]")
        self.tell("tool", name=name, arguments=arguments)
        result = await super().call(name, arguments)
        if name in _CHANGING:
            await self._tell_changes()
        elif self.repeated >= LOOP:
            result.text += "\n[the same call as before]"
        self.tell("result", error=_first_line(result.text) if result.error else "")
        return result

    async def _tell_changes(self) -> None:
        before = self.files
        await self.collect()
        for path in sorted(self.files.keys() | before.keys()):
            old, new = before.get(path, ""), self.files.get(path, "")
            if old != new:
                self._seen.clear()
                self.tell("diff", **difference(path, old, new))

    async def command(self, name: str, argv: list[str], files: dict[str, str]) -> CommandResult:
        if name == "restore":
            return await super().command(name, argv, files)
        terms, solution, before = self.terms, solution_of(files, self.format), self.best
        verdict = await self.judge(solution, command=name)
        text = describe(verdict, name, terms.style, before)
        if verdict.status == "infra":
            return CommandResult("the sandbox failed, which is not the solution's fault: try again", error=True)
        if terms.style == "full" and name == "profile" and verdict.status == "ok":
            more = [text, *profile_lines(verdict), *verdict.advice, self.fitting_lessons(verdict)]
            text = "\n".join(filter(None, more))
        if terms.goal.reached(verdict) and not self.findings.reached:
            strict = await self.judge(solution, "strict", name)
            ratio = factor(strict)
            if terms.goal.reached(strict):
                self.findings.reached = self.findings.by_digest.get(solution.digest)
            if terms.style == "full":
                said = f"{ratio:.2f} times as fast as the faster of both" if ratio else strict.status
                text += f"\nmeasured strictly: {said}" + (f": {strict.message}" if strict.message else "")
                text += "" if self.findings.reached else f"; {terms.goal} is not reached"
        return CommandResult(text, failed(verdict, name))

    async def judge(self, solution: Solution, mode: Mode = "quick", command: str = "end") -> Verdict:
        """Judges ``solution`` and reports the verdict through ``tell``.  ``command`` names the command that needs the
        verdict, such as "verify", or is "end" at the end of the attempt.  If the sandbox fails, the verdict's status is
        ``infra``.  Raises TaskError if the task cannot be run."""
        try:
            verdict = await super().judge(solution, mode)
            self.faults = 0
        except SandboxFault as fault:
            verdict = fault.verdict
            self.faults += 1
        self.judged.add(solution.digest)
        self.findings.note(solution, verdict, self.attempt, self.turn)
        self.tell("verdict", command=command, verdict=verdict.to_json(), files=solution.files, factor=factor(verdict))
        return verdict

    def fitting_lessons(self, verdict: Verdict | None = None) -> str:
        """Returns lessons of earlier searches that fit the task and were not told yet, as a part of a prompt; "" if
        there are none. ``verdict`` is one on a solution of the task: it says what limits the task."""
        found = choose(self._lessons, self.task.ops, limiter(verdict)[0] if verdict else "", self._told)
        if found:
            self._told += found
            self.tell("note", text=f"lessons of earlier searches that the model is told: {len(found)}")
        return quoted(found)

    async def judge_rest(self) -> None:
        """Judges the solution in the work folder, unless it was judged before or the target is reached."""
        if self.solution.files and self.solution.digest not in self.judged and not self.findings.reached:
            await self.judge(self.solution)


def _first_line(text: str) -> str:
    said = (line.strip() for line in text.splitlines())
    return next((line.removeprefix("error: ")[:300] for line in said if line), "failed")
