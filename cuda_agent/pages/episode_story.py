"""Converts an episode, or an attempt of ``optimize``, to the ``Story`` that a page shows, turn by turn.

An episode is one agent's work on a task.  A ``Story`` shows changes of files as diffs.  The transcript of an attempt
contains diffs.  For an episode, this module computes diffs from the calls of the tools Write, Edit and MultiEdit.
Changes by an episode's shell commands remain unknown."""

import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cuda_agent.agent.compaction import cut
from cuda_agent.agent.progress import Event, difference
from cuda_agent.policy.episode import Episode

Kind = Literal["thought", "said", "call", "result", "diff", "verdict", "note", "sampled"]
Token = tuple[str, float]
"""Text and log-probability (in nats).  Several tokens that encode a single character are merged into one."""

MOST_TURNS, MOST_TOKENS, LONGEST = 80, 4000, 6000  # turns and sampled tokens of an episode, characters of a text
_WRITERS = ("Write", "Edit", "MultiEdit", "NotebookEdit")


@dataclass(frozen=True)
class StoryPart:
    """One part of a turn, such as a tool call."""

    kind: Kind
    text: str
    title: str = ""  # such as the tool's name
    good: bool | None = None  # whether the part went well; None: unknown
    tokens: tuple[Token, ...] = ()  # of a part of kind "sampled"


@dataclass(frozen=True)
class Turn:
    number: int  # counts from 1
    parts: list[StoryPart]


@dataclass(frozen=True)
class Story:
    """An episode, or an attempt of ``optimize``, as a page shows it.  ``files`` (path -> text) is the last solution of
    an episode, or the best solution of an attempt.  ``verdict`` is the verdict on these files."""

    opening: list[tuple[str, str]]  # role and text of each message before the first turn
    turns: list[Turn]  # the last turns
    earlier: int  # number of turns that were left out before ``turns``
    files: dict[str, str]
    verdict: dict[str, Any] | None
    best: dict[str, Any] | None = None  # verdict on the episode's best solution


def _change(call: Mapping[str, Any], known: dict[str, str]) -> Event | None:
    """Applies a call of the tool Write, Edit or MultiEdit to ``known`` (path -> text).  Returns the diff, or None if
    the file or the text to replace is not known.  For a NotebookEdit, removes the path from ``known`` and returns
    None."""
    arguments = call["arguments"]
    path = posixpath.normpath(str(arguments.get("path", "")))
    old = known.get(path, "")
    if call["name"] == "NotebookEdit":
        known.pop(path, None)
        return None
    if call["name"] == "Write":
        new = str(arguments.get("content", ""))
    else:
        edits = arguments.get("edits") if call["name"] == "MultiEdit" else [arguments]
        if path not in known or not isinstance(edits, list):
            return None
        new = old
        for edit in edits:
            before = str(edit.get("old_string", "")) if isinstance(edit, dict) else ""
            if not before or before not in new:
                return None
            new = new.replace(before, str(edit.get("new_string", "")))
    known[path] = new
    return difference(path, old, new)


@dataclass(frozen=True)
class EpisodeRow:
    """One episode, or one attempt of ``optimize``, in the list of a page."""

    number: int  # counts from 1, the oldest first
    stage: str
    id: str
    task: str
    status: str  # of the verdict; "no_answer": nothing could be judged; "lost": the sandbox failed
    reward: float | None
    speedup: float | None  # over the faster of eager and ``torch.compile``
    turns: int
    tokens: int | None  # number of sampled tokens
    logprob: float | None  # mean log-probability of the sampled tokens, in nats; None if it is unknown
    ended: str  # why the episode ended
    flags: list[str]  # bad patterns, such as loops


@dataclass(frozen=True)
class EpisodeEntry:
    row: EpisodeRow
    story: Callable[[], Story]  # makes the story when a page needs it


def of_episode(episode: Episode, tokenizer: Any = None) -> Story:
    """Converts an episode to the ``Story`` that a page shows.  ``tokenizer`` is a ``tokenizers.Tokenizer``;
    without one, tokens are shown by their ids."""
    messages = episode.messages
    first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    spans = _sampled(episode, tokenizer)
    known, turns = dict[str, str](), list[Turn]()
    for message in messages[first:]:
        if message["role"] == "assistant":
            number = len(turns)
            parts = _spoken(message)
            if tokens := spans.get(number):
                mean = sum(logprob for _, logprob in tokens) / len(tokens)
                title = f"{len(tokens)} tokens as sampled, {mean:.2f} nats each"
                parts.append(StoryPart("sampled", "", title, tokens=tuple(tokens)))
            turns.append(Turn(number + 1, parts))
            waiting = list(message.get("tool_calls") or ())
        else:
            call = waiting.pop(0) if waiting else None
            turns[-1].parts.extend(_answered(call, str(message.get("content") or ""), known))
    opening = [(str(m["role"]), _short(m.get("content"))) for m in messages[:first]]
    return Story(opening, turns[-MOST_TURNS:], len(turns[:-MOST_TURNS]), episode.files, episode.verdict, episode.best)


def best_verdict(events: Sequence[Event]) -> Event | None:
    """Returns the first ``verdict`` event with the largest speed-up (0 if wrong), or None if there is no such event."""
    judged = [event for event in events if event["kind"] == "verdict"]
    return max(judged, key=lambda event: event["factor"] or 0.0, default=None)


