"""Runs the agent loop: a player works on one task, turn by turn, and an environment answers the player's tool calls.

``play`` is the loop for every kind of player: a policy that samples token ids (``TokenPlayer``), a model behind a chat
API (``agent.chat_rollout``), or a model that searches for a fast solution (``optimize.attempt``). ``run_episode`` plays
an episode of a policy, either in turns with tools, or as a single answer without tools. ``run_many`` plays many
episodes at once.

A policy's episode is one growing list of token ids with a mask. Sampled ids are appended unchanged, with mask 1. The
prompt and the tool results are encoded once and appended with mask 0. Training uses only tokens with mask 1.

An episode ends with the policy's answer, or when the budget of turns or tokens is used up. The files of the episode are
then judged. If an infrastructure fault or the deadline cuts an episode short, the episode has no reward."""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, cast

from cuda_agent.agent.environment import KernelEnvironment, Sandbox, SandboxFault
from cuda_agent.agent.prompt import one_shot_messages, parse_answer
from cuda_agent.agent.tools import TOOLS, Style
from cuda_agent.errors import TaskError
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.engines.engine import Completion, Engine, SamplingParams
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.reward import REWARDS
from cuda_agent.sandbox.wire import Format, Mode, ToolResult
from cuda_agent.sandbox.workspace.client import WorkspaceLost
from cuda_agent.tasks.task import Task

T = TypeVar("T")
Ended = Literal["answer", "turns", "tokens", "deadline", "infra", "refused"]
Calls = Sequence[dict[str, Any]]
"""Tool calls, each with "name" and "arguments" (None if they could not be parsed)."""
MALFORMED = "error: malformed tool call"


@dataclass(frozen=True)
class EpisodeSettings:
    """The budgets and the prompt style of an episode. Token budgets count tokens of the policy's tokenizer."""

    turns: int  # maximum number of turns
    turn_tokens: int  # maximum number of tokens sampled in one turn
    tool_tokens: int  # maximum number of tokens of one tool result; the middle of a longer one is cut
    context: int  # maximum number of tokens of the whole episode
    deadline_seconds: float  # time limit of the episode, without the time in which it waits for the judge
    temperature: float = 1.0
    format: Format = "plan"
    style: Style = "full"
    device: Literal["cpu", "cuda"] = "cpu"
    reward: str = "ladder"  # a name in ``policy.reward.REWARDS``
    mode: Mode = "quick"  # of the final verdict


class Player(Protocol):
    """The side of the agent loop that makes tool calls, such as a policy. The environment is the side that answers the
    calls."""

    async def speak(self, turn: int) -> Calls | str:
        """Plays turn number ``turn``. Returns the turn's tool calls, or the reason why the player stops."""

    def hear(self, results: Sequence[ToolResult], turn: int) -> str | None:
        """Receives the results of turn ``turn``. Returns the reason why the player stops, or None if it goes on."""


async def play(player: Player, environment: KernelEnvironment, turns: Iterable[int]) -> str:
    """Plays the turns with the numbers ``turns``. Returns why the player stopped, or "turns" after the last turn."""
    for turn in turns:
        calls = await player.speak(turn)
        if isinstance(calls, str):
            return calls
        results = [await environment.call(call["name"], call["arguments"]) for call in calls]
        if ended := player.hear(results, turn):
            return ended
    return "turns"


async def within(limit: asyncio.Timeout, work: Awaitable[str], late: str) -> str:
    """Returns the result of ``work``. If ``limit`` expires first, cancels ``work`` and returns ``late``."""
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        return late


@contextmanager
def stopped(limit: asyncio.Timeout) -> Iterator[None]:
    """Suspends the running timeout ``limit`` during the ``with`` block, and then extends it by the block's duration."""
    time = asyncio.get_running_loop().time
    end, began = limit.when(), time()
    limit.reschedule(None)
    try:
        yield
    finally:
        limit.reschedule(None if end is None else end + time() - began)


async def run_episode(
    task: Task,
    engine: Engine,
    chat: Chat,
    sandbox: Sandbox,
    settings: EpisodeSettings,
    seed: int,
    episode_id: str,
    before: Episode | None = None,
    kind: Literal["single", "agent"] = "agent",
) -> Episode:
    """Plays and judges one episode of a policy.

    Args:
        seed: The seed of the episode. Each turn samples with a seed derived from this seed and the turn's number.
        before: An earlier run of this episode that an infrastructure fault cut short, or None. A turn of the earlier
            run is reused if all tokens before it are the same. Otherwise the turn is sampled again.
        kind: "agent" is an episode in turns with tools. "single" is an episode without tools: one answer, whose fenced
            blocks are the files of the solution."""
    player = TokenPlayer(task, sandbox, settings, seed, episode_id, engine, chat, before)
    if kind == "agent":
        player.add(chat.prompt_ids(player.episode.messages, TOOLS), 0)
        return await player.run()
    player.episode.messages = one_shot_messages(task, settings.style, settings.format, settings.device)
    player.add(chat.prompt_ids(player.episode.messages), 0)
    return await player.run(player.answer)


