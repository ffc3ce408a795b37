"""The player behind a chat API, without a server."""

import asyncio
from types import SimpleNamespace
from typing import Any

from cuda_agent.agent.chat_rollout import ChatPlayer
from cuda_agent.policy.chat_stream import Reply
from cuda_agent.policy.served import ContextTooLong


def test_a_conversation_that_the_server_cannot_take_ends_for_lack_of_tokens():
    """It must not end the other episodes of a benchmark, which run beside it."""

    class Model:
        async def chat(self, *_: Any) -> None:
            raise ContextTooLong("the prompt has 140000 tokens")

    player: Any = SimpleNamespace(room=100, model=Model(), _sent=[], settings=SimpleNamespace(temperature=1.0), seed=0)
    assert asyncio.run(ChatPlayer.speak(player, 0)) == "tokens"


def test_a_refusal_ends_the_episode_as_one_and_stands_in_its_messages():
    class Model:
        async def chat(self, *_: Any) -> Reply:
            return Reply("I cannot.", refused="the model refuses: I cannot.")

    said: list[dict[str, str]] = []

    def record(*_: Any, **more: str) -> str:
        said.append(more)
        return "answer"

    player: Any = SimpleNamespace(room=100, model=Model(), _sent=[], settings=SimpleNamespace(temperature=1.0), seed=0)
    player.add, player.said = (lambda *_: None), record
    assert asyncio.run(ChatPlayer.speak(player, 0)) == "refused"
    assert said == [{"refused": "the model refuses: I cannot."}]
