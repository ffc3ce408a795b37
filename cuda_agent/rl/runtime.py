"""Defines ``Runtime``, the interface with which the PPO loop plays episodes (attempts of the policy at tasks) and
trains on them. ``LocalRuntime`` implements the interface without Ray."""

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
from cuda_agent.policy.engines.local import LocalEngine
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.rollouts import Kind, Rollouts, episode_settings, episodes_of, open_rollouts
from cuda_agent.rl.trainers import make_trainer, shared_training
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic
from cuda_agent.training.recipes import ppo_update

MakeCritic = Callable[[Mapping[str, Path]], Critic]  # makes a critic from the folders of the stage's inputs
Result = TypeVar("Result")


class LearnerLost(TryAgain):
    """An error: the trainer's processes are gone, and everything learnt since the newest checkpoint is lost."""


@dataclass
class RolloutBatch:
    episodes: list[Episode]  # in the order of the tasks; a task's samples are adjacent
    seconds: float  # wall-clock time that playing took
    metrics: dict[str, float]  # the runtime's counts, such as lost workers, for the step's log


class Runtime(Protocol):
    """The interface of a runtime, which plays episodes and trains on them. Steps are numbered from 0, and step N of the
    training begins with version N of the weights. ``play`` may run at the same time as another method. The other
    methods run one after the other, and raise ``LearnerLost`` if the trainer's processes are gone."""

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        """Plays ``Ppo.samples_per_prompt`` episodes on each of ``tasks``, for training step ``step``."""

    async def learn(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """Trains on ``episodes``, as training step ``step``, and returns metrics by name."""

    async def serve(self, version: int) -> None:
        """Loads the trainer's weights as number ``version`` into the engine, which samples the policy's turns. A turn
        that has begun is finished with the old weights."""

    async def save(self, step: int) -> None:
        """Saves a checkpoint of the trainer under the number ``step``."""

    async def restore(self) -> int:
        """Loads the newest checkpoint into the trainer and returns its step. Without a checkpoint, returns 0."""

    async def result(self) -> tuple[Any, Any, Critic | None]:
        """Returns the trained (model, tokenizer, critic). If other processes have trained them, copies them to this
        process. The critic is None if none is trained."""


class ActorCritic:
    """Holds the trainers of one PPO stage: ``self.actor`` trains ``model``, the policy, and ``self.critic`` trains
    ``critic``, which predicts rewards. If ``critic`` is None, ``self.critic`` is None."""

    def __init__(self, ctx: WorkerContext, settings: Ppo, model: Any, critic: Critic | None) -> None:
        self._ctx, self._settings = ctx, settings
        make = partial(make_trainer, ctx, longest=settings.context, max_grad_norm=settings.max_grad_norm)
        self.actor = make(model)
        self.critic = None if critic is None else make(critic)
        self._trainers = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    def update(self, step: int, episodes: Sequence[Episode]) -> dict[str, float]:
        """Trains on ``episodes`` and returns metrics. If there is a critic, the first ``critic_warmup`` steps train
        only the critic."""
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
        """Writes the trainers' states to sub-folders of ``folder``: ``actor`` and, if there is a critic, ``critic``."""
        for name, trainer in self._trainers.items():
            (folder / name).mkdir()
            trainer.save(folder / name)

    def load(self, folder: Path) -> None:
        """Restores the states that ``save`` wrote to ``folder``. Raises CorruptCheckpoint if they are damaged or belong
        to another model."""
        for name, trainer in self._trainers.items():
            trainer.load(folder / name)


class LocalRuntime:
    """A ``Runtime`` without Ray. The process of the stage (a step of the workflow) plays the episodes. Training takes
    place in the same process, or in trainer processes (ranks) on this machine. Playing and training take turns."""

    def __init__(self, ctx: StageContext, settings: Ppo, kind: Kind, rollouts: Rollouts, learner: ActorCritic) -> None:
        self._ctx, self._settings, self._kind = ctx, settings, kind
        self._rollouts, self._learner = rollouts, learner

    async def play(self, step: int, tasks: Sequence[Task]) -> RolloutBatch:
        began, before = time.monotonic(), self._engine_work()
        jobs = episodes_of(tasks, self._settings.samples_per_prompt, f"{self._ctx.name}/{step}")
        episodes = await self._rollouts.play(jobs, self._kind)
        spent = {name: total - before[name] for name, total in self._engine_work().items()}
        return RolloutBatch(episodes, time.monotonic() - began, spent)

    def _engine_work(self) -> dict[str, float]:
        """Returns totals since the engine's start: the seconds in which it computed ("engine_seconds") and in which it
        paused because kernels were timed ("engine_wait_seconds"), its decoding steps, and the prompt tokens that it
        computed. Returns an empty dict if the engine is not a ``LocalEngine``."""
        engine = self._rollouts.engine
        if not isinstance(engine, LocalEngine):
            return {}
        counts = engine.counts
        return {
            "engine_seconds": counts.seconds,
            "engine_wait_seconds": counts.waited,
            "engine_steps": float(counts.steps),
            "engine_prompt_tokens": float(counts.prefilled),
        }

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
    """Opens a ``LocalRuntime`` with an engine and a sandbox. The trainers are in this process, or in several trainer
    processes that ``shared_training`` starts. If ``make_critic`` is None, there is no critic."""
    with shared_training(ctx) as ctx:
        async with open_rollouts(ctx, ctx.inputs["policy"], settings_of(ctx, settings)) as rollouts:

            def make() -> ActorCritic:
                critic = make_critic(ctx.inputs) if make_critic else None
                return ActorCritic(ctx, settings, rollouts.model, critic)

            learner = await rollouts.engine.compute(make)
            yield LocalRuntime(ctx, settings, kind, rollouts, learner)