@dataclass
class EpisodePlayer(ABC):
    """A player that records its turns as an episode."""

    task: Task
    sandbox: Sandbox
    settings: EpisodeSettings
    seed: int
    id: str  # of the episode

    def __post_init__(self) -> None:
        how = self.settings
        self.environment = KernelEnvironment(self.task, self.sandbox, how.format, how.device, how.style)
        first = self.environment.messages()
        self.episode = Episode(self.id, self.task.name, "agent", [], [], [], [], [], None, "infra", messages=first)

    def add(self, ids: Sequence[int], turn: int, sampled: Completion | None = None) -> None:
        """Appends the token ids ``ids`` of turn ``turn`` to the episode. ``sampled`` is the completion that contains
        them, or None for tokens of the prompt and of tool results."""
        episode = self.episode
        episode.ids += ids
        episode.mask += [int(sampled is not None)] * len(ids)
        episode.logprobs += sampled.logprobs if sampled else [0.0] * len(ids)
        episode.versions += [sampled.version if sampled else -1] * len(ids)
        episode.turns += [turn] * len(ids)

    @property
    def room(self) -> int:
        return min(self.settings.turn_tokens, self.settings.context - len(self.episode.ids))

    async def run(self, answer: Callable[[], Awaitable[Ended]] | None = None) -> Episode:
        """Plays the episode, judges its final files, and returns the episode. ``Episode.ended`` says why it ended. If
        an infrastructure fault or the deadline cuts the episode short, returns the part that was played, without a
        reward.

        Args:
            answer: For an episode without tools, the function that samples its only turn. None for an episode with
                tools."""
        environment, episode = self.environment, self.episode
        episode.kind = "single" if answer else "agent"

        async def whole() -> str:
            ended = await (answer or self._play_in_folder)()
            verdict = await environment.judge(environment.solution)
            if self.settings.mode != "quick":  # besides quick mode, whose verdicts ``best`` compares
                verdict = await environment.judge(environment.solution, self.settings.mode)
            episode.verdict = verdict.to_json()
            episode.reward = REWARDS[self.settings.reward](episode.verdict)
            return ended

        limit = asyncio.timeout(None if _ROUND.get() else self.settings.deadline_seconds)
        environment.waiting = partial(stopped, limit)
        try:
            episode.ended = cast(Ended, await within(limit, whole(), "deadline"))
        except (SandboxFault, WorkspaceLost, TaskError) as error:
            episode.messages.append({"role": "tool", "content": f"[ended by a fault of ours: {error}]"})
        episode.best = environment.best.to_json() if environment.best else None
        episode.files, episode.flags = environment.solution.files, sorted(environment.flags)
        return episode

    async def _play_in_folder(self) -> str:
        async with self.environment:
            ended = await play(self, self.environment, range(self.settings.turns))
            await self.environment.collect()
        return ended

    def said(self, text: str, calls: Calls, cut: bool, malformed: bool, **more: str) -> Calls | Ended:
        """Records a turn's message and decides whether the episode goes on.

        Args:
            text: The text of the message.
            calls: The tool calls of the message.
            cut: Whether a token limit ended the turn.
            malformed: Whether the text contains a malformed tool call, which is not in ``calls``.
            more: Other fields of the message, such as ``thought``.

        Returns:
            "tokens" if ``cut`` is true. Otherwise "answer" if the turn has no tool call, not even a malformed one. Both
            values end the episode. In all other cases ``calls``, which is empty if all tool calls are malformed."""
        asked = [{"name": call["name"], "arguments": call["arguments"] or {}} for call in calls]
        self.episode.messages.append({"role": "assistant", "content": text, "tool_calls": asked, **more})
        if malformed:
            self.environment.flags.add("malformed_call")
        if cut:
            return "tokens"
        return calls if calls or malformed else "answer"

    def hear(self, results: Sequence[ToolResult], turn: int) -> Ended | None:
        texts = [self._cut(result.text) for result in results] or [MALFORMED]
        self.episode.messages += [{"role": "tool", "content": text} for text in texts]
        return self._heard(texts, turn)

    @abstractmethod
    async def speak(self, turn: int) -> Calls | Ended: ...

    @abstractmethod
    def _heard(self, texts: list[str], turn: int) -> Ended | None: ...

    @abstractmethod
    def _cut(self, text: str) -> str:
        """Returns ``text``, with its middle left out if it has more than about ``self.settings.tool_tokens`` tokens."""