def of_attempt(events: Sequence[Event], number: int) -> Story:
    """Converts the attempt ``number`` of a search to the ``Story`` that a page shows.  ``events`` are the transcript of
    the search."""
    opening, turns = list[tuple[str, str]](), list[Turn]()
    own = [event for event in events if event["attempt"] == number]
    for event in own:
        kind = event["kind"]
        if kind == "turn":
            turns.append(Turn(len(turns) + 1, []))
        elif kind == "message" and not turns:
            opening.append((str(event["message"]["role"]), _short(event["message"].get("content"))))
        elif turns:
            turns[-1].parts.extend(_told(event))
    best = best_verdict(own)
    files, verdict = (best["files"], best["verdict"]) if best else ({}, None)
    return Story(opening, turns[-MOST_TURNS:], len(turns[:-MOST_TURNS]), files, verdict)


def token_texts(ids: Sequence[int], logprobs: Sequence[float], tokenizer: Any) -> list[Token]:
    if tokenizer is None:
        return [(f"⟨{number}⟩", logprob) for number, logprob in zip(ids, logprobs, strict=True)]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    tokens, open_ids, open_sum = list[Token](), list[int](), 0.0
    for number, logprob in zip(ids, logprobs, strict=True):
        open_ids.append(number)
        open_sum += logprob
        if (text := stream.step(tokenizer, number)) is not None:
            tokens.append((text, open_sum))
            open_ids, open_sum = [], 0.0
    if open_ids:
        tokens.append((tokenizer.decode(open_ids, skip_special_tokens=False), open_sum))
    return tokens


def _sampled(episode: Episode, tokenizer: Any) -> dict[int, list[Token]]:
    """Returns turn (from 0) -> sampled tokens, for the last ``MOST_TOKENS`` sampled tokens of the episode.  Returns an
    empty dict if ids and log-probabilities are unknown."""
    places = [i for i, sampled in enumerate(episode.mask) if sampled][-MOST_TOKENS:]
    if not any(episode.ids[i] or episode.logprobs[i] for i in places):
        return {}
    by_turn: dict[int, list[int]] = {}
    for place in places:
        by_turn.setdefault(episode.turns[place], []).append(place)
    return {
        turn: token_texts([episode.ids[i] for i in of], [episode.logprobs[i] for i in of], tokenizer)
        for turn, of in by_turn.items()
    }


def _spoken(message: Mapping[str, Any], thought: str = "") -> list[StoryPart]:
    """Returns an assistant's message as parts: thought, text, tool calls.  ``thought`` is the message's thought,
    if the transcript keeps it outside of ``message``."""
    content = str(message.get("content") or "")
    before, closed, said = content.rpartition("</think>")
    thought = (thought or str(message.get("thought") or "")) + (before.replace("<think>", "") if closed else "")
    parts = [StoryPart("thought", _short(thought))] if thought.strip() else []
    if said.strip():
        parts.append(StoryPart("said", _short(said)))
    return parts + [_called(call) for call in message.get("tool_calls") or ()]


def _called(call: Mapping[str, Any]) -> StoryPart:
    name, arguments = str(call.get("name", "")), call.get("arguments")
    if not isinstance(arguments, dict):
        return StoryPart("call", "", name)
    if name in _WRITERS:
        return StoryPart("call", "", f"{name} {arguments.get('path', '')}"[:200])
    if len(arguments) == 1:
        return StoryPart("call", _short(next(iter(arguments.values()))), name)
    return _arguments(arguments, name)


def _arguments(arguments: Mapping[str, Any], title: str) -> StoryPart:
    return StoryPart("call", _short("\n".join(f"{key}: {value}" for key, value in arguments.items())), title)


def _result(text: str, kind: Kind = "result") -> StoryPart:
    return StoryPart(kind, _short(text), good=False if text.startswith("error") else None)


def _answered(call: Mapping[str, Any] | None, result: str, known: dict[str, str]) -> Iterable[StoryPart]:
    """Yields the parts that show the outcome of a tool call.  For a tool that writes files, the first part is the diff,
    or the call's arguments if the diff is unknown.  The last part is ``result``, but an "ok" after a diff is left out.
    Updates ``known`` (path -> text)."""
    if call is not None and call.get("name") in _WRITERS and isinstance(call.get("arguments"), dict):
        change = None if result.startswith("error") else _change(call, known)
        if change is not None:
            yield _changed(change)
            if result == "ok":
                return
        else:
            yield _arguments(call["arguments"], "its arguments")
    yield _result(result)


def _changed(event: Event) -> StoryPart:
    return StoryPart("diff", event["text"], f"{event['path']} +{event['added']} −{event['removed']}")


def _told(event: Event) -> Iterable[StoryPart]:
    kind = event["kind"]
    if kind == "message":
        message = event["message"]
        if message["role"] == "assistant":
            yield from _spoken(message, str(event.get("thought") or ""))
        else:
            yield _result(str(message.get("content") or ""), "result" if message["role"] == "tool" else "note")
    elif kind == "diff":
        yield _changed(event)
    elif kind == "verdict":
        found, ratio = event["verdict"], event["factor"]
        said = f"correct, {ratio:.2f}×" if ratio else f"{found['status']} {found.get('message', '')}".strip()
        how = f"{event['command']} in strict mode" if found.get("mode") == "strict" else str(event["command"])
        yield StoryPart("verdict", _short(said), how, good=bool(ratio))
    elif kind in ("note", "form"):
        yield StoryPart("note", _short(event["text"]))


def _short(text: Any) -> str:
    return cut(str(text or "").strip("\n"), LONGEST)
