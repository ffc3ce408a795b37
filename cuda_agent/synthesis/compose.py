"""Composes tasks with one of two writers: a program that samples operators and shapes, or a language model.

The program makes either a chain of operators from ``catalogue`` or one layer of ``transformers``. In a chain, each
operator takes the output of the previous one. Chains are float32, without branches or residual connections. The program
chooses a batch size for which a cost model predicts a time in eager PyTorch within the limits of the configuration
(``synthesis.window_ms``). Later, ``filters`` compares the measured time with these limits.

This module checks the form of a language model's answer. It does not run the code in the answer; only the sandbox
does."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from cuda_agent.policy.served import ServedModel
from cuda_agent.synthesis.catalogue import CATALOGUE
from cuda_agent.synthesis.layers import LAYERS, render
from cuda_agent.synthesis.rules import NORMAL, Interval, Operator, Shape, Use, size
from cuda_agent.tasks.inspect import problems, recompute_ops
from cuda_agent.tasks.task import Task

# Number of operators of a task -> its weight.  In CUDA-Agent-Ops-6K 84 % of the tasks stack two operators.
COUNT_WEIGHTS = {1: 0.1, 2: 0.45, 3: 0.25, 4: 0.12, 5: 0.08}
LAYER_SHARE = 0.1  # share of stand-alone layers of transformers (in CUDA-Agent-Ops-6K 1.2 %)
KIND_WEIGHTS = {
    "elementwise": 3.0, "reduction": 1.5, "scan": 0.7, "normalisation": 1.5, "pooling": 1.0,
    "convolution": 1.0, "matmul": 2.0, "attention": 0.7, "loss": 0.7, "shape": 1.0,
}  # fmt: skip
_NEEDS_A_ROW = {"reduction", "scan", "normalisation", "loss"}  # on rows of one value their result is constant


class ComposeError(Exception):
    """An attempt to compose a task failed. The message is a short reason. The data card (a summary of the
    synthesis) counts each reason."""


class Composer(Protocol):
    """A writer of candidate tasks. If ``repeatable`` is true, equal states of ``rng`` give equal tasks. The caller then
    need not store a task, because it can compose the same task again."""

    @property
    def repeatable(self) -> bool: ...

    async def compose(self, rng: Random) -> Task:
        """Returns one task. Raises ComposeError if this attempt gives no task."""


@dataclass(frozen=True)
class Speed:
    """A rough model of the time that PyTorch takes in eager mode on one device. ``bytes_per_second`` and
    ``flops_per_second`` are rates for tensors of medium size."""

    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float  # time to start one operator
    most_elements: int  # most elements of one tensor
    wide: bool  # whether shapes are large, as suits a GPU

    def seconds(self, elements: float, flops: float) -> float:
        return self.launch_seconds + 4.0 * elements / self.bytes_per_second + flops / self.flops_per_second


def speed_of(device: str, threads: int) -> Speed:
    if device == "cuda":
        return Speed(1.5e12, 2e13, 8e-6, 1 << 29, True)
    return Speed(12e9 * threads, 75e9 * threads, 3e-6, 1 << 24, False)


@dataclass(frozen=True)
class ProgrammaticWriter:
    """A writer that draws operators (or a layer of ``transformers``) and shapes at random. ``window`` is the allowed
    range of a task's time in eager PyTorch, in seconds."""

    speed: Speed
    window: tuple[float, float]
    max_ops: int = 5  # most operators of a task
    repeatable: bool = True

    async def compose(self, rng: Random) -> Task:
        make = self._layer if rng.random() < LAYER_SHARE else self._chain
        for _ in range(200):
            task = make(rng)
            if task is not None:
                return task
        raise ComposeError("no shape fits the window")

    def _chain(self, rng: Random) -> Task | None:
        operators = pick_operators(CATALOGUE, draw_count(self.max_ops, rng), rng)
        if operators is None:
            return None
        first, seed = first_shape(operators[0], self.speed.wide, rng), rng.getrandbits(32)

        def built(batch: int) -> Chain | None:
            return build(operators, (batch, *first[1:]), Random(seed))

        def cost(batch: int) -> float:
            chain = built(batch)
            if chain is None or chain.largest > self.speed.most_elements:
                return math.inf
            return sum(self.speed.seconds(elements, flops) for elements, flops in chain.work)

        batch = batch_for(cost, self.window, rng)
        chain = built(batch) if batch else None
        return as_task(chain.code(), f"torch#{len(operators)}") if chain else None

    def _layer(self, rng: Random) -> Task | None:
        layer, seed = rng.choice(LAYERS), rng.getrandbits(32)
        batch = batch_for(
            lambda batch: self.speed.seconds(*layer.cost(batch, self.speed.wide, Random(seed))), self.window, rng
        )
        return as_task(layer.code(batch, self.speed.wide, Random(seed)), "transformers") if batch else None


