"""Computes the forward passes of the in-process engine, for prompts and for single tokens, with a key-value cache.

``DenseDecoder`` is fast and decodes dense Llama, Qwen2 and Qwen3 models. ``GenericDecoder`` runs any other causal
model, one sequence after the other. Each row of the cache holds one sequence. The n active sequences fill the first n
rows: when a sequence ends, ``move`` puts the last sequence into the free row."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_agent.policy.engines import native
from cuda_agent.policy.engines.engine import probe_prompt
from cuda_agent.policy.engines.graphs import MOST_STEPS, StepGraphs
from cuda_agent.policy.engines.sampling import draw_steps

THREADED_ROWS = 256  # fewest rows for which the native functions use threads

Weights = tuple[Tensor, list[dict[str, Any]], Tensor, Tensor]
Job = tuple[int, int, Sequence[int]]  # row, position of the first new token, the new tokens


class DenseDecoder:
    """A fast decoder for dense transformers (no mixture of experts), with a rearranged copy of the weights. The
    matrices q, k and v are joined into one matrix, and so are gate and up. The weights of a norm are multiplied into
    the matrix after the norm. In q and k, the two numbers that rotary embedding rotates together are adjacent. Shapes
    in this class: n rows or tokens, H query heads, K key-value heads, G = H / K, head size D."""

    partial = True  # whether ``restore`` can restore a part of what ``keep`` returned

    def __init__(self, model: Any, rows: int) -> None:
        config = model.config
        self.context: int = config.max_position_embeddings  # most tokens of a row
        self.eps: float = config.rms_norm_eps
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        with torch.inference_mode():
            self.embed, self.layers, self.unembed, self.rotations = self._weights(model)
            self.cache = self._new_cache(rows, min(256, self.context))
        plain = self.embed.device.type == "cpu" and self.embed.dtype == torch.float32
        self.native = native.library(self.head, self.heads // self.kv_heads) if plain else None
        on_gpu = self.embed.device.type == "cuda"
        half = on_gpu and self.embed.dtype in (torch.float16, torch.bfloat16) and self.head in range(8, 257, 8)
        self.packed = half and torch.cuda.get_device_capability(self.embed.device) >= (8, 0)
        self.graphs = StepGraphs(self._plain_step, rows, self.embed.device) if on_gpu else None
        self.most_steps = MOST_STEPS if on_gpu else 1  # of one call of ``sample``

    @staticmethod
    def knows(model: Any) -> bool:
        """Returns whether this class can decode the model. The model's type must be llama, qwen2 or qwen3, with full
        attention, silu, and rotary frequencies that are the same for all sequence lengths. Only the q, k and v
        projections may have biases."""
        config = model.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if config.model_type not in ("llama", "qwen2", "qwen3") or config.hidden_act != "silu":
            return False
        if rope not in ("default", "linear", "llama3", "yarn") or kinds != {"full_attention"}:
            return False
        layer = model.model.layers[0]
        plain = (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        return all(linear.bias is None for linear in plain)

    def _weights(self, model: Any) -> Weights:
        """Returns a rearranged copy of the model's weights: embedding, one dict per layer, output layer, rotary
        factors. The rotary factors are complex64 [context, D / 2]."""
        embed = model.model.embed_tokens.weight.detach().clone()
        rotary = model.model.rotary_emb
        angles = torch.outer(torch.arange(self.context, device=embed.device), rotary.inv_freq.float())
        rotations = torch.polar(torch.full_like(angles, float(rotary.attention_scaling)), angles)
        layers = [self._layer(layer) for layer in model.model.layers]
        return embed, layers, _fold(model.lm_head.weight, model.model.norm.weight), rotations

    @torch.inference_mode()
    def take(self, model: Any) -> bool:
        """Copies the weights of ``model`` into this decoder and returns True. Cached keys and values become invalid. If
        ``model`` differs from the decoder's model in architecture, shapes, dtype or device, returns False and changes
        nothing."""
        config = model.config
        numbers = config.max_position_embeddings, config.rms_norm_eps, config.num_attention_heads
        if not self.knows(model) or numbers != (self.context, self.eps, self.heads):
            return False
        held = self.embed, self.layers, self.unembed, self.rotations
        new, old = (list(_tensors(weights)) for weights in (self._weights(model), held))
        if [(x.shape, x.dtype, x.device) for x in new] != [(x.shape, x.dtype, x.device) for x in old]:
            return False
        for ours, theirs in zip(old, new, strict=True):
            ours.copy_(theirs)
        return True

    def _layer(self, layer: Any) -> dict[str, Any]:
        attention, mlp, half = layer.self_attn, layer.mlp, self.head // 2
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        pairs = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten().to(q.weight.device)

        def paired(tensor: Tensor) -> Tensor:  # [heads * D, ...]: x[j] and x[j + D/2] of each head side by side
            return tensor.unflatten(0, (-1, self.head))[:, pairs].flatten(0, 1)

        weight = torch.cat([paired(q.weight), paired(k.weight), v.weight])
        bias = None if q.bias is None else torch.cat([paired(q.bias), paired(k.bias), v.bias])
        scale = None
        if hasattr(attention, "q_norm"):
            norms = [attention.q_norm.weight] * self.heads + [attention.k_norm.weight] * self.kv_heads
            scale = torch.stack([weight[pairs] for weight in norms]).float()
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        return {
            "qkv": _fold(weight, layer.input_layernorm.weight),
            "bias": bias,
            "scale": scale,  # [H + K, D] float32, the weights of the norms of q and k
            "out": attention.o_proj.weight.t().contiguous(),
            "gate_up": _fold(gate_up, layer.post_attention_layernorm.weight),
            "down": mlp.down_proj.weight.t().contiguous(),
        }

    def _new_cache(self, rows: int, length: int) -> Tensor:
        """Returns an empty cache [layers, rows, 2 K, length, D]. The third dimension holds K keys, then K values."""
        return self.embed.new_zeros(len(self.layers), rows, 2 * self.kv_heads, length, self.head)

    def _reserve(self, length: int) -> None:
        have = self.cache.shape[3]
        if length > have:
            grown = self._new_cache(self.cache.shape[1], min(max(length, 2 * have), self.context))
            grown[:, :, :, :have] = self.cache
            self.cache = grown
            if self.graphs:
                self.graphs.forget()

    def _qkv(self, layer: dict[str, Any], x: Tensor, rotations: Tensor) -> Tensor:
        """Returns q, k and v of the states ``x`` [n, hidden] in one tensor [n, H + 2 K, D]. q and k are rotated, after
        the model's norms of q and k, if it has any."""
        rotated = self.heads + self.kv_heads
        qkv = F.linear(self._norm(x), layer["qkv"], layer["bias"]).view(len(x), -1, self.head)
        qk = qkv[:, :rotated].float()
        if layer["scale"] is not None:
            qk = F.rms_norm(qk, (self.head,), eps=self.eps) * layer["scale"]
        pairs = torch.view_as_complex(qk.reshape(len(x), rotated, self.head // 2, 2))
        qkv[:, :rotated] = torch.view_as_real(pairs * rotations).flatten(-2)
        return qkv

    def _norm(self, x: Tensor) -> Tensor:
        if self.native:
            out = torch.empty_like(x)
            self.native.norm(x.data_ptr(), out.data_ptr(), *x.shape, self.eps, self._threads(len(x)))
            return out
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)

    def _rest(self, layer: dict[str, Any], x: Tensor, attended: Tensor) -> Tensor:
        """Computes the part of a layer after attention. Adds the output projection and then the feed-forward network's
        result to the states ``x`` [n, hidden], in place. ``attended`` [n, H * D] is the result of attention."""
        x.addmm_(attended, layer["out"])
        gate_up = F.linear(self._norm(x), layer["gate_up"])
        if self.native:
            gated = x.new_empty(len(x), gate_up.shape[1] // 2)
            self.native.gated(gate_up.data_ptr(), gated.data_ptr(), *gated.shape, self._threads(len(x)))
        else:
            gate, up = gate_up.chunk(2, -1)
            gated = F.silu(gate).mul_(up)
        return x.addmm_(gated, layer["down"])

    def prefill(self, jobs: Sequence[Job]) -> Tensor:
        """Appends new tokens to rows of the cache. Each job is (row, position of the first new token, new tokens).
        Returns the logits after each job's last token, float32 [jobs, vocab]."""
        device = self.embed.device
        self._reserve(max(start + len(ids) for _, start, ids in jobs))
        tokens = torch.tensor([i for _, _, ids in jobs for i in ids], device=device)
        rows = torch.tensor([row for row, _, ids in jobs for _ in ids], device=device)
        positions = torch.cat([torch.arange(start, start + len(ids)) for _, start, ids in jobs]).to(device)
        attend = (self._attend_packed if self.packed else self._attend_each)(jobs, positions)
        ends = torch.tensor([len(ids) for _, _, ids in jobs], device=device).cumsum(0) - 1
        x = self.embed[tokens]
        for index, layer in enumerate(self.layers):
            cache = self.cache[index]
            qkv = self._placed(layer, cache, x, rows, positions)
            last = index == len(self.layers) - 1  # only the last token of each job is needed
            attended = attend(qkv[:, : self.heads], cache, last)
            if last:
                x, attended = x[ends], attended[ends]
            x = self._rest(layer, x, attended.flatten(1))
        return F.linear(self._norm(x), self.unembed).float()

    def _attend_each(self, jobs: Sequence[Job], positions: Tensor) -> Callable[[Tensor, Tensor, bool], Tensor]:
        """Returns a function that computes attention in ``prefill``, for one job (the new tokens of one row) after the
        other. The function takes the queries [n, H, D] of all new tokens, a layer's cache, and a flag. The flag tells
        whether only each job's last token needs a result. The function returns the results of attention [n, H, D]; the
        entries of tokens that need no result are undefined. ``positions`` [n] are the positions of all new tokens."""
        spans, masks, begin = [], [], 0
        for _, start, ids in jobs:
            spans.append(slice(begin, begin + len(ids)))
            seen = torch.arange(start + len(ids), device=positions.device) <= positions[spans[-1], None]
            masks.append(seen if start else None)  # tokens that begin at position 0 need only the causal mask
            begin += len(ids)

        def attend(queries: Tensor, cache: Tensor, last: bool) -> Tensor:
            attended = torch.empty_like(queries)
            for (row, start, ids), span, mask in zip(jobs, spans, masks, strict=True):
                both = cache[row : row + 1, :, : start + len(ids)]
                asking = slice(span.stop - 1, span.stop) if last else span
                out = F.scaled_dot_product_attention(
                    queries[asking].transpose(0, 1)[None],
                    both[:, : self.kv_heads],
                    both[:, self.kv_heads :],
                    attn_mask=None if last else mask,
                    is_causal=mask is None and not last,
                    enable_gqa=True,
                )
                attended[asking] = out[0].transpose(0, 1)
            return attended

        return attend

    def _attend_packed(self, jobs: Sequence[Job], positions: Tensor) -> Callable[[Tensor, Tensor, bool], Tensor]:
        """Returns a function with the same arguments and results as that of ``_attend_each``, but it calls
        FlashAttention once for all jobs. Separate calls per job can be slow: on some GPUs PyTorch passes them to cuDNN,
        which takes about 0.1 s to plan for each new pair of lengths (queries, keys)."""
        from torch.nn.attention.varlen import varlen_attn

        device, group = positions.device, self.heads // self.kv_heads
        asked, seen = [len(ids) for _, _, ids in jobs], [start + len(ids) for _, start, ids in jobs]
        where = [torch.full((length,), row) for (row, _, _), length in zip(jobs, seen, strict=True)]
        rows, places = torch.cat(where).to(device), torch.cat([*map(torch.arange, seen)]).to(device)
        ends = torch.tensor([asked, seen], dtype=torch.int32).cumsum(1, dtype=torch.int32)
        first, second = F.pad(ends, (1, 0)).to(device)

        def attend(queries: Tensor, cache: Tensor, last: bool) -> Tensor:
            both = cache[rows, :, places]  # [tokens that are seen, 2 K, D]
            keys, values = (part.repeat_interleave(group, 1) for part in both.chunk(2, 1))
            # A window of (-1, 0) is causal: the last query of a job sees all its keys.
            bounds = first, second, max(asked), max(seen)
            return cast(Tensor, varlen_attn(queries, keys, values, *bounds, window_size=(-1, 0)))

        return attend

    def _placed(self, layer: dict[str, Any], cache: Tensor, x: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Computes q, k and v of the states ``x`` [n, hidden], and writes k and v into the layer's ``cache``. Token i
        has row ``rows[i]`` and position ``positions[i]``, both int64 [n]. Returns q, k and v in one tensor [n, H + 2 K,
        D]."""
        if not self.native:
            qkv = self._qkv(layer, x, self.rotations[positions][:, None])
            cache[rows, :, positions] = qkv[:, self.heads :]
            return qkv
        qkv = F.linear(self._norm(x), layer["qkv"], layer["bias"])
        tensors = (qkv, layer["scale"], self.rotations, rows, positions, cache)
        sizes = len(x), self.kv_heads, cache.shape[2]
        self.native.place(*map(_pointer, tensors), *sizes, self.eps, self._threads(len(x)))
        return qkv.view(len(x), -1, self.head)

    def step(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Appends one token to each of the first n rows of the cache. ``ids`` and ``positions`` are int64 [n];
        ``longest`` is the largest position. Returns the logits, float32 [n, vocab]."""
        self._reserve(longest + 1)
        if self.native:
            return self._native_step(self.native, ids, positions)
        return self._plain_step(ids, positions, min(-(-(longest + 1) // 16) * 16, self.cache.shape[3]))

    def sample(
        self, ids: Tensor, positions: Tensor, noise: Tensor, temperatures: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Draws the next k tokens of each of the first n rows, and appends the given tokens and all but the last drawn
        one to the cache. ``ids``, ``positions`` and ``longest`` are those of ``step``. ``noise``, float64 [n, k], and
        ``temperatures``, float64 [n], are those of ``sampling.draw``. k is at most ``most_steps``. Returns ids (int64)
        and log-probabilities (float32), both [n, k]."""
        length = longest + noise.shape[1]
        self._reserve(length)
        if self.graphs:
            return self.graphs(ids, positions, noise, temperatures, length, self.cache.shape[3])
        return draw_steps(self.step, ids, positions, noise, temperatures, longest)

    def _plain_step(self, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        n, group, device = len(ids), self.heads // self.kv_heads, ids.device
        seen = torch.arange(length, device=device) <= positions[:, None]
        mask = torch.zeros(n, length, dtype=self.embed.dtype, device=device).masked_fill_(~seen, -torch.inf)
        mask = mask[:, None, None].expand(n, 1, group, length)
        rows, rotations = torch.arange(n, device=device), self.rotations[positions][:, None]
        x = self.embed[ids]
        for index, layer in enumerate(self.layers):
            qkv = self._qkv(layer, x, rotations)
            cache = self.cache[index]
            cache[rows, :, positions] = qkv[:, self.heads :]
            # The G query heads that share a key head take the place of query positions.
            attended = F.scaled_dot_product_attention(
                qkv[:, : self.heads].unflatten(1, (self.kv_heads, group)),
                cache[:n, : self.kv_heads, :length],
                cache[:n, self.kv_heads :, :length],
                attn_mask=mask,
            )
            x = self._rest(layer, x, attended.reshape(n, -1))
        return F.linear(self._norm(x), self.unembed).float()

    def _native_step(self, lib: Any, ids: Tensor, positions: Tensor) -> Tensor:
        n = len(ids)
        x = self.embed[ids]
        attended = x.new_empty(n, self.heads * self.head)
        for index, layer in enumerate(self.layers):
            qkv, cache = F.linear(self._norm(x), layer["qkv"], layer["bias"]), self.cache[index]
            tensors = (qkv, layer["scale"], self.rotations, positions, cache, attended)
            lib.attend(*map(_pointer, tensors), n, self.kv_heads, cache.shape[2], self.eps, torch.get_num_threads())
            x = self._rest(layer, x, attended)
        return F.linear(self._norm(x), self.unembed)

    def _threads(self, rows: int) -> int:
        return torch.get_num_threads() if rows >= THREADED_ROWS else 1

    def keep(self, row: int, length: int) -> Tensor:
        """Returns a copy of the cached keys and values of the row's first ``length`` tokens, [layers, 2 K, length, D].
        ``restore`` writes this copy into a row."""
        return self.cache[:, row, :, :length].clone()

    def restore(self, row: int, kept: Tensor, length: int) -> None:
        self._reserve(length)
        self.cache[:, row, :, :length] = kept[:, :, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        self.cache[:, target, :, :length] = self.cache[:, source, :, :length]

    move = copy  # the source may keep its content: it is not needed afterwards


class GenericDecoder:
    """A decoder for any causal language model of the transformers library. It computes each row separately, with the
    model's own cache."""

    partial = False  # a recurrent state cannot be cut short
    most_steps = 1  # of one call of ``sample``, for the same reason

    def __init__(self, model: Any, rows: int) -> None:
        self.model = copy.deepcopy(model).eval()
        self.context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.rows: list[Any] = [None] * rows

    def take(self, model: Any) -> bool:
        if str(model.config) != str(self.model.config) or model.device != self.model.device:
            return False
        if (weights := model.state_dict()).keys() != self.model.state_dict().keys():  # adapters were attached
            return False
        self.model.load_state_dict(weights)
        self.rows = [None] * len(self.rows)
        return True

    def _forward(self, row: int, ids: Tensor, start: int) -> Tensor:
        cache = self.rows[row] if start else None
        out = self.model(input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.rows[row] = out.past_key_values
        return out.logits[0, -1].float()

    def prefill(self, jobs: Sequence[Job]) -> Tensor:
        device = self.model.device
        return torch.stack([self._forward(row, torch.tensor(ids, device=device), start) for row, start, ids in jobs])

    def step(self, ids: Tensor, positions: Tensor, longest: int) -> Tensor:
        return torch.stack([self._forward(row, ids[row : row + 1], 1) for row in range(len(ids))])

    def sample(
        self, ids: Tensor, positions: Tensor, noise: Tensor, temperatures: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        return draw_steps(self.step, ids, positions, noise, temperatures, longest)

    def keep(self, row: int, length: int) -> Any:
        return self.rows[row]

    def restore(self, row: int, kept: Any, length: int) -> None:
        self.rows[row] = kept

    def copy(self, source: int, target: int, length: int) -> None:
        self.rows[target] = copy.deepcopy(self.rows[source])

    def move(self, source: int, target: int, length: int) -> None:
        self.rows[target], self.rows[source] = self.rows[source], None


Decoder = DenseDecoder | GenericDecoder


def make_decoder(model: Any, rows: int) -> Decoder:
    """Returns a decoder for up to ``rows`` sequences, with a copy of the weights of ``model``. It is a ``DenseDecoder``
    if that class can decode the model, otherwise a ``GenericDecoder``."""
    return DenseDecoder(model, rows) if DenseDecoder.knows(model) else GenericDecoder(model, rows)


def _tensors(weights: Any) -> Iterator[Tensor]:
    if isinstance(weights, Tensor):
        yield weights
    elif isinstance(weights, dict):
        yield from _tensors(list(weights.values()))
    elif weights is not None:
        for part in weights:
            yield from _tensors(part)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fold(weight: Tensor, norm: Tensor) -> Tensor:
    """Returns ``weight`` [out, in] with each row multiplied by ``norm`` [in], the weights of the norm before this
    matrix."""
    return (weight.float() * norm.float()).to(weight.dtype)


_PROBE_TOKENS, _PROBED = 20, (11, 12, 13, 19)  # length of the prompt, and the positions that ``verify`` compares


def verify(decoder: Decoder, model: Any) -> float:
    """Returns the largest difference between the log-probabilities of ``decoder`` and ``model`` at four positions of a
    fixed prompt. A position's difference is a mean of absolute differences over the vocabulary, weighted by the model's
    probabilities. Overwrites rows 0 and 1 of the cache."""
    ids, device = probe_prompt(model, _PROBE_TOKENS), model.device
    with torch.inference_mode():
        wanted = _log_probs(model, input_ids=torch.tensor([ids], device=device))
        first = decoder.prefill([(0, 0, ids[:12]), (1, 0, ids[:12])])
        got = {11: first[0]}
        for position in (12, 13):
            token = torch.tensor([ids[position]] * 2, device=device)
            at = torch.tensor([position] * 2, device=device)
            got[position] = decoder.step(token, at, position)[1]
        decoder.restore(0, decoder.keep(1, 14), 14)
        got[19] = decoder.prefill([(0, 14, ids[14:])])[0]
        return max(_distance(wanted[at], torch.log_softmax(logits, -1)) for at, logits in got.items())


def rounding(model: Any) -> float:
    """Estimates the effect of rounding in the model's dtype: the difference that ``verify`` finds between two correct
    implementations. Runs the model four times with perturbed embeddings of the prompt. Each value changes at random by
    one or two units in the last place. Returns the largest difference from the unperturbed run at the positions that
    ``verify`` compares."""
    ids = torch.tensor([probe_prompt(model, _PROBE_TOKENS)], device=model.device)
    generator = torch.Generator().manual_seed(0)
    found = []
    with torch.inference_mode():
        wanted, embedded = _log_probs(model, input_ids=ids), model.get_input_embeddings()(ids)
        for _ in range(4):
            signs = torch.randint(0, 2, embedded.shape, generator=generator).to(embedded) * 2 - 1
            moved = embedded.float() * (1 + torch.finfo(embedded.dtype).eps * signs)
            got = _log_probs(model, inputs_embeds=moved.to(embedded.dtype))
            found += [_distance(wanted[at], got[at]) for at in _PROBED]
    return max(found)


def _log_probs(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(**inputs).logits[0].float(), -1)


def _distance(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float((wanted.exp() * (wanted - got).abs()).sum())
