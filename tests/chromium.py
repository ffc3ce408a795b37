"""A headless Chromium that is controlled through the DevTools protocol: it opens a page, evaluates JavaScript in the
page and takes a picture of it.  Only one page at a time; no input, downloads or other browsers."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


class Page:
    """One tab of the browser.  ``socket`` is the tab's DevTools connection."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._number = socket, 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the protocol and returns its result. Skips events that come before it. Raises
        AssertionError if the browser refuses the command."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                answer: dict[str, Any] = message["result"]
                return answer

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def text(self) -> str:
        """Returns the visible text of the page."""
        return str(self.ask("document.body ? document.body.innerText : ''"))

    def shows(self, *words: str) -> None:
        """Waits until all ``words`` are on the page."""
        try:
            wait_for(f"{words} on the page", 90, lambda: all(word in self.text() for word in words))
        except AssertionError:
            missing = [word for word in words if word not in self.text()]
            raise AssertionError(f"{missing} never came; the page says: {self.text()[:3000]}") from None

    def picture(self, file: Path) -> None:
        """Writes the visible part of the page to ``file`` as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(width: int, height: int) -> Iterator[Page]:
    """Yields the empty page of a new browser whose window has this size in pixels."""
    import websocket

    assert PROGRAM, "no Chromium on this machine"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        switches = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        environment = {**os.environ, "HOME": folder, "no_proxy": "127.0.0.1"}
        with subprocess.Popen(
            [PROGRAM, *switches], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        ) as running:  # fmt: skip
            try:
                told = Path(folder) / "DevToolsActivePort"
                port = wait_for("the browser", 60, lambda: told.exists() and told.read_text().splitlines()[:1])[0]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
                    (page,) = [tab for tab in json.load(answer) if tab["type"] == "page"]
                address = page["webSocketDebuggerUrl"]
                socket = websocket.create_connection(address, timeout=60, http_no_proxy=["127.0.0.1"])
                made = Page(socket)
                made.call("Page.enable")
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                made.call("Emulation.setDeviceMetricsOverride", **size)
                yield made
            finally:
                os.killpg(running.pid, signal.SIGKILL)  # its helpers too, which would go on writing into the folder
