"""Holds the shared parts of the CUDA kernels of the scripted teacher, a program that solves the tasks of ``family``.

A task is a chain of element-wise operators. It may have an ending: a last operator that is not element-wise. The parts
are the source of the chain and of the reductions of endings, the text of ``plan.json`` (the list of kernel launches),
and a check of a launch against the limits of the GPU."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuda_agent.sandbox.wire import MOST_SHARED, Status
from cuda_agent.synthesis.teacher.family import FamilySpec, steps

KERNEL, PLAN = "kernels/fused.cu", "plan.json"
SHARED_BYTES = 227 << 10  # most shared memory of a block (compute capability 9.0)
Fault = tuple[Status, str]  # the judge's status and message


def head(spec: FamilySpec, vector: int) -> list[str]:
    """Returns the lines of the CUDA function ``step``, which applies the task's element-wise operators to one element.
    If ``vector`` is 4, adds an overload of ``step`` for a float4."""
    second = ", float w" if spec.binary else ""
    lines = [f"__device__ float step(float v{second}) {{", *(f"  {step}" for step in steps(spec)), "  return v;", "}"]
    if vector == 4:
        second = ", float4 b" if spec.binary else ""
        parts = ", ".join(f"step(a.{part}{f', b.{part}' if spec.binary else ''})" for part in "xyzw")
        lines += [f"__device__ float4 step(float4 a{second}) {{", f"  return {{{parts}}};", "}"]
    return lines


def signature(spec: FamilySpec, vector: int, result: str, sizes: str, threads: int = 0) -> str:
    """Returns the first line of the kernel. ``result`` is the type of the output's elements. ``sizes`` declares the
    parameters after the pointers to the inputs and the output. If ``threads`` is not 0, the compiler limits the number
    of registers so that a block of this many threads can be launched."""
    kind = "float4" if vector == 4 else "float"
    buffers = [f"const {kind}* x", *([f"const {kind}* y"] if spec.binary else [])]
    bound = f"__launch_bounds__({threads}) " if threads else ""
    return f"__global__ void {bound}fused({', '.join(buffers)}, {result}* z, {sizes}) {{"


def loaded(spec: FamilySpec, index: str) -> str:
    """Returns the CUDA expression that loads the inputs at ``index`` and applies the task's element-wise operators."""
    return f"step(x[{index}]{f', y[{index}]' if spec.binary else ''})"


def element(vector: int, value: str, body: Sequence[str], target: str) -> list[str]:
    """Returns CUDA statements that load ``value`` (a float4 if ``vector`` is 4, else a float) and run ``body`` for each
    of its elements. ``body`` uses or changes the element ``v``. If ``target`` is given, the statements store the
    changed value there."""
    if vector == 1:
        return [f"float v = {value};", *body, *[f"{target} = v;"] * bool(target)]
    return [
        f"float4 a = {value};", "for (int j = 0; j < 4; j++) {", "  float& v = ((float*)&a)[j];",
        *(f"  {line}" for line in body), "}", *[f"{target} = a;"] * bool(target),
    ]  # fmt: skip


def plan(nodes: Sequence[dict[str, Any]], workspaces: dict[str, Any] | None = None) -> str:
    """Returns the text of ``plan.json``. Each of ``nodes`` is a kernel launch, without the path of the source file,
    which this function adds. ``workspaces`` holds the temporary buffers by name."""
    made = ({"workspaces": workspaces} if workspaces else {}) | {"nodes": [{"kernel": KERNEL} | node for node in nodes]}
    return json.dumps(made) + "\n"


def inputs(spec: FamilySpec) -> list[str]:
    """Returns the names of the inputs in a plan."""
    return ["in0", *(["in1"] if spec.binary else [])]


def launch_fault(shared: int, grid: Sequence[int] = (1,)) -> Fault | None:
    """Predicts the status and message that the judge (which tests solutions in the sandbox) returns if the launch
    is impossible. Returns None if it is possible. The launch uses ``shared`` bytes of shared memory per block. ``grid``
    holds the number of blocks in each dimension."""
    if shared > MOST_SHARED:
        return "build_error", f"nodes[0].shared: {shared} bytes of shared memory are not possible"
    if 0 in grid:
        extents = [*grid, *[1] * (3 - len(grid))]
        return "build_error", f"nodes[0].grid: 1 to 2147483647, 65535, 65535 are possible, not {extents}"
    if shared > SHARED_BYTES:
        return "build_error", f"ValueError: fused: {shared} bytes of shared memory, a block has at most {SHARED_BYTES}"
    return None


Sum = tuple[str, str, str]  # variable, its reduction ("sum", "max" or "min"), and the reduced expression of v


@dataclass(frozen=True)
class Reduction:
    """The CUDA source, in parts, of an operator that reduces the ``m`` values ``v`` of a row or column, such as a sum
    or a softmax. Each of ``passes`` describes a loop over the values, and a statement (or an empty text) that runs
    after the loop. The loop accumulates one or two variables (``Sum``). ``output`` is the expression of the result. A
    sum has one result for all values, and a softmax has one for each ``v``."""

    passes: tuple[tuple[tuple[Sum, ...], str], ...]
    output: str

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for sums, _ in self.passes for _, kind, _ in sums})


def _one(*sums: Sum, then: str = "") -> tuple[tuple[Sum, ...], str]:
    return sums, then


_S, _SQUARES, _LARGEST = ("s", "sum", "v"), ("s", "sum", "v * v"), ("s", "max", "v")
_BOTH = _S, ("t", "sum", "v * v")
_MEAN, _SPREAD = _one(_S, then="s /= m;"), ("t", "sum", "(v - s) * (v - s)")
_EXPONENTS = ("t", "sum", "exp(v - s)")
_REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction((_one(_S),), "s"),
    "mean": Reduction((_one(_S),), "s / m"),
    "amax": Reduction((_one(_LARGEST),), "s"),
    "amin": Reduction((_one(("s", "min", "v")),), "s"),
    "norm": Reduction((_one(_SQUARES),), "sqrt(s)"),
    "var": Reduction((_one(*_BOTH),), "(t - s * s / m) / (m - 1)"),
    "var two": Reduction((_MEAN, _one(_SPREAD)), "t / (m - 1)"),
    "softmax": Reduction((_one(_LARGEST), _one(_EXPONENTS)), "exp(v - s) / t"),
    "log_softmax": Reduction((_one(_LARGEST), _one(_EXPONENTS, then="s += log(t);")), "v - s"),
    "normalize": Reduction((_one(_SQUARES, then="s = 1 / (sqrt(s) + 1e-12f);"),), "v * s"),
    "rms_norm": Reduction((_one(_SQUARES, then="s = rsqrt(s / m + 1e-7f);"),), "v * s"),
    "layer_norm": Reduction((_one(*_BOTH, then="s /= m, t = rsqrt(t / m - s * s + 1e-5f);"),), "(v - s) * t"),
    "layer_norm two": Reduction((_MEAN, _one(_SPREAD, then="t = rsqrt(t / m + 1e-5f);")), "(v - s) * t"),
}
START = {"sum": "0", "max": "-1e30f", "min": "1e30f"}
JOIN = {"sum": "{0} += {1};", "max": "{0} = fmax({0}, {1});", "min": "{0} = fmin({0}, {1});"}


def reduction(spec: FamilySpec, moments: str) -> Reduction:
    """Returns the source of the reduction in the last operator of ``spec``. ``moments`` says how to compute a variance:
    in "one" or "two" passes."""
    return _REDUCTIONS.get(f"{spec.operation} {moments}") or _REDUCTIONS[spec.operation]
