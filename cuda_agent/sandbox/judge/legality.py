"""Classifies the kernels that ran in one call of a solution: the solution's own, a vendor library's or torch's.

A solution in the plan format is a list of kernel launches. The sandbox itself launches these kernels, so their list is
exact. Other formats run the solution's own host code in a worker process. The worker reports which kernels ran, but
the solution's code can forge the report. The result then serves only as advice to the solution's author."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cuda_agent.sandbox.wire import Ran, RanKind, printable

_TORCH = re.compile(r"\b(at|at_cuda_detail|c10|torch|pytorch_flash|sdp|aten)::|^triton_(poi|red|per|tem)_")
_COPIES = re.compile(r"FillFunctor|direct_copy_kernel")  # kernels of torch that compute nothing
_LIBRARY = re.compile(
    r"\b(cutlass|cublas\w*|cublasLt|cudnn\w*|cask\w*|nvjet|xmma)\b|^(void )?(cutlass|cudnn|cublas|cask|nvjet)"
    r"|^(void )?(volta|turing|ampere|hopper|blackwell|maxwell|sm\d\d+)_\w*"
    r"|\b(gemm[vkS]?\w*_kernel\w*|gemv\w*|splitKreduce_kernel|dot_kernel|reduce_1Block_kernel|implicit_convolve\w*"
    r"|winograd\w*|nchwToNhwc\w*|nhwcToNchw\w*|fft2d\w*|convolve\w*_sgemm\w*|fmha\w*)\b",
)  # fmt: skip
_KINDS = ("own", "library", "torch", "memset", "unknown")
_MOST, _LONGEST, _READ = 64, 120, 1000  # most records; characters of a name that are kept, and that are read
_SHOWN = 4


def of_plan(nodes: Sequence[dict[str, Any]], seconds: object = None) -> list[Ran]:
    """Returns the kernels that run in one call of a plan. A plan is a solution that consists of ``nodes``: kernels,
    library calls and memsets. ``seconds`` is a worker's report: a list with the seconds of each node. If it is not a
    valid list, the nodes' shares of the call's time are ``None``."""
    times: list[Any] = [None] * len(nodes)
    if isinstance(seconds, list) and len(seconds) == len(nodes) and all(map(_is_time, seconds)):
        whole = sum(seconds)
        times = [item / whole if whole else None for item in seconds]
    rows: list[tuple[str, RanKind, int, float | None]] = []
    for node, share in zip(nodes, times, strict=True):
        if "memset" in node:
            rows.append(("memset", "memset", 1, share))
        elif "library" in node:
            rows.append((f"{node['library']} {node.get('compute', '')}".strip(), "library", 1, share))
        else:
            rows.append((printable(node.get("function", node["symbol"])), "own", 1, share))
    return _merged(rows)


def of_call(told: Sequence[object], sources: Iterable[str] = (), library: bytes = b"") -> list[Ran]:
    """Returns the kernels and operators that ran in one call of a solution, and drops invalid records.

    Args:
        told: A worker's reports. Each is a list of records ``[name, kind, calls, share]``, one per kernel or operator.
            ``calls`` says how often it ran. ``share`` is its share of the call's time, or ``None``. If ``kind`` is not
            a ``RanKind``, ``kind_of`` determines the kind.
        sources: The texts of the solution's source files.
        library: The bytes of the solution's built library."""
    text = "\n".join(sources)
    rows: list[tuple[str, RanKind, int, float | None]] = []
    for item in [item for part in told if isinstance(part, list) for item in part[:_MOST]]:
        match item:
            case [str(name), str(kind), int(calls), float() | int() | None as share] if calls > 0:
                name = name[:_READ]
                known: RanKind = kind if kind in _KINDS else kind_of(name, text, library)  # type: ignore[assignment]
                part = float(share) if share is not None and 0 <= share <= 1 else None
                rows.append((short(name), known, int(min(calls, 1 << 31)), part))
    return _merged(rows)


def kind_of(name: str, sources: str = "", library: bytes = b"") -> RanKind:
    """Classifies a kernel by its demangled ``name``. A name that occurs in ``library`` (the bytes of the solution's
    built library) is the solution's own. Otherwise patterns recognise kernels of torch and of vendors. If no pattern
    matches, a name that occurs in ``sources`` (the solution's source text) is the solution's own. The sources come
    last, because a comment may contain any name."""
    base = base_name(name)
    plain = base.encode(errors="replace")  # the worker may report half a character
    if base and (b"%d%b" % (len(plain), plain) in library or b"\0%b\0" % plain in library):  # C++ mangles; C does not
        return "own"
    if _TORCH.search(name):
        return "memset" if _COPIES.search(name) else "torch"
    if _LIBRARY.search(name):
        return "library"
    if base and re.search(rf"\b{re.escape(base)}\b", sources):
        return "own"
    return "unknown"


def base_name(name: str) -> str:
    """Returns a kernel's bare name: ``norm`` for ``void norm<128>(float*)``, ``run`` for ``cub::Sum<int>::run()``."""
    depth, plain = 0, []
    for character in name.replace("(anonymous namespace)", "anonymous"):
        if character == "(" and depth == 0:
            break
        depth += (character == "<") - (character == ">")
        if depth == 0 and character != ">":
            plain.append(character)
    words = "".join(plain).split()
    return words[-1].rpartition("::")[2] if words else ""


def short(name: str) -> str:
    """Returns a kernel's name as one short line, without ``void`` and without parameters."""
    name = printable(name)
    cut = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    depth = 0
    for index, character in enumerate(cut):
        if character == "(" and depth == 0 and index:
            cut = cut[:index]
            break
        depth += (character == "<") - (character == ">")
    return cut if len(cut) <= _LONGEST else cut[: _LONGEST - 3] + "..."


def advice(ran: Sequence[Ran], own_work: str) -> list[str]:
    """Returns lines of advice about kernels in ``ran`` that may not be the solution's own. ``own_work`` describes the
    code that a call is expected to run, such as "kernel of triton.jit". If it is empty, nothing in particular is
    expected."""
    if not ran:
        return []
    kinds = {r.kind for r in ran}
    lines = []
    if "torch" in kinds and not kinds & {"own", "library"}:
        lines.append(f"nothing of the solution's own was seen to run: torch computed with {_names(ran, 'torch')}")
    elif "torch" in kinds:
        lines.append(f"torch computed a part: {_names(ran, 'torch')}")
    elif own_work and "own" not in kinds:
        lines.append(f"no {own_work} was seen to run")
    if "unknown" in kinds:
        lines.append(f"of unknown origin: {_names(ran, 'unknown')}")
    return lines


def _names(ran: Sequence[Ran], kind: RanKind) -> str:
    names = [r.name for r in ran if r.kind == kind]
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _is_time(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0


def _merged(rows: Iterable[tuple[str, RanKind, int, float | None]]) -> list[Ran]:
    """Merges rows (name, kind, calls, share) of the same name and kind into records, the largest share first."""
    found: dict[tuple[str, RanKind], Ran] = {}
    for name, kind, calls, share in rows:
        old = found.get((name, kind))
        both = None if share is None or (old and old.share is None) else share + ((old.share or 0.0) if old else 0.0)
        found[name, kind] = Ran(name, kind, calls + (old.calls if old else 0), None if both is None else min(both, 1.0))
    return sorted(found.values(), key=lambda r: -(r.share or 0.0))[:_MOST]
