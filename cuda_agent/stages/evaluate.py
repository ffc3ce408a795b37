"""Stages ``evaluate-base``, ``evaluate-warmup``, ``evaluate-rft``, ``evaluate-agentic`` and ``evaluate-one-shot``: each
scores one policy on the held-out tasks. Inputs: tasks, policy; output: ``scores``.

All these stages play the same tasks with the same settings and seeds. In ``evaluate-one-shot`` the policy gives one
answer without tools. In the other stages it works in turns with tools. The sandbox judges all solutions in quick mode.
If the setting ``evaluate.mode`` is "strict", the final solution of each episode is also judged in strict mode (on more
kinds of inputs), and this verdict counts as the final one. If the stage ``synthesis`` found the best kernel design for
a task, the scores also compare solutions with this design."""

import asyncio

from cuda_agent.context import SCORE, StageContext
from cuda_agent.policy.episode import EPISODES, write_episodes
from cuda_agent.rl.rollouts import Kind
from cuda_agent.rl.rounds import play_rounds
from cuda_agent.rl.scores import METRICS, score, write_scores
from cuda_agent.synthesis.teacher.optimum import read_optima


def run(ctx: StageContext) -> None:
    settings = ctx.config.evaluate
    policy = ctx.name.removeprefix("evaluate-")
    kind: Kind = "single" if policy == "one-shot" else "agent"
    turns, temperature, mode = settings.turns, settings.temperature, settings.mode
    play = play_rounds(ctx, "heldout", settings.samples, kind, turns=turns, temperature=temperature, mode=mode)
    tasks, episodes = asyncio.run(play)
    folder = ctx.outputs["scores"]
    write_episodes(folder / EPISODES, episodes)
    optima = read_optima(ctx.inputs["tasks"])
    fastest = {name: optimum.speedup for name, optimum in optima.items() if optimum.speedup}
    scores = score(policy, episodes, tasks, ctx.config.sandbox.clock, ctx.config.seed, fastest)
    write_scores(folder / "scores.json", scores)
    values = {f"{SCORE}{metric}": getattr(scores.final.overall, metric) for metric in METRICS}
    ctx.tracker.log(settings.samples, {name: value for name, value in values.items() if value is not None})
