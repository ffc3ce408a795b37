"""Converts episodes (attempts of the policy at tasks) to tensors, and packs several sequences into each row. A row has
at most a fixed number of tokens.

Log-probabilities, advantages and values are stored in flat tensors, with one entry per sampled token of a ``Batch``,
sequence after sequence. A ``PackedRow`` lists its sampled tokens (``targets``), their indices in the flat tensors
(``tokens``), and the positions of the states that predict them (``before``). The state at position t - 1 predicts the
token at t."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from cuda_agent.policy.episode import Episode


@dataclass(frozen=True)
class Tokens:
    """One sequence to train on. ``mask`` is true at the tokens that the policy sampled or is to imitate."""

    ids: Tensor  # int64 [length]
    mask: Tensor  # bool [length]; false for the first token, which nothing predicts
    logprobs: Tensor  # float32 [sampled tokens], the engine's; zeros for imitation
    reward: float = 0.0  # belongs to the last sampled token
    group: str = ""  # equal within a group (``policy.episode.group_of``)

    def __len__(self) -> int:
        return self.ids.numel()


def tokens_of(ids: Sequence[int], mask: Sequence[int]) -> Tokens:
    """Returns a sequence to imitate. Training uses the tokens where ``mask`` is 1, except the first of ``ids``. Raises
    ``ValueError`` if ``ids`` is empty or differs in length from ``mask``."""
    chosen = torch.tensor(mask, dtype=torch.bool)
    if len(ids) != len(mask) or not len(ids):
        raise ValueError(f"a sequence of {len(ids)} tokens with a mask of {len(mask)}")
    chosen[0] = False
    return Tokens(torch.tensor(ids, dtype=torch.int64), chosen, torch.zeros(int(chosen.sum())))


def tokens_of_episode(episode: Episode) -> Tokens:
    """Returns an episode as a sequence. Raises ``ValueError`` if it has no reward or begins with a sampled token."""
    if episode.reward is None:
        raise ValueError(f"episode {episode.id} has no reward: it is to be dropped, not trained on")
    mask = torch.tensor(episode.mask, dtype=torch.bool)
    if mask[0]:
        raise ValueError(f"episode {episode.id} begins with a sampled token, which nothing predicts")
    logprobs = torch.tensor(episode.logprobs, dtype=torch.float32)[mask]
    return Tokens(torch.tensor(episode.ids, dtype=torch.int64), mask, logprobs, float(episode.reward), episode.group)


def tokens_to_imitate(episode: Episode, stop_ids: Collection[int]) -> Tokens:
    """Returns an episode as a sequence to imitate. The mask excludes the last sampled turn if this turn was cut off,
    that is, if it does not end with one of ``stop_ids``. Raises ``ValueError`` if the episode has no token."""
    sampled = [number for number, mask in enumerate(episode.mask) if mask]
    cut = episode.turns[sampled[-1]] if sampled and episode.ids[sampled[-1]] not in stop_ids else None
    return tokens_of(
        episode.ids, [mask and turn != cut for mask, turn in zip(episode.mask, episode.turns, strict=True)]
    )


def trainable(episodes: Iterable[Episode]) -> list[Episode]:
    """Returns the episodes that can be trained on: those with sampled tokens and a reward. The reward is ``None`` if
    the time limit or an infrastructure fault ended the episode."""
    return [episode for episode in episodes if episode.reward is not None and any(episode.mask)]


@dataclass(frozen=True)
class PackedPart:
    """Marks a row as one process's part of a longer row. The longer row is divided among ``ranks`` processes; ``rank``
    is the number of this process, from 0."""

    ranks: int
    rank: int


@dataclass(frozen=True)
class PackedRow:
    """Several sequences in one row. ``positions`` begin at 0 in each sequence. In the shapes of the attributes, n is
    the number of the row's sampled tokens."""

    ids: Tensor  # int64 [length]
    positions: Tensor  # int64 [length]
    lengths: tuple[int, ...]  # number of tokens of each sequence, in row order
    before: Tensor  # int64 [n], indices in the row of the states that predict the sampled tokens
    targets: Tensor  # int64 [n], ids of the sampled tokens
    tokens: Tensor  # int64 [n], indices of the sampled tokens in the batch's flat tensors
    part: PackedPart | None = None  # set when the row is one rank's part of a row with these ``lengths``

    def to(self, device: torch.device | str) -> "PackedRow":
        names = ("ids", "positions", "before", "targets", "tokens")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def empty_row() -> PackedRow:
    """Returns a row without tokens to train on, for a process that has no other row to compute. A loss computed from it
    has a gradient of zero."""
    none = torch.zeros(0, dtype=torch.int64)
    return PackedRow(torch.zeros(2, dtype=torch.int64), torch.arange(2), (2,), none, none, none)


