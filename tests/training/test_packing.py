"""Packing: what goes where, and that the packed attention is the masked one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import random_episode

from cuda_agent.training import attention
from cuda_agent.training.packing import (
    batch_of,
    before_sampled,
    pack,
    pack_evenly,
    split_evenly,
    tokens_of,
    tokens_of_episode,
    trainable,
)

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(50, 120))
def test_every_sequence_is_in_one_row_and_no_row_is_over_its_budget(lengths, budget):
    rows = pack(lengths, budget)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= budget for row in rows)
    assert pack(lengths, budget) == rows


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(50, 120))
def test_each_sequence_is_in_the_first_row_that_had_room_when_its_turn_came(lengths, budget):
    free = []
    expected = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for row in range(len(lengths)):
            if row == len(free):
                free.append(budget)
            if lengths[index] <= free[row]:
                free[row] -= lengths[index]
                expected[index] = row
                break
    assert {index: number for number, row in enumerate(pack(lengths, budget)) for index in row} == expected


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(50, 120), st.integers(1, 4))
def test_even_rows_lose_nothing_and_come_in_multiples_where_there_are_enough_sequences(lengths, budget, multiple):
    rows = pack_evenly(lengths, budget, multiple)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[index] for index in row) <= budget for row in rows)
    plain = len(pack(lengths, budget))
    assert len(rows) <= -(-plain // multiple) * multiple


def test_even_rows_are_even():
    rows = pack_evenly([30] * 8, 200, 2)
    assert [len(row) for row in rows] == [4, 4]
    assert [len(row) for row in pack_evenly([30] * 9, 200, 4)] == [3, 3, 3]


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="51 tokens does not fit a row of 50"):
        pack([3, 51], 50)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=12), st.integers(70, 200))
def test_rows_hold_the_tokens_of_their_sequences_and_know_where_these_belong(seeds, budget):
    episodes = [random_episode(seed) for seed in seeds]
    batch = batch_of(tokens_of_episode(episode) for episode in episodes)
    sampled = [
        (token, logprob)
        for episode in episodes
        for token, logprob, chosen in zip(episode.ids, episode.logprobs, episode.mask, strict=True)
        if chosen
    ]
    assert len(batch) == len(sampled)
    assert batch.logprobs.tolist() == pytest.approx([logprob for _, logprob in sampled])
    seen = []
    for row in batch.rows(budget):
        assert row.positions.tolist() == [position for length in row.lengths for position in range(length)]
        assert row.ids[row.before + 1].tolist() == [sampled[index][0] for index in row.tokens]
        assert (row.positions[row.before + 1] > 0).all()
        seen += row.tokens.tolist()
    assert sorted(seen) == list(range(len(sampled)))


def test_the_state_before_a_sampled_token_is_that_of_the_token_left_of_it():
    batch = batch_of([tokens_of([5, 6, 7, 8], [0, 0, 1, 1]), tokens_of([1, 2, 3], [1, 1, 0])])
    (row,) = batch.rows(7)
    states = row.ids[:, None].float().requires_grad_()
    before = before_sampled(states, row)
    assert row.ids[row.before + 1].tolist() == [7, 8, 2]
    assert before[:, 0].tolist() == [6, 7, 1]
    before.sum().backward()
    assert states.grad[:, 0].tolist() == [0, 1, 1, 0, 1, 0, 0]


def test_padded_and_flat_are_two_views_of_the_same_tokens():
    batch = batch_of(tokens_of_episode(random_episode(seed)) for seed in range(5))
    padded, mask = batch.padded(batch.logprobs)
    assert mask.sum(1).tolist() == list(batch.counts)
    assert torch.equal(padded[mask], batch.logprobs)


def test_episodes_of_ours_that_failed_and_empty_ones_are_not_trained_on():
    good, failed, empty = (random_episode(seed) for seed in range(3))
    failed.reward = None
    empty.mask = [0] * len(empty.mask)
    assert trainable([good, failed, empty]) == [good]
    with pytest.raises(ValueError, match="dropped"):
        tokens_of_episode(failed)
    good.mask[0] = 1
    with pytest.raises(ValueError, match="begins with a sampled token"):
        tokens_of_episode(good)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_even_splits_keep_order_and_differ_by_one_at_most(count, parts):
    runs = split_evenly(range(count), parts)
    assert [index for run in runs for index in run] == list(range(count))
    sizes = {len(run) for run in runs}
    assert not runs or (max(sizes) - min(sizes) <= 1 and min(sizes) > 0 and len(runs) == min(parts, count))


def causal_mask(lengths):
    """A row's mask: true where the query (first index) may look at the key: same sequence, not later."""
    owner = [number for number, length in enumerate(lengths) for _ in range(length)]
    return [[owner[q] == owner[k] and k <= q for k in range(len(owner))] for q in range(len(owner))]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4), st.sampled_from([(4, 4), (4, 2), (6, 1)]), st.integers(0, 99)
)
def test_packed_attention_equals_masked_attention_and_so_do_its_gradients(lengths, heads, seed):
    many, few = heads
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    shapes = [(1, many, tokens, 8), (1, few, tokens, 8), (1, few, tokens, 8)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    upstream = torch.randn(1, tokens, many, 8, generator=generator)
    results = []
    for packed in (True, False):
        query, key, value = (tensor.clone().requires_grad_() for tensor in inputs)
        if packed:
            out, _ = attention._packed_attention(
                torch.nn.Module(), query, key, value, None, segments=attention.Segments(tuple(lengths))
            )
        else:
            mask = torch.tensor(causal_mask(lengths))
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        (out * upstream).sum().backward()
        results.append((out, query.grad, key.grad, value.grad))
    for packed, masked in zip(*results, strict=True):
        assert torch.allclose(packed, masked, atol=2e-5)


def test_long_segments_take_the_other_path_with_the_same_result(monkeypatch):
    query, key, value = torch.randn(1, 4, 90, 8), torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8)
    blocked, _ = attention._packed_attention(
        torch.nn.Module(), query, key, value, None, segments=attention.Segments((60, 30))
    )
    monkeypatch.setattr(attention, "LONGEST", 10)
    whole, _ = attention._packed_attention(
        torch.nn.Module(), query, key, value, None, segments=attention.Segments((60, 30))
    )
    assert torch.allclose(blocked, whole, atol=1e-5)


def test_samples_of_one_draw_are_one_group_and_those_of_another_draw_are_not():
    data = [random_episode(seed) for seed in range(5)]
    for episode, name in zip(data, ("s/0/a/0", "s/0/b/0", "s/0/a/1", "s/0/a#2/0", "s/0/b/1"), strict=True):
        episode.id = name
    assert batch_of(tokens_of_episode(episode) for episode in data).groups.tolist() == [0, 1, 0, 2, 1]
