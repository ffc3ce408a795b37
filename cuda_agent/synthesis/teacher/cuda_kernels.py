"""Writes CUDA kernels for the tasks of ``family``: one source and one plan (list of launches) for each design.

A design is a choice of mapping, sizes and caches. The task's shape decides which designs are fast, and also which
designs are right: vectors must divide the lengths, registers must hold a whole row, and shared memory has a limit.
``fault`` predicts the judge's verdict from the shape and the design alone. This module holds the designs for chains of
element-wise operators, alone or with a row-wise operator as the ending. ``cuda_columns`` has the other endings."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from cuda_agent.synthesis.teacher import cuda_columns
from cuda_agent.synthesis.teacher.cuda_columns import COLUMN_DESIGNS, TRANSPOSE_DESIGNS, ColumnDesign, TransposeDesign
from cuda_agent.synthesis.teacher.cuda_parts import (
    JOIN,
    KERNEL,
    PLAN,
    START,
    Fault,
    element,
    head,
    inputs,
    launch_fault,
    loaded,
    plan,
    reduction,
    signature,
)
from cuda_agent.synthesis.teacher.family import ENDINGS, FamilySpec

CHAIN_DESIGNS: dict[str, tuple[Any, ...]] = {
    "threads": (64, 128, 256, 512, 1024),
    "items": (1, 2, 4, 8),
    "vector": (1, 4),
    "guard": (True, False),
}
ROW_DESIGNS: dict[str, tuple[Any, ...]] = {
    "lanes": ("thread", "warp", "block"),
    "threads": (64, 128, 256, 512, 1024),
    "items": (1, 2, 4, 8, 16, 32),
    "vector": (1, 4),
    "cache": ("none", "registers", "shared"),
    "moments": ("one", "two"),
}


@dataclass(frozen=True)
class ChainDesign:
    """The design of a kernel for an element-wise chain.

    ``threads``  threads of a block
    ``items``    vectors that a thread computes
    ``vector``   elements of a vector (1: float, 4: float4); elements after the last whole vector are left out
    ``guard``    whether threads beyond the end do nothing; without it, only whole blocks are launched"""

    threads: int
    items: int
    vector: int
    guard: bool


@dataclass(frozen=True)
class RowDesign:
    """The design of a kernel for a chain of operators that ends with a row-wise one, such as a softmax.

    ``lanes``    what computes one row: a thread, a warp or a block
    ``threads``  threads of a block
    ``items``    vectors of a row that a thread keeps, if ``cache`` is "registers"
    ``vector``   elements of a vector (1: float, 4: float4); columns after the last whole vector are left out
    ``cache``    where the chain's values stay between the passes over a row; "none": each pass computes them again
    ``moments``  how a variance is computed; "one": from sums of v and v * v; "two": the mean first"""

    lanes: Literal["thread", "warp", "block"]
    threads: int
    items: int
    vector: int
    cache: Literal["none", "registers", "shared"]
    moments: Literal["one", "two"]

    @property
    def width(self) -> int:
        """The number of threads that share one row."""
        return {"thread": 1, "warp": 32, "block": self.threads}[self.lanes]

    @property
    def rows(self) -> int:
        """The number of rows of one block."""
        return self.threads // self.width


Design = ChainDesign | RowDesign | ColumnDesign | TransposeDesign


def draw_design(spec: FamilySpec, rng: random.Random) -> Design:
    """Returns a design with each choice drawn uniformly, without regard to the shape. Choices without effect have their
    first possible value (``plain``)."""
    kind = _KINDS[spec.kind]
    return plain(spec, kind.design(**{name: rng.choice(values) for name, values in kind.choices.items()}))


def redraw(spec: FamilySpec, design: Design, rng: random.Random) -> Design:
    """Returns ``design`` with one choice drawn again until the kernel or its launch changes."""
    kind = _KINDS[spec.kind]
    while True:
        name = rng.choice(tuple(kind.choices))
        other = plain(spec, replace(design, **{name: rng.choice(kind.choices[name])}))
        if other != design:
            return other


def plain(spec: FamilySpec, design: Design) -> Design:
    """Returns ``design`` with each choice that has no effect set to its first possible value."""
    made: Design = _KINDS[spec.kind].plain(spec, design)
    return made


def fault(spec: FamilySpec, design: Design) -> Fault:
    """Predicts the judge's status and message for ``design``. The status is "wrong" if the kernel leaves out elements.
    It is "build_error" if the kernel needs too much shared memory or has a grid without blocks. Else it is "ok"."""
    return _KINDS[spec.kind].fault(spec, design)


def files(spec: FamilySpec, design: Design) -> dict[str, str]:
    """Returns the files of the solution: the kernel's source and the plan."""
    source, plan = _KINDS[spec.kind].files(spec, design)
    return {KERNEL: source, PLAN: plan}


