"""Connects to an external language model behind an OpenAI-compatible address (chat completions).

Answers are streamed. A user can therefore read along, and the client stops reading an answer that grows too long. If
the server refuses a feature, such as tool calls or a parameter, later requests leave the feature out. If the server is
busy, breaks a stream or answers 5xx, the client sends the request again after a pause. The API key comes from the
environment. The client sends the key to this address alone, and removes it from all text that the server sends. The
stages of a run do not use this module: they sample from the models of ``engines``."""

import asyncio
import contextlib
import difflib
import email.utils
import json
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from cuda_agent.errors import EXIT_CONFIG, EXIT_RETRY, UserError
from cuda_agent.policy.chat import Form, Tools, on_the_wire
from cuda_agent.policy.chat_stream import (
    CHARACTERS,
    LONGEST,
    Again,
    Listener,
    NoTurn,
    Refused,
    Reply,
    Turn,
    bounded,
    is_spent,
    message_of,
    valid,
)

Messages = Sequence[Mapping[str, Any]]

_SHORTEST_KEY = 8  # characters; shorter values, such as EMPTY, protect nothing and may be ordinary words
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_LONGEST_PAUSE = 120.0
_SHOWN = 8  # most models that a message names
_FIRST_WAIT = 30.0  # seconds for the list of models
RETRIES = 5
# Word in a refusal -> parameters that later requests leave out.
_OPTIONAL = {
    "stream_options": "stream_options", "parallel_tool_calls": "parallel_tool_calls", "tool_choice": "tool_choice",
    "max_completion_tokens": "max_tokens", "seed": "seed", "temperature": "temperature",
}  # fmt: skip
_IN_SECONDS = re.compile(r"(?:retry|again)\W{0,4}(?:in|after|delay)\W{0,6}(\d{1,4}(?:\.\d+)?) ?s(?:ec|\b)", re.I)
_TOO_LONG = re.compile(
    r"context.{0,40}(length|window|size)|too (long|many) (tokens|prompt|input)|prompt is too long", re.I
)


_NO_SYSTEM = re.compile(
    r"system.{0,30}(role|message|prompt|instruction)|role.{0,30}system|developer instruction|alternate"
)


class ServedModelError(UserError, RuntimeError):
    """The model's server does not answer, refuses a request, or sends an invalid answer; the message says which."""

    exit_code = EXIT_RETRY


class ServedModelRefused(ServedModelError):
    """The server refuses a request, and would refuse it again: there is no such model, the key is wrong or used up."""

    exit_code = EXIT_CONFIG


class ContextTooLong(ServedModelError):
    """The conversation does not fit into the server's context."""


