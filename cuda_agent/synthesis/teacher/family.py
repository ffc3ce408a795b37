"""Defines the teacher's family: the generated tasks that the scripted teacher (a program) can solve.

A task is a chain of one to three element-wise operators and, in some tasks, an ending. An ending is a last operator
that is not element-wise. It works along the rows of the input. In tasks for a GPU, it may also work along the columns
or transpose the input.

A table gives the name, the PyTorch code and the C++ code of each operator. ``sample_task`` draws a task, and ``parse``
reads a task's specification from its code. Training tasks and held-out tasks never share a ``combination``: the names
of a task's operators, in order. Shapes for the CPU are drawn so that eager PyTorch takes roughly 0.05-5 ms on two
cores. Exact limits are enforced later, by the filters of synthesis."""

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from cuda_agent.sandbox.wire import TaskSpec, Tensor
from cuda_agent.tasks.inspect import recompute_ops
from cuda_agent.tasks.task import Task


@dataclass(frozen=True)
class FamilyOperator:
    """An element-wise operator of one or two inputs, in PyTorch, C++ and Python. In ``torch`` and ``cpp``, ``{c}``
    stands for the operator's constant: one digit, which a policy can copy as one token."""

    torch: str  # expression for the tensor ``x`` (and the second input ``y``)
    cpp: str  # expression for one element ``v`` of ``x`` (and ``w``, the same element of ``y``)
    value: Callable[[float, float], float]  # the same in Python, for tests of chains; takes v, and c or w
    largest: float = 1e4  # largest |v| for which the C++ form does not overflow

    @property
    def has_constant(self) -> bool:
        return "{c}" in self.torch

    @property
    def binary(self) -> bool:
        return re.search(r"\by\b", self.torch) is not None


def _sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def _softplus(v: float) -> float:
    return max(v, 0.0) + math.log1p(math.exp(-abs(v)))


