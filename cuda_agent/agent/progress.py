"""Records the progress of ``cuda-agent optimize``, which searches for a fast solution of one task.

A search consists of attempts: conversations in which a model writes solutions. The record has three parts: the correct
solutions, the used budget, and the transcript. The transcript is a file of events, one JSON object per line. With the
option ``--resume``, a search continues from its transcript (docs/optimize.md)."""

import difflib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.wire import Solution, Verdict

Event = dict[str, Any]
Tell = Callable[..., None]
"""Records an event. Takes (kind, attempt=, **facts)."""
SHOWN_ONLY = frozenset({"text", "thought", "again", "wait", "form", "tool", "void"})
ENDS = {
    "target": "the target is reached", "answer": "the model said that it is done", "turns": "all turns are used",
    "tokens": "the token budget is used up", "minutes": "the time is up", "money": "the money is spent",
    "stuck": "the model said the same over and over", "infra": "the sandbox failed", "deadline": "cut by the deadline",
    "server": "the model's server failed or refused", "stopped": "stopped",
    "refused": "the model or its server refuses to answer",
}  # fmt: skip
"""Maps the reason why an attempt or an episode ended to a message for people."""

NO_TARGET = 1e6  # a target that no solution reaches; JSON has no infinity
_DIFF_LINES = 400
_COMPARED_LINES = 2000  # most lines compared per file: repeated lines take cubic time


def difference(path: str, old: str, new: str) -> Event:
    """Returns the fields of a transcript event of the kind "diff". The event says that the text of the file ``path``
    changed from ``old`` to ``new``. The fields are the path, the first lines of the diff, and the numbers of added and
    removed lines. Compares only the first ``_COMPARED_LINES`` lines of each text."""
    before, after = (text.splitlines()[:_COMPARED_LINES] for text in (old, new))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return {"path": path, "text": "\n".join(lines[:_DIFF_LINES]), "added": added, "removed": removed}


def factor(verdict: Verdict) -> float | None:
    """Returns the judged solution's speed-up over eager PyTorch or ``torch.compile``, whichever is faster. Returns None
    if the solution is not correct or was not timed."""
    if verdict.status != "ok":
        return None
    known = [ratio for ratio in (verdict.speedup_eager, verdict.speedup_compile) if ratio is not None]
    return min(known, default=None)


@dataclass(frozen=True)
class Goal:
    """What a solution must reach to end a search."""

    target: float  #: speed-up over the faster of eager and torch.compile; ``NO_TARGET``: none suffices
    until: float | None = None  #: share of the speed of light (``Verdict.speed_of_light``); None: none suffices

    @property
    def is_none(self) -> bool:
        return self.target >= NO_TARGET and self.until is None

    def reached(self, verdict: Verdict) -> bool:
        """Returns whether the solution with this verdict is correct and reaches one of the two."""
        ratio, share = factor(verdict), verdict.speed_of_light
        if ratio is None:
            return False
        return ratio >= self.target or (self.until is not None and share is not None and share >= self.until)

    def __str__(self) -> str:
        """Returns the goal in words: "target 1.05×", "target 90% of the speed of light", both, or "no target"."""
        parts = [f"{self.target:g}×"] if self.target < NO_TARGET else []
        parts += [f"{self.until:.0%} of the speed of light"] if self.until is not None else []
        return f"target {' or '.join(parts)}" if parts else "no target"


@dataclass
class Find:
    """A correct solution that a search found, with its verdicts. Every solution is judged in quick mode. Some are
    also judged in strict mode, which checks and measures more."""

    solution: Solution
    quick: Verdict
    attempt: int  # number of the attempt that wrote the solution
    turn: int  # number of the attempt's turn that wrote it
    strict: Verdict | None = None


@dataclass
class Findings:
    """The correct solutions of a search."""

    by_digest: dict[str, Find] = field(default_factory=dict)  # digest of a solution's files -> the solution
    reached: Find | None = None  # the first solution that reaches the target in strict mode

    def add(self, solution: Solution, verdict: Verdict, attempt: int, turn: int) -> None:
        """Adds ``solution`` if it is new and, according to ``verdict``, correct and timed."""
        if factor(verdict) is not None:
            self.by_digest.setdefault(solution.digest, Find(solution, verdict, attempt, turn))

    def note(self, solution: Solution, verdict: Verdict, attempt: int, turn: int) -> None:
        """Records a verdict on ``solution``. A verdict of quick mode is passed to ``add``. A verdict of another mode is
        stored as the strict verdict of a solution that was added before. It is ignored if the solution was not added,
        or if the sandbox failed."""
        if verdict.mode == "quick":
            self.add(solution, verdict, attempt, turn)
        elif verdict.status != "infra" and solution.digest in self.by_digest:
            self.by_digest[solution.digest].strict = verdict

    @property
    def best(self) -> Find | None:
        """Returns the solution with the greatest speed-up, or None if there are no solutions. The speed-up is from the
        strict verdict, or from the quick verdict if there is no strict one. A solution that is not correct in strict
        mode ranks last."""
        return max(self.by_digest.values(), key=lambda find: factor(find.strict or find.quick) or 0.0, default=None)


