"""A small Kubernetes client for the controllers in this folder, with the standard library alone.

It sends JSON requests with a client certificate, and keeps lists up to date by watches.  It has no paging, no patches
of sub-resources and no tokens."""

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Object = dict[str, Any]


class Api:
    """A client of the API server at `server`, as `user`. The folder `pki` has the user's certificate and key."""

    def __init__(self, server: str, pki: Path, user: str) -> None:
        self.server = server
        self.tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self.tls.load_cert_chain(str(pki / f"{user}.crt"), str(pki / f"{user}.key"))

    def open(self, method: str, path: str, body: Object | None = None, timeout: float = 30) -> Any:
        """Sends a request and returns the open response. Raises `urllib.error.HTTPError` for any status from 400 on."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server + path, data=data, method=method, headers=headers)
        return urllib.request.urlopen(request, context=self.tls, timeout=timeout)

    def call(self, method: str, path: str, body: Object | None = None) -> Object:
        with self.open(method, path, body) as answer:
            return json.load(answer)  # type: ignore[no-any-return]


class Mirror:
    """Copies of lists of objects, one list per path.  Threads keep the copies up to date with the API server."""

    def __init__(self, api: Api, *paths: str) -> None:
        self.api, self.paths = api, paths
        self.lists: dict[str, dict[str, Object]] = {}
        self.lock, self.changed = threading.Lock(), threading.Event()
        for path in paths:
            threading.Thread(target=self._follow, args=(path,), daemon=True).start()

    def changes(self) -> Iterator[list[list[Object]]]:
        """Yields the lists in the order of the paths: once all are there, after each change, and every 30 seconds."""
        while True:
            self.changed.wait(30)
            self.changed.clear()
            with self.lock:
                if len(self.lists) == len(self.paths):
                    now = [list(self.lists[path].values()) for path in self.paths]
                else:
                    continue
            yield now
            time.sleep(0.05)  # a burst of changes is worked on once

    def _follow(self, path: str) -> None:
        while True:
            try:
                self._list_and_watch(path)
            except (OSError, ValueError) as error:  # refused, cut off in mid-line, or the server is away
                print(f"{path}: {error}", flush=True)
                time.sleep(1)

    def _list_and_watch(self, path: str) -> None:
        listed = self.api.call("GET", path)
        with self.lock:
            self.lists[path] = {item["metadata"]["uid"]: item for item in listed["items"]}
        self.changed.set()
        version = listed["metadata"]["resourceVersion"]
        watch = f"{path}?watch=1&timeoutSeconds=300&resourceVersion={version}"
        with self.api.open("GET", watch, timeout=330) as events:
            for line in events:
                event = json.loads(line)
                if event["type"] == "ERROR":  # usually: that version is too old; list again
                    return
                uid = event["object"]["metadata"]["uid"]
                with self.lock:
                    if event["type"] == "DELETED":
                        self.lists[path].pop(uid, None)
                    else:
                        self.lists[path][uid] = event["object"]
                self.changed.set()