_op = FamilyOperator
# fmt: off
OPERATORS: dict[str, FamilyOperator] = {
    "relu": _op("torch.relu(x)", "v > 0 ? v : 0", lambda v, _: max(v, 0.0)),
    "abs": _op("torch.abs(x)", "fabs(v)", lambda v, _: abs(v)),
    "neg": _op("-x", "-v", lambda v, _: -v),
    "square": _op("torch.square(x)", "v * v", lambda v, _: v * v, 60),
    "sinh": _op("torch.sinh(x)", "sinh(v)", lambda v, _: math.sinh(v), 7),
    "sqrt_abs": _op("torch.sqrt(torch.abs(x))", "sqrt(fabs(v))", lambda v, _: math.sqrt(abs(v))),
    "exp": _op("torch.exp(x)", "exp(v)", lambda v, _: math.exp(v), 7),
    "tanh": _op("torch.tanh(x)", "tanh(v)", lambda v, _: math.tanh(v)),
    "tanhshrink": _op("F.tanhshrink(x)", "v - tanh(v)", lambda v, _: v - math.tanh(v)),
    "sigmoid": _op("torch.sigmoid(x)", "1 / (1 + exp(-v))", lambda v, _: _sigmoid(v), 40),
    "silu": _op("F.silu(x)", "v / (1 + exp(-v))", lambda v, _: v * _sigmoid(v), 40),
    "softplus": _op("F.softplus(x)", "fmax(v, 0.0f) + log(1 + exp(-fabs(v)))", lambda v, _: _softplus(v)),
    "logsigmoid": _op("F.logsigmoid(x)", "fmin(v, 0.0f) - log(1 + exp(-fabs(v)))", lambda v, _: -_softplus(-v)),
    "mish": _op("F.mish(x)", "v * tanh(log(1 + exp(v)))", lambda v, _: v * math.tanh(_softplus(v))),
    "elu": _op("F.elu(x)", "v > 0 ? v : exp(v) - 1", lambda v, _: v if v > 0 else math.expm1(v), 40),
    "selu": _op("F.selu(x)", "1.0507010f * (v > 0 ? v : 1.6732632f * (exp(v) - 1))",
                lambda v, _: 1.050701 * (v if v > 0 else 1.6732632 * math.expm1(v)), 40),
    "gelu": _op("F.gelu(x)", "v * (1 + erf(v * 0.70710678f)) / 2",
                lambda v, _: v * (1 + math.erf(v / math.sqrt(2))) / 2),
    "erf": _op("torch.erf(x)", "erf(v)", lambda v, _: math.erf(v)),
    "sin": _op("torch.sin(x)", "sin(v)", lambda v, _: math.sin(v), 60),
    "cos": _op("torch.cos(x)", "cos(v)", lambda v, _: math.cos(v), 60),
    "atan": _op("torch.atan(x)", "atan(v)", lambda v, _: math.atan(v)),
    "softsign": _op("F.softsign(x)", "v / (1 + fabs(v))", lambda v, _: v / (1 + abs(v))),
    "hardtanh": _op("F.hardtanh(x)", "fmin(fmax(v, -1.0f), 1.0f)", lambda v, _: min(max(v, -1.0), 1.0)),
    "hardsigmoid": _op("F.hardsigmoid(x)", "fmin(fmax(v / 6 + 0.5f, 0.0f), 1.0f)",
                       lambda v, _: min(max(v / 6 + 0.5, 0.0), 1.0)),
    "hardswish": _op("F.hardswish(x)", "v * fmin(fmax(v / 6 + 0.5f, 0.0f), 1.0f)",
                     lambda v, _: v * min(max(v / 6 + 0.5, 0.0), 1.0)),
    "leaky_relu": _op("F.leaky_relu(x, 0.{c})", "v > 0 ? v : v * 0.{c}f", lambda v, c: v if v > 0 else v * c / 10),
    "clamp": _op("torch.clamp(x, -0.{c}, 0.{c})", "fmin(fmax(v, -0.{c}f), 0.{c}f)",
                 lambda v, c: min(max(v, -c / 10), c / 10)),
    "softshrink": _op("F.softshrink(x, 0.{c})", "v - fmin(fmax(v, -0.{c}f), 0.{c}f)",
                      lambda v, c: v - min(max(v, -c / 10), c / 10)),
    "add": _op("x + 0.{c}", "v + 0.{c}f", lambda v, c: v + c / 10),
    "sub": _op("x - 0.{c}", "v - 0.{c}f", lambda v, c: v - c / 10),
    "mul": _op("x * 0.{c}", "v * 0.{c}f", lambda v, c: v * c / 10),
    "div": _op("x / 0.{c}", "v / 0.{c}f", lambda v, c: v / c * 10),
    "add_y": _op("x + y", "v + w", lambda v, w: v + w),
    "sub_y": _op("x - y", "v - w", lambda v, w: v - w),
    "mul_y": _op("x * y", "v * w", lambda v, w: v * w),
    "max_y": _op("torch.maximum(x, y)", "v > w ? v : w", lambda v, w: max(v, w)),
    "min_y": _op("torch.minimum(x, y)", "v < w ? v : w", lambda v, w: min(v, w)),
}
# fmt: on
UNARY = tuple(name for name, operator in OPERATORS.items() if not operator.binary)
BINARY = tuple(name for name, operator in OPERATORS.items() if operator.binary)
CONSTANTS = ("2", "3", "4", "5", "6", "7", "8", "9")


@dataclass(frozen=True)
class Ending:
    """An operator after an element-wise chain. ``length`` and ``spread`` are chosen so that outputs for different
    inputs differ by more than the judge's tolerance of 1e-2. The means of rows of 10,000 values, for example, often
    differ by less."""

    torch: str  # its form in PyTorch
    maps: bool  # whether the output has the shape of the input
    length: str  # range of lengths, a key of ``LENGTHS``; of a column for the kind "column", else of a row
    spread: float = 1.0  # least allowed difference between the chain's high and low results
    kind: Literal["row", "column", "transpose"] = "row"


