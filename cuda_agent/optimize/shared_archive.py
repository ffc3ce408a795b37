"""Keeps the archive of a search in a store, which the processes of the search share.

    searches/NAME/order.json        the problem and the settings of the search
    searches/NAME/facts.json        when the search began, the baselines, and what attempts had used at the last start
    searches/NAME/attempts/N.jsonl  the transcript of attempt N up to its last whole turn; 0: the search itself
    searches/NAME/reached/GOAL      the digest of a solution that reaches the goal in strict mode
    searches/NAME/result/           the folder of the result

One process plays an attempt at a time and alone writes its transcript.  All others may read it at any moment: an object
of the store is written as a whole."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.agent.progress import Event, Find, Findings, Goal, SearchBudget, State, events_in, replayed
from cuda_agent.optimize.folder import SearchOrder
from cuda_agent.storage import Store, side_by_side

_DONE = ("target", "answer", "turns", "stuck", "refused")  # ends after which an attempt is not taken up again
_SPENT = ("prompt", "sampled", "cost")


@dataclass(frozen=True)
class Archive:
    """What all attempts of a search have published so far."""

    transcripts: dict[int, list[Event]]  # events by the number of the attempt; 0: the search itself
    states: dict[int, State] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    @classmethod
    def of(cls, transcripts: dict[int, list[Event]]) -> "Archive":
        states, findings, _ = replayed(merged(transcripts))
        return cls(transcripts, states, findings)

    def starts(self, number: int) -> list[str | None]:
        """Returns the digest of the solution from which each attempt before ``number`` started, "" if it started from
        nothing, or None if it has published nothing."""
        return [self.states[one].parent if one in self.states else None for one in range(1, number)]

    def busy(self, number: int) -> list[int]:
        """Returns the numbers of the attempts before ``number`` that have not ended."""
        return [one for one in range(1, number) if not self.ended(one)]

    def ended(self, number: int) -> str:
        """Returns why the attempt ended, or "" if it did not end or went on since."""
        events = self.transcripts.get(number) or [{}]
        return str(events[-1]["why"]) if events[-1].get("kind") == "ended" else ""

    def is_done(self, number: int) -> bool:
        return self.ended(number) in _DONE

    def why(self) -> str:
        """Returns why the attempt that ended last ended; "stopped" if none has ended."""
        ends = [events[-1] for events in self.transcripts.values() if events and events[-1]["kind"] == "ended"]
        return str(max(ends, key=lambda event: event["at"])["why"]) if ends else "stopped"

    def reached(self, goal: Goal) -> Find | None:
        """Returns the first solution that reaches ``goal`` in strict mode, or None."""
        finds = self.findings.by_digest.values()
        return next((find for find in finds if find.strict and goal.reached(find.strict)), None)

    def spent(self, number: int) -> Event:
        """Returns what the attempt has used: its last event of the kind "spent", or zeros."""
        zero = dict.fromkeys((*_SPENT, "seconds"), 0) | {"estimated": False}
        return next((event for event in reversed(self.transcripts.get(number, ())) if event["kind"] == "spent"), zero)

    def used(self) -> dict[str, dict[str, float]]:
        """Returns what each attempt has used so far: number -> name -> amount."""
        spent = {number: self.spent(number) for number in self.transcripts if number}
        return {str(number): {name: event[name] for name in _SPENT} for number, event in spent.items()}

    def budget(
        self, order: SearchOrder, number: int, count: int, before: Mapping[str, Mapping[str, float]]
    ) -> SearchBudget:
        """Returns the budget of attempt ``number``.  Of the tokens and the money that were left when the players began,
        each of the ``count`` players has an equal part.  Each has all of the time, because players are played side by
        side.  The budget leaves out what other attempts of the same player have used.  ``before`` is what ``used``
        returned when the players began."""
        player, own = player_of(number, count), self.spent(number)
        others = [one for one in self.transcripts if one not in (0, number) and player_of(one, count) == player]

        def left(limit: float | None, *names: str) -> float | None:
            if limit is None:
                return None
            spent = {one: sum(self.spent(one)[name] for name in names) for one in others}
            past = {int(one): sum(amounts[name] for name in names) for one, amounts in before.items()}
            part = max(0.0, limit - sum(past.values())) / count
            return past.get(number, 0) + part - sum(amount - past.get(one, 0) for one, amount in spent.items())

        tokens = left(order.tokens, "prompt", "sampled")
        seconds = sum(self.spent(one)["seconds"] for one in others)
        return SearchBudget(
            None if tokens is None else int(tokens),
            None if order.minutes is None else order.minutes * 60 - seconds,
            left(order.money, "cost"),
            order.price_in,
            order.price_out,
            own["prompt"],
            own["sampled"],
            own["estimated"],
            own["seconds"],
        )


def player_of(attempt: int, count: int) -> int:
    """Returns the player, from 0, of the attempt with this number, from 1. ``count`` is the number of players."""
    return (attempt - 1) % count


def merged(transcripts: Mapping[int, Sequence[Event]]) -> list[Event]:
    """Returns the events of all attempts as one transcript, in the order of their times.  Its events of the kind
    "spent" tell what all attempts together have used, as those of a search in one process do."""
    events = sorted((event for events in transcripts.values() for event in events), key=lambda event: event["at"])
    used: dict[int, Event] = {}
    found = []
    for event in events:
        if event["kind"] == "spent":
            used[event["attempt"]] = event
            total = {name: sum(one[name] for one in used.values()) for name in _SPENT}
            estimated = any(one["estimated"] for one in used.values())
            event = event | total | {"estimated": estimated, "seconds": event["at"]}
        found.append(event)
    return found


@dataclass(frozen=True)
class SharedArchive:
    """The archive of the search ``name`` in ``store``."""

    store: Store
    name: str

    def key(self, *parts: str) -> str:
        return "/".join(("searches", self.name, *parts))

    def read(self) -> Archive:
        folder = self.key("attempts")
        keys = [key for key in self.store.list(folder) if key.endswith(".jsonl")]
        data = side_by_side(self.store.get, keys)
        numbers = [int(Path(key).stem) for key in keys]
        texts = (one.decode().split("\n") for one in data)  # text may hold other characters that end a line
        return Archive.of({number: events_in(lines) for number, lines in zip(numbers, texts, strict=True)})

    def publish(self, number: int, transcript: Path) -> None:
        """Publishes the transcript of attempt ``number``, a file."""
        self.store.put(self.key("attempts", f"{number}.jsonl"), transcript)

    def add(self, events: Iterable[Event]) -> None:
        """Adds ``events`` to the transcript of the search itself."""
        key = self.key("attempts", "0.jsonl")
        self.store.put(key, (self.store.find(key) or b"") + _lines(events))

    def tell_reached(self, goal: Goal, digest: str) -> None:
        self.store.put(self._goal_key(goal), digest.encode())

    def look_reached(self, goal: Goal) -> Find | None:
        """Returns a solution that reaches ``goal``, if an attempt has told of one.  This takes one small request, where
        ``read`` reads everything."""
        told = self.store.find(self._goal_key(goal))
        return self.read().reached(goal) if told else None

    def _goal_key(self, goal: Goal) -> str:
        return self.key("reached", f"{goal.target:g}-{goal.until or 0:g}")

    def order(self) -> dict[str, Any] | None:
        """Returns what ``order.json`` holds, or None if there is no such search."""
        data = self.store.find(self.key("order.json"))
        return None if data is None else json.loads(data)

    def facts(self) -> dict[str, Any]:
        data = self.store.find(self.key("facts.json"))
        return {} if data is None else json.loads(data)


def write_transcript(path: Path, events: Iterable[Event]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_lines(events))


def _lines(events: Iterable[Event]) -> bytes:
    return "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events).encode()
