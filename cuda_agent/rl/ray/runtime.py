"""The Ray runtime of PPO: rollout workers, and a trainer with its processes on one machine or on several.

A lost trainer restarts from the newest checkpoint, on the same placement.  Not covered: the loop (``ppo``), the handles
of workers (``players``), and the actors' classes (``actors``).
"""

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from cuda_agent.config import Ppo
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.policy.episode import Episode, to_line
from cuda_agent.policy.model import load_policy
from cuda_agent.rl.ray.actors import RankHost, TrainerActor
from cuda_agent.rl.ray.cluster import on_bundle, raise_if_init_failed
from cuda_agent.rl.ray.players import EpisodeCollector, RayPlayers, ServedPolicy, end_actors, open_placement_group
from cuda_agent.rl.ray.ranks import STREAM
from cuda_agent.rl.ray.transfer import keep, load_weights, parts
from cuda_agent.rl.rollouts import Kind, episodes_of
from cuda_agent.rl.runtime import LearnerLost, MakeCritic, RolloutBatch, settings_of
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic
from cuda_agent.training.distributed import TrainerLost

Result = TypeVar("Result")


class RayRuntime:
    """See ``rl.runtime.Runtime``.  The trainer is on the first bundles of ``group``, one per machine; there is no actor
    of it before ``open`` and after its loss."""

    def __init__(
        self, ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None, group: Any
    ) -> None:
        import ray

        self._ray = ray
        self._ctx, self._settings, self._kind, self._make_critic = ctx, settings, kind, make_critic
        self._group, self._resources = group, ctx.config.ray
        needed = ("policy",) if make_critic is None else ("policy", "critic")
        self._inputs = ray.put({name: list(parts(ctx.inputs[name])) for name in needed if name in ctx.inputs})
        self._trainer: Any = None
        self._hosts: list[Any] = []  # the trainer's actors that hold its processes, if there are several machines
        self._players = RayPlayers(ctx, settings_of(ctx, settings), group, ctx.config.ray.trainers)

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        began = time.monotonic()
        samples = self._settings.samples_per_prompt
        extra = math.ceil(self._resources.oversample * samples)
        jobs = episodes_of(tasks, samples + extra, f"{self._ctx.name}/{step}")
        collector = EpisodeCollector(jobs, samples)
        lost = await self._players.collect(collector, jobs, self._kind)
        metrics = {"cut": float(collector.cut), "workers_lost": float(lost)}
        return RolloutBatch(collector.episodes(), time.monotonic() - began, metrics)

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        lines = [to_line(episode) for episode in episodes]
        metrics: dict[str, float] = await self._of(self._trainer.update.remote(step, lines))
        return metrics

    async def serve(self, version: int) -> None:
        # This process owns the reference, so that the weights outlive the trainer.
        digest, weights = self._trainer.weights.options(num_returns=2).remote()
        await self._players.serve(ServedPolicy(version, await self._of(digest), weights))

    async def save(self, step: int) -> None:
        with tempfile.TemporaryDirectory(dir=self._ctx.work) as name:
            whole = Path(name) / "checkpoint"
            await self._of(self._receive(whole))
            self._ctx.checkpoints.save(step, lambda folder: _move(whole, folder))

    async def _receive(self, folder: Path) -> None:
        await self._trainer.save.remote()
        async for reference in self._trainer.saved.options(**STREAM).remote():
            keep(await reference, folder)

    async def restore(self) -> int:
        if self._trainer is None:
            await self._open_trainer()
        with tempfile.TemporaryDirectory(dir=self._ctx.work) as name:
            whole = Path(name) / "checkpoint"
            step = self._ctx.checkpoints.load(lambda folder: _move(folder, whole))
            if step is not None:
                for part in parts(whole):
                    await self._of(self._trainer.keep.remote(part))
                await self._of(self._trainer.load.remote())
        return step or 0

    async def result(self) -> tuple[Any, Any, Critic | None]:
        model, tokenizer = load_policy(self._ctx.inputs["policy"])
        _, weights = self._trainer.weights.options(num_returns=2).remote()
        load_weights(model, await self._of(weights))
        if self._make_critic is None:
            return model, tokenizer, None
        critic = self._make_critic(self._ctx.inputs)
        load_weights(critic, await self._of(self._trainer.critic.remote()))
        return model, tokenizer, critic

    async def open(self) -> None:
        """Opens all actors at once; returns when the workers can play."""
        await asyncio.gather(self._open_trainer(), self._players.open())

    async def _open_trainer(self) -> None:
        """With several machines, one more actor on the first of them leads and computes nothing."""
        cpus, gpus, machines = self._resources.trainer_cpus, self._resources.trainer_gpus, self._resources.trainers
        if machines > 1:
            host = self._ray.remote(cast(Any, RankHost))
            where = [on_bundle(self._group, number, cpus, gpus) for number in range(machines)]
            self._hosts = [host.options(**options).remote() for options in where]
            cpus, gpus = 0.0, 0.0
        actor = self._ray.remote(cast(Any, TrainerActor)).options(**on_bundle(self._group, 0, cpus, gpus))
        context = WorkerContext(self._ctx.name, self._ctx.config, {}, Path(), self._ctx.cache.absolute())
        self._trainer = actor.remote(context, self._settings, self._inputs, self._make_critic, self._hosts)
        await self._of(self._trainer.open.remote())

    async def close(self) -> None:
        await asyncio.gather(self._players.close(), end_actors(self._trainers()))

    def _trainers(self) -> list[Any]:
        return [actor for actor in (self._trainer, *self._hosts) if actor is not None]

    async def _of(self, reference: Awaitable[Result]) -> Result:
        """Awaits a result of the trainer; raises its own errors unchanged.

        Raises:
            LearnerLost: The trainer or one of its processes is gone; its remaining actors are ended.
        """
        try:
            return await reference
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # the actor's own error
            if isinstance(error, self._ray.exceptions.RayTaskError) and not isinstance(cause, TrainerLost):
                raise (cause if isinstance(cause, Exception) else error) from error
            raise_if_init_failed(error)
            for actor in self._trainers():
                self._ray.kill(actor)
            self._trainer, self._hosts = None, []
            raise LearnerLost(f"the trainer was lost ({type(error).__name__})") from error


@asynccontextmanager
async def open_ray_runtime(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None
) -> AsyncIterator[RayRuntime]:
    """The runtime.  Raises as ``players.open_placement_group`` does."""
    async with open_placement_group(ctx, ctx.config.ray.trainers) as group:
        runtime = RayRuntime(ctx, settings, kind, make_critic, group)
        try:
            await runtime.open()
            yield runtime
        finally:
            await runtime.close()


def _move(folder: Path, into: Path) -> None:
    """Moves all files of ``folder`` into ``into``, which is created if absent."""
    into.mkdir(exist_ok=True)
    for path in folder.iterdir():
        shutil.move(path, into / path.name)
