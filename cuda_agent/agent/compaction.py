"""Making a conversation shorter so that it fits, in the order of what is missed least.

First the middles of old tool results go, then those of old arguments (files that were written can be read again), then
whole old turns.  The system message, the task and the newest turns stay; only when these alone are too long are their
results cut as well.  A call and its results stay together, as servers demand.

Pure.  Sizes are characters: what a token is, only the server knows.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_KEEP = 2  # newest turns that stay whole as long as possible
_SHORT = 400  # characters that are left of what is cut
_TARGET = 0.6  # of the limit: cutting a little every turn would make servers read everything anew every turn


def size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters that are sent, about."""
    return sum(
        16
        + max(
            len(m.get("content") or "") + sum(_call_size(c) for c in m.get("tool_calls") or ()), len(m.get("raw", ""))
        )
        for m in messages
    )


def compacted(messages: Sequence[Mapping[str, Any]], limit: int) -> list[Message]:
    """The messages, in at most about ``limit`` characters; as they are when they fit."""
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
    if dropped:
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
    """At most about ``limit`` characters: the middle goes."""
    if len(text) <= limit + 60:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Each assistant message with what follows it until the next one."""
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


def _call_size(call: Mapping[str, Any]) -> int:
    return len(call["name"]) + len(json.dumps(call["arguments"])) + 40
