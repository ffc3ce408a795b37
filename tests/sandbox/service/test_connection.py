"""A connection ends when a request does not arrive whole in time, and stays for clients that are done or wait."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from cuda_agent.sandbox.service import app

HEAD = b"POST /slow HTTP/1.1\r\nHost: here\r\nContent-Length: 4\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    message = {"more_body": True}
    while message.get("more_body"):
        message = await receive()
    if message["type"] == "http.request":
        await asyncio.sleep(1.0)  # longer than a request may take to arrive
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def with_a_server(talk: Callable[[Streams], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        config = uvicorn.Config(answer, http=app.Connection, ws="none", lifespan="off")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: app.Connection(config, state, {}), "127.0.0.1", 0)
        async with server, asyncio.timeout(30):
            streams = await asyncio.open_connection(*server.sockets[0].getsockname())
            await talk(streams)
            streams[1].close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ARRIVAL_SECONDS", 0.4)


@pytest.mark.parametrize("start", [b"", HEAD, HEAD + b"\r\n12"], ids=["nothing", "part of a head", "part of a body"])
def test_a_request_that_comes_in_drops_is_given_up(start: bytes) -> None:
    async def talk(streams: Streams) -> None:
        reader, writer = streams
        writer.write(start)
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            await asyncio.sleep(0.05)
            if start and not start.endswith(b"12"):
                writer.write(b"X: y\r\n")
        assert ended.result() == b""

    with_a_server(talk)


def test_requests_that_arrive_are_answered_however_long_that_takes() -> None:
    async def talk(streams: Streams) -> None:
        reader, writer = streams
        for _ in range(2):  # the second one on the same connection
            writer.write(HEAD + b"\r\n1234")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(2) == b"ok"
        await asyncio.sleep(0.6)  # between requests it is the keep-alive that ends a connection
        writer.write(HEAD + b"\r\n1234")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")

    with_a_server(talk)
