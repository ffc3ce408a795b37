"""Defines the interface of engines. An engine serves a policy: it samples completions of prompts.

Prompts and completions are token ids, so that sampled text is never tokenized again. A completion also holds the
log-probabilities of its tokens and the version of the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol


class EngineError(RuntimeError):
    """The engine cannot serve a policy correctly, or it has failed."""


class EngineLost(EngineError):
    """The engine has lost all its servers. A new engine may work."""


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one completion. Up to rounding, a completion depends only on the weights, the prompt and these
    parameters. At ``temperature`` 0 the engine takes the likeliest token. ``key`` identifies the episode (one attempt
    at a task, often with several completions). An engine with several servers sends all requests with the same key to
    one server, which caches their common prefix."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()  # the stop token itself is part of the completion
    key: str = ""


@dataclass
class Completion:
    ids: list[int]
    logprobs: list[float]  # natural logarithms, at the temperature of the sampling
    version: int  # version of the weights
    finish: Literal["stop", "length"]


class Engine(Protocol):
    """Serves one policy. ``generate`` may be called concurrently: the engine batches the requests."""

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion: ...

    async def update_from(self, model: Any, version: int) -> None:
        """Loads the weights of ``model`` as version number ``version``. Every later ``generate`` uses them. The model
        must not change until this call returns. Raises ``EngineError`` on failure; the engine then refuses all
        requests."""

    async def compute(self, job: Callable[[], Any]) -> Any:
        """Runs ``job`` in the engine's worker thread, and returns its result."""

    async def close(self) -> None: ...


def probe_prompt(model: Any, count: int) -> list[int]:
    """Returns a fixed prompt of ``count`` tokens from the model's vocabulary, for comparing log-probabilities."""
    vocab = model.config.get_text_config().vocab_size
    return [(7919 * i + 13) % vocab for i in range(count)]


def fitted(params: SamplingParams, prompt: Sequence[int], context: int) -> SamplingParams:
    """Returns ``params`` with ``max_tokens`` limited to the room after ``prompt`` in a context of ``context`` tokens.
    Raises ``ValueError`` if ``prompt`` is empty or fills the context."""
    limit = min(params.max_tokens, context - len(prompt))
    if not prompt or limit < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}")
    return replace(params, max_tokens=limit)


def logprobs_of(model: Any, ids: list[int], count: int, temperature: float) -> list[float]:
    """Returns the log-probabilities, in nats at ``temperature``, of the last ``count`` tokens of ``ids``, computed by
    ``model``."""
    import torch

    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, -count - 1 : -1].float()
    finally:
        model.train(training)
    wanted = torch.tensor(ids[-count:], device=logits.device)[:, None]
    return list(torch.log_softmax(logits / temperature, -1).gather(-1, wanted)[:, 0].tolist())
