"""Computes causal attention in packed rows. A packed row holds several sequences side by side, and each token attends
only to tokens of the same sequence.

``register`` adds this attention to the library transformers under ``NAME``; ``supports`` says which models can use it.
The model's forward call gets the lengths of the row's sequences in the argument ``segments``. On a CPU, if all
sequences of a row are short, blocked matrix products compute the row, and keep the attention probabilities for the
backward pass. On a GPU in half precision, one call of FlashAttention computes all sequences of a row, if GPU and head
size allow it. In all other cases ``scaled_dot_product_attention`` computes one sequence after the other, in memory
linear in the length.

With ``training.parallelism=context`` the trainer's processes (ranks) share each row. A row is cut into two blocks per
rank. Rank r computes the r-th block from the front and the r-th from the back. This balances the work, because later
tokens attend to more keys. Each rank gathers the keys and values of all ranks. Ranks on CPUs can share rows too, but
this is only useful for tests."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from cuda_agent.training.memory import LONGEST
from cuda_agent.training.packing import PackedPart, PackedRow

NAME = "packed"
BLOCK = 128  # query rows of one blocked product


class Segments:
    """Describes how a row is divided into sequences. ``lengths`` are the numbers of tokens of the sequences. ``part``
    tells which part of the row this process holds, or is None if the process holds the whole row. This class is not a
    dataclass, because ``torch.compile`` would then compile the model again for every row with other lengths."""

    def __init__(self, lengths: tuple[int, ...], part: PackedPart | None = None) -> None:
        self.lengths, self.part = lengths, part

    @functools.cached_property
    def ends(self) -> Tensor:
        """The cumulative lengths of the row's sequences, from 0 on: int32 [sequences + 1], on the current GPU."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device="cuda")


def register(compiled: bool = False) -> None:
    """Registers packed attention with transformers, for all trainers of this process. ``compiled`` is true for a
    trainer that compiles its model; packed attention is then excluded from ``torch.compile``. A later call with
    ``compiled`` false does not undo this."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if compiled:
        AttentionInterface.register(NAME, torch.compiler.disable(_packed_attention))
    elif NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(NAME, _packed_attention)


def supports(config: Any) -> bool:
    """Returns whether packed attention can replace the attention of a model with this (transformers) configuration.
    Every layer must have full causal attention, without a sliding window and without capped attention scores."""
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    plain = getattr(text, "attn_logit_softcapping", None) is None and layers == {"full_attention"}
    return plain and not (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True))


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, tokens, size]
    key: Tensor,  # [1, kv_heads, tokens, size]
    value: Tensor,  # [1, kv_heads, tokens, size]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each sequence of a packed row. Transformers calls this function in every layer.
    Returns the result [1, tokens, heads, size], and None in place of the attention weights."""
    if query.shape[0] != 1 or attention_mask is not None:
        raise ValueError("packed attention takes one row and no mask")
    segments = segments or Segments((query.shape[2],))
    lengths, part = segments.lengths, segments.part
    tokens = query.shape[2] * (part.ranks if part else 1)
    if sum(lengths) != tokens:
        raise ValueError(f"segments of {sum(lengths)} tokens in a row of {tokens}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if device == "cpu" and part is None and max(lengths) <= LONGEST:
        return _Blocked.apply(query[0], key[0], value[0], scale, lengths)[None], None
    groups = query.shape[1] // key.shape[1]
    if part is None and _flash(query):
        return _whole_row(query[0], key[0], value[0], scale, segments)[None], None
    if device == "cuda" and query.dtype == torch.float32 and groups > 1:
        # Kernels with memory linear in the length share keys between heads in half precision only.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if part is not None:
        return _shared_attention(query, key, value, scale, lengths, part).transpose(1, 2).contiguous(), None
    done = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(done, dim=2).transpose(1, 2).contiguous(), None


def _whole_row(query: Tensor, key: Tensor, value: Tensor, scale: float, segments: Segments) -> Tensor:
    """Computes causal attention within each sequence of a row with one call of FlashAttention, which needs half
    precision. Returns [tokens, heads, size]. ``query`` is [heads, tokens, size]; ``key`` and ``value`` are [kv_heads,
    tokens, size]."""
    from torch.nn.attention.varlen import varlen_attn

    groups, ends, longest = query.shape[0] // key.shape[0], segments.ends, max(segments.lengths)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))  # causal
    return cast(Tensor, out)


def _flash(query: Tensor) -> bool:
    half = query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16)
    return half and query.shape[-1] in range(8, 257, 8) and torch.cuda.get_device_capability(query.device) >= (8, 0)


