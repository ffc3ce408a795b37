"""Converts an episode, or an attempt of the command ``optimize``, to the ``Story`` that a page shows turn by turn.

An episode is one agent's work on a task.  An attempt is one of the conversations in which ``optimize`` lets a model
write solutions.  A turn is a message of the model with the results of its tool calls.

A ``Story`` shows changes of files as diffs.  The transcript of an attempt already contains the diffs.  An episode has
no diffs, so this module computes them from the calls of the tools Write, Edit and MultiEdit.  It cannot show changes
that the shell commands of an episode make."""

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cuda_agent.agent.compaction import cut
from cuda_agent.agent.progress import Event, difference
from cuda_agent.policy.episode import Episode

Kind = Literal["thought", "said", "call", "result", "diff", "verdict", "note", "sampled"]
Token = tuple[str, float]
"""Text and log-probability (in nats).  Several tokens that encode a single character are merged into one."""

MOST_TURNS, MOST_TOKENS, LONGEST = 80, 4000, 6000  # turns and sampled tokens of an episode, characters of a text
_WRITERS = ("Write", "Edit", "MultiEdit", "NotebookEdit")
_FAILED = re.compile(
    r"error|build error|exit code \d+$|(verify|profile): (wrong|crash|timeout|cheat)"
)  # a result's start


@dataclass(frozen=True)
class StoryPart:
    """One part of a turn (a message of the model with the results of its tool calls), such as one tool call."""

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
    """What a page shows of an episode (one agent's work on a task) or of an attempt of the command ``optimize``.
    ``files`` (path -> text) is the last solution of an episode, or the best solution of an attempt.  ``verdict`` is the
    sandbox's verdict on these files."""

    opening: list[tuple[str, str]]  # role and text of each message before the first turn
    turns: list[Turn]  # the last turns
    earlier: int  # number of turns that were left out before ``turns``
    files: dict[str, str]
    verdict: dict[str, Any] | None
    best: dict[str, Any] | None = None  # verdict on the episode's best solution


def _change(call: Mapping[str, Any], known: dict[str, str]) -> Event | None:
    """Applies a call of the tool Write, Edit or MultiEdit to ``known`` (path -> text), and returns the diff.

    Returns None, and changes nothing, if ``known`` lacks the file or the text that an edit replaces.  The effect of the
    tool NotebookEdit is not computed: removes the file from ``known``, and returns None."""
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
    """A row in a list of episodes: facts about one episode (an agent's work on a task), or about one attempt of the
    command ``optimize``."""

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
    waiting = list[Mapping[str, Any]]()  # calls of the last turn that have no result yet
    for message in messages[first:]:
        if message["role"] == "assistant":
            number = len(turns)
            parts = _spoken(message)
            if turns:
                turns[-1].parts.extend(map(_called, waiting))
            if tokens := spans.get(number):
                mean = sum(logprob for _, logprob in tokens) / len(tokens)
                title = f"{len(tokens)} tokens as sampled, {mean:.2f} nats each"
                parts.append(StoryPart("sampled", "", title, tokens=tuple(tokens)))
            turns.append(Turn(number + 1, parts))
            waiting = list(message.get("tool_calls") or ())
        else:
            call = waiting.pop(0) if waiting else None
            turns[-1].parts.extend(_answered(call, str(message.get("content") or ""), known))
    if turns:
        turns[-1].parts.extend(map(_called, waiting))
    opening = [(str(m["role"]), _short(m.get("content"))) for m in messages[:first]]
    return Story(opening, turns[-MOST_TURNS:], len(turns[:-MOST_TURNS]), episode.files, episode.verdict, episode.best)


def best_verdict(events: Sequence[Event]) -> Event | None:
    """Returns the event of the kind ``verdict`` with the largest speed-up, or the first one if several have it.  A
    solution that is not correct, or not timed, counts as 0.  Returns None if ``events`` has no verdict."""
    judged = [event for event in events if event["kind"] == "verdict"]
    return max(judged, key=lambda event: event["factor"] or 0.0, default=None)


