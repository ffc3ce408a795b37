"""A model behind an OpenAI-compatible address, text in and text out: the second seam, for other people's models.

``chat(messages, tools) -> message``.  What it plays is no training data: token ids and log-probabilities stay with the
server.  The key is read from the environment and sent to that address alone.

What it does not cover: streaming, the policies that we train (``local``), and playing (``agent.visitor``).
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_RETRIES = 4
_AGAIN = (408, 409, 429, 500, 502, 503, 504)


class ServedModelError(RuntimeError):
    """The address does not answer, refuses us, or answers something else; the message says which."""


@dataclass
class Reply:
    """One assistant turn.  ``calls``: {"id", "name", "arguments"}, arguments as a dict, or None where they are not
    JSON; ``tokens`` as the server counts them."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    cut: bool = False  # it hit max_tokens


class ServedModel:
    """An async context manager over one connection pool.  ``url``: up to and with ``/v1``."""

    def __init__(self, url: str, model: str, key_env: str = "OPENAI_API_KEY", timeout: float = 600.0) -> None:
        self.url, self.model = url.rstrip("/"), model
        key = os.environ.get(key_env)
        self._client = httpx.AsyncClient(
            timeout=timeout, headers={"Authorization": f"Bearer {key}"} if key else {}, follow_redirects=False
        )
        self._key_env = key_env

    async def __aenter__(self) -> "ServedModel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> Reply:
        """The model's next turn.  Busy or broken answers are tried again a few times; then ServedModelError."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "temperature": temperature}
        if tools:
            body["tools"] = list(tools)
        if max_tokens:
            body["max_tokens"] = max_tokens
        if seed is not None:
            body["seed"] = seed % 2**31
        problem = ""
        for attempt in range(_RETRIES):
            if attempt:
                await asyncio.sleep(2.0 ** (attempt - 1))
            try:
                answer = await self._client.post(f"{self.url}/chat/completions", json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}"
                continue
            if answer.status_code == 200:
                return _reply(answer, self.url)
            problem = f"HTTP {answer.status_code}: {answer.text[:300]}"
            if answer.status_code in (401, 403):
                problem += f" (is the key in {self._key_env}?)"
            if answer.status_code not in _AGAIN:
                break
        raise ServedModelError(f"{self.url} with model {self.model}: {problem}")


def _reply(answer: httpx.Response, url: str) -> Reply:
    try:
        data = answer.json()
        choice = data["choices"][0]
        message = choice["message"]
        calls = [
            {
                "id": call.get("id") or f"call-{index}",
                "name": str(call["function"]["name"]),
                "arguments": _arguments(call["function"].get("arguments")),
            }
            for index, call in enumerate(message.get("tool_calls") or [])
        ]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ServedModelError(f"{url}: no chat completion in its answer ({type(error).__name__}: {error})") from None
    usage = data.get("usage") or {}
    return Reply(
        content=message.get("content") or "",
        calls=calls,
        tokens=int(usage.get("completion_tokens") or 0),
        cut=choice.get("finish_reason") == "length",
    )


def _arguments(value: Any) -> dict[str, Any] | None:
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None
