"""Rollouts: what every stage that plays a policy shares — opening its engine and its sandbox, and playing a batch of
episodes with seeds that depend on the configuration alone.

Not here: training (``ppo``), scoring (``scores``), and what an episode is (``agent.loop``).
"""

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cuda_agent.agent.loop import Settings, run_episode, run_many, run_single
from cuda_agent.lease import Lease
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.local import LocalEngine
from cuda_agent.policy.model import load_policy
from cuda_agent.sandbox.client import LocalSandbox
from cuda_agent.stages.context import StageContext
from cuda_agent.tasks.task import Task

Kind = Literal["single", "agent"]


@dataclass
class Rollouts:
    """A policy that is being played.  ``model`` is the one to train; ``engine`` serves a copy of its weights and is
    given new ones by ``engine.update_from(model, version)``."""

    model: Any
    tokenizer: Any
    engine: Any
    chat: Chat
    sandbox: LocalSandbox
    settings: Settings
    seed: int
    concurrency: int
    lockstep: bool

    async def play(
        self,
        tasks: Sequence[Task],
        samples: int,
        label: str,
        kind: Kind,
        on_done: Callable[[int, int], None] | None = None,
    ) -> list[Episode]:
        """``samples`` episodes a task, in the order of ``tasks``; ids are ``label/task/sample`` and decide the seeds."""
        run = run_single if kind == "single" else run_episode
        names = [(task, f"{label}/{task.name}/{sample}") for task in tasks for sample in range(samples)]
        done = 0

        async def job(task: Task, name: str) -> Episode:
            nonlocal done
            seed = seed_of(self.seed, name)
            episode = await run(task, self.engine, self.chat, self.sandbox, self.settings, seed, name)
            done += 1
            if on_done:
                on_done(done, len(names))
            return episode

        jobs = [lambda task=task, name=name: job(task, name) for task, name in names]
        return await run_many(jobs, self.concurrency, lockstep=self.lockstep)


@asynccontextmanager
async def open_rollouts(
    ctx: StageContext, policy: Path, *, turns: int, context: int, temperature: float
) -> AsyncIterator[Rollouts]:
    """Opens the policy in folder ``policy`` with its engine, and the sandbox."""
    import torch

    config = ctx.config
    torch.set_num_threads(config.policy.threads)
    lockstep = config.sandbox.clock == "model"
    lease = Lease(ctx.cache)
    model, tokenizer = load_policy(policy)
    style: Literal["compact", "full"] = "compact" if config.policy.base is None else "full"
    settings = Settings(
        lane=config.sandbox.lane,
        style=style,
        turns=turns,
        turn_tokens=config.agent.turn_tokens,
        tool_tokens=config.agent.tool_tokens,
        context=context,
        temperature=temperature,
        deadline_seconds=config.agent.deadline_seconds,
    )
    chat = Chat(tokenizer, style)
    async with LocalSandbox(config.sandbox, ctx.cache) as sandbox:
        engine = LocalEngine(model, threads=config.policy.threads, batch=config.policy.engine_batch, lease=lease)
        try:
            yield Rollouts(
                model,
                tokenizer,
                engine,
                chat,
                sandbox,
                settings,
                config.seed,
                config.agent.concurrency,
                lockstep,
            )
        finally:
            await engine.close()


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for ``name`` under the run's seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def draw(tasks: Sequence[Task], count: int, seed: int, step: int) -> list[Task]:
    """The tasks of one training step: epochs of shuffled tasks cut into pieces of ``count``, so every task is seen
    equally often; a function of (seed, step) alone."""
    drawn: list[Task] = []
    for position in range(step * count, (step + 1) * count):
        epoch, index = divmod(position, len(tasks))
        order = random.Random(f"{seed}/{epoch}").sample(range(len(tasks)), len(tasks))
        drawn.append(tasks[order[index]])
    return drawn


def batch_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What a batch of episodes says of the policy: infrastructure faults are counted, and left out of the rates."""
    kept = [episode for episode in episodes if episode.reward is not None]
    if not kept:
        return {"episodes": 0.0, "dropped": float(len(episodes))}
    rewards = [episode.reward or 0.0 for episode in kept]
    share = 1.0 / len(kept)
    return {
        "episodes": float(len(kept)),
        "dropped": float(len(episodes) - len(kept)),
        "reward": sum(rewards) * share,
        "pass_rate": sum(reward > 0 for reward in rewards) * share,
        "faster_than_eager": sum(reward >= 2 for reward in rewards) * share,
        "faster_than_compile": sum(reward >= 3 for reward in rewards) * share,
        "response_tokens": sum(sum(episode.mask) for episode in kept) * share,
        "turns": sum(max(episode.turns, default=0) + 1 for episode in kept) * share,
    }
