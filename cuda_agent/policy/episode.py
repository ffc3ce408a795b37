"""Defines episodes. An episode is one attempt of the policy at a task: all tokens of the conversation, and the reward.

A file of episodes (``episodes.jsonl``) has one JSON object per line. Stages of a run such as ``collect`` write it, and
later stages such as ``rft`` read it."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

EPISODES = "episodes.jsonl"  # file name of a set of episodes


def group_of(id: str) -> str:
    """Returns the group of the episode ``id``, such as "warmup/3/relu-17" for "warmup/3/relu-17/2". The last part of
    ``id`` is the number of the sample. All samples for one draw of a task form a group. A task that is drawn twice has
    two groups."""
    return id.rpartition("/")[0]


@dataclass
class Episode:
    """One attempt of the policy at a task. The lists ``ids``, ``mask``, ``logprobs``, ``versions`` and ``turns`` have
    one entry per token of the conversation, prompt included. ``mask`` is 1 on tokens that the policy sampled, and 0 on
    tokens of prompts and tools. Only sampled tokens are trained on. ``reward`` is None if the time limit or an
    infrastructure fault ended the episode. Training drops such episodes."""

    id: str  # <group>/<sample>, unique within its set, e.g. "warmup/3/relu_sum-0017/2"
    task: str  # name
    kind: Literal["single", "agent"]  # one answer without tools, or turns with tools
    ids: list[int]
    mask: list[int]
    logprobs: list[float]  # the engine's log-probabilities; 0.0 where mask is 0
    versions: list[int]  # version of the weights that sampled the token; -1 where mask is 0
    turns: list[int]  # number of the token's turn, from 0
    reward: float | None
    ended: Literal["answer", "turns", "tokens", "deadline", "infra", "refused"]
    verdict: dict[str, Any] | None = None  # verdict of the final workspace (Verdict.to_json)
    best: dict[str, Any] | None = None  # verdict of the best solution judged during the episode
    files: dict[str, str] = field(default_factory=dict)  # the final solution
    messages: list[dict[str, Any]] = field(default_factory=list)  # readable transcript: role, content, tool calls
    flags: list[str] = field(default_factory=list)  # bad patterns in turns: "malformed_call", "unknown_tool", "loop"

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.ids, self.mask, self.logprobs, self.versions, self.turns)}
        if len(lengths) != 1:
            raise ValueError(f"episode {self.id}: per-token lists differ in length: {sorted(lengths)}")

    @property
    def group(self) -> str:
        return group_of(self.id)


def to_line(episode: Episode) -> str:
    """Returns the episode as one line of JSON, without the line end."""
    return json.dumps(asdict(episode), separators=(",", ":"))


def from_line(line: str) -> Episode:
    return Episode(**json.loads(line))


def write_episodes(path: Path, episodes: Iterable[Episode]) -> None:
    with open(path, "w") as file:
        for episode in episodes:
            file.write(to_line(episode) + "\n")


def read_episodes(path: Path) -> Iterator[Episode]:
    with open(path) as file:
        for line in file:
            yield from_line(line)
