"""Writes CUDA kernels for tasks whose last operator works along the columns (such as a sum) or transposes the input.

Only tasks for a GPU have these last operators (endings). The operators before the ending are element-wise: the chain.
A design is a set of choices for a kernel, such as the number of threads. ``cuda_kernels`` draws the designs and calls
the functions of this module."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from cuda_agent.synthesis.teacher.cuda_parts import (
    JOIN,
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

COLUMN_DESIGNS: dict[str, tuple[Any, ...]] = {
    "threads": (64, 128, 256, 512, 1024),
    "deep": (1, 4, 8, 16, 32),
    "vector": (1, 4),
    "guard": (True, False),
    "split": (1, 4, 16, 64),
    "cache": ("none", "shared"),
    "moments": ("one", "two"),
}
TRANSPOSE_DESIGNS: dict[str, tuple[Any, ...]] = {
    "tile": ("none", "plain", "padded"),
    "along": ("input", "output"),
    "side": (32, 64),
    "threads": (128, 256, 512, 1024),
    "vector": (1, 4),
    "guard": (True, False),
}
_JOINING = 256  # threads of a block of the second kernel


@dataclass(frozen=True)
class ColumnDesign:
    """The design of a kernel for a chain of element-wise operators and a last operator along the columns.

    ``threads``  number of threads of a block
    ``deep``     number of threads that share a column; they combine their results in shared memory
    ``vector``   adjacent columns that a thread computes (1: float, 4: float4); columns after the last whole vector are
                 left out
    ``guard``    true: the last block may be partly used; its threads beyond the last column do nothing. False: columns
                 after the last whole block are left out
    ``split``    number of parts of a column; different blocks reduce them, and a second kernel joins the results
    ``cache``    where the chain's results stay between the passes over a column. "shared": in shared memory. "none":
                 each pass computes them again
    ``moments``  how a variance is computed. "one": from sums of v and v * v. "two": the mean first"""

    threads: int
    deep: int
    vector: int
    guard: bool
    split: int
    cache: Literal["none", "shared"]
    moments: Literal["one", "two"]

    @property
    def wide(self) -> int:
        """The number of columns, or vectors of columns, that the threads of a block compute at the same time."""
        return self.threads // self.deep

    @property
    def columns(self) -> int:
        """The number of columns that one block computes."""
        return self.wide * self.vector


@dataclass(frozen=True)
class TransposeDesign:
    """The design of a kernel that applies element-wise operators and transposes the result. Each block moves a square
    of elements from the input to the output.

    ``tile``     how a block moves its square. "none": directly. "plain": through shared memory. "padded": the same, but
                 rows in shared memory are one element longer, to avoid bank conflicts
    ``along``    for the tile "none". "input": adjacent threads read adjacent elements of the input. "output": adjacent
                 threads write adjacent elements of the output
    ``side``     number of rows of the square, and of columns
    ``threads``  number of threads of a block
    ``vector``   for the other tiles: number of elements that are read or written at once (1: float, 4: float4)
    ``guard``    true: squares may extend beyond the matrix; the elements outside are skipped. False: elements after the
                 last whole square are left out"""

    tile: Literal["none", "plain", "padded"]
    along: Literal["input", "output"]
    side: int
    threads: int
    vector: int
    guard: bool


# ------------------------------------------------------------------------------------------------------------ columns


def plain_columns(spec: FamilySpec, design: ColumnDesign) -> ColumnDesign:
    """Returns ``design`` with each choice that has no effect, or is impossible, set to its first value in
    ``COLUMN_DESIGNS``."""
    assert spec.ending is not None
    if ENDINGS[spec.ending].maps:
        design = replace(design, split=1)
    if design.split > 1 or spec.operation != "var":
        design = replace(design, moments="one")
    passes = len(reduction(spec, design.moments).passes) + ENDINGS[spec.ending].maps
    return design if passes > 1 else replace(design, cache="none")


def columns_fault(spec: FamilySpec, design: ColumnDesign) -> Fault:
    """Predicts the status and message that the judge (which tests solutions in the sandbox) returns for ``design``. The
    status is ``wrong`` if the kernel leaves out columns, ``build_error`` if the kernel cannot be launched, and
    otherwise ``ok``."""
    shared = 4 * spec.rows * design.columns if design.cache == "shared" else 0
    whole, rest = divmod(spec.columns, design.columns)
    if found := launch_fault(shared, [1 if design.guard else whole, *[design.split] * (design.split > 1)]):
        return found
    return ("ok" if spec.columns % design.vector == 0 and (design.guard or not rest) else "wrong"), ""


def columns_files(spec: FamilySpec, design: ColumnDesign) -> tuple[str, str]:
    """Returns the kernels' source and the text of ``plan.json``, the list of their launches."""
    assert spec.ending is not None
    columns = f"cdiv(in0.shape[1], {design.columns})" if design.guard else f"in0.shape[1] // {design.columns}"
    count = "in0.shape[1]" if design.vector == 1 else f"in0.shape[1] // {design.vector}"
    node: dict[str, Any] = {"function": "fused", "grid": columns, "block": design.threads}
    if design.cache == "shared":
        node["shared"] = f"in0.shape[0] * {4 * design.columns}"
    if design.split == 1:
        node["args"] = [*inputs(spec), "out0", count, "in0.shape[0]"]
        return "\n".join(_columns(spec, design)) + "\n", plan([node])
    node |= {"grid": [columns, design.split], "args": [*inputs(spec), "part", count, "in0.shape[0]"]}
    values = len(reduction(spec, design.moments).passes[0][0]) * design.split
    joining = {
        "function": "join", "grid": f"cdiv(in0.shape[1], {_JOINING})", "block": _JOINING,
        "args": ["part", "out0", "in0.shape[1]", "in0.shape[0]"],
    }  # fmt: skip
    workspaces = {"part": {"size": f"in0.shape[1] * {values}"}}
    return "\n".join([*_columns(spec, design), *_join(spec, design)]) + "\n", plan([node, joining], workspaces)


