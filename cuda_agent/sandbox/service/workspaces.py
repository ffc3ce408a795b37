"""Serves workspaces (work folders of agents, with tools) over the network. Tool calls are answered with JSON lines.

``docs/service.md`` describes the lines. Only a client that knows a workspace's secret ``owner`` can use the workspace.
If the stream of a call breaks, the workspace is closed, because its state is then unknown."""

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.protocol import ServiceError
from cuda_agent.sandbox.wire import CommandResult, ToolResult
from cuda_agent.sandbox.workspace.client import Workspace, WorkspaceLost

HEARTBEAT = 5.0  # seconds without another line
_LOOK_AGAIN = 2.0  # seconds: it is unknown when a workspace closes, and asking is cheap
_LONGEST_CALL = 3600.0  # seconds after which a running call counts as abandoned
_log = logging.getLogger("cuda_agent.sandbox")

Line = dict[str, Any]


@dataclass
class Room:
    id: str
    owner: str
    used: float  # monotonic time of the last use
    closing: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    workspace: Workspace | None = None
    busy: bool = False
    lines: asyncio.Queue[Line | None] = field(default_factory=asyncio.Queue)
    asked: dict[int, asyncio.Future[CommandResult]] = field(default_factory=dict)  # the client's answers, by command
    questions: int = 0  # number of commands that the client was asked to run

    async def ask(self, name: str, argv: list[str], files: dict[str, str]) -> CommandResult:
        """Asks the client to run a command that the agent entered in the workspace's shell, and returns the client's
        result. The request is a line in the answer to the current tool call. ``name`` is the command (compile, verify,
        profile or restore), ``argv`` holds its arguments, and ``files`` the workspace's files (text by path)."""
        self.questions += 1
        number, answer = self.questions, asyncio.get_running_loop().create_future()
        self.asked[number] = answer
        self.lines.put_nowait({"command": {"number": number, "name": name, "argv": argv, "files": files}})
        try:
            return await answer
        finally:
            del self.asked[number]


class Rooms:
    """Holds the open workspaces of a service. ``most`` limits their number. ``sweep`` closes a workspace that was not
    used for ``idle_seconds``."""

    def __init__(self, sandbox: LocalSandbox, most: int, idle_seconds: float) -> None:
        self._sandbox, self._most, self._idle = sandbox, most, idle_seconds
        self._rooms: dict[str, Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    async def open(self, files: dict[str, str], protected: list[str]) -> Room:
        """Opens a workspace with ``files`` (text by path). The agent cannot change the files in ``protected``. Raises
        ``ServiceError`` if too many workspaces are open, or if the new one cannot be opened."""
        if len(self._rooms) >= self._most:
            raise ServiceError(429, "full", f"all {self._most} workspaces are taken", retry_after=_LOOK_AGAIN)
        room = Room(secrets.token_hex(12), secrets.token_urlsafe(24), time.monotonic())
        self._rooms[room.id] = room
        try:
            opened = self._sandbox.workspace(files, frozenset(protected), room.ask)
            room.workspace = await room.closing.enter_async_context(opened)
        except WorkspaceLost as lost:
            raise ServiceError(503, "infra", f"the workspace could not be opened: {lost}", retry_after=1.0) from None
        finally:
            if room.workspace is None:
                await self.close(room)
        return room

    def find(self, id: str, owner: str) -> Room:
        """Returns the workspace ``id``. ``owner`` is the workspace's secret. Raises the same ``ServiceError`` for a
        missing workspace and for a wrong secret, so that other clients cannot find out which workspaces exist."""
        room = self._rooms.get(id)
        mine = hmac.compare_digest((room.owner if room else "").encode(), owner.encode("utf-8", "replace"))
        if room is None or not mine or room.workspace is None:
            raise ServiceError(404, "unknown", "there is no such workspace of this owner")
        room.used = time.monotonic()
        return room

    def call(self, room: Room, tool: str, arguments: dict[str, Any]) -> AsyncIterator[Line]:
        """Starts a tool call and returns the lines of its answer. Raises ``ServiceError`` if ``room`` is busy."""
        self._take(room)
        return self._lines(room, tool, arguments)

    async def _lines(self, room: Room, tool: str, arguments: dict[str, Any]) -> AsyncIterator[Line]:
        assert room.workspace is not None
        work = asyncio.create_task(room.workspace.call(tool, arguments))
        work.add_done_callback(lambda _: room.lines.put_nowait(None))
        whole = False
        try:
            while True:
                try:
                    if (line := await asyncio.wait_for(room.lines.get(), HEARTBEAT)) is None:
                        break
                except TimeoutError:
                    line = {"alive": True}
                yield line
            last = _outcome(work)
            whole = "result" in last
            yield last
        finally:
            room.busy, room.used = False, time.monotonic()
            if not whole:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await self.close(room)

    def answer(self, room: Room, number: int, result: CommandResult) -> None:
        """Passes ``result`` to the call of ``Room.ask`` that asked the client to run command ``number``. Raises
        ``ServiceError`` if no call waits for this result."""
        future = room.asked.get(number)
        if future is None or future.done():
            raise ServiceError(404, "unknown", f"there is no open question {number}")
        future.set_result(result)

    async def files(self, room: Room) -> dict[str, str]:
        """Returns the workspace's text files by path. Raises ``ServiceError`` if another call is running, or if the
        workspace's process has ended or does not answer."""
        self._take(room)
        assert room.workspace is not None
        try:
            return await room.workspace.files()
        except WorkspaceLost as lost:
            await self.close(room)
            raise ServiceError(410, "lost", str(lost)) from None
        finally:
            room.busy = False

    def _take(self, room: Room) -> None:
        if room.busy:
            raise ServiceError(409, "busy", "a call of this workspace is under way")
        room.busy, room.lines = True, asyncio.Queue()

    async def close(self, room: Room) -> None:
        self._rooms.pop(room.id, None)
        await room.closing.aclose()

    async def close_all(self) -> None:
        await asyncio.gather(*(self.close(room) for room in list(self._rooms.values())), return_exceptions=True)

    async def sweep(self) -> int:
        """Closes unused workspaces and returns their number."""
        now = time.monotonic()
        opened = [room for room in self._rooms.values() if room.workspace is not None]
        unused = [room for room in opened if now - room.used > (_LONGEST_CALL if room.busy else self._idle)]
        for room in unused:
            await self.close(room)
        return len(unused)


def _outcome(work: "asyncio.Task[ToolResult]") -> Line:
    try:
        return {"result": asdict(work.result())}
    except WorkspaceLost as lost:
        return {"lost": str(lost)}
    except Exception as error:  # a hostile workspace may send anything
        _log.exception("a workspace answered nonsense")
        return {"lost": f"the workspace answered nonsense: {type(error).__name__}"}
