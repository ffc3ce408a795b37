"""The plan lane: reading ``plan.json``, and turning it into a program for the executor.

``compile_plan`` is pure: it checks the plan against the task's shapes, evaluates every integer expression, and writes
the C++ trampoline through which the executor calls the kernels.  Errors name the node.  Nothing is built or run here,
and the keys that only ``cuda`` has (block, shared memory, cluster, library nodes) are refused on the CPU.
"""

import ast
import json
import math
import re
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

from cuda_agent.sandbox.buffers import byte_count
from cuda_agent.sandbox.wire import TaskSpec, Tensor

_C_TYPES = {
    "float32": "float", "float64": "double", "float16": "unsigned short", "bfloat16": "unsigned short", "int64": "long",
    "int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
    "complex64": "float", "complex128": "double",
}  # fmt: skip
DTYPES = frozenset(_C_TYPES)
_FORMATS = {
    "float32": "f",
    "float64": "d",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint8": "B",
    "bool": "B",
}
WORKSPACE_DTYPES = frozenset(_FORMATS)
_FUNCTION = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*\s*(<[\w\s,:.+-]*>)?")
_MOST_NODES, _MOST_BLOCKS, _MOST_WORKSPACE = 256, 1 << 24, 1 << 30


class PlanError(ValueError):
    """What is wrong with the plan, and where: for its author."""


