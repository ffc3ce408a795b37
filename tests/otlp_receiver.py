"""A real OTLP/HTTP receiver: a small HTTP server that parses what arrives with OpenTelemetry's own messages."""

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Receiver:
    """What a collector got.  ``status`` is its answer to further requests."""

    def __init__(self) -> None:
        self.status = 200
        self.requests: list[tuple[str, dict[str, str]]] = []  # path and headers
        self.resources: list[dict[str, Any]] = []
        self.spans: list[dict[str, Any]] = []

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.requests.append((path, headers))
        message = ExportTraceServiceRequest.FromString(
            gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        )
        for group in message.resource_spans:
            self.resources.append(_plain(group.resource.attributes))
            for span in (span for scope in group.scope_spans for span in scope.spans):
                self.spans.append({
                    "trace": span.trace_id.hex(), "id": span.span_id.hex(), "parent": span.parent_span_id.hex(),
                    "name": span.name, "start": span.start_time_unix_nano, "end": span.end_time_unix_nano,
                    "attributes": _plain(span.attributes), "error": span.status.message,
                })  # fmt: skip


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@contextlib.contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    """Yields a receiver, and its address for OTEL_EXPORTER_OTLP_ENDPOINT."""
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.status == 200:
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.take(self.path, headers, body)
            self.send_response(receiver.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
