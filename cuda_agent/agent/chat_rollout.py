"""Rollouts of a model behind a text interface, with the work folder, tools, budgets and judge of ``loop.run_episode``.

These episodes are for evaluation, not for training: only the server has the token ids, so ``ids`` holds zeros, and only
its length, the server's token count, has a meaning.
"""

from typing import Any

from cuda_agent.agent.environment import Sandbox
from cuda_agent.agent.loop import Ended, EpisodeSettings, Rollout
from cuda_agent.agent.tools import TOOLS
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
    play = ChatRollout(model, task, sandbox, settings, seed, episode_id)
    return await play.run(play.with_tools)


class ChatRollout(Rollout):
    """A rollout whose turns are messages instead of token ids."""

    def __init__(
        self, model: ServedModel, task: Task, sandbox: Sandbox, settings: EpisodeSettings, seed: int, episode_id: str
    ) -> None:
        super().__init__("agent", task, None, None, sandbox, settings, seed, episode_id)  # type: ignore[arg-type]
        self.model = model

    async def with_tools(self) -> Ended:
        self.messages = self.game.messages()
        async with self.game:
            ended = await self._talk()
            await self.game.collect()
        return ended

    async def _talk(self) -> Ended:
        sent: list[dict[str, Any]] = [dict(message) for message in self.messages]
        for turn in range(self.settings.turns):
            room = min(self.settings.turn_tokens, self.settings.context - len(self.ids))
            if room <= 0:
                return "tokens"
            reply = await self.model.chat(sent, TOOLS, room, self.settings.temperature, self.seed + turn)
            self._append([0] * reply.tokens, 1, [0.0] * reply.tokens, 0, turn)
            asked = [{"name": call["name"], "arguments": call["arguments"] or {}} for call in reply.calls]
            said = {"role": "assistant", "content": reply.content, "tool_calls": asked}
            self.messages.append(said | ({"thought": reply.thought} if reply.thought else {}))
            if reply.cut:
                return "tokens"
            if not reply.calls:
                return "answer"
            sent.append(reply.message())
            for call in reply.calls:
                if call["arguments"] is None:
                    self.game.flags.add("malformed_call")
                    result = "error: the arguments are no JSON object"
                else:
                    result = await self._tool(call["name"], call["arguments"])
                self.messages.append({"role": "tool", "content": result})
                sent.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return "turns"

    def _cut(self, text: str) -> str:
        limit = self.settings.tool_tokens * CHARACTERS
        return text if len(text) <= limit else f"{text[: limit // 2]}\n...\n{text[-(limit // 2) :]}"