def as_task(code: str, data_source: str = "") -> Task:
    """Returns a task with the source ``code``. The task's name consists of its operators, which are found in ``code``,
    and of the digest of ``code``. Equal sources therefore give equal names. ``data_source`` describes the origin of the
    task; the default is "torch#" with the number of operators."""
    ops = recompute_ops(code)
    task = Task("", code, ops, data_source or f"torch#{len(ops)}")
    words = [re.sub(r"\W+", "", op.rsplit(".", 1)[-1]).lower() for op in ops[:5]]
    return replace(task, name=f"{'_'.join(words)}-{task.digest[:8]}")


def draw_count(most: int, rng: Random) -> int:
    counts = range(1, most + 1)
    return rng.choices(counts, [COUNT_WEIGHTS[n] for n in counts])[0]


def pick_operators(operators: Sequence[Operator], count: int, rng: Random) -> list[Operator] | None:
    """Draws ``count`` different operators for a chain, in which each operator takes the output of the previous one. An
    operator is drawn only if it accepts all values that the previous one can give. Returns None if no operator fits a
    position. Does not check shapes; ``build`` does."""
    chosen: list[Operator] = []
    values: Interval | None = None
    for place in range(count):
        final = place == count - 1
        fitting = [
            operator
            for operator in operators
            if operator not in chosen
            and (not operator.first or place == 0)
            and (not operator.last or final)
            and (values is None or (operator.needs[0] <= values[0] and values[1] <= operator.needs[1]))
        ]
        kinds = sorted({operator.kind for operator in fitting})
        if not kinds:
            return None
        kind = rng.choices(kinds, [KIND_WEIGHTS[kind] for kind in kinds])[0]
        chosen.append(rng.choice([operator for operator in fitting if operator.kind == kind]))
        values = chosen[-1].gives or values or input_values(chosen[0])
    return chosen


def first_shape(operator: Operator, wide: bool, rng: Random) -> Shape:
    """Draws an input shape with batch size 1 for a task that begins with ``operator``; a large one if ``wide``."""
    rank = rng.choice([rank for rank in operator.ranks if rank > 1])
    if rank == 2:
        return (1, rng.choice((1024, 2048, 4096, 8192) if wide else (64, 128, 256, 512, 1000, 2048)))
    if rank == 3:
        length = rng.choice((256, 512, 1024) if wide else (16, 32, 50, 64, 128))
        return (1, length, rng.choice((256, 512, 1024) if wide else (32, 64, 128, 256)))
    if rank == 4:
        side = rng.choice((32, 56, 64, 128) if wide else (8, 14, 16, 28, 32))
        return (1, rng.choice((16, 32, 64, 128) if wide else (4, 8, 16, 32)), side, side)
    side = rng.choice((16, 32) if wide else (6, 8, 12))
    return (1, rng.choice((8, 16, 32) if wide else (4, 8)), rng.choice((8, 16) if wide else (4, 8)), side, side)


def input_values(operator: Operator) -> Interval:
    low, high = operator.needs
    if low <= NORMAL[0] and high >= NORMAL[1]:
        return NORMAL
    return low, min(high, low + 2.0)


