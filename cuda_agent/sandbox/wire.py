"""Defines the sandbox's data types and their JSON: solutions, task specifications, verdicts and probes.

``messages`` defines the frames that carry these types between processes; ``protocol`` defines the service's requests.
Workers import this module, so it imports only the standard library and ``format_names``."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from cuda_agent.format_names import Format

Mode = Literal["quick", "strict", "check"]  # check: the checks of quick, and no times
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
NESTING = 16  # most nested lists and dictionaries in the arguments of a task
_MOST_ELEMENTS = 1 << 48  # of one tensor
DELAY_UNIT = 16e-6  # seconds: unit of the delay of a timed chain
MOST_SHARED = 1 << 20  # most bytes of dynamic shared memory that a plan may ask for
# Kinds of inputs in strict mode, made by ``worker.values.input_kinds``.
KINDS = ("normal", "shifted", "ramp", "negative", "large", "sparse", "boundary")
# Mutants (wrong answers) with errors of rounding or of 1 %. A tolerance of 1e-2 should accept them.
ROUNDING = ("bf16", "1.01x")
# Baselines of strict mode and their names in reports. ``baseline`` adds the precision.
BASELINES = {"eager": "eager", "compile": "torch.compile", "max_autotune": "max-autotune"}


def baseline(name: str, precision: str) -> str:
    """Returns the label of a baseline (a time of the task's own model): ``name`` and ``precision``, joined by ``_``. An
    example is ``compile_tf32``."""
    return f"{name}_{precision}"


def baseline_parts(label: str) -> tuple[str, str]:
    """Splits the label of a baseline, such as ``compile_tf32``, into name and precision."""
    name, _, precision = label.rpartition("_")
    return name, precision


@dataclass(frozen=True)
class Solution:
    """A solution of a task. ``files`` holds texts by path, relative to the work folder. ``format`` decides how the
    files are run."""

    format: Format
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """The sha256 of the format and the files. The order of the files does not change it."""
        return hashlib.sha256(json.dumps([self.format, sorted(self.files.items())]).encode()).hexdigest()


@dataclass(frozen=True)
class FormatTraits:
    """Properties of a solution format. Requests to a judge carry them, because the judge and its workers do not import
    the modules of the formats."""

    host_is_ours: bool = False  # the sandbox's own code launches kernels, so device times and ``Verdict.ran`` are exact
    rule: str = ""  # name of the rule for ``ModelNew.forward`` (``worker.candidate.RULES``); empty: none
    own_work: str = ""  # what a call is expected to run, such as "kernel of triton.jit"; empty: nothing in particular
    advisory: bool = False  # the solution's Python runs unchecked, so the operators that it uses are not known
    untimed: str = ""  # why no time is taken; empty: times are taken


RanKind = Literal["own", "library", "torch", "memset", "unknown"]


@dataclass(frozen=True)
class Ran:
    """A kernel or operator that ran in one call.

    ``kind`` is ``own`` (part of the solution), ``library`` (a vendor's, such as cuBLAS, cuDNN or CUTLASS), ``torch``,
    ``memset`` (fills or copies memory), or ``unknown`` (the name does not tell). ``share`` is its part of the device's
    time in that call (on the CPU, of the call's time), or ``None`` if unknown."""

    name: str
    kind: RanKind
    calls: int
    share: float | None = None


@dataclass(frozen=True)
class KernelUse:
    """The resources of one of a solution's kernels on a GPU, as the compiler assigned them, and what follows from them.

    Of a plan's kernel the launch is known. An extension's host code launches its kernels: ``grid`` and ``waves`` are 0,
    and the occupancy is that of a block of ``block`` threads without dynamic shared memory."""

    name: str
    grid: int  #: blocks
    block: int  #: threads of a block
    registers: int  #: of a thread
    local_bytes: int  #: of a thread: registers that were spilled, and arrays
    shared_bytes: int  #: of a block, static and dynamic
    occupancy: float  #: share of a multiprocessor's warps that it holds at once; 0: no block fits
    limit: str  #: the resource that limits the occupancy
    waves: float  #: how many times the grid fills the device


@dataclass
class Verdict:
    """The judge's verdict on one solution.

    Times are median seconds per call, or ``None`` if the solution was not timed. ``reward`` is Eq. 1 of the CUDA Agent
    paper: -1 for a solution that is not correct, and 1 for a correct one. A correct solution that is more than 5 %
    faster than eager PyTorch gets 2. It gets 3 if it is also more than 5 % faster than ``torch.compile``. ``reward`` is
    ``None`` if the sandbox failed (status ``infra``)."""

    status: Status
    format: Format
    mode: Mode
    device: str  #: "cpu" or "cuda"
    clock: Literal["real", "model"]
    message: str = ""  #: why the solution was refused, shortened, for its author
    seconds: float | None = None
    eager_seconds: float | None = None
    compile_seconds: float | None = None
    samples: list[float] = field(default_factory=list)  #: raw timed calls, seconds
    interval: list[float] | None = None  #: ends of the 95 % interval of ``speedup_eager``, if times are measured
    compile_interval: list[float] | None = None  #: the same for ``speedup_compile``
    checks: int = 0  #: correctness checks passed
    max_error: float | None = None  #: largest absolute difference over all checks
    #: Seconds by phase, such as build, start, check and time; ``cleanup`` is the cleanup after the previous verdict.
    phases: dict[str, float] = field(default_factory=dict)
    cached: bool = False
    strict: dict[str, Any] | None = None  #: results of mode strict, such as errors by kind of input, and baselines
    bytes: int | None = None  #: bytes of the task's inputs and outputs
    flops: int | None = None  #: of matrix products, convolutions and attention, in one call of the reference
    peak_bytes_per_second: float | None = None  #: the peak of the device's memory
    peak_flops: float | None = None  #: peak operations per second of the device in the solution's arithmetic
    ran: list[Ran] = field(default_factory=list)  #: what ran in one call; empty if that was not observed
    advice: list[str] = field(default_factory=list)  #: hints from static rules and ``ran``; no refusal
    advisory: bool = False  #: whether the solution's Python ran unchecked, its operators unknown
    untimed: str = ""  #: why no time was taken, if none was
    kernels: list[KernelUse] = field(default_factory=list)  #: of a plan or an extension on a GPU; empty: not known

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

    @property
    def roofline_seconds(self) -> float | None:
        """The least seconds in which the device can transfer ``bytes`` and compute ``flops`` at its peak rates.
        ``None`` if neither limit is known."""
        known = ((self.bytes, self.peak_bytes_per_second), (self.flops, self.peak_flops))
        return max((count / peak for count, peak in known if count and peak), default=None)

    @property
    def speed_of_light(self) -> float | None:
        """The share of the device's limit that the solution reaches: ``roofline_seconds`` divided by ``seconds``.
        ``None`` if one of the two is unknown, or if times are simulated."""
        least = self.roofline_seconds
        return least / self.seconds if self.seconds and least and self.clock == "real" else None

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, and the derived values: the reward, the speed-ups and the speed of light. Leaves out
        ``kernels`` if it is empty."""
        derived = ("reward", "speedup_eager", "speedup_compile", "speed_of_light")
        found = asdict(self) | {name: getattr(self, name) for name in derived}
        return found if self.kernels else {key: value for key, value in found.items() if key != "kernels"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Verdict":
        """Returns the verdict in ``data``, a result of ``to_json``."""
        kernels = [KernelUse(**item) for item in data.get("kernels", ())]
        return cls(**(_known(cls, data) | {"ran": [Ran(**item) for item in data.get("ran", ())], "kernels": kernels}))


def _faster(seconds: float | None, baseline: float | None) -> bool:
    """Returns whether ``seconds`` is more than 5 % below ``baseline`` seconds (paper, Eq. 1)."""
    return seconds is not None and baseline is not None and seconds < 0.95 * baseline


@dataclass
class ToolResult:
    """The result of a tool call in a workspace: text for the model, and whether the text reports an error."""

    text: str
    error: bool = False


@dataclass
class CommandResult:
    """The result of a command of an agent's shell (compile, verify, profile or restore).

    Attributes:
        text: The command's output.
        error: Whether the command exits with 1.
        files: The files that the command changes in the work folder: the new text by path, or None to remove a file."""

    text: str
    error: bool = False
    files: dict[str, str | None] = field(default_factory=dict)


LOST = "infrastructure: "  # begins the error of a probe whose judge or server was lost
NO_PROGRAMS = "no program can be started here, and no file made"  # a worker's message about its jail


@dataclass(frozen=True)
class Tensor:
    """The shape and dtype of an input, an output or a weight. The dtype is torch's name, such as ``float32``."""

    shape: tuple[int, ...]
    dtype: str


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the size of the memory, in elements, that a tensor with ``shape`` and ``strides`` spans: from its first
    to its last element, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True)
class TaskSpec:
    """The facts about a task that a solution may use besides the task's source: the shapes and dtypes of its tensors,
    and its plain arguments. An argument is plain if it is a number, a string, a bool or ``None``, or a list or
    dictionary of such values."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    weights: dict[str, Tensor]  # by state_dict name
    arguments: tuple[Any, ...]  # of forward: {"tensor": index} or {"value": plain} or a list of such items
    init: tuple[Any, ...]  # init arguments: {"value": plain} or {"opaque": type name}
    parameter_count: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TaskSpec":
        """Returns the spec in ``data``, which a worker reported. Raises ``AttributeError``, ``KeyError``, ``TypeError``
        or ``ValueError`` if ``data`` is invalid."""
        tuples = {name: tuple(data[name]) for name in ("arguments", "init")}
        weights = dict(zip(data["weights"], _tensors(data["weights"].values()), strict=True))
        inputs, outputs = tuple(_tensors(data["inputs"])), tuple(_tensors(data["outputs"]))
        spec = cls(inputs, outputs, weights, **tuples, parameter_count=data["parameter_count"])
        spec.check()
        return spec

    def check(self) -> None:
        """Raises ``ValueError`` if the spec is invalid: an impossible shape or dtype, too deep nesting, or an argument
        whose form differs from the comments beside the fields."""
        for tensor in (*self.inputs, *self.outputs, *self.weights.values()):
            extents = all(type(extent) is int and extent >= 0 for extent in tensor.shape)
            if not extents or math.prod(tensor.shape) > _MOST_ELEMENTS or not isinstance(tensor.dtype, str):
                raise ValueError("a tensor that cannot be")

        shallow([*self.arguments, *self.init])

        def is_argument(item: Any) -> bool:
            if isinstance(item, list):
                return all(map(is_argument, item))
            if not isinstance(item, dict) or not item.keys() & {"tensor", "value"}:
                return False
            return "tensor" not in item or (type(item["tensor"]) is int and 0 <= item["tensor"] < len(self.inputs))

        plain = all(map(is_argument, self.arguments)) and all(isinstance(item, dict) for item in self.init)
        if not plain or type(self.parameter_count) is not int:
            raise ValueError("arguments and init are not as the service gives them")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Probe:
    """The result of running a task without a solution. ``error`` is empty if the task ran. It begins with ``LOST`` if
    the sandbox failed. Times are median seconds."""

    error: str = ""
    deterministic: bool = False  # the same inputs give the same outputs, within the tolerance
    # wrong answer -> least tolerance that accepts it; None: the sandbox's tolerance rejects it
    mutants: dict[str, float | None] = field(default_factory=dict)
    eager_seconds: float | None = None
    compile_seconds: float | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    parameter_count: int = 0

    @property
    def lets_through(self) -> dict[str, float]:
        """The wrong answers (mutants) that the sandbox's tolerance accepts, each with the least tolerance that accepts
        it. Excludes the mutants in ``ROUNDING``: their errors are so small that a tolerance should accept them."""
        return {name: least for name, least in self.mutants.items() if least is not None and name not in ROUNDING}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Probe":
        return cls(**(_known(cls, data) | {name: _tensors(data[name]) for name in ("inputs", "outputs")}))


def _known(cls: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Returns the items of ``data`` that are fields of ``cls``. There may be other items, because a server may be older
    or newer than this program."""
    return {key: value for key, value in data.items() if key in cls.__dataclass_fields__}


def _tensors(items: Iterable[Any]) -> list[Tensor]:
    return [Tensor(tuple(item["shape"]), item["dtype"]) for item in items]


def shallow(value: Any, depth: int = NESTING) -> Any:
    """Returns ``value``. Raises ``ValueError`` if lists and dictionaries in it are nested more than ``depth`` deep."""
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError("lists and dictionaries are nested too deeply")
        for part in value.values() if isinstance(value, dict) else value:
            shallow(part, depth - 1)
    return value


def printable(text: str) -> str:
    """Returns ``text`` as one line without control characters, so that untrusted text is safe to print."""
    return "".join(c if c.isprintable() else " " for c in text)
