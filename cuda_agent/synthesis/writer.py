"""The model writer: a language model behind an OpenAI-compatible address composes the tasks.

Operators are drawn here; the model fuses them and chooses shapes.  Its answer is text: its form is parsed, and only the
sandbox executes it.  What it does not cover: judging the answer beyond its form (the filters do), token accounting.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cuda_agent.policy.served import ServedModel
from cuda_agent.synthesis.compose import ComposeError, as_task, draw_count, pick_operators
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


@dataclass(frozen=True)
class ModelWriter:
    url: str  # up to and with /v1
    model: str
    key_env: str
    operators: Sequence[Operator]
    window: tuple[float, float]  # seconds of eager time
    device: str = "cpu"
    max_ops: int = 5
    pause: float = 1.0  # seconds before the first retry; doubles
    repeatable: bool = False

    async def compose(self, rng: Random) -> Task:
        """See ``Composer.compose``.

        Raises:
            ServedModelError: The address does not answer or refuses the request.
        """
        chosen = pick_operators(self.operators, draw_count(self.max_ops, rng), rng)
        if chosen is None:
            raise ComposeError("no operators fit together")
        text = request_text([operator.name for operator in chosen], self.window, self.device)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        async with ServedModel(self.url, self.model, self.key_env, 120.0, pause=self.pause) as model:
            return task_from_answer((await model.chat(messages)).content, self.max_ops)


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
    task = as_task(code)
    if not task.ops:
        raise ComposeError("malformed: uses no operator")
    if len(task.ops) > max_ops:
        raise ComposeError("malformed: too many operators")
    return task
