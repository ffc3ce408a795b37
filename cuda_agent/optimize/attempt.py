"""One attempt of a search: a model tries, turn by turn, to write a fast solution of a task.

The attempt ends when a solution reaches the target speed-up, the budget is used up or the model gives up.  ``Attempt``
sends the conversation to the model, and ``SearchEnvironment`` answers the model's tool calls.  Tools run in the
sandbox: this process executes nothing that the model writes.  ``progress.Findings`` keeps all correct solutions."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cuda_agent.agent.chat_rollout import answers
from cuda_agent.agent.compaction import compacted, cut, size
from cuda_agent.agent.environment import Sandbox
from cuda_agent.agent.loop import MALFORMED, Calls, play, within
from cuda_agent.agent.progress import NO_TARGET, Find, Findings, SearchBudget, State, Tell, factor
from cuda_agent.agent.prompt import agent_messages
from cuda_agent.agent.tools import TOOLS, describe
from cuda_agent.errors import SandboxUnready
from cuda_agent.optimize.lessons import ASKED, Lesson, stated
from cuda_agent.optimize.profile_text import profile_lines
from cuda_agent.optimize.search_environment import SearchEnvironment, Terms
from cuda_agent.policy.chat import written
from cuda_agent.policy.chat_stream import CHARACTERS, Reply
from cuda_agent.policy.served import ContextTooLong, ServedModel, ServedModelError
from cuda_agent.sandbox.wire import ToolResult, Verdict
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from cuda_agent.tasks.task import Task

_CALLS = 32  # most tool calls of one turn
_NUDGES = 2  # reminders in a row for a model that stops before the target
_AGAIN = 8  # answers of a compact policy that stops before it has changed the solution from which it started
_STUCK = 6  # equal turns in a row that end an attempt
_LOSSES = 3  # lost workspaces, or faults of the sandbox in a row, that end an attempt
_LEAST_CONTEXT, _LEAST_ANSWER = 2048, 16  # tokens below which nothing is shortened
_BASELINES = 100  # most characters of the line about baselines
_CHARACTERS = (1.5, 6.0)  # bounds of characters per token: a server's count outside of them is not used

_LAST = """This is the last turn: no tool can be called any more, and the fastest correct solution so far is kept. Say
in a few sentences what makes it fast, what did not work, and what you would try next."""
_LESSON = "The search has ended, and no tool can be called any more. "
_LESSON_TOKENS = 2000  # most of the answer, thoughts included
_GO_ON = """{lead}: {state}. You have {turns} more turns. Go on with the tools; if you are sure
that nothing more can be gained, say so without calling a tool."""
_PARENT = """Your work folder holds a correct solution that an earlier attempt has written. The verdict on it:
{verdict}
Read it, then make it faster: change what limits it, or replace it by a better design."""
_REOPENED = {
    "role": "user",
    "content": "[The work folder was opened again as it was. Files must be read before they are changed.]",
}


def first_messages(task: Task, terms: Terms, baselines: str) -> list[dict[str, Any]]:
    messages = agent_messages(task, terms.style, terms.format, terms.device)
    if terms.style == "full":
        goal = "There is no target: make it as fast as you can." if terms.goal.is_none else ""
        if terms.target < NO_TARGET:
            goal = f"The target is {terms.target:g} times as fast as the faster of the two."
        if terms.until is not None:
            share = f"{terms.until:.0%} of what the device's limits allow; the command profile prints the share."
            goal = f"{goal} It is also enough to reach {share}" if goal else f"The target is {share}"
        said = [baselines, goal, f"You have {terms.turns} turns."]
        messages[-1]["content"] += "\n\n" + " ".join(filter(None, said))
    return messages


def _opening(files: Mapping[str, str]) -> list[list[dict[str, Any]]]:
    """Returns the tool calls of each of the first turns of a compact policy that starts from ``files``. They are those
    of its training: it writes and verifies a solution, and profiles it."""
    asked = [("Write", {"path": path, "content": text}) for path, text in sorted(files.items())]
    turns = [[*asked, ("Bash", {"command": "verify"})], [("Bash", {"command": "profile"})]]
    return [
        [{"id": f"call-{i}", "name": name, "arguments": arguments} for i, (name, arguments) in enumerate(turn)]
        for turn in turns
    ]


def least_tokens(task: Task, terms: Terms) -> int:
    """Returns an estimate of the fewest tokens that an attempt needs.  For the prompt style ``compact`` (short
    prompts for small models), these are the tokens of the first prompt.  For the style ``full``, these are the tokens
    of two turns, because no tools run in the last turn, and so at least one turn must come before it."""
    prompt = size(first_messages(task, terms, "x" * _BASELINES)) // CHARACTERS
    return prompt if terms.style == "compact" else sum(_two_turns(min(prompt, terms.context), terms.answer_tokens))


def _two_turns(prompt: int, answer: int) -> tuple[int, int]:
    """Returns (prompt tokens, sampled tokens) of two turns.  The second prompt repeats the first prompt and answer."""
    return 2 * prompt + answer, 2 * answer


@dataclass
class Attempt:
    """One attempt of a search.  ``baselines`` is the text that tells the model the times of eager mode and of
    ``torch.compile``.  ``lessons`` are those of earlier searches; None: the model is told none and asked for none."""

    number: int  # from 1 on
    task: Task
    model: ServedModel
    sandbox: Sandbox
    terms: Terms
    budget: SearchBudget  # of all attempts together
    findings: Findings  # of all attempts together
    watch: Tell  # receives the events
    baselines: str = ""
    state: State = field(default_factory=State)  # the state with which the attempt begins or resumes
    lessons: Sequence[Lesson] | None = None

    def __post_init__(self) -> None:
        terms = self.terms
        self.tell = partial(self.watch, attempt=self.number)
        self.context = terms.context
        self.ratio = float(CHARACTERS)  # characters per token
        self.nudges = 0
        self._calls: Calls = ()
        self._was_cut = False  # whether the turn of ``_calls`` was cut after them
        self._said = ("", 0)  # the last turn, and its repetitions in a row
        self._started = False  # whether ``start_from`` has begun the conversation
        facts = self.task, self.sandbox, terms, self.findings, self.number, self.tell
        before = "\n".join(str(message.get("content")) for message in self.state.messages)
        self.environment = SearchEnvironment(*facts, [one for one in self.lessons or () if one.text not in before])
        self.environment.files = dict(self.state.files)

    @property
    def lacking(self) -> str:
        """The limit that the first turn would exceed: a key of ``progress.ENDS``, or "" for none."""
        return self.budget.lacks(least_tokens(self.task, self.terms), 0)

    def start_from(self, parent: Find) -> None:
        """Begins this attempt with the files of ``parent``, a solution of an earlier attempt. In the style ``full`` the
        files are in the work folder, and the first message tells the verdict on them. In the style ``compact`` the
        first turns write, verify and profile them, without the model: policies that were trained with this style know
        no other beginning."""
        solution, verdict, compact = parent.solution, parent.strict or parent.quick, self.terms.style == "compact"
        files = {} if compact else dict(solution.files)
        self.tell("parent", digest=solution.digest, of=parent.attempt, files=files)
        ratio = f", {factor(verdict):.2f} times as fast" if factor(verdict) else ""
        self.tell("note", text=f"starts from a solution of attempt {parent.attempt}{ratio}")
        self.state.files, self.state.parent = files, solution.digest
        self.environment.files = dict(files)
        self.environment.best, self.environment.best_files = parent.quick, solution.files
        first = self._first_messages(verdict)
        if not compact:
            lines = [describe(verdict, "profile", "full"), *profile_lines(verdict), *verdict.advice]
            first[-1]["content"] += "\n\n" + _PARENT.format(verdict="\n".join(filter(None, lines)))
        for message in first:
            self._say(message)
        self._started = True

    async def run(self) -> str:
        """Runs the attempt.  Returns the key of ``progress.ENDS`` that says why the attempt ended: for example "server"
        if the model's server failed.

        Raises:
            TaskError: The task cannot be run.
            SandboxUnready: A required protection or the compiler is missing, and no solution was found before."""
        state = self.state
        if not self._started:
            for message in self._reopened if state.messages else self._first_messages():
                self._say(message)
        try:
            ended = await within(asyncio.timeout(self.budget.left), self._play(), "minutes")
        except ServedModelError as error:
            self.tell("note", text=str(error))
            ended = "server"
        except SandboxUnready as error:
            if not self.findings.by_digest:
                raise
            self.tell("note", text=str(error))  # what was found is kept
            ended = "infra"
        self.tell("ended", why=ended, summary=self._summary[:4000])
        return ended

    async def lesson(self, gained: float) -> str:
        """Returns the lesson that the model states about this attempt, whose best solution is ``gained`` times as fast
        as the baselines.  It stands in the model's last answer, or is asked for.  Returns "" if the model states none,
        or if there are no tokens or no money left to ask.  The limit on time does not count.

        Raises:
            ServedModelError: The model's server failed or refused."""
        if found := stated(self._summary):
            return found
        self._drop_unfinished_turn()
        answer = min(_LESSON_TOKENS, self.terms.answer_tokens)
        prompt = min(int(size(self.state.messages) / self.ratio), self.context)
        if replace(self.budget, seconds=None).lacks(prompt, answer):
            return ""
        asked = f"{_LESSON}The fastest solution is {gained:.2f} times as fast as the faster baseline.\n{ASKED}"
        return stated((await self._ask(answer, asked)).content)

    @property
    def _reopened(self) -> list[dict[str, Any]]:
        return [_REOPENED] if self.state.files else []

    @property
    def _summary(self) -> str:
        return next((m["content"] for m in reversed(self.state.messages) if m["role"] == "assistant"), "")

    def _first_messages(self, verdict: Verdict | None = None) -> list[dict[str, Any]]:
        """Returns the messages that begin the conversation.  ``verdict`` is one on the solution that it starts from."""
        messages = first_messages(self.task, self.terms, self.baselines)
        if found := self.environment.fitting_lessons(verdict):
            messages[-1]["content"] += f"\n\n{found}"
        return messages

    async def _play(self) -> str:
        """Plays the turns in a work folder, and returns why the attempt ended.  If the folder is lost, for example with
        its server, opens a new one with the files as they were after the last complete turn.  Returns "infra" after
        ``_LOSSES`` lost folders."""
        for _ in range(_LOSSES):
            try:
                async with self.environment:
                    ended = await play(self, self.environment, range(self.state.turn, self.terms.turns))
                    await self.environment.judge_rest()
                    return ended
            except WorkspaceLost as lost:
                self.tell("note", text=f"the work folder was lost: {lost}")
                self._drop_unfinished_turn()
                for message in self._reopened:
                    self._say(message)
        return "infra"

    async def speak(self, turn: int) -> Calls | str:
        terms = self.terms
        prompt = min(int(size(self.state.messages) / self.ratio), self.context)
        if lacking := self.budget.lacks(prompt, 0):
            return lacking
        short = self.budget.lacks(*_two_turns(prompt, terms.answer_tokens))  # this is the last turn
        last = terms.style == "full" and (turn + 1 == terms.turns or bool(short))
        self.tell("turn", turn=turn, last=last)
        self.environment.turn = turn
        if self.state.parent and terms.style == "compact" and turn + 1 < terms.turns:
            opening = _opening(self.findings.by_digest[self.state.parent].solution.files)
            if turn < len(opening):
                self._calls = calls = opening[turn]
                self._say({"role": "assistant", "content": "", "tool_calls": calls, "raw": written("", calls)})
                return calls
        try:
            closing = f"{_LAST} {ASKED}" if self.lessons is not None else _LAST
            most = max(_LEAST_ANSWER, self.budget.affordable(prompt)) if last else terms.answer_tokens
            reply = await self._ask(int(min(most, terms.answer_tokens)), closing if last else "")
            for again in range(1, _AGAIN + 1):
                if not self._stops_at_once(reply):
                    break
                self.tell("void", text="the model stops before it has tried anything: it is asked again")
                reply = await self._ask(terms.answer_tokens, again=again)
        except ContextTooLong:
            if terms.style == "compact":  # compact policies were not trained on shortened conversations
                return "tokens"
            raise
        self._say(reply.message(), **({"thought": reply.thought} if reply.thought else {}))
        self._calls, self._was_cut = (), False
        if reply.cut:
            self.tell("void", text=f"the answer was cut after {reply.tokens:,} tokens")
        if reply.refused:
            self.tell("note", text=reply.refused)
        if last:
            ended = "turns" if turn + 1 == terms.turns else short
        elif self._repeats(reply):
            ended = "stuck"
        elif reply.cut and (terms.style == "compact" or all(call["arguments"] is None for call in reply.calls)):
            said = f"[Your answer was cut after {reply.tokens} tokens; its calls do not count. Say less at a time.]"
            self._refuse(reply, said)
            ended = "tokens" if terms.style == "compact" else ""
        elif reply.calls:
            self.nudges, self._calls, self._was_cut = 0, reply.calls, reply.cut
            return reply.calls[:_CALLS]
        elif reply.malformed:
            self.nudges = 0
            self.tell("void", text="the answer holds a malformed tool call")
            self._refuse(reply, MALFORMED)
            ended = ""
        else:
            ended = self._without_calls(turn)
            ended = "refused" if ended == "answer" and reply.refused else ended
        if ended:
            if reply.calls and (last or ended == "stuck"):
                self._refuse(reply, "[not run: the attempt ended]")  # servers refuse a call without an answer
            self._finish_turn()
        return ended or ()

    def hear(self, results: Sequence[ToolResult], turn: int) -> str | None:
        longest = int(self.context * self.ratio / 8)
        texts = [cut(result.text, longest) for result in results]
        if over := len(self._calls) - len(results):
            self.tell("void", text=f"{over} calls more than {_CALLS} a turn are not run")
            texts += [f"error: at most {_CALLS} calls a turn"] * over
        for message in answers(self._calls, texts):
            self._say(message)
        if self._was_cut:
            self._say({"role": "user", "content": "[Your answer was cut. Only the calls above count.]"})
        self._finish_turn()
        if self.findings.reached:
            return "target" if self.findings.reached.attempt == self.number else "stopped"
        return "infra" if self.environment.faults >= _LOSSES else None

    async def _ask(self, answer: int, closing: str = "", again: int = 0) -> Reply:
        """Asks the model to go on.  With ``closing``, a last request, it shall call no tool.  ``again`` counts the
        earlier answers of this turn that do not count."""
        asked = [{"role": "user", "content": closing}] if closing else []
        while True:
            room = int(max(self.context - answer, self.context // 4) * self.ratio)
            if self.terms.style == "full":
                self.state.messages = compacted(self.state.messages, max(room - size(asked), 1000))
            sent = [*self.state.messages, *asked]
            lost = self.model.lost
            try:
                reply = await self.model.chat(
                    sent,
                    TOOLS,
                    answer,
                    self.terms.temperature,
                    self.terms.seed * 1000 + self.number * 100_000 + self.state.turn + again * 10_000,
                    listen=lambda what, text: self.tell(what, text=text),
                    call=not closing,
                )
            except ContextTooLong as error:
                if self.terms.style == "compact" and answer > _LEAST_ANSWER:
                    answer //= 2  # the conversation stays: there is still room for a shorter answer
                    continue
                if self.context <= _LEAST_CONTEXT or self.terms.style == "compact":
                    raise
                self.context = max(_LEAST_CONTEXT, int(min(self.context, size(sent) / self.ratio + answer) * 0.7))
                answer = min(answer, self.context // 2)
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

    def _stops_at_once(self, reply: Reply) -> bool:
        """Returns whether ``reply`` ends an attempt of a compact policy that has judged no solution but the one from
        which it started.  There is no way to remind such a policy, but it may answer otherwise the next time."""
        parent = self.state.parent
        if self.terms.style == "full" or not parent or reply.calls or reply.malformed or reply.cut or reply.refused:
            return False
        return self.environment.judged <= {parent} and not self.budget.lacks(0, 0)

    def _repeats(self, reply: Reply) -> bool:
        key = json.dumps([reply.content, [[call["name"], call["arguments"]] for call in reply.calls]])
        self._said = (key, self._said[1] + 1 if key == self._said[0] else 1)
        return self._said[1] >= _STUCK

    def _without_calls(self, turn: int) -> str:
        """Handles turn ``turn``, in which the model called no tool.  Reminds the model of the target, and returns
        "" to continue.  In two cases returns "answer" instead, which ends the attempt: the prompt style is compact, or
        ``_NUDGES`` reminders in a row were sent already."""
        if self.terms.style == "compact" or self.nudges >= _NUDGES:
            return "answer"
        self.nudges += 1
        called = any(message.get("tool_calls") for message in self.state.messages)
        if not self.findings.by_digest and self.model.form == "native" and not called:
            self.model.form = "text"  # many servers silently drop the tools
            self.tell("form", text="no tool was called: from now on calls are written as text")
        best = self.findings.best
        found = factor(best.strict or best.quick) if best else None
        state = f"the best so far is {found:.2f} times as fast" if found else "no correct solution so far"
        lead = "There may be more to gain" if self.terms.goal.is_none else "The target is not reached yet"
        self._say({"role": "user", "content": _GO_ON.format(lead=lead, state=state, turns=self.terms.turns - turn - 1)})
        return ""

    def _refuse(self, reply: Reply, why: str) -> None:
        calls = reply.calls or ([{"id": "call-0"}] if self.model.form == "raw" else [])
        for message in answers(calls, [why] * max(1, len(calls))):
            self._say(message)

    def _say(self, message: dict[str, Any], **facts: Any) -> None:
        self.state.messages.append(message)
        self.tell("message", message=message, **facts)

    def _finish_turn(self) -> None:
        files, before = self.environment.files, self.state.files
        changed = {path: text for path, text in files.items() if before.get(path) != text}
        self.tell("files", changed=changed, gone=sorted(before.keys() - files.keys()))
        self.state.files, self.state.turn = dict(files), self.state.turn + 1

    def _drop_unfinished_turn(self) -> None:
        """Removes the last turn if one of its calls has no result.  Restores the files of the last complete turn."""
        messages = self.state.messages
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
        asked = len(messages[last].get("tool_calls") or ()) if last < len(messages) else 0
        if len(messages) - last - 1 < asked:
            del messages[last:]
        self.environment.files = dict(self.state.files)
