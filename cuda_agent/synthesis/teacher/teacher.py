"""Implements the scripted teacher: a program that solves the tasks of ``family`` with kernels of random design.

A design is a set of choices for a kernel, such as the number of threads. ``cpu_kernels`` and ``cuda_kernels`` hold the
designs of each device. The stage ``bootstrap`` trains a small model on the teacher's solutions; no later stage uses the
teacher. ``spoil`` puts one realistic mistake into a solution, for episodes in which the agent repairs the mistake."""

import random
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

from cuda_agent.sandbox.wire import Status
from cuda_agent.synthesis.teacher import cpu_kernels, cuda_kernels
from cuda_agent.synthesis.teacher.family import (
    CONSTANTS,
    ENDINGS,
    OPERATORS,
    UNARY,
    FamilySpec,
    chain_values,
    parse,
    steps,
)
from cuda_agent.tasks.task import Task

_KERNELS: dict[str, ModuleType] = {"cpu": cpu_kernels, "cuda": cuda_kernels}


@dataclass(frozen=True)
class Worked:
    """A solution of the teacher, with the status and message that the judge is expected to give. The solution's format
    is ``plan``: it consists of a kernel's source and of ``plan.json``, the list of kernel launches."""

    files: dict[str, str]  # path -> text
    device: str  # "cpu" or "cuda"
    design: Any  # a design of ``cpu_kernels`` or ``cuda_kernels``
    status: Status
    message: str = ""  # only for the status ``build_error``

    @property
    def kernel(self) -> str:
        """The path of the kernel's source."""
        return str(_KERNELS[self.device].KERNEL)


@dataclass(frozen=True)
class Mistake:
    """A solution with one mistake. The text ``wrong`` occurs exactly once in the file ``path``; replacing it by
    ``right`` repairs the solution. ``status`` is the judge's status for the solution with the mistake. ``message`` is
    the compiler's first error, or empty if the solution compiles."""

    files: dict[str, str]
    path: str
    wrong: str
    right: str
    status: Literal["wrong", "build_error"]
    message: str = ""


def solve(task: Task, rng: random.Random, device: str = "cpu") -> Worked:
    """Returns a solution of ``task`` with a random design. If the design does not fit the task's shape, the solution is
    wrong or does not build. The result's ``status`` is the judge's status that the teacher predicts.

    Raises:
        ValueError: The task is not of the teacher's family (``family.make_task`` did not make it)."""
    spec = parse(task)
    return _worked(spec, device, _KERNELS[device].draw_design(spec, rng))


def solve_right(task: Task, rng: random.Random, device: str = "cpu") -> Worked:
    """Returns a solution of ``task`` that the teacher expects to be right: its random design fits the task's shape.

    Raises:
        ValueError: The task is not of the teacher's family (``family.make_task`` did not make it)."""
    while (worked := solve(task, rng, device)).status != "ok":
        pass
    return worked


def redesign(task: Task, worked: Worked, rng: random.Random) -> Worked:
    """Returns a solution like ``worked``, with one choice of the design drawn again. At least one file changes."""
    spec = parse(task)
    return _worked(spec, worked.device, _KERNELS[worked.device].redraw(spec, worked.design, rng))


def _worked(spec: FamilySpec, device: str, design: Any) -> Worked:
    kernels = _KERNELS[device]
    return Worked(kernels.files(spec, design), device, design, *kernels.fault(spec, design))


def spoil(task: Task, worked: Worked, rng: random.Random) -> Mistake:
    """Returns ``worked`` with one mistake: a wrong operator or constant, an undeclared name or (only on the CPU) a
    missing index."""
    spec, path, code = parse(task), worked.kernel, worked.files[worked.kernel]
    changes = (_another_step, _another_step, _undeclared, _unindexed if worked.device == "cpu" else _undeclared)
    while True:
        wrong, right, status, message = rng.choice(changes)(spec, code, rng)
        spoilt = code.replace(right, wrong)
        if code.count(right) == 1 and spoilt.count(wrong) == 1:
            files = worked.files | {path: spoilt}
            line = spoilt[: spoilt.index(wrong)].count("\n") + 1
            if message:
                place = f"{path}({line})" if worked.device == "cuda" else f"{path}:{line}"
                message = f"{place}: error: {message}"
            return Mistake(files, path, wrong, right, status, message)


_Change = tuple[str, str, Literal["wrong", "build_error"], str]  # wrong, right, status, compiler's message


def _another_step(spec: FamilySpec, code: str, rng: random.Random) -> _Change:
    while True:
        k = rng.randrange(len(spec.chain))
        name, constant = spec.chain[k]
        if constant and rng.random() < 0.5:
            constant = rng.choice(CONSTANTS)
        else:
            name = rng.choice([name for name in UNARY if not constant or OPERATORS[name].has_constant])
            constant = constant if OPERATORS[name].has_constant else None
        other = replace(spec, chain=(*spec.chain[:k], (name, constant), *spec.chain[k + 1 :]))
        if _differs(spec, other):
            return steps(other)[k], steps(spec)[k], "wrong", ""


def _differs(spec: FamilySpec, other: FamilySpec) -> bool:
    if any(OPERATORS[name].has_constant and not constant for name, constant in other.chain):
        return False
    try:
        one, two = chain_values(spec.chain), chain_values(other.chain)
    except (OverflowError, ValueError):
        return False
    one, two = one[1:-1], two[1:-1]
    ending = ENDINGS[spec.ending] if spec.ending else None
    if ending and (ending.maps or spec.operation == "var"):
        one, two = _standardised(one), _standardised(two)
    return sum(abs(a - b) > 0.25 * (1 + abs(b)) for a, b in zip(one, two, strict=True)) >= 4


def _standardised(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    scale = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
    return [(v - mean) / (scale or 1.0) for v in values]


def _unindexed(spec: FamilySpec, code: str, rng: random.Random) -> _Change:
    kind = "double" if "double v = x[i]" in code else "float"
    message = f"cannot convert 'const float*' to '{kind}' in initialization"
    return f"{kind} v = x;", f"{kind} v = x[i];", "build_error", message


def _undeclared(spec: FamilySpec, code: str, rng: random.Random) -> _Change:
    right = rng.choice(steps(spec))
    message = 'identifier "u" is undefined' if "__global__" in code else "'u' was not declared in this scope"
    return right.replace("v = ", "u = ", 1), right, "build_error", message
