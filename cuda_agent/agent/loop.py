"""The agent loop: one policy on one task, token ids in and token ids out, with its reward.

``run_episode`` is the game with tools in a work folder, ``run_single`` the game of one answer, ``run_many`` plays
many, freely or in lockstep.  An episode is one growing list of ids: what the policy sampled is appended as it is
(mask 1), prompt and tool results are encoded once (mask 0); text is never tokenized again.  A budget used up (turns,
tokens) ends an episode and its final workspace is judged; a fault of ours or the deadline leaves it without a reward.

Not covered: models behind a text interface, whose episodes are no training data; running tools (``sandbox.workspace``);
judging (``sandbox.client``).
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cuda_agent.agent.prompt import agent_messages, one_shot_messages, parse_answer
from cuda_agent.agent.skill import skill_text
from cuda_agent.agent.tools import TOOL_NAMES, TOOLS, Style, describe, failed, solution_of
from cuda_agent.policy.chat import Chat, ToolCall
from cuda_agent.policy.engine import Completion, Engine, SamplingParams
from cuda_agent.policy.episode import Episode
from cuda_agent.sandbox.wire import Lane, Mode, Solution, TaskError, ToolResult, Verdict
from cuda_agent.sandbox.workspace import Commands, WorkspaceLost
from cuda_agent.tasks.task import Task

Ended = Literal["answer", "turns", "tokens", "deadline", "infra"]
_CHANGING = ("Write", "Edit", "MultiEdit")  # after one of these, verifying once more is no loop
_LOOP = 3  # the same call with the same arguments this often is one


@dataclass(frozen=True)
class Settings:
    """Budgets and form of an episode; token budgets count tokens of the policy's tokenizer."""

    turns: int
    turn_tokens: int  # sampled in one turn
    tool_tokens: int  # of one tool result; the middle is cut
    context: int  # of the whole episode
    deadline_seconds: float
    temperature: float = 1.0
    lane: Lane = "plan"
    style: Style = "full"
    device: Literal["cpu", "cuda"] = "cpu"


class WorkFolder(Protocol):
    """An open workspace, here or on a server."""

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult: ...

    async def files(self) -> dict[str, str]: ...


class Sandbox(Protocol):
    """What the loop needs of the sandbox's client."""

    async def evaluate(self, task: Task, solution: Solution, mode: Mode = "quick") -> Verdict: ...

    def workspace(
        self, files: dict[str, str], protected: frozenset[str], commands: Commands
    ) -> AbstractAsyncContextManager[WorkFolder]: ...


async def run_episode(
    task: Task, engine: Engine, chat: Chat, sandbox: Sandbox, settings: Settings, seed: int, episode_id: str
) -> Episode:
    """The game with tools.  ``seed`` decides, with the turn's number, what is sampled."""
    play = Play("agent", task, engine, chat, sandbox, settings, seed, episode_id)
    return await play.run(play.with_tools)


async def run_single(
    task: Task, engine: Engine, chat: Chat, sandbox: Sandbox, settings: Settings, seed: int, episode_id: str
) -> Episode:
    """The game of one answer: its fenced files are the solution."""
    play = Play("single", task, engine, chat, sandbox, settings, seed, episode_id)
    return await play.run(play.with_one_answer)


class _Infra(Exception):
    """The sandbox failed twice: nobody's fault but ours."""