def _columns(spec: FamilySpec, design: ColumnDesign) -> list[str]:
    """Returns the CUDA source of the kernel that reduces the columns of the input (parts of columns, if ``split`` > 1).
    In this source, ``m`` is the number of rows, and ``n`` is the number of columns, or of float4 vectors in a row. Each
    thread keeps its partial results in ``s`` and ``t``."""
    assert spec.ending is not None
    reduced, maps, split = reduction(spec, design.moments), ENDINGS[spec.ending].maps, design.split
    lines = head(spec, design.vector)
    if design.deep > 1:
        lines += [line for kind in reduced.kinds for line in _across(kind, design)]
    result = "float4" if maps and design.vector == 4 else "float"
    lines.append(signature(spec, design.vector, result, "int n, int m", design.threads))
    place = "threadIdx.x" if design.deep == 1 else f"threadIdx.x % {design.wide}"
    body = [f"int c = blockIdx.x * {design.wide} + {place};"]
    body += ["if (c >= n) return;"] * design.guard
    first = "0" if design.deep == 1 else f"threadIdx.x / {design.wide}"
    rows = f"for (int r = {first}; r < m; r += {design.deep}) {{"
    if split > 1:
        body.append(f"int h = (m + {split - 1}) / {split}, top = blockIdx.y * h, end = top + h < m ? top + h : m;")
        rows = f"for (int r = top + {first}; r < end; r += {design.deep}) {{"
    if design.cache == "shared":
        kind = "float4" if design.vector == 4 else "float"
        body += [f"extern __shared__ {kind} tile[];", f"{kind}* q = tile + {place};"]
    kept, fresh = f"q[r * {design.wide}]" if design.cache == "shared" else "", loaded(spec, "(long)r * n + c")
    for number, (sums, then) in enumerate(reduced.passes):
        body.append(_started(design, [(variable, START[what]) for variable, what, _ in sums]))
        joined = [_each(design, JOIN[what].format(variable, of)) for variable, what, of in sums]
        value = f"{kept} = {fresh}" if kept and number == 0 else kept or fresh
        body += [rows, *(f"  {line}" for line in element(design.vector, value, joined, "")), "}"]
        if design.deep > 1:
            body += [_looped(design, f"{variable} = all_{what}({variable});") for variable, what, _ in sums]
        if then and split == 1:
            body.append(_looped(design, then))
    if maps:
        changed = [_each(design, f"v = {reduced.output};")]
        body += [rows, *(f"  {e}" for e in element(design.vector, kept or fresh, changed, "z[(long)r * n + c]")), "}"]
    else:
        if design.deep > 1:
            body.append(f"if (threadIdx.x >= {design.wide}) return;")
        stored = [("c", reduced.output)]
        if split > 1:
            lead = ["blockIdx.y", f"({split} + blockIdx.y)"]
            stored = [(f"{up} * n + c", name) for up, (name, _, _) in zip(lead, reduced.passes[0][0], strict=False)]
        body += [_looped(design, f"z[{_scaled(design, place)}] = {value};") for place, value in stored]
    return [*lines, *(f"  {line}" for line in body), "}"]


