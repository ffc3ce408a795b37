"""The sandbox's data types: solutions, task specifications, verdicts and probes, with their JSON.

Only the standard library and the list of formats' names are imported here, since workers import this module.  Not
covered: the frames that carry these types between processes (``messages``), and the service's HTTP (``protocol``)."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cuda_agent.format_names import Format

Mode = Literal["quick", "strict"]
Status = Literal["ok", "build_error", "wrong", "cheat", "timeout", "crash", "infra"]


# Operators that ``forward`` of the published work folder may call: they create, view or inspect tensors.
_ALLOWED_TEXT = """
    empty empty_like zeros zeros_like ones ones_like full full_like new_empty new_zeros new_ones new_full empty_strided
    __get__ size dim ndimension numel nelement stride storage_offset element_size data_ptr is_contiguous contiguous
    view view_as reshape flatten unflatten squeeze unsqueeze expand expand_as permute transpose movedim t detach
    is_floating_point get_device type to float double half bfloat16 long int bool __len__ __iter__ __getitem__ unbind
    requires_grad_ __repr__ __bool__ item dtype device shape
"""
ALLOWED = frozenset(_ALLOWED_TEXT.split())
# Seconds: the unit in which the delay of a timed chain is sent.
DELAY_UNIT = 16e-6
# Kinds of inputs in strict mode, made by ``worker.input_kinds``.
KINDS = ("normal", "shifted", "ramp", "negative", "large", "sparse", "boundary")
# Baselines of strict mode and their names in reports. ``baseline`` adds the precision.
BASELINES = {"eager": "eager", "compile": "torch.compile", "max_autotune": "max-autotune"}


def baseline(name: str, precision: str) -> str:
    """Return the label of a baseline: ``compile`` and ``tf32`` give ``compile_tf32``."""
    return f"{name}_{precision}"


def baseline_parts(label: str) -> tuple[str, str]:
    """Split a label of ``baseline`` into name and precision."""
    name, _, precision = label.rpartition("_")
    return name, precision


@dataclass(frozen=True)
class Solution:
    """The files that answer a task, by path relative to the work folder.  ``format`` decides how they are run."""

    format: Format
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """Return the sha256 over format and files, independent of their order."""
        return hashlib.sha256(json.dumps([self.format, sorted(self.files.items())]).encode()).hexdigest()


@dataclass(frozen=True)
class FormatTraits:
    """What the judge and its workers know of a solution's format; it crosses in the request, since they import none."""

    host_is_ours: bool = False  # the launcher is the sandbox's code: device times and the list of what ran are exact
    rule: str = ""  # for ``ModelNew.forward`` (``worker.candidate.RULES``); empty: none
    own_work: str = ""  # what a call must be seen to run, in words; empty: nothing
    advisory: bool = False  # the solution's Python ran free: what it computed with is not known
    untimed: str = ""  # why no time is taken; empty: times are taken


RanKind = Literal["own", "library", "torch", "memset", "unknown"]


@dataclass(frozen=True)
class Ran:
    """A kernel or operator that ran in one call.

    ``own``: of the solution; ``library``: of a vendor's library (cuBLAS, cuDNN, CUTLASS); ``torch``: an operator of
    torch's, or a kernel of its own; ``memset``: memory filled or copied; ``unknown``: none of these by its name.
    ``share`` is its part of the device's time in that call (on the CPU of the call's time), ``None`` where not known.
    """

    name: str
    kind: RanKind
    calls: int
    share: float | None = None


