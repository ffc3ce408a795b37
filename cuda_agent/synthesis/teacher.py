"""Writes correct kernels for the tasks of ``family``, with randomly drawn designs: the scripted teacher.

``bootstrap`` trains a small model on the teacher's solutions; no later stage uses the teacher. Each choice of a design
is drawn uniformly, so kernels range from ten times slower than eager to several times faster than ``torch.compile``.
``spoil`` puts one realistic mistake into a solution, for episodes in which the agent repairs the mistake."""

import json
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from cuda_agent.synthesis.family import CONSTANTS, ENDINGS, OPERATORS, UNARY, FamilySpec, chain_values, parse
from cuda_agent.tasks.task import Task

KERNEL, PLAN = "kernels/fused.cpp", "plan.json"
ROWS = "in0.shape[0]"
GRIDS: tuple[int | str, ...] = (1, 2, 8, ROWS)
DESIGNS: dict[str, tuple[Any, ...]] = {
    "number": ("float", "double"),
    "order": ("chunk", "stride"),
    "grid": GRIDS,
    "passes": ("fused", "split"),
    "moments": ("one", "two"),
}


@dataclass(frozen=True)
class Choices:
    """The design of a kernel. Brackets hold how many times as long the slow choice takes (quartiles, two idle cores).

    ``number``  arithmetic type; "double" is slow (1.5-2; up to 4.5 in transcendental functions)
    ``order``   the elements of block b; "chunk": neighbours; "stride": b, b + grid, ..., which cannot be vectorised
                and lets threads share cache lines (5-30; near 1 if a block takes whole rows)
    ``grid``    number of blocks; 1: only one thread works (2); one block per row: one call per row (1.1-2)
    ``passes``  "fused": one loop over the elements; "split": one loop per operator, through memory (1.0-1.4)
    ``moments`` how a variance is computed; "one" pass: from sums of v and v * v; "two": the mean first (1.05-1.15)"""

    number: Literal["float", "double"]
    order: Literal["chunk", "stride"]
    grid: int | str
    passes: Literal["fused", "split"]
    moments: Literal["one", "two"]


@dataclass(frozen=True)
class Worked:
    """A correct solution in the ``plan`` format: its files (path -> text), and its design."""

    files: dict[str, str]
    choices: Choices


@dataclass(frozen=True)
class Mistake:
    """A solution with one mistake. The text ``wrong`` occurs exactly once in the file ``path``; replacing it by
    ``right`` repairs the solution. ``status`` is the judge's status, ``message`` the compiler's first error."""

    files: dict[str, str]
    path: str
    wrong: str
    right: str
    status: Literal["wrong", "build_error"]
    message: str = ""


def draw_choices(rng: random.Random) -> Choices:
    return Choices(**{choice: rng.choice(values) for choice, values in DESIGNS.items()})


def solve(task: Task, rng: random.Random, choices: Choices | None = None) -> Worked:
    """Returns a correct solution of ``task`` with the design ``choices``, by default a random design.

    Raises:
        ValueError: The task is not of the teacher's family."""
    choices = choices or draw_choices(rng)
    spec = parse(task)
    code = _rows(spec, choices) if spec.ending else _elements(spec, choices)
    return Worked({KERNEL: code, PLAN: plan(spec, choices)}, choices)


def redesign(worked: Worked, rng: random.Random) -> Choices:
    """Returns the design of ``worked`` with one choice, other than ``moments``, drawn anew."""
    field = rng.choice(("number", "order", "grid", "passes"))
    return replace(worked.choices, **{field: getattr(draw_choices(rng), field)})


def plan(spec: FamilySpec, choices: Choices) -> str:
    arguments = ["in0", *(["in1"] if spec.binary else []), *(["tmp"] if _workspace(spec, choices) else []), "out0"]
    arguments += ["in0.shape[0]", "in0.shape[1]"] if spec.ending else ["in0.numel"]
    node = {"kernel": KERNEL, "function": "fused", "grid": choices.grid, "args": arguments}
    workspaces = {"workspaces": {"tmp": {"size": "in0.numel"}}}
    return json.dumps((workspaces if "tmp" in arguments else {}) | {"nodes": [node]}) + "\n"


def _workspace(spec: FamilySpec, choices: Choices) -> bool:
    """Returns whether the kernel keeps the chain's values in a workspace, for a second loop of a reduction."""
    if spec.ending is None or ENDINGS[spec.ending].maps:
        return False
    return choices.passes == "split" or (spec.ending == "var" and choices.moments == "two")


def _signature(spec: FamilySpec, choices: Choices) -> str:
    inputs = "const float* x, const float* y" if spec.binary else "const float* x"
    buffers = ", float* b, float* z" if _workspace(spec, choices) else ", float* z"
    sizes = "long n, long m" if spec.ending else "long n"
    return f"#include <math.h>\nvoid fused(long block, long grid, {inputs}{buffers}, {sizes})"


def _steps(spec: FamilySpec) -> list[str]:
    return [f"v = {OPERATORS[name].cpp.replace('{c}', constant or '')};" for name, constant in spec.chain]


def _share(variable: str, choices: Choices) -> str:
    if choices.order == "chunk":
        return f"for (long {variable} = n * block / grid; {variable} < n * (block + 1) / grid; {variable}++)"
    return f"for (long {variable} = block; {variable} < n; {variable} += grid)"


def _load(source: str, step_names: list[str], choices: Choices) -> str:
    second = ", w = y[i]" if any(OPERATORS[name].binary for name in step_names) else ""
    return f"{choices.number} v = {source}[i]{second};"