def _join(spec: FamilySpec, design: ColumnDesign) -> list[str]:
    """Returns the CUDA source of the second kernel. It joins the partial results of the blocks that share a column. In
    this source, ``w`` holds the partial results. ``m`` and ``n`` are the numbers of rows and columns of the input."""
    reduced = reduction(spec, design.moments)
    ((sums, then),) = reduced.passes
    places = "k * n + c", f"({design.split} + k) * n + c"
    joined = [
        JOIN[what].format(variable, f"w[{place}]") for place, (variable, what, _) in zip(places, sums, strict=False)
    ]
    body = [
        f"int c = blockIdx.x * {_JOINING} + threadIdx.x;",
        "if (c >= n) return;",
        "float " + ", ".join(f"{variable} = {START[what]}" for variable, what, _ in sums) + ";",
        f"for (int k = 0; k < {design.split}; k++) {{",
        *(f"  {line}" for line in joined),
        "}",
        *[then] * bool(then),
        f"z[c] = {reduced.output};",
    ]
    return [
        "__global__ void join(const float* w, float* z, int n, int m) {", *(f"  {line}" for line in body), "}",
    ]  # fmt: skip


def _across(kind: str, design: ColumnDesign) -> list[str]:
    """Returns the CUDA source of ``all_<kind>``, which reduces a value over the threads that share a column."""
    place = f"part[threadIdx.x % {design.wide} + k * {design.wide}]"
    return [
        f"__device__ float all_{kind}(float s) {{",
        f"  __shared__ float part[{design.threads}];",
        "  __syncthreads();",
        "  part[threadIdx.x] = s;",
        "  __syncthreads();",
        f"  s = part[threadIdx.x % {design.wide}];",
        f"  for (int k = 1; k < {design.deep}; k++)",
        f"    {JOIN[kind].format('s', place)}",
        "  return s;",
        "}",
    ]


def _started(design: ColumnDesign, values: Sequence[tuple[str, str]]) -> str:
    """Returns the CUDA declaration of float variables. ``values`` holds (name, initial value) of each variable. With
    float4 vectors, each variable is an array with one value per column of the vector."""
    if design.vector == 1:
        return "float " + ", ".join(f"{variable} = {value}" for variable, value in values) + ";"
    filled = (f"{variable}[4] = {{{', '.join([value] * 4)}}}" for variable, value in values)
    return "float " + ", ".join(filled) + ";"


def _each(design: ColumnDesign, statement: str) -> str:
    """Returns ``statement`` for one column of a vector: the variables ``s`` and ``t`` become the array elements
    ``s[j]`` and ``t[j]``. Without vectors, returns ``statement`` unchanged."""
    return statement if design.vector == 1 else re.sub(r"\b([st])\b", r"\1[j]", statement)


def _looped(design: ColumnDesign, statement: str) -> str:
    """Returns a CUDA statement that runs ``statement`` for each column of a thread."""
    return statement if design.vector == 1 else f"for (int j = 0; j < 4; j++) {_each(design, statement)}"


def _scaled(design: ColumnDesign, place: str) -> str:
    """Returns the CUDA expression for the index of a float. Without vectors, this is ``place``. With vectors, ``place``
    is the index of a float4, and the result is the index of float ``j`` in it."""
    return place if design.vector == 1 else f"({place}) * 4 + j" if " " in place else f"{place} * 4 + j"


# --------------------------------------------------------------------------------------------------------- transposes


def plain_transpose(spec: FamilySpec, design: TransposeDesign) -> TransposeDesign:
    """Returns ``design`` with each choice that has no effect set to its first value in ``TRANSPOSE_DESIGNS``."""
    return replace(design, vector=1) if design.tile == "none" else replace(design, along="input")


