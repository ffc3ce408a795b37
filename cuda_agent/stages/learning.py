"""What the stages that train share: a trainer as the configuration wants it, imitation with checkpoints, and the PPO
loop of ``warmup`` and ``agentic``, which is the same wherever episodes are played and learnt from.

Not here: the algorithms (``training``), playing episodes (``rollouts``), and Ray's actors (``ray_runtime``).
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

from cuda_agent.config import Ppo
from cuda_agent.lease import Lease
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.lora import attach
from cuda_agent.policy.vllm_server import gpus
from cuda_agent.stages.context import BadConfiguration, Site, StageContext, TryAgain
from cuda_agent.stages.rollouts import Budget, Kind, Rollouts, draw, episodes_of, open_rollouts, seed_of
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tasks.task import Task
from cuda_agent.training.critic import Critic
from cuda_agent.training.memory import AUTO_TOKENS, ROW_TOKENS
from cuda_agent.training.packing import Tokens
from cuda_agent.training.ranks import RankedTrainer, Ranks, TrainerLost
from cuda_agent.training.recipes import ppo_update, sft
from cuda_agent.training.trainer import Trainer

COST = 0.05  # a supervised step is checkpointed when that takes at most this share of the time since the last one


def make_trainer(
    ctx: Site,
    model: Any,
    *,
    row_tokens: int,
    longest: int,
    max_grad_norm: float = 1.0,
    precision: Literal["fp32", "auto"] = "fp32",
    scratch: bool = False,
) -> Trainer:
    """``longest``: tokens of the longest sequence, which must fit into a row.  ``precision`` "auto" is for imitation;
    PPO needs the very log-probabilities of the engine.  ``scratch``: Muon, with which a new model gets as far on half
    the tokens (measured: docs/lab-notebook.md).  Others may train adapters instead (``lora``)."""
    import torch

    torch.set_num_threads(ctx.config.policy.threads)
    if not scratch and (lora := ctx.config.lora).rank:
        trunk = model.trunk if isinstance(model, Critic) else model
        attach(trunk, lora.rank, lora.alpha, lora.targets, ctx.config.seed)
    row_tokens = max(min(row_tokens, ROW_TOKENS), longest)
    checkpointing = ctx.config.training.checkpointing
    options: dict[str, Any] = {
        "row_tokens": row_tokens,
        "max_grad_norm": max_grad_norm,
        "weight_decay": 0.1 if scratch else 0.0,
        "optimizer": "muon" if scratch else "adamw",
        "precision": precision,
        "gradient_checkpointing": checkpointing == "on" or (checkpointing == "auto" and row_tokens > AUTO_TOKENS),
        "compile": ctx.config.training.compile,
    }
    if ctx.ranks is not None:
        name = "critic" if isinstance(model, Critic) else "policy"
        options["share"] = ctx.config.training.share
        return cast(Trainer, RankedTrainer(ctx.ranks, name, model, **options))  # which is one to all who do not compute
    return Trainer(model, lease=Lease(ctx.cache / "lease"), **options)


Place = TypeVar("Place", bound=Site)


@contextmanager
def shared_training(ctx: Place) -> Iterator[Place]:
    """A context whose trainers run on the ranks that ``training`` asks for; the same where that is this process.  A
    rank that dies ends the stage with TryAgain."""
    settings, threads = ctx.config.training, ctx.config.policy.threads
    if settings.ranks == 1 and settings.device == "cpu":
        yield ctx
        return
    if settings.device == "cuda" and (here := gpus()) < settings.ranks:
        raise BadConfiguration(f"training.ranks: {settings.ranks} on GPUs, and this machine has {here}")
    each = max(1, threads // settings.ranks)
    with Ranks(settings.ranks, device=settings.device, threads=each, lease=ctx.cache / "lease") as ranks:
        try:
            yield replace(ctx, ranks=ranks)
        except TrainerLost as error:
            raise TryAgain(str(error)) from error


def imitate(ctx: StageContext, trainer: Trainer, sequences: Sequence[Tokens], **settings: Any) -> None:
    """Supervised training on ``sequences`` from the newest checkpoint on (``settings`` are
    those of ``training.recipes.sft``): logs, shows progress, checkpoints, stops when asked."""
    ctx.checkpoints.load(trainer.load)
    saved = time.monotonic()
    cost = 0.0
    for metrics in sft(trainer, sequences, seed=ctx.config.seed, **settings):
        fraction = metrics.pop("progress")
        ctx.tracker.log(trainer.step, metrics)
        ctx.tracker.progress(round(1000 * fraction), 1000, unit="‰", tokens_per_second=metrics["tokens_per_second"])
        stopping = ctx.should_stop()
        if stopping or cost <= COST * (time.monotonic() - saved):
            began = time.monotonic()
            ctx.checkpoints.save(trainer.step, trainer.save)
            saved = time.monotonic()
            cost = saved - began
        if stopping:
            raise TryAgain(f"stopped after step {trainer.step}")


# Learning by rewards --------------------------------------------------------------------------------------------------

MakeCritic = Callable[[Mapping[str, Path]], Critic]  # from the stage's inputs
Result = TypeVar("Result")
LOSSES = 3  # of the trainer in one step, until the stage gives up


class LearnerLost(TryAgain):
    """The trainer is gone, with all that it learnt since the newest checkpoint."""


@dataclass
class Played:
    """The episodes of one step, and what they cost."""

    episodes: list[Episode]
    seconds: float
    metrics: dict[str, float]


class Runtime(Protocol):
    """Who plays and who trains.  A step's number is also the version of the weights that it begins with."""

    async def play(self, step: int, tasks: Sequence[Task]) -> Played: ...

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


