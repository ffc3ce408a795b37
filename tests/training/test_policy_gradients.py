"""Policy gradients against brute force: every outcome of a tiny policy is enumerated, with its exact probability.

The tabular policy and its gradients are plain Python and numpy here; the estimators are the product's.  The last tests
go through ``ppo_update`` and a tiny transformer, whose gradients the plain model gives, one episode at a time.
"""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch
from training_cases import random_episode, tiny_policy

from cuda_agent.config import Ppo
from cuda_agent.policy.episode import Episode
from cuda_agent.training import recipes
from cuda_agent.training.advantages import ADVANTAGES, AdvantageInputs, gae, group, rloo, terminal_rewards
from cuda_agent.training.critic import Critic
from cuda_agent.training.trainer import Trainer

ACTIONS, STOP, LONGEST = 3, 0, 3


# ------------------------------------------------------------------------------ a tabular policy, by numpy alone


def outcomes() -> list[tuple[int, ...]]:
    """All sequences: each ends with STOP or has the greatest length."""
    found = []
    for length in range(1, LONGEST + 1):
        for actions in itertools.product(range(ACTIONS), repeat=length):
            if STOP not in actions[:-1] and (length == LONGEST or actions[-1] == STOP):
                found.append(actions)
    return found


OUTCOMES = outcomes()
STATES = {prefix: i for i, prefix in enumerate(dict.fromkeys(y[:t] for y in OUTCOMES for t in range(len(y))))}
THETA = np.random.default_rng(0).normal(size=(len(STATES), ACTIONS))
LADDER = [float(reward) for reward in np.random.default_rng(1).choice([-1, 1, 2, 3], size=len(OUTCOMES))]
TWO = [3.0 if index % 3 == 0 else -1.0 for index in range(len(OUTCOMES))]


def probabilities(theta: np.ndarray) -> np.ndarray:
    """[outcomes]"""
    table = np.exp(theta) / np.exp(theta).sum(1, keepdims=True)
    return np.array([math.prod(table[STATES[y[:t]], y[t]] for t in range(len(y))) for y in OUTCOMES])


def token_scores(outcome: tuple[int, ...]) -> list[np.ndarray]:
    """The gradient of the log-probability of each of its tokens."""
    table = np.exp(THETA) / np.exp(THETA).sum(1, keepdims=True)
    scores = []
    for t, action in enumerate(outcome):
        score = np.zeros_like(THETA)
        score[STATES[outcome[:t]]] = -table[STATES[outcome[:t]]]
        score[STATES[outcome[:t]], action] += 1
        scores.append(score)
    return scores


SCORES = [sum(token_scores(y)) for y in OUTCOMES]


def exact_gradient(rewards: list[float]) -> np.ndarray:
    """Of the expected reward, by central differences."""
    gradient, step = np.zeros_like(THETA), 1e-5
    for index in np.ndindex(THETA.shape):
        up, down = THETA.copy(), THETA.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (probabilities(up) - probabilities(down)) @ np.array(rewards) / (2 * step)
    return gradient


def expected_estimate(rewards: list[float], size: int, advantages) -> np.ndarray:
    """The mean, over all groups of ``size`` samples, of (1/size) sum of advantage times score."""
    chances = probabilities(THETA)
    groups = list(itertools.product(range(len(OUTCOMES)), repeat=size))
    given = advantages([[rewards[i] for i in members] for members in groups])
    total = np.zeros_like(THETA)
    for members, gains in zip(groups, given, strict=True):
        weight = math.prod(chances[i] for i in members) / size
        for i, gain in zip(members, gains, strict=True):
            total += weight * gain * SCORES[i]
    return total


def by(estimator):
    """An estimator of the product's, of all groups at once."""

    def advantages(rewards: list[list[float]]) -> list[list[float]]:
        flat = torch.tensor(rewards, dtype=torch.float64)
        numbers = torch.arange(len(rewards)).repeat_interleave(flat.shape[1])
        return estimator(flat.flatten(), numbers).reshape(flat.shape).tolist()

    return advantages


def plain_group(rewards: list[list[float]]) -> list[list[float]]:
    return [[(r - statistics.fmean(g)) / (statistics.pstdev(g) + 1e-6) for r in g] for g in rewards]


def plain_rloo(rewards: list[list[float]]) -> list[list[float]]:
    return [[r - statistics.fmean(g[:i] + g[i + 1 :]) for i, r in enumerate(g)] for g in rewards]


def test_the_enumeration_is_complete_and_its_scores_are_right():
    assert probabilities(THETA).sum() == pytest.approx(1, abs=1e-12)
    scored = sum(p * r * s for p, r, s in zip(probabilities(THETA), LADDER, SCORES, strict=True))
    assert np.allclose(scored, exact_gradient(LADDER), atol=1e-8)
    assert abs(exact_gradient(LADDER)).max() > 0.1, "there is something to get wrong"


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_is_unbiased(size):
    assert np.allclose(expected_estimate(LADDER, size, by(rloo)), exact_gradient(LADDER), atol=1e-5)


