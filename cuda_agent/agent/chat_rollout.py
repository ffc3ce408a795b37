"""Rollouts of a model behind a text interface, with the loop, work folder, tools, budgets and judge of ``loop``.

These episodes are for evaluation, not for training: only the server has the token ids, so ``ids`` holds zeros, and only
its length, the server's token count, has a meaning.
"""

from collections.abc import Sequence
from typing import Any

from cuda_agent.agent.compaction import cut
from cuda_agent.agent.environment import Sandbox
from cuda_agent.agent.loop import Calls, Ended, EpisodePlayer, EpisodeSettings
from cuda_agent.agent.tools import TOOLS
from cuda_agent.policy.engines.engine import Completion
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.served import CHARACTERS, ServedModel
from cuda_agent.tasks.task import Task


async def run_chat_rollout(
    task: Task, model: ServedModel, sandbox: Sandbox, settings: EpisodeSettings, seed: int, episode_id: str
) -> Episode:
    """Plays one episode.

    Raises:
        ServedModelError: The address does not answer any more.
    """
    player = ChatPlayer(task, sandbox, settings, seed, episode_id)
    player.model, player.sent = model, [dict(message) for message in player.messages]
    return await player.run()


class ChatPlayer(EpisodePlayer):
    """A model whose turns are messages instead of token ids."""

    model: ServedModel
    sent: list[dict[str, Any]]  # the conversation as the server gets it
    calls: Calls = ()

    async def speak(self, turn: int) -> Calls | Ended:
        if self.room <= 0:
            return "tokens"
        reply = await self.model.chat(self.sent, TOOLS, self.room, self.settings.temperature, self.seed + turn)
        self.tokens.add([0] * reply.tokens, turn, Completion([], [0.0] * reply.tokens, 0, "stop"))
        self.sent.append(reply.message())
        self.calls = reply.calls
        more = {"thought": reply.thought} if reply.thought else {}
        return self.said(reply.content, reply.calls, reply.cut, reply.malformed, **more)

    def _heard(self, texts: list[str], turn: int) -> None:
        self.sent += answers(self.calls, texts)

    def _cut(self, text: str) -> str:
        return cut(text, self.settings.tool_tokens * CHARACTERS)


def answers(calls: Calls, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the messages with the results of a turn's calls; the answer to a turn without calls is the user's."""
    if not calls:
        return [{"role": "user", "content": text} for text in texts]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)
    ]
