"""Opens workspaces and calls their tools. A workspace is an agent's work folder, together with a shell and file tools.

The tools of a workspace run in a separate process (module ``worker``), which is in a jail. If a command in the agent's
shell runs compile, verify, profile or restore, the process sends a request to this module. This module then calls a
function of the caller, which runs the command outside the jail. A mistake of the agent, such as a wrong argument,
raises no exception. Instead, the result of the tool call has ``error`` set."""

import asyncio
import contextlib
import itertools
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_agent.sandbox.jail import scratch
from cuda_agent.sandbox.messages import (
    FRAME_LIMIT,
    HEAD,
    FrameTooLarge,
    Reply,
    WorkspaceOperation,
    decode_head,
    encode_frame,
    send_frame,
)
from cuda_agent.sandbox.wire import CommandResult, ToolResult
from cuda_agent.sandbox.workspace.files import ToolRefused
from cuda_agent.sandbox.workspace.shell import CommandLimits

Commands = Callable[[str, list[str], dict[str, str]], Awaitable[CommandResult]]
"""Runs a command of an agent's shell and returns its result. Gets the command's name (compile, verify, profile or
restore), the command's arguments, and the folder's files (text by path)."""

ARGUMENT_BYTES = 1 << 20  # limit of one call's arguments as JSON
_OPEN_SECONDS, _GRACE_SECONDS = 30.0, 20.0  # how long a start, or a call beyond its own limit, may take


class WorkspaceLost(Exception):
    """The process of a workspace has ended or does not answer. This is a fault of the sandbox, not of the agent."""


class Workspaces:
    """Opens workspaces. All of them share the warm parent: a process that forks one child process per workspace.
    ``async with`` starts the warm parent at once. Otherwise the first call of ``open`` starts it. All work folders lie
    in one temporary folder. The warm parent removes this folder when it ends, even if the process that started it was
    killed."""

    def __init__(self, limits: CommandLimits | None = None) -> None:
        self.limits = limits or CommandLimits()
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._folder = ""

    async def __aenter__(self) -> "Workspaces":
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @asynccontextmanager
    async def open(
        self, files: Mapping[str, str], protected: frozenset[str], commands: Commands
    ) -> "AsyncIterator[Workspace]":
        """Opens a workspace, and closes it when the context ends. At first the workspace holds ``files`` (text by
        path). ``protected`` names files at the top of the folder that the agent cannot change. ``commands`` is called
        when the agent runs compile, verify, profile or restore in the shell. Raises ``WorkspaceLost`` if the workspace
        does not start."""
        await self._start()
        number, control = next(self._numbers), self._control
        assert control is not None
        ours, theirs = socket.socketpair()
        writer: asyncio.StreamWriter | None = None
        try:
            with theirs:
                try:
                    send_frame(control, WorkspaceOperation.OPEN, number, fds=[theirs.fileno()])
                except OSError as error:
                    raise WorkspaceLost(f"the parent of workspaces is gone: {error}") from None
            reader, writer = await asyncio.open_connection(sock=ours, limit=FRAME_LIMIT)
            workspace = Workspace(reader, writer, commands, self.limits)
            opening = {"files": dict(files), "protected": sorted(protected), "limits": asdict(self.limits)}
            await workspace._request(WorkspaceOperation.FILL_FOLDER, opening)
            yield workspace
        finally:
            if writer is not None:
                writer.close()
            else:
                ours.close()
            with contextlib.suppress(OSError):
                send_frame(control, WorkspaceOperation.CLOSE, number)

    async def _start(self) -> None:
        async with self._lock:
            if self._process is not None and self._process.returncode is None:
                return
            await self.close()
            self._folder = str(scratch.make_folder("workspaces"))
            self._control, theirs = socket.socketpair()
            package = str(Path(__file__).parents[3])
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-s", "-m", "cuda_agent.sandbox.workspace.worker"),
                    *(str(theirs.fileno()), self._folder),
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONPATH": package},
                    cwd="/",
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            self._control.setblocking(False)
            try:
                async with asyncio.timeout(_OPEN_SECONDS):
                    if len(await asyncio.get_running_loop().sock_recv(self._control, HEAD.size)) < HEAD.size:
                        raise WorkspaceLost("the parent of workspaces did not start")
            except TimeoutError:
                raise WorkspaceLost("the parent of workspaces did not start in time") from None
            self._control.setblocking(True)

    async def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                async with asyncio.timeout(75):  # longer than the parent waits for its own children
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
            self._process = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


def checked_call(tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call as the body of a message to a workspace. Raises ``ToolRefused`` if JSON cannot represent
    ``arguments``, or if the call is larger than ``ARGUMENT_BYTES``."""
    try:
        body = {"tool": tool, "arguments": dict(arguments)}
        size = len(json.dumps(body))
    except (TypeError, ValueError, RecursionError):
        raise ToolRefused("the arguments are not plain values") from None
    if size > ARGUMENT_BYTES:
        raise ToolRefused("the arguments are too large")
    return body


class Workspace:
    """An open workspace: an agent's work folder, with tools that run in a jailed process. Tool calls run one after the
    other."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: Commands, limits: CommandLimits
    ) -> None:
        self._reader, self._writer, self._commands, self._limits = reader, writer, commands, limits
        self._turn = asyncio.Lock()
        self._broken = False

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs a tool and returns its result. If the agent runs compile, verify, profile or restore in the shell, calls
        the function ``commands`` that the constructor got. An exception of this function reaches the caller. Raises
        ``WorkspaceLost`` if the workspace has ended or does not answer."""
        try:
            body = checked_call(tool, arguments)
        except ToolRefused as refused:
            return ToolResult(f"error: {refused}", error=True)
        async with self._turn:
            result = await self._request(WorkspaceOperation.CALL_TOOL, body)
        return ToolResult(str(result["text"]), bool(result["error"]))

    async def files(self) -> dict[str, str]:
        """Returns the text files of the work folder by path. The module ``workspace.files`` limits their number and
        sizes. Protected files have their original text. Raises ``WorkspaceLost`` if the workspace has ended or does not
        answer."""
        async with self._turn:
            return dict(await self._request(WorkspaceOperation.COLLECT_FILES, None))

    async def _request(self, operation: WorkspaceOperation, body: Any) -> Any:
        if self._broken:
            raise WorkspaceLost("the workspace was lost before")
        self._broken = True  # until this exchange is complete
        slot = 0
        while True:
            try:
                async with asyncio.timeout(self._limits.shell_seconds + _GRACE_SECONDS):
                    self._writer.write(encode_frame(operation, body, slot))
                    await self._writer.drain()
                    answer, slot, _, length = decode_head(await self._reader.readexactly(HEAD.size))
                    body = json.loads(await self._reader.readexactly(length)) if length else None
            except TimeoutError:
                raise WorkspaceLost("the workspace does not answer") from None
            except (OSError, FrameTooLarge, asyncio.IncompleteReadError) as error:
                raise WorkspaceLost(f"the workspace is gone: {type(error).__name__}") from None
            if answer == Reply.RESULT:
                self._broken = False
                return body
            result = await self._commands(body["name"], body["argv"], body["files"])
            operation, body = WorkspaceOperation.COMMAND_RESULT, asdict(result)