# Lengths of a row or column, by device. Lengths that 4 or 8 do not divide decide which designs are right.
LENGTHS: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {
        "narrow": (32, 50, 63, 64),
        "medium": (63, 64, 100, 127, 128, 255, 256),
        "wide": (63, 100, 127, 128, 255, 256, 500, 512, 999, 1024),
        "plain": (125, 255, 512, 625, 999, 1023, 1024, 2001, 2047),
    },
    "cuda": {
        "narrow": (32, 40, 50, 63, 64),
        "medium": (64, 100, 127, 128, 200, 250, 256),
        "wide": (256, 500, 1000, 1023, 1024, 2000, 2048, 3000, 4096, 5000, 8192, 10000, 12000, 16384),
        "plain": (250, 999, 1000, 1024, 2047, 2048, 3000, 4096, 5001, 8192),
    },
}
ELEMENTS = {"cpu": (17, 20), "cuda": (19, 25)}  # binary logarithms of the fewest and the most elements of an input
ENDINGS: dict[str, Ending] = {
    "sum": Ending("torch.sum(x, 1)", False, "wide"),
    "mean": Ending("torch.mean(x, 1)", False, "medium"),
    "amax": Ending("torch.amax(x, 1)", False, "wide"),
    "amin": Ending("torch.amin(x, 1)", False, "wide"),
    "var": Ending("torch.var(x, 1)", False, "medium"),
    "norm": Ending("torch.norm(x, dim=1)", False, "wide"),
    "softmax": Ending("torch.softmax(x, 1)", True, "narrow", 2.0),
    "log_softmax": Ending("torch.log_softmax(x, 1)", True, "medium"),
    "normalize": Ending("F.normalize(x, dim=1)", True, "narrow"),
    "layer_norm": Ending("F.layer_norm(x, x.shape[1:])", True, "wide", 0.2),
    "rms_norm": Ending("F.rms_norm(x, x.shape[1:])", True, "wide"),
    "column_sum": Ending("torch.sum(x, 0)", False, "wide", kind="column"),
    "column_mean": Ending("torch.mean(x, 0)", False, "medium", kind="column"),
    "column_amax": Ending("torch.amax(x, 0)", False, "wide", kind="column"),
    "column_amin": Ending("torch.amin(x, 0)", False, "wide", kind="column"),
    "column_var": Ending("torch.var(x, 0)", False, "medium", kind="column"),
    "column_norm": Ending("torch.norm(x, dim=0)", False, "wide", kind="column"),
    "column_softmax": Ending("torch.softmax(x, 0)", True, "narrow", 2.0, "column"),
    "transpose": Ending("x.t().contiguous()", False, "plain", 0.2, "transpose"),
}
_ROWS = tuple(name for name, ending in ENDINGS.items() if ending.kind == "row")
DRAWN = {"cpu": _ROWS, "cuda": tuple(ENDINGS)}  # the endings from which a task's ending is drawn, by device
ENDED = {"cpu": 0.5, "cuda": 0.95}  # share of drawn tasks with an ending, before those that are not admissible


@dataclass(frozen=True)
class FamilySpec:
    """What defines a task of the teacher's family: its operators with their constants, and the shape of its inputs."""

    chain: tuple[tuple[str, str | None], ...]  # operators with their constants (None: the operator has none)
    ending: str | None  # name of the operator after the chain, if there is one
    rows: int  # with ``columns`` the shape of every input (float32, contiguous)
    columns: int

    @property
    def binary(self) -> bool:
        """Whether the task has a second input."""
        return any(OPERATORS[name].binary for name, _ in self.chain)

    @property
    def kind(self) -> Literal["chain", "row", "column", "transpose"]:
        return ENDINGS[self.ending].kind if self.ending else "chain"

    @property
    def operation(self) -> str:
        """The name of the ending without its direction: "sum" for "column_sum"."""
        return (self.ending or "").removeprefix("column_")

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the output."""
        if self.ending is None or ENDINGS[self.ending].maps:
            return self.rows, self.columns
        return {"row": (self.rows,), "column": (self.columns,)}.get(self.kind, (self.columns, self.rows))

    @property
    def names(self) -> tuple[str, ...]:
        return (*(name for name, _ in self.chain), *([self.ending] if self.ending else []))


def steps(spec: FamilySpec) -> list[str]:
    """Returns the C++ statements, valid also in CUDA, that compute the chain of ``spec`` for one element: one statement
    for each operator. Each statement changes the variable ``v``. For an operator of two inputs, it also reads the
    second input's element ``w``."""
    return [f"v = {_fill(OPERATORS[name].cpp, constant)};" for name, constant in spec.chain]


