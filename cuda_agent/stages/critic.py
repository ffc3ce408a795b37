"""Stage ``critic``: pretrains the critic, a model that estimates an episode's expected reward (CUDA Agent, arXiv
2602.24286, section 3.3, stage 3). Inputs: episodes, policy; output: ``critic``.

The stage trains on all judged episodes, successful or not. Each has one reward at its end, and gamma is 1. The setting
``agentic.reward`` chooses the reward function. The later stage ``agentic``, which trains this critic further, uses the
same function.

Some episodes are held out. The explained variance of their rewards measures the critic's quality. If it is below the
setting ``critic.min_explained_variance``, the stage writes a note or fails. The setting ``critic.gate`` chooses between
the two. docs/decisions.md (D17) explains why episodes are held out and not tasks."""

import hashlib
from dataclasses import replace

from cuda_agent.context import StageContext
from cuda_agent.errors import NotGoodEnough, TryAgain
from cuda_agent.policy.episode import EPISODES, Episode, read_episodes
from cuda_agent.policy.reward import REWARDS
from cuda_agent.rl.trainers import make_trainer, shared_training
from cuda_agent.spans import span
from cuda_agent.training.critic import critic_from_policy, save_critic
from cuda_agent.training.packing import trainable
from cuda_agent.training.recipes import value_epoch, value_quality


def run(ctx: StageContext) -> None:
    with shared_training(ctx) as shared:
        pretrain(shared)


def pretrain(ctx: StageContext) -> None:
    settings = ctx.config.critic
    reward = REWARDS[ctx.config.agentic.reward]
    with span("read episodes"):
        collected = (episode for episode in read_episodes(ctx.inputs["episodes"] / EPISODES) if episode.verdict)
        episodes = trainable(replace(episode, reward=reward(episode.verdict or {})) for episode in collected)
    if not episodes:
        raise NotGoodEnough("critic: no collected episode has a reward, so there is nothing to learn values from.")
    training, heldout = hold_out(episodes, settings.heldout, ctx.config.seed)
    mean = sum(episode.reward or 0.0 for episode in training) / len(training)
    longest = max(len(episode.ids) for episode in episodes)
    with span("make trainer"):
        trainer = make_trainer(ctx, critic_from_policy(ctx.inputs["policy"], mean), longest=longest)
    start = ctx.checkpoints.load(trainer.load) or 0
    for epoch in range(start, settings.epochs):
        with span("epoch", epoch=epoch):
            metrics = value_epoch(trainer, training, settings, seed=ctx.config.seed, epoch=epoch)
            quality = value_quality(trainer, heldout)
        ctx.tracker.log(epoch, metrics | {f"heldout_{name}": value for name, value in quality.items()})
        ctx.tracker.progress(epoch + 1, settings.epochs, unit="epochs")
        ctx.checkpoints.save(epoch + 1, trainer.save)
        if ctx.should_stop() and epoch + 1 < settings.epochs:
            raise TryAgain(f"stopped after epoch {epoch + 1} of {settings.epochs}")
    with span("heldout quality"):
        explained = value_quality(trainer, heldout)["explained_variance"]
    if len({episode.reward for episode in heldout}) == 1:
        ctx.tracker.note("critic: all held-out episodes have the same reward, so it is not known how much it explains")
    elif not explained >= settings.min_explained_variance:  # also if it is NaN
        limit = f"{settings.min_explained_variance} (critic.min_explained_variance)"
        text = f"critic: held-out explained variance is {explained:.2f}, below {limit}"
        if settings.gate == "stop":
            raise NotGoodEnough(f"{text}. More episodes (collect.samples) or epochs (critic.epochs) may help.")
        ctx.tracker.note(text)
    save_critic(trainer.model, ctx.outputs["critic"])


def hold_out(episodes: list[Episode], share: float, seed: int) -> tuple[list[Episode], list[Episode]]:
    """Splits ``episodes`` into (training, held-out). ``share`` is the fraction to hold out. Both lists get at least one
    episode. If there is only one episode, it is in both lists. The split depends only on ``share``, ``seed`` and the
    ids of the episodes."""
    ranked = sorted(episodes, key=lambda episode: hashlib.sha256(f"{seed}/{episode.id}".encode()).digest())
    count = min(max(1, round(share * len(ranked))), len(ranked) - 1)
    if not count:  # a single episode serves for both, and the gate has no meaning
        return ranked, ranked
    return ranked[count:], ranked[:count]
