"""Defines the requests to the sandbox's HTTP service, their limits, and the error with which the service refuses them.

Validation refuses unknown keys, wrong types, invalid Unicode, unsafe file names and deep nesting. The limits ensure
that a valid request fits into one message to the judge (the process that checks and times solutions), even if JSON
escapes every character. Validation does not check whether a task runs or a solution builds."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
)

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import ConfigError
from cuda_agent.sandbox.formats.plan import DTYPES
from cuda_agent.sandbox.wire import Format, Mode, Solution, TaskSpec, shallow
from cuda_agent.tasks.task import Task

BODY_BYTES = 8 << 20  # largest request on the wire
TASK_BYTES = 512 << 10
SOLUTION_BYTES = 1 << 20  # largest sum of all files
MOST_FILES, MOST_NAME, MOST_DEPTH = 200, 200, 12
PRIORITIES = 100
_NAME = re.compile(r"[^\x00-\x1f\x7f/\\]+(/[^\x00-\x1f\x7f/\\]+)*")

# Settings that client and server must share: under other settings a verdict differs.
AGREED = (
    "device", "clock", "threads", "checks", "input_kinds", "tolerance", "timed_calls", "build_seconds", "run_seconds",
    "first_pass_seconds", "memory_mb", "train_mode",
)  # fmt: skip

Asked = dict[str, str | bool | int | float | list[str]]  # settings by name


class ServiceError(Exception):
    """A refusal by the service. ``status`` is the HTTP status. ``kind`` is the reason as one word, for programs.
    ``where`` names the wrong part of the request, or is empty. ``retry_after`` is the number of seconds after which the
    client may try again, or ``None``."""

    def __init__(self, status: int, kind: str, message: str, where: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.where, self.retry_after = status, kind, where, retry_after

    def to_json(self) -> dict[str, Any]:
        error = {"kind": self.kind, "message": str(self)}
        return {"error": error | ({"where": self.where} if self.where else {})}


def _text(limit: int) -> Any:
    def check(text: str) -> str:
        if len(text.encode()) > limit:
            raise ValueError(f"more than {limit} bytes")
        return text

    return Annotated[str, AfterValidator(check)]


def file_name(name: str) -> str:
    """Returns ``name`` if it is the relative path of a file inside its folder. Raises ``ValueError`` for another path,
    and for a path that is too long or too deep."""
    name.encode()
    parts = name.split("/")
    if len(name) > MOST_NAME or len(parts) > MOST_DEPTH:
        raise ValueError(f"the file name {name[:40]!r}... is too long or too deep")
    if not _NAME.fullmatch(name) or any(part in (".", "..") for part in parts):
        raise ValueError(f"{name[:80]!r} is no name of a file inside the folder")
    return name


def _files(files: dict[str, str]) -> dict[str, str]:
    if len(files) > MOST_FILES:
        raise ValueError(f"more than {MOST_FILES} files")
    if sum(len(text.encode()) for text in files.values()) > SOLUTION_BYTES:
        raise ValueError(f"the files have more than {SOLUTION_BYTES} bytes")
    for name in files:
        file_name(name)
    return files


def _changes(files: dict[str, str | None]) -> dict[str, str | None]:
    _files({name: text or "" for name, text in files.items()})
    return files


def _at_the_top(name: str) -> str:
    if "/" in file_name(name):
        raise ValueError("only files at the top of the folder can be protected")
    return name


Files = Annotated[dict[str, str], AfterValidator(_files)]


_SPEC = TypeAdapter(TaskSpec)


def _spec(given: Any) -> TaskSpec:
    try:
        spec = _SPEC.validate_python(shallow(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    try:
        spec.check()
    except ValueError as error:
        raise ValueError(f"spec: {error}") from None
    if not all(tensor.dtype in DTYPES for tensor in (*spec.inputs, *spec.outputs, *spec.weights.values())):
        raise ValueError("spec: a tensor that cannot be")
    return spec


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TaskBody(Body):
    """A task. ``code`` is the text of the task's ``model.py``."""

    code: _text(TASK_BYTES)  # type: ignore[valid-type]
    name: _text(MOST_NAME) = "task"  # type: ignore[valid-type]

    def task(self) -> Task:
        return Task(self.name, self.code)


class SolutionBody(Body):
    """A solution: its format, and its files (path -> text)."""

    format: Format
    files: Files

    def solution(self) -> Solution:
        return Solution(self.format, self.files)