@dataclass
class Program:
    """What the executor runs.  Buffers are named ``in:0``, ``out:0``, ``w:0`` (by position) and ``ws:name``."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    workspaces: dict[str, dict[str, Any]] = field(default_factory=dict)  # bytes, and a pattern as hex
    trampoline: str = ""  # C++; empty when there is no kernel

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "trampoline"}


@dataclass(frozen=True)
class _Buffer:
    name: str
    tensor: Tensor


def compile_plan(files: dict[str, str], spec: TaskSpec) -> Program:
    """The program of ``files["plan.json"]`` for a task with these shapes.  Raises ``PlanError``."""
    if "plan.json" not in files:
        raise PlanError("there is no plan.json")
    try:
        plan = json.loads(files["plan.json"])
    except (ValueError, RecursionError) as error:
        raise PlanError(f"plan.json is not JSON: {error}") from None
    _object(plan, "plan.json", {"nodes"}, {"nodes", "workspaces", "guards"})
    names = _names(spec)
    program = Program()
    for name, item in _object(plan.get("workspaces", {}), "workspaces").items():
        names[name] = _workspace(name, item, names, program)
    for index, guard in enumerate(_list(plan.get("guards", []), "guards")):
        if not evaluate(guard, names, f"guards[{index}]"):
            raise PlanError(f"guards[{index}]: {guard!r} does not hold for this task's shapes")
    nodes = _list(plan["nodes"], "nodes")
    if not 0 < len(nodes) <= _MOST_NODES:
        raise PlanError(f"nodes: 1 to {_MOST_NODES} are possible, not {len(nodes)}")
    sources: list[str] = []
    calls: list[str] = []
    for index, node in enumerate(nodes):
        where = f"nodes[{index}]"
        if isinstance(node, dict) and "memset" in node:
            program.nodes.append(_memset(node, where, names))
        elif isinstance(node, dict) and "library" in node:
            raise PlanError(f"{where}: library nodes do not exist on cpu")
        else:
            item, call = _kernel(node, where, names, files, sources, index)
            program.nodes.append(item)
            calls.append(call)
    written = {name for node in program.nodes for name in _buffers(node)}
    for index in range(len(spec.outputs)):
        if f"out:{index}" not in written:
            raise PlanError(f"no node uses out{index}")
    if calls:
        program.trampoline = "".join(f'#include "{path}"\n' for path in sources) + "\n".join(calls) + "\n"
    return program


def _buffers(node: dict[str, Any]) -> list[str]:
    return [node["memset"]] if "memset" in node else [a["buffer"] for a in node["args"] if "buffer" in a]


def _names(spec: TaskSpec) -> dict[str, Any]:
    """What expressions and arguments may name: buffers and plain numbers."""
    names: dict[str, Any] = {}

    def leaves(arguments: Any) -> list[Any]:
        return [leaf for a in arguments for leaf in (leaves(a) if isinstance(a, list) else [a])]

    for index, leaf in enumerate(leaves(spec.arguments)):
        if "tensor" in leaf:
            names[f"in{index}"] = _Buffer(f"in:{leaf['tensor']}", spec.inputs[leaf["tensor"]])
        elif isinstance(leaf["value"], int | float):
            names[f"in{index}"] = leaf["value"]
    for index, tensor in enumerate(spec.outputs):
        names[f"out{index}"] = _Buffer(f"out:{index}", tensor)
    for index, (name, tensor) in enumerate(spec.weights.items()):
        names[f"w:{name}"] = _Buffer(f"w:{index}", tensor)
    for index, item in enumerate(spec.init):
        if isinstance(item.get("value"), int | float):
            names[f"init{index}"] = item["value"]
    return names


def _workspace(name: str, item: Any, names: dict[str, Any], program: Program) -> _Buffer:
    where = f"workspaces.{name}"
    if not name.isidentifier() or re.fullmatch(r"(in|out|init)\d+", name):
        raise PlanError(f"{where}: not a name for a workspace")
    _object(item, where, {"size"}, {"size", "dtype", "init"})
    dtype = item.get("dtype", "float32")
    if dtype not in _FORMATS:
        raise PlanError(f"{where}.dtype: {dtype!r} is none of {', '.join(_FORMATS)}")
    size = evaluate(item["size"], names, f"{where}.size")
    buffer = _Buffer(f"ws:{name}", Tensor((size,), dtype))
    if size < 0 or byte_count(buffer.tensor) > _MOST_WORKSPACE:
        raise PlanError(f"{where}.size: {size} elements are not possible")
    try:
        pattern = struct.pack("<" + _FORMATS[dtype], item.get("init", 0))
    except (struct.error, OverflowError):
        raise PlanError(f"{where}.init: {item.get('init')!r} is no {dtype}") from None
    program.workspaces[name] = {"bytes": byte_count(buffer.tensor), "pattern": pattern.hex()}
    return buffer


def _memset(node: dict[str, Any], where: str, names: dict[str, Any]) -> dict[str, Any]:
    _object(node, where, {"memset"}, {"memset", "value"})
    buffer = names.get(node["memset"]) if isinstance(node["memset"], str) else None
    if not isinstance(buffer, _Buffer) or buffer.name.startswith(("in:", "w:")):
        raise PlanError(f"{where}.memset: {node['memset']!r} is no output and no workspace")
    value = node.get("value", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 255:
        raise PlanError(f"{where}.value: a byte from 0 to 255, not {value!r}")
    return {"memset": buffer.name, "bytes": byte_count(buffer.tensor), "value": value}


def _kernel(
    node: Any, where: str, names: dict[str, Any], files: dict[str, str], sources: list[str], index: int
) -> tuple[dict[str, Any], str]:
    _object(node, where, {"kernel", "function"}, {"kernel", "function", "grid", "args"})
    path, function = node["kernel"], node["function"]
    if not isinstance(path, str) or path not in files:
        raise PlanError(f"{where}.kernel: there is no file {path!r}")
    if not isinstance(function, str) or not _FUNCTION.fullmatch(function):
        raise PlanError(f"{where}.function: {function!r} is no name of a function")
    grid = evaluate(node.get("grid", 1), names, f"{where}.grid")
    if not 0 < grid <= _MOST_BLOCKS:
        raise PlanError(f"{where}.grid: 1 to {_MOST_BLOCKS} blocks are possible, not {grid}")
    arguments: list[dict[str, Any]] = []
    spelled = ["block", "grid"]
    for position, argument in enumerate(_list(node.get("args", []), f"{where}.args")):
        value = names.get(argument) if isinstance(argument, str) else None
        cell = f"a[{position}]"
        if isinstance(value, _Buffer):
            arguments.append({"buffer": value.name})
            spelled.append(f"({_C_TYPES[value.tensor.dtype]}*){cell}")
        elif isinstance(value, float) or isinstance(argument, float):
            arguments.append({"float": value if isinstance(value, float) else argument})
            spelled.append(f"*(double*){cell}")
        else:
            arguments.append({"int": evaluate(argument, names, f"{where}.args[{position}]")})
            spelled.append(f"*(long*){cell}")
    if path not in sources:
        sources.append(path)
    call = (
        f'#line 1 "plan.json {where}"\n'
        f'extern "C" void node{index}(long block, long grid, void** a) {{ {function}({", ".join(spelled)}); }}'
    )
    return {"symbol": f"node{index}", "grid": grid, "args": arguments}, call


def _object(value: Any, where: str, needed: set[str] | None = None, known: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: an object is expected, not {json.dumps(value)[:60]}")
    for key in sorted((needed or set()) - value.keys()):
        raise PlanError(f"{where}: {key!r} is missing")
    for key in sorted(value.keys() - (known if known is not None else value.keys())):
        raise PlanError(f"{where}: {key!r} is unknown; there are {', '.join(sorted(known or ()))}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{where}: a list is expected, not {json.dumps(value)[:60]}")
    return value


# -------------------------------------------------------------------------------------------------- integer expressions

_CALLS = {"min": (2, 9), "max": (2, 9), "cdiv": (2, 2), "select": (3, 3)}
_LIMIT = 1 << 62


def evaluate(expression: Any, names: dict[str, Any], where: str) -> int:
    """An integer: a number, or an expression such as ``cdiv(in0.numel, 8) * in0.shape[1]``.  Raises ``PlanError``."""
    if isinstance(expression, bool) or not isinstance(expression, int | str):
        raise PlanError(f"{where}: an integer or an expression is expected, not {json.dumps(expression)[:60]}")
    if isinstance(expression, int):
        return _bounded(expression, where)
    if len(expression) > 500:
        raise PlanError(f"{where}: an expression of more than 500 characters")
    text = re.sub(r"\bw:[\w.]+", lambda match: _weight_name(match.group(), names), expression)
    try:
        tree = ast.parse(text, mode="eval").body
        return _value(tree, names, where, expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{where}: {expression!r} is neither a buffer nor an expression") from None


def _weight_name(text: str, names: dict[str, Any]) -> str:
    """``w:linear.weight.numel`` holds dots of both kinds: the longest known weight is the name."""
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
            if isinstance(found, _Buffer):
                raise PlanError(f"{where}: {name} is a buffer; use {name}.numel or {name}.shape[i] in {whole!r}")
            if not isinstance(found, int):
                raise PlanError(f"{where}: there is no {name} (there are {_known(names)})")
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
    if not isinstance(buffer, _Buffer):
        raise PlanError(f"{where}: there is no buffer {name} (there are {_known(names)})")
    return buffer.tensor.shape


def _known(names: dict[str, Any]) -> str:
    return ", ".join(name for name in names if not name.startswith(("w:", "weight"))) or "none"
