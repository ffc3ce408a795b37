"""Opens a policy's engine and the sandbox, and plays batches of episodes.

An episode's seed depends only on the configured seed and the episode's id."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from cuda_agent.agent.loop import EpisodeSettings, Sandbox, Style, run_episode, run_many, seed_of
from cuda_agent.config import Config
from cuda_agent.context import StageContext, WorkerContext
from cuda_agent.errors import BadConfiguration, TryAgain
from cuda_agent.machine import gpus
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.engines.engine import Engine, EngineLost
from cuda_agent.policy.engines.local import make_engine
from cuda_agent.policy.engines.vllm import open_vllm
from cuda_agent.policy.episode import Episode
from cuda_agent.policy.model import load_policy
from cuda_agent.rl.scripted import ScriptedEngine
from cuda_agent.sandbox.client import open_sandbox
from cuda_agent.sandbox.wire import Mode
from cuda_agent.spans import span
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tasks.task import Task

Kind = Literal["single", "agent"]
OnDone = Callable[[Episode], None]  # receives each episode when it ends
Job = tuple[Task, str]  # a task, and the id of the episode, which determines its seed
PLAYS = 3  # an episode that infrastructure faults cut this often has no reward


class Players(Protocol):
    """The interface for playing episodes: ``Rollouts`` plays in this process, ``RayPlayers`` in Ray's actors."""

    async def play(self, jobs: Sequence[Job], kind: Kind, on_done: OnDone = ...) -> list[Episode]:
        """Plays an episode of ``kind`` for each of ``jobs``, and calls ``on_done`` with each episode when it ends.
        Returns the episodes in the order of ``jobs``."""


@dataclass
class Rollouts:
    """Plays episodes in this process, with a policy's engine and a sandbox. ``model`` is the model to train. The engine
    samples from a copy of ``model``; ``engine.update_from(model, version)`` renews the copy."""

    model: Any
    tokenizer: Any
    engine: Engine
    chat: Chat
    sandbox: Sandbox
    settings: EpisodeSettings
    config: Config

    async def play(self, jobs: Sequence[Job], kind: Kind, on_done: OnDone = lambda episode: None) -> list[Episode]:
        async def play_one(task: Task, name: str) -> Episode:
            seed = seed_of(self.config.seed, name)
            before: Episode | None = None
            for _ in range(PLAYS):
                parts = self.engine, self.chat, self.sandbox, self.settings
                with span("episode", episode=name):
                    episode = await run_episode(task, *parts, seed, name, before, kind)
                if episode.ended != "infra":
                    break
                before = max(episode, before or episode, key=lambda cut: len(cut.ids))
            on_done(episode)
            return episode

        plays, lockstep = [partial(play_one, *job) for job in jobs], self.config.sandbox.clock == "model"
        return await run_many(plays, self.config.agent.concurrency, lockstep=lockstep)


def episodes_of(tasks: Sequence[Task], samples: int, label: str) -> list[Job]:
    """Returns ``samples`` jobs for each of ``tasks``, in order. A job is a task and the id of an episode to play on it.
    The id has the form ``label/task/sample``. If ``tasks`` contains a task twice, the second occurrence has ids of the
    form ``label/task#2/sample``. Its episodes thus get other seeds, and count as another group of samples."""
    draws: Counter[str] = Counter()
    jobs: list[Job] = []
    for task in tasks:
        draws[task.name] += 1
        draw = f"#{draws[task.name]}" if draws[task.name] > 1 else ""
        jobs += [(task, f"{label}/{task.name}{draw}/{sample}") for sample in range(samples)]
    return jobs


def check_losses(ctx: StageContext, episodes: Sequence[Episode], where: str) -> dict[str, float]:
    """Checks how many of ``episodes`` were lost. A lost episode has no reward, because an infrastructure fault or the
    deadline ended it. If some episodes are lost, adds a note to ``ctx.tracker``. Returns the metric ``lost``: the
    number of episodes that faults ended. Other runs do not reuse the result of a stage with such episodes
    (``Manifest.lost``).

    Raises:
        TryAgain: No episode has a reward. The message begins with ``where``, the name of the step or the round."""
    lost = [episode.ended for episode in episodes if episode.reward is None]
    if len(lost) == len(episodes):
        raise TryAgain(f"{where}: no episode has a reward; {len(lost)} were lost ({', '.join(sorted(set(lost)))})")
    if lost:
        ctx.tracker.note(f"{ctx.name} lost episodes to faults or to the deadline; its metric dropped counts them")
    faults = lost.count("infra")
    if faults:
        ctx.tracker.note(f"{ctx.name} lost episodes to faults: other runs will not take its result from the cache")
    return {"lost": float(faults)}


