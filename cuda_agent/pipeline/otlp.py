"""Sends the spans of a run to an OpenTelemetry collector, by OTLP over HTTP.

OpenTelemetry's environment variables set the address, the headers and the certificates.  Without an address, nothing
is imported and nothing is sent.  A span is a dictionary, as ``spans`` describes it."""

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cuda_agent.errors import ConfigError, TryAgain

EVERY = 2.0  # seconds between two looks for new spans
CLOSING_SECONDS = 15.0  # longest wait for the collector at the end of a process
BATCH = 512  # spans of one request


def address() -> str:
    """Returns the address of the collector from OpenTelemetry's environment variables, or "" if no trace is wanted."""
    given = os.environ.get
    if given("OTEL_SDK_DISABLED", "").lower() == "true" or given("OTEL_TRACES_EXPORTER") == "none":
        return ""
    return given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or given("OTEL_EXPORTER_OTLP_ENDPOINT") or ""


class Connection:
    """A connection to the collector, for the spans of one run.

    Raises:
        ConfigError: A package is missing, or the environment variables ask for another protocol."""

    def __init__(self, run: str, trace: str) -> None:
        given = os.environ.get
        protocol = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given("OTEL_EXPORTER_OTLP_PROTOCOL")
        if protocol not in (None, "", "http/protobuf"):
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf (port 4318), got {protocol}")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import ReadableSpan
            from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
        except ModuleNotFoundError as missing:
            raise ConfigError(f"spans cannot be sent without {missing.name}: pip install 'cuda-agent[otlp]'") from None
        quiet = logging.getLogger("opentelemetry")  # a failed request is reported by our caller
        quiet.addHandler(logging.NullHandler())
        quiet.propagate = False
        name = given("OTEL_SERVICE_NAME") or "cuda-agent"
        resource = Resource.create({"service.name": name, "cuda_agent.run": run})
        self._exporter = OTLPSpanExporter()

        def context(span: str) -> SpanContext | None:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(int(trace, 16), int(span, 16), False, flags) if span else None

        def readable(span: dict[str, Any]) -> ReadableSpan:
            attributes = span["attributes"]
            error = attributes.get("error")
            return ReadableSpan(
                span["name"],
                context(span["id"]),
                context(span["parent"]),
                resource,
                attributes,
                status=Status(StatusCode.ERROR, str(error)) if error else Status(StatusCode.UNSET),
                start_time=span["start"],
                end_time=span["end"],
            )

        self._readable = readable

    def send(self, spans: Sequence[dict[str, Any]]) -> int:
        """Sends ``spans``, and returns how many of the first ones have arrived.  If a request fails, it is repeated for
        ``OTEL_EXPORTER_OTLP_TIMEOUT`` seconds (default 10), and the spans after it are not sent."""
        for start in range(0, len(spans), BATCH):
            result = self._exporter.export([self._readable(span) for span in spans[start : start + BATCH]])
            if result.name != "SUCCESS":
                return start
        return len(spans)


class Sender:
    """Sends the spans of all files in ``folder`` while they are written, in a thread.  If the collector is away, tries
    again every ``EVERY`` seconds, and calls ``trouble`` once with a line for the user."""

    def __init__(self, folder: Path, run: str, trace: str, trouble: Callable[[str], None]) -> None:
        self._connection, self._folder, self._trouble = Connection(run, trace), folder, trouble
        self._offsets: dict[Path, int] = {}  # bytes of a file that were sent
        self._warned = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends the last spans.  Waits at most ``CLOSING_SECONDS``."""
        self._closing.set()
        self._thread.join(CLOSING_SECONDS)

    def _work(self) -> None:
        while not self._closing.wait(EVERY):
            self._send_new()
        self._send_new()

    def _send_new(self) -> None:
        try:
            for file in sorted(self._folder.glob("*.jsonl")):
                offset = self._offsets.get(file, 0)
                with open(file, "rb") as opened:
                    opened.seek(offset)
                    lines = [line for line in opened if line.endswith(b"\n")]
                sent = self._connection.send([json.loads(line) for line in lines])
                self._offsets[file] = offset + sum(map(len, lines[:sent]))
                if sent < len(lines):
                    raise ConnectionError("it did not answer, or refused")
        except Exception as error:  # a failure of the collector must not stop the run
            if not self._warned:
                self._warned = True
                self._trouble(f"The collector at {address()} takes no spans ({error}); they are kept in the store.")


def send_all(run: str, trace: str, spans: Sequence[dict[str, Any]]) -> int:
    """Sends all spans of a run, and returns their number.

    Raises:
        ConfigError: No address is set, or spans cannot be sent.
        TryAgain: The collector did not answer, or refused."""
    if not address():
        raise ConfigError("OTEL_EXPORTER_OTLP_ENDPOINT: expected the collector's address, as in http://127.0.0.1:4318.")
    if not trace:
        raise ConfigError(f"The trace of run {run} has no id yet: none of its pods has ended.")
    if (sent := Connection(run, trace).send(spans)) < len(spans):
        raise TryAgain(f"The collector at {address()} took {sent} of {len(spans)} spans.")
    return sent


def open_sender(folder: Path, run: str, trace: str, trouble: Callable[[str], None]) -> Sender | None:
    """Returns a ``Sender``, or None if no address is set.  Also returns None, after a call of ``trouble``, if spans
    cannot be sent for another reason."""
    if not address():
        return None
    try:
        return Sender(folder, run, trace, trouble)
    except ConfigError as error:
        trouble(str(error))
        return None