# ------------------------------------------------------------------------------------------------------------- chains


def _chain_fault(spec: FamilySpec, design: ChainDesign) -> Fault:
    numel = spec.rows * spec.columns
    whole = numel // design.vector % (design.threads * design.items) == 0
    right = numel % design.vector == 0 and (design.guard or whole)
    return ("ok" if right else "wrong"), ""


def _chain_files(spec: FamilySpec, design: ChainDesign) -> tuple[str, str]:
    lines = [
        *head(spec, design.vector),
        signature(spec, design.vector, "float4" if design.vector == 4 else "float", "int n"),
        f"  int i = blockIdx.x * {design.threads * design.items} + threadIdx.x;",
        f"  for (int k = 0; k < {design.items}; k++, i += {design.threads})",
        f"    {'if (i < n) ' if design.guard else ''}z[i] = {loaded(spec, 'i')};",
        "}",
    ]
    share = design.threads * design.items * design.vector
    grid = f"cdiv(in0.numel, {share})" if design.guard else f"in0.numel // {share}"
    count = "in0.numel" if design.vector == 1 else f"in0.numel // {design.vector}"
    node = {"function": "fused", "grid": grid, "block": design.threads, "args": [*inputs(spec), "out0", count]}
    return "\n".join(lines) + "\n", plan([node])


# --------------------------------------------------------------------------------------------------------------- rows


def _plain_rows(spec: FamilySpec, design: RowDesign) -> RowDesign:
    """Returns ``design`` with each choice that has no effect set to its first value in ``ROW_DESIGNS``."""
    assert spec.ending is not None
    if len(reduction(spec, design.moments).passes) + ENDINGS[spec.ending].maps == 1:
        design = replace(design, cache="none")
    if design.cache != "registers":
        design = replace(design, items=1)
    return design if spec.ending in ("var", "layer_norm") else replace(design, moments="one")


def _rows_fault(spec: FamilySpec, design: RowDesign) -> Fault:
    shared = 4 * spec.columns * design.rows
    if design.cache == "shared" and (found := launch_fault(shared)):
        return found
    kept = design.width * design.items * design.vector
    held = design.cache != "registers" or kept >= spec.columns
    return ("ok" if spec.columns % design.vector == 0 and held else "wrong"), ""


def _rows_files(spec: FamilySpec, design: RowDesign) -> tuple[str, str]:
    grid = "in0.shape[0]" if design.rows == 1 else f"cdiv(in0.shape[0], {design.rows})"
    shared = {"shared": f"in0.shape[1] * {4 * design.rows}"} if design.cache == "shared" else {}
    arguments = [*inputs(spec), "out0", "in0.shape[0]", "in0.shape[1]"]
    node = {"function": "fused", "grid": grid, "block": design.threads, **shared, "args": arguments}
    return _rows(spec, design), plan([node])


def _across(kind: str, design: RowDesign) -> list[str]:
    """Returns the CUDA source of ``all_<kind>``, which reduces a value over the threads that share a row."""
    lines = [f"__device__ float all_{kind}(float s) {{", "  for (int k = 16; k; k /= 2)"]
    lines += [f"    {JOIN[kind].format('s', '__shfl_xor_sync(~0u, s, k)')}"]
    if design.lanes == "block":
        lines += [
            "  __shared__ float part[32];",
            "  __syncthreads();",
            "  part[threadIdx.x / 32] = s;",
            "  __syncthreads();",
            "  s = part[0];",
            f"  for (int k = 1; k < {design.threads // 32}; k++)",
            f"    {JOIN[kind].format('s', 'part[k]')}",
        ]
    return [*lines, "  return s;", "}"]


