"""Connects to an external language model behind an OpenAI-compatible address (chat completions).

Answers are streamed. A user can therefore read along, and the client stops reading an answer that grows too long. If
the server refuses a feature, such as tool calls or a parameter, later requests leave the feature out. If the server is
busy, breaks a stream or answers 5xx, the client sends the request again after a pause. The API key comes from the
environment. The client sends the key to this address alone, and removes it from replies and HTTP errors. The stages of
a run do not use this module: they sample from the models of ``engines``."""

import asyncio
import contextlib
import email.utils
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from cuda_agent.errors import EXIT_RETRY, UserError
from cuda_agent.policy.chat import Form, ToolCall, Tools, on_the_wire, read_calls

Listener = Callable[[str, str], None]
"""Takes (what, text). "text" and "thought" are pieces of an answer; "again" cancels the pieces received so far; "wait"
and "form" explain a pause or a change to tool calls as text."""

Messages = Sequence[Mapping[str, Any]]

CHARACTERS = 4  # assumed characters per token, if the server does not count tokens
LONGEST = 2 << 20  # most characters of one answer, independent of max_tokens
_SHORTEST_KEY = 8  # characters; shorter values, such as EMPTY, protect nothing and may be ordinary words
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_LONGEST_PAUSE = 120.0
RETRIES = 5
# Word in a refusal -> parameters that later requests leave out.
_OPTIONAL = {
    "stream_options": "stream_options", "parallel_tool_calls": "parallel_tool_calls", "tool_choice": "tool_choice",
    "max_completion_tokens": "max_tokens", "seed": "seed", "temperature": "temperature",
}  # fmt: skip
_TOO_LONG = re.compile(
    r"context.{0,40}(length|window|size)|too (long|many) (tokens|prompt|input)|prompt is too long", re.I
)


class ServedModelError(UserError, RuntimeError):
    """The model's server does not answer, refuses a request, or sends an invalid answer; the message says which."""

    exit_code = EXIT_RETRY


class ContextTooLong(ServedModelError):
    """The conversation does not fit into the server's context."""


