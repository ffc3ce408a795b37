"""Evaluates the integer expressions in a plan. A plan (``plan.json``) lists kernel launches and other operations.

An expression may contain integers, names of numbers, ``+ - * // %``, comparisons, and the shapes of buffers, such as
``in0.shape[1]``. It may call ``min``, ``max``, ``cdiv`` (division, rounded up) and ``select`` (condition, value if
true, value if false)."""

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cuda_agent import syntax
from cuda_agent.sandbox.formats.solution_format import SolutionError
from cuda_agent.sandbox.wire import Tensor


class PlanError(SolutionError):
    """``plan.json`` is invalid. The message tells the plan's author where and why."""


@dataclass(frozen=True)
class Buffer:
    name: str
    tensor: Tensor


_CALLS = {"min": (2, 9), "max": (2, 9), "cdiv": (2, 2), "select": (3, 3)}
_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_DIVIDING = (ast.FloorDiv, ast.Mod)
_COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_LIMIT = 1 << 62
LONGEST = 500  # characters


def evaluate(expression: Any, names: dict[str, Any], where: str) -> int:
    """Returns the integer value of ``expression``: an integer, or text such as ``cdiv(in0.numel, 8) * in0.shape[1]``.
    ``names`` maps each name that the text may contain to its buffer or number. Raises ``PlanError`` with a message that
    begins with ``where``."""
    if isinstance(expression, bool) or not isinstance(expression, int | str):
        raise PlanError(f"{where}: an integer or an expression is expected, not {json.dumps(expression)[:60]}")
    if isinstance(expression, int):
        return _bounded(expression, where)
    if len(expression) > LONGEST:
        raise PlanError(f"{where}: an expression of more than {LONGEST} characters")
    weights: dict[str, Any] = {}
    text = re.sub(r"\bw:[\w.]+", lambda match: _weight_name(match.group(), names, weights), expression)
    try:
        tree = syntax.parse_expression(text)
        return _value(tree, names | weights, where, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{where}: {expression!r} is neither a buffer nor an expression") from None


def _weight_name(text: str, names: dict[str, Any], weights: dict[str, Any]) -> str:
    """Replaces the name of a weight at the start of ``text`` by a new Python identifier, because ``ast`` cannot parse
    names such as ``w:linear.weight``. Adds the identifier to ``weights``. Returns the new text, or ``text`` if no
    weight has such a name. For example, ``w:linear.weight.numel`` becomes ``weight0.numel``."""
    fitting = [name for name in names if name.startswith("w:") and f"{text}.".startswith(f"{name}.")]
    known = max(fitting, key=len, default="")
    if not known:
        return text
    alias = f"weight{len(weights)}"
    while alias in names:  # a workspace of the plan
        alias += "_"
    weights[alias] = names[known]
    return alias + text[len(known) :]


def _value(node: ast.expr, names: dict[str, Any], where: str, whole: str) -> int:
    def value(part: ast.expr) -> int:
        return _value(part, names, where, whole)

    match node:
        case ast.Constant(value=bool() | int() as number):
            return _bounded(int(number), where)
        case ast.Name(id=name):
            found = names.get(name)
            if isinstance(found, Buffer):
                raise PlanError(f"{where}: {name} is a buffer; use {name}.numel or {name}.shape[i] in {whole!r}")
            if not isinstance(found, int):
                raise PlanError(f"{where}: there is no {name} (there are {known(names)})")
            return int(found)
        case ast.Attribute(value=ast.Name(id=name), attr="numel" | "ndim" as what):
            shape = _shape(name, names, where)
            return math.prod(shape) if what == "numel" else len(shape)
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=position):
            shape, index = _shape(name, names, where), value(position)
            if not -len(shape) <= index < len(shape):
                raise PlanError(f"{where}: {name} has {len(shape)} dimensions, there is no shape[{index}]")
            return shape[index]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = value(left), value(right)
            if type(op) not in _BINARY:
                raise PlanError(f"{where}: {whole!r}: only + - * // and % are possible")
            return _bounded(_BINARY[type(op)](a, _divisor(b, where) if isinstance(op, _DIVIDING) else b), where)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            return int(_COMPARISONS[type(op)](value(left), value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            low, high = _CALLS[name]
            if not low <= len(args) <= high:
                raise PlanError(f"{where}: {name} takes {low} arguments, not {len(args)}")
            values = [value(argument) for argument in args]
            if name == "select":
                return values[1] if values[0] else values[2]
            if name == "cdiv":
                return -(-values[0] // _divisor(values[1], where))
            return min(values) if name == "min" else max(values)
    raise PlanError(f"{where}: {ast.unparse(node)!r} is not possible in an expression")


def _divisor(value: int, where: str) -> int:
    if value == 0:
        raise PlanError(f"{where}: division by zero")
    return value


def _bounded(value: int, where: str) -> int:
    if abs(value) > _LIMIT:
        raise PlanError(f"{where}: the value is too large")
    return value


def _shape(name: str, names: dict[str, Any], where: str) -> tuple[int, ...]:
    buffer = names.get(name)
    if not isinstance(buffer, Buffer):
        raise PlanError(f"{where}: there is no buffer {name} (there are {known(names)})")
    return buffer.tensor.shape


def known(names: dict[str, Any]) -> str:
    weights = {name for name, value in names.items() if isinstance(value, Buffer) and value.name.startswith("w:")}
    return ", ".join(name for name in names if name not in weights) or "none"