class _Blocked(torch.autograd.Function):
    """Computes causal attention within each sequence, for one block of queries at a time. ``query`` is [heads, tokens,
    size], ``key`` and ``value`` are [kv_heads, tokens, size], and the result is [tokens, heads, size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, lengths: tuple[int, ...]) -> Tensor:
        heads, tokens, size = query.shape
        groups = key.shape[0]
        above = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu_(1)
        grouped = query.view(groups, heads // groups, tokens, size)
        out = torch.empty(tokens, heads, size, dtype=query.dtype)
        grouped_out = out.view(tokens, groups, heads // groups, size)
        kept = []
        for first, start, stop in _blocks(lengths):
            q = grouped[:, :, start:stop].reshape(groups, -1, size)
            scores = torch.baddbmm(q.new_empty(()), q, key[:, first:stop].transpose(1, 2), beta=0, alpha=scale)
            diagonal = scores.view(groups, -1, stop - start, stop - first)[..., start - first :]
            diagonal.masked_fill_(above[: stop - start, : stop - start], float("-inf"))
            probabilities = torch.softmax(scores, -1)
            mixed = torch.bmm(probabilities, value[:, first:stop])
            grouped_out[start:stop] = mixed.view(groups, -1, stop - start, size).permute(2, 0, 1, 3)
            kept.append(probabilities)
        ctx.save_for_backward(query, key, value, out, *kept)
        ctx.scale, ctx.lengths = scale, lengths
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        query, key, value, out, *kept = ctx.saved_tensors
        heads, tokens, size = query.shape
        groups = key.shape[0]
        grouped = query.view(groups, heads // groups, tokens, size)
        d_query = torch.empty(groups, heads // groups, tokens, size, dtype=query.dtype)
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        grouped_d_out = d_out.view(tokens, groups, heads // groups, size)
        inner = (d_out * out).sum(-1).view(tokens, groups, heads // groups)
        for probabilities, (first, start, stop) in zip(kept, _blocks(ctx.lengths), strict=True):
            q = grouped[:, :, start:stop].reshape(groups, -1, size)
            d_mixed = grouped_d_out[start:stop].permute(1, 2, 0, 3).reshape(groups, -1, size)
            d_value[:, first:stop].baddbmm_(probabilities.transpose(1, 2), d_mixed)
            d_scores = torch.bmm(d_mixed, value[:, first:stop].transpose(1, 2))
            d_scores.sub_(inner[start:stop].permute(1, 2, 0).reshape(groups, -1, 1)).mul_(probabilities)
            d_q = torch.baddbmm(q.new_empty(()), d_scores, key[:, first:stop], beta=0, alpha=ctx.scale)
            d_query[:, :, start:stop] = d_q.view(groups, -1, stop - start, size)
            d_key[:, first:stop].baddbmm_(d_scores.transpose(1, 2), q, alpha=ctx.scale)
        return d_query.view(heads, tokens, size), d_key, d_value, None, None


def _blocks(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Splits each sequence of a row into blocks of at most ``BLOCK`` tokens. Returns three indices in the row for each
    block: start of its sequence, start of the block, end of the block."""
    blocks, first = [], 0
    for length in lengths:
        end = first + length
        blocks += [(first, start, min(start + BLOCK, end)) for start in range(first, end, BLOCK)]
        first = end
    return blocks


def part_of(row: PackedRow, ranks: int, rank: int) -> PackedRow:
    """Returns the part of ``row`` that ``rank`` computes: two of the row's 2 * ``ranks`` blocks. The row is padded
    first, so that all blocks are equally long. The part's ``lengths`` describe the whole row; padding counts as one
    more sequence."""
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


def _shared_attention(
    query: Tensor,  # [1, heads, tokens of this rank, size]
    key: Tensor,  # [1, kv_heads, tokens of this rank, size]
    value: Tensor,  # [1, kv_heads, tokens of this rank, size]
    scale: float,
    lengths: Sequence[int],
    part: PackedPart,
) -> Tensor:
    """Returns the result of causal attention from this rank's queries to the keys of all ranks, within each sequence:
    [1, heads, tokens of this rank, size]. ``lengths`` are those of the row's sequences."""
    keys, values = (cast(Tensor, _Gathered.apply(tensor, part.ranks)) for tensor in (key, value))  # type: ignore[no-untyped-call]
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


class _Gathered(torch.autograd.Function):
    """Gathers the ranks' tensors, each [1, heads, tokens of a rank, size], and joins their blocks in the row's order:
    [1, heads, tokens of the row, size]."""

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