def check_address(url: str, key_env: str) -> None:
    """Raises ``ServedModelError`` if the address is invalid, or holds a user name or password. Does not connect."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid brackets or port
        usable = False
    if not usable:
        raise ServedModelError(f"{url}: expected an address such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password:
        raise ServedModelError(f"a key does not belong into the address: put it into the environment, as {key_env}")


class ServedModel(contextlib.AbstractAsyncContextManager["ServedModel"]):
    """The client of one external model, to be used as an async context manager.

    Args:
        url: Address of the server, which ends in ``/v1``.
        model: Name of the model at the server.
        key_env: Name of the environment variable with the API key.
        timeout: Longest wait for the server's next data, in seconds.
        form: How messages write tool calls (``chat.on_the_wire``). Changes from "native" to "text" if the server
            refuses tool calls.
        pause: Pause before the first retry, in seconds, unless the server asks for another pause.

    The attribute ``lost`` is the estimated number of tokens in answers that broke off. Vendors charge for these tokens,
    too."""

    def __init__(
        self,
        url: str,
        model: str,
        key_env: str = "OPENAI_API_KEY",
        timeout: float = 600.0,
        form: Form = "native",
        pause: float = 1.0,
    ) -> None:
        check_address(url, key_env)
        self.url, self.model, self.form = url.rstrip("/"), model, form
        self._name = f"{self.url} with model {model}"
        self._key, self._key_env = os.environ.get(key_env, "").strip(), key_env  # a file's key ends with a new line
        if not (self._key.isascii() and self._key.isprintable()):
            raise ServedModelRefused(f"the key in {key_env} has characters that no HTTP header can hold")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=30.0), headers=headers)
        self._pause = pause
        self._lacks: set[str] = set()
        self.lost = 0

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def check(self) -> None:
        """Asks the server whether it has the model, before work begins that takes long. Asks for the list of models
        and, if it lacks the model, for a short answer: some servers list no models, or take other names too.

        Raises:
            ServedModelRefused: The server refuses the key or the model. The message names the models that it has.
            ServedModelError: The server does not answer."""
        if self.model not in await self._models():
            await self.chat([{"role": "user", "content": "Say OK."}])

    async def _models(self) -> list[str]:
        """Returns the names of the models that the server lists; none if it has no list. Raises the same errors as
        ``check``."""
        try:
            async with self._client.stream("GET", f"{self.url}/models", timeout=_FIRST_WAIT) as answer:
                if answer.status_code == 401:
                    await self._fail(answer)
                data = json.loads(await bounded(answer))
                return [valid(self._clean(str(model["id"]))) for model in data["data"]]
        except Refused as refused:
            raise ServedModelRefused(await self._named(refused)) from None
        except (httpx.HTTPError, Again) as error:
            said = self._clean(f"{type(error).__name__} {error}".strip())
            raise ServedModelError(f"{self.url} does not answer: {said}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            return []

    async def chat(
        self,
        messages: Messages,
        tools: Tools = (),
        max_tokens: int | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        listen: Listener | None = None,
        call: bool = True,
    ) -> Reply:
        """Returns the model's next turn. If ``call`` is false, asks the server to allow no tool calls. ``listen`` is
        called with each piece of the turn as it arrives, and with the reason for each retry (see ``Listener``). Repeats
        a failed request at most ``RETRIES`` times. Raises ``ServedModelRefused`` if the server refuses the request,
        ``ServedModelError`` if all retries fail, and ``ContextTooLong`` if the conversation is too long."""
        hear = listen or (lambda what, text: None)
        seed = None if seed is None else seed % 2**31
        sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        failures, pause = 0, 0.0
        while True:
            await asyncio.sleep(pause)
            body = self._body(messages, tools, call, sampling)
            try:
                return await self._once(body, tools, max_tokens, hear)
            except Refused as refused:
                if refused.spent or not self._adapted(str(refused), body, hear):
                    raise ServedModelRefused(await self._named(refused)) from None
                pause = 0.0
            except (Again, httpx.HTTPError) as error:
                failures += 1
                problem = str(error) if isinstance(error, Again) else f"{type(error).__name__} {error}".strip()
                problem = self._clean(problem)
                if failures > RETRIES:
                    raise ServedModelError(f"{self._name}: {problem}") from None
                asked = error.after if isinstance(error, Again) else None
                own = self._pause * 2.0 ** (failures - 1) * random.uniform(1.0, 1.25)
                own *= 4 if problem.startswith("HTTP 429") else 1  # limits are often those of a minute
                pause = min(own if asked is None else asked, _LONGEST_PAUSE)
                hear("again", "")
                hear("wait", f"{problem}; again in {pause:.0f} s")

    async def _named(self, refused: Refused) -> str:
        """Returns the message about a refusal: what it means, where that is known, and the server's own words."""
        if refused.spent:
            return f"{self._name}: the key in {self._key_env} has no quota or credit left ({refused})"
        if not str(refused).startswith("HTTP 404"):
            return f"{self._name}: the request is refused: {refused}"
        with contextlib.suppress(ServedModelError):
            if names := await self._models():
                near = difflib.get_close_matches(self.model, names, n=1)
                rest = [name for name in names if name not in near][: _SHOWN - len(near)]
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                return f"{self._name}: {str(refused).rstrip('.')}; it has {', '.join([*near, *rest])}{more}"
        return f"{self._name}: {refused}; is this the whole address, such as http://127.0.0.1:8000/v1?"

    def _body(self, messages: Messages, tools: Tools, call: bool, sampling: dict[str, Any]) -> dict[str, Any]:
        sent = on_the_wire(messages, tools if call else (), self.form)
        body = sampling | {
            "model": self.model,
            "messages": _folded(sent) if "system" in self._lacks else sent,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if tools and self.form == "native" and (call or "tool_choice" not in self._lacks):
            body |= {"tools": list(tools)} | ({} if call else {"tool_choice": "none"})
        if "max_tokens" in self._lacks:
            body["max_completion_tokens"] = body["max_tokens"]
        return {key: value for key, value in body.items() if key not in self._lacks and value is not None}

    def _adapted(self, refusal: str, body: dict[str, Any], hear: Listener) -> bool:
        """Finds a feature of the request ``body`` that the server's error text ``refusal`` mentions. Makes later
        requests leave the feature out. Returns whether there is such a feature."""
        text = refusal.lower()
        if body["messages"][0]["role"] == "system" and _NO_SYSTEM.search(text):
            self._lacks.add("system")
            return True
        for named, left_out in _OPTIONAL.items():
            if named in text and left_out in body and left_out not in self._lacks:
                self._lacks.add(left_out)
                return True
        if self.form == "native" and "tools" in body and ("tool" in text or "function" in text):
            self.form = "text"
            hear("form", "the server has no tool calls: they are written as text")
            return True
        return False

    async def _once(self, body: dict[str, Any], tools: Tools, max_tokens: int | None, hear: Listener) -> Reply:
        async with self._client.stream("POST", f"{self.url}/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await self._fail(answer)
            heard = _Redacted(self._key, hear)
            turn = Turn(self._clean, heard)
            if "text/event-stream" in answer.headers.get("content-type", ""):
                room = LONGEST if not max_tokens else min(LONGEST, (16 << 10) + 8 * CHARACTERS * max_tokens)
                try:
                    await turn.stream(answer, room)
                except (Again, httpx.HTTPError):
                    self.lost += turn.characters // CHARACTERS
                    raise
            else:
                try:
                    turn.whole(await bounded(answer))
                except NoTurn as error:
                    raise ServedModelError(f"{self.url}: no chat completion in its answer ({error})") from None
            heard.end()
        return turn.reply(tools, self.form, sum(len(str(m)) for m in body["messages"]))

    async def _fail(self, answer: httpx.Response) -> None:
        said = self._clean((await bounded(answer)).decode(errors="replace"))
        problem = f"HTTP {answer.status_code}: {message_of(said)[:300]}"
        if is_spent(said) or answer.status_code == 402:
            raise Refused(problem, spent=True)
        if answer.status_code in _AGAIN:
            after, told = _retry_after(answer.headers.get("retry-after")), _IN_SECONDS.search(said)
            raise Again(problem, float(told[1]) if after is None and told else after)
        if answer.status_code in (401, 403):
            there = "is refused" if self._key else "is not set"
            raise ServedModelRefused(f"{self._name}: {problem} (the key in {self._key_env} {there})")
        if answer.status_code in (400, 413, 422) and _TOO_LONG.search(said):
            raise ContextTooLong(f"{self._name}: {problem}")
        raise Refused(problem)

    def _clean(self, text: str) -> str:
        """Returns ``text`` without the API key, which some servers repeat in their answers. A key of fewer than
        ``_SHORTEST_KEY`` characters is not removed."""
        return _without(self._key, text)


def _folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns ``messages`` without the role "system", which some models lack: the first user message begins with the
    text of the system message."""
    first, *rest = messages
    if first["role"] != "system":
        return messages
    if rest and rest[0]["role"] == "user":
        return [rest[0] | {"content": f"{first['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [first | {"role": "user"}, *rest]


def _without(key: str, text: str) -> str:
    return text.replace(key, "[key]") if len(key) >= _SHORTEST_KEY else text


class _Redacted:
    """Passes pieces of a turn on to the listener ``hear``, with ``key``, the API key, replaced. The key may be spread
    over several pieces, so a piece that ends with the beginning of the key is kept until the next one. ``end`` passes
    on what is kept."""

    def __init__(self, key: str, hear: Listener) -> None:
        self._key, self._hear, self._kept = key, hear, dict[str, str]()

    def __call__(self, what: str, piece: str) -> None:
        text = self._kept.pop(what, "") + piece
        if len(self._key) >= _SHORTEST_KEY:
            text = _without(self._key, text)
            ends = (length for length in range(len(self._key) - 1, 0, -1) if text.endswith(self._key[:length]))
            if length := next(ends, 0):
                text, self._kept[what] = text[:-length], text[-length:]
        if text:
            self._hear(what, text)

    def end(self) -> None:
        for what, text in self._kept.items():
            self._hear(what, text)


def _retry_after(text: str | None) -> float | None:
    if not text:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None
