"""Writes C++ kernels for the tasks of the module ``family``: a source file and a plan (list of launches) per design.

A design is a set of choices, such as the number of blocks. Each choice is drawn uniformly, without regard to the task's
shape. Some kernels are therefore wrong, because they leave elements out. Some take ten times as long as eager PyTorch,
and others are several times as fast as ``torch.compile``."""

import json
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from cuda_agent.sandbox.wire import Status
from cuda_agent.synthesis.teacher.family import ENDINGS, OPERATORS, FamilySpec, steps

KERNEL, PLAN = "kernels/fused.cpp", "plan.json"
ROWS = "in0.shape[0]"
GRIDS: tuple[int | str, ...] = (1, 2, 8, ROWS)
DESIGNS: dict[str, tuple[Any, ...]] = {
    "number": ("float", "double"),
    "order": ("part", "stride"),
    "grid": GRIDS,
    "width": (1, 8),
    "passes": ("fused", "split"),
    "moments": ("one", "two"),
}


@dataclass(frozen=True)
class Design:
    """The design of a kernel: one value for each choice. A task is a chain of element-wise operators. It may have an
    ending: a last operator along the rows, such as a sum.

    The numbers in parentheses are slowdowns. For example, (1.5-2) after a value means that a kernel with this value
    takes 1.5 to 2 times as long (first to third quartile, measured on two idle cores).

    ``number``  arithmetic type; "double" is slow (1.5-2; up to 4.5 in transcendental functions)
    ``order``   which of n elements (or rows) block b computes. "part": n / grid adjacent ones; if ``grid`` does not
                divide n, some are left out. "stride": numbers b, b + grid, and so on; the loop cannot be vectorised,
                and threads share cache lines (3-10; 1.3 with a ``width`` of 8; 1.0-1.6 if a block computes whole rows)
    ``grid``    number of blocks. 1: only one thread works (1.1-2.8). "in0.shape[0]": one block, and thus one function
                call, per row (1.0-3)
    ``width``   number of adjacent elements that one step of a loop computes. 8: elements after the last whole step are
                left out (1.4-2; 5 in rows). Always 1 if the ending returns one value per row
    ``passes``  "fused": one loop applies the chain and accumulates the sums of an ending. "split": one loop per
                operator, or, with an ending, one for the chain and one for the sums; values go through memory between
                the loops (1.0-1.4)
    ``moments`` how a variance is computed. "one": from sums of v and v * v. "two": the mean first (1.05-1.15)"""

    number: Literal["float", "double"]
    order: Literal["part", "stride"]
    grid: int | str
    width: Literal[1, 8]
    passes: Literal["fused", "split"]
    moments: Literal["one", "two"]


def draw_design(spec: FamilySpec, rng: random.Random) -> Design:
    """Returns a design with each choice drawn uniformly. If the task's last operator returns one value per row,
    ``width`` is 1."""
    design = Design(**{choice: rng.choice(values) for choice, values in DESIGNS.items()})
    return design if _steps_matter(spec) else replace(design, width=1)


def redraw(spec: FamilySpec, design: Design, rng: random.Random) -> Design:
    """Returns a copy of ``design`` in which one choice other than ``moments`` has a new value. The files of the
    solution differ from those of ``design``."""
    while True:
        field = rng.choice(("number", "order", "grid", "width", "passes"))
        other = replace(design, **{field: getattr(draw_design(spec, rng), field)})
        if files(spec, other) != files(spec, design):
            return other


def fault(spec: FamilySpec, design: Design) -> tuple[Status, str]:
    """Predicts the status and message that the judge (which tests solutions in the sandbox) returns for ``design``. The
    status is "wrong" if the kernel leaves out elements, else "ok". The message is empty."""
    grid = spec.rows if design.grid == ROWS else int(design.grid)
    elements = spec.columns if spec.ending else spec.rows * spec.columns  # of one loop
    shared = spec.rows if spec.ending else elements // design.width  # rows or steps, among the blocks
    right = elements % design.width == 0 and (design.order == "stride" or shared % grid == 0)
    return ("ok" if right else "wrong"), ""


def _steps_matter(spec: FamilySpec) -> bool:
    """Returns whether the output has one value for each input element. If so, each element that a loop leaves out makes
    the output wrong."""
    return spec.ending is None or ENDINGS[spec.ending].maps


def files(spec: FamilySpec, design: Design) -> dict[str, str]:
    """Returns the files of the solution: the kernel's source and the plan."""
    source = _rows(spec, design) if spec.ending else _elements(spec, design)
    return {KERNEL: source, PLAN: _plan(spec, design)}


