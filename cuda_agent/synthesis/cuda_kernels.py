"""Writes CUDA kernels for the tasks of ``family``: one source and one launch for each design.

A design is a choice of mapping, sizes and caches. Which design is fast depends on the task's shape, and so does which
design is right at all: vectors need lengths that they divide, registers must hold a whole row, shared memory has a
limit. ``fault`` says from shape and design alone what the judge finds wrong with a design."""

import json
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

from cuda_agent.sandbox.wire import MOST_SHARED, Status
from cuda_agent.synthesis.family import ENDINGS, FamilySpec, steps

KERNEL, PLAN = "kernels/fused.cu", "plan.json"
SHARED_BYTES = 227 << 10  # most shared memory of a block (compute capability 9.0)
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
    """The design of a kernel for a row-wise ending.

    ``lanes``    what computes one row: a thread, a warp or a block
    ``threads``  threads of a block
    ``items``    vectors of a row that a lane keeps, if ``cache`` is "registers"
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
        """The number of lanes that share one row."""
        return {"thread": 1, "warp": 32, "block": self.threads}[self.lanes]

    @property
    def rows(self) -> int:
        """The number of rows of one block."""
        return self.threads // self.width


Design = ChainDesign | RowDesign


def draw_design(spec: FamilySpec, rng: random.Random) -> Design:
    """Draws each choice uniformly, without regard to the shape. Choices without effect have their first value."""
    if spec.ending is None:
        return ChainDesign(**{name: rng.choice(values) for name, values in CHAIN_DESIGNS.items()})
    return _plain(spec, RowDesign(**{name: rng.choice(values) for name, values in ROW_DESIGNS.items()}))


def redraw(spec: FamilySpec, design: Design, rng: random.Random) -> Design:
    """Returns ``design`` with one choice drawn anew, so that the kernel or its launch changes."""
    table = CHAIN_DESIGNS if isinstance(design, ChainDesign) else ROW_DESIGNS
    while True:
        name = rng.choice(tuple(table))
        other = replace(design, **{name: rng.choice(table[name])})
        if isinstance(other, RowDesign):
            other = _plain(spec, other)
        if other != design:
            return other


def _plain(spec: FamilySpec, design: RowDesign) -> RowDesign:
    """Returns ``design`` with the first value for each choice that has no effect."""
    passes = len(_reduction(spec, design).passes) + ENDINGS[spec.ending].maps if spec.ending else 0
    if passes == 1:
        design = replace(design, cache="none")
    if design.cache != "registers":
        design = replace(design, items=1)
    return design if spec.ending in ("var", "layer_norm") else replace(design, moments="one")


def fault(spec: FamilySpec, design: Design) -> tuple[Status, str]:
    """Returns the judge's status and message for ``design``: "ok", "wrong" (elements are left out) or "build_error"
    (too much shared memory)."""
    if isinstance(design, ChainDesign):
        numel = spec.rows * spec.columns
        whole = numel // design.vector % (design.threads * design.items) == 0
        right = numel % design.vector == 0 and (design.guard or whole)
        return ("ok" if right else "wrong"), ""
    shared = 4 * spec.columns * design.rows
    if design.cache == "shared" and shared > MOST_SHARED:
        return "build_error", f"nodes[0].shared: {shared} bytes of shared memory are not possible"
    if design.cache == "shared" and shared > SHARED_BYTES:
        return "build_error", f"ValueError: fused: {shared} bytes of shared memory, a block has at most {SHARED_BYTES}"
    kept = design.width * design.items * design.vector
    held = design.cache != "registers" or kept >= spec.columns
    return ("ok" if spec.columns % design.vector == 0 and held else "wrong"), ""


def files(spec: FamilySpec, design: Design) -> dict[str, str]:
    """Returns the files of the solution: the kernel's source and the plan."""
    source = _chain(spec, design) if isinstance(design, ChainDesign) else _rows(spec, design)
    return {KERNEL: source, PLAN: _plan(spec, design)}


def _plan(spec: FamilySpec, design: Design) -> str:
    arguments = ["in0", *(["in1"] if spec.binary else []), "out0"]
    more: dict[str, Any] = {}
    if isinstance(design, ChainDesign):
        share = design.threads * design.items * design.vector
        grid = f"cdiv(in0.numel, {share})" if design.guard else f"in0.numel // {share}"
        arguments.append("in0.numel" if design.vector == 1 else f"in0.numel // {design.vector}")
    else:
        grid = "in0.shape[0]" if design.rows == 1 else f"cdiv(in0.shape[0], {design.rows})"
        arguments += ["in0.shape[0]", "in0.shape[1]"]
        if design.cache == "shared":
            more["shared"] = f"in0.shape[1] * {4 * design.rows}"
    node = {"kernel": KERNEL, "function": "fused", "grid": grid, "block": design.threads, **more, "args": arguments}
    return json.dumps({"nodes": [node]}) + "\n"


