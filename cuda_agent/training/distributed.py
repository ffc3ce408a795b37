"""A trainer whose ranks are other processes, seen from the driver process.

A ``DistributedTrainer`` has the interface of a ``Trainer``: recipes that are ``over_ranks`` run on all ranks at once
with the same arguments and return the first rank's result.  A ``RankGroup`` reaches the ranks (``ranks`` on this
machine, ``rl.ray.ranks`` on several).  Not covered: a rank's computation (``rank``, ``sharding``), starting ranks.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


class TrainerLost(RuntimeError):
    """A rank died.  Training since the last checkpoint is lost; new ranks may resume from there."""


@dataclass(frozen=True)
class TrainerRef:
    """A reference to a trainer of the ranks, inside the arguments of a recipe."""

    name: str
    seconds: float


class RankGroup(Protocol):
    """All ranks, on any machine."""

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        """Makes a trainer called ``name`` on every rank from a model, which the ranks own from then on."""
        ...

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of every ``TrainerRank`` and returns the first rank's result."""
        ...

    def save(self, trainer: TrainerRef, folder: Path) -> None:
        """Writes every rank's part of a checkpoint into ``folder`` on this process's machine."""
        ...

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        """Loads the checkpoint in ``folder`` on every rank; returns its step and seconds."""
        ...


class DistributedTrainer:
    """A ``Trainer`` on ranks.  ``model`` is this process's copy; reading it fetches the current weights."""

    def __init__(self, ranks: RankGroup, name: str, model: Any, **options: Any) -> None:
        self.step, self.seconds = 0, 0.0
        self._ranks, self._name, self._model, self._stale = ranks, name, model, False
        ranks.place(name, model, options)

    @property
    def model(self) -> Any:
        import torch

        if self._stale:
            weights = self._ranks.call("weights", self._name)
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    if name in weights:
                        parameter.copy_(weights[name])
            self._stale = False
        return self._model

    def save(self, folder: Path) -> None:
        from cuda_agent.training.checkpoint import seal

        self._ranks.save(self._named(), folder)
        seal(folder)

    def load(self, folder: Path) -> None:
        self.step, self.seconds = self._ranks.load(self._name, folder)
        self._stale = True

    def run(self, recipe: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Runs a recipe over this trainer and others of the same ranks."""
        trainers = [thing for thing in arguments if isinstance(thing, DistributedTrainer)]
        passed = [thing._named() if isinstance(thing, DistributedTrainer) else thing for thing in arguments]
        result, facts = self._ranks.call("run", recipe, passed, keywords)
        for trainer in trainers:
            step, trainer.seconds = facts[trainer._name]
            trainer._stale, trainer.step = trainer._stale or step != trainer.step, step
        return result

    def _named(self) -> TrainerRef:
        return TrainerRef(self._name, self.seconds)


def over_ranks(recipe: Callable[P, R]) -> Callable[P, R]:
    """Makes a recipe run on the ranks of the trainers that it is given."""

    @functools.wraps(recipe)
    def spread(*args: P.args, **kwargs: P.kwargs) -> R:
        for thing in args:
            if isinstance(thing, DistributedTrainer):
                return cast(R, thing.run(recipe.__name__, args, kwargs))
        return recipe(*args, **kwargs)

    return spread
