"""Runs PPO for the stages ``warmup`` and ``agentic`` (CUDA Agent, arXiv 2602.24286, section 3.3). Each step plays a
batch of episodes, trains the policy on it, and gives the new weights to the inference engine. The loop is the same with
and without Ray, and for all estimators of advantages."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from statistics import geometric_mean
from typing import Any

from cuda_agent import spans
from cuda_agent.config import EVAL_TASKS, Ppo
from cuda_agent.context import StageContext
from cuda_agent.errors import TryAgain
from cuda_agent.policy.episode import Episode
from cuda_agent.rl.alarms import alarms
from cuda_agent.rl.rollouts import Kind, check_losses, draw
from cuda_agent.rl.runtime import LearnerLost, MakeCritic, Result, RolloutBatch, Runtime, open_local
from cuda_agent.tasks.io import read_tasks
from cuda_agent.training.advantages import ADVANTAGES
from cuda_agent.training.critic import Critic
from cuda_agent.training.losses import added
from cuda_agent.training.recipes import episode_metrics

LOSSES = 3  # the stage gives up when the trainer was lost this often in one step


async def train_ppo(
    ctx: StageContext, settings: Ppo, kind: Kind, make_critic: MakeCritic
) -> tuple[Any, Any, Critic | None]:
    """Trains the policy in ``ctx.inputs`` until step ``settings.steps``, on episodes of ``kind``: "single" (one
    answer) or "agent" (turns with tools). Begins at the newest checkpoint, if there is one. Ends earlier, with a note,
    if another step of mean length would exceed ``settings.max_seconds``. Returns (model, tokenizer, critic). If
    ``settings.advantage`` needs a critic, ``make_critic`` makes it; otherwise the critic is None.

    Raises:
        TryAgain: The stage was told to stop, the trainer was lost too often, or a step has no episode to learn from."""
    config = ctx.config
    max_off_policy_steps = config.ray.max_off_policy_steps if config.runtime == "ray" else 0
    every = list(read_tasks(ctx.inputs["tasks"]))
    tasks = [task for task in every if task.split == "train"]
    heldout = [task for task in every if task.split == "heldout"][:EVAL_TASKS]
    needed = make_critic if ADVANTAGES[settings.advantage].critic else None
    opened: AbstractAsyncContextManager[Runtime]
    if config.runtime == "local":
        opened = open_local(ctx, settings, kind, needed)
    else:
        from cuda_agent.rl.ray.runtime import open_ray_runtime  # Ray is an optional package

        opened = open_ray_runtime(ctx, settings, kind, needed)
    first: dict[str, float] = {}
    async with spans.opened("runtime", opened) as runtime:

        async def play(step: int) -> RolloutBatch:
            count = settings.episodes_per_step // settings.samples_per_prompt
            due = heldout and settings.eval_every and step % settings.eval_every == 0
            shown = None
            if due:
                with spans.span("play heldout", step=step):
                    shown = await runtime.play(step, heldout)
            with spans.span("play", step=step):
                played = await runtime.play(step, draw(tasks, count, config.seed, step))
            if shown is None:
                return played
            metrics = added(played.metrics, shown.metrics) | heldout_metrics(shown.episodes)
            return replace(played, metrics=metrics)

        async def learn(step: int, played: RolloutBatch, began: float) -> None:
            episodes = [episode for episode in played.episodes if oldest(episode) >= step - max_off_policy_steps]
            losses = check_losses(ctx, episodes, f"step {step + 1}")
            with spans.span("learn", step=step):
                metrics = await runtime.learn(step, episodes) | played.metrics | losses
            for name, value in metrics.items():  # of this process's first step with the metric
                first.setdefault(name, value)
            for alarm in alarms(metrics, first):
                ctx.tracker.note(f"{ctx.name}: {alarm}")  # an equal note is kept once
            metrics["stale"] = float(len(played.episodes) - len(episodes))
            with spans.span("serve weights", version=step + 1):
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

        done = start = await runtime.restore()
        with spans.span("serve weights", version=start):
            await runtime.serve(start)
        began = opening = time.monotonic()
        async with aclosing(prefetch(play, range(start, settings.steps), max_off_policy_steps)) as batches:
            async for step, played in batches:
                await _retried_after_losses(ctx, runtime, step, partial(learn, step, played, began))
                began, done = time.monotonic(), step + 1
                if done == settings.steps:
                    break
                if ctx.should_stop():
                    raise TryAgain(f"stopped after step {done} of {settings.steps}")
                if settings.max_seconds and (began - opening) * (1 + 1 / (done - start)) > settings.max_seconds:
                    ctx.tracker.note(f"{ctx.name}: max_seconds ends it after step {done} of {settings.steps}")
                    break
        return await _retried_after_losses(ctx, runtime, done, runtime.result)


async def prefetch(
    play: Callable[[int], Awaitable[RolloutBatch]], steps: range, max_off_policy_steps: int
) -> AsyncGenerator[tuple[int, RolloutBatch], None]:
    """Yields each of ``steps`` with its batch, in order. While the caller learns from a batch, plays the next
    ``max_off_policy_steps`` batches, one after the other. If this number is 1, batch 5 is played while the caller
    learns from batch 4. If it is 0, playing and learning take turns."""
    under_way: deque[asyncio.Task[RolloutBatch]] = deque()

    async def play_after(before: asyncio.Task[RolloutBatch] | None, step: int) -> RolloutBatch:
        if before is not None:
            await asyncio.wait([before])
        return await play(step)

    try:
        for step in steps:
            for later in steps[step - steps.start + len(under_way) : step - steps.start + max_off_policy_steps + 1]:
                before = under_way[-1] if under_way else None
                under_way.append(asyncio.create_task(play_after(before, later)))
            yield step, await under_way.popleft()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _retried_after_losses(
    ctx: StageContext, runtime: Runtime, step: int, job: Callable[[], Awaitable[Result]]
) -> Result:
    """Runs ``job`` and returns its result. The job starts from the trainer's state at ``step``. If the trainer's
    processes are lost during the job, restores the newest checkpoint and runs the job again.

    Raises:
        TryAgain: The trainer was lost ``LOSSES`` times, or the newest checkpoint is not of ``step``."""
    for attempt in range(LOSSES):
        try:
            if attempt and (found := await runtime.restore()) != step:
                raise TryAgain(f"the newest sound checkpoint is of step {found}, and step {step} is under way")
            return await job()
        except LearnerLost as lost:
            ctx.tracker.note(f"step {step}: {lost}")
    raise TryAgain(f"the trainer was lost {LOSSES} times in step {step}")


def heldout_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns the pass rate of ``episodes`` as ``heldout_pass_rate``. If some solutions passed and were timed, also
    returns the geometric mean of their speed-ups over torch.compile as ``heldout_speedup``. These metrics only show the
    course of the training. No decision depends on them."""
    rates = {f"heldout_{name}": value for name, value in episode_metrics(episodes).items() if name == "pass_rate"}
    verdicts = [episode.verdict for episode in episodes if episode.verdict and episode.verdict["status"] == "ok"]
    speedups = [verdict["speedup_compile"] for verdict in verdicts if verdict.get("speedup_compile")]
    return rates | ({"heldout_speedup": geometric_mean(speedups)} if speedups else {})


def oldest(episode: Episode) -> float:
    """Returns the oldest version of the weights that sampled a token of ``episode``. Returns infinity if the episode
    has no sampled token."""
    return min((v for v, mask in zip(episode.versions, episode.mask, strict=True) if mask), default=math.inf)


def mean_age(episodes: Sequence[Episode], step: int) -> float:
    """Returns the mean age of all sampled tokens, in steps, or 0 if there is none. A token's age is ``step`` minus the
    version of the weights that sampled the token."""
    ages = [step - v for e in episodes for v, mask in zip(e.versions, e.mask, strict=True) if mask]
    return sum(ages) / max(len(ages), 1)