def _plan(spec: FamilySpec, design: Design) -> str:
    arguments = ["in0", *(["in1"] if spec.binary else []), *(["tmp"] if _workspace(spec, design) else []), "out0"]
    arguments += ["in0.shape[0]", "in0.shape[1]"] if spec.ending else ["in0.numel"]
    node = {"kernel": KERNEL, "function": "fused", "grid": design.grid, "args": arguments}
    workspaces = {"workspaces": {"tmp": {"size": "in0.numel"}}}
    return json.dumps((workspaces if "tmp" in arguments else {}) | {"nodes": [node]}) + "\n"


def _workspace(spec: FamilySpec, design: Design) -> bool:
    """Returns whether the kernel needs a workspace: a temporary buffer for values over which it loops again. If the
    output has the shape of the input, the kernel uses the output as this buffer and needs no workspace."""
    if spec.ending is None or ENDINGS[spec.ending].maps:
        return False
    return design.passes == "split" or (spec.ending == "var" and design.moments == "two")


def _signature(spec: FamilySpec, design: Design) -> str:
    inputs = "const float* x, const float* y" if spec.binary else "const float* x"
    buffers = ", float* b, float* z" if _workspace(spec, design) else ", float* z"
    sizes = "long n, long m" if spec.ending else "long n"
    return f"#include <math.h>\nvoid fused(long block, long grid, {inputs}{buffers}, {sizes})"


def _share(variable: str, count: str, design: Design) -> str:
    """Returns the C++ header (``for (...)``) of the loop over the elements or rows of one block. ``variable`` is the
    name of the index. ``count`` is the C++ expression for the number of elements or rows of all blocks together."""
    if design.order == "part":
        part = f"{count} / grid"
        return f"for (long {variable} = {part} * block; {variable} < {part} * (block + 1); {variable}++)"
    return f"for (long {variable} = block; {variable} < {count}; {variable} += grid)"


def _load(source: str, step_names: list[str], design: Design) -> str:
    second = ", w = y[i]" if any(OPERATORS[name].binary for name in step_names) else ""
    return f"{design.number} v = {source}[i]{second};"


def _elements(spec: FamilySpec, design: Design) -> str:
    statements, names = steps(spec), [name for name, _ in spec.chain]
    groups = [slice(0, None)] if design.passes == "fused" else [slice(k, k + 1) for k in range(len(statements))]
    lines = []
    for k, group in enumerate(groups):
        body = [_load("z" if k else "x", names[group], design), *statements[group], "z[i] = v;"]
        loop = _share("i", "n", design) if design.width == 1 else f"{_share('g', 'n / 8', design)} {_STEP}"
        lines += [f"  {loop} {{", *(f"    {line}" for line in body), "  }"]
    return f"{_signature(spec, design)} {{\n" + "\n".join(lines) + "\n}\n"


@dataclass(frozen=True)
class _Reduction:
    """The C++ code of an ending (an operator along the rows, such as a softmax), in parts."""

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
_STEP = "for (long i = g * 8; i < g * 8 + 8; i++)"
_ROW = {
    1: "for (long i = r * m; i < r * m + m; i++)",
    8: "for (long g = 0; g < m / 8; g++) for (long i = r * m + g * 8; i < r * m + g * 8 + 8; i++)",
}


def _rows(spec: FamilySpec, design: Design) -> str:
    assert spec.ending is not None
    reduction = _REDUCTIONS.get(f"{spec.ending} {design.moments}") or _REDUCTIONS[spec.ending]
    buffer = "b" if _workspace(spec, design) else "z"
    kept, loop = ENDINGS[spec.ending].maps or buffer == "b", _ROW[design.width]
    body = [_load("x", [name for name, _ in spec.chain], design), *steps(spec), *([f"{buffer}[i] = v;"] * kept)]
    lines = [f"{design.number} {reduction.start};", f"{loop} {{", *(f"  {line}" for line in body)]
    if design.passes == "split":
        lines += ["}", f"{loop} {{", f"  {design.number} v = {buffer}[i];"]
    lines += [f"  {reduction.add}", "}"]
    lines += [line.replace("loop:", loop).replace("@", buffer) for line in reduction.then]
    lines += [f"z[r] = {reduction.result};"] * bool(reduction.result)
    inner = "".join(f"    {line}\n" for line in lines)
    return f"{_signature(spec, design)} {{\n  {_share('r', 'n', design)} {{\n{inner}  }}\n}}\n"
