"""The runtime of policy optimization: what plays episodes, what trains, and both in this process."""

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

MakeCritic = Callable[[Mapping[str, Path]], Critic]  # from the folders of the stage's inputs
Result = TypeVar("Result")


class LearnerLost(TryAgain):
    """The trainer is gone, and with it what it learnt since the newest checkpoint."""


@dataclass
class RolloutBatch:
    """The episodes of one step."""

    episodes: list[Episode]  # in the order of their jobs: the samples of a group stand together
    seconds: float  # of wall-clock time that playing them took
    metrics: dict[str, float]  # of the runtime, for the step's log


class Runtime(Protocol):
    """Plays and trains.  A step's number is also the version of the weights that it begins with.

    The methods other than ``play`` are called one after the other.  Each raises ``LearnerLost`` where the trainer runs
    in other processes and these are gone."""

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        """Plays ``samples_per_prompt`` episodes of each of ``tasks``."""

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """Takes one update on ``episodes`` and returns its metrics."""

    async def serve(self, version: int) -> None:
        """Episodes are played with the trainer's weights from now on; turns under way finish on the old ones."""

    async def save(self, step: int) -> None:
        """Checkpoints the trainer under ``step``."""

    async def restore(self) -> int:
        """Loads the newest checkpoint and returns its step, 0 where there is none."""

    async def result(self) -> tuple[Any, Any, Critic | None]:
        """Returns (model, tokenizer, critic) in this process; the critic is None where none is trained."""


class ActorCritic:
    """The trainers of one stage: of the policy (actor) and, where the advantage needs one, of a critic."""

    def __init__(self, ctx: WorkerContext, settings: Ppo, model: Any, critic: Critic | None) -> None:
        """``model``: the policy, a causal language model.  ``critic``: None where the advantage needs none."""
        self._ctx, self._settings = ctx, settings
        make = partial(make_trainer, ctx, longest=settings.context, max_grad_norm=settings.max_grad_norm)
        self.actor = make(model)
        self.critic = None if critic is None else make(critic)
        self._trainers = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def update(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """One batch of ``recipes.ppo_update``.  In the first ``critic_warmup`` steps the critic alone is trained."""
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
        """Goes on from what ``save`` wrote.

        Raises:
            CorruptCheckpoint: The checkpoint is damaged or of another model.
        """
        for name, trainer in self._trainers.items():
            trainer.load(folder / name)


class LocalRuntime:
    """Everything in this process: one engine and one learner, which take turns."""

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
    turns, temperature = ctx.config.agent.turns, ctx.config.agent.temperature
    return episode_settings(
        ctx.config, turns=turns, context=settings.context, temperature=temperature, reward=settings.reward
    )


@asynccontextmanager
async def open_local(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic | None
) -> AsyncIterator[LocalRuntime]:
    """Opens engine, sandbox and trainers in this process.  Without ``make_critic`` there is no critic."""
    with shared_training(ctx) as ctx:
        async with open_rollouts(ctx, ctx.inputs["policy"], settings_of(ctx, settings)) as rollouts:

            def make() -> ActorCritic:
                critic = None if make_critic is None else make_critic(ctx.inputs)
                return ActorCritic(ctx, settings, rollouts.model, critic)

            learner = await rollouts.engine.compute(make)
            yield LocalRuntime(ctx, settings, kind, rollouts, learner)