class Play:
    """One episode under way."""

    def __init__(
        self,
        kind: Literal["single", "agent"],
        task: Task,
        engine: Engine,
        chat: Chat,
        sandbox: Sandbox,
        settings: Settings,
        seed: int,
        episode_id: str,
    ) -> None:
        self.kind, self.task, self.engine, self.chat, self.sandbox = kind, task, engine, chat, sandbox
        self.settings, self.seed, self.id = settings, seed, episode_id
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}
        self.best: Verdict | None = None
        self.flags: set[str] = set()
        self.seen: Counter[str] = Counter()

    async def run(self, game: Callable[[], Awaitable[Ended]]) -> Episode:
        """Plays ``game``, judges what it leaves in ``files``, and keeps the books of what went wrong on our side."""
        verdict: Verdict | None = None
        limit = asyncio.timeout(None if _ROUND.get() else self.settings.deadline_seconds)
        ended: Ended
        try:
            async with limit:
                ended = await game()
                verdict = await self.judge(self.files)
        except TimeoutError:
            if not limit.expired():
                raise
            ended = "deadline"
        except (_Infra, WorkspaceLost, TaskError) as error:
            ended = "infra"
            self.messages.append({"role": "tool", "content": f"[ended by a fault of ours: {error}]"})
        return Episode(
            id=self.id,
            task=self.task.name,
            kind=self.kind,
            ids=self.ids,
            mask=self.mask,
            logprobs=self.logprobs,
            versions=self.versions,
            turns=self.turns,
            reward=None if verdict is None or verdict.reward is None else float(verdict.reward),
            ended=ended,
            verdict=verdict.to_json() if verdict else None,
            best=self.best.to_json() if self.best else None,
            files=self.files,
            messages=self.messages,
            flags=sorted(self.flags),
        )

    # -------------------------------------------------------------------------------------------------------- the games

    async def with_one_answer(self) -> Ended:
        settings = self.settings
        self.messages = one_shot_messages(self.task, settings.style, settings.lane, settings.device)
        self._observe(self.chat.prompt_ids(self.messages), 0)
        completion = await self._sample(0)
        if completion is None:
            return "tokens"
        text, _, _ = self.chat.parse(completion.ids)
        self.messages.append({"role": "assistant", "content": text})
        self.files = dict(solution_of(parse_answer(text), settings.lane).files)
        return "answer" if completion.finish == "stop" else "tokens"

    async def with_tools(self) -> Ended:
        settings = self.settings
        self.messages = agent_messages(self.task, settings.style, settings.lane, settings.device)
        self._observe(self.chat.prompt_ids(self.messages, TOOLS), 0)
        files = {"model.py": self.task.code, "SKILL.md": skill_text(settings.lane, settings.device)}
        async with self.sandbox.workspace(files, frozenset(files), self._command) as workspace:
            ended = await self._take_turns(workspace)
            self.files = dict(solution_of(await workspace.files(), settings.lane).files)
        return ended

    async def _take_turns(self, workspace: WorkFolder) -> Ended:
        for turn in range(self.settings.turns):
            completion = await self._sample(turn)
            if completion is None:
                return "tokens"
            text, calls, malformed = self.chat.parse(completion.ids, TOOLS)
            asked = [{"name": call.name, "arguments": call.arguments} for call in calls]
            self.messages.append({"role": "assistant", "content": text, "tool_calls": asked})
            if malformed:
                self.flags.add("malformed_call")
            if completion.finish == "length":
                return "tokens"
            if not calls and not malformed:
                return "answer"
            results = [await self._tool(workspace, call) for call in calls] or ["error: malformed tool call"]
            self.messages += [{"role": "tool", "content": result} for result in results]
            if turn + 1 < self.settings.turns:
                delta = self.chat.delta_ids(results, closed=completion.ids[-1] == self.chat.end_id)
                if len(self.ids) + len(delta) >= self.settings.context:
                    return "tokens"
                self._observe(delta, turn + 1)
        return "turns"

    # ----------------------------------------------------------------------------------------------------------- tokens

    def _observe(self, ids: Sequence[int], turn: int) -> None:
        """Tokens that the policy did not choose."""
        self._append(ids, 0, [0.0] * len(ids), -1, turn)

    async def _sample(self, turn: int) -> Completion | None:
        """The policy's next turn; ``None`` when there is no room for a token."""
        room = min(self.settings.turn_tokens, self.settings.context - len(self.ids))
        if room <= 0:
            return None
        params = SamplingParams(room, _seed(self.seed, turn), self.settings.temperature, self.chat.stop_ids, self.id)
        if current := _ROUND.get():
            await current[0].turn(current[1])
        completion = await self.engine.generate(tuple(self.ids), params)
        if not 0 < len(completion.ids) <= room or len(completion.logprobs) != len(completion.ids):
            raise ValueError(
                f"the engine gave {len(completion.ids)} tokens and {len(completion.logprobs)} log-probabilities"
            )
        self._append(completion.ids, 1, completion.logprobs, completion.version, turn)
        return completion

    def _append(self, ids: Sequence[int], mask: int, logprobs: Sequence[float], version: int, turn: int) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.versions += [version] * len(ids)
        self.turns += [turn] * len(ids)

    # ----------------------------------------------------------------------------------------------- tools and verdicts

    async def _tool(self, workspace: WorkFolder, call: ToolCall) -> str:
        if call.name not in TOOL_NAMES:
            self.flags.add("unknown_tool")
            return f"error: there is no tool {call.name[:40]!r}"
        key = f"{call.name} {_canonical(call.arguments)}"
        self.seen[key] += 1
        if self.seen[key] >= _LOOP:
            self.flags.add("loop")
        result = await workspace.call(call.name, call.arguments)
        if call.name in _CHANGING and not result.error and self.seen[key] == 1:
            self.seen = Counter({k: n for k, n in self.seen.items() if k.startswith(_CHANGING)})
        return self._cut(result.text)

    def _cut(self, text: str) -> str:
        """At most about ``tool_tokens`` tokens: the middle goes."""
        tokenizer, limit = self.chat.tokenizer, self.settings.tool_tokens
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text
        head, tail = tokenizer.decode(ids[: limit // 2]), tokenizer.decode(ids[len(ids) - limit // 2 :])
        return f"{head}\n...\n{tail}"

    async def _command(self, name: str, argv: list[str], files: dict[str, str]) -> ToolResult:
        """compile, verify and profile, as the workspace's shell calls them."""
        verdict = await self.judge(files)
        return ToolResult(describe(verdict, name, self.settings.style), failed(verdict, name))

    async def judge(self, files: Mapping[str, str]) -> Verdict:
        """The verdict of the solution in ``files``; remembers the best of the trajectory.  A fault of the sandbox is
        tried again once."""
        solution = solution_of(files, self.settings.lane)
        verdict = await self.sandbox.evaluate(self.task, solution, "quick")
        if verdict.status == "infra":
            verdict = await self.sandbox.evaluate(self.task, solution, "quick")
        if verdict.status == "infra":
            raise _Infra(verdict.message)
        if self.best is None or _merit(verdict) > _merit(self.best):
            self.best = verdict
        return verdict


def _merit(verdict: Verdict) -> tuple[float, float]:
    return float(verdict.reward or 0), verdict.speedup_compile or verdict.speedup_eager or 0.0


def _seed(seed: int, turn: int) -> int:
    """63 bits for one turn of one episode."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:8], "big") >> 1


def _canonical(arguments: Mapping[str, Any]) -> str:
    try:
        return json.dumps(arguments, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return repr(sorted(arguments))


# --------------------------------------------------------------------------------------------------------- many at once


async def run_many(
    jobs: Sequence[Callable[[], Awaitable[Episode]]], concurrency: int, lockstep: bool = False
) -> list[Episode]:
    """The episodes of ``jobs`` in their order, ``concurrency`` at once.

    ``lockstep``: an episode samples its next turn only when every other one under way is about to; the engine then
    gets all of their prompts at once and in order, so that its batches, and with ``sandbox.clock=model`` all results,
    are the same in every run.  There is no deadline then.  An exception of one job (a bug, a lost engine) ends
    all."""
    slots = asyncio.Semaphore(concurrency)
    lock = _Lockstep(len(jobs), concurrency) if lockstep else None

    async def one(index: int, job: Callable[[], Awaitable[Episode]]) -> Episode:
        async with slots:
            if lock is None:
                return await job()
            _ROUND.set((lock, index))
            try:
                return await job()
            finally:
                lock.leave()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, job)) for index, job in enumerate(jobs)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class _Lockstep:
    """A barrier before every turn for the episodes under way, whose number is known: a place that one leaves is taken
    by the next job as long as there is one."""

    def __init__(self, jobs: int, places: int) -> None:
        self._active = min(jobs, places)
        self._queued = jobs - self._active
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def turn(self, index: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((index, future))
        asyncio.get_running_loop().call_soon(self._release)  # not at once: the last to come must not go first
        await future

    def leave(self) -> None:
        if self._queued:
            self._queued -= 1
        else:
            self._active -= 1
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if self._waiting and len(self._waiting) == self._active:
            waiting, self._waiting = sorted(self._waiting, key=lambda item: item[0]), []
            for _, future in waiting:
                if not future.done():
                    future.set_result(None)


_ROUND: ContextVar[tuple[_Lockstep, int] | None] = ContextVar("round", default=None)