@pytest.mark.parametrize("size", [2, 3])
def test_group_gives_what_grpo_gives_by_its_definition(size):
    found = expected_estimate(LADDER, size, by(group))
    assert np.allclose(found, expected_estimate(LADDER, size, plain_group), atol=1e-5)
    assert not np.allclose(found, exact_gradient(LADDER), atol=1e-2), "GRPO is no estimate of this gradient"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_with_two_rewards_group_gives_the_exact_gradient_up_to_its_known_scale(size):
    """With k of n samples right, the advantages are sqrt((n-k)/k) and -sqrt(k/(n-k)).  The score of a right sample is
    grad p / p in expectation, that of a wrong one -grad p / (1-p); so E = grad p E[sqrt(k(n-k))] / (n p (1-p))."""
    p = sum(chance for chance, reward in zip(probabilities(THETA), TWO, strict=True) if reward == 3)
    mixed = sum(math.comb(size, k) * p**k * (1 - p) ** (size - k) * math.sqrt(k * (size - k)) for k in range(size + 1))
    scale = mixed / (size * p * (1 - p)) / (3 - -1)  # the gradient of the reward is 4 grad p
    assert np.allclose(expected_estimate(TWO, size, by(group)), scale * exact_gradient(TWO), atol=1e-5)


@pytest.mark.parametrize("right", [True, False], ids=["exact values", "any values"])
def test_gae_with_lambda_one_is_unbiased(right):
    chances = probabilities(THETA)

    def value(prefix: tuple[int, ...]) -> float:
        """The expected reward from here on."""
        here = [i for i, y in enumerate(OUTCOMES) if y[: len(prefix)] == prefix]
        return float(sum(chances[i] * LADDER[i] for i in here) / sum(chances[i] for i in here))

    total = np.zeros_like(THETA)
    for chance, reward, outcome in zip(chances, LADDER, OUTCOMES, strict=True):
        states = [outcome[:t] for t in range(len(outcome))]
        values = torch.tensor([[value(s) if right else math.sin(STATES[s]) for s in states]], dtype=torch.float64)
        mask = torch.ones_like(values, dtype=torch.bool)
        placed = terminal_rewards(torch.tensor([reward], dtype=torch.float64), mask)
        gains = gae(placed, values, mask, 1.0, 1.0)[0].tolist()
        assert gains == pytest.approx([reward - v for v in values[0].tolist()], abs=1e-12)
        scores = token_scores(outcome)
        total += chance * sum(gain * score for gain, score in zip(gains, scores, strict=True))
    assert np.allclose(total, exact_gradient(LADDER), atol=1e-5)


# -------------------------------------------------------------------------------------- the estimators themselves


