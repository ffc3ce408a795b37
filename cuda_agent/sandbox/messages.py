"""Defines the messages between the sandbox's processes: their operations, their bodies, and their binary frames.

A client sends solutions to a judge, which checks and times them. The judge lets jailed workers run tasks and solutions.
A client also opens workspaces, which are jailed processes that run an agent's tools in a work folder.

The comment beside each operation shows the request's body, an arrow, and the answer's body. Each frame has a number
``slot``. In a call of a task or a solution, it is usually the number of the set of buffers that the call uses. Workers
import this module, so it imports only the standard library and ``wire``."""

import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict

from cuda_agent.sandbox.wire import Format, Mode

# ---------------------------------------------------------------------------------------------------------- operations
#
# Beside each operation: its body -> the body of its answer, where they are not empty.


class Reply(StrEnum):
    """The kinds of answers to a request."""

    RESULT = "result"
    ERROR = "error"  # {"kind": jail, device or task, "message"} of a judge; {"message", "cheat"} of a worker


class JudgeRequest(StrEnum):
    """The requests of a client to a judge (the process that checks and times solutions)."""

    CONFIGURE = "configure"  # JudgeSettings -> walls that failed, torch's version; the first request
    SPEC = "spec"  # {"task": TaskSource} -> TaskSpec
    EVALUATE = "evaluate"  # EvaluateRequest -> Verdict
    MEASURE = "measure"  # {"task": TaskSource, "mode": Mode}: measures the baselines that a verdict of this mode needs
    PROBE = "probe"  # {"task": TaskSource, "compile": whether torch.compile is timed, too} -> Probe


class WorkerOperation(StrEnum):
    """The requests to workers and to a warm parent. A worker is a jailed process that runs a task or a solution. A warm
    parent is a process that has imported torch and forks workers."""

    # to a warm parent
    FORK_WORKER = "fork_worker"  # {"role", "threads", "folder", "environment", "device", "policy"} and more -> {"pid"}
    FORK_PARENT = "fork_parent"  # {"imports"} -> {"pid"}
    REAP_WORKER = "reap_worker"  # {"pid"} -> {"status"}
    # to a reference worker and a candidate worker
    MAP_BUFFERS = "map_buffers"  # ``Buffers.places``; to a candidate also {"spec", "host_is_ours", "rule", "views"}
    RUN = "run"  # one call on a slot -> [seconds of the device, seconds of the host] on a GPU
    RUN_EMPTY = "run_empty"  # like RUN, without the computation
    # to a reference worker
    OPEN_TASK = "open_task"  # {"code", "seed": of the weights} -> TaskSpec
    DRAW_WEIGHTS = "draw_weights"  # {"seed": None restores the constructor's} -> {"changed": positions, "kept"}
    DRAW_INPUTS = "draw_inputs"  # {"seed", "kind": one of KINDS} -> whether the task has such inputs
    DRAW_AND_RUN = "draw_and_run"  # {"seeds"}: draws normal inputs for each and runs the model on them
    SET_PRECISION = "set_precision"  # {"precision"}
    COMPILE_TASK = "compile_task"  # {"known": a warm-up's folder, empty in the warm-up, "mode": of torch.compile}
    MAP_EXACT = "map_exact"  # ``Buffers.places`` and {"spec"}
    RUN_EXACT = "run_exact"  # -> whether all outputs are finite
    RUN_MUTANT = "run_mutant"  # {"kind"} of wrong answer, and more (``values.mutants``) -> whether the task has one
    COUNT_OPERATORS = "count_operators"  # -> {"operators", "bytes"}
    ACCOUNT = "account"  # -> {"flops": 0 if not known, "written": bytes, "views": strides or null of each output}
    # to a candidate worker
    LOAD_SOLUTION = "load_solution"  # what ``LocalSandbox`` built, and {"seed", "redrawn"} -> resources of each kernel
    RUN_CHAIN = "run_chain"  # as many calls as ``slot`` says -> as RUN
    RUN_EMPTY_CHAIN = "run_empty_chain"
    UNLOAD_SOLUTION = "unload_solution"  # of a plan on a GPU; the worker then takes other buffers and another plan
    OBSERVE_OPERATORS = "observe_operators"  # one call -> operators, or seconds of each node of a plan
    OBSERVE_KERNELS = "observe_kernels"  # one call -> kernels of the GPU
    # to a first pass
    RUN_FIRST_PASS = "run_first_pass"  # {"task", "code", "headers"} -> nothing, or {"error", "log"}


class WorkspaceOperation(StrEnum):
    """The messages between a client, a workspace, and the warm parent. A workspace is a jailed process that runs an
    agent's tools in a work folder. The warm parent is the process that forks workspaces."""

    # a client asks the warm parent
    OPEN = "open_workspace"  # its number; the descriptor is the workspace's socket
    CLOSE = "close_workspace"  # its number
    # a client asks a workspace
    FILL_FOLDER = "fill_folder"  # {"files", "protected", "limits": CommandLimits}; the first request
    CALL_TOOL = "call_tool"  # {"tool", "arguments"} -> ToolResult
    COLLECT_FILES = "collect_files"  # -> text by path
    # a workspace asks its client, while a tool call is open
    RUN_COMMAND = "run_command"  # {"name", "argv", "files"}; ``slot`` holds the command's number
    COMMAND_RESULT = "command_result"  # CommandResult, with the same ``slot``


