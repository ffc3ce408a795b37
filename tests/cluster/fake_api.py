"""A small API server of Kubernetes over HTTP, for tests and benchmarks: objects in memory, counted requests and bytes.

It has what the commands use: objects by name, lists by label in pages, tables, merge patches, and gzip for answers of
more than 128 KB, as the real one.  It has no schemas, roles or admission; ``control_plane`` has."""

import gzip
import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

from cuda_agent.cluster.api import API_VERSIONS

PAGE = 500  # most objects of one answer
NAMESPACE = "kernels"
Object = dict[str, Any]


class FakeApi:
    """A context manager that serves ``objects`` (plural, name) -> object at ``address``."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.requests: list[str] = []  # method and path of each, with its query
        self.sent = 0  # bytes of all bodies, as they were on the wire
        self.refuse: Callable[[str, str], int] = lambda method, path: 0  # the status of a refusal, or 0

    def add(self, kind: str, name: str, labels: Mapping[str, str] = {}, **fields: Any) -> Object:
        """Adds an object.  ``fields`` are its top-level fields, and ``metadata`` more of its metadata."""
        metadata = {"name": name, "namespace": NAMESPACE, "labels": dict(labels), "uid": f"uid-{name}"}
        metadata |= {"creationTimestamp": "2026-01-01T00:00:00Z"} | fields.pop("metadata", {})
        made = {"apiVersion": API_VERSIONS.get(kind, "v1"), "kind": kind, "metadata": metadata, **fields}
        self.objects[plural(kind), name] = made
        return made

    def kubeconfig(self, folder: Path) -> Path:
        """Writes a kubeconfig whose only context is this server's, and returns its path."""
        one = {"cluster": "fake", "user": "ada", "namespace": NAMESPACE}
        text = yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.address}}],
            "users": [{"name": "ada", "user": {"token": "secret"}}],
            "contexts": [{"name": "fake", "context": one}],
        })  # fmt: skip
        (folder / "kubeconfig").write_text(text)
        return folder / "kubeconfig"

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, query: Mapping[str, str], accept: str, body: Any) -> tuple[int, Object]:
        """Returns the status and the object with which the server answers a request."""
        if status := self.refuse(method, path):
            return status, {"message": f"refused: {method} {path}"}
        parts = path.strip("/").split("/")
        if parts == ["version"]:
            return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if "namespaces" not in parts:
            return 403, {"message": f"no rights outside of namespace {NAMESPACE}"}
        *_, space, kind, name = [*parts, *[""] * (4 - len(parts[parts.index("namespaces") :]))]
        if not kind:
            found = {"metadata": {"name": space, "labels": {}}} if space == NAMESPACE else None
        elif method == "POST":
            found = dict(body)
            if "dryRun" not in query:
                if (kind, body["metadata"]["name"]) in self.objects:
                    return 409, {"message": f"{kind} {body['metadata']['name']} already exists"}
                made = body["metadata"] | {"creationTimestamp": "2026-01-01T00:00:00Z", "uid": "uid"}
                self.objects[kind, body["metadata"]["name"]] = found = body | {"metadata": made}
        elif not name:
            return 200, self._list(kind if space == NAMESPACE else "", query, accept)
        else:
            found = self.objects.get((kind, name)) if space == NAMESPACE else None
            if found and method == "PATCH":
                self.objects[kind, name] = found = merged(found, body)
            if found and method == "DELETE":
                del self.objects[kind, name]
        return (200, found) if found else (404, {"message": f"{kind} {name} not found"})

    def _list(self, kind: str, query: Mapping[str, str], accept: str) -> Object:
        wanted = [item for item in query.get("labelSelector", "").split(",") if item]
        found = [
            item
            for (of, _), item in self.objects.items()
            if of == kind
            and all(_selects(one, item["metadata"]["labels"]) for one in wanted)
            and all(_field(item, *one.split("=")) for one in query.get("fieldSelector", "").split(",") if one)
        ]
        begin = int(query.get("continue", 0))
        end = begin + int(query.get("limit", len(found) + 1))
        page: Object = {"metadata": {"continue": str(end)} if end < len(found) else {}}
        if "as=Partial" in accept:
            return page | {"items": [{"metadata": item["metadata"]} for item in found[begin:end]] or None}
        if "as=Table" not in accept:
            return page | {"items": found[begin:end]}
        columns = {"Name": "metadata.name", "Status": "status.phase", "Message": "status.message"}
        rows = [{"cells": [_at(item, path) for path in columns.values()]} for item in found[begin:end]]
        return page | {"kind": "Table", "columnDefinitions": [{"name": name} for name in columns], "rows": rows or None}


class _Handler(BaseHTTPRequestHandler):
    api: FakeApi
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet: two would wait for an acknowledgement

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.api.requests.append(f"{self.command} {self.path}")
        accept = self.headers.get("Accept", "")
        status, found = self.api.answer(self.command, parts.path, query, accept, json.loads(text or "null"))
        data = json.dumps(found, separators=(",", ":")).encode()
        self.send_response(status)
        if len(data) > 128 * 1024 and "gzip" in self.headers.get("Accept-Encoding", ""):
            data = gzip.compress(data, 4)
            self.send_header("Content-Encoding", "gzip")
        self.api.sent += len(data)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        pass


def plural(kind: str) -> str:
    return f"{kind.lower()}s".replace("ys", "ies")


def merged(one: Any, change: Any) -> Any:
    """Returns ``one`` after the JSON merge patch ``change``."""
    if not (isinstance(one, dict) and isinstance(change, dict)):
        return change
    left = {key: value for key, value in one.items() if change.get(key, "") is not None}
    return left | {key: merged(one.get(key), value) for key, value in change.items() if value is not None}


def _selects(wanted: str, labels: Mapping[str, str]) -> bool:
    if wanted.startswith("!"):
        return wanted[1:] not in labels
    key, equal, value = wanted.partition("=")
    return labels.get(key) == value if equal else key in labels


def _field(item: Object, path: str, value: str) -> bool:
    return _at(item, path) == value


def _at(item: Any, path: str) -> Any:
    for part in path.split("."):
        item = item.get(part) if isinstance(item, dict) else None
    return item
