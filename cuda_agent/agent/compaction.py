"""Shortens a conversation so that it fits into a model's context.

The least useful parts are cut first, in this order: the middles of old tool results, the middles of the arguments of
old tool calls, whole old turns, and the middles of long texts in the newest turns. The system message and the task
stay. A tool call and its result stay together, because servers refuse a call without a result. Sizes are in characters,
because only the server can count tokens."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_KEEP = 2  # number of the newest turns, which are cut last
_SHORT = 400  # characters that remain of a cut text
_TARGET = 0.6  # share of the limit that remains: small cuts would invalidate the server's prefix cache every turn


def size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the approximate number of characters that the server receives for ``messages``."""

    def one(message: Mapping[str, Any]) -> int:
        calls = message.get("tool_calls") or ()
        asked = sum(len(call["name"]) + len(json.dumps(call["arguments"])) + 40 for call in calls)
        return 16 + max(len(message.get("content") or "") + asked, len(message.get("raw", "")))

    return sum(map(one, messages))


def compacted(messages: Sequence[Mapping[str, Any]], limit: int) -> list[Message]:
    """Returns a copy of ``messages``. If they have more than ``limit`` characters, cuts old turns until 60 % of
    ``limit`` are left. If the copy is then still longer than ``limit``, cuts the newest turns, too. The copy of a very
    long task can still exceed ``limit``, because the system message and the task are never cut."""
    kept = [dict(message) for message in messages]
    if size(kept) <= limit:
        return kept
    goal = int(limit * _TARGET)
    old = _turns(kept)[:-_KEEP]
    for turn in old:
        for message in turn:
            if message["role"] == "tool":
                message["content"] = cut(message["content"], _SHORT)
            if size(kept) <= goal:
                return kept
    for turn in old:
        _shorten_calls(turn[0])
        if size(kept) <= goal:
            return kept
    turns, dropped = _turns(kept), 0
    head = kept[: len(kept) - sum(map(len, turns))]
    while len(turns) > _KEEP and size(head) + sum(map(size, turns)) > goal:
        turns.pop(0)
        dropped += 1
    if dropped and head:
        note = f"[{dropped} earlier turns were dropped to save room; the files in the folder are as you left them]"
        head[-1]["content"] = f"{head[-1]['content']}\n\n{note}"
    kept = [*head, *(message for turn in turns for message in turn)]
    room = _SHORT * 64
    while size(kept) > limit and room >= _SHORT:
        for turn in turns:
            _shorten_calls(turn[0], room)
            for message in turn[1:]:
                message["content"] = cut(message["content"], room)
        room //= 2
    return kept


def cut(text: str, limit: int) -> str:
    """Returns ``text``, with its middle left out if it has more than about ``limit`` characters."""
    if len(text) <= limit + 60:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    turns: list[list[Message]] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append([message])
        elif turns:
            turns[-1].append(message)
    return turns


def _shorten_calls(message: Message, limit: int = _SHORT) -> None:
    if message.get("tool_calls"):
        message["tool_calls"] = [
            call | {"arguments": _shortened(call["arguments"], limit)} for call in message["tool_calls"]
        ]
        message.pop("raw", None)
    message["content"] = cut(message.get("content") or "", max(limit, 4 * _SHORT))


def _shortened(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return cut(value, limit)
    if isinstance(value, list):
        return [_shortened(item, limit) for item in value]
    if isinstance(value, dict):
        return {key: _shortened(item, limit) for key, item in value.items()}
    return value
