"""Defines the interface of engines, which serve a policy: prompts and completions are token ids.

A completion also has log-probabilities and the weights' version. Text is never tokenized again between turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol


class EngineError(RuntimeError):
    """The engine cannot serve the requested policy or prompt, and refuses instead of serving something wrong."""


class EngineLost(EngineError):
    """No server of the engine is left; a new engine may work."""


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one completion.

    ``seed`` makes the completion a function of (weights, prompt, seed) alone: the engine draws each token with noise
    derived from (seed, position), so that batch composition and restarts change nothing. ``temperature`` 0 is greedy.
    ``key`` names the episode: an engine sends all requests of a key to one server, which caches their prefix."""

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
    """Serves one policy.  ``generate`` may be called concurrently; the engine forms batches."""

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion: ...

    async def update_from(self, model: Any, version: int) -> None:
        """Makes the engine serve the weights of ``model`` as ``version`` from the next ``generate`` on. The model must
        not change until this call returns. Raises ``EngineError`` if it cannot; the engine then serves no more."""

    async def compute(self, job: Callable[[], Any]) -> Any:
        """Runs ``job`` in the engine's thread for computations, and returns the result of ``job``."""

    async def close(self) -> None: ...


def probe_prompt(model: Any, count: int) -> list[int]:
    """Returns a fixed prompt of ``count`` tokens that every model can read, for comparing log-probabilities."""
    vocab = model.config.get_text_config().vocab_size
    return [(7919 * i + 13) % vocab for i in range(count)]


def fitted(params: SamplingParams, prompt: Sequence[int], context: int) -> SamplingParams:
    """Returns ``params`` with ``max_tokens`` cut to the tokens that ``prompt`` leaves of ``context``. Raises
    ``ValueError`` if it leaves none or is empty."""
    limit = min(params.max_tokens, context - len(prompt))
    if not prompt or limit < 1:
        raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {context}")
    return replace(params, max_tokens=limit)


def logprobs_of(model: Any, ids: list[int], count: int, temperature: float) -> list[float]:
    """Returns the log-probabilities of the last ``count`` tokens of ``ids``, by a forward pass of ``model``."""
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
