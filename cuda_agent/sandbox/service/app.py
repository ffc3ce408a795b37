"""Serves the sandbox over HTTP. Defines the routes, the token check, the size limits, and the server.

A refused request is answered with JSON, ``{"error": {"kind", "message", "where"}}``; ``where`` may be missing. The
answer has the header Retry-After if the same request can succeed later. /healthz and /readyz need no token. /metrics
needs the token, unless ``ServiceLimits.open_metrics`` is true. There is no TLS. There are no user accounts: all clients
share one token. On SIGTERM, the server waits a limited time for its running work and then stops."""

import asyncio
import contextlib
import ctypes
import hmac
import logging
import math
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any

import h11
import uvicorn
from fastapi import FastAPI, Header, Query, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cuda_agent.config import WHERE_JUDGED, SandboxConfig
from cuda_agent.errors import ConfigError
from cuda_agent.sandbox import protocol
from cuda_agent.sandbox.local import LocalSandbox
from cuda_agent.sandbox.protocol import BODY_BYTES, ServiceError, dumps
from cuda_agent.sandbox.service.jobs import Job
from cuda_agent.sandbox.service.service import Role, Service, ServiceLimits
from cuda_agent.sandbox.wire import CommandResult

ARRIVAL_SECONDS = 60.0  # from the start of a connection, or a request's first byte, to the request's end
_OPEN = ("/healthz", "/readyz")  # routes that ask for no token
Poll = Annotated[
    float, Query(ge=0, le=60, allow_inf_nan=False, description="longest wait for the end of the job, in seconds")
]
Owner = Annotated[
    str,
    Header(alias="X-Workspace-Owner", max_length=100, description="the `owner` that was returned with the workspace"),
]
_ABOUT = """The sandbox judges solutions of tasks, and holds work folders (workspaces) for agents.

Requests send the token as `Authorization: Bearer TOKEN`, if the server has one. /healthz and /readyz need no token, nor
does /metrics if the server was started with `--open-metrics`. The service offers no TLS, and it does not separate
users: the holder of the token can see every job."""
_TEXT = {"type": "string"}
_ERROR = {
    "type": "object", "properties": {"kind": _TEXT, "message": _TEXT, "where": _TEXT}, "required": ["kind", "message"],
}  # fmt: skip
_REFUSED = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}
_REFUSALS: dict[int | str, dict[str, Any]] = {  # of every route; without them FastAPI lists answers of another form
    "default": {
        "description": "A refusal. 400, 404, 405, 409, 410, 413, 422: change the request; `where` names the wrong part "
        "of it, if there is one. 401: the token is missing or wrong. 429, 503: try again after the seconds in the "
        "header Retry-After.",
        "content": {"application/json": {"schema": _REFUSED}},
    }
}
_WITHDRAWS = "The answer comes when the job is over. A client that disconnects withdraws its submission."
_log = logging.getLogger("cuda_agent.sandbox")


class Gate:
    """ASGI middleware. Refuses a request that has both length headers (Content-Length and Transfer-Encoding), lacks the
    required token, or has too large a body. Passes all other requests to ``app``."""

    def __init__(self, app: ASGIApp, token: str | None, service: Service) -> None:
        self._app, self._service = app, service
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._open = (*_OPEN, "/metrics") if service.limits.open_metrics else _OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if {b"content-length", b"transfer-encoding"} <= headers.keys():  # a proxy may see another end of the body
            self._service.metrics.rejected.labels("malformed").inc()
            answer = refusal(ServiceError(400, "malformed", "both Content-Length and Transfer-Encoding"))
            answer.headers["Connection"] = "close"
            await answer(scope, receive, send)
            return
        shown, asks = headers.get(b"authorization", b""), scope["path"] not in self._open
        if self._expected and asks and not hmac.compare_digest(shown, self._expected):
            self._service.metrics.rejected.labels("token").inc()
            await refusal(ServiceError(401, "token", "the token is missing or wrong"))(scope, receive, send)
            return
        message: Message = {"type": "http.request", "more_body": True}
        body = bytearray()
        size = int(headers.get(b"content-length", 0))
        while size <= BODY_BYTES and message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
            size = max(size, len(body))
        if size > BODY_BYTES:
            self._service.metrics.rejected.labels("size").inc()
            error = ServiceError(413, "too_large", f"a request may have {BODY_BYTES} bytes")
            await refusal(error)(scope, receive, send)
            return
        if message["type"] == "http.disconnect":
            return
        arrived: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def replayed() -> Message:
            return arrived.pop() if arrived else await receive()

        await self._app({**scope, "size": len(body)}, replayed, send)


