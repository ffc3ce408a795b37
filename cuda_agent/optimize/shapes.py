"""Judges a solution at other shapes than those of its task.  A solution that is wrong there is called specialised.

A variant of a task is its source with other values of module-level constants, or with another size of the inputs' first
dimension. The list ``SHAPES`` in the source names variants, and the user can name others. Variants are checked, not
timed."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cuda_agent import syntax
from cuda_agent.errors import ConfigError, TaskError
from cuda_agent.sandbox.client import Sandbox
from cuda_agent.sandbox.wire import Solution, Status
from cuda_agent.tasks.task import Task

AUTO = "auto"
_DECLARED = "SHAPES"  # constant of a task: a list of dicts, each with values of other constants
_FIRST_DIMENSION = {  # of the tensor ``value``, with ``size`` rows
    "first dimension + 1": "torch.cat([value, value[:1]])",
    "first dimension / 2": "value[: max(1, size // 2)].clone()",
}
_RESIZED = """

def _resized(given=get_inputs):
    import torch

    values = list(given())
    sizes = [value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim()]
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == sizes[0]:
            size = sizes[0]
            values[index] = CHANGED
    return values


get_inputs = _resized
"""


@dataclass(frozen=True)
class Variant:
    """A task at another shape. ``name`` describes the shape: "batch_size=64" or "first dimension + 1"."""

    name: str
    task: Task


@dataclass(frozen=True)
class ShapeResult:
    """The result of checking a solution at one shape other than the task's own. ``status`` is that of the verdict, or
    ``no task`` if the task's model does not run at this shape."""

    name: str
    status: Status | Literal["no task"]
    message: str


def variants(task: Task, asked: Sequence[str]) -> list[Variant]:
    """Returns the variants of ``task`` that the strings in ``asked`` name.

    A string holds values of constants, as in ``"batch_size=64, dim=100"``, or is ``"auto"``. The string ``"auto"``
    names the variants in the task's list ``SHAPES``. If the task has no ``SHAPES``, ``"auto"`` names two variants: one
    adds a row to the inputs' first dimension, and one keeps half of the rows.

    Raises:
        ConfigError: A string or ``SHAPES`` is malformed, or names a constant that the task does not set."""
    found: list[Variant] = []
    for text in asked:
        if text != AUTO:
            found.append(_with_constants(task, _values(text)))
        elif declared := _declared(task):
            found += [_with_constants(task, values) for values in declared]
        else:
            for name, changed in _FIRST_DIMENSION.items():
                found.append(Variant(name, replace(task, code=task.code + _RESIZED.replace("CHANGED", changed))))
    return found


def _values(text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not call.keywords or call.args:
            raise ValueError("no constants")
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(f"--shapes {text}: expected {AUTO}, or constants as in batch_size=64,dim=100") from None


def _constants(task: Task) -> dict[str, ast.expr]:
    """Returns the module-level constants of the task's source: name -> syntax tree of the last value assigned to it."""
    found: dict[str, ast.expr] = {}
    for node in syntax.parse(task.code).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return found


def _declared(task: Task) -> list[dict[str, Any]]:
    if (given := _constants(task).get(_DECLARED)) is None:
        return []
    try:
        shapes = ast.literal_eval(given)
    except ValueError:
        shapes = None
    if not isinstance(shapes, list) or not all(isinstance(values, dict) and values for values in shapes):
        raise ConfigError(f"{_DECLARED} of task {task.name}: expected a list of dicts of plain values")
    return shapes


def _with_constants(task: Task, values: Mapping[str, Any]) -> Variant:
    """Returns the variant of ``task`` whose source sets constants to ``values``. If the source computes other constants
    from these, they change accordingly."""
    name = ", ".join(f"{name}={value!r}" for name, value in values.items())
    known, lines = _constants(task), task.code.encode().splitlines(keepends=True)
    if missing := [name for name in values if name not in known]:
        others = ", ".join(name for name in known if name != _DECLARED) or "none"
        raise ConfigError(f"--shapes {name}: the task sets no constant {missing[0]}; it sets: {others}")
    places = [(known[name], value) for name, value in values.items()]
    for node, value in sorted(places, key=lambda place: (place[0].lineno, place[0].col_offset), reverse=True):
        assert node.end_lineno and node.end_col_offset is not None
        before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [before + repr(value).encode() + after]
    return Variant(name, replace(task, code=b"".join(lines).decode()))


async def judge_shapes(sandbox: Sandbox, solution: Solution, chosen: Sequence[Variant]) -> list[ShapeResult]:
    """Checks ``solution`` for each variant in ``chosen``, without timing it. Returns one result per variant, in
    order."""
    results: list[ShapeResult] = []
    for variant in chosen:
        try:
            verdict = await sandbox.evaluate(variant.task, solution, "check")
            results.append(ShapeResult(variant.name, verdict.status, verdict.message))
        except TaskError as error:
            results.append(ShapeResult(variant.name, "no task", str(error)))
    return results


def shape_lines(results: Sequence[ShapeResult]) -> list[str]:
    """Returns one line of text per shape, and a last line that says whether the solution is specialised, that is, wrong
    at another shape."""
    lines = [f"shape {r.name}: {r.status}" + (f": {r.message}" if r.message else "") for r in results]
    tried = [result for result in results if result.status not in ("no task", "infra")]
    wrong = [result for result in tried if result.status != "ok"]
    if wrong:
        return [*lines, f"specialised: correct at the task's own shape, not at {len(wrong)} of {len(tried)} others"]
    if tried:
        return [*lines, f"not specialised: correct at the task's own shape and at {len(tried)} others"]
    return [*lines, "no other shape could be tried"]
