"""A tiny Qwen3 and random episodes.  Equal seeds give equal results."""

import random

import torch

from cuda_agent.policy.episode import Episode

VOCAB = 48


def tiny_policy(seed: int = 0, layers: int = 2):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    return Qwen3ForCausalLM(config)


def random_episode(seed: int, reward: float | None = None, longest: int = 40) -> Episode:
    """Returns an episode of a prompt, sampled tokens, a tool output (may be empty), and more sampled tokens."""
    draw = random.Random(seed)
    mask = (
        [0] * draw.randint(1, 8) + [1] * draw.randint(1, longest) + [0] * draw.randint(0, 6) + [1] * draw.randint(1, 9)
    )
    episode = Episode(
        id=f"episode/{seed}",
        task="task",
        kind="agent",
        ids=[draw.randrange(VOCAB) for _ in mask],
        mask=mask,
        logprobs=[-draw.random() * 4 if sampled else 0.0 for sampled in mask],
        versions=[0 if sampled else -1 for sampled in mask],
        turns=[0] * len(mask),
        reward=draw.choice([-1.0, 1.0, 2.0, 3.0]) if reward is None else reward,
        ended="answer",
    )
    episode.verdict = {"status": "ok", "reward": int(episode.reward or 0)}
    return episode