@asynccontextmanager
async def open_rollouts(ctx: WorkerContext, policy: Path, settings: EpisodeSettings) -> AsyncIterator[Rollouts]:
    """Loads the policy from the folder ``policy``, and opens its engine and a sandbox.

    Raises:
        PolicyError: The folder holds no usable policy, or vLLM is missing.
        BadConfiguration: The local engine needs a GPU (``policy.device`` is cuda), and there is none; or a vLLM server
            would use the first GPU, which has another use (see ``servers_apart``).
        SandboxUnready: The compiler, or a required protection of the sandbox, is missing.
        TryAgain: A vLLM server does not start or answer, or all servers are lost."""
    import torch

    config = ctx.config
    torch.set_num_threads(1)  # this thread computes little (``LocalEngine.compute``)
    model, tokenizer = load_policy(policy)
    if config.policy.engine == "local" and config.policy.device == "cuda":
        if not gpus():
            raise BadConfiguration("policy.device is cuda, and this machine has no GPU that PyTorch can use")
        model.to("cuda")  # else the engine copies the weights to the GPU at every update
    chat = Chat(tokenizer, settings.style)
    async with open_sandbox(config.sandbox, ctx.cache) as sandbox, _open_engine(ctx, policy, model, chat) as engine:
        yield Rollouts(model, tokenizer, engine, chat, sandbox, settings, config)


def servers_apart(config: Config, here: int) -> None:
    """Raises BadConfiguration if a vLLM server of the stage would use this machine's first GPU, and this GPU has
    another use: the judge times kernels on it, or the stage broadcasts weights from it. ``here`` is this machine's
    number of GPUs."""
    sandbox, vllm = config.sandbox, config.policy.vllm
    if vllm.servers or not 0 < here <= vllm.replicas:
        return
    use = f"policy.vllm.replicas: {vllm.replicas} on {here} GPUs would decode on the first GPU"
    if sandbox.device == "cuda" and sandbox.clock == "real" and not sandbox.servers:
        raise BadConfiguration(
            f"{use}, on which the sandbox takes times. Expected at most {here - 1}, or policy.engine=local, or judges"
            f" elsewhere (sandbox.servers)."
        )
    if vllm.sync == "nccl":
        raise BadConfiguration(
            f"{use}, from which the stage broadcasts weights. Expected at most {here - 1}, or policy.vllm.sync=disk."
        )


@asynccontextmanager
async def _open_engine(ctx: WorkerContext, folder: Path, model: Any, chat: Chat) -> AsyncIterator[Engine]:
    policy = ctx.config.policy
    if policy.engine == "vllm":
        servers_apart(ctx.config, gpus())
        try:
            async with open_vllm(folder, model, ctx.work, policy, ctx.cache / "lease") as served:
                yield served
        except EngineLost as error:
            raise TryAgain(str(error)) from error
        return
    engine: Engine
    if policy.engine == "scripted":
        engine = ScriptedEngine(chat, read_tasks(ctx.inputs["tasks"]), model, ctx.config.sandbox.device)
    else:
        engine = make_engine(model, policy, ctx.cache / "lease")
    try:
        yield engine
    finally:
        await engine.close()


def episode_settings(
    config: Config,
    *,
    turns: int,
    context: int,
    temperature: float,
    reward: str = "ladder",
    mode: Mode = "quick",
    style: Style | None = None,
) -> EpisodeSettings:
    """Returns the settings of the agent loop. ``style`` is the style of prompts and tool results. It defaults to
    "full" for a pretrained base model (``policy.base``), and to "compact" (short texts) for a small model that is
    trained from scratch."""
    style = style or ("compact" if config.policy.base is None else "full")
    return EpisodeSettings(
        format=config.sandbox.format,
        style=style,
        device=config.sandbox.device,
        turns=turns,
        turn_tokens=config.agent.turn_tokens,
        tool_tokens=config.agent.tool_tokens,
        context=context,
        temperature=temperature,
        deadline_seconds=config.agent.deadline_seconds,
        reward=reward,
        mode=mode,
    )


def draw(tasks: Sequence[Task], count: int, seed: int, step: int) -> list[Task]:
    """Returns the ``count`` tasks of training step ``step``. Each epoch holds every task once, in an order that depends
    on ``seed``. The steps go through the epochs one after the other; a step may reach into the next epoch."""
    drawn: list[Task] = []
    for position in range(step * count, (step + 1) * count):
        epoch, index = divmod(position, len(tasks))
        order = random.Random(f"{seed}/{epoch}").sample(range(len(tasks)), len(tasks))
        drawn.append(tasks[order[index]])
    return drawn
