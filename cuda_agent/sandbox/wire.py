"""The sandbox's wire format: what crosses between a client, the judge and its workers.

Only the standard library is imported here: the worker side of the sandbox may import this module and nothing else of
the package.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Lane = Literal["plan", "extension", "python"]
Mode = Literal["quick", "strict"]
Status = Literal["ok", "build_error", "wrong", "cheat", "timeout", "crash", "infra"]


@dataclass(frozen=True)
class Solution:
    """The files that answer a task, by path relative to the work folder.  ``lane`` decides how they are run."""

    lane: Lane
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """sha256 over lane and files, independent of their order."""
        return hashlib.sha256(json.dumps([self.lane, sorted(self.files.items())]).encode()).hexdigest()


@dataclass
class Verdict:
    """What the judge says of one solution.

    Times are seconds per call (medians); ``None`` where the solution never got that far.  ``reward`` is the paper's
    Eq. 1: -1 not correct, 1 correct, 2 more than 5 % faster than eager, 3 more than 5 % faster than eager and
    ``torch.compile``; ``None`` for ``infra``, which is never charged to the candidate.
    """

    status: Status
    lane: Lane
    mode: Mode
    device: str  # "cpu" or "cuda"
    clock: Literal["real", "model"]
    message: str = ""  # for the author of the solution: why it was refused, cut to what can be used
    seconds: float | None = None
    eager_seconds: float | None = None
    compile_seconds: float | None = None
    samples: list[float] = field(default_factory=list)  # raw timed calls, seconds
    checks: int = 0  # correctness checks passed
    max_error: float | None = None  # largest absolute difference over all checks
    phases: dict[str, float] = field(default_factory=dict)  # seconds spent in build, start, check, time
    cached: bool = False

    @property
    def reward(self) -> int | None:
        if self.status == "infra":
            return None
        if self.status != "ok":
            return -1
        beats_eager = _faster(self.seconds, self.eager_seconds)
        beats_compile = _faster(self.seconds, self.compile_seconds)
        if beats_eager and beats_compile:
            return 3
        return 2 if beats_eager else 1

    @property
    def speedup_eager(self) -> float | None:
        return self.eager_seconds / self.seconds if self.seconds and self.eager_seconds else None

    @property
    def speedup_compile(self) -> float | None:
        return self.compile_seconds / self.seconds if self.seconds and self.compile_seconds else None

    def to_json(self) -> dict[str, Any]:
        """The fields, with the derived reward and speed-ups."""
        return asdict(self) | {
            "reward": self.reward,
            "speedup_eager": self.speedup_eager,
            "speedup_compile": self.speedup_compile,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Verdict":
        """The inverse of ``to_json``; derived fields are ignored."""
        return cls(**{k: v for k, v in data.items() if k in cls.__dataclass_fields__})


def _faster(seconds: float | None, baseline: float | None) -> bool:
    """More than 5 % faster: (baseline - seconds) / baseline > 0.05 (paper, Eq. 1)."""
    return seconds is not None and baseline is not None and seconds < 0.95 * baseline


@dataclass
class ToolResult:
    """What a tool of the workspace gave back: text for the model, and whether it was an error."""

    text: str
    error: bool = False
