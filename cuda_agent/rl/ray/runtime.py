"""The Ray runtime of PPO: rollout workers and a trainer, placed together.

A lost trainer restarts from the newest checkpoint.  Weights go from the trainer to the workers once a step, through
Ray's object store or by a broadcast; a worker that starts late, or that a broadcast did not reach, gets the newest.

What it does not cover: the loop (``ppo``), the handles of workers (``players``) and trainer (``trainer``), the actors'
classes (``actors``), and broadcast groups (``broadcast``).
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
from cuda_agent.policy.engines.broadcast import TransferError
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.ray.broadcast import WeightBroadcastGroup
from cuda_agent.rl.ray.players import EpisodeCollector, RayPlayers, ServedPolicy, end_actors, open_placement_group
from cuda_agent.rl.ray.trainer import TrainerHandle
from cuda_agent.rl.rollouts import Kind, episodes_of
from cuda_agent.rl.runtime import MakeCritic, RolloutBatch, budget_of
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic

BROADCASTS = 2  # attempts to broadcast the same weights before using the object store


class RayRuntime:
    """See ``rl.runtime.Runtime``.  The methods other than ``play`` are called one after the other."""

    def __init__(
        self, ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None, group: Any
    ) -> None:
        import ray

        self._ray = ray
        self._ctx, self._settings, self._kind = ctx, settings, kind
        context = WorkerContext(ctx.name, ctx.config, {}, Path(), ctx.cache.absolute())
        self._trainer = TrainerHandle(ctx, context, settings, make_critic, group)
        self._players = RayPlayers(ctx, budget_of(ctx, settings), group, ctx.config.ray.trainers, self._with_weights)
        self._broadcasts = WeightBroadcastGroup(ray.util.get_node_ip_address())

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

    # ---------------------------------------------------------------------------------------------------------- weights

    async def serve(self, version: int) -> None:
        digest = await self._trainer.of(self._trainer.actor.digest.remote())
        for worker in self._players.workers:
            worker.received = False
        served = ServedPolicy(version, digest, None)
        broadcast = self._ctx.config.ray.sync == "broadcast" and await self._broadcast()
        if not broadcast or any(not worker.received for worker in self._players.living):
            # This process owns the reference, so that the weights outlive the trainer.
            served = served._replace(weights=self._trainer.actor.weights.remote())
            await self._trainer.of(self._trainer.actor.digest.remote())  # wait until the weights are stored
        await self._players.serve(served)

    async def _with_weights(self, served: ServedPolicy) -> ServedPolicy | None:
        """``served`` with its weights; None if the trainer has trained since, or is gone, so that newer weights will
        follow."""
        if served.weights is not None or self._trainer.actor is None:
            return served if served.weights is not None else None
        weights = self._trainer.actor.weights.remote(served.digest)
        try:
            return None if await weights is None else served._replace(weights=weights)
        except self._ray.exceptions.RayError:
            return None

    async def _broadcast(self) -> bool:
        """Whether all workers that lived at the start received the trainer's weights; otherwise none has."""
        forms = await self._trainer.of(self._trainer.actor.forms.remote())
        for _ in range(BROADCASTS):
            workers = self._players.living
            if not workers:
                return True
            actors = [worker.actor for worker in workers]
            ours, *errors = await self._broadcasts.transfer(self._trainer.actor, actors, forms)
            for worker, actor, error in zip(workers, actors, errors, strict=True):
                if error is not None and not isinstance(error, TransferError):
                    self._players.lose(worker, actor, error)
            if isinstance(ours, TimeoutError):
                raise self._trainer.lost(ours)
            if ours is not None and not isinstance(ours, TransferError):
                await self._trainer.of(_raised(ours))
            if ours is None and not any(errors):
                for worker in workers:
                    worker.received = True
                return True
            said = [str(error) for error in (ours, *errors) if error is not None]
            self._ctx.tracker.note(f"weights could not be broadcast to {len(workers)} rollout workers: {said[0][:200]}")
        return False

    # ------------------------------------------------------------------------------------------------------- both kinds

    async def open(self) -> None:
        """Opens all actors at once; returns when the workers can play."""
        await asyncio.gather(self._trainer.open(), self._players.open())

    async def close(self) -> None:
        self._broadcasts.end()
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


async def _raised(error: Exception) -> None:
    raise error
