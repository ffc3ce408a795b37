"""Judges solutions and opens workspaces on any number of servers, with the interface of ``LocalSandbox``.

``cuda-agent sandbox serve`` starts a server. Each task has a preferred server, because a server keeps tasks loaded and
caches their baselines (the times of a task's own model). The client skips a full or unreachable server for a while. A
job that is lost is repeated, if possible on another server. A job that ends with ``infra`` (a fault of the sandbox) is
repeated only on another server. A workspace (an agent's work folder with its tools) cannot move to another server. If
its server is lost, the workspace is lost, too (``WorkspaceLost``)."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import SandboxUnready, TaskError
from cuda_agent.sandbox.protocol import AGREED, TASK_BYTES, read_token
from cuda_agent.sandbox.wire import LOST, Mode, Probe, Solution, Status, TaskSpec, ToolResult, Verdict
from cuda_agent.sandbox.workspace.client import Commands, WorkspaceLost, checked_call
from cuda_agent.sandbox.workspace.files import ToolRefused
from cuda_agent.tasks.task import Task

ATTEMPTS = 4  # most attempts to complete a job; each lost one counts
UNREACHABLE_SECONDS = 60.0  # longest time without a ready server before ``infra`` or SandboxUnready
FULL_SECONDS = 3600.0  # the longest wait for a free slot, or for a server that starts
_POLL_SECONDS = 20.0
_SILENCE_SECONDS = 30.0  # a server that is silent this long after the agreed time counts as gone
_JITTER = 0.3  # random extension of a wait, as a share of it
_LONGEST_REST = 15.0  # most seconds without requests after a server did not answer
_JOB = frozenset({"id", "state", "result", "error"})
_log = logging.getLogger("cuda_agent.sandbox")


@dataclass(eq=False)
class Server:
    """The address and the last known state of one server, in one role: judging or workspaces."""

    address: str
    rests_until: float = 0.0  # this client sends the server no request before this monotonic time
    failures: int = 0  # failed requests in a row
    workspaces: int = 0  # number of workspaces that this client has open there
    kind: str = ""  # kind of its last refusal
    reason: str = "was not asked"  # its last refusal in words


class _Away(Exception):
    """A server is full, unreachable or not ready. The client may ask it again at the monotonic time ``until``."""

    def __init__(self, message: str, until: float) -> None:
        super().__init__(message)
        self.until = until


class _Lost(Exception):
    """A request has no result. ``server`` is the server that was lost or failed, or ``None`` if no server took the
    request. ``kind`` is the reason as one word."""

    def __init__(self, message: str, server: Server | None = None, kind: str = "lost") -> None:
        super().__init__(message)
        self.server, self.kind = server, kind


class _Refused(Exception):
    """A server refused a request because the request is malformed or too large, so every other server would refuse it,
    too. ``where`` names the wrong part of the request, or is empty."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


