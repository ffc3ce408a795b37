"""A policy for drills: ``policy.engine=scripted`` answers with the teacher's dialogues, under the log-probabilities of
the real policy.  A whole run then takes a minute and repeats bit for bit; the trained policy has no meaning.
"""

import random
from collections.abc import Sequence

from cuda_agent.agent.prompt import agent_messages, one_shot_messages
from cuda_agent.policy.chat import Chat
from cuda_agent.rl.dialogues import episode, one_shot
from cuda_agent.tasks.task import Task

REPAIRED = 0.5  # share of the agent's episodes that begin with a mistake


class Script:
    """``answer`` of a ``ScriptedEngine``: an episode continues the dialogue that it began."""

    def __init__(self, chat: Chat, tasks: Sequence[Task]) -> None:
        self._chat = chat
        self._openings: dict[tuple[int, ...], tuple[Task, bool]] = {}
        for task in tasks:
            self._openings[tuple(chat.prompt_ids(agent_messages(task, "compact")))] = (task, True)
            self._openings[tuple(chat.prompt_ids(one_shot_messages(task, "compact")))] = (task, False)
        self._under_way: dict[tuple[int, ...], list[list[int]]] = {}  # prompt so far -> the turns to come

    def __call__(self, prompt: list[int], seed: int) -> list[int]:
        turns = self._turns(tuple(prompt), seed)
        turn = turns.pop(0) if turns else self._done()
        self._under_way[(*prompt, *turn)] = turns
        return turn

    def _turns(self, prompt: tuple[int, ...], seed: int) -> list[list[int]]:
        if prompt in self._openings:
            task, tools = self._openings[prompt]
            rng = random.Random(seed)
            try:
                dialogue = episode(task, rng, rng.random() < REPAIRED) if tools else one_shot(task, rng)
            except ValueError:  # not of the teacher's family
                return []
            return [self._chat.turn_ids(message) for message in dialogue if message["role"] == "assistant"]
        begun = max((said for said in self._under_way if prompt[: len(said)] == said), key=len, default=None)
        return [] if begun is None else list(self._under_way[begun])

    def _done(self) -> list[int]:
        return self._chat.turn_ids({"role": "assistant", "content": "done"})