class Request(Body):
    """The fields that every request for a job has. The server refuses a request whose ``settings`` differ from the
    server's settings."""

    priority: int = Field(0, ge=-PRIORITIES, le=PRIORITIES, description="jobs with a higher priority start first")
    settings: Asked = Field(
        {},
        max_length=len(AGREED),
        description='sandbox settings that the client needs, as in {"checks": 5}; a server with others refuses the job',
    )

    def key(self) -> str:
        """Returns a digest of the request. Requests that differ only in priority, settings or the task's name have the
        same digest."""
        content = self.model_dump(exclude={"priority", "settings"})
        content.get("task", {}).pop("name", None)
        text = json.dumps([type(self).__name__, content], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class EvaluateRequest(Request):
    """A request to judge a solution of a task."""

    kind: Literal["evaluate"] = "evaluate"
    task: TaskBody
    solution: SolutionBody
    mode: Mode = "quick"


class ProbeRequest(Request):
    """A request to run a task without a solution. If ``compile`` is true, the task is also timed under
    torch.compile."""

    kind: Literal["probe"] = "probe"
    task: TaskBody
    compile: bool = True


class SpecRequest(Request):
    """A request for the spec of a task: the shapes and dtypes of its tensors, and its arguments that are not
    tensors."""

    kind: Literal["spec"] = "spec"
    task: TaskBody


class Build(Request):
    """A request to build a solution. It does not hold the task, but the task's ``spec`` (the answer to a spec
    request)."""

    kind: Literal["build"] = "build"
    solution: SolutionBody
    spec: Annotated[TaskSpec, BeforeValidator(_spec)]


def _kind_of(body: Any) -> str:
    return str(body.get("kind", "evaluate")) if isinstance(body, dict) else "evaluate"


AnyRequest = EvaluateRequest | ProbeRequest | SpecRequest | Build
Submission = Annotated[
    Annotated[EvaluateRequest, Tag("evaluate")]
    | Annotated[ProbeRequest, Tag("probe")]
    | Annotated[SpecRequest, Tag("spec")]
    | Annotated[Build, Tag("build")],
    Discriminator(_kind_of, custom_error_type="kind", custom_error_message="kind: evaluate, probe, spec or build"),
]


class OpenWorkspace(Body):
    """A request for a new work folder with ``files`` (path -> text). ``protected`` lists the top-level files that the
    agent cannot change."""

    files: Files
    protected: Annotated[list[Annotated[str, AfterValidator(_at_the_top)]], Field(max_length=MOST_FILES)] = []


class Call(Body):
    """A call of an agent's tool in a work folder: the name of the tool, and the arguments."""

    tool: str = Field(max_length=100)
    arguments: Annotated[dict[str, Any], AfterValidator(shallow)] = {}


class Answer(Body):
    """The result of a command that the client ran for a work folder. The fields are those of ``wire.CommandResult``."""

    text: _text(SOLUTION_BYTES)  # type: ignore[valid-type]
    error: bool = False
    files: Annotated[dict[str, str | None], AfterValidator(_changes)] = {}


def dumps(value: Any) -> bytes:
    """Encodes ``value`` as JSON that contains only ASCII, because texts may contain unpaired surrogates, which UTF-8
    cannot encode. NaN and infinity become null."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value)).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def agree(asked: Asked, config: SandboxConfig) -> None:
    """Checks that the server's ``config`` has the settings that a client asked for. Raises ``ServiceError`` if a value
    in ``asked`` differs from the server's, or if a name in ``asked`` is not in ``AGREED``."""
    for name, value in asked.items():
        if name not in AGREED:
            raise ServiceError(422, "malformed", f"{name[:40]!r} is none of {', '.join(AGREED)}", "settings")
        if (here := getattr(config, name)) != value:
            said = f"sandbox.{name} is {here} on this server, {str(value)[:40]} was asked for"
            raise ServiceError(409, "settings", said)


def malformed(error: Any) -> ServiceError:
    """Returns a refusal that reports pydantic's ``error`` without quoting the request."""
    location = [str(part)[:60] for part in error["loc"]]
    while location and location[0] in ("body", "evaluate", "probe", "spec", "build"):
        location.pop(0)
    return ServiceError(422, "malformed", str(error["msg"])[:300], ".".join(location)[:200])


def read_token(config: SandboxConfig, environment: Mapping[str, str]) -> str | None:
    """Returns the token, a secret that client and server share. Reads it from the file ``config.token_file``. If no
    file is configured, reads the environment variable that ``config.token_env`` names, and returns ``None`` if this
    variable is missing or empty. Raises ``ConfigError`` if the file cannot be read, or if the token is shorter than 16
    characters or contains a space or a character that is not printable ASCII."""
    if config.token_file is not None:
        try:
            token = Path(config.token_file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"sandbox.token_file: {config.token_file}: {error.strerror}") from None
    elif not (token := environment.get(config.token_env, "").strip()):
        return None
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("The sandbox's token must have at least 16 printable ASCII characters without spaces.")
    return token