def _rows(spec: FamilySpec, design: RowDesign) -> str:
    assert spec.ending is not None
    reduced, maps = reduction(spec, design.moments), ENDINGS[spec.ending].maps
    kinds = reduced.kinds if design.lanes != "thread" else []
    lines = head(spec, design.vector) + [line for kind in kinds for line in _across(kind, design)]
    result = "float4" if maps and design.vector == 4 else "float"
    lines.append(signature(spec, design.vector, result, "int n, int m", design.threads))
    body = _place(spec, design, maps)
    kind = "float4" if design.vector == 4 else "float"
    if design.cache == "registers":
        body.append(f"{kind} q[{design.items}];")
    if design.cache == "shared":
        per = "m" if design.vector == 1 else "m / 4"
        body += [f"extern __shared__ {kind} tile[];", f"{kind}* q = tile + threadIdx.x / {design.width} * ({per});"]
    for number, (sums, then) in enumerate(reduced.passes):
        body.append("float " + ", ".join(f"{variable} = {START[what]}" for variable, what, _ in sums) + ";")
        joined = [JOIN[what].format(variable, of) for variable, what, of in sums]
        body += _loop(spec, design, number == 0, joined, "")
        if design.lanes != "thread":
            body += [f"{variable} = all_{what}({variable});" for variable, what, _ in sums]
        body += [then] * bool(then)
    if maps:
        body += _loop(spec, design, False, [f"v = {reduced.output};"], "z[c]")
    elif design.lanes == "thread":
        body.append(f"z[r] = {reduced.output};")
    else:
        body.append(f"if (lane == 0) z[r] = {reduced.output};")
    return "\n".join([*lines, *(f"  {line}" for line in body), "}"]) + "\n"


def _place(spec: FamilySpec, design: RowDesign, maps: bool) -> list[str]:
    """Returns the statements that compute a thread's row ``r`` and lane, and move the pointers of the inputs (and of
    the output if ``maps``) to the row."""
    width = design.width
    if design.lanes == "block":
        lines = ["int r = blockIdx.x, lane = threadIdx.x;"]
    else:
        lane = "0" if width == 1 else f"threadIdx.x % {width}"
        row = f"blockIdx.x * {design.rows} + threadIdx.x" + ("" if width == 1 else f" / {width}")
        lines = [f"int r = {row}, lane = {lane};", "if (r >= n) return;"]
    per = "m" if design.vector == 1 else "(m / 4)"
    moved = ["x", *(["y"] if spec.binary else []), *(["z"] if maps else [])]
    return [*lines, " ".join(f"{name} += (long)r * {per};" for name in moved)]


def _loop(spec: FamilySpec, design: RowDesign, first: bool, body: list[str], target: str) -> list[str]:
    """Returns a thread's loop over its part of the row. ``body`` uses or changes the element ``v``. If ``target`` is
    given, the loop stores the changed values there. The ``first`` loop over the row fills the cache, if any."""
    end, width = ("m" if design.vector == 1 else "m / 4"), design.width
    kept = {"none": "", "registers": "q[k]", "shared": "q[c]"}[design.cache]
    value = f"{kept} = {loaded(spec, 'c')}" if first and kept else kept or loaded(spec, "c")
    inner = element(design.vector, value, body, target)
    if design.cache != "registers":
        return [f"for (int c = lane; c < {end}; c += {width}) {{", *(f"  {line}" for line in inner), "}"]
    return [
        f"for (int k = 0, c = lane; k < {design.items}; k++, c += {width})",
        f"  if (c < {end}) {{", *(f"    {line}" for line in inner), "  }",
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- kinds


class _Kind(NamedTuple):
    """The designs for one kind of tasks: their class, the values of each choice, and the functions that this module's
    ``plain``, ``fault`` and ``files`` call for this kind."""

    design: type[Any]
    choices: Mapping[str, tuple[Any, ...]]
    plain: Callable[[FamilySpec, Any], Any]
    fault: Callable[[FamilySpec, Any], Fault]
    files: Callable[[FamilySpec, Any], tuple[str, str]]


_KINDS = {
    "chain": _Kind(ChainDesign, CHAIN_DESIGNS, lambda spec, design: design, _chain_fault, _chain_files),
    "row": _Kind(RowDesign, ROW_DESIGNS, _plain_rows, _rows_fault, _rows_files),
    "column": _Kind(
        ColumnDesign,
        COLUMN_DESIGNS,
        cuda_columns.plain_columns,
        cuda_columns.columns_fault,
        cuda_columns.columns_files,
    ),
    "transpose": _Kind(
        TransposeDesign,
        TRANSPOSE_DESIGNS,
        cuda_columns.plain_transpose,
        cuda_columns.transpose_fault,
        cuda_columns.transpose_files,
    ),
}
