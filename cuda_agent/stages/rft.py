"""Stage ``rft``: rejection fine-tuning, which trains the policy to imitate its own good episodes (CUDA Agent, arXiv
2602.24286, section 3.3, stage 2). Inputs: episodes, policy; output: ``policy``.

The stage chooses the episodes with a positive reward and without bad patterns. A bad pattern is a malformed tool call,
a call of a tool that does not exist, or a loop of equal calls. Training uses the tokens that the policy sampled in
these episodes, but not a last turn that was cut off. If no tokens remain, the policy stays unchanged.

With ``rft.fastest`` the stage imitates only some of the chosen episodes: for each task those whose final solutions take
the least time. So the policy learns which of its designs suits which task. This selection is not part of the paper."""

import math
from collections import defaultdict
from collections.abc import Iterable

from cuda_agent.context import StageContext
from cuda_agent.policy.chat import Chat
from cuda_agent.policy.episode import EPISODES, Episode, read_episodes
from cuda_agent.policy.model import load_policy, save_policy
from cuda_agent.rl.trainers import imitate, make_trainer, shared_training
from cuda_agent.spans import span
from cuda_agent.training.packing import tokens_to_imitate, trainable


def run(ctx: StageContext) -> None:
    settings = ctx.config.rft
    with span("read episodes"):
        episodes = list(read_episodes(ctx.inputs["episodes"] / EPISODES))
    kept = [e for e in trainable(episodes) if e.reward is not None and e.reward > 0 and not e.flags]
    if settings.fastest:
        kept = fastest(kept, settings.fastest)
    model, tokenizer = load_policy(ctx.inputs["policy"])
    stop_ids = Chat(tokenizer).stop_ids
    sequences = [tokens for episode in kept if (tokens := tokens_to_imitate(episode, stop_ids)).mask.any()]
    ctx.tracker.note(f"rft imitates {len(sequences)} of {len(episodes)} episodes")
    if sequences:
        with shared_training(ctx) as shared:
            longest, norm = max(map(len, sequences)), settings.max_grad_norm
            with span("make trainer"):
                trainer = make_trainer(shared, model, longest=longest, max_grad_norm=norm, precision="auto")
            imitate(ctx, trainer, sequences, settings, epochs=settings.epochs)
            model = trainer.model
    save_policy(model, tokenizer, ctx.outputs["policy"])


def fastest(episodes: Iterable[Episode], count: int) -> list[Episode]:
    """Returns at most ``count`` episodes of each task, those whose final solutions take the least time. Equal ones, and
    those without a time, keep their order."""
    by_task: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        by_task[episode.task].append(episode)
    return [e for of_task in by_task.values() for e in sorted(of_task, key=_seconds)[:count]]


def _seconds(episode: Episode) -> float:
    return (episode.verdict or {}).get("seconds") or math.inf
