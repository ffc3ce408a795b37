"""Rows cut over ranks, for those that one rank cannot hold: every rank computes some of the tokens of each row.

A row is cut into twice as many blocks as there are ranks, and rank r gets the r-th from the front and the r-th from the
back: later tokens look at more keys, and so everyone has as much to do.  Only attention needs what the others have; it
gathers their keys and values (fewer than the queries, which stay), and gives back the gradients of those.
Does not cover: keys that do not fit, which a ring would pass on instead.  On a processor attention to earlier blocks
builds masks, a quarter of the length squared over all ranks: there it is for tests.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from cuda_agent.training.packing import PackedPart, PackedRow


def part_of(row: PackedRow, ranks: int, rank: int) -> PackedRow:
    """What one rank computes of a row.  Its lengths stay those of the whole row, which a sequence of nothing fills up
    to a multiple of the blocks."""
    padding = -len(row.ids) % (2 * ranks)
    ids = torch.cat([row.ids, row.ids.new_zeros(padding)])
    positions = torch.cat([row.positions, torch.arange(padding)])
    blocks = torch.arange(len(ids)).chunk(2 * ranks)
    mine = torch.cat([blocks[rank], blocks[2 * ranks - 1 - rank]])
    place = torch.full((len(ids),), -1).index_put((mine,), torch.arange(len(mine)))
    before = place[row.before]
    own = before >= 0
    lengths = (*row.lengths, padding) if padding else row.lengths
    part = PackedPart(ranks, rank)
    return PackedRow(ids[mine], positions[mine], lengths, before[own], row.targets[own], row.tokens[own], part)


def attention(
    query: Tensor,  # [1, heads, tokens of this rank, size]
    key: Tensor,  # [1, kv_heads, tokens of this rank, size]
    value: Tensor,  # [1, kv_heads, tokens of this rank, size]
    scale: float,
    lengths: Sequence[int],
    part: PackedPart,
) -> Tensor:
    """Causal attention inside the segments of the whole row, of this rank's queries: [1, heads, tokens, size]."""
    keys, values = _gather(key, part.ranks), _gather(value, part.ranks)
    shared = query.shape[1] != keys.shape[1]
    size = query.shape[2] // 2
    done = []
    for place, block in enumerate((part.rank, 2 * part.ranks - 1 - part.rank)):
        start, first = block * size, 0
        for length in lengths:
            low, high = max(first, start), min(first + length, start + size)
            if low < high:
                offset = place * size - start
                queries = query[:, :, low + offset : high + offset]
                seen = keys[:, :, first:high], values[:, :, first:high]
                mask: Any = causal_lower_right(high - low, high - first)
                done.append(F.scaled_dot_product_attention(queries, *seen, mask, scale=scale, enable_gqa=shared))
            first += length
    return torch.cat(done, dim=2)


def _gather(tensor: Tensor, ranks: int) -> Tensor:
    """[1, heads, tokens of this rank, size] -> [1, heads, tokens of the row, size]."""
    gathered: Tensor = _Gathered.apply(tensor, ranks)  # type: ignore[no-untyped-call]
    return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        everyone = tensor.new_empty(ranks, *tensor.shape[1:])
        dist.all_gather_into_tensor(everyone, tensor.contiguous())
        fronts, backs = everyone.chunk(2, dim=2)
        return torch.cat([*fronts, *backs.flip(0)], dim=1)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        blocks = gradients[0].float().chunk(2 * ctx.ranks, dim=2)
        pairs = [torch.cat([blocks[rank], blocks[2 * ctx.ranks - 1 - rank]], dim=2) for rank in range(ctx.ranks)]
        own = torch.empty_like(pairs[0])
        dist.reduce_scatter_tensor(own, torch.cat(pairs))
        return own.to(gradients[0].dtype), None
