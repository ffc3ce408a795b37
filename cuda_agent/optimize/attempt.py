"""One attempt: a model behind a text interface tries to make one task fast, turn by turn, until target, budget or end.

The model runs on its server and every tool in the sandbox's workspace; none of their output is executed here.
``progress.Findings`` keeps the best correct solution, so that an attempt can be stopped at any time.  A solution whose
quick verdict reaches the target is judged strictly before it counts.

What it does not cover: training data (``agent.loop``), several attempts (``search``), and the display (``screen``).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cuda_agent.agent.compaction import compacted, cut, size
from cuda_agent.agent.environment import Sandbox, WorkFolder
from cuda_agent.agent.progress import Findings, SearchBudget, State, Tell, difference, factor
from cuda_agent.agent.prompt import agent_messages
from cuda_agent.agent.skill import skill_text
from cuda_agent.agent.tools import ALL_TOOLS, TOOLS, Style, describe, failed, solution_of, standing
from cuda_agent.policy.served import CHARACTERS, ContextTooLong, Reply, ServedModel, ServedModelError
from cuda_agent.sandbox.wire import Format, Mode, Solution, ToolResult, Verdict
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from cuda_agent.tasks.task import Task

Ended = Literal["target", "answer", "turns", "tokens", "minutes", "money", "stuck", "infra", "server", "stopped"]

_CALLS = 32  # of one turn
_NUDGES = 2  # reminders in a row for a model that stops before the target
_STUCK = 6  # equal turns in a row
_LOSSES = 3  # lost workspaces, or infrastructure faults of the judge in a row
_LEAST_CONTEXT, _LEAST_ANSWER = 2048, 16  # tokens
_BASELINES = 100  # most characters of the line about baselines
_CHARACTERS = (1.5, 6.0)  # bounds of characters per token: a server's count outside of them is not used
_CHANGING = ("Write", "Edit", "MultiEdit", "Bash", "KillBash")

_LAST = """This is the last turn: no tool can be called any more, and the fastest correct solution so far is kept. Say
in a few sentences what makes it fast, what did not work, and what you would try next."""
_GO_ON = """The target is not reached yet: {state}. You have {turns} more turns. Go on with the tools; if you are sure
that nothing more can be gained, say so without calling a tool."""
_REOPENED = "[The work folder was opened again as it was. Files must be read before they are changed.]"


@dataclass(frozen=True)
class Terms:
    """The terms of one attempt.  Token counts are the server's."""

    format: Format = "plan"
    device: Literal["cpu", "cuda"] = "cpu"
    style: Style = "full"
    turns: int = 60
    context: int = 65536  # tokens of the conversation with its answer
    answer_tokens: int = 8192  # of one turn
    target: float = 1.05  # speed-up over the faster of eager and torch.compile
    temperature: float = 1.0
    seed: int = 0


def first_messages(task: Task, terms: Terms, baselines: str) -> list[dict[str, Any]]:
    """The first messages of a conversation."""
    messages = agent_messages(task, terms.style, terms.format, terms.device)
    if terms.style == "full":
        goal = f"The target is {terms.target:g} times as fast as the faster of the two. You have {terms.turns} turns."
        messages[-1]["content"] += "\n\n" + " ".join(filter(None, [baselines, goal]))
    return messages


def least_tokens(task: Task, terms: Terms) -> int:
    """The approximate number of tokens for two turns.  With fewer the first turn would be the last, in which no tool
    runs."""
    prompt = size(first_messages(task, terms, "x" * _BASELINES)) // CHARACTERS
    return prompt if terms.style == "compact" else sum(_two_turns(min(prompt, terms.context), terms.answer_tokens))


def _two_turns(prompt: int, answer: int) -> tuple[int, int]:
    """Most tokens read and written in a turn and in a last one after it."""
    return 2 * prompt + answer, 2 * answer


