"""The runtime of PPO: what plays and what trains, and the one that does both in this process.

Not covered: the loop (``ppo``), and Ray's actors (``ray.runtime``).
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cuda_agent.config import Ppo
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.errors import TryAgain
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.rollouts import EpisodeBudget, Kind, Rollouts, episodes_of, open_rollouts, seed_of
from cuda_agent.rl.trainers import make_trainer, shared_training
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic
from cuda_agent.training.recipes import ppo_update

MakeCritic = Callable[[Mapping[str, Path]], Critic]  # from the stage's inputs
Result = TypeVar("Result")


class LearnerLost(TryAgain):
    """The trainer is gone, with all that it learnt since the newest checkpoint."""


@dataclass
class RolloutBatch:
    """The episodes of one step, and what they cost."""

    episodes: list[Episode]
    seconds: float
    metrics: dict[str, float]


class Runtime(Protocol):
    """Who plays and who trains.  A step's number is also the version of the weights that it begins with."""

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch: ...

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """One update; its metrics.  ``LearnerLost``, as from all below."""
        ...

    async def serve(self, version: int) -> None:
        """Episodes are played with the trainer's weights from now on, turns under way excepted."""
        ...

    async def save(self, step: int) -> None: ...

    async def restore(self) -> int:
        """Goes on from the newest checkpoint; its step, 0 where there is none."""
        ...

    async def result(self) -> tuple[Any, Any, Critic]:
        """(model, tokenizer, critic) in this process."""
        ...


class ActorCritic:
    """Actor and critic of one stage, and what is done with both."""

    def __init__(self, site: WorkerContext, settings: Ppo, model: Any, critic: Critic) -> None:
        sizes: dict[str, Any] = {
            "longest": settings.context,
            "max_grad_norm": settings.max_grad_norm,
        }
        self._site, self._settings = site, settings
        self.actor = make_trainer(site, model, **sizes)
        self.critic = make_trainer(site, critic, **sizes)

    def update(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        config, settings = self._site.config, self._settings
        return ppo_update(
            self.actor,
            self.critic,
            episodes,
            settings,
            seed=seed_of(config.seed, f"{self._site.name}/{step}") % 2**31,
            train_actor=step >= settings.critic_warmup,
            temperature=config.agent.temperature,
        )

    def save(self, folder: Path) -> None:
        for name, trainer in (("actor", self.actor), ("critic", self.critic)):
            (folder / name).mkdir()
            trainer.save(folder / name)

    def load(self, folder: Path) -> None:
        self.actor.load(folder / "actor")
        self.critic.load(folder / "critic")


class LocalRuntime:
    """Everything in this process: one engine, one trainer, one after the other."""

    def __init__(self, ctx: StageContext, settings: Ppo, kind: Kind, rollouts: Rollouts, learner: ActorCritic) -> None:
        self._ctx, self._settings, self._kind = ctx, settings, kind
        self._rollouts, self._learner = rollouts, learner

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        began = time.monotonic()
        jobs = episodes_of(tasks, self._settings.samples_per_prompt, f"{self._ctx.name}/{step}")
        return RolloutBatch(await self._rollouts.play(jobs, self._kind), time.monotonic() - began, {})

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        metrics: dict[str, float] = await self._rollouts.engine.compute(partial(self._learner.update, step, episodes))
        return metrics

    async def serve(self, version: int) -> None:
        await self._rollouts.engine.update_from(self._learner.actor.model, version)

    async def save(self, step: int) -> None:
        self._ctx.checkpoints.save(step, self._learner.save)

    async def restore(self) -> int:
        return self._ctx.checkpoints.load(self._learner.load) or 0

    async def result(self) -> tuple[Any, Any, Critic]:
        return self._rollouts.model, self._rollouts.tokenizer, self._learner.critic.model


def budget_of(ctx: WorkerContext, settings: Ppo) -> EpisodeBudget:
    agent = ctx.config.agent
    return EpisodeBudget(agent.turns, settings.context, agent.temperature)


@asynccontextmanager
async def open_local(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic
) -> AsyncIterator[LocalRuntime]:
    with shared_training(ctx) as ctx:
        async with open_rollouts(ctx, ctx.inputs["policy"], budget_of(ctx, settings)) as rollouts:
            make = partial(ActorCritic, ctx, settings, rollouts.model)
            learner = await rollouts.engine.compute(lambda: make(make_critic(ctx.inputs)))
            yield LocalRuntime(ctx, settings, kind, rollouts, learner)
