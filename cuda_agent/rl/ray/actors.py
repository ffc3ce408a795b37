"""The classes of Ray's actors: a rollout worker, which plays episodes with its own engine and sandbox; the trainer; and
the trainer's processes on one machine.  Plain classes, of which ``players`` and ``trainer`` make actors.

Arguments and results travel as bytes, lines and arrays, so that actors and stage need no common folder: inputs as
{path: bytes}, checkpoints part by part, episodes in their wire form, weights as {name: array} with a digest that must
hold after loading.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cuda_agent.config import Ppo
from cuda_agent.context import WorkerContext
from cuda_agent.errors import BadConfiguration
from cuda_agent.machine import die_with_parent, gpus
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.policy.episode import from_line, to_line
from cuda_agent.policy.lora import merged_parameters
from cuda_agent.policy.model import load_model
from cuda_agent.rl.ray.ranks import SpreadRanks
from cuda_agent.rl.ray.transfer import Files, Part, Weights, keep, load_weights, parts, unpack, weights_of
from cuda_agent.rl.rollouts import EpisodeBudget, Job, Kind, Rollouts, open_rollouts
from cuda_agent.rl.runtime import ActorCritic
from cuda_agent.rl.trainers import shared_training
from cuda_agent.sandbox.jail.scratch import make_folder, remove
from cuda_agent.training.ranks import Ranks


class RolloutWorker:
    """Plays episodes.  ``context`` names the stage's cache, which is used if this machine has it; folders of ``inputs``
    are unpacked here."""

    def __init__(self, context: WorkerContext, budget: EpisodeBudget, inputs: Mapping[str, Files]) -> None:
        die_with_parent()  # Ray's workers run on for seconds after a killed raylet
        self._stack = AsyncExitStack()
        self._context = _with_private_folders(context, inputs, self._stack)
        self._budget = budget
        self._rollouts: Rollouts | None = None
        self._playing: dict[int, asyncio.Task[Any]] = {}

    async def open(self) -> int:
        """Opens engine and sandbox.  Returns the process id."""
        self._rollouts = await self._stack.enter_async_context(
            open_rollouts(self._context, self._context.inputs["policy"], self._budget)
        )
        return os.getpid()

    async def play(self, jobs: Sequence[Job], kind: Kind) -> AsyncIterator[str]:
        """Yields the episodes of ``jobs`` as they finish, until ``stop``."""
        assert self._rollouts is not None, "open comes first"
        finished: asyncio.Queue[str | None] = asyncio.Queue()
        playing = asyncio.create_task(
            self._rollouts.play(jobs, kind, lambda episode: finished.put_nowait(to_line(episode)))
        )
        playing.add_done_callback(lambda task: finished.put_nowait(None))
        self._playing[id(playing)] = playing
        try:
            while (line := await finished.get()) is not None:
                yield line
            if not playing.cancelled():
                playing.result()  # raises its error
        finally:
            playing.cancel()
            del self._playing[id(playing)]

    async def stop(self) -> None:
        """Cancels all running episodes."""
        for playing in self._playing.values():
            playing.cancel()

    async def serve(self, version: int, weights: Weights, expected: str) -> None:
        """Serves these weights from now on; turns that are being sampled finish on the old ones.

        Raises:
            EngineError: The loaded model's digest differs from the trainer's.
        """
        assert self._rollouts is not None, "open comes first"
        rollouts = self._rollouts
        await rollouts.engine.compute(lambda: load_weights(rollouts.model, weights, expected))
        await rollouts.engine.update_from(rollouts.model, version)

    async def close(self) -> None:
        await self.stop()
        await self._stack.aclose()


class TrainerActor:
    """The trainer.  ``make_critic`` is called with the unpacked ``inputs``; None without a critic.  ``hosts``: the
    ``RankHost`` actors that it leads, none if its processes are on its own machine."""

    def __init__(
        self, context: WorkerContext, settings: Ppo, inputs: Mapping[str, Files], make_critic: Any, hosts: Any
    ) -> None:
        die_with_parent()
        self._stack = ExitStack()
        self._context = _with_private_folders(context, inputs, self._stack)
        self._settings, self._make_critic, self._hosts = settings, make_critic, hosts
        self._coming = self._context.work / "checkpoint"
        self._learner: Any = None

    def open(self) -> None:
        if self._hosts:
            context = replace(self._context, ranks=SpreadRanks(self._hosts, self._context))
        else:
            context = self._stack.enter_context(shared_training(self._context))
        critic = None if self._make_critic is None else self._make_critic(context.inputs)
        self._learner = ActorCritic(context, self._settings, load_model(context.inputs["policy"]), critic)

    def update(self, step: int, lines: Sequence[str]) -> dict[str, float]:
        metrics: dict[str, float] = self._learner.update(step, [from_line(line) for line in lines])
        return metrics

    def weights(self) -> tuple[str, Weights]:
        """The policy's weights and their digest, as two results."""
        model = self._learner.actor.model
        return digest(merged_parameters(model)), weights_of(model)

    def critic(self) -> Weights:
        return weights_of(self._learner.critic.model)

    def save(self) -> Iterator[Part]:
        with TemporaryDirectory(dir=self._coming.parent) as folder:
            self._learner.save(Path(folder))
            yield from parts(Path(folder))

    def keep(self, part: Part) -> None:
        """Takes one part of the checkpoint for ``load``."""
        keep(part, self._coming)

    def load(self) -> None:
        try:
            self._learner.load(self._coming)
        finally:
            shutil.rmtree(self._coming, ignore_errors=True)

    def close(self) -> None:
        self._stack.close()


class RankHost:
    """The trainer's processes on one machine; see ``training.ranks.Ranks``."""

    def __init__(self) -> None:
        die_with_parent()
        self._home = make_folder("actor")
        self._home.chmod(0o700)
        self._coming, self._going = self._home / "coming", self._home / "going"
        self._ranks: Any = None

    def start(self, count: int, settings: Mapping[str, Any]) -> None:
        if settings["device"] == "cuda" and (here := gpus()) < count:
            raise BadConfiguration(f"training.num_processes: {count} on GPUs of each machine, and one has {here}")
        self._ranks = Ranks(count, **settings)

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        self._ranks.place(name, model, options)

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        return self._ranks.call(method, *arguments)

    def save(self, trainer: Any) -> None:
        """Writes this machine's part of a checkpoint, which ``saved`` yields."""
        shutil.rmtree(self._going, ignore_errors=True)
        self._going.mkdir()
        self._ranks.save(trainer, self._going)

    def saved(self) -> Iterator[Part]:
        yield from parts(self._going)
        shutil.rmtree(self._going)

    def keep(self, part: Part) -> None:
        """Takes one part of the checkpoint for ``load``."""
        keep(part, self._coming)

    def load(self, name: str) -> tuple[int, float]:
        try:
            found: tuple[int, float] = self._ranks.load(name, self._coming)
            return found
        finally:
            shutil.rmtree(self._coming, ignore_errors=True)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        remove(self._home)


def _with_private_folders(
    context: WorkerContext, inputs: Mapping[str, Files], stack: ExitStack | AsyncExitStack
) -> WorkerContext:
    """``context`` with private folders of this process, which are removed when ``stack`` is closed."""
    home = make_folder("actor")
    home.chmod(0o700)
    stack.callback(remove, home)
    for name, files in inputs.items():
        unpack(files, home / name)
    (home / "work").mkdir()
    return replace(context, inputs={name: home / name for name in inputs}, work=home / "work")
