"""Defines ``ScriptedEngine``, an engine for test runs (``policy.engine=scripted``). Its answers come from the scripted
teacher, a program that solves tasks. The policy only computes the log-probabilities of these answers. A test run takes
a minute and gives bit for bit the same results each time, but trains no useful policy."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from cuda_agent.agent.prompt import agent_messages, one_shot_messages
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.engines.engine import Completion, SamplingParams, logprobs_of
from cuda_agent.rl.dialogues import episode, one_shot
from cuda_agent.tasks.task import Task

REPAIRED = 0.5  # share of the agent's episodes that begin with a mistake


class ScriptedEngine:
    """An ``Engine`` that does not sample from a model. It answers with solutions of ``tasks`` for ``device`` ("cpu" or
    "cuda"), which a program, the scripted teacher, makes. ``model`` computes the log-probabilities of the answers. The
    seed of an episode's first turn decides all answers of the episode."""

    def __init__(self, chat: Chat, tasks: Sequence[Task], model: Any, device: str = "cpu") -> None:
        self._chat, self._model, self._version, self._device = chat, model, 0, device
        self._openings: dict[tuple[int, ...], tuple[Task, bool]] = {}
        for task in tasks:
            self._openings[tuple(chat.prompt_ids(agent_messages(task, "compact")))] = (task, True)
            self._openings[tuple(chat.prompt_ids(one_shot_messages(task, "compact")))] = (task, False)
        self._under_way: dict[tuple[int, ...], list[list[int]]] = {}  # tokens of an episode so far -> turns to come

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        turns = self._turns(tuple(prompt), params.seed)
        turn = turns.pop(0) if turns else self._chat.turn_ids({"role": "assistant", "content": "done"})
        self._under_way[(*prompt, *turn)] = turns
        ids = turn[: params.max_tokens]
        logprobs = logprobs_of(self._model, [*prompt, *ids], len(ids), params.temperature or 1.0)
        return Completion(ids, logprobs, self._version, "stop" if ids[-1] in params.stop_ids else "length")

    def _turns(self, prompt: tuple[int, ...], seed: int) -> list[list[int]]:
        if prompt in self._openings:
            task, tools = self._openings[prompt]
            rng = random.Random(seed)
            try:
                repair = tools and rng.random() < REPAIRED
                device = self._device
                dialogue = episode(task, rng, repair, device) if tools else one_shot(task, rng, device)
            except ValueError:  # the task is not of the teacher's family
                return []
            return [self._chat.turn_ids(message) for message in dialogue if message["role"] == "assistant"]
        begun = max((said for said in self._under_way if prompt[: len(said)] == said), key=len, default=None)
        return [] if begun is None else list(self._under_way[begun])

    async def update_from(self, model: Any, version: int) -> None:
        self._model, self._version = model, version

    async def compute(self, job: Callable[[], Any]) -> Any:
        return job()

    async def close(self) -> None: ...