def _elements(spec: FamilySpec, choices: Choices) -> str:
    steps, names = _steps(spec), [name for name, _ in spec.chain]
    groups = [slice(0, None)] if choices.passes == "fused" else [slice(k, k + 1) for k in range(len(steps))]
    lines = []
    for k, group in enumerate(groups):
        body = [_load("z" if k else "x", names[group], choices), *steps[group], "z[i] = v;"]
        lines += [f"  {_share('i', choices)} {{", *(f"    {line}" for line in body), "  }"]
    return f"{_signature(spec, choices)} {{\n" + "\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class _Reduction:
    """The C++ code of a row-wise ending, in parts."""

    start: str  # declares the sums
    add: str  # adds the value ``v`` to the sums
    then: tuple[str, ...] = ()  # further statements; "@" stands for the row's buffer, "loop:" for a loop over the row
    result: str = ""  # the output, if it is one value per row


_LARGEST = "s = -1e30f, t = 0", "s = v > s ? v : s;"
_MOMENTS, _MEAN = ("s = 0, t = 0", "s += v; t += v * v;"), ("s = 0, t = 0", "s += v;")
_VARIANCE = "s /= m;", "loop: t += (@[i] - s) * (@[i] - s);"
_REDUCTIONS: dict[str, _Reduction] = {
    "sum": _Reduction("s = 0", "s += v;", result="s"),
    "mean": _Reduction("s = 0", "s += v;", result="s / m"),
    "amax": _Reduction("s = -1e30f", "s = v > s ? v : s;", result="s"),
    "amin": _Reduction("s = 1e30f", "s = v < s ? v : s;", result="s"),
    "norm": _Reduction("s = 0", "s += v * v;", result="sqrt(s)"),
    "var": _Reduction(*_MOMENTS, result="(t - s * s / m) / (m - 1)"),
    "var two": _Reduction(*_MEAN, _VARIANCE, "t / (m - 1)"),
    "softmax": _Reduction(*_LARGEST, ("loop: t += @[i] = exp(@[i] - s);", "loop: @[i] /= t;")),
    "log_softmax": _Reduction(*_LARGEST, ("loop: t += exp(@[i] - s);", "s += log(t);", "loop: @[i] -= s;")),
    "normalize": _Reduction("s = 0", "s += v * v;", ("s = 1 / (sqrt(s) + 1e-12f);", "loop: @[i] *= s;")),
    "rms_norm": _Reduction("s = 0", "s += v * v;", ("s = 1 / sqrt(s / m + 1e-7f);", "loop: @[i] *= s;")),
    "layer_norm": _Reduction(
        *_MOMENTS, ("s /= m;", "t = 1 / sqrt(t / m - s * s + 1e-5f);", "loop: @[i] = (@[i] - s) * t;")
    ),
    "layer_norm two": _Reduction(*_MEAN, (*_VARIANCE, "t = 1 / sqrt(t / m + 1e-5f);", "loop: @[i] = (@[i] - s) * t;")),
}
_ROW = "for (long i = r * m; i < r * m + m; i++)"


def _rows(spec: FamilySpec, choices: Choices) -> str:
    assert spec.ending is not None
    reduction = _REDUCTIONS.get(f"{spec.ending} {choices.moments}") or _REDUCTIONS[spec.ending]
    buffer = "b" if _workspace(spec, choices) else "z"
    kept = ENDINGS[spec.ending].maps or buffer == "b"
    body = [_load("x", [name for name, _ in spec.chain], choices), *_steps(spec), *([f"{buffer}[i] = v;"] * kept)]
    lines = [f"{choices.number} {reduction.start};", f"{_ROW} {{", *(f"  {line}" for line in body)]
    if choices.passes == "split":
        lines += ["}", f"{_ROW} {{", f"  {choices.number} v = {buffer}[i];"]
    lines += [f"  {reduction.add}", "}"]
    lines += [line.replace("loop:", _ROW).replace("@", buffer) for line in reduction.then]
    lines += [f"z[r] = {reduction.result};"] * bool(reduction.result)
    inner = "".join(f"    {line}\n" for line in lines)
    return f"{_signature(spec, choices)} {{\n  {_share('r', choices)} {{\n{inner}  }}\n}}\n"


def spoil(task: Task, worked: Worked, rng: random.Random) -> Mistake:
    """Returns ``worked`` with one mistake: a wrong operator or constant, a missing index, or an undeclared name."""
    spec, code = parse(task), worked.files[KERNEL]
    while True:
        change = rng.choice((_another_step, _another_step, _unindexed, _undeclared))
        wrong, right, status, message = change(spec, code, rng)
        spoilt = code.replace(right, wrong)
        if code.count(right) == 1 and spoilt.count(wrong) == 1:
            files = worked.files | {KERNEL: spoilt}
            line = spoilt[: spoilt.index(wrong)].count("\n") + 1
            return Mistake(files, KERNEL, wrong, right, status, f"{KERNEL}:{line}: error: {message}" if message else "")


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
            return _steps(other)[k], _steps(spec)[k], "wrong", ""


def _differs(spec: FamilySpec, other: FamilySpec) -> bool:
    if any(OPERATORS[name].has_constant and not constant for name, constant in other.chain):
        return False
    try:
        one, two = chain_values(spec.chain), chain_values(other.chain)
    except (OverflowError, ValueError):
        return False
    one, two = one[1:-1], two[1:-1]
    ending = ENDINGS[spec.ending] if spec.ending else None
    if ending and (ending.maps or spec.ending == "var"):
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
    right = rng.choice(_steps(spec))
    return right.replace("v = ", "u = ", 1), right, "build_error", "'u' was not declared in this scope"
