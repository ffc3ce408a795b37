"""Builds solutions in the plan format. A plan (``plan.json``) is a list of operations (nodes), such as kernel launches.
This module compiles a plan into a ``Program``, which an executor in a worker (the process that runs the solution)
executes.

``grammar`` parses the fields of a plan. ``compile_plan`` checks the plan against the task's shapes, evaluates every
expression, and generates source code. On the CPU, this is C++ code through which the executor calls the kernels. On a
GPU, it is CUDA code that includes the kernels' files. For each kernel, the CUDA code also declares a string with one
letter for the type of each argument. The worker reads this string to pass each argument in the right type."""

import re
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_agent.errors import SandboxUnready
from cuda_agent.sandbox.build.builder import Builder, BuildError
from cuda_agent.sandbox.build.toolchain import CompilerMissing
from cuda_agent.sandbox.formats import grammar, library_nodes
from cuda_agent.sandbox.formats.expressions import Buffer, PlanError, evaluate
from cuda_agent.sandbox.formats.grammar import PACKED, Kernel, Memset, Workspace
from cuda_agent.sandbox.formats.solution_format import Toolchain
from cuda_agent.sandbox.judge.memory.buffers import byte_count
from cuda_agent.sandbox.wire import MOST_SHARED, TaskSpec, Tensor

_C_TYPES = {
    "float32": "float", "float64": "double", "float16": "unsigned short", "bfloat16": "unsigned short", "int64": "long",
    "int32": "int", "int16": "short", "int8": "signed char", "uint8": "unsigned char", "bool": "bool",
    "complex64": "float", "complex128": "double",
}  # fmt: skip
DTYPES = frozenset(_C_TYPES)
_RUNTIME = Path(__file__).parents[1] / "worker" / "runtime.cpp"
_MOST_BLOCKS, _MOST_WORKSPACE = 1 << 24, 1 << 30
_MOST_GRID, _MOST_BLOCK, _MOST_THREADS = ((1 << 31) - 1, 65535, 65535), (1024, 1024, 64), 1024

# Kinds of kernel arguments that the compiler reports to the launcher: one letter each.
_SIGNATURES = """
template <class T> struct plan_code { static constexpr char value = '?'; };
template <class T> struct plan_code<T*> { static constexpr char value = 'p'; };
#define PLAN_CODE(type, letter) template <> struct plan_code<type> { static constexpr char value = letter; };
PLAN_CODE(float, 'f') PLAN_CODE(double, 'd') PLAN_CODE(bool, 'B')
PLAN_CODE(int, 'i') PLAN_CODE(unsigned, 'I') PLAN_CODE(long, 'q') PLAN_CODE(unsigned long, 'Q')
PLAN_CODE(long long, 'q') PLAN_CODE(unsigned long long, 'Q') PLAN_CODE(short, 'h') PLAN_CODE(unsigned short, 'H')
PLAN_CODE(char, 'b') PLAN_CODE(signed char, 'b') PLAN_CODE(unsigned char, 'B')
template <class F> struct plan_signature;
template <class... A> struct plan_signature<void(A...)> {
  char codes[sizeof...(A) + 1] = {plan_code<A>::value..., 0};  // an argument a letter
};
"""


@dataclass
class Program:
    """A plan (``plan.json``) that is compiled for the executor, the code that runs plans in a worker. The nodes refer
    to buffers by name: ``in:0`` is the first input, ``out:0`` the first output, ``w:0`` the first weight, and
    ``ws:name`` the workspace ``name``."""

    nodes: list[dict[str, Any]] = field(default_factory=list)
    workspaces: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> {"bytes": size, "pattern": as hex}
    source: str = ""  # source to compile; empty without kernels
    expressions: list[str] = field(default_factory=list)  # cuda: kernels, and variables that tell their argument types

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("source", "expressions")}


async def build(files: Mapping[str, str], spec: TaskSpec, tools: Toolchain) -> dict[str, Any]:
    """Compiles the plan, builds its kernels, and returns the request that makes a worker (the process that runs a
    solution) load the solution. The request holds the program and the paths of the built files. On the CPU, these are
    the libraries of the executor and of the kernels. On a GPU, it is the kernels' cubin. Raises ``PlanError`` for an
    invalid plan, ``BuildError`` if the kernels do not compile, ``CompilerMissing`` if NVRTC is missing on a GPU, and
    ``SandboxUnready`` if the executor for the CPU does not build."""
    program = compile_plan(files, spec, tools.device)
    sources = {name: text for name, text in files.items() if name != "plan.json"}
    load = program.to_json()
    if tools.device == "cuda":
        load |= {"image": "", "names": {}}
        if program.source:
            sources["plan.cu"] = program.source
            built = await tools.builder.kernels(sources, "plan.cu", program.expressions, tools.architecture)
            load |= {"image": str(built[0]), "names": built[1]}
        return load
    load |= {"runtime": str(await runtime(tools.builder)), "library": None}
    if program.source:
        sources["trampoline.cpp"] = program.source
        load["library"] = str(await tools.builder.library(sources, ["trampoline.cpp"]))
    return load