@dataclass
class SearchBudget:
    """The limits on all attempts of a search together, and how much of each limit has been used."""

    tokens: int | None = None  # limit on prompt and sampled tokens together; None: no limit
    seconds: float | None = None  # limit on the time; None: no limit
    money: float | None = None  # limit on the cost, in the unit of the prices; None: no limit
    price_in: float = 0.0  # price of a million prompt tokens
    price_out: float = 0.0  # price of a million sampled tokens
    prompt: int = 0  # prompt tokens used so far
    sampled: int = 0  # sampled tokens used so far
    estimated: bool = False  # whether a part of ``prompt`` or ``sampled`` is an estimate
    before: float = 0.0  # seconds that the search took before it was resumed
    began: float = field(default_factory=time.monotonic)  # when this process began the search

    def pay(self, prompt: int, sampled: int, estimated: bool) -> None:
        self.prompt, self.sampled = self.prompt + prompt, self.sampled + sampled
        self.estimated = self.estimated or estimated

    @property
    def elapsed(self) -> float:
        return self.before + time.monotonic() - self.began

    @property
    def left(self) -> float | None:
        return None if self.seconds is None else self.seconds - self.elapsed

    def lacks(self, prompt: int, sampled: int) -> str:
        """Returns "minutes" if the time is already used up. Otherwise, returns the limit that another turn with
        ``prompt`` and ``sampled`` tokens would exceed: "tokens", "money", or "" for none."""
        if self.left is not None and self.left <= 0:
            return "minutes"
        if self.tokens is not None and self.prompt + self.sampled + prompt + sampled > self.tokens:
            return "tokens"
        if self.money is not None and self._price(self.prompt + prompt, self.sampled + sampled) > self.money:
            return "money"
        return ""

    def affordable(self, prompt: int) -> float:
        """Returns how many tokens may be sampled after ``prompt`` more prompt tokens; infinite without a limit."""
        found = math.inf if self.tokens is None else float(self.tokens - self.prompt - self.sampled - prompt)
        if self.money is not None and self.price_out:
            rest = self.money - self._price(self.prompt + prompt, self.sampled)
            found = min(found, rest * 1e6 / self.price_out)
        return max(0.0, found)

    def _price(self, prompt: int, sampled: int) -> float:
        return (prompt * self.price_in + sampled * self.price_out) / 1e6

    def facts(self) -> Event:
        used = {"prompt": self.prompt, "sampled": self.sampled, "estimated": self.estimated}
        return used | {"cost": self._price(self.prompt, self.sampled), "seconds": self.elapsed}


@dataclass
class State:
    """The state of an attempt, from which the attempt can be resumed."""

    messages: list[Event] = field(default_factory=list)  # the conversation
    files: dict[str, str] = field(default_factory=dict)  # files in the work folder: path -> content
    turn: int = 0  # number of the next turn
    parent: str = ""  # digest of the solution from which the attempt started; empty: it started from nothing


class Transcript:
    """Appends the events of a search to a file, and passes each event to a function, for example to show it.

    Events of the kinds in ``SHOWN_ONLY`` are only passed to the function. The attribute ``note`` is the text of the
    latest event of the kind "note" that belongs to an attempt, or "".

    Args:
        path: The file.
        clock: Returns the seconds since the search began. Each event contains this time.
        watch: The function that receives every event."""

    def __init__(self, path: Path, clock: Callable[[], float], watch: Callable[[Event], None]) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._clock, self._watch = clock, watch
        self.note = ""

    def tell(self, kind: str, attempt: int = 0, **facts: Any) -> None:
        event = {"kind": kind, "attempt": attempt, "at": round(self._clock(), 3), **facts}
        if kind == "note" and attempt:
            self.note = facts["text"]
        if kind not in SHOWN_ONLY:
            self._file.write(json.dumps(event, ensure_ascii=False) + "\n")
            self._file.flush()
        self._watch(event)

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> list[Event]:
    """Returns the events in the transcript ``path``. Skips other lines, such as an unfinished last line."""
    with open(path, encoding="utf-8") as file:
        return events_in(file)


def events_in(lines: Iterable[str]) -> list[Event]:
    """Returns the events in the ``lines`` of a transcript. Skips other lines, such as an unfinished last one."""
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "kind" in event:
            events.append(event)
    return events


def replayed(events: Iterable[Mapping[str, Any]]) -> tuple[dict[int, State], Findings, Event]:
    """Rebuilds the state of a search from its transcript's ``events``. Leaves out the messages of an unfinished turn,
    because its tool calls may have no answers.

    Returns:
        The states of the attempts by number, the correct solutions, and the latest recorded use of the budget. The use
        has the keys "prompt" and "sampled" (tokens), "estimated" (whether a token count is an estimate), and "seconds".
        It is empty if no time has passed."""
    states: dict[int, State] = {}
    pending: dict[int, list[Event]] = {}
    findings, spent = Findings(), dict[str, Any]()
    turns: dict[int, int] = {}
    elapsed = 0.0
    for event in events:
        elapsed = max(elapsed, float(event.get("at", 0.0)))
        number, kind = int(event["attempt"]), event["kind"]
        if number:
            state = states.setdefault(number, State())
        if kind == "parent":
            state.files, state.parent = dict(event["files"]), event["digest"]
        elif kind == "turn":
            turns[number] = event["turn"]
            pending[number] = []  # events of an unfinished turn do not count
        elif kind == "message":
            pending.get(number, state.messages).append(dict(event["message"]))
        elif kind == "files":
            state.messages += pending.pop(number, [])
            for path in event["gone"]:
                state.files.pop(path, None)
            state.files |= event["changed"]
            state.turn = turns.get(number, 0) + 1
        elif kind == "verdict":
            _note_verdict(findings, event, turns.get(number, 0))
        elif kind == "spent":
            spent = {key: event[key] for key in ("prompt", "sampled", "estimated", "seconds")}
        elif kind == "ended":
            pending.pop(number, None)
    if elapsed:  # the time after the last answer counts, too
        spent = {"prompt": 0, "sampled": 0, "estimated": False} | spent | {"seconds": elapsed}
    return states, findings, spent


def _note_verdict(findings: Findings, event: Mapping[str, Any], turn: int) -> None:
    verdict = Verdict.from_json(event["verdict"])
    findings.note(Solution(verdict.format, dict(event["files"])), verdict, int(event["attempt"]), turn)
