"""ScriptedEngine: answers from a function instead of a model, for tests and drills.

Its log-probabilities are those of a given model (teacher forcing), or -1 for every token without one.  There is no
sampling; the seed only reaches the function.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cuda_agent.policy.engines.engine import Completion, SamplingParams, logprobs_of

Answer = Callable[[list[int], int], str | Sequence[int]]  # prompt ids, seed


class ScriptedEngine:
    """``answer(prompt ids, seed)`` gives the turn: ids, or text, which ``tokenizer`` encodes and the first stop
    id closes.  ``calls`` records the prompts in order; ``updates`` the (version, model) served since."""

    def __init__(self, answer: Answer, tokenizer: Any = None, model: Any = None) -> None:
        self.version = 0
        self.calls: list[list[int]] = []
        self.updates: list[tuple[int, Any]] = []
        self._answer, self._tokenizer, self._model = answer, tokenizer, model

    async def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        prompt = list(prompt)
        self.calls.append(prompt)
        answer = self._answer(prompt, params.seed)
        if isinstance(answer, str):
            ids = [*self._tokenizer.encode(answer, add_special_tokens=False), *params.stop_ids[:1]]
        else:
            ids = list(answer)
        ids = ids[: params.max_tokens]
        stopped = bool(ids) and ids[-1] in params.stop_ids
        temperature = params.temperature or 1.0
        logprobs = (
            logprobs_of(self._model, prompt + ids, len(ids), temperature)
            if self._model is not None
            else [-1.0] * len(ids)
        )
        return Completion(ids, logprobs, self.version, "stop" if stopped else "length")

    async def update_from(self, model: Any, version: int) -> None:
        if self._model is not None:
            self._model = model
        self.version = version
        self.updates.append((version, model))

    async def compute(self, job: Callable[[], Any]) -> Any:
        return job()

    async def close(self) -> None:
        pass
