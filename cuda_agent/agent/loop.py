"""The agent loop: plays one policy on one task, token ids in and token ids out, and returns the episode with its
reward.

``run_episode`` plays with tools in a work folder, ``run_single`` asks for one answer without tools, ``run_many`` plays
many episodes, freely or in lockstep.  An episode is one growing list of ids: sampled ids are appended unchanged (mask
1), prompt and tool results are encoded once (mask 0); text is never tokenized again.  An episode that has used up its
budget (turns, tokens) ends and its workspace is judged; an infrastructure fault or the deadline leaves it without a
reward.

Not covered: tools, rules and verdict (``environment``); models behind a text interface, whose episodes are not training
data (``chat_rollout``).
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from cuda_agent.agent.environment import KernelEnvironment, Sandbox, SandboxFault
from cuda_agent.agent.prompt import one_shot_messages, parse_answer
from cuda_agent.agent.reward import REWARDS
from cuda_agent.agent.tools import TOOLS, Style, solution_of
from cuda_agent.errors import TaskError
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.engines.engine import Completion, Engine, SamplingParams
from cuda_agent.policy.episode import Episode
from cuda_agent.sandbox.wire import Format, Verdict
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from cuda_agent.tasks.task import Task

Ended = Literal["answer", "turns", "tokens", "deadline", "infra"]


@dataclass(frozen=True)
class EpisodeSettings:
    """Budgets and prompt style of an episode.  Token budgets count tokens of the policy's tokenizer."""

    turns: int
    turn_tokens: int  # most tokens sampled in one turn
    tool_tokens: int  # most tokens of one tool result; the middle is cut
    context: int  # most tokens of the whole episode
    deadline_seconds: float
    temperature: float = 1.0
    format: Format = "plan"
    style: Style = "full"
    device: Literal["cpu", "cuda"] = "cpu"
    reward: str = "ladder"  # a name in ``agent.reward.REWARDS``


async def run_episode(
    task: Task, engine: Engine, chat: Chat, sandbox: Sandbox, settings: EpisodeSettings, seed: int, episode_id: str
) -> Episode:
    """Plays one episode with tools.  ``seed`` and the number of the turn determine the sampling noise."""
    play = Rollout("agent", task, engine, chat, sandbox, settings, seed, episode_id)
    return await play.run(play.with_tools)


async def run_single(
    task: Task, engine: Engine, chat: Chat, sandbox: Sandbox, settings: EpisodeSettings, seed: int, episode_id: str
) -> Episode:
    """Plays one episode without tools: the fenced files of the answer are the solution."""
    play = Rollout("single", task, engine, chat, sandbox, settings, seed, episode_id)
    return await play.run(play.with_one_answer)


