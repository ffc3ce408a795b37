"""Runs PPO on Ray: rollout workers, and a trainer whose processes are on one machine or on several.

The stage's process controls workers and trainer. A lost trainer restarts from the newest checkpoint, on the same
machines. PPO's loop is in ``rl.ppo``; ``players`` controls the rollout workers; ``actors`` has the actors' classes."""

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cuda_agent.config import Ppo
from cuda_agent.context import StageContext
from cuda_agent.policy.engines.vllm_plugin import digest
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.lora import merged_parameters
from cuda_agent.policy.model import load_policy
from cuda_agent.rl.ray.actors import RankHost
from cuda_agent.rl.ray.cluster import on_bundle
from cuda_agent.rl.ray.players import EpisodeCollector, RayPlayers, ServedPolicy, end_actors, open_placement_group
from cuda_agent.rl.ray.ranks import SpreadRanks
from cuda_agent.rl.ray.transfer import arrays
from cuda_agent.rl.rollouts import Kind, episodes_of
from cuda_agent.rl.runtime import ActorCritic, LearnerLost, MakeCritic, Result, RolloutBatch, settings_of
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic
from cuda_agent.training.distributed import TrainerLost


class RayRuntime:
    """Plays episodes and trains on Ray. Implements ``rl.runtime.Runtime``, the interface that the PPO loop calls.

    ``group`` is a placement group. It consists of bundles; a bundle is a set of resources that Ray has reserved on one
    machine. The trainer's processes use the first bundles, one bundle per machine; the rollout workers use the others.
    ``open`` starts the trainer and the workers. If the trainer was lost, ``restore`` starts a new one."""

    def __init__(
        self, ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None, group: Any
    ) -> None:
        import ray

        self._ray = ray
        self._ctx, self._settings, self._kind, self._make_critic = ctx, settings, kind, make_critic
        self._group, self._resources = group, ctx.config.ray
        self._learner: Any = None
        self._hosts: list[Any] = []  # the actors that hold the learner's processes
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
        return await self._of(lambda: self._learner.update(step, episodes))

    async def serve(self, version: int) -> None:
        def served() -> ServedPolicy:
            merged = list(merged_parameters(self._learner.actor.model))
            return ServedPolicy(version, digest(merged), self._ray.put(arrays(merged)))

        await self._players.serve(await self._of(served))

    async def save(self, step: int) -> None:
        with tempfile.TemporaryDirectory(dir=self._ctx.work) as name:
            await self._of(lambda: self._learner.save(Path(name)))
            self._ctx.checkpoints.save(step, lambda folder: _move(Path(name), folder))

    async def restore(self) -> int:
        if self._learner is None:
            await self._open_trainer()
        with tempfile.TemporaryDirectory(dir=self._ctx.work) as name:
            step = self._ctx.checkpoints.load(lambda folder: _move(folder, Path(name)))
            if step is not None:
                await self._of(lambda: self._learner.load(Path(name)))
        return step or 0

    async def result(self) -> tuple[Any, Any, Critic | None]:
        model = await self._of(lambda: self._learner.actor.model)
        critic = self._learner.critic and await self._of(lambda: self._learner.critic.model)
        return model, self._tokenizer, critic

    async def open(self) -> None:
        """Opens the trainer and all rollout workers at once, and waits until all are ready."""
        await asyncio.gather(self._open_trainer(), self._players.open())

    async def _open_trainer(self) -> None:
        cpus, gpus, machines = self._resources.trainer_cpus, self._resources.trainer_gpus, self._resources.trainers
        host = self._ray.remote(cast(Any, RankHost))
        where = [on_bundle(self._group, number, cpus, gpus) for number in range(machines)]
        self._hosts = [host.options(**options).remote() for options in where]
        self._learner = await self._of(self._make_learner)

    def _make_learner(self) -> ActorCritic:
        ctx = replace(self._ctx, ranks=SpreadRanks(self._hosts, self._ctx))
        model, self._tokenizer = load_policy(ctx.inputs["policy"])
        critic = None if self._make_critic is None else self._make_critic(ctx.inputs)
        return ActorCritic(ctx, self._settings, model, critic)

    async def close(self) -> None:
        await asyncio.gather(self._players.close(), end_actors(self._hosts))

    async def _of(self, job: Callable[[], Result]) -> Result:
        """Runs ``job``, which uses the trainer's processes, in a thread and returns its result. If one of these
        processes is gone, ends the others and raises LearnerLost."""
        try:
            return await asyncio.to_thread(job)
        except TrainerLost as error:
            for host in self._hosts:
                self._ray.kill(host)
            self._learner, self._hosts = None, []
            raise LearnerLost(f"the trainer was lost: {str(error).splitlines()[0][:200]}") from error


@asynccontextmanager
async def open_ray_runtime(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None
) -> AsyncIterator[RayRuntime]:
    """Connects to Ray, or starts it, and starts the trainer and the rollout workers as actors. Raises BadConfiguration
    if the actors can never run with this configuration, for example because this machine has too few GPUs. Raises
    TryAgain if they cannot run now."""
    async with open_placement_group(ctx, ctx.config.ray.trainers) as group:
        runtime = RayRuntime(ctx, settings, kind, make_critic, group)
        try:
            await runtime.open()
            yield runtime
        finally:
            await runtime.close()


def _move(folder: Path, into: Path) -> None:
    for path in folder.iterdir():
        shutil.move(path, into / path.name)