@dataclass
class Reply:
    """One assistant turn. ``calls`` lists the tool calls as {"id", "name", "arguments"}; the arguments are a dict, or
    None if they are not a JSON object. If ``estimated`` is true, ``tokens`` is an estimate from the length of the
    text."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    cut: bool = False  # whether max_tokens, or this client's limit on characters, ended the turn
    prompt_tokens: int = 0
    estimated: bool = False
    thought: str = ""
    raw: str = ""  # the text from which calls were read; empty for native calls
    malformed: bool = False  # whether the text holds a malformed call

    def message(self) -> dict[str, Any]:
        said = {"role": "assistant", "content": self.content, "tool_calls": self.calls, "raw": self.raw}
        return {key: value for key, value in said.items() if value or key == "content"}


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
        self._key, self._key_env = os.environ.get(key_env, ""), key_env
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(timeout, connect=30.0), headers=headers)
        self._pause = pause
        self._lacks: set[str] = set()
        self.lost = 0

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

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
        a failed request at most ``RETRIES`` times. Raises ``ServedModelError`` if the server refuses the request or all
        retries fail, and ``ContextTooLong`` if the conversation is too long."""
        hear = listen or (lambda what, text: None)
        seed = None if seed is None else seed % 2**31
        sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        failures, pause = 0, 0.0
        while True:
            await asyncio.sleep(pause)
            body = self._body(messages, tools, call, sampling)
            try:
                return await self._once(body, tools, max_tokens, hear)
            except _Refused as refused:
                if not self._adapted(str(refused), body, hear):
                    raise ServedModelError(f"{self._name}: {refused}") from None
                pause = 0.0
            except (_Again, httpx.HTTPError) as error:
                failures += 1
                problem = str(error) if isinstance(error, _Again) else f"{type(error).__name__} {error}".strip()
                if failures > RETRIES:
                    raise ServedModelError(f"{self._name}: {problem}") from None
                asked = error.after if isinstance(error, _Again) else None
                own = self._pause * 2.0 ** (failures - 1) * random.uniform(1.0, 1.25)
                pause = min(own if asked is None else asked, _LONGEST_PAUSE)
                hear("again", "")
                hear("wait", f"{problem}; again in {pause:.0f} s")

    def _body(self, messages: Messages, tools: Tools, call: bool, sampling: dict[str, Any]) -> dict[str, Any]:
        body = sampling | {
            "model": self.model,
            "messages": on_the_wire(messages, tools if call else (), self.form),
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
            turn = _Turn(self._clean, heard)
            if "text/event-stream" in answer.headers.get("content-type", ""):
                room = LONGEST if not max_tokens else min(LONGEST, (16 << 10) + 8 * CHARACTERS * max_tokens)
                try:
                    await turn.stream(answer, room)
                except (_Again, httpx.HTTPError):
                    self.lost += turn.characters // CHARACTERS
                    raise
            else:
                turn.whole(await _bounded(answer), self.url)
            heard.end()
        return turn.reply(tools, self.form, sum(len(str(m)) for m in body["messages"]))

    async def _fail(self, answer: httpx.Response) -> None:
        said = self._clean((await _bounded(answer)).decode(errors="replace"))
        problem = f"HTTP {answer.status_code}: {_message(said)[:300]}"
        if answer.status_code in _AGAIN:
            raise _Again(problem, _retry_after(answer.headers.get("retry-after")))
        if answer.status_code in (401, 403):
            there = "is refused" if self._key else "is not set"
            raise ServedModelError(f"{self._name}: {problem} (the key in {self._key_env} {there})")
        if answer.status_code in (400, 413, 422) and _TOO_LONG.search(said):
            raise ContextTooLong(f"{self._name}: {problem}")
        raise _Refused(problem)

    def _clean(self, text: str) -> str:
        """Returns ``text`` without the API key, which some servers repeat in their answers. A key of fewer than
        ``_SHORTEST_KEY`` characters is not removed."""
        return text.replace(self._key, "[key]") if len(self._key) >= _SHORTEST_KEY else text


class _Refused(Exception):
    """The server refuses a request, but may accept it without some feature."""


class _Again(Exception):
    """A request failed and may be sent again. ``after`` is the pause in seconds that the server asks for, or None."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class _Turn:
    def __init__(self, clean: Callable[[str], str], hear: Listener) -> None:
        self._clean, self._hear = clean, hear
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: dict[int, dict[str, str]] = {}
        self._finish, self._usage = "", {}  # type: str, dict[str, Any]
        self.characters = 0

    async def stream(self, answer: httpx.Response, room: int) -> None:
        """Reads a streamed answer to its end, or until it has more than ``room`` characters."""
        async for data in _events(answer):
            if data == "[DONE]":
                self._finish = self._finish or "stop"
                return
            try:
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise _Again(f"in the stream: {_message(self._clean(data))[:300]}")
                self._take(chunk)
            except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
                raise _Again(f"the stream holds something else ({type(error).__name__})") from None
            if self.characters > room:
                self._finish = "length"
                return
        if not self._finish:
            raise _Again("the stream broke off")

    def whole(self, content: bytes, url: str) -> None:
        """Reads ``content``, the whole answer of a server that does not stream."""
        try:
            data = json.loads(content)
            choice = data["choices"][0]
            message = choice["message"]
            for index, call in enumerate(message.get("tool_calls") or []):
                call.setdefault("index", index)
            self._take({"choices": [{"delta": message, "finish_reason": choice.get("finish_reason") or "stop"}]})
            self._usage = data.get("usage") or {}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ServedModelError(f"{url}: no chat completion in its answer ({why})") from None

    def _take(self, chunk: dict[str, Any]) -> None:
        self._usage = chunk.get("usage") or self._usage
        for choice in (chunk.get("choices") or [])[:1]:
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            self._add(self._text, "text", delta.get("content"))
            self._add(self._thought, "thought", delta.get("reasoning_content") or delta.get("reasoning"))
            for part in delta.get("tool_calls") or []:
                function, index = part.get("function") or {}, part.get("index")
                place = len(self._calls) if index is None else int(index)
                call = self._calls.setdefault(place, {"id": "", "name": "", "arguments": ""})
                call["id"] = part.get("id") or call["id"]
                call["name"] += str(function.get("name") or "")
                arguments = function.get("arguments") or ""
                call["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)
                self.characters += len(str(arguments))

    def _add(self, parts: list[str], what: str, piece: Any) -> None:
        if isinstance(piece, str) and piece:
            parts.append(piece)
            self.characters += len(piece)
            self._hear(what, piece)

    def reply(self, tools: Tools, form: Form, prompt: int) -> Reply:
        """Returns the turn that has been read. If the server did not count tokens, estimates them from characters;
        ``prompt`` is the number of characters in the request's messages."""
        raw = _valid(self._clean("".join(self._text)))
        thought = _valid(self._clean("".join(self._thought)))
        if not thought and "</think>" in raw:
            thought, _, raw = raw.rpartition("</think>")
            thought, raw = thought.replace("<think>", "").strip(), raw.lstrip()
        calls: list[dict[str, Any]] = [
            {
                "id": self._clean(str(call["id"])) or f"call-{index}",
                "name": self._clean(call["name"]),
                "arguments": _arguments(self._clean(call["arguments"])),
            }
            for index, call in sorted(self._calls.items())
        ]
        content, malformed, found = raw, False, list[ToolCall]()
        if not calls:  # some servers leave tool calls in the text
            text, found, malformed = read_calls(raw, tools)
            content = text if found else raw
            calls = [{"id": f"call-{i}"} | asdict(call) for i, call in enumerate(found)]
        counted = self._usage.get("completion_tokens")
        return Reply(
            content=content,
            calls=calls,
            tokens=int(counted or self.characters // CHARACTERS),
            cut=self._finish == "length",
            prompt_tokens=int(self._usage.get("prompt_tokens") or prompt // CHARACTERS),
            estimated=counted is None,
            thought=thought,
            raw=raw if found or form == "raw" else "",
            malformed=malformed,
        )


class _Redacted:
    """Passes pieces of a turn on to the listener ``hear``, with ``key``, the API key, replaced. The key may be spread
    over several pieces, so a piece that ends with the beginning of the key is kept until the next one. ``end`` passes
    on what is kept."""

    def __init__(self, key: str, hear: Listener) -> None:
        self._key, self._hear, self._kept = key, hear, dict[str, str]()

    def __call__(self, what: str, piece: str) -> None:
        text = self._kept.pop(what, "") + piece
        if len(self._key) >= _SHORTEST_KEY:
            text = text.replace(self._key, "[key]")
            ends = (length for length in range(len(self._key) - 1, 0, -1) if text.endswith(self._key[:length]))
            if length := next(ends, 0):
                text, self._kept[what] = text[:-length], text[-length:]
        if text:
            self._hear(what, text)

    def end(self) -> None:
        for what, text in self._kept.items():
            self._hear(what, text)


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    """Yields the data of each server-sent event in ``answer``. Raises ``_Again`` if a line is too long."""
    rest = b""
    async for block in answer.aiter_bytes():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
        if len(rest) > 2 * LONGEST:
            raise _Again("the stream holds a line without an end")
    if rest.startswith(b"data:"):
        yield rest[5:].strip().decode(errors="replace")


async def _bounded(answer: httpx.Response) -> bytes:
    content = b""
    async for block in answer.aiter_bytes():
        content += block
        if len(content) > 4 * LONGEST:
            raise _Again("the answer does not end")
    return content


def _arguments(value: str) -> dict[str, Any] | None:
    try:
        parsed = json.loads(value) if value.strip() else {}
        parsed = json.loads(_valid(json.dumps(parsed, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _valid(text: str) -> str:
    """Returns ``text`` as valid Unicode: a lone surrogate, which JSON can hold and UTF-8 cannot, is replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _message(text: str) -> str:
    try:
        error = json.loads(text)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        return " ".join(text.split())


def _retry_after(text: str | None) -> float | None:
    if not text:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None