@dataclass(frozen=True)
class Batch:
    """Sequences that are trained on together. A flat tensor, such as ``logprobs``, has one entry per sampled token."""

    sequences: tuple[Tokens, ...]
    counts: tuple[int, ...]  # sampled tokens of each sequence
    logprobs: Tensor  # float32 [sampled tokens], the engine's
    rewards: Tensor  # float32 [sequences]
    groups: Tensor  # int64 [sequences], equal within a group (``policy.episode.group_of``)

    def __len__(self) -> int:
        """Returns the number of sampled tokens."""
        return self.logprobs.numel()

    def rows(self, row_tokens: int, chosen: Sequence[int] | None = None, multiple: int = 1) -> list[PackedRow]:
        """Packs the sequences with the indices ``chosen`` (by default all) into rows of at most ``row_tokens``. Leaves
        out sequences without sampled tokens. Aims at a number of rows divisible by ``multiple`` (``pack_evenly``)."""
        picked = [i for i in (range(len(self.sequences)) if chosen is None else chosen) if self.counts[i]]
        offsets = torch.tensor((0, *self.counts)).cumsum(0).tolist()
        packed = pack_evenly([len(self.sequences[i]) for i in picked], row_tokens, multiple)
        return [_row([(self.sequences[picked[i]], offsets[picked[i]]) for i in row]) for row in packed]

    def padded(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``flat`` [sampled tokens] as [sequences, max(counts)], padded with zeros, and a mask that is false at
        padding."""
        parts = flat.split(self.counts)
        mask = torch.arange(max(self.counts)) < torch.tensor(self.counts)[:, None]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), mask


def batch_of(sequences: Iterable[Tokens]) -> Batch:
    kept = tuple(sequences)
    if not kept:
        raise ValueError("a batch without sequences")
    counts = tuple(int(sequence.mask.sum()) for sequence in kept)
    rewards = torch.tensor([sequence.reward for sequence in kept], dtype=torch.float32)
    numbers: dict[str, int] = {}
    groups = torch.tensor([numbers.setdefault(sequence.group, len(numbers)) for sequence in kept])
    return Batch(kept, counts, torch.cat([sequence.logprobs for sequence in kept]), rewards, groups)


def pack(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Packs sequences into rows by first-fit decreasing; equal lengths keep their given order. Returns the indices of
    each row's sequences. Raises ``ValueError`` if a sequence is longer than a row."""
    if lengths and max(lengths) > row_tokens:
        raise ValueError(f"a sequence of {max(lengths)} tokens does not fit a row of {row_tokens}")
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        number = next((number for number, room in enumerate(free) if lengths[index] <= room), len(rows))
        if number == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[number].append(index)
        free[number] -= lengths[index]
    return rows


def pack_evenly(lengths: Sequence[int], row_tokens: int, multiple: int) -> list[list[int]]:
    """Packs sequences of the given ``lengths`` into rows of similar length. Returns the indices of each row's
    sequences.

    ``multiple`` is the number of rows that are computed in parallel. The target number of rows is the number that
    ``pack`` returns for rows of ``row_tokens``, rounded up to a multiple of ``multiple``. As in MULTIFIT (Coffman et
    al., 1978), the function tries longer and longer rows, up to ``row_tokens``, until ``pack`` returns at most the
    target number of rows. The result may have fewer rows than the target."""
    rows = pack(lengths, row_tokens)
    wanted = -(-len(rows) // multiple) * multiple
    budget = max(-(-sum(lengths) // max(wanted, 1)), *lengths, 1)
    while budget < row_tokens:
        tried = pack(lengths, budget)
        if len(tried) <= wanted:
            return tried
        budget += max(1, budget // 50)
    return rows


def _row(sequences: Sequence[tuple[Tokens, int]]) -> PackedRow:
    """Packs ``sequences`` into one row. Each sequence comes with the index of its first sampled token in the flat
    tensors."""
    ids = torch.cat([sequence.ids for sequence, _ in sequences])
    positions = torch.cat([torch.arange(len(sequence)) for sequence, _ in sequences])
    sampled = torch.cat([sequence.mask for sequence, _ in sequences]).nonzero()[:, 0]
    tokens = torch.cat([offset + torch.arange(int(sequence.mask.sum())) for sequence, offset in sequences])
    lengths = tuple(len(sequence) for sequence, _ in sequences)
    return PackedRow(ids, positions, lengths, sampled - 1, ids[sampled], tokens)


def before_sampled(states: Tensor, row: PackedRow) -> Tensor:
    """Selects from the hidden ``states`` [length, size] of a row those that precede its sampled tokens: [n, size]. From
    the state before a token, the model predicts the token, and the critic estimates the value."""
    return states[row.before]


def split_evenly(order: Sequence[int], parts: int) -> list[list[int]]:
    """Splits ``order`` into at most ``parts`` pieces whose sizes differ by at most one; no piece is empty."""
    parts = min(parts, len(order))
    edges = [len(order) * part // parts for part in range(parts + 1)] if parts else [0]
    return [list(order[start:stop]) for start, stop in pairwise(edges)]
