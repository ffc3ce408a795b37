"""Lets one process (the driver) control a trainer that runs in other processes (the ranks).

The driver is the process that runs a stage of the workflow. It uses a ``DistributedTrainer`` in place of a ``Trainer``.
A training algorithm (a function in ``recipes``) with the decorator ``over_ranks`` runs on all ranks with the same
arguments, and returns the first rank's result. A ``RankGroup`` sends calls to the ranks, which run on this machine
(``ranks``) or on several machines (``rl.ray.ranks``)."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

from cuda_agent.training.trainer import Trainer

P = ParamSpec("P")
R = TypeVar("R")

GRACE_SECONDS = 10.0  # after the first rank's failure; ranks that are still busy then count as lost
TRAINERS: dict[str, Trainer] = {}  # the trainers in this process, by name, if it is a rank


class TrainerLost(RuntimeError):
    """Some of the trainer's ranks died or failed. All training since the last checkpoint is lost."""


class RankGroup(Protocol):
    """The interface to the ranks (processes) of a trainer, on one machine or on several. Each method acts on all ranks.
    ``place`` makes a trainer called ``name`` from a copy of ``model``. ``call`` calls a method of ``ranks.Rank`` and
    returns the first rank's result. ``save`` writes a checkpoint into ``folder`` on the caller's machine. ``load``
    restores a checkpoint from ``folder``. It returns the trainer's number of optimizer steps and the time spent in
    imitation steps, in seconds."""

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None: ...
    def call(self, method: str, *arguments: Any) -> Any: ...
    def save(self, name: str, folder: Path) -> None: ...
    def load(self, name: str, folder: Path) -> tuple[int, float]: ...


def joint_results(calls: Sequence[Future[R]], gone: type[Exception] = TrainerLost) -> list[R]:
    """Waits for ``calls``, one call to each rank, and returns the results. Raises ``TrainerLost`` if a call raised an
    error of the type ``gone``, which means that a rank's process has died, or if only some of the calls failed. If all
    calls failed, raises the first rank's error."""
    wait(calls, return_when=FIRST_EXCEPTION)
    failed = _errors(calls)
    if not any(isinstance(error, gone | TrainerLost) for error in failed):
        wait(calls, GRACE_SECONDS)
        failed = _errors(calls)
    for error in failed:
        if isinstance(error, gone | TrainerLost):
            raise TrainerLost(str(error)) from error
    if len(failed) == len(calls):
        raise failed[0]
    if failed:
        raise TrainerLost(f"ranks of the trainer do not follow the others: {failed[0]}") from failed[0]
    return [call.result() for call in calls]


def _errors(calls: Sequence[Future[Any]]) -> list[BaseException]:
    return [error for call in calls if call.done() and (error := call.exception()) is not None]


class DistributedTrainer:
    """A handle through which the driver process controls a trainer that runs on all ranks. ``name`` identifies the
    trainer on the ranks. The attribute ``model`` is the driver's copy of the model. If the ranks have changed the
    weights, reading this attribute fetches them. If the handle is an argument of a call to the ranks, each rank
    receives its own ``Trainer`` in place of the handle."""

    def __init__(self, ranks: RankGroup, name: str, model: Any, **options: Any) -> None:
        self.step, self.seconds = 0, 0.0
        self.ranks, self.name, self._model, self._stale = ranks, name, model, False
        ranks.place(name, model, options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_rank, (self.name,)

    @property
    def model(self) -> Any:
        if self._stale:
            weights = self.ranks.call("weights", self.name)
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    if name in weights:
                        parameter.copy_(weights[name])
            self._stale = False
        return self._model

    def save(self, folder: Path) -> None:
        self.ranks.save(self.name, folder)

    def load(self, folder: Path) -> None:
        self.step, self.seconds = self.ranks.load(self.name, folder)
        self._stale = True

    def follow(self, step: int, seconds: float) -> None:
        """Updates the handle after a call to the ranks. ``step`` is the ranks' number of optimizer steps, and
        ``seconds`` is their time spent in imitation steps. If ``step`` has changed, marks the driver's copy of the
        model as outdated."""
        self._stale = self._stale or step != self.step
        self.step, self.seconds = step, seconds


def _of_rank(name: str) -> Trainer:
    return TRAINERS[name]


def over_ranks(recipe: Callable[P, R]) -> Callable[P, R]:
    """Decorates ``recipe``, a training algorithm, so that it can run on the ranks. If a positional argument of a call
    is a ``DistributedTrainer``, the recipe runs on all ranks, and the call returns the first rank's result. Otherwise
    the recipe runs in this process."""

    @functools.wraps(recipe)
    def spread(*args: P.args, **kwargs: P.kwargs) -> R:
        trainers = [thing for thing in args if isinstance(thing, DistributedTrainer)]
        if not trainers:
            return recipe(*args, **kwargs)
        result, states = trainers[0].ranks.call("run", spread, args, kwargs)
        for trainer in trainers:
            trainer.follow(*states[trainer.name])
        return cast(R, result)

    return spread
