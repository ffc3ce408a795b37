"""Losses against loops over single tokens, and the case that clipping is there for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_agent.training.losses import ppo_loss, sft_loss, token_logprobs, value_loss

LOGPROB = st.floats(-4, 0, width=32)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB, st.floats(-3, 3, width=32)), min_size=1, max_size=20)


def slow_ppo(tokens, total, low, high, cap, dual=None):
    loss = kl = clipped_low = clipped_high = 0.0
    for new, old, engine, advantage in tokens:
        ratio = math.exp(new - old)
        held = min(max(ratio, 1 - low), 1 + high)
        surrogate = min(ratio * advantage, held * advantage)
        if dual is not None and advantage < 0:
            surrogate = max(surrogate, dual * advantage)
        loss -= min(math.exp(old - engine), cap) * surrogate / total
        kl += (math.exp(new - engine) - 1 - (new - engine)) / total
        clipped_low += (ratio < 1 - low and advantage < 0) / total
        clipped_high += (ratio > 1 + high and advantage > 0) / total
    return loss, kl, clipped_low, clipped_high


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.integers(0, 9), st.one_of(st.none(), st.floats(1.1, 5)))
def test_ppo_loss_is_the_sum_over_tokens(tokens, others, dual):
    total = len(tokens) + others
    new, old, engine, advantages = torch.tensor(tokens, dtype=torch.double).T
    loss, metrics = ppo_loss(new, old, engine, advantages, total, 0.2, 0.28, 2.0, dual)
    expected = slow_ppo(tokens, total, 0.2, 0.28, 2.0, dual)
    got = [float(number) for number in (loss, metrics["kl"], metrics["clip_low"], metrics["clip_high"])]
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert float(metrics["ratio_max"]) == pytest.approx(max(math.exp(t[0] - t[1]) for t in tokens), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.integers(0, 19))
def test_losses_of_parts_add_up_to_the_loss_of_the_whole(tokens, cut):
    columns = torch.tensor(tokens, dtype=torch.double).T
    total = len(tokens)

    def ppo(part):
        return ppo_loss(*part, total, 0.2, 0.28, 2.0)[0]

    def value(part):
        return value_loss(part[0], part[1], total, part[2], 0.2)

    for loss in (ppo, value, lambda part: sft_loss(part[0], total)):
        whole, parts = loss(columns), loss(columns[:, :cut]) + loss(columns[:, cut:])
        assert float(whole) == pytest.approx(float(parts), abs=1e-6)


def gradient(new, old, advantage, low, high, engine=None, dual=None):
    new = torch.tensor([new], requires_grad=True)
    old = torch.tensor([old])
    loss, _ = ppo_loss(
        new, old, old if engine is None else torch.tensor([engine]), torch.tensor([advantage]), 1, low, high, 2.0, dual
    )
    loss.backward()
    return float(new.grad)


@pytest.mark.parametrize(
    ("drift", "advantage", "clipped"),
    [
        (0.5, 1.0, True),
        (0.26, 1.0, True),
        (0.24, 1.0, False),
        (-0.5, -1.0, True),
        (-0.5, 1.0, False),
        (0.5, -1.0, False),
    ],
)
def test_off_policy_the_clip_takes_the_gradient_away_only_where_the_step_went_too_far(drift, advantage, clipped):
    """1.28 = e^0.247: a token that became likelier than that gets no further push up, but still may be pushed down."""
    held = gradient(-1.0 + drift, -1.0, advantage, 0.2, 0.28)
    free = gradient(-1.0 + drift, -1.0, advantage, 0.99, 1e6)
    assert free == pytest.approx(-math.exp(drift) * advantage, rel=1e-5)
    assert held == (0.0 if clipped else pytest.approx(free))


@pytest.mark.parametrize(
    ("drift", "advantage", "clipped"),
    [(1.2, -1.0, True), (1.0, -1.0, False), (1.2, 1.0, False), (-0.1, -1.0, False)],
)
def test_the_dual_clip_takes_the_gradient_away_from_bad_tokens_that_became_too_likely(drift, advantage, clipped):
    """3 = e^1.099"""
    held = gradient(-2.0 + drift, -2.0, advantage, 0.99, 1e6, dual=3.0)
    assert held == (0.0 if clipped else pytest.approx(gradient(-2.0 + drift, -2.0, advantage, 0.99, 1e6)))


def test_the_importance_weight_is_truncated_and_carries_no_gradient():
    plain = gradient(-1.0, -1.0, 1.0, 0.2, 0.28)
    assert gradient(-1.0, -1.0, 1.0, 0.2, 0.28, engine=-1.5) == pytest.approx(plain * math.exp(0.5), rel=1e-5)
    assert gradient(-1.0, -1.0, 1.0, 0.2, 0.28, engine=-9.0) == pytest.approx(plain * 2.0)


def test_a_ratio_beyond_float_range_stays_finite():
    assert math.isfinite(gradient(0.0, -300.0, -1.0, 0.2, 0.28))


@settings(max_examples=80, deadline=None)
@given(TOKENS, st.one_of(st.none(), st.floats(0.05, 2)))
def test_value_loss_is_half_the_mean_of_the_worse_square(tokens, clip):
    values, targets, old, _ = torch.tensor(tokens, dtype=torch.double).T
    expected = 0.0
    for value, target, before, _ in tokens:
        error = (value - target) ** 2
        if clip is not None:
            error = max(error, (min(max(value, before - clip), before + clip) - target) ** 2)
        expected += 0.5 * error / len(tokens)
    assert float(value_loss(values, targets, len(tokens), old, clip)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 23), st.integers(1, 30), st.sampled_from([0.7, 1.0]))
def test_chunks_change_neither_logprobs_nor_gradients(count, chunk, temperature):
    generator = torch.Generator().manual_seed(count)
    states = torch.randn(count, 6, generator=generator)
    weight = torch.randn(11, 6, generator=generator)
    ids = torch.randint(11, (count,), generator=generator)
    results = []
    for size in (count, chunk):
        s, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = token_logprobs(s, ids, lambda x, w=w: x @ w.T, size, temperature)
        (logprobs * torch.arange(count)).sum().backward()
        results.append((logprobs.detach(), entropy, s.grad, w.grad))
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, atol=1e-5)
    expected = torch.distributions.Categorical(logits=states @ weight.T / temperature)
    assert torch.allclose(results[1][0], expected.log_prob(ids), atol=1e-5)
    assert torch.allclose(results[1][1], expected.entropy(), atol=1e-5)


def test_samples_of_a_stale_policy_give_the_gradient_of_the_policy_that_is_trained():
    """Tokens in the shares in which an older policy samples them stand for its expectation exactly.  With that policy's
    log-probabilities as the denominator the gradient is that of the new policy's own expected advantage; without them,
    as if the samples were its own, it is another."""
    counts = torch.tensor([4, 2, 1, 1])  # of 8 samples of the old policy
    engine = (counts / 8).log()
    advantages = torch.tensor([0.3, -1.0, 2.0, 0.5])
    tokens = torch.repeat_interleave(torch.arange(4), counts)

    def direction(loss_of):
        logits = torch.tensor([0.1, -0.2, 0.6, 0.0], requires_grad=True)  # the new policy is another
        loss_of(logits.log_softmax(-1)).backward()
        return logits.grad

    def surrogate(new, old):
        """The loss of the samples; ``old`` is the denominator, the engine's log-probabilities are what they are."""
        return ppo_loss(new[tokens], old[tokens], engine[tokens], advantages[tokens], 8, 0.999, 1e6, 1e6)[0]

    wanted = direction(lambda new: -(new.exp() * advantages).sum())
    by_engine = direction(lambda new: surrogate(new, engine))
    recomputed = direction(lambda new: surrogate(new, new.detach()))
    ignored = direction(
        lambda new: ppo_loss(
            new[tokens], new.detach()[tokens], new.detach()[tokens], advantages[tokens], 8, 0.999, 1e6, 1e6
        )[0]
    )
    assert torch.allclose(by_engine, wanted, atol=1e-6)
    assert torch.allclose(recomputed, wanted, atol=1e-6), "the importance weight corrects the other denominator"
    assert (ignored - wanted).abs().max() > 0.1