def refusal(error: ServiceError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"Retry-After": str(math.ceil(error.retry_after))}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Json(error.to_json(), error.status, headers)


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumps(content)


class Lines(Response):
    """A response that streams the items of an async iterator, ``source``, as JSON lines. It closes ``source`` when the
    stream ends or the client disconnects."""

    media_type = "application/x-ndjson"

    def __init__(self, source: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(None)
        del self.headers["content-length"]
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for line in self._source:
                body = dumps(line) + b"\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._source.aclose()  # type: ignore[attr-defined]


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Runs ``work`` and returns true. If the client disconnects first, cancels ``work`` and returns false."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        outcome, _ = await asyncio.gather(working, leaving, return_exceptions=True)
    if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
        raise outcome
    return not working.cancelled()


def make_app(service: Service, token: str | None) -> ASGIApp:
    """Returns the HTTP application for ``service``. If ``token`` is set, every route requires it, except ``/healthz``
    and ``/readyz``. If ``service.limits.open_metrics`` is true, ``/metrics`` is also an exception."""
    app = FastAPI(
        title="cuda-agent sandbox", description=_ABOUT, version="1", default_response_class=Json, redoc_url=None,
        swagger_ui_oauth2_redirect_url=None, responses=_REFUSALS,
    )  # fmt: skip

    @app.exception_handler(ServiceError)
    async def refused(_: HttpRequest, error: ServiceError) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> Response:
        service.metrics.rejected.labels("malformed").inc()
        return refusal(protocol.malformed(error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def other(_: HttpRequest, error: HTTPException) -> Response:
        service.metrics.rejected.labels("malformed").inc()
        kind = {404: "unknown", 405: "method"}.get(error.status_code, "malformed")
        return refusal(ServiceError(error.status_code, kind, str(error.detail)))

    @app.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Answer 200 while the server runs."""
        return "ok\n"

    unready: dict[str, Any] = {"description": "the reason, as plain text", "content": {"text/plain": {"schema": _TEXT}}}

    @app.get("/readyz", response_class=PlainTextResponse, responses={503: unready})
    async def readyz() -> Response:
        """Answer 200 if the server can take work, otherwise 503 with the reason, such as a jail that does not isolate
        untrusted code."""
        if reason := "draining" if service.draining else service.unready:
            return PlainTextResponse(reason + "\n", 503, {"Retry-After": "5"})
        return PlainTextResponse("ready\n")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/about", response_model=None)
    async def about() -> dict[str, Any]:
        """Return the roles of the server (the kinds of work that it accepts), its load, and its sandbox's settings."""
        sandbox, queue = service.sandbox, service.queue
        return {
            "roles": service.roles, "sandbox": sandbox.config.model_dump(mode="json", exclude=set(WHERE_JUDGED)),
            "judges": sandbox.judges, "queued": queue.queued, "running": queue.running,
            "workspaces": len(service.rooms),
        }  # fmt: skip

    def shown(job: Job) -> dict[str, Any]:
        place = {"position": service.queue.position(job)} if job.state == "queued" else {}
        return job.to_json() | place

    def found(id: str) -> Job:
        if (job := service.queue.find(id)) is None:
            raise ServiceError(404, "unknown", "there is no such job, or it is long over")
        return job

    @app.post("/v1/jobs", status_code=202, response_model=None)
    async def submit(http: HttpRequest, request: protocol.Submission, wait: Poll = 0.0) -> dict[str, Any]:
        """Queue a job and return it: ``evaluate`` (judge a solution), ``probe`` (run a task without a solution),
        ``spec`` (find the shapes and dtypes of a task) or ``build`` (compile a solution into the cache).  Requests with
        the same content share one job.  A client that disconnects while it waits withdraws its submission."""
        job = service.submit(request, http.scope["size"])
        if wait and not await unless_gone(http.receive, service.wait(job, wait)):
            service.cancel(job)
        return shown(job)

    @app.get("/v1/jobs/{id}", response_model=None)
    async def poll(http: HttpRequest, id: str, wait: Poll = 0.0) -> dict[str, Any]:
        """Return the job: its state, its position while it is queued, and at the end its result or error."""
        job = found(id)
        await unless_gone(http.receive, service.wait(job, wait))
        return shown(job)

    @app.get("/v1/jobs/{id}/events", response_model=None)
    async def events(id: str) -> Response:
        """Stream the events of the job as JSON lines.  The last line also contains the job."""
        return Lines(service.events(found(id)))

    @app.delete("/v1/jobs/{id}", response_model=None)
    async def cancel(id: str) -> dict[str, Any]:
        """Withdraw one submission of the job.  Requests with the same content share one job.  If no other submission is
        left, a queued job is cancelled.  A running job continues, but its result is dropped unless the job is submitted
        again before it ends."""
        service.cancel(job := found(id))
        return job.to_json()

    for name, kind, says in (
        ("evaluate", protocol.EvaluateRequest, "Judge a solution; return the verdict."),
        ("probe", protocol.ProbeRequest, "Run a task without a solution; return its times and shapes, or its error."),
        ("spec", protocol.SpecRequest, "Return the shapes, dtypes and plain values of a task; a build needs them."),
        (
            "build",
            protocol.Build,
            "Build a solution into the cache; return the status ok, or build_error with a message.",
        ),
    ):

        @app.post(f"/v1/{name}", response_model=None, name=name, description=f"{says} {_WITHDRAWS}")
        async def at_once(http: HttpRequest, request: kind) -> dict[str, Any]:  # type: ignore[valid-type]
            job = service.submit(request, http.scope["size"])
            if not await unless_gone(http.receive, service.wait(job, None)):
                service.cancel(job)
            if job.result is not None:
                return job.result
            error = job.error or {"kind": "cancelled", "message": "the job was cancelled"}
            status = {"task": 422, "cancelled": 409}.get(error["kind"], 503)
            raise ServiceError(status, error["kind"], error["message"], retry_after=5.0 if status == 503 else None)

    @app.post("/v1/workspaces", status_code=201, response_model=None)
    async def open_workspace(request: protocol.OpenWorkspace) -> dict[str, Any]:
        """Open a work folder for an agent, and return its id and a secret, ``owner``.  Later requests for this folder
        must send the secret in the header X-Workspace-Owner."""
        service.admit("workspace")
        try:
            opened = await service.rooms.open(request.files, request.protected)
        except ServiceError as error:
            service.metrics.rejected.labels("workspaces").inc()
            raise error
        return {"id": opened.id, "owner": opened.owner, "idle_seconds": service.limits.idle_seconds}

    @app.post("/v1/workspaces/{id}/calls", response_model=None)
    async def call(id: str, request: protocol.Call, owner: Owner = "") -> Response:
        """Call a tool in the work folder.  The answer is a stream of JSON lines: commands that the client must run, a
        line every few seconds while the tool runs, and at the end the result.  docs/service.md describes the lines."""
        return Lines(service.rooms.call(service.rooms.find(id, owner), request.tool, request.arguments))

    @app.post("/v1/workspaces/{id}/answers/{number}", response_model=None)
    async def answer(id: str, number: int, request: protocol.Answer, owner: Owner = "") -> dict[str, Any]:
        """Send the result of a command.  During a tool call, the stream of lines asks the client to run commands, each
        with a ``number``."""
        service.rooms.answer(service.rooms.find(id, owner), number, CommandResult(**dict(request)))
        return {}

    @app.get("/v1/workspaces/{id}/files", response_model=None)
    async def files(id: str, owner: Owner = "") -> dict[str, Any]:
        """Return the text files of the work folder, by path."""
        return {"files": await service.rooms.files(service.rooms.find(id, owner))}

    @app.delete("/v1/workspaces/{id}", response_model=None)
    async def close_workspace(id: str, owner: Owner = "") -> dict[str, Any]:
        """Close the work folder."""
        await service.rooms.close(service.rooms.find(id, owner))
        return {}

    return Gate(app, token, service)


class Connection(H11Protocol):
    """An HTTP connection that closes if a request takes longer than ``ARRIVAL_SECONDS`` to arrive."""

    _arriving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._arriving:
            self._arriving.cancel()

    def _watch(self) -> None:
        arrives = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if self._arriving and not arrives:
            self._arriving.cancel()
            self._arriving = None
        elif arrives and not self._arriving:
            self._arriving = self.loop.call_later(ARRIVAL_SECONDS, self.transport.close)


class _Server(uvicorn.Server):
    """An HTTP server that drains ``service`` (see ``Service.drain``) before it stops. SIGTERM, SIGINT or the event
    ``service.needs_recycle`` starts the drain. A signal during the drain stops the server at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._drain: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._loop.call_soon_threadsafe(self._begin)

    async def end_when_recycled(self) -> None:
        await self._service.needs_recycle.wait()
        _log.info("recycled: it has judged enough, or a cheat; it ends for a fresh process")
        self._begin()

    def _begin(self) -> None:
        if self._drain is not None:
            self._drain.cancel()
            self._service.sandbox.kill()
            self.should_exit = True
            return
        self._drain = asyncio.create_task(self._service.drain())
        self._drain.add_done_callback(lambda _: setattr(self, "should_exit", True))


async def serve(
    config: SandboxConfig, cache: Path, roles: tuple[Role, ...], limits: ServiceLimits, host: str, port: int
) -> None:
    """Serves the sandbox over HTTP until SIGTERM or SIGINT. Also ends after ``limits.recycle_after`` new verdicts, or
    after a solution that cheats if ``limits.recycle_on_cheat`` is true, so that a fresh process can replace this one.
    Drains the service (see ``Service.drain``) before it returns.

    Reads the access token from the file or the environment variable that ``config`` names. Then removes the variable,
    because child processes inherit the environment. If there is no token, listens on 127.0.0.1 only. Raises
    ``ConfigError`` if the token is not usable or the address is not available, or ``SandboxUnready`` if the sandbox
    cannot start."""
    token = protocol.read_token(config, os.environ)
    os.environ.pop(config.token_env, None)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: other processes of this user cannot read the environment
    if token is None and host != "127.0.0.1":
        print(f"no token is configured: listening on 127.0.0.1 only, not on {host}", file=sys.stderr, flush=True)
        host = "127.0.0.1"
    async with LocalSandbox(config, cache) as sandbox, Service(sandbox, roles, limits) as service:
        settings = uvicorn.Config(
            make_app(service, token), host=host, port=port, log_level="warning", access_log=False, lifespan="off",
            http=Connection, server_header=False, timeout_keep_alive=75, timeout_graceful_shutdown=5, backlog=2048,
            ws="none", h11_max_incomplete_event_size=64 << 10,
        )  # fmt: skip
        server = _Server(settings, service)
        with contextlib.ExitStack() as closing:
            try:
                listening = closing.enter_context(settings.bind_socket())
            except SystemExit:
                raise ConfigError(f"cannot listen on {host}:{port}: is something else there?") from None
            listening.set_inheritable(False)
            # Accepted connections inherit this option. Without it an answer waits 40 ms for a delayed acknowledgement.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listening.listen(settings.backlog)  # connections wait from here on; they are accepted a little later
            print(f"listening on http://{host}:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
            wearing = asyncio.create_task(server.end_when_recycled())
            await server.serve(sockets=[listening])
            wearing.cancel()
    _log.info("drained")