def sample_task(rng: random.Random, device: str = "cpu") -> Task:
    """Draws a task of the teacher's family, with a shape for ``device`` (cpu or cuda). An operator of the family may
    consist of several torch operators; the task has at most five of these. Equal states of ``rng`` give equal tasks."""
    while len((task := make_task(sample_spec(rng, device))).ops) > 5:
        pass
    return task


def sample_spec(rng: random.Random, device: str = "cpu") -> FamilySpec:
    while True:
        names = rng.sample(UNARY, rng.choices((1, 2, 3), (1, 3, 4))[0])
        if rng.random() < 0.25:
            names[rng.randrange(len(names))] = rng.choice(BINARY)
        chain = tuple((name, rng.choice(CONSTANTS) if OPERATORS[name].has_constant else None) for name in names)
        ending = rng.choice(DRAWN[device]) if rng.random() < ENDED[device] else None
        if _admissible(chain, ending):
            break
    length = rng.choice(LENGTHS[device][ENDINGS[ending].length if ending else "plain"])
    exponent = rng.uniform(*ELEMENTS[device]) if device == "cpu" else rng.randint(*ELEMENTS[device])
    other = int(2**exponent) // length
    if ending and ENDINGS[ending].kind == "column":
        return FamilySpec(chain, ending, length, other)
    return FamilySpec(chain, ending, other, length)


def make_task(spec: FamilySpec) -> Task:
    """Returns the task with the specification ``spec``. The task's name has its operators and the first 8 hex digits of
    the digest of its code."""
    code = _code(spec)
    ops = recompute_ops(code)
    task = Task("", code, ops, f"torch#{len(ops)}", family="teacher")
    return replace(task, name=f"{'_'.join(spec.names)}-{task.digest[:8]}")


