"""Defines ``Baselines``, the times of a task's own model, with which solutions are compared. Also names and reads the
file that caches them."""

import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.machine import processor
from cuda_agent.sandbox.judge.decisions import Spread
from cuda_agent.sandbox.judge.reference_client import Views
from cuda_agent.sandbox.messages import JudgeSettings

_CLOCK = 4  # version of the way baselines are measured; part of the key of their file


@dataclass
class Baselines:
    """The median seconds per call of a task's model in eager PyTorch and with ``torch.compile``, and other properties
    of the model, such as its floating-point operations. ``None`` means that a value was not measured."""

    eager: float | None = None
    compile: float | None = None
    share: Spread | None = None  # torch.compile's time as a share of eager's
    compile_error: str = ""
    compile_tried: bool = False
    strict: dict[str, dict[str, Any]] = field(default_factory=dict)  # see ``strict.strict_baselines``
    flops: int | None = None  # floating-point operations of one call of the model; 0 if unknown
    written: int | None = None  # bytes that the model writes for its outputs
    views: Views | None = None  # which outputs are only views, so that the model does not write them

    def known(self, mode: str) -> bool:
        """Returns whether all baselines that a verdict of ``mode`` needs were measured. Strict mode needs more."""
        return self.compile_tried and (mode != "strict" or bool(self.strict))

    @property
    def compile_share(self) -> Spread | None:
        """torch.compile's time divided by eager's, with an interval: (lower end, value, upper end). ``None`` if
        unknown."""
        if self.compile is None or not self.eager:
            return None
        return self.share or (self.compile / self.eager,) * 3


def baselines_file(settings: JudgeSettings, digest: str, torch: str) -> Path:
    """Returns the path of a task's cached baselines. ``digest`` identifies the task, and ``torch`` is PyTorch's
    version. The file's name is a hash of everything that the baselines depend on."""
    identity = settings.identity + (", train()" if settings.train_mode else "")
    identity += "" if settings.compiled else ", eager alone"
    key = json.dumps([digest, _CLOCK, torch, processor(), settings.threads, identity])
    return Path(settings.cache) / "baselines" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def read_baselines(file: Path) -> Baselines:
    """Returns the baselines in ``file``, or empty ``Baselines`` if there is no valid file."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Baselines(**json.loads(file.read_text()))
    return Baselines()