class Rollout:
    """One rollout of a policy on a task, as it runs."""

    def __init__(
        self,
        kind: Literal["single", "agent"],
        task: Task,
        engine: Engine,
        chat: Chat,
        sandbox: Sandbox,
        settings: EpisodeSettings,
        seed: int,
        episode_id: str,
    ) -> None:
        self.kind, self.task, self.engine, self.chat = kind, task, engine, chat
        self.settings, self.seed, self.id = settings, seed, episode_id
        self.game = KernelEnvironment(task, sandbox, settings.format, settings.device, settings.style)
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns: list[int] = []
        self.messages: list[dict[str, Any]] = []

    async def run(self, game: Callable[[], Awaitable[Ended]]) -> Episode:
        """Plays ``game``, judges the files, and records why the episode ended, infrastructure faults included."""
        verdict: Verdict | None = None
        limit = asyncio.timeout(None if _ROUND.get() else self.settings.deadline_seconds)
        ended: Ended
        try:
            async with limit:
                ended = await game()
                verdict = await self.game.judge(self.game.files)
        except TimeoutError:
            if not limit.expired():
                raise
            ended = "deadline"
        except (SandboxFault, WorkspaceLost, TaskError) as error:
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
            reward=REWARDS[self.settings.reward](verdict) if verdict else None,
            ended=ended,
            verdict=verdict.to_json() if verdict else None,
            best=self.game.best.to_json() if self.game.best else None,
            files=self.game.files,
            messages=self.messages,
            flags=sorted(self.game.flags),
        )

    # -------------------------------------------------------------------------------------------------------- the games

    async def with_one_answer(self) -> Ended:
        settings = self.settings
        self.messages = one_shot_messages(self.task, settings.style, settings.format, settings.device)
        self._observe(self.chat.prompt_ids(self.messages), 0)
        completion = await self._sample(0)
        if completion is None:
            return "tokens"
        text, _, _ = self.chat.parse(completion.ids)
        self.messages.append({"role": "assistant", "content": text})
        self.game.files = dict(solution_of(parse_answer(text), settings.format).files)
        return "answer" if completion.finish == "stop" else "tokens"

    async def with_tools(self) -> Ended:
        self.messages = self.game.messages()
        self._observe(self.chat.prompt_ids(self.messages, TOOLS), 0)
        async with self.game:
            ended = await self._take_turns()
            await self.game.collect()
        return ended

    async def _take_turns(self) -> Ended:
        for turn in range(self.settings.turns):
            completion = await self._sample(turn)
            if completion is None:
                return "tokens"
            text, calls, malformed = self.chat.parse(completion.ids, TOOLS)
            asked = [{"name": call.name, "arguments": call.arguments} for call in calls]
            self.messages.append({"role": "assistant", "content": text, "tool_calls": asked})
            if malformed:
                self.game.flags.add("malformed_call")
            if completion.finish == "length":
                return "tokens"
            if not calls and not malformed:
                return "answer"
            results = [await self._tool(call.name, call.arguments) for call in calls] or ["error: malformed tool call"]
            self.messages += [{"role": "tool", "content": result} for result in results]
            if turn + 1 < self.settings.turns:
                delta = self.chat.delta_ids(results, closed=completion.ids[-1] == self.chat.end_id)
                if len(self.ids) + len(delta) >= self.settings.context:
                    return "tokens"
                self._observe(delta, turn + 1)
        return "turns"

    # ----------------------------------------------------------------------------------------------------------- tokens

    def _observe(self, ids: Sequence[int], turn: int) -> None:
        """Appends tokens that the policy did not sample."""
        self._append(ids, 0, [0.0] * len(ids), -1, turn)

    async def _sample(self, turn: int) -> Completion | None:
        """Samples the policy's next turn; returns None if there is no room for a token."""
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

    async def _tool(self, name: str, arguments: dict[str, Any]) -> str:
        return self._cut(await self.game.call(name, arguments))

    def _cut(self, text: str) -> str:
        """Cuts the text to about ``tool_tokens`` tokens; the middle is removed."""
        tokenizer, limit = self.chat.tokenizer, self.settings.tool_tokens
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text
        head, tail = tokenizer.decode(ids[: limit // 2]), tokenizer.decode(ids[len(ids) - limit // 2 :])
        return f"{head}\n...\n{tail}"


def _seed(seed: int, turn: int) -> int:
    """Returns a 63-bit seed for one turn of one episode."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:8], "big") >> 1


# --------------------------------------------------------------------------------------------------------- many at once


async def run_many(
    jobs: Sequence[Callable[[], Awaitable[Episode]]], concurrency: int, lockstep: bool = False
) -> list[Episode]:
    """Runs ``jobs``, at most ``concurrency`` at once, and returns their episodes in the order of the jobs.

    With ``lockstep`` an episode samples its next turn only when all other running episodes are ready to sample.  The
    engine then gets all prompts at once and in order, so that its batches, and with ``sandbox.clock=model`` all
    results, are the same in every run.  There is no deadline then.  An exception of one job (a bug, a lost engine) ends
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
    """A barrier before every turn for a fixed number of running episodes; a new job takes an ended one's slot."""

    def __init__(self, jobs: int, places: int) -> None:
        self._active = min(jobs, places)
        self._queued = jobs - self._active
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def turn(self, index: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((index, future))
        asyncio.get_running_loop().call_soon(self._release)  # deferred, so that the last to arrive does not go first
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