async def runtime(builder: Builder) -> Path:
    """Builds the executor, a shared library that runs plans on the CPU, and returns its path. Raises ``SandboxUnready``
    if the C++ compiler fails or is missing."""
    try:
        return await builder.library({"runtime.cpp": _RUNTIME.read_text()}, ["runtime.cpp"], ours=True)
    except (BuildError, CompilerMissing) as error:
        raise SandboxUnready(f"the C++ compiler does not work in the sandbox: {error}") from None


def compile_plan(files: Mapping[str, str], spec: TaskSpec, device: str = "cpu") -> Program:
    """Compiles ``plan.json`` for the shapes of ``spec``. Raises ``PlanError`` with a message that names the node and
    the fault."""
    if "plan.json" not in files:
        raise PlanError("there is no plan.json")
    plan = grammar.read(files["plan.json"], device)
    names = _names(spec)
    program = Program()
    for name, number in plan.constants.items():
        if not (_is_free(name, names) and name.isascii()):
            raise PlanError(f"constants.{name}: not a name for a constant")
        names[name] = number
    for name, workspace in plan.workspaces.items():
        names[name] = _workspace(name, workspace, names, program)
    for index, guard in enumerate(plan.guards):
        if not evaluate(guard, names, f"guards[{index}]"):
            raise PlanError(f"guards[{index}]: {guard!r} does not hold for this task's shapes")
    sources: list[str] = []
    calls: list[str] = []
    for index, node in enumerate(plan.nodes):
        where = f"nodes[{index}]"
        if isinstance(node, Memset):
            program.nodes.append(_memset(node, where, names))
        elif isinstance(node, Kernel):
            if node.kernel not in files:
                raise PlanError(f"{where}.kernel: there is no file {node.kernel!r}")
            describe = _function if device == "cpu" else _kernel
            item, call = describe(node, where, names, index)
            program.nodes.append(item)
            calls.append(call)
            if node.kernel not in sources:
                sources.append(node.kernel)
        else:
            program.nodes.append(library_nodes.describe(node, where, names, device))
    written = {name for node in program.nodes for name in _buffers(node)}
    for index in range(len(spec.outputs)):
        if f"out:{index}" not in written:
            raise PlanError(f"no node uses out{index}")
    if calls:
        head = "".join(f"constexpr int {name} = {number};\n" for name, number in plan.constants.items())
        head += "".join(f'#include "{path}"\n' for path in sources) + (_SIGNATURES if device == "cuda" else "")
        program.source = head + "\n".join(calls) + "\n"
    if device == "cuda":
        kernels = [node for node in program.nodes if "symbol" in node]
        program.expressions = sorted({name for node in kernels for name in (node["symbol"], f"&{node['codes']}")})
    return program


def _buffers(node: dict[str, Any]) -> list[str]:
    if "memset" in node:
        return [node["memset"]]
    if "library" in node:
        return [node["writes"]]
    return [a["buffer"] for a in node["args"] if "buffer" in a]


def _names(spec: TaskSpec) -> dict[str, Any]:
    """Returns a dictionary from the names that a plan may use to their values. A value is a buffer of the task, such as
    ``in0``, or a plain number: an argument of ``forward``, or a number from ``get_init_inputs()`` such as ``init1``."""
    names: dict[str, Any] = {}

    def leaves(arguments: Any) -> list[Any]:
        return [leaf for a in arguments for leaf in (leaves(a) if isinstance(a, list) else [a])]

    for index, leaf in enumerate(leaves(spec.arguments)):
        if "tensor" in leaf:
            names[f"in{index}"] = Buffer(f"in:{leaf['tensor']}", spec.inputs[leaf["tensor"]])
        elif isinstance(leaf["value"], int | float):
            names[f"in{index}"] = leaf["value"]
    for index, tensor in enumerate(spec.outputs):
        names[f"out{index}"] = Buffer(f"out:{index}", tensor)
    for index, (name, tensor) in enumerate(spec.weights.items()):
        names[f"w:{name}"] = Buffer(f"w:{index}", tensor)
    for index, item in enumerate(spec.init):
        if isinstance(item.get("value"), int | float):
            names[f"init{index}"] = item["value"]
    return names


def _is_free(name: str, names: dict[str, Any]) -> bool:
    """Returns whether a workspace or a constant may be called ``name``. ``names`` holds the names in use."""
    return name.isidentifier() and not re.fullmatch(r"(in|out|init)\d+", name) and name not in names