@dataclass
class TokenPlayer(EpisodePlayer):
    engine: Engine
    chat: Chat
    before: Episode | None = None  # see ``run_episode``
    _closed: bool = True  # whether the last turn ended with its stop token

    async def answer(self) -> Ended:
        """Samples the only turn of an episode without tools. Returns "answer", or "tokens" if the turn was cut off."""
        completion = await self._sample(0)
        if completion is None:
            return "tokens"
        text, _, _ = self.chat.parse(completion.ids)
        self.episode.messages.append({"role": "assistant", "content": text})
        self.environment.files = parse_answer(text)
        return "answer" if completion.finish == "stop" else "tokens"

    async def speak(self, turn: int) -> Calls | Ended:
        completion = await self._sample(turn)
        if completion is None:
            return "tokens"
        self._closed = completion.ids[-1] == self.chat.end_id
        text, calls, malformed = self.chat.parse(completion.ids, TOOLS)
        return self.said(text, [asdict(call) for call in calls], completion.finish == "length", malformed)

    def _heard(self, texts: list[str], turn: int) -> Ended | None:
        if turn + 1 < self.settings.turns:
            delta = self.chat.delta_ids(texts, self._closed)
            if len(self.episode.ids) + len(delta) >= self.settings.context:
                return "tokens"
            self.add(delta, turn + 1)
        return None

    async def _sample(self, turn: int) -> Completion | None:
        room, chat = self.room, self.chat
        if room <= 0:
            return None
        if known := self._known():
            self.add(known.ids, turn, known)
            return known
        params = SamplingParams(room, seed_of(self.seed, turn), self.settings.temperature, chat.stop_ids, self.id)
        if current := _ROUND.get():
            await current[0].turn(current[1])
        completion = await self.engine.generate(tuple(self.episode.ids), params)
        if not 0 < len(completion.ids) <= room or len(completion.logprobs) != len(completion.ids):
            got = f"{len(completion.ids)} tokens and {len(completion.logprobs)} log-probabilities"
            raise ValueError(f"the engine gave {got}")
        self.add(completion.ids, turn, completion)
        return completion

    def _known(self) -> Completion | None:
        """Returns the next turn from ``self.before``, which is an earlier run of this episode that was cut short.
        Returns None if there is no earlier run, if it has no such turn, or if its tokens before the turn differ from
        those of this episode."""
        here, old = len(self.episode.ids), self.before
        if old is None or old.ids[:here] != self.episode.ids or not any(old.mask[here : here + 1]):
            return None
        end = old.mask.index(0, here) if 0 in old.mask[here:] else len(old.mask)
        finish: Literal["stop", "length"] = "stop" if old.ids[end - 1] in self.chat.stop_ids else "length"
        return Completion(old.ids[here:end], old.logprobs[here:end], old.versions[here], finish)

    def _cut(self, text: str) -> str:
        tokenizer, limit = self.chat.tokenizer, self.settings.tool_tokens
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text
        head, tail = tokenizer.decode(ids[: limit // 2]), tokenizer.decode(ids[len(ids) - limit // 2 :])
        return f"{head}\n...\n{tail}"


def seed_of(seed: int, name: object) -> int:
    """Returns a 63-bit seed derived from ``seed`` and ``name``, such as an episode's id or a turn's number."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


# ------------------------------------------------------------------------------------------------------- many episodes


async def run_many(jobs: Sequence[Callable[[], Awaitable[T]]], concurrency: int, lockstep: bool = False) -> list[T]:
    """Runs ``jobs``, at most ``concurrency`` at once, and returns their results in the order of ``jobs``. A typical job
    plays one episode. If a job raises an exception, cancels the other jobs and raises this exception.

    With ``lockstep``, all running episodes sample their next turn at the same time, and no episode has a deadline. The
    engine's batches are then the same in every run. The results are the same as well if the sandbox uses simulated
    instead of measured times (setting ``sandbox.clock=model``)."""
    slots = asyncio.Semaphore(concurrency)
    lock = _Lockstep(len(jobs), concurrency) if lockstep else None

    async def one(index: int, job: Callable[[], Awaitable[T]]) -> T:
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
    """A barrier: the running episodes wait for each other before each turn that they sample. There are ``jobs``
    episodes in all, and at most ``places`` of them run at once."""

    def __init__(self, jobs: int, places: int) -> None:
        self._active = min(jobs, places)
        self._queued = jobs - self._active
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def turn(self, index: int) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((index, future))
        asyncio.get_running_loop().call_soon(self._release)  # deferred: the last to arrive does not go first
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