def _head(spec: FamilySpec, vector: int) -> list[str]:
    """Returns the function ``step``, which applies the chain to one element, or to each element of a vector."""
    second = ", float w" if spec.binary else ""
    lines = [f"__device__ float step(float v{second}) {{", *(f"  {step}" for step in steps(spec)), "  return v;", "}"]
    if vector == 4:
        second = ", float4 b" if spec.binary else ""
        parts = ", ".join(f"step(a.{part}{f', b.{part}' if spec.binary else ''})" for part in "xyzw")
        lines += [f"__device__ float4 step(float4 a{second}) {{", f"  return {{{parts}}};", "}"]
    return lines


def _signature(spec: FamilySpec, design: Design, sizes: str) -> str:
    kind = "float4" if design.vector == 4 else "float"
    buffers = [f"const {kind}* x", *([f"const {kind}* y"] if spec.binary else [])]
    # Without the bound on registers, a block of 1,024 threads may not be launched.
    bound = f"__launch_bounds__({design.threads}) " if isinstance(design, RowDesign) else ""
    result = kind if spec.ending is None or ENDINGS[spec.ending].maps else "float"
    return f"__global__ void {bound}fused({', '.join(buffers)}, {result}* z, {sizes}) {{"


def _loaded(spec: FamilySpec, index: str) -> str:
    return f"step(x[{index}]{f', y[{index}]' if spec.binary else ''})"


def _chain(spec: FamilySpec, design: ChainDesign) -> str:
    lines = [
        *_head(spec, design.vector),
        _signature(spec, design, "int n"),
        f"  int i = blockIdx.x * {design.threads * design.items} + threadIdx.x;",
        f"  for (int k = 0; k < {design.items}; k++, i += {design.threads})",
        f"    {'if (i < n) ' if design.guard else ''}z[i] = {_loaded(spec, 'i')};",
        "}",
    ]
    return "\n".join(lines) + "\n"


Sum = tuple[str, str, str]  # a variable, what it becomes ("sum", "max" or "min"), of which expression of v


@dataclass(frozen=True)
class _Reduction:
    """A row-wise ending: passes over the row, the statements after each, and the output (of the row, or of each v)."""

    passes: tuple[tuple[tuple[Sum, ...], str], ...]
    output: str


def _one(*sums: Sum, then: str = "") -> tuple[tuple[Sum, ...], str]:
    return sums, then


_S, _SQUARES, _LARGEST = ("s", "sum", "v"), ("s", "sum", "v * v"), ("s", "max", "v")
_BOTH = _S, ("t", "sum", "v * v")
_MEAN, _SPREAD = _one(_S, then="s /= m;"), ("t", "sum", "(v - s) * (v - s)")
_EXPONENTS = ("t", "sum", "exp(v - s)")
_REDUCTIONS: dict[str, _Reduction] = {
    "sum": _Reduction((_one(_S),), "s"),
    "mean": _Reduction((_one(_S),), "s / m"),
    "amax": _Reduction((_one(_LARGEST),), "s"),
    "amin": _Reduction((_one(("s", "min", "v")),), "s"),
    "norm": _Reduction((_one(_SQUARES),), "sqrt(s)"),
    "var": _Reduction((_one(*_BOTH),), "(t - s * s / m) / (m - 1)"),
    "var two": _Reduction((_MEAN, _one(_SPREAD)), "t / (m - 1)"),
    "softmax": _Reduction((_one(_LARGEST), _one(_EXPONENTS)), "exp(v - s) / t"),
    "log_softmax": _Reduction((_one(_LARGEST), _one(_EXPONENTS, then="s += log(t);")), "v - s"),
    "normalize": _Reduction((_one(_SQUARES, then="s = 1 / (sqrt(s) + 1e-12f);"),), "v * s"),
    "rms_norm": _Reduction((_one(_SQUARES, then="s = rsqrt(s / m + 1e-7f);"),), "v * s"),
    "layer_norm": _Reduction((_one(*_BOTH, then="s /= m, t = rsqrt(t / m - s * s + 1e-5f);"),), "(v - s) * t"),
    "layer_norm two": _Reduction((_MEAN, _one(_SPREAD, then="t = rsqrt(t / m + 1e-5f);")), "(v - s) * t"),
}
_START = {"sum": "0", "max": "-1e30f", "min": "1e30f"}
_JOIN = {"sum": "{0} += {1};", "max": "{0} = fmax({0}, {1});", "min": "{0} = fmin({0}, {1});"}