def batch_for(cost: Callable[[int], float], window: tuple[float, float], rng: Random) -> int | None:
    """Returns a batch size whose predicted time is near a time drawn from ``window``, or None if no size fits. ``cost``
    returns the predicted seconds for a batch size. ``window`` is (least, greatest) seconds."""
    low, high = window[0] * 1.4, window[1] / 2.5
    if low >= high:
        low = high = math.sqrt(window[0] * window[1])
    target = math.exp(rng.uniform(math.log(low), math.log(high)))
    if cost(1) > high:
        return None
    largest = 1
    while largest < 1 << 24 and cost(largest * 2) <= target:
        largest *= 2
    lower, upper = largest, largest * 2
    while upper - lower > max(1, lower // 16):
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if cost(middle) <= target else (lower, middle)
    if rng.random() < 0.85:  # mostly round numbers; kernels must handle others too
        step = 1 << max(0, lower.bit_length() - 3)
        lower = lower // step * step
    return lower if window[0] * 1.1 <= cost(lower) <= high * 1.2 else None


@dataclass(frozen=True)
class Chain:
    """A chain of operators, as parts of a task's source, with the cost of each operator. ``work`` holds one pair per
    operator: (elements read and written, arithmetic operations)."""

    arguments: tuple[tuple[str, int], ...]  # name and value of each argument of __init__
    init: tuple[str, ...]  # lines of __init__
    forward: tuple[str, ...]  # lines of forward
    inputs: tuple[tuple[str, str], ...]  # name and expression of each input
    work: tuple[tuple[float, float], ...]
    largest: int  # number of elements of the largest tensor
    shape: Shape  # shape of the output

    def code(self) -> str:
        return render(self.arguments, self.init, self.forward, self.inputs)


def build(operators: Sequence[Operator], shape: Shape, rng: Random) -> Chain | None:
    """Returns the chain of ``operators`` for an input of ``shape``. Draws the operators' settings, such as kernel
    sizes, from ``rng``. Returns None if an operator does not accept the shape of its incoming tensor."""
    low, high = input_values(operators[0])
    text = ", ".join(map(str, shape))
    source = f"torch.randn({text})" if (low, high) == NORMAL else f"torch.rand({text}) * {high - low:g} + {low:g}"
    chain = Chain((), (), (), (("x", source),), (), size(shape), shape)
    taken = {"x", "self"}
    for operator in operators:
        here = chain.shape
        if len(here) not in operator.ranks or (operator.kind in _NEEDS_A_ROW and here[-1] < 4):
            return None
        if (use := operator.use(rng, here)) is None:
            return None
        chain = _stacked(chain, operator, use, taken)
    return chain


def _stacked(chain: Chain, operator: Operator, use: Use, taken: set[str]) -> Chain:
    def fresh(name: str) -> str:
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name}{number}"
        taken.add(free)
        return free

    names = {"x": "x"} | {name: fresh(name) for name, _ in (*use.arguments, *use.inputs)}
    if use.init:
        is_weight = use.init.startswith("nn.Parameter")
        names["m"] = fresh("weight" if is_weight else operator.name.rsplit(".", 1)[-1].lower())
    extra = sum(_elements(source) for _, source in use.inputs)
    moved = size(chain.shape) + size(use.shape) + extra if use.moved is None else use.moved
    inputs = (("x", use.source),) if use.source else chain.inputs
    return Chain(
        arguments=chain.arguments + tuple((names[name], value) for name, value in use.arguments),
        init=chain.init + ((f"self.{names['m']} = {use.init.format(**names)}",) if use.init else ()),
        forward=(*chain.forward, f"x = {use.forward.format(**names)}"),
        inputs=inputs + tuple((names[name], source) for name, source in use.inputs),
        work=(*chain.work, (moved, use.flops)),
        largest=max(chain.largest, size(use.shape), extra),
        shape=use.shape,
    )


def _elements(source: str) -> int:
    """Returns the number of elements of the tensor that ``source`` makes, such as ``torch.randn(2, 3)``."""
    inner = re.findall(r"\(([\d, ]+)\)", source)
    return math.prod(int(number) for number in re.findall(r"\d+", inner[-1])) if inner else 0


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
    url: str  # address of the model's server, which ends in /v1
    model: str  # name of the model
    key_env: str  # environment variable with the key
    window: tuple[float, float]  # range of eager time in seconds
    device: str = "cpu"
    max_ops: int = 5
    pause: float = 1.0  # seconds before the first retry; doubles with each retry
    repeatable: bool = False

    async def compose(self, rng: Random) -> Task:
        """Asks the language model for a task.

        Raises:
            ComposeError: This attempt gives no task.
            ServedModelError: The model's server does not answer, refuses the request, or sends an invalid answer."""
        chosen = pick_operators(CATALOGUE, draw_count(self.max_ops, rng), rng)
        if chosen is None:
            raise ComposeError("no operators fit together")
        place = "a recent data-centre GPU" if self.device == "cuda" else "two CPU cores"
        low, high = (f"{seconds * 1e3:g}" for seconds in self.window)
        text = (
            f"Operators: {', '.join(operator.name for operator in chosen)}.\n"
            f"Choose shapes so that one eager forward pass takes between {low} and {high} ms on {place}."
        )
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        async with ServedModel(self.url, self.model, self.key_env, 120.0, pause=self.pause) as model:
            return task_from_answer((await model.chat(messages)).content, self.max_ops)


def task_from_answer(answer: str, max_ops: int = 5) -> Task:
    """Returns the task in ``answer``, the text of a language model. Takes the last Markdown code block with a class
    ``Model``; without such a block, the last code block; without any block, the whole text.

    Raises:
        ComposeError: The code is not a task, or has no operator or more than ``max_ops`` operators."""
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