class RemoteSandbox:
    """Judges solutions and opens workspaces on remote servers. An async context manager."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        addresses = [address.rstrip("/") for address in config.servers]
        # Separate lists: a server that is full or unfit in one role may be free in the other.
        self.servers = [Server(address) for address in addresses]
        self.rooms = [Server(address) for address in addresses]
        self._settings = {name: getattr(config, name) for name in AGREED}

    async def __aenter__(self) -> "RemoteSandbox":
        token = read_token(self.config, os.environ)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(_POLL_SECONDS + _SILENCE_SECONDS, connect=5.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,  # an internet proxy does not reach a sandbox
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def evaluate(self, task: Task, solution: Solution, mode: Mode = "quick") -> Verdict:
        """Returns the verdict on ``solution``. Raises ``TaskError`` if the task itself cannot be run. Raises
        ``SandboxUnready`` if no server is ready, or if the servers' settings differ from the client's."""
        request = {
            "kind": "evaluate", "task": _task(task), "solution": {"format": solution.format, "files": solution.files},
            "mode": mode,
        }  # fmt: skip
        try:
            return Verdict.from_json(await self._ask(request, task))
        except _Refused as refusal:
            if refusal.where.startswith("task") or len(task.code.encode(errors="replace")) > TASK_BYTES:
                raise TaskError(str(refusal)) from None
            if refusal.where and not refusal.where.startswith("solution"):  # another version's limits
                raise SandboxUnready(f"a server refused {refusal.where}: {refusal}") from None
            return self._refusal("build_error", solution, mode, str(refusal))
        except _Lost as lost:
            return self._refusal("infra", solution, mode, str(lost))

    def verdict_key(self, task: Task, solution: Solution, mode: Mode) -> str:
        """Returns the key of a verdict: the sha256 of task, solution, mode and settings. The key does not depend on the
        servers' hardware."""
        key = json.dumps([task.digest, solution.digest, mode, self._settings], sort_keys=True)
        return hashlib.sha256(key.encode()).hexdigest()

    async def probe(self, task: Task, compile: bool = True) -> Probe:
        """Runs the model of ``task`` without a solution. If ``compile`` is true, also times the model under
        torch.compile. If the model does not run or the job is lost, ``Probe.error`` says why. Raises ``SandboxUnready``
        if no server is ready."""
        try:
            return Probe.from_json(await self._ask({"kind": "probe", "task": _task(task), "compile": compile}, task))
        except _Refused as refusal:
            return Probe(error=str(refusal))
        except _Lost as lost:
            return Probe(error=f"{LOST}{lost}")

    async def spec(self, task: Task) -> TaskSpec:
        """Returns the shapes and dtypes of the tensors of ``task``, and its arguments that are not tensors. Raises
        ``TaskError`` if the task cannot be run, or ``SandboxUnready`` if no server answers."""
        try:
            return TaskSpec.from_json(await self._ask({"kind": "spec", "task": _task(task)}, task))
        except _Refused as refusal:
            raise TaskError(str(refusal)) from None
        except _Lost as lost:
            raise SandboxUnready(str(lost)) from None

    @contextlib.asynccontextmanager
    async def workspace(
        self, files: dict[str, str], protected: frozenset[str], commands: Commands
    ) -> "AsyncIterator[RemoteWorkspace]":
        """Opens a workspace on the server where this client has the fewest open workspaces. If that server is not
        available, tries the other servers. Raises ``WorkspaceLost`` or ``SandboxUnready`` if no server opens a
        workspace."""

        def order() -> list[Server]:
            return sorted(self.rooms, key=lambda server: (server.workspaces, random.random()))

        body, needs = {"files": files, "protected": sorted(protected)}, frozenset({"id", "owner"})
        try:
            server, opened = await self._post("/v1/workspaces", body, order, needs=needs)
        except (_Lost, _Refused) as error:
            raise WorkspaceLost(str(error)) from None
        server.workspaces += 1
        headers = {"X-Workspace-Owner": opened["owner"]}
        path = f"{server.address}/v1/workspaces/{opened['id']}"
        try:
            yield RemoteWorkspace(self._client, path, headers, commands)
        finally:
            server.workspaces -= 1
            with contextlib.suppress(httpx.HTTPError):
                await self._client.delete(path, headers=headers)

    async def _ask(self, request: dict[str, Any], task: Task) -> dict[str, Any]:
        """Sends a job to one server after the other, until a server completes the job. Returns the job's result.
        ``request`` describes the job. All jobs for one ``task`` try the servers in the same order. Makes at most
        ``ATTEMPTS`` attempts. Raises ``_Lost``, ``_Refused``, ``TaskError`` or ``SandboxUnready`` if there is no
        result."""

        def weight(server: Server) -> bytes:
            return hashlib.sha256(f"{server.address} {task.digest}".encode()).digest()

        order = sorted(self.servers, key=weight, reverse=True)
        failed: list[Server] = []
        while True:
            try:
                path, body = f"/v1/jobs?wait={_POLL_SECONDS:g}", request | {"settings": self._settings}
                return await self._result(*await self._post(path, body, lambda: order, failed))
            except _Lost as lost:
                if lost.server is None:
                    raise
                _log.warning("%s: %s", lost.server.address, lost)
                failed.append(lost.server)
                everywhere = all(server in failed for server in order)
                if everywhere and lost.kind == "unready":
                    raise SandboxUnready(str(lost)) from None
                if len(failed) == ATTEMPTS or (everywhere and lost.kind == "infra"):
                    raise

    async def _result(self, server: Server, job: dict[str, Any]) -> dict[str, Any]:
        url = f"{server.address}/v1/jobs/{job['id']}"
        try:
            while job["state"] in ("queued", "running"):
                try:
                    job = await self._send(server, "GET", f"{url}?wait={_POLL_SECONDS:g}")
                except (_Away, _Refused) as away:
                    raise _Lost(f"lost with its server: {away}", server) from None
        except asyncio.CancelledError:
            with contextlib.suppress(httpx.HTTPError):
                await asyncio.shield(self._client.delete(url, timeout=2.0))
            raise
        if job["result"] is not None and job["result"].get("status") != "infra":
            result: dict[str, Any] = job["result"]
            return result
        error = job["error"] or {"kind": "infra", "message": (job["result"] or {}).get("message", "no result")}
        if error["kind"] == "task":
            raise TaskError(error["message"])
        if error["kind"] == "draining":
            server.rests_until = time.monotonic() + _LONGEST_REST
        raise _Lost(error["message"], server, error["kind"])

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        order: Callable[[], list[Server]],
        failed: Sequence[Server] = (),
        needs: frozenset[str] = _JOB,
    ) -> tuple[Server, dict[str, Any]]:
        """Posts ``body`` to the first available server in the list ``order()``. Waits while no server is available.
        Skips the servers in ``failed``, unless all servers are in ``failed``. Returns the server and its answer, which
        must have the keys ``needs``. Raises ``_Lost`` or ``SandboxUnready`` if no server takes the request within
        ``FULL_SECONDS``, or within ``UNREACHABLE_SECONDS`` if none is full or starts. Also raises ``_Refused`` and
        ``SandboxUnready`` as ``_send`` does."""
        content = json.dumps(body).encode()
        begun = hope = time.monotonic()  # hope: last time that a server was at least full
        told: dict[str, float] = {}  # the time that each server named for another attempt
        while True:
            now = time.monotonic()
            servers = order()
            fresh = [server for server in servers if server not in failed] or servers
            back = {server: max(server.rests_until, told.get(server.address, 0.0)) for server in fresh}
            if (free := next((server for server in fresh if back[server] <= now), None)) is not None:
                try:
                    return free, await self._send(free, "POST", free.address + path, content, needs)
                except _Away as away:
                    told[free.address] = away.until
                    continue
            if any(server.kind in ("full", "starting") for server in fresh):
                hope = now
            if now - hope >= UNREACHABLE_SECONDS or now - begun >= FULL_SECONDS:
                reasons = "; ".join(server.reason for server in servers)
                if all(server.kind in ("unready", "role") for server in servers):
                    raise SandboxUnready(reasons)
                raise _Lost(f"no server takes it: {reasons}")
            await asyncio.sleep(min(back.values()) - now)

    async def _send(
        self, server: Server, method: str, url: str, content: bytes | None = None, needs: frozenset[str] = _JOB
    ) -> dict[str, Any]:
        """Sends a request and returns the answer. The answer must have the keys ``needs``. Raises ``_Away`` if this
        server cannot take the request now, and ``_Refused`` if every server would refuse the request. Raises
        ``SandboxUnready`` if the server does not accept the client's token or settings."""
        try:
            headers = {"Content-Type": "application/json"}
            response = await self._client.request(method, url, headers=headers, content=content)
            answer = response.json()
            if response.is_success and not needs <= answer.keys():
                raise ValueError
            error = None if response.is_success else answer.get("error")
        except (httpx.HTTPError, ValueError, TypeError, AttributeError) as fault:
            server.failures += 1
            rest = min(0.25 * 2**server.failures, _LONGEST_REST)
            raise self._away(server, "gone", f"does not answer ({type(fault).__name__})", rest) from None
        server.failures = 0
        if response.is_success:
            return dict(answer)
        error = error if isinstance(error, dict) else {}
        kind = str(error.get("kind", "unknown"))
        message = str(error.get("message", f"HTTP {response.status_code}"))
        if kind in ("malformed", "too_large"):
            raise _Refused(message, str(error.get("where", "")))
        if kind in ("token", "settings"):
            where = self.config.token_file or f"the environment variable {self.config.token_env}"
            hint = f"; here it is taken from {where}" if kind == "token" else ""
            raise SandboxUnready(f"{server.address}: {message}{hint}")
        rest = UNREACHABLE_SECONDS if kind == "role" else _stretched(response.headers.get("Retry-After", "1"))
        raise self._away(server, kind, message, rest)

    def _away(self, server: Server, kind: str, reason: str, rest: float) -> _Away:
        """Records that this client sends ``server`` no requests for ``rest`` seconds. If ``kind`` is ``full`` and an
        earlier wait for this server ends sooner, keeps that earlier wait. ``reason`` says why the server takes no
        request. Returns the exception, which the caller raises."""
        now = time.monotonic()
        earliest = server.rests_until if kind == "full" and server.rests_until > now else now + rest
        server.kind, server.reason, server.rests_until = kind, f"{server.address}: {reason}", min(earliest, now + rest)
        return _Away(server.reason, now + rest)

    def _refusal(self, status: Status, solution: Solution, mode: Mode, message: str) -> Verdict:
        return Verdict(status, solution.format, mode, self.config.device, self.config.clock, message)


