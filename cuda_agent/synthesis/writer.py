"""The model writer: a language model behind an OpenAI-compatible address composes the tasks.

Operators are drawn here; the model fuses them and chooses shapes.  Its answer is text: its form is parsed, and only the
sandbox executes it.  The key is read from the environment for each request and stored nowhere.  What it does not cover:
judging the answer beyond its form (the filters do), streaming, token accounting.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import httpx

from cuda_agent.synthesis.compose import COUNT_WEIGHTS, ComposeError, as_task, pick_operators
from cuda_agent.synthesis.rules import Operator
from cuda_agent.tasks.inspect import problems
from cuda_agent.tasks.task import Task

SYSTEM = """You write small PyTorch problems that others will speed up with custom kernels.
Answer with one Python code block and nothing else. The file must
- import only torch (and torch.nn, torch.nn.functional);
- define `class Model(nn.Module)` whose `forward` chains the given operators one after the other, each used once, as one
  layer would, with no other heavy operator between them;
- define `get_inputs()`: a list of fresh random float32 CPU tensors for `forward`, with values valid for every operator;
- define `get_init_inputs()`: the list of arguments of `Model.__init__` (plain numbers; empty when it takes none).
No dropout and no randomness in `forward`, no printing, no `if __name__`. The output must depend on the input: nothing
that saturates, cancels or averages everything away. Reordering the operators to make shapes fit is allowed."""

_RETRIES = 4


class WriterUnavailable(Exception):
    """The address does not answer or refuses access; the message says which, and names a remedy."""


@dataclass(frozen=True)
class ModelWriter:
    url: str  # up to and with /v1
    model: str
    key_env: str
    operators: Sequence[Operator]
    window: tuple[float, float]  # seconds of eager time
    device: str = "cpu"
    max_ops: int = 5
    timeout: float = 120.0
    pause: float = 1.0  # seconds before the first retry; doubles
    repeatable: bool = False

    async def compose(self, rng: Random) -> Task:
        counts = range(1, self.max_ops + 1)
        chosen = pick_operators(self.operators, rng.choices(counts, [COUNT_WEIGHTS[n] for n in counts])[0], rng)
        if chosen is None:
            raise ComposeError("no operators fit together")
        answer = await self._ask(request_text([operator.name for operator in chosen], self.window, self.device))
        return task_from_answer(answer, self.max_ops)

    async def _ask(self, text: str) -> str:
        key = os.environ.get(self.key_env)
        body = {
            "model": self.model,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
            "temperature": 1.0,
        }
        problem = ""
        async with httpx.AsyncClient(timeout=self.timeout) as client:
            for attempt in range(_RETRIES):
                if attempt:
                    await asyncio.sleep(self.pause * 2 ** (attempt - 1))
                try:
                    response = await client.post(
                        f"{self.url.rstrip('/')}/chat/completions",
                        json=body,
                        headers={"Authorization": f"Bearer {key}"} if key else {},
                    )
                except httpx.HTTPError as error:
                    problem = f"{type(error).__name__}: {error}"
                    continue
                if response.status_code == 429 or response.status_code >= 500:
                    problem = f"status {response.status_code}"
                    continue
                if response.status_code in (401, 403):
                    known = "was refused" if key else "is not set"
                    raise WriterUnavailable(f"{self.url}: not allowed in; the key in {self.key_env} {known}")
                if response.status_code != 200:
                    raise WriterUnavailable(f"{self.url}: status {response.status_code}: {response.text[:200]}")
                return _content(response)
        raise WriterUnavailable(f"{self.url}: {problem} after {_RETRIES} attempts")


def request_text(operators: Sequence[str], window: tuple[float, float], device: str) -> str:
    """The request to the model for one task."""
    place = "a recent data-centre GPU" if device == "cuda" else "two CPU cores"
    low, high = (f"{seconds * 1e3:g}" for seconds in window)
    return (
        f"Operators: {', '.join(operators)}.\n"
        f"Choose shapes so that one eager forward pass takes between {low} and {high} ms on {place}."
    )


def task_from_answer(answer: str, max_ops: int = 5) -> Task:
    """The task in a model's answer, which may have any form.

    Raises:
        ComposeError: The answer holds no valid task.
    """
    blocks = re.findall(r"```[ \t]*(?:python|py)?[ \t]*\r?\n(.*?)```", answer, re.S | re.I)
    candidates = [block for block in blocks if "class Model" in block] or blocks or [answer]
    code = candidates[-1].replace("\r\n", "\n").strip() + "\n"
    if found := problems(code):
        raise ComposeError("malformed: " + re.sub(r"line \d+: ", "", found[0]))
    task = as_task(code, "")
    if not task.ops:
        raise ComposeError("malformed: uses no operator")
    if len(task.ops) > max_ops:
        raise ComposeError("malformed: too many operators")
    return Task(task.name, code, task.ops, f"torch#{len(task.ops)}", task.family)


def _content(response: httpx.Response) -> str:
    """The text of the first choice; "" if the answer has another form (the form check then refuses it)."""
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
    return content if isinstance(content, str) else ""
