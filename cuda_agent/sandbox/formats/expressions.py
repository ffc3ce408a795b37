"""Evaluates the integer expressions of a plan: shapes, numbers, ``+ - * // %``, comparisons, min, max, cdiv, select.
Pure.
"""

import ast
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from cuda_agent.sandbox.formats.solution_format import SolutionError
from cuda_agent.sandbox.wire import Tensor


class PlanError(SolutionError):
    """The plan is invalid; the message tells its author where and why."""


@dataclass(frozen=True)
class Buffer:
    name: str
    tensor: Tensor


_CALLS = {"min": (2, 9), "max": (2, 9), "cdiv": (2, 2), "select": (3, 3)}
_LIMIT = 1 << 62
LONGEST = 500  # characters


def evaluate(expression: Any, names: dict[str, Any], where: str) -> int:
    """Evaluates a number, or an expression such as ``cdiv(in0.numel, 8) * in0.shape[1]``, to an integer.

    Raises:
        PlanError: The expression is invalid, or names an unknown buffer."""
    if isinstance(expression, bool) or not isinstance(expression, int | str):
        raise PlanError(f"{where}: an integer or an expression is expected, not {json.dumps(expression)[:60]}")
    if isinstance(expression, int):
        return _bounded(expression, where)
    if len(expression) > LONGEST:
        raise PlanError(f"{where}: an expression of more than {LONGEST} characters")
    text = re.sub(r"\bw:[\w.]+", lambda match: _weight_name(match.group(), names), expression)
    try:
        tree = ast.parse(text, mode="eval").body
        return _value(tree, names, where, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{where}: {expression!r} is neither a buffer nor an expression") from None


def _weight_name(text: str, names: dict[str, Any]) -> str:
    """Returns the longest weight name that ``text`` begins with: ``w:linear.weight.numel`` has dots of two kinds."""
    known = max(
        (n for n in names if n.startswith("w:") and (text == n or text.startswith(n + "."))), key=len, default=""
    )
    if not known:
        return text
    alias = "weight_" + re.sub(r"\W", "_", known)
    names[alias] = names[known]
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
            return _bounded(_operate(op, value(left), value(right), where, whole), where)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            a, b = value(left), value(right)
            table: dict[type, bool] = {
                ast.Eq: a == b, ast.NotEq: a != b, ast.Lt: a < b, ast.LtE: a <= b, ast.Gt: a > b, ast.GtE: a >= b,
            }  # fmt: skip
            if type(op) in table:
                return int(table[type(op)])
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


def _operate(op: ast.operator, a: int, b: int, where: str, whole: str) -> int:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.FloorDiv():
            return a // _divisor(b, where)
        case ast.Mod():
            return a % _divisor(b, where)
    raise PlanError(f"{where}: {whole!r}: only + - * // and % are possible")


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
    return ", ".join(name for name in names if not name.startswith(("w:", "weight"))) or "none"