def transpose_fault(spec: FamilySpec, design: TransposeDesign) -> Fault:
    """Predicts the status and message that the judge (which tests solutions in the sandbox) returns for ``design``. The
    status is ``wrong`` if the kernel leaves out elements at the edges, ``build_error`` if the launch has no blocks, and
    otherwise ``ok``."""
    sizes = spec.columns, spec.rows
    if found := launch_fault(0, [1 if design.guard else size // design.side for size in sizes]):
        return found
    divided = design.vector if design.guard else design.side
    return ("ok" if all(size % divided == 0 for size in sizes) else "wrong"), ""


def transpose_files(spec: FamilySpec, design: TransposeDesign) -> tuple[str, str]:
    """Returns the kernel's source and the text of ``plan.json``, the list of its launches."""
    side = design.side
    sizes = "in0.shape[1]", "in0.shape[0]"
    grid = [f"cdiv({size}, {side})" if design.guard else f"{size} // {side}" for size in sizes]
    arguments = [*inputs(spec), "out0", "in0.shape[0]", "in0.shape[1]"]
    node = {"function": "fused", "grid": grid, "block": design.threads, "args": arguments}
    result = "float4" if design.vector == 4 else "float"
    body = _direct(spec, design) if design.tile == "none" else _tiled(spec, design)
    lines = [
        *head(spec, design.vector),
        signature(spec, design.vector, result, "int n, int m", design.threads),
        f"  int c = blockIdx.x * {side}, r = blockIdx.y * {side};",
        *(f"  {line}" for line in body),
        "}",
    ]
    return "\n".join(lines) + "\n", plan([node])


def _direct(spec: FamilySpec, design: TransposeDesign) -> list[str]:
    ways = f"i / {design.side}", f"i % {design.side}"
    a, b = ways if design.along == "input" else ways[::-1]
    return [
        *_walk(design, f"int a = {a}, b = {b};"),
        f"  {'if (r + a < n && c + b < m) ' if design.guard else ''}z[(long)(c + b) * n + r + a] = "
        f"{loaded(spec, '(long)(r + a) * m + c + b')};",
        "}",
    ]


def _tiled(spec: FamilySpec, design: TransposeDesign) -> list[str]:
    side, vector = design.side, design.vector
    steps = f"int a = i / {side // vector}, b = i % {side // vector}{' * 4' if vector == 4 else ''};"
    last = " + 3" if vector == 4 else ""

    def row(a: str, b: str, most: tuple[str, str], inner: str) -> tuple[str, str]:
        """Returns two pieces of CUDA code for the element or vector at row ``a`` and column ``b``: the ``if`` that
        skips it outside the matrix (empty without ``guard``), and its index. ``most`` holds the numbers of rows and
        columns. ``inner`` is the number of columns."""
        guard = f"if ({a} < {most[0]} && {b}{last} < {most[1]}) " if design.guard else ""
        index = f"(long)({a}) * {inner} + {b}"
        return guard, index if vector == 1 else f"({index}) / 4"

    read, source = row("r + a", "c + b", ("n", "m"), "m")
    write, target = row("c + a", "r + b", ("m", "n"), "n")
    if vector == 1:
        filled = [f"  {read}tile[a][b] = {loaded(spec, source)};"]
        stored = "tile[b][a]"
    else:
        places = "b", "b + 1", "b + 2", "b + 3"
        parts = " ".join(f"tile[a][{place}] = q.{part};" for place, part in zip(places, "xyzw", strict=True))
        filled = [f"  {read}{{", f"    float4 q = {loaded(spec, source)};", f"    {parts}", "  }"]
        stored = "{" + ", ".join(f"tile[{place}][a]" for place in places) + "}"
    return [
        f"__shared__ float tile[{side}][{side + (design.tile == 'padded')}];",
        *_walk(design, steps),
        *filled,
        "}",
        "__syncthreads();",
        *_walk(design, steps),
        f"  {write}z[{target}] = {stored};",
        "}",
    ]


def _walk(design: TransposeDesign, steps: str) -> list[str]:
    """Returns the head of a loop over the elements or vectors of a square. ``steps`` are the statements that compute
    the position of element ``i``."""
    count = design.side**2 // design.vector
    return [f"for (int i = threadIdx.x; i < {count}; i += {design.threads}) {{", f"  {steps}"]
