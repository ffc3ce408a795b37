"""Advantages against a reference that goes through one sequence at a time and skips what was not sampled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_agent.training.advantages import explained_variance, gae, terminal_rewards, whiten

NUMBERS = st.floats(-3, 3, width=32)
SEQUENCES = st.lists(
    st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), min_size=1, max_size=12), min_size=1, max_size=5
)


def slow_gae(rewards, values, gamma, lam):
    """The definition: the sum over what follows of (gamma lam)^k times the one-step error there."""
    errors = [
        reward + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, reward in enumerate(rewards)
    ]
    return [sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:])) for t in range(len(errors))]


def columns(sequences):
    longest = max(len(sequence) for sequence in sequences)
    padded = [sequence + [(False, 7.0, 7.0)] * (longest - len(sequence)) for sequence in sequences]
    mask, rewards, values = (torch.tensor([[entry[i] for entry in row] for row in padded]) for i in range(3))
    return mask.bool(), rewards.double(), values.double()


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.floats(0.5, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors_over_the_sampled_tokens_alone(sequences, gamma, lam):
    mask, rewards, values = columns(sequences)
    advantages = gae(rewards, values, mask, gamma, lam)
    assert (advantages[~mask] == 0).all()
    for row, sequence in enumerate(sequences):
        sampled = [(reward, value) for chosen, reward, value in sequence if chosen]
        expected = slow_gae([reward for reward, _ in sampled], [value for _, value in sampled], gamma, lam)
        assert torch.allclose(advantages[row][mask[row]], torch.tensor(expected, dtype=torch.double), atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(SEQUENCES)
def test_with_lambda_one_value_plus_advantage_is_the_return_whatever_the_values(sequences):
    mask, rewards, values = columns(sequences)
    final = terminal_rewards(rewards[:, 0], mask)
    returns = gae(final, values, mask, 1.0, 1.0) + values
    expected = rewards[:, :1].expand_as(values)
    assert torch.allclose(returns[mask], expected[mask], atol=1e-5)


def test_the_terminal_reward_sits_on_the_last_sampled_token():
    mask = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    placed = terminal_rewards(torch.tensor([2.0, -1.0, 3.0]), mask)
    assert placed.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, -1, 0], [0, 0, 0, 0, 0]]


@settings(max_examples=80, deadline=None)
@given(st.lists(NUMBERS, min_size=2, max_size=60))
def test_whitened_advantages_have_mean_zero_and_deviation_one(numbers):
    advantages = torch.tensor(numbers, dtype=torch.double)
    white = whiten(advantages)
    assert abs(float(white.mean())) < 1e-6
    if float(advantages.std(correction=0)) > 1e-3:
        assert abs(float(white.std(correction=0)) - 1) < 1e-3
        assert (white[advantages.argsort()].diff() >= 0).all()


@pytest.mark.parametrize("value", [0.0, 1.7, -2.9])
def test_equal_advantages_teach_nothing(value):
    assert whiten(torch.full((9,), value)).abs().max() < 1e-6


def test_explained_variance_is_one_for_the_targets_and_zero_for_a_constant():
    targets = torch.tensor([1.0, 2.0, -1.0, 3.0])
    assert explained_variance(targets, targets) == 1
    assert abs(explained_variance(torch.full((4,), 5.0), targets)) < 1e-6
    assert explained_variance(-targets, targets) == -3
    assert explained_variance(targets, torch.ones(4)) == 0
