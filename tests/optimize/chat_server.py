"""Runs a server that speaks the OpenAI protocol over HTTP and does what a script says, errors included.

A script is a function from the request's JSON to a list of steps. A step is one of these: ``{"text": ...}``,
``{"thought": ...}``, ``{"calls": [(name, arguments or text), ...]}``, ``{"usage": (prompt, completion)}``, ``{"finish":
reason}``, ``{"status": 429, "headers": {...}, "body": ...}`` as the only step, ``{"raw": bytes}``, which is sent
unchanged, ``{"cut": True}``, which breaks the answer off, or ``{"endless": text}``, which repeats the text until the
client disconnects. The server lists ``MODELS`` as its models."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ABOUT = {"id": "x", "created": 0, "model": "scripted"}
MODELS = ("scripted", "m", "other")
Script = Callable[[dict[str, Any]], list[dict[str, Any]]]


class Served:
    """What arrived at a server: the JSON and the headers of each request, and the bytes of all bodies."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.bytes = b""
        self.left = 0  # endless answers that a client did not wait for

    def turns(self) -> int:
        return len(self.requests)


def turn_of(request: dict[str, Any]) -> int:
    """Returns the number of turns that the model has had in this conversation."""
    return sum(message["role"] == "assistant" for message in request["messages"])


def said(turns: list[list[dict[str, Any]]]) -> Script:
    """Returns a script that plays ``turns`` one after the other, and repeats the last one."""
    return lambda request: turns[min(turn_of(request), len(turns) - 1)]


def call(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return name, arguments


@contextmanager
def serve(script: Script) -> Iterator[Served]:
    served = Served()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            data = {"object": "list", "data": [{"id": name, "object": "model"} for name in MODELS]}
            self.json(200 if self.path.endswith("/models") else 404, data)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            request = json.loads(content)
            with lock:
                served.requests.append(request)
                served.headers.append(dict(self.headers))
                served.bytes += content
                steps = script(request)
            try:
                (self.answer if request.get("stream") or "status" in steps[0] else self.whole)(steps)
            except (BrokenPipeError, ConnectionResetError):
                served.left += 1
                self.close_connection = True

        def answer(self, steps: list[dict[str, Any]]) -> None:
            if "status" in steps[0]:
                body = steps[0].get("body", b"no")
                self.send_response(steps[0]["status"])
                for name, value in steps[0].get("headers", {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            finish = "stop"
            for step in steps:
                if "raw" in step:
                    self.wfile.write(step["raw"])
                elif "cut" in step:
                    return
                elif "endless" in step:
                    while True:
                        self.chunk({"content": step["endless"]})
                elif "text" in step:
                    for start in range(0, len(step["text"]), 400):
                        self.chunk({"content": step["text"][start : start + 400]})
                elif "thought" in step:
                    self.chunk({"reasoning_content": step["thought"]})
                elif "calls" in step:
                    finish = "tool_calls"
                    for index, (name, arguments) in enumerate(step["calls"]):
                        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                        function = {"name": name, "arguments": ""}
                        self.chunk({"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]})
                        for start in range(0, len(text), 10_000):
                            part = {"arguments": text[start : start + 10_000]}
                            self.chunk({"tool_calls": [{"index": index, "function": part}]})
                finish = step.get("finish", finish)
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
            usage = next((step["usage"] for step in steps if "usage" in step), None)
            if usage:
                self.event({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}})
            self.wfile.write(b"data: [DONE]\n\n")

        def whole(self, steps: list[dict[str, Any]]) -> None:
            """Sends the answer in one piece, for a client that does not ask for a stream."""
            calls = [call for step in steps for call in step.get("calls", [])]
            message = {"role": "assistant", "content": "".join(step.get("text", "") for step in steps) or None}
            if calls:
                message["tool_calls"] = [
                    {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                    for i, (name, arguments) in enumerate(calls)
                ]
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            self.json(200, ABOUT | {"object": "chat.completion", "choices": [choice], "usage": usage})

        def json(self, status: int, data: dict[str, Any]) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def chunk(self, delta: dict[str, Any]) -> None:
            self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

        def event(self, data: dict[str, Any]) -> None:
            data = ABOUT | {"object": "chat.completion.chunk"} | data
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