Operation = Reply | JudgeRequest | WorkerOperation | WorkspaceOperation


# ------------------------------------------------------------------------------------------------------------- payloads


@dataclass(frozen=True)
class JudgeSettings:
    """The settings of a judge: a part of the sandbox's configuration, and the judge's folders."""

    threads: int
    checks: int  # number of inputs on which a solution is checked in quick mode
    tolerance: float
    timed_calls: int
    run_seconds: float
    memory_mb: int
    clock: str  # real, or model (simulated times)
    required_walls: Sequence[str]  # protections of the jail (``jail.WALLS``) that must hold
    cache: str  # folder that outlives the judge; only trusted processes write to it
    scratch: str  # folder in which each worker gets its private folder
    lease: str  # folder of the timing lease, a lock that a process must hold alone to time a kernel
    device: str = "cpu"
    input_kinds: Sequence[str] = ()  # more kinds of inputs on which quick mode checks a solution
    train_mode: bool = False  # models stay in train()
    compiled: bool = True  # torch.compile is a baseline
    kernels: str = ""  # cuda: path of the cubin that was built from check.cu
    identity: str = ""  # names of the GPU and its driver, on which times depend
    prober: bool = False  # runs only tasks, without solutions, and holds little memory


KERNELS_LOG = "kernels.log"  # beside an extension's library: the assembler's report on its kernels
MOST_BESIDE = 512 << 20  # bytes of a call: larger tasks do not run on a GPU beside others


class TaskSource(TypedDict):
    digest: str
    code: str


class EvaluateRequest(TypedDict):
    task: TaskSource
    format: Format
    traits: dict[str, Any]  # FormatTraits as JSON
    mode: Mode
    load: dict[str, Any]  # the built solution; its form depends on the format
    files: dict[str, str]
    observe: bool  # whether quick mode records which operators and kernels ran
    again: bool  # whether the baselines are timed again


# --------------------------------------------------------------------------------------------------------------- frames

HEAD = struct.Struct("<BBHI")  # number of the operation, slot, extra, bytes of the body
FRAME_LIMIT = 1 << 24  # bytes of one frame's body
# Both sides run the same code, so a position in this table names an operation in one byte.
_OPERATIONS: tuple[Operation, ...] = (*Reply, *JudgeRequest, *WorkerOperation, *WorkspaceOperation)
_NUMBERS = {operation: number for number, operation in enumerate(_OPERATIONS)}


class FrameTooLarge(ValueError):
    """The body of a message does not fit into one frame. Nothing was sent."""


class Frame(NamedTuple):
    """One message: a head of 8 bytes, then the body as JSON. ``fds`` are the file descriptors sent with the message."""

    operation: Operation
    slot: int  # number of the set of buffers of a call; some operations put another number here
    body: Any  # ``None`` in a call on prepared buffers
    fds: list[int]
    extra: int = 0  # second number; used by timed calls on a GPU, for the delay before the call


def encode_frame(operation: Operation, body: Any = None, slot: int = 0, extra: int = 0) -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    if len(payload) > FRAME_LIMIT:
        raise FrameTooLarge(f"too large for one message: {len(payload)} bytes as JSON, {FRAME_LIMIT} are possible")
    return HEAD.pack(_NUMBERS[operation], slot, extra, len(payload)) + payload


def decode_head(head: bytes) -> tuple[Operation, int, int, int]:
    """Decodes the head of a frame. Returns the operation, the numbers ``slot`` and ``extra`` (see ``Frame``), and the
    length of the body in bytes. Raises ``ValueError`` for an invalid head."""
    number, slot, extra, length = HEAD.unpack(head)
    if number >= len(_OPERATIONS):
        raise ValueError(f"a frame of the unknown operation {number}")
    if length > FRAME_LIMIT:
        raise ValueError(f"a frame of {length} bytes")
    return _OPERATIONS[number], slot, extra, length


def send_frame(
    sock: socket.socket, operation: Operation, body: Any = None, slot: int = 0, fds: Sequence[int] = (), extra: int = 0
) -> None:
    data = encode_frame(operation, body, slot, extra)
    sent = socket.send_fds(sock, [data], fds) if fds else 0
    sock.sendall(data[sent:])


def receive_frame(sock: socket.socket, max_fds: int = 0) -> Frame:
    """Returns the next frame, with at most ``max_fds`` file descriptors. Raises ``ConnectionError`` at the end of the
    stream, ``TimeoutError`` if the frame does not arrive within the socket's timeout, or ``ValueError`` for an invalid
    frame."""
    fds: list[int] = []
    if max_fds:
        head, fds, _, _ = socket.recv_fds(sock, HEAD.size, max_fds)
    else:
        head = sock.recv(HEAD.size)
    head += _exactly(sock, HEAD.size - len(head)) if head else b""
    if not head:
        raise ConnectionError("the other side is gone")
    operation, slot, extra, length = decode_head(head)
    try:
        body = json.loads(_exactly(sock, length)) if length else None
    except RecursionError:
        raise ValueError("a frame nested too deep") from None
    return Frame(operation, slot, body, list(fds), extra)


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    limit = sock.gettimeout()
    end = None if limit is None else time.monotonic() + limit
    while len(parts) < count:
        if end is not None and time.monotonic() > end:
            raise TimeoutError("a frame that does not end")
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other side is gone")
        parts += part
    return bytes(parts)