class Attempt:
    """One running attempt.  ``baselines``: a line about them for the model."""

    def __init__(
        self,
        number: int,
        task: Task,
        model: ServedModel,
        sandbox: Sandbox,
        terms: Terms,
        budget: SearchBudget,
        findings: Findings,
        tell: Tell,
        baselines: str = "",
        state: State | None = None,
    ) -> None:
        self.number, self.task, self.model, self.sandbox, self.terms = number, task, model, sandbox, terms
        self.budget, self.findings, self.baselines = budget, findings, baselines
        self._tell = tell
        self.tools = TOOLS if terms.style == "compact" else ALL_TOOLS
        self.names = [tool["function"]["name"] for tool in self.tools]
        self.state = state or State()
        self.context = terms.context
        self.ratio = float(CHARACTERS)  # characters per token
        self.faults = self.nudges = 0
        self.seen: Counter[str] = Counter()
        self.said = ("", 0)  # the last turn, and its repetitions in a row
        self.judged: set[str] = set()
        self._files_now = dict(self.state.files)  # files of the folder, without the given ones

    def tell(self, kind: str, **facts: Any) -> None:
        self._tell(kind, attempt=self.number, **facts)

    async def run(self) -> Ended:
        """Runs the attempt and returns why it ended.  Failures of the model's server are a normal end.

        Raises:
            TaskError: The task cannot be run.
            SandboxUnready: A required wall or the compiler is missing.
        """
        state = self.state
        ended: Ended
        if not state.messages:
            for message in first_messages(self.task, self.terms, self.baselines):
                self._say(message)
        else:
            self._say({"role": "user", "content": _REOPENED})
        try:
            ended = await self._with_time(self._in_workspaces())
        except ServedModelError as error:
            self.tell("note", text=str(error))
            ended = "server"
        summary = next((m["content"] for m in reversed(state.messages) if m["role"] == "assistant"), "")
        state.ended = ended
        self.tell("ended", why=ended, summary=summary[:4000])
        return ended

    async def _with_time(self, work: Any) -> Ended:
        limit = asyncio.timeout(self.budget.left)
        try:
            async with limit:
                ended: Ended = await work
                return ended
        except TimeoutError:
            if not limit.expired():
                raise
            return "minutes"

    async def _in_workspaces(self) -> Ended:
        """Runs the turns in a work folder; if it is lost, in a new one with the same files."""
        given = {"model.py": self.task.code, "SKILL.md": skill_text(self.terms.format, self.terms.device)}
        for _ in range(_LOSSES):
            try:
                files = {**self.state.files, **given}
                async with self.sandbox.workspace(files, frozenset(given), self._command) as workspace:
                    ended = await self._turns(workspace)
                    await self._judge_what_is_left()
                    return ended
            except WorkspaceLost as lost:
                self.tell("note", text=f"the work folder was lost: {lost}")
                self._drop_unfinished_turn()
                self._say({"role": "user", "content": _REOPENED})
        return "infra"

    # ------------------------------------------------------------------------------------------------------------ turns

    async def _turns(self, workspace: WorkFolder) -> Ended:
        terms, state = self.terms, self.state
        while state.turn < terms.turns:
            answer = terms.answer_tokens
            prompt = min(int(size(state.messages) / self.ratio), self.context)
            if lacking := self.budget.lacks(prompt, 0):
                return lacking  # type: ignore[return-value]
            short = self.budget.lacks(*_two_turns(prompt, answer))  # without tokens for two more turns this is the last
            last = terms.style == "full" and (state.turn + 1 == terms.turns or bool(short))
            self.tell("turn", turn=state.turn, last=last)
            try:
                reply = await self._ask(answer, last)
            except ContextTooLong:
                if terms.style == "compact":  # compact policies were not trained on shortened conversations
                    return "tokens"
                raise
            self._say(reply.message(), **({"thought": reply.thought} if reply.thought else {}))
            if reply.cut:
                self.tell("void", text=f"the answer was cut after {reply.tokens:,} tokens")
            if last:
                self._finish_turn()
                return "turns" if state.turn == terms.turns else short  # type: ignore[return-value]
            ended = await self._react(workspace, reply)
            self._finish_turn()
            if self.findings.reached:
                return "target" if self.findings.reached.attempt == self.number else "stopped"
            if ended:
                return ended
        return "turns"

    async def _ask(self, answer: int, last: bool) -> Reply:
        """The model's next turn, after shortening the conversation if needed."""
        asked = [{"role": "user", "content": _LAST}] if last else []
        while True:
            room = int(max(self.context - answer, self.context // 4) * self.ratio)
            if self.terms.style == "full":
                self.state.messages = compacted(self.state.messages, max(room - size(asked), 1000))
            sent = [*self.state.messages, *asked]
            lost = self.model.lost
            try:
                reply = await self.model.chat(
                    sent,
                    self.tools,
                    answer,
                    self.terms.temperature,
                    self.terms.seed * 1000 + self.number * 100_000 + self.state.turn,
                    listen=lambda what, text: self.tell(what, text=text),
                    call=not last,
                )
            except ContextTooLong as error:
                if self.terms.style == "compact" and answer > _LEAST_ANSWER:
                    answer //= 2  # the conversation stays: there is still room for a shorter answer
                    continue
                if self.context <= _LEAST_CONTEXT or self.terms.style == "compact":
                    raise
                self.context = max(_LEAST_CONTEXT, int(min(self.context, size(sent) / self.ratio + answer) * 0.7))
                self.tell("note", text=f"{error}: the conversation is cut to {self.context} tokens")
                continue
            finally:
                if self.model.lost > lost:
                    self.budget.pay(0, self.model.lost - lost, True)
            self.budget.pay(reply.prompt_tokens, reply.tokens, reply.estimated)
            self.tell("spent", **self.budget.facts())
            if not reply.estimated and reply.prompt_tokens:
                low, high = _CHARACTERS
                self.ratio = min(max(size(sent) / reply.prompt_tokens, low), high)
            return reply

    async def _react(self, workspace: WorkFolder, reply: Reply) -> Ended | None:
        """Runs the model's tool calls and appends their results."""
        before = self.said
        key = json.dumps([reply.content, [[c["name"], c["arguments"]] for c in reply.calls]])
        self.said = (key, before[1] + 1 if key == before[0] else 1)
        if self.said[1] >= _STUCK:
            return "stuck"
        if reply.cut:
            said = f"[Your answer was cut after {reply.tokens} tokens; its calls do not count. Say less at a time.]"
            self._refuse(reply, said)
            return "tokens" if self.terms.style == "compact" else None
        if not reply.calls and not reply.malformed:
            return self._without_calls()
        self.nudges = 0
        if not reply.calls:
            self.tell("void", text="the answer holds a malformed tool call")
            self._say(self._result(None, "error: malformed tool call"))
        for index, call in enumerate(reply.calls):
            if self.findings.reached:
                result = "[not run: the target is reached]"
            elif index < _CALLS:
                self.tell("tool", name=call["name"], arguments=call["arguments"])
                found = await self._tool(workspace, call)
                self.tell("result", error=_first_line(found.text) if found.error else "")
                result = found.text
            else:
                result = f"error: at most {_CALLS} calls a turn"
                if index == _CALLS:
                    self.tell("void", text=f"{len(reply.calls) - _CALLS} calls more than {_CALLS} a turn are not run")
            self._say(self._result(call, result))
        if self.faults >= _LOSSES:
            return "infra"
        return None

    def _without_calls(self) -> Ended | None:
        if self.terms.style == "compact" or self.nudges >= _NUDGES:
            return "answer"
        self.nudges += 1
        if not self.findings.by_digest and self.model.form == "native" and not self._called_before():
            self.model.form = "text"  # many servers silently drop the tools
            self.tell("form", text="no tool was called: from now on calls are written as text")
        best = self.findings.best
        found = factor(best.strict or best.quick) if best else None
        state = f"the best so far is {found:.2f} times as fast" if found else "no correct solution so far"
        self._say({"role": "user", "content": _GO_ON.format(state=state, turns=self.terms.turns - self.state.turn - 1)})
        return None

    def _called_before(self) -> bool:
        return any(message.get("tool_calls") for message in self.state.messages)

    def _refuse(self, reply: Reply, why: str) -> None:
        if reply.calls:
            for call in reply.calls:
                self._say(self._result(call, why))
        else:
            self._say({"role": "user", "content": why})

    # ------------------------------------------------------------------------------------------------------------ tools

    async def _tool(self, workspace: WorkFolder, call: Mapping[str, Any]) -> ToolResult:
        name, arguments = call["name"], call["arguments"]
        if name not in self.names:
            return ToolResult(f"error: there is no tool {name[:40]!r}; there are {', '.join(self.names)}", error=True)
        if arguments is None:
            return ToolResult("error: the arguments are no JSON object", error=True)
        key = f"{name} {json.dumps(arguments, sort_keys=True)}"
        self.seen[key] += 1
        result = await workspace.call(name, arguments)
        text = cut(result.text, int(self.context * self.ratio / 8))
        if name in _CHANGING:
            await self._look(workspace)
        elif self.seen[key] > 2:
            text += "\n[the same call as before]"
        return ToolResult(text, result.error)

    async def _look(self, workspace: WorkFolder) -> None:
        """Records the changes in the folder."""
        files = {path: text for path, text in (await workspace.files()).items() if path not in ("model.py", "SKILL.md")}
        before = self._files_now
        for path in sorted(files.keys() | before.keys()):
            old, new = before.get(path, ""), files.get(path, "")
            if old != new:
                self.seen.clear()
                self.tell("diff", **difference(path, old, new))
        self._files_now = files

    async def _command(self, name: str, argv: list[str], files: dict[str, str]) -> ToolResult:
        """Runs compile, verify or profile when the workspace's shell calls it."""
        terms = self.terms
        solution = solution_of(files, terms.format)
        verdict = await self._judge(solution, name)
        text = describe(verdict, name, terms.style)
        if verdict.status == "infra":
            return ToolResult("the sandbox failed, which is not the solution's fault: try again", error=True)
        reached = (factor(verdict) or 0.0) >= terms.target
        if terms.style == "full" and name == "profile" and verdict.status == "ok":
            text = "\n".join(filter(None, [text, standing(verdict), *verdict.advice]))
        if reached and not self.findings.reached:
            strict = await self._judge(solution, name, "strict")
            found = self.findings.by_digest.get(solution.digest)
            if found and (factor(strict) or 0.0) >= terms.target:
                self.findings.reached = found
            if terms.style == "full":
                ratio = factor(strict)
                said = f"{ratio:.2f} times as fast as the faster of both" if ratio else strict.status
                text += f"\nmeasured strictly: {said}" + (f": {strict.message}" if strict.message else "")
                text += "" if self.findings.reached else f"; the target is {terms.target:g}"
        return ToolResult(text, failed(verdict, name))

    async def _judge(self, solution: Solution, command: str, mode: Mode = "quick") -> Verdict:
        verdict = await self.sandbox.evaluate(self.task, solution, mode)
        if verdict.status == "infra":
            verdict = await self.sandbox.evaluate(self.task, solution, mode)
        self.faults = self.faults + 1 if verdict.status == "infra" else 0
        self.judged.add(solution.digest)
        if mode == "quick":
            self.findings.add(solution, verdict, self.number, self.state.turn)
        elif found := self.findings.by_digest.get(solution.digest):
            found.strict = verdict
        self.tell("verdict", command=command, verdict=verdict.to_json(), files=solution.files, factor=factor(verdict))
        return verdict

    async def _judge_what_is_left(self) -> None:
        """Judges the work folder if its last state was not judged."""
        solution = solution_of(self._files_now, self.terms.format)
        if solution.files and solution.digest not in self.judged and not self.findings.reached:
            await self._judge(solution, "end")

    # ------------------------------------------------------------------------------------------------------------ books

    def _say(self, message: dict[str, Any], **facts: Any) -> None:
        self.state.messages.append(message)
        self.tell("message", message=message, **facts)

    def _result(self, call: Mapping[str, Any] | None, text: str) -> dict[str, Any]:
        if call is None and self.model.form != "raw":
            return {"role": "user", "content": text}
        return {"role": "tool", "tool_call_id": call["id"] if call else "call-0", "content": text}

    def _finish_turn(self) -> None:
        files, before = self._files_now, self.state.files
        changed = {path: text for path, text in files.items() if before.get(path) != text}
        self.tell("files", changed=changed, gone=sorted(before.keys() - files.keys()))
        self.state.files, self.state.turn = dict(files), self.state.turn + 1

    def _drop_unfinished_turn(self) -> None:
        """Removes an assistant's message whose calls were not all answered."""
        messages = self.state.messages
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
        asked = len(messages[last].get("tool_calls") or ()) if last < len(messages) else 0
        if len(messages) - last - 1 < asked:
            del messages[last:]
        self._files_now = dict(self.state.files)


def _first_line(text: str) -> str:
    """The first informative line of an error; never empty."""
    said = (line.strip() for line in text.splitlines())
    return next((line.removeprefix("error: ")[:300] for line in said if line), "failed")
