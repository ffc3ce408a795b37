"""Reports on a cluster: what ``finish`` leaves in a real MLflow server, and what is fetched from there."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cuda_agent.config import Config, ConfigError, freeze
from cuda_agent.pipeline import cluster_report, pod
from cuda_agent.tracking import Mirror


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow as the chart starts it."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1",
        f"--artifacts-destination={folder / 'artifacts'}", "--allowed-hosts=localhost:*,127.0.0.1:*",
    ]  # fmt: skip
    environment = os.environ | {"MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}"}
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
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def left(server: str, run: str, folder: Path) -> None:
    """A run's report, left in MLflow by a mirror as ``finish`` leaves it."""
    config = Config()
    here = pod.Surroundings(str(folder / "store"), server, folder / "c", folder / "p", folder)
    (folder / "report" / "assets").mkdir(parents=True)
    (folder / "report" / "index.html").write_text(f"<p>{run}</p>")
    (folder / "report" / "report.json").write_text("{}")
    (folder / "report" / "assets" / "a.svg").write_text("<svg/>")
    with pod.mirrored(here, config, freeze(config)[1], run) as mirror:
        assert isinstance(mirror, Mirror)
        mirror.update(None, status="FINISHED", artifacts=[folder / "report"])
        assert mirror.close(60)


def test_a_report_is_fetched_whole(server, tmp_path):
    left(server, "one", tmp_path / "one")
    left(server, "two", tmp_path / "two")
    folder = cluster_report.download(server, "two", tmp_path / "fetched")
    assert (folder / "index.html").read_text() == "<p>two</p>"
    assert (folder / "assets" / "a.svg").read_text() == "<svg/>" and (folder / "config.json").exists()


def test_a_run_without_a_report_and_a_run_that_nobody_knows_are_said_so(server, tmp_path):
    config = Config()
    here = pod.Surroundings(str(tmp_path / "store"), server, tmp_path / "c", tmp_path / "p", tmp_path)
    with pod.mirrored(here, config, freeze(config)[1], "begun") as mirror:
        mirror.update(None, status="RUNNING")
    with pytest.raises(ConfigError, match="Run begun has no report yet"):
        cluster_report.download(server, "begun", tmp_path / "a")
    with pytest.raises(ConfigError, match="MLflow knows no run nobody"):
        cluster_report.download(server, "nobody", tmp_path / "a")
    assert not (tmp_path / "a").exists()