def test_groups_are_compared_each_by_itself_in_whatever_order_they_stand():
    rewards, groups = torch.tensor([3.0, 7.0, -1.0, 1.0, 7.0, 1.0]), torch.tensor([5, 2, 5, 5, 2, 9])
    assert group(rewards, groups).tolist() == pytest.approx([1.2247447, 0, -1.2247447, 0, 0, 0], abs=1e-5)
    assert rloo(rewards, groups).tolist() == pytest.approx([3, 0, -3, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("estimator", [group, rloo])
def test_groups_of_one_and_of_equal_rewards_teach_nothing(estimator):
    rewards = torch.tensor([0.1, 0.1, 0.1, 2.7182818])
    assert estimator(rewards, torch.tensor([0, 0, 0, 1])).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["group", "rloo"])
def test_the_advantage_of_an_episode_is_on_all_of_its_sampled_tokens(name):
    mask = torch.tensor([[True, True, True], [True, False, False]])
    given = AdvantageInputs(torch.tensor([3.0, -1.0]), mask, torch.tensor([0, 0]), None, 1.0, 1.0)
    gain = {"group": 1.0, "rloo": 4.0}[name]
    assert ADVANTAGES[name].estimate(given).tolist() == pytest.approx([gain, gain, gain, -gain], abs=1e-5)
    assert not ADVANTAGES[name].critic


# ------------------------------------------------------------------------------------------- through ``ppo_update``


def settings(name, count: int) -> Ppo:
    rates = {"actor_lr": 1e-12, "critic_lr": 1e-12}
    sizes = {"episodes_per_step": count, "samples_per_prompt": 2, "minibatches": 1}
    return Ppo(advantage=name, **rates, **sizes)


def trainer(model) -> Trainer:
    return Trainer(model, row_tokens=256, max_grad_norm=1e9)


def plain_logprobs(model, episode: Episode) -> torch.Tensor:
    """Of its sampled tokens, with gradients; float32 [sampled tokens]."""
    ids = torch.tensor(episode.ids)
    logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    return torch.stack([logprobs[t - 1, ids[t]] for t, sampled in enumerate(episode.mask) if sampled])


def gradient_of(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def brute_force(model, data: list[Episode], gains: list[list[float]]) -> torch.Tensor:
    """The gradient of -(1/tokens) sum of advantage times log-probability, one episode at a time."""
    model.zero_grad()
    tokens = sum(map(len, gains))
    for episode, own in zip(data, gains, strict=True):
        (-(torch.tensor(own) * plain_logprobs(model, episode)).sum() / tokens).backward()
    return gradient_of(model)


@pytest.mark.parametrize("name", ["gae", "group", "rloo"])
def test_the_gradient_of_an_update_is_that_of_brute_force(name):
    actor, data = trainer(tiny_policy()), [random_episode(seed) for seed in range(9)]
    names = ["s/a/0", "s/b/0", "s/b/1", "s/a/1", "s/a#2/0", "s/a#2/1", "s/a/2", "s/c/0", "s/b/2"]
    for episode, id in zip(data, names, strict=True):
        episode.id = id
        with torch.no_grad():
            sampled = iter(plain_logprobs(actor.model, episode).tolist())
        episode.logprobs = [next(sampled) if one else 0.0 for one in episode.mask]
    data[8].reward = None  # dropped by our fault: no part of its group
    kept, critic = data[:8], None
    if name == "gae":
        model = Critic(tiny_policy(1).model)
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
        critic, gains = trainer(model), []
        for episode in kept:
            with torch.no_grad():
                states = model.trunk(input_ids=torch.tensor([episode.ids])).last_hidden_state[0]
                values = model.head(states)[:, 0].tolist()
            gains.append([episode.reward - values[t - 1] for t, sampled in enumerate(episode.mask) if sampled])
        flat = [gain for own in gains for gain in own]
        mean, spread = statistics.fmean(flat), statistics.pstdev(flat)
        gains = [[(gain - mean) / (spread + 1e-6) for gain in own] for own in gains]
    else:
        plain = {"group": plain_group, "rloo": plain_rloo}[name]
        by_group = {id: [e.reward for e in kept if e.group == id] for id in ("s/a", "s/b", "s/a#2")}
        of = {id: iter(plain([rewards])[0]) for id, rewards in by_group.items()} | {"s/c": iter([0.0])}
        gains = [[next(of[episode.group])] * sum(episode.mask) for episode in kept]
    metrics = recipes.ppo_update(actor, critic, data, settings(name, 10), seed=0)
    found = gradient_of(actor.model)
    assert (metrics["episodes"], metrics["dropped"]) == (8, 1)
    assert ("critic_loss" in metrics) == ("explained_variance" in metrics) == (name == "gae")
    expected = brute_force(actor.model, kept, gains)
    assert expected.abs().max() > 1e-2
    assert torch.allclose(found, expected, atol=1e-5)


def test_an_update_by_rloo_is_the_exact_gradient_of_the_expected_reward_over_all_groups():
    """Every group of two answers of two tokens out of three, each through ``ppo_update``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4, "initializer_range": 0.5}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    actor = trainer(Qwen3ForCausalLM(Qwen3Config(vocab_size=3, tie_word_embeddings=False, **sizes, **heads)))
    answers = list(itertools.product(range(3), repeat=2))
    rewards = dict(zip(answers, [3.0, -1.0, -1.0, 2.0, 1.0, -1.0, 3.0, -1.0, 1.0], strict=True))

    def episode(answer: tuple[int, ...], sample: int) -> Episode:
        ids, zeros = [1, *answer], [0, 0, 0]
        return Episode(
            f"s/a/{sample}", "a", "single", ids, [0, 1, 1], [0.0] * 3, zeros, zeros, rewards[answer], "answer"
        )

    logprobs = [plain_logprobs(actor.model, episode(answer, 0)) for answer in answers]
    chances = torch.stack([own.sum().exp() for own in logprobs])
    assert float(chances.detach().sum()) == pytest.approx(1, abs=1e-5)
    actor.model.zero_grad()
    (chances * torch.tensor([rewards[answer] for answer in answers])).sum().backward()
    exact = gradient_of(actor.model)
    assert exact.abs().max() > 1e-2

    found = torch.zeros_like(exact)
    for first, second in itertools.product(range(9), repeat=2):
        pair = [episode(answers[first], 0), episode(answers[second], 1)]
        for one, index in zip(pair, (first, second), strict=True):
            one.logprobs = [0.0, *logprobs[index].tolist()]
        recipes.ppo_update(actor, None, pair, settings("rloo", 2), seed=0)
        found += float(chances[first].detach() * chances[second].detach()) * gradient_of(actor.model)
    assert torch.allclose(found, -exact / 2, atol=1e-5), "the loss is the mean over the two tokens of an answer"
