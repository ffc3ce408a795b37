"""Plays episodes for the stages ``collect`` and ``evaluate-*``, in rounds: one episode per task, then a checkpoint."""

import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from cuda_agent import spans
from cuda_agent.context import StageContext
from cuda_agent.errors import TryAgain
from cuda_agent.policy.episode import EPISODES, Episode, read_episodes, write_episodes
from cuda_agent.rl.rollouts import Kind, Players, check_losses, episode_settings, episodes_of, open_rollouts
from cuda_agent.sandbox.wire import Mode
from cuda_agent.tasks.io import read_tasks
from cuda_agent.tasks.task import Task
from cuda_agent.training.recipes import episode_metrics


async def play_rounds(
    ctx: StageContext,
    split: str,
    rounds: int,
    kind: Kind = "agent",
    *,
    turns: int,
    temperature: float,
    mode: Mode = "quick",
) -> tuple[list[Task], list[Episode]]:
    """Plays episodes with the stage's policy on the tasks of ``split`` ("train" or "heldout"). Each of the ``rounds``
    rounds plays one episode per task, and saves a checkpoint. Resumes from the newest checkpoint, if there is one. The
    sandbox judges the final solution of each episode in ``mode``, for example "quick" or "strict". Returns the tasks
    and the episodes of all rounds.

    Raises:
        TryAgain: The stage was told to stop, or no episode of a round has a reward."""
    tasks = [task for task in read_tasks(ctx.inputs["tasks"]) if task.split == split]
    episodes: list[Episode] = []
    start = ctx.checkpoints.load(lambda folder: episodes.extend(read_episodes(folder / EPISODES))) or 0

    def save(folder: Path) -> None:
        write_episodes(folder / EPISODES, episodes)

    done = len(episodes)

    def show(episode: Episode) -> None:
        nonlocal done
        done += 1
        ctx.tracker.progress(done, rounds * len(tasks), unit="episodes")

    context = ctx.config.policy.context
    settings = episode_settings(ctx.config, turns=turns, context=context, temperature=temperature, mode=mode)
    opened: AbstractAsyncContextManager[Players]
    if ctx.config.runtime == "local":
        opened = open_rollouts(ctx, ctx.inputs["policy"], settings)
    else:
        from cuda_agent.rl.ray.players import open_players

        opened = open_players(ctx, settings)
    async with spans.opened("players", opened) as players:
        for number in range(start, rounds):
            began = time.monotonic()
            with spans.span("play", round=number):
                played = await players.play(episodes_of(tasks, 1, f"{split}/{number}"), kind, show)
            losses = check_losses(ctx, played, f"round {number + 1}")
            episodes += played
            rate = len(played) / (time.monotonic() - began)
            ctx.tracker.log(number, episode_metrics(played) | losses | {"episodes_per_second": rate})
            ctx.checkpoints.save(number + 1, save)
            if ctx.should_stop() and number + 1 < rounds:
                raise TryAgain(f"stopped after round {number + 1} of {rounds}")
    return tasks, episodes