def of_attempt(events: Sequence[Event], number: int) -> Story:
    """Converts one attempt of the command ``optimize`` to the ``Story`` that a page shows.  ``events`` are the recorded
    events of all attempts; ``number`` is the number of the attempt."""
    opening, turns = list[tuple[str, str]](), list[list[Event]]()
    own = [event for event in events if event["attempt"] == number]
    for event in own:
        if event["kind"] == "turn":
            turns.append([])
        elif turns:
            turns[-1].append(event)
        elif event["kind"] == "message":
            opening.append((str(event["message"]["role"]), _short(event["message"].get("content"))))
    shown = [Turn(len(turns) - i, _parts(events)) for i, events in enumerate(turns[::-1][:MOST_TURNS])][::-1]
    best = best_verdict(own)
    files, verdict = (best["files"], best["verdict"]) if best else ({}, None)
    return Story(opening, shown, len(turns) - len(shown), files, verdict)


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
    """Returns the last ``MOST_TOKENS`` tokens that the model sampled in the episode, as a dict: turn (from 0) ->
    tokens.  Returns an empty dict if the episode has neither token ids nor log-probabilities."""
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
    """Returns the parts of an assistant's message in order: thought, text, tool calls.  The thought is text of the
    message itself, in front of ``</think>`` or in its own field.  For a transcript that stores thoughts elsewhere, it
    is the argument ``thought``."""
    content = str(message.get("content") or "")
    before, closed, said = content.rpartition("</think>")
    thought = (thought or str(message.get("thought") or "")) + (before.replace("<think>", "") if closed else "")
    parts = [StoryPart("thought", _short(thought))] if thought.strip() else []
    if said.strip():
        parts.append(StoryPart("said", _short(said)))
    if refused := message.get("refused"):
        parts.append(StoryPart("note", _short(refused)))
    return parts


def _called(call: Mapping[str, Any], failed: bool = False) -> StoryPart:
    name, arguments = str(call.get("name", "")), call.get("arguments")
    part = StoryPart("call", "", name, good=False if failed else None)
    if not isinstance(arguments, dict):
        return part
    if name in _WRITERS:
        return replace(part, title=f"{name} {arguments.get('path', '')}"[:200])
    if len(arguments) == 1:
        return replace(part, text=_short(next(iter(arguments.values()))))
    return replace(part, text=_listed(arguments))


def _listed(arguments: Mapping[str, Any]) -> str:
    return _short("\n".join(f"{key}: {value}" for key, value in arguments.items()))


def _result(text: str, failed: bool) -> StoryPart:
    return StoryPart("result", _short(text), good=False if failed else None)


def _fails(result: str) -> bool:
    """Returns whether a tool that returned the text ``result`` failed, as far as the text tells."""
    return _FAILED.match(result) is not None


def _answered(call: Mapping[str, Any] | None, result: str, known: dict[str, str]) -> Iterable[StoryPart]:
    """Yields the parts that show a tool call and what it did.  ``result`` is the text that the tool returned.

    For a tool that writes files, the part after the call is the diff, or the call's arguments if the diff cannot be
    computed.  The last part is ``result``.  It is left out if it is only "ok" and there is a diff.  Updates ``known``
    (path -> text), the files as far as earlier calls tell."""
    failed = _fails(result)
    if call is not None:
        yield _called(call, failed)
    if call is not None and call.get("name") in _WRITERS and isinstance(call.get("arguments"), dict):
        change = None if result.startswith("error") else _change(call, known)
        if change is not None:
            yield _changed(change)
            if result == "ok":
                return
        else:
            yield StoryPart("call", _listed(call["arguments"]), "its arguments")
    yield _result(result, failed)


def _changed(event: Event) -> StoryPart:
    return StoryPart("diff", event["text"], f"{event['path']} +{event['added']} −{event['removed']}")


def _parts(events: Sequence[Event]) -> list[StoryPart]:
    """Returns the parts of one turn of an attempt from the turn's ``events``: what the model said, then each call with
    the diffs, verdicts and the result that it led to, then everything else.

    While calls run, their diffs and verdicts are recorded, and an event ``result`` after each call.  The texts of the
    results follow together.  Older transcripts have no such event: there, diffs and verdicts come last."""
    said, calls, rest = list[StoryPart](), list[list[StoryPart]](), list[StoryPart]()
    errors = [bool(event["error"]) for event in events if event["kind"] == "result"]
    ran = answered = 0
    for event in events:
        kind, message = event["kind"], event.get("message") or {}
        if message.get("role") == "assistant":
            said = _spoken(message, str(event.get("thought") or ""))
            calls = [[_called(call)] for call in message.get("tool_calls") or ()]
        elif message.get("role") == "tool":
            text = str(message.get("content") or "")
            failed = errors[answered] if answered < len(errors) else _fails(text)
            if answered < len(calls):
                parts = calls[answered]
                parts[0] = replace(parts[0], good=False if failed else None)
                if text != "ok" or len(parts) == 1:  # a diff says that a file was written
                    parts.append(_result(text, failed))
            else:
                rest.append(_result(text, failed))
            answered += 1
        elif kind == "result":
            ran += 1
        else:
            (calls[ran] if errors and ran < len(calls) else rest).extend(_told(event))
    return [*said, *(part for parts in calls for part in parts), *rest]


def _told(event: Event) -> Iterable[StoryPart]:
    kind = event["kind"]
    if kind == "message":
        yield StoryPart("note", _short(event["message"].get("content")))
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