def _workspace(name: str, item: Workspace, names: dict[str, Any], program: Program) -> Buffer:
    where = f"workspaces.{name}"
    if not _is_free(name, names):
        raise PlanError(f"{where}: not a name for a workspace")
    size = evaluate(item.size, names, f"{where}.size")
    buffer = Buffer(f"ws:{name}", Tensor((size,), item.dtype))
    if size < 0 or byte_count(buffer.tensor) > _MOST_WORKSPACE:
        raise PlanError(f"{where}.size: {size} elements are not possible")
    try:
        pattern = struct.pack("<" + PACKED[item.dtype], item.init)
    except (struct.error, OverflowError):
        raise PlanError(f"{where}.init: {item.init!r} is no {item.dtype}") from None
    program.workspaces[name] = {"bytes": byte_count(buffer.tensor), "pattern": pattern.hex()}
    return buffer


def _memset(node: Memset, where: str, names: dict[str, Any]) -> dict[str, Any]:
    buffer = names.get(node.memset)
    if not isinstance(buffer, Buffer) or buffer.name.startswith(("in:", "w:")):
        raise PlanError(f"{where}.memset: {node.memset!r} is no output and no workspace")
    return {"memset": buffer.name, "bytes": byte_count(buffer.tensor), "value": node.value}


def _function(node: Kernel, where: str, names: dict[str, Any], index: int) -> tuple[dict[str, Any], str]:
    """Returns the item of ``Program.nodes`` for the C++ kernel ``node``, and the source of a function through which the
    executor calls the kernel."""
    grid = evaluate(node.grid, names, f"{where}.grid")
    if not 0 < grid <= _MOST_BLOCKS:
        raise PlanError(f"{where}.grid: 1 to {_MOST_BLOCKS} blocks are possible, not {grid}")
    arguments = _arguments(node, where, names)
    spelled = ["block", "grid"]
    for position, argument in enumerate(arguments):
        if "buffer" in argument:
            spelled.append(f"({_C_TYPES[argument.pop('dtype')]}*)a[{position}]")
        else:
            spelled.append(f"*({'double' if 'float' in argument else 'long'}*)a[{position}]")
    call = (
        f'#line 1 "plan.json {where}"\n'
        f'extern "C" void node{index}(long block, long grid, void** a) {{ {node.function}({", ".join(spelled)}); }}'
    )
    return {"symbol": f"node{index}", "function": node.function, "grid": grid, "args": arguments}, call


def _kernel(node: Kernel, where: str, names: dict[str, Any], index: int) -> tuple[dict[str, Any], str]:
    """Returns the item of ``Program.nodes`` for the CUDA kernel ``node``, and CUDA source that declares a string with
    one letter for the type of each argument of the kernel."""
    block = _extents(node.block, names, f"{where}.block", _MOST_BLOCK)
    if block[0] * block[1] * block[2] > _MOST_THREADS:
        raise PlanError(f"{where}.block: {block} are more than {_MOST_THREADS} threads")
    shared = evaluate(node.shared, names, f"{where}.shared")
    if not 0 <= shared <= MOST_SHARED:
        raise PlanError(f"{where}.shared: {shared} bytes of shared memory are not possible")
    arguments = _arguments(node, where, names)
    for argument in arguments:
        argument.pop("dtype", None)
    item = {
        "symbol": node.function, "codes": f"plan_codes_{index}", "block": block, "shared": shared, "args": arguments,
        "grid": _extents(node.grid, names, f"{where}.grid", _MOST_GRID), "cluster": [],
        "cooperative": node.cooperative,
    }  # fmt: skip
    if "cluster" in node.model_fields_set:
        item["cluster"] = _extents(node.cluster, names, f"{where}.cluster", (16, 16, 16))
    signature = f'extern "C" __device__ plan_signature<decltype({node.function})> {item["codes"]}{{}};'
    return item, f'#line 1 "plan.json {where}"\n{signature}'


def _extents(value: Any, names: dict[str, Any], where: str, most: tuple[int, int, int]) -> list[int]:
    """Returns the extents [x, y, z] of a grid, block or cluster. ``value`` is one expression or a list of up to three;
    missing extents are 1. Raises ``PlanError`` if an extent is less than 1 or exceeds its limit in ``most``."""
    parts = value if isinstance(value, list) else [value]
    extents = [evaluate(part, names, where) for part in parts] + [1] * (3 - len(parts))
    if not all(0 < extent <= limit for extent, limit in zip(extents, most, strict=True)):
        raise PlanError(f"{where}: 1 to {', '.join(map(str, most))} are possible, not {extents}")
    return extents


def _arguments(node: Kernel, where: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the arguments of a kernel node. Each is a dictionary: a buffer has the keys ``buffer`` (its name) and
    ``dtype``, a number has the key ``int`` or ``float``."""
    arguments: list[dict[str, Any]] = []
    for position, argument in enumerate(node.args):
        value = names.get(argument) if isinstance(argument, str) else None
        if isinstance(value, Buffer):
            arguments.append({"buffer": value.name, "dtype": value.tensor.dtype})
        elif isinstance(value, float) or isinstance(argument, float):
            arguments.append({"float": value if isinstance(value, float) else argument})
        else:
            arguments.append({"int": evaluate(argument, names, f"{where}.args[{position}]")})
    return arguments