@dataclass
class Verdict:
    """What the judge says of one solution.

    Times are seconds per call (medians); ``None`` where the solution never got that far.  ``reward`` is the paper's
    Eq. 1: -1 not correct, 1 correct, 2 more than 5 % faster than eager, 3 more than 5 % faster than eager and
    ``torch.compile``; ``None`` for ``infra``, which is never charged to the candidate."""

    status: Status
    format: Format
    mode: Mode
    device: str  # "cpu" or "cuda"
    clock: Literal["real", "model"]
    message: str = ""  # for the author of the solution: why it was refused, shortened
    seconds: float | None = None
    eager_seconds: float | None = None
    compile_seconds: float | None = None
    samples: list[float] = field(default_factory=list)  # raw timed calls, seconds
    checks: int = 0  # correctness checks passed
    max_error: float | None = None  # largest absolute difference over all checks
    # Seconds of build, start, check, time; settle: after the verdict before it.
    phases: dict[str, float] = field(default_factory=dict)
    cached: bool = False
    strict: dict[str, Any] | None = None  # mode strict: inputs and errors by kind, precision, interval, baselines
    bytes: int | None = None  # of the task's inputs and outputs
    flops: int | None = None  # of one call of the reference: matrix products, convolutions, attention
    peak_bytes_per_second: float | None = None  # of the device's memory
    peak_flops: float | None = None  # a second, of the device in the arithmetic of the solution
    ran: list[Ran] = field(default_factory=list)  # in one call; empty: not observed
    advice: list[str] = field(default_factory=list)  # hints from static rules and ``ran``; no refusal
    advisory: bool = False  # the solution's Python ran unchecked: its operators are not known
    untimed: str = ""  # why no time was taken, where the format has none on this device

    @property
    def reward(self) -> int | None:
        if self.status == "infra":
            return None
        if self.status != "ok":
            return -1
        if not _faster(self.seconds, self.eager_seconds):
            return 1
        return 3 if _faster(self.seconds, self.compile_seconds) else 2

    @property
    def speedup_eager(self) -> float | None:
        return self.eager_seconds / self.seconds if self.seconds and self.eager_seconds else None

    @property
    def speedup_compile(self) -> float | None:
        return self.compile_seconds / self.seconds if self.seconds and self.compile_seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the derived values."""
        derived = ("reward", "speedup_eager", "speedup_compile")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Verdict":
        """Read the result of ``to_json``; derived values are ignored."""
        fields = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        return cls(**(fields | {"ran": [Ran(**item) for item in data.get("ran", ())]}))


def _faster(seconds: float | None, baseline: float | None) -> bool:
    """Whether it is more than 5 % faster: (baseline - seconds) / baseline > 0.05 (paper, Eq. 1)."""
    return seconds is not None and baseline is not None and seconds < 0.95 * baseline


@dataclass
class ToolResult:
    """What a tool of the workspace gave back: text for the model, and whether it was an error."""

    text: str
    error: bool = False


# Message of a worker when untrusted code tries to start a program where the jail allows none.
NO_PROGRAMS = "no program can be started here"


@dataclass(frozen=True)
class Tensor:
    """Shape and dtype (torch's name, such as ``float32``) of an input, output or weight."""

    shape: tuple[int, ...]
    dtype: str


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a tensor with these strides."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True)
class TaskSpec:
    """What a solution may know of a task besides its source: shapes, dtypes, plain values."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: dict[str, Tensor]  # by state_dict name
    arguments: tuple[Any, ...]  # of forward: {"tensor": index} or {"value": plain} or a list of those
    init: tuple[Any, ...]  # init arguments: {"value": plain} or {"opaque": type name}
    parameter_count: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TaskSpec":
        tuples = {name: tuple(data[name]) for name in ("arguments", "init")}
        weights = dict(zip(data["weights"], _tensors(data["weights"].values()), strict=True))
        inputs, outputs = tuple(_tensors(data["inputs"])), tuple(_tensors(data["outputs"]))
        return cls(inputs, outputs, weights, **tuples, parameter_count=data["parameter_count"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Probe:
    """What running a task (no solution) shows.  ``error`` is empty when it ran; times are seconds per call, medians."""

    error: str = ""
    deterministic: bool = False  # the same inputs give the same outputs, within the tolerance
    constant: bool = False  # an output has one value only, or nothing but NaN
    indistinguishable: bool = False  # different inputs give outputs equal within the tolerance
    eager_seconds: float | None = None
    compile_seconds: float | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    parameter_count: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Probe":
        return cls(**(data | {name: _tensors(data[name]) for name in ("inputs", "outputs")}))


def _tensors(items: Iterable[Any]) -> list[Tensor]:
    return [Tensor(tuple(item["shape"]), item["dtype"]) for item in items]


def printable(text: str) -> str:
    """Return one line that is safe to print: untrusted text must not clear a terminal or imitate the sandbox's own
    lines."""
    return "".join(c if c.isprintable() else " " for c in text)