class Learner:
    """Actor and critic of one stage, and what is done with both."""

    def __init__(self, site: Site, settings: Ppo, model: Any, critic: Critic) -> None:
        sizes: dict[str, Any] = {
            "row_tokens": settings.batch_tokens,
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

    def __init__(self, ctx: StageContext, settings: Ppo, kind: Kind, rollouts: Rollouts, learner: Learner) -> None:
        self._ctx, self._settings, self._kind = ctx, settings, kind
        self._rollouts, self._learner = rollouts, learner

    async def play(self, step: int, tasks: Sequence[Task]) -> Played:
        began = time.monotonic()
        jobs = episodes_of(tasks, self._settings.samples, f"{self._ctx.name}/{step}")
        return Played(await self._rollouts.play(jobs, self._kind), time.monotonic() - began, {})

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


def budget_of(ctx: Site, settings: Ppo) -> Budget:
    agent = ctx.config.agent
    return Budget(agent.turns, settings.context, agent.temperature)


@asynccontextmanager
async def open_local(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic
) -> AsyncIterator[LocalRuntime]:
    with shared_training(ctx) as ctx:
        async with open_rollouts(ctx, ctx.inputs["policy"], budget_of(ctx, settings)) as rollouts:
            make = partial(Learner, ctx, settings, rollouts.model)
            learner = await rollouts.engine.compute(lambda: make(make_critic(ctx.inputs)))
            yield LocalRuntime(ctx, settings, kind, rollouts, learner)


def _open_runtime(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic
) -> AbstractAsyncContextManager[Runtime]:
    if ctx.config.runtime == "local":
        return open_local(ctx, settings, kind, make_critic)
    from cuda_agent.stages.ray_runtime import open_ray_runtime

    return open_ray_runtime(ctx, settings, kind, make_critic)


async def improve(ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic) -> tuple[Any, Any, Critic]:
    """PPO: play a batch, learn from it, serve what was learnt; checkpointed after every step.

    Returns (model, tokenizer, critic)."""
    config = ctx.config
    staleness = config.ray.staleness if config.runtime == "ray" else 0
    tasks = [task for task in read_tasks(ctx.inputs["tasks"]) if task.split == "train"]
    async with _open_runtime(ctx, settings, kind, make_critic) as runtime:

        async def play(step: int) -> Played:
            return await runtime.play(step, draw(tasks, settings.batch // settings.samples, config.seed, step))

        async def learn(step: int, played: Played, began: float) -> None:
            episodes = [episode for episode in played.episodes if oldest(episode) >= step - staleness]
            metrics = await runtime.learn(step, episodes) | played.metrics
            metrics["stale"] = float(len(played.episodes) - len(episodes))
            await runtime.serve(step + 1)
            sampled = sum(sum(episode.mask) for episode in episodes)
            rates = {
                "rollout_seconds": played.seconds,
                "step_seconds": time.monotonic() - began,
                "sampled_tokens_per_second": sampled / played.seconds,
                "episodes_per_second": len(episodes) / played.seconds,
            }
            ctx.tracker.log(step, metrics | {"token_age": mean_age(episodes, step)} | rates)
            ctx.tracker.progress(step + 1, settings.steps, reward=metrics.get("reward", 0.0))
            await runtime.save(step + 1)

        start = await runtime.restore()
        await runtime.serve(start)
        began = time.monotonic()
        async with aclosing(played_ahead(play, range(start, settings.steps), staleness)) as batches:
            async for step, played in batches:
                await _in_spite_of_losses(ctx, runtime, step, partial(learn, step, played, began))
                began = time.monotonic()
                if ctx.should_stop() and step + 1 < settings.steps:
                    raise TryAgain(f"stopped after step {step + 1} of {settings.steps}")
        return await _in_spite_of_losses(ctx, runtime, settings.steps, runtime.result)


async def played_ahead(
    play: Callable[[int], Awaitable[Played]], steps: range, staleness: int
) -> AsyncGenerator[tuple[int, Played], None]:
    """(step, what was played for it) in order.  While the caller learns from one, the next ``staleness`` are played,
    one after the other; none of them begins before the caller has learnt from the step that is that far back."""
    under_way: deque[asyncio.Task[Played]] = deque()

    async def play_after(before: asyncio.Task[Played] | None, step: int) -> Played:
        if before is not None:
            await asyncio.wait([before])
        return await play(step)

    try:
        for step in steps:
            for later in steps[step - steps.start + len(under_way) : step - steps.start + staleness + 1]:
                before = under_way[-1] if under_way else None
                under_way.append(asyncio.create_task(play_after(before, later)))
            yield step, await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _in_spite_of_losses(
    ctx: StageContext, runtime: Runtime, step: int, job: Callable[[], Awaitable[Result]]
) -> Result:
    """``job``, which begins where checkpoint ``step`` ends, and once more from there when the trainer is lost."""
    for attempt in range(LOSSES):
        try:
            if attempt and (found := await runtime.restore()) != step:
                raise TryAgain(f"the newest sound checkpoint is of step {found}, and step {step} is under way")
            return await job()
        except LearnerLost as lost:
            ctx.tracker.note(f"step {step}: {lost}")
    raise TryAgain(f"the trainer was lost {LOSSES} times in step {step}")


def oldest(episode: Episode) -> float:
    """The first version of the weights that sampled a token of it."""
    return min(
        (version for version, mask in zip(episode.versions, episode.mask, strict=True) if mask), default=math.inf
    )


def mean_age(episodes: Sequence[Episode], step: int) -> float:
    """In steps, over all sampled tokens."""
    ages = [step - v for e in episodes for v, mask in zip(e.versions, e.mask, strict=True) if mask]
    return sum(ages) / max(len(ages), 1)