class RemoteWorkspace:
    """An open workspace on a server, with the interface of ``workspace.client.Workspace``. Its calls run one after the
    other."""

    def __init__(self, client: httpx.AsyncClient, path: str, headers: dict[str, str], commands: Commands) -> None:
        self._client, self._path, self._headers, self._commands = client, path, headers, commands
        self._turn = asyncio.Lock()
        self._timeout = httpx.Timeout(_SILENCE_SECONDS, pool=None)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Runs a tool on the server and returns its result. Some commands of the agent's shell, such as verify, run on
        the client: this method calls the constructor's argument ``commands`` to run them, and lets its exceptions pass.
        Raises ``WorkspaceLost`` if the workspace has ended or its server does not answer."""
        try:
            body = checked_call(tool[:100], arguments)
        except ToolRefused as refused:
            return ToolResult(f"error: {refused}", error=True)
        async with self._turn, contextlib.aclosing(self._lines(json.dumps(body).encode())) as lines:
            async for line in lines:
                if isinstance(line, ToolResult):
                    return line
                number, name, argv, files = line
                result = await self._commands(name, argv, files)
                with _losing():
                    url, answer = f"{self._path}/answers/{number}", asdict(result)
                    response = await self._client.post(url, json=answer, headers=self._headers, timeout=self._timeout)
                    response.raise_for_status()
        raise WorkspaceLost("the workspace is gone: its stream ended")

    async def _lines(self, body: bytes) -> AsyncGenerator[ToolResult | tuple[int, str, list[str], dict[str, str]]]:
        """Sends a tool call. Yields a tuple (number, name, arguments, files) for each command that the client must run,
        and then the result of the tool call. Raises ``WorkspaceLost`` if the workspace has ended or its server does not
        answer."""
        headers, url = self._headers | {"Content-Type": "application/json"}, f"{self._path}/calls"
        sending = self._client.stream("POST", url, content=body, headers=headers, timeout=self._timeout)
        with _losing():
            async with sending as response:
                if response.status_code == 422:
                    message = json.loads(await response.aread())["error"]["message"]
                    yield ToolResult(f"error: {message}", error=True)
                elif response.is_error:
                    raise WorkspaceLost(f"the workspace is gone: HTTP {response.status_code}")
                async for text in response.aiter_lines():
                    line = json.loads(text)
                    if "result" in line:
                        yield ToolResult(str(line["result"]["text"]), bool(line["result"]["error"]))
                    elif "lost" in line:
                        raise WorkspaceLost(line["lost"])
                    elif "command" in line:
                        asked = line["command"]
                        yield asked["number"], asked["name"], asked["argv"], asked["files"]

    async def files(self) -> dict[str, str]:
        """Returns the texts of the workspace's files by path, within the limits of ``workspace.files``. Raises
        ``WorkspaceLost`` if the workspace has ended or its server does not answer."""
        with _losing():
            async with self._turn:
                response = await self._client.get(f"{self._path}/files", headers=self._headers, timeout=60.0)
            return dict(response.raise_for_status().json()["files"])


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise WorkspaceLost(f"the workspace is gone: {type(error).__name__}") from None


def _task(task: Task) -> dict[str, str]:
    return {"name": task.name[:50], "code": task.code}


def _stretched(header: str) -> float:
    """Returns the seconds in a ``Retry-After`` header, extended by up to 30 % at random, so that clients do not all
    retry at once. An invalid header counts as one second."""
    try:
        seconds = max(0.0, float(header))
    except ValueError:
        seconds = 1.0
    return seconds * random.uniform(1.0, 1.0 + _JITTER)