def _code(spec: FamilySpec) -> str:
    arguments = "x, y" if spec.binary else "x"
    steps = "".join(f"        x = {_fill(OPERATORS[name].torch, constant)}\n" for name, constant in spec.chain)
    shape = f"torch.randn({spec.rows}, {spec.columns})"
    return (
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
        f"class Model(nn.Module):\n    def forward(self, {arguments}):\n{steps}"
        f"        return {ENDINGS[spec.ending].torch if spec.ending else 'x'}\n\n\n"
        f"def get_inputs():\n    return [{shape}{', ' + shape if spec.binary else ''}]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    )


def task_spec(spec: FamilySpec) -> TaskSpec:
    """Returns the ``TaskSpec`` that the judge reports for the task with the specification ``spec``: the shapes and
    dtypes of its tensors, and the arguments of ``forward``."""
    shape = Tensor((spec.rows, spec.columns), "float32")
    inputs = (shape,) * (1 + spec.binary)
    arguments = tuple({"tensor": index} for index in range(len(inputs)))
    return TaskSpec(inputs, (Tensor(spec.output, "float32"),), {}, arguments, ())


def combination(task: Task) -> str:
    """Returns the combination of a task's operators: their names in order, without constants (``relu>mul_y>sum``)."""
    return ">".join(parse(task).names)


def ending(task: Task) -> str:
    """Returns the name of a task's ending, or "" if the task has none."""
    return parse(task).ending or ""


def is_heldout(combination: str, seed: int, share: float) -> bool:
    """Returns whether tasks with this ``combination`` of operators are held out. A hash of ``combination`` and ``seed``
    selects ``share`` (0 to 1) of all combinations, so a resumed run decides in the same way. The split is by
    combination, because tasks that differ only in shapes are the same problem for a policy."""
    digest = hashlib.sha256(f"{seed}/{combination}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def heldout_combinations(tasks: Iterable[Task], combination: Callable[[Task], str]) -> frozenset[str]:
    """Returns the combinations of the held-out tasks in ``tasks``. A training corpus must not contain them. The
    function ``combination`` returns the combination of a task."""
    return frozenset(combination(task) for task in tasks if task.split == "heldout")


def ops_combination(task: Task) -> str:
    """Returns the combination of a task from the operator catalogue: its torch operators, sorted and joined by "+"."""
    return "+".join(sorted(task.ops))


@lru_cache(maxsize=1024)
def parse(task: Task) -> FamilySpec:
    """Returns the specification of ``task``, read from its code. This is the inverse of ``make_task``.

    Raises:
        ValueError: ``make_task`` did not make this code."""
    steps = re.findall(r"^        x = (.+)$", task.code, re.M)
    result = re.search(r"^        return (.+)$", task.code, re.M)
    shape = re.search(r"torch\.randn\((\d+), (\d+)\)", task.code)
    endings: dict[str | None, str] = {None: "x"} | {name: ending.torch for name, ending in ENDINGS.items()}
    ending = [name for name, code in endings.items() if result and result[1] == code]
    if not steps or not ending or not shape or not _STEPS.keys() >= set(steps):
        raise ValueError(f"task {task.name} is not of the teacher's family")
    spec = FamilySpec(tuple(_STEPS[step] for step in steps), ending[0], int(shape[1]), int(shape[2]))
    if _code(spec) != task.code:
        raise ValueError(f"task {task.name} is not of the teacher's family")
    return spec


def _fill(template: str, constant: str | None) -> str:
    return template.replace("{c}", constant or "")


_STEPS = {  # a line of code -> its operator and constant
    _fill(operator.torch, constant): (name, constant)
    for name, operator in OPERATORS.items()
    for constant in (CONSTANTS if operator.has_constant else (None,))
}
# Points of the normal distribution, as far out as a million draws reach, and values of the second input beside them.
_POINTS = (-5.2, -2.5, -1.5, -1.0, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 5.2)
_OTHERS = (5.2, -0.7, 1.1, -1.8, 0.2, -0.4, 2.1, 0.9, -0.2, -2.4, 1.6, -1.2, 0.4, -5.2)


def chain_values(chain: tuple[tuple[str, str | None], ...]) -> list[float]:
    """Returns the results of ``chain``, computed in Python, for fixed inputs between -5.2 and 5.2 (``_POINTS``)."""
    values = list(_POINTS)
    for name, constant in chain:
        others = [float(constant)] * len(values) if constant else _OTHERS
        values = [OPERATORS[name].value(v, c) for v, c in zip(values, others, strict=True)]
    return values


def _admissible(chain: tuple[tuple[str, str | None], ...], ending: str | None) -> bool:
    """Returns whether ``chain`` and ``ending`` suit a task: nothing overflows, each operator matters, results vary."""
    values = list(_POINTS)
    for k, (name, _) in enumerate(chain):
        if max(map(abs, values)) > OPERATORS[name].largest:
            return False
        changed = chain_values(chain[: k + 1])
        if sum(abs(a - b) > 0.02 * (1 + abs(b)) for a, b in zip(values, changed, strict=True)) < 4:
            return False
        values = changed
    low, *_, high = ordered = sorted(values)
    middle = sorted(values[1:-1])  # without the tails, which a row may lack
    if max(-low, high) > 2000 or middle[-3] - middle[2] <= (ENDINGS[ending].spread if ending else 0.2):
        return False
    # The maximum of many bounded numbers is the bound itself: the extreme must lie far out.
    operation = (ending or "").removeprefix("column_")
    extreme, third = (low, ordered[2]) if operation == "amin" else (high, ordered[-3])
    far = values.index(extreme) in (0, len(values) - 1) and abs(extreme - third) > 0.3
    return far or operation not in ("amax", "amin")
