"""Estimates the peak memory of a training step from the model's shape and the length of a row of tokens. From the
estimate, ``layout`` decides whether activations are kept or recomputed (gradient checkpointing).

The estimate adds up the tensors that the layers of Llama, Qwen2 and Qwen3 keep for the backward pass. It excludes
memory that the allocator reserves but does not use, the CUDA context (0.5 GB), and the memory of an inference engine in
the same process. Tests compare the estimate with measured steps, except for mixtures of experts. To load fast, this
module does not import PyTorch."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cuda_agent.config import Config, PolicyConfig
from cuda_agent.machine import memory_bytes

LOGITS = {"cpu": 2**24, "cuda": 2**27}  # largest number of logits in one chunk
MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 32768}  # tokens of one forward pass: more are slower on a cpu
PRECISION: dict[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}  # by policy.dtype
LONGEST = 2048  # most tokens of a sequence whose attention keeps its probabilities on a cpu
UNKNOWN_TOKENS = 8192  # activations of longer rows are computed twice, if the model's shape is unknown
SHARE = 0.5  # most of a device's memory for a step with kept activations; the rest is for a second model and an engine
SMALL = 2**24  # most parameters of a model whose gradients may be held once per thread
_HEAD_COPIES = 6  # copies of a chunk of logits while its gradient is computed


@dataclass(frozen=True)
class Shape:
    """The sizes of a language model with gated feed-forward layers. ``experts`` is 0 without a mixture of experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int  # size of one head
    intermediate: int  # inner size of the feed-forward layer, or of one expert
    vocab: int
    tied: bool  # whether the input and the output embeddings are the same tensor
    experts: int = 0  # number of experts in each layer
    active: int = 0  # number of experts that compute each token

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head * 2 * (self.heads + self.kv_heads)
        forward = 3 * self.hidden * self.intermediate * max(self.experts, 1) + self.hidden * self.experts
        return attention + forward + 2 * self.hidden

    @property
    def end_parameters(self) -> int:
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Returns the number of parameters. Biases and the norms of q and k (``q_norm``, ``k_norm``) are not
        counted."""
        return self.layers * self.layer_parameters + self.end_parameters + self.hidden

    @property
    def wide(self) -> int:
        return self.intermediate * max(self.active, 1)

    def adapter_parameters(self, rank: int) -> int:
        """Returns the number of parameters of LoRA adapters of rank ``rank`` on all 7 matrices of each layer: 4 of
        attention, and 3 of the feed-forward network."""
        h, a, k, i = self.hidden, self.heads * self.head, self.kv_heads * self.head, self.intermediate
        return self.layers * rank * ((h + a) * 2 + (h + k) * 2 + (h + i) * 3)


@dataclass(frozen=True)
class Peak:
    """The estimated peak memory, in bytes, of one process (rank) of a trainer, by purpose."""

    weights: int
    gradients: int
    moments: int  # AdamW's moments
    unsharded: int  # whole weights and gradients gathered from all ranks, and bfloat16 copies of weights
    activations: int  # tensors kept from the forward to the backward pass
    working: int  # memory of a layer's backward pass or of a chunk of logits, whichever is larger

    @property
    def fixed(self) -> int:
        """Returns the bytes that do not grow with the length of the row."""
        return self.weights + self.gradients + self.moments + self.unsharded

    @property
    def total(self) -> int:
        return self.fixed + self.activations + self.working


def peak(
    shape: Shape,
    tokens: int,
    *,
    precision: Literal["fp32", "bf16"] = "bf16",
    checkpointing: bool = True,
    ranks: int = 1,
    lora_rank: int = 0,
    segment: int | None = None,
    device: Literal["cpu", "cuda"] = "cuda",
    at_once: int = 1,
    parallelism: Literal["data", "context"] = "data",
) -> Peak:
    """Estimates the peak memory of one process (rank) of a trainer, for a row of ``tokens`` tokens that are all trained
    on. The optimizer is AdamW. The master weights are float32, and sharded over ``ranks`` ranks.

    ``lora_rank`` is the rank of the LoRA adapters that are trained, or 0 if all weights are trained. ``segment`` is the
    length of the row's longest sequence, by default ``tokens``. ``at_once`` is the number of rows that are computed at
    the same time. A rank computes whole rows if ``parallelism`` is "data", or a part of each row if it is "context"."""
    low = precision == "bf16"
    every, layer, ends = shape.parameters, shape.layer_parameters, shape.end_parameters
    trained = shape.adapter_parameters(lora_rank) if lora_rank else every
    gathered = 0
    if ranks > 1:  # the current layer and the prefetched one, their gradients, and both ends throughout
        gathered = 4 * (2 * layer + ends) + (0 if lora_rank else 8 * (layer + ends))
    copies = 0
    if low:  # bfloat16 copies of all weights that the backward pass needs
        copies = 2 * (layer if checkpointing else every - ends)
    h, per_layer = shape.hidden, _kept(shape, low, device, min(segment or tokens, tokens), lora_rank)
    inside = 8 * shape.wide // (2 if low else 1)  # gradients in the widest part of a layer
    if checkpointing:
        kept, layer_again = 4 * h * (shape.layers + 1), per_layer + inside + 4 * h
    else:
        kept, layer_again = shape.layers * per_layer + 8 * h, max(inside, 16 * h)
    if ranks > 1 and parallelism == "context":  # keys and values of the whole row, and their gradients
        gathered_keys = shape.kv_heads * shape.head * tokens * (12 if low else 20)
        kept += 0 if checkpointing else shape.layers * shape.kv_heads * shape.head * (4 if low else 8) * ranks
        tokens = -(-tokens // ranks)
        layer_again += gathered_keys // tokens
    head = 8 * h * tokens + _HEAD_COPIES * 4 * min(LOGITS[device], tokens * shape.vocab)
    return Peak(
        weights=4 * every // ranks,
        gradients=at_once * 4 * trained // ranks,
        moments=8 * trained // ranks,
        unsharded=gathered + copies,
        activations=at_once * kept * tokens,
        working=at_once * max(head, layer_again * tokens),
    )


@dataclass(frozen=True)
class Layout:
    """Describes how a trainer computes a step: the size of a row, and whether activations are recomputed."""

    row_tokens: int  # most tokens of one forward pass
    recompute: bool  # activations are computed twice, not kept
    peak: Peak | None  # estimate for one rank that computes in ``policy.dtype``; None if the shape is unknown


def layout(config: Config, shape: Shape | None, longest: int, *, scratch: bool = False) -> Layout:
    """Decides how a model of ``shape`` is trained on sequences of at most ``longest`` tokens. A new model (``scratch``)
    is trained in one process, without adapters.

    With ``training.checkpointing=auto``, activations are kept, not recomputed, if the step then takes at most the
    fraction ``SHARE`` of the device's memory. If the model's shape is unknown (``shape`` is None), they are kept if a
    row has at most ``UNKNOWN_TOKENS`` tokens."""
    training, device = config.training, config.training.device
    tokens = max(training.microbatch_tokens or MICROBATCH_TOKENS[device], longest)
    twice = training.checkpointing == "on"
    if shape is None:
        return Layout(tokens, twice or (training.checkpointing == "auto" and tokens > UNKNOWN_TOKENS), None)
    ranks = 1 if scratch else training.num_processes
    step = partial(
        peak,
        shape,
        tokens,
        precision=PRECISION[config.policy.dtype],
        ranks=ranks,
        parallelism=training.parallelism,
        lora_rank=0 if scratch else config.lora.rank,
        segment=longest,
        device=device,
        at_once=config.policy.threads if device == "cpu" and ranks == 1 and shape.parameters <= SMALL else 1,
    )
    if training.checkpointing == "auto":
        together = ranks if device == "cpu" else 1  # ranks on a processor share its memory
        twice = together * step(checkpointing=False).total > SHARE * memory_bytes(device)
    return Layout(tokens, twice, step(checkpointing=twice))


def _kept(shape: Shape, low: bool, device: str, segment: int, lora_rank: int) -> int:
    """Returns the bytes per token that one layer keeps for its backward pass. The layer computes in bfloat16 if
    ``low``, otherwise in float32. ``segment`` is the length of the row's longest sequence.

    In float32 a layer keeps 6 tensors of the hidden size: input, normalised input and output of each of the two norms.
    It keeps 5 tensors of the queries' size, 4 of the keys' size, and 4 of the feed-forward layer's inner size. In
    bfloat16, results of matrix products take half the bytes, but each projection also keeps a rounded copy of its
    input. With adapters, the frozen norms do not keep the normalised input, but each adapter keeps the states between
    its two matrices. On a CPU, attention over short sequences (at most ``LONGEST`` tokens) also keeps its
    probabilities."""
    h, queries, keys = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
    if low:
        kept = 26 * h + 12 * queries + 10 * keys + 8 * shape.wide
    else:
        kept = 24 * h + 20 * queries + 16 * keys + 16 * shape.wide
    if lora_rank:
        kept += (2 if low else 4) * (7 * lora_rank - queries - keys) - 8 * h
    kept += 16 * shape.heads  # sums of the attention's exponentials, and of the norms of single heads
    if device == "cpu" and segment <= LONGEST:
        kept += (2 if low else 4) * shape.heads * (segment + 128) // 2
    if shape.experts:  # inputs sorted by expert, and outputs before they are weighed; the router's probabilities
        kept += (4 if low else 8) * shape.active * h + 8 * shape.experts
    return kept


def shape_of_policy(policy: PolicyConfig) -> Shape:
    head = policy.hidden // policy.heads
    size = policy.layers, policy.hidden, policy.heads, policy.kv_heads, head, policy.intermediate, policy.vocab
    return Shape(*size, True)


def shape_of(config: dict[str, Any]) -> Shape:
    """Returns the shape that a ``config.json`` of Hugging Face describes. Raises ``KeyError`` if a size is missing."""
    heads, experts = config["num_attention_heads"], config.get("num_experts") or config.get("num_local_experts") or 0
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config.get("moe_intermediate_size" if experts else "", 0) or config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        active=config.get("num_experts_per_tok", 0) if experts else 0,
    )