def _reduction(spec: FamilySpec, design: RowDesign) -> _Reduction:
    assert spec.ending is not None
    return _REDUCTIONS.get(f"{spec.ending} {design.moments}") or _REDUCTIONS[spec.ending]


def _across(kind: str, design: RowDesign) -> list[str]:
    """Returns the function that reduces a value over the lanes of a row."""
    lines = [f"__device__ float all_{kind}(float s) {{", "  for (int k = 16; k; k /= 2)"]
    lines += [f"    {_JOIN[kind].format('s', '__shfl_xor_sync(~0u, s, k)')}"]
    if design.lanes == "block":
        lines += [
            "  __shared__ float part[32];",
            "  __syncthreads();",
            "  part[threadIdx.x / 32] = s;",
            "  __syncthreads();",
            "  s = part[0];",
            f"  for (int k = 1; k < {design.threads // 32}; k++)",
            f"    {_JOIN[kind].format('s', 'part[k]')}",
        ]
    return [*lines, "  return s;", "}"]


def _rows(spec: FamilySpec, design: RowDesign) -> str:
    assert spec.ending is not None
    reduction, maps = _reduction(spec, design), ENDINGS[spec.ending].maps
    kinds = sorted({kind for sums, _ in reduction.passes for _, kind, _ in sums}) if design.lanes != "thread" else []
    lines = _head(spec, design.vector) + [line for kind in kinds for line in _across(kind, design)]
    lines.append(_signature(spec, design, "int n, int m"))
    body = _place(spec, design, maps)
    kind = "float4" if design.vector == 4 else "float"
    if design.cache == "registers":
        body.append(f"{kind} q[{design.items}];")
    if design.cache == "shared":
        per = "m" if design.vector == 1 else "m / 4"
        body += [f"extern __shared__ {kind} tile[];", f"{kind}* q = tile + threadIdx.x / {design.width} * ({per});"]
    for number, (sums, then) in enumerate(reduction.passes):
        body.append("float " + ", ".join(f"{variable} = {_START[what]}" for variable, what, _ in sums) + ";")
        joined = [_JOIN[what].format(variable, of) for variable, what, of in sums]
        body += _loop(spec, design, number == 0, joined, "")
        if design.lanes != "thread":
            body += [f"{variable} = all_{what}({variable});" for variable, what, _ in sums]
        body += [then] * bool(then)
    if maps:
        body += _loop(spec, design, False, [f"v = {reduction.output};"], "z[c]")
    elif design.lanes == "thread":
        body.append(f"z[r] = {reduction.output};")
    else:
        body.append(f"if (lane == 0) z[r] = {reduction.output};")
    return "\n".join([*lines, *(f"  {line}" for line in body), "}"]) + "\n"


def _place(spec: FamilySpec, design: RowDesign, maps: bool) -> list[str]:
    """Returns the statements that find a thread's row ``r`` and lane, and move the pointers to the row."""
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
    """Returns a loop of a lane over its part of the row. ``body`` uses or changes the element ``v``. If ``target`` is
    given, the changed values are stored there."""
    end, width = ("m" if design.vector == 1 else "m / 4"), design.width
    kind = "float4" if design.vector == 4 else "float"
    name = "v" if design.vector == 1 else "a"
    kept = {"none": "", "registers": "q[k]", "shared": "q[c]"}[design.cache]
    value = f"{kept} = {_loaded(spec, 'c')}" if first and kept else kept or _loaded(spec, "c")
    inner = [f"{kind} {name} = {value};"]
    if design.vector == 1:
        inner += body
    else:
        inner += [
            "for (int j = 0; j < 4; j++) {",
            "  float& v = ((float*)&a)[j];",
            *(f"  {line}" for line in body),
            "}",
        ]
    inner += [f"{target} = {name};"] * bool(target)
    if design.cache != "registers":
        return [f"for (int c = lane; c < {end}; c += {width}) {{", *(f"  {line}" for line in inner), "}"]
    return [
        f"for (int k = 0, c = lane; k < {design.items}; k++, c += {width})",
        f"  if (c < {end}) {{", *(f"    {line}" for line in inner), "  }",
    ]  # fmt: skip
