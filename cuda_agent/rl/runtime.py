"""The runtime of policy optimization: the interface for playing and training, and the runtime in this process."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cuda_agent.agent.loop import EpisodeSettings, seed_of
from cuda_agent.config import Ppo
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.errors import TryAgain
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.rollouts import Kind, Rollouts, episode_settings, episodes_of, open_rollouts
from cuda_agent.rl.trainers import make_trainer, shared_training
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic
from cuda_agent.training.recipes import ppo_update

MakeCritic = Callable[[Mapping[str, Path]], Critic]  # makes a critic from the folders of the stage's inputs
Result = TypeVar("Result")


class LearnerLost(TryAgain):
    """The trainer is gone, with all that it learnt since the newest checkpoint."""


@dataclass
class RolloutBatch:
    episodes: list[Episode]  # in the order of their jobs: the samples of a group stand together
    seconds: float  # wall-clock time that playing took
    metrics: dict[str, float]  # the runtime's metrics, for the step's log


class Runtime(Protocol):
    """Plays and trains.  A step's number is also the version of the weights with which the step begins.

    Methods other than ``play`` are called one after the other.  If the trainer runs in other processes and these are
    gone, each method raises ``LearnerLost``."""

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        """Plays ``samples_per_prompt`` episodes of each of ``tasks``."""

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """Takes one update on ``episodes`` and returns its metrics."""

    async def serve(self, version: int) -> None:
        """Serves the trainer's weights to episodes from now on; turns under way finish on the old weights."""

    async def save(self, step: int) -> None:
        """Checkpoints the trainer under ``step``."""

    async def restore(self) -> int:
        """Loads the newest checkpoint and returns its step, or 0 if there is none."""

    async def result(self) -> tuple[Any, Any, Critic | None]:
        """Returns (model, tokenizer, critic) in this process; the critic is None if none is trained."""


class ActorCritic:
    """The trainers of one stage: one for the policy (actor) and, if the advantage needs it, one for a critic."""

    def __init__(self, ctx: WorkerContext, settings: Ppo, model: Any, critic: Critic | None) -> None:
        self._ctx, self._settings = ctx, settings
        make = partial(make_trainer, ctx, longest=settings.context, max_grad_norm=settings.max_grad_norm)
        self.actor = make(model)
        self.critic = None if critic is None else make(critic)
        self._trainers = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def update(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """Runs ``recipes.ppo_update`` on one batch.  The first ``critic_warmup`` steps train the critic alone."""
        return ppo_update(
            self.actor,
            self.critic,
            episodes,
            self._settings,
            seed=seed_of(self._ctx.config.seed, f"{self._ctx.name}/{step}") % 2**31,
            train_actor=self.critic is None or step >= self._settings.critic_warmup,
            temperature=self._ctx.config.agent.temperature,
        )

    def save(self, folder: Path) -> None:
        """Writes a sub-folder ``actor`` and, with a critic, ``critic`` into ``folder``, which exists."""
        for name, trainer in self._trainers.items():
            (folder / name).mkdir()
            trainer.save(folder / name)

    def load(self, folder: Path) -> None:
        """Restores the state that ``save`` wrote.

        Raises:
            CorruptCheckpoint: The checkpoint is damaged or of another model."""
        for name, trainer in self._trainers.items():
            trainer.load(folder / name)


class LocalRuntime:
    """The runtime in this process: one engine and one learner, which take turns."""

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

    async def result(self) -> tuple[Any, Any, Critic | None]:
        critic = self._learner.critic
        return self._rollouts.model, self._rollouts.tokenizer, None if critic is None else critic.model


def settings_of(ctx: WorkerContext, settings: Ppo) -> EpisodeSettings:
    agent, size, reward = ctx.config.agent, settings.context, settings.reward
    return episode_settings(ctx.config, turns=agent.turns, context=size, temperature=agent.temperature, reward=reward)


@asynccontextmanager
async def open_local(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None
) -> AsyncIterator[LocalRuntime]:
    """Opens engine, sandbox and trainers in this process.  Without ``make_critic`` there is no critic."""
    with shared_training(ctx) as ctx:
        async with open_rollouts(ctx, ctx.inputs["policy"], settings_of(ctx, settings)) as rollouts:

            def make() -> ActorCritic:
                critic = make_critic(ctx.inputs) if make_critic else None
                return ActorCritic(ctx, settings, rollouts.model, critic)

            learner = await rollouts.engine.compute(make)
            yield LocalRuntime(ctx, settings, kind, rollouts, learner)
