"""Plays episodes with a model behind a chat API. An episode is one attempt of the model at one task.

The agent loop (``agent.loop``) and the tools are the same as for a policy, which is the model that is trained. But
these episodes serve only for evaluation: the server reports how many tokens it sampled, and not which ones. Therefore
``Episode.ids`` holds a zero for each sampled token. It has no entries for tokens of the prompt and of tool results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuda_agent.agent.compaction import cut
from cuda_agent.agent.environment import Sandbox
from cuda_agent.agent.loop import Calls, Ended, EpisodePlayer, EpisodeSettings
from cuda_agent.agent.tools import TOOLS
from cuda_agent.policy.chat_stream import CHARACTERS
from cuda_agent.policy.engines.engine import Completion
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.served import ContextTooLong, ServedModel
from cuda_agent.tasks.task import Task


async def run_chat_rollout(
    task: Task, model: ServedModel, sandbox: Sandbox, settings: EpisodeSettings, seed: int, episode_id: str
) -> Episode:
    """Plays and judges one episode: ``model`` works on ``task`` with tools.

    Raises:
        ServedModelError: The model's server stopped answering."""
    return await ChatPlayer(task, sandbox, settings, seed, episode_id, model).run()


@dataclass
class ChatPlayer(EpisodePlayer):
    model: ServedModel
    _calls: Calls = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sent = [dict(message) for message in self.episode.messages]  # the conversation as the server gets it

    async def speak(self, turn: int) -> Calls | Ended:
        if self.room <= 0:
            return "tokens"
        try:
            reply = await self.model.chat(self._sent, TOOLS, self.room, self.settings.temperature, self.seed + turn)
        except ContextTooLong:  # ``room`` counts sampled tokens only
            return "tokens"
        self.add([0] * reply.tokens, turn, Completion([], [0.0] * reply.tokens, 0, "stop"))
        self._sent.append(reply.message())
        self._calls = reply.calls
        told = {"thought": reply.thought, "refused": reply.refused}
        more = {name: text for name, text in told.items() if text}
        ended = self.said(reply.content, reply.calls, reply.cut, reply.malformed, **more)
        return "refused" if ended == "answer" and reply.refused else ended

    def _heard(self, texts: list[str], turn: int) -> None:
        self._sent += answers(self._calls, texts)

    def _cut(self, text: str) -> str:
        return cut(text, self.settings.tool_tokens * CHARACTERS)


def answers(calls: Calls, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns ``texts`` as messages: one tool result for each of ``calls``, or user messages if there are no calls."""
    if not calls:
        return [{"role": "user", "content": text} for text in texts]
    answered = zip(calls, texts, strict=True)
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in answered]
