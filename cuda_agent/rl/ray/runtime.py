"""The Ray runtime of PPO: rollout workers and a trainer, placed together.

A lost trainer restarts from the newest checkpoint.  Weights go from the trainer to the workers once a step, through
Ray's object store; a worker that starts late gets the newest.

What it does not cover: the loop (``ppo``), the handles of workers (``players``) and trainer (``trainer``), and the
actors' classes (``actors``).
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cuda_agent.config import Ppo
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.ray.players import EpisodeCollector, RayPlayers, ServedPolicy, end_actors, open_placement_group
from cuda_agent.rl.ray.trainer import TrainerHandle
from cuda_agent.rl.rollouts import Kind, episodes_of
from cuda_agent.rl.runtime import MakeCritic, RolloutBatch, budget_of
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic


class RayRuntime:
    """See ``rl.runtime.Runtime``.  The methods other than ``play`` are called one after the other."""

    def __init__(
        self, ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None, group: Any
    ) -> None:
        self._ctx, self._settings, self._kind = ctx, settings, kind
        context = WorkerContext(ctx.name, ctx.config, {}, Path(), ctx.cache.absolute())
        self._trainer = TrainerHandle(ctx, context, settings, make_critic, group)
        self._players = RayPlayers(ctx, budget_of(ctx, settings), group, ctx.config.ray.trainers)

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        began = time.monotonic()
        samples = self._settings.samples_per_prompt
        extra = math.ceil(self._ctx.config.ray.oversample * samples)
        jobs = episodes_of(tasks, samples + extra, f"{self._ctx.name}/{step}")
        collector = EpisodeCollector(jobs, samples)
        lost = await self._players.collect(collector, jobs, self._kind)
        metrics = {"cut": float(collector.cut), "workers_lost": float(lost)}
        return RolloutBatch(collector.episodes(), time.monotonic() - began, metrics)

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        return await self._trainer.learn(step, episodes)

    async def save(self, step: int) -> None:
        await self._trainer.save(step)

    async def restore(self) -> int:
        return await self._trainer.restore()

    async def result(self) -> tuple[Any, Any, Critic | None]:
        return await self._trainer.result()

    async def serve(self, version: int) -> None:
        # This process owns the reference, so that the weights outlive the trainer.
        digest, weights = self._trainer.actor.weights.options(num_returns=2).remote()
        await self._players.serve(ServedPolicy(version, await self._trainer.of(digest), weights))

    async def open(self) -> None:
        """Opens all actors at once; returns when the workers can play."""
        await asyncio.gather(self._trainer.open(), self._players.open())

    async def close(self) -> None:
        await asyncio.gather(self._players.close(), end_actors(self._trainer.actors))


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
