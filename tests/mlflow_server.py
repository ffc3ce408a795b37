"""A real MLflow server in its own process."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.ports import free_port


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """Starts a server as the chart does, with its files in ``folder``, and yields its address. ``options`` are further
    arguments of the server."""
    port = free_port()
    command = [
        sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1",
        f"--artifacts-destination={folder / 'artifacts'}", "--allowed-hosts=localhost:*,127.0.0.1:*",
        *options,
    ]  # fmt: skip
    environment = os.environ | {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert process.poll() is None, (folder / "log").read_text()
            try:
                if httpx.get(f"{address}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        else:
            raise AssertionError((folder / "log").read_text())
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)
