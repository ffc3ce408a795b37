"""Writes CUDA kernels for the tasks of the module ``family``: a source file and a plan (list of launches) per design.

A design is a set of choices: which threads compute which elements, the sizes of blocks and vectors, and where values
are cached. The task's shape decides which designs are fast, and also which designs are right. For example, a row must
consist of whole vectors, a row that is cached in registers must fit there, and shared memory has a limit. From the
shape and the design alone, ``fault`` predicts the result of the judge (which tests solutions in the sandbox).

A task is a chain of element-wise operators. It may have an ending: a last operator that is not element-wise. This
module holds the designs for tasks without an ending, and with an ending along the rows, such as a softmax.
``cuda_columns`` holds the designs for the other endings."""

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
    """The design of a kernel for a chain of element-wise operators.

    ``threads``  number of threads of a block
    ``items``    number of vectors that a thread computes
    ``vector``   elements of a vector (1: float, 4: float4); elements after the last whole vector are left out
    ``guard``    true: the last block may be partly used; its threads skip indices beyond the last element. False:
                 elements after the last whole block are left out"""

    threads: int
    items: int
    vector: int
    guard: bool


@dataclass(frozen=True)
class RowDesign:
    """The design of a kernel for a chain of element-wise operators and a last operator along the rows.

    ``lanes``    what computes one row: a thread, a warp or a block
    ``threads``  number of threads of a block
    ``items``    number of vectors of a row that a thread keeps, if ``cache`` is "registers"
    ``vector``   elements of a vector (1: float, 4: float4); columns after the last whole vector are left out
    ``cache``    where the chain's results stay between the passes over a row: in "registers" or in "shared" memory.
                 "none": each pass computes them again
    ``moments``  how a variance is computed. "one": from sums of v and v * v. "two": the mean first"""

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
        """The number of rows that one block computes."""
        return self.threads // self.width


Design = ChainDesign | RowDesign | ColumnDesign | TransposeDesign


def draw_design(spec: FamilySpec, rng: random.Random) -> Design:
    """Returns a design with each choice drawn uniformly, without regard to the task's shape. Choices without effect are
    then set to their first possible value."""
    kind = _KINDS[spec.kind]
    return plain(spec, kind.design(**{name: rng.choice(values) for name, values in kind.choices.items()}))


def redraw(spec: FamilySpec, design: Design, rng: random.Random) -> Design:
    """Returns a copy of ``design`` in which one choice is drawn again. The new design differs in the kernel or its
    launch."""
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
    """Predicts the status and message that the judge (which tests solutions in the sandbox) returns for ``design``. The
    status is "wrong" if the kernel leaves out elements. It is "build_error" if the kernel needs too much shared memory,
    or if its launch has no blocks. Else it is "ok"."""
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
    """Returns the CUDA statements that compute a thread's row ``r`` and its number ``lane`` among the threads of the
    row, and move the pointers of the inputs to the row. If ``maps`` is true (the output has the shape of the input),
    they also move the pointer of the output."""
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
    """Returns a thread's loop over its part of the row, as CUDA source. ``body`` uses or changes the element ``v``. If
    ``target`` is not empty, the loop stores the changed elements there. If ``first`` is true and the design has a
    cache, the loop fills the cache. Later loops read it."""
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
    """The designs for one kind of tasks, such as tasks with a last operator along the rows. ``design`` is the class of
    the designs. ``choices`` holds the possible values of each choice. The functions ``plain``, ``fault`` and ``files``
    of this module call the fields of the same name."""

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
