"""The handle of Ray's trainer: an actor, with its processes on one machine or on several.

A lost trainer restarts from the newest checkpoint, on the same placement.  Checkpoints travel in parts, so that no
process needs the memory for a whole one.
"""

import shutil
import tempfile
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from cuda_agent.config import Ppo
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.policy.episode import Episode, to_line
from cuda_agent.policy.model import load_policy
from cuda_agent.rl.ray.actors import RankHost, TrainerActor
from cuda_agent.rl.ray.cluster import on_bundle, raise_if_init_failed
from cuda_agent.rl.ray.ranks import STREAM
from cuda_agent.rl.ray.transfer import keep, load_weights, pack, parts
from cuda_agent.rl.runtime import LearnerLost, MakeCritic
from cuda_agent.training.critic import Critic
from cuda_agent.training.distributed import TrainerLost

Result = TypeVar("Result")


class TrainerHandle:
    """The trainer on the first bundles of ``group``, one per machine.  ``actor`` has the methods of
    ``actors.TrainerActor``, and ``of`` awaits their results.  There is no actor before ``open`` and after ``lost``."""

    def __init__(
        self, ctx: StageContext, context: WorkerContext, settings: Ppo, make_critic: MakeCritic | None, group: Any
    ) -> None:
        import ray

        self._ray = ray
        self._ctx, self._context, self._settings, self._make_critic = ctx, context, settings, make_critic
        self._group, self._resources = group, ctx.config.ray
        needed = ("policy",) if make_critic is None else ("policy", "critic")
        self._inputs = ray.put({name: pack(ctx.inputs[name]) for name in needed if name in ctx.inputs})
        self.actor: Any = None
        self._hosts: list[Any] = []  # one actor per machine, if there are several

    @property
    def actors(self) -> list[Any]:
        return [actor for actor in (self.actor, *self._hosts) if actor is not None]

    async def open(self) -> None:
        """Creates the actors.  With several machines, one more actor on the first of them leads and computes
        nothing."""
        resources, spread = self._resources, self._resources.trainers > 1
        cpus, gpus = resources.trainer_cpus, resources.trainer_gpus
        if spread:
            host = self._ray.remote(cast(Any, RankHost))
            where = [on_bundle(self._group, number, cpus, gpus) for number in range(resources.trainers)]
            self._hosts = [host.options(**options).remote() for options in where]
            cpus, gpus = 0.0, 0.0
        actor = self._ray.remote(cast(Any, TrainerActor)).options(**on_bundle(self._group, 0, cpus, gpus))
        self.actor = actor.remote(self._context, self._settings, self._inputs, self._make_critic, self._hosts)
        await self.of(self.actor.open.remote())

    async def of(self, reference: Awaitable[Result]) -> Result:
        """Awaits the result of a method; raises the trainer's own errors unchanged.

        Raises:
            LearnerLost: The trainer or one of its processes is gone.
        """
        try:
            return await reference
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # the actor's own error
            if isinstance(error, self._ray.exceptions.RayTaskError) and not isinstance(cause, TrainerLost):
                raise (cause if isinstance(cause, Exception) else error) from error
            raise_if_init_failed(error)
            raise self.lost(error) from error

    def lost(self, error: Exception) -> LearnerLost:
        """Ends the remaining actors, and returns the error to raise."""
        for actor in self.actors:
            self._ray.kill(actor)
        self.actor, self._hosts = None, []
        return LearnerLost(f"the trainer was lost ({type(error).__name__})")

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        lines = [to_line(episode) for episode in episodes]
        metrics: dict[str, float] = await self.of(self.actor.update.remote(step, lines))
        return metrics

    async def save(self, step: int) -> None:
        with tempfile.TemporaryDirectory(dir=self._ctx.work) as name:
            whole = Path(name) / "checkpoint"
            await self.of(self._receive(whole))
            self._ctx.checkpoints.save(step, lambda folder: _move(whole, folder))

    async def _receive(self, folder: Path) -> None:
        async for reference in self.actor.save.options(**STREAM).remote():
            keep(await reference, folder)

    async def restore(self) -> int:
        """Loads the newest checkpoint.  Returns its step, or 0 if there is none."""
        if self.actor is None:
            await self.open()
        with tempfile.TemporaryDirectory(dir=self._ctx.work) as name:
            whole = Path(name) / "checkpoint"
            step = self._ctx.checkpoints.load(lambda folder: _move(folder, whole))
            if step is not None:
                for part in parts(whole):
                    await self.of(self.actor.keep.remote(part))
                await self.of(self.actor.load.remote())
        return step or 0

    async def result(self) -> tuple[Any, Any, Critic | None]:
        """(model, tokenizer, critic) in this process; the critic is None where none is trained."""
        model, tokenizer = load_policy(self._ctx.inputs["policy"])
        _, weights = self.actor.weights.options(num_returns=2).remote()
        load_weights(model, await self.of(weights))
        if self._make_critic is None:
            return model, tokenizer, None
        critic = self._make_critic(self._ctx.inputs)
        load_weights(critic, await self.of(self.actor.critic.remote()))
        return model, tokenizer, critic


def _move(folder: Path, into: Path) -> None:
    """Moves all files of ``folder`` into ``into``, which is created if absent."""
    into.mkdir(exist_ok=True)
    for path in folder.iterdir():
        shutil.move(path, into / path.name)
