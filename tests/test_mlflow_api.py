"""The client of MLflow: what it trusts, how it logs in, and what it says if it may not."""

import base64
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

from cuda_agent import mlflow_api
from cuda_agent.cluster import bucket, doctor, results
from cuda_agent.errors import ConfigError
from cuda_agent.tracking import Mirror
from tests.mlflow_server import serving

ADA = "Basic " + base64.b64encode(b"ada:secret").decode()


class Closed(BaseHTTPRequestHandler):
    """An MLflow behind a login: it tells everybody that it is healthy, and lists experiments for ada."""

    asked: ClassVar[list[str]] = []

    def _answer(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status = 200 if self.path == "/health" or self.headers.get("Authorization") == ADA else 401
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    Closed.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_is_tried_as_a_run_uses_it(tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        check = bucket.check_mlflow(address)
        assert check.ok and check.text == f"{address}: a row and a file were written, read and deleted"
        assert mlflow_api.Rest(address).find(mlflow_api.Rest(address).experiments(), "tried", "yes") == []


def test_a_healthy_server_that_wants_a_login_is_a_finding(closed: str) -> None:
    check = bucket.check_mlflow(closed)
    assert not check.ok and "MLflow refuses this user (401)" in check.text
    assert "MLFLOW_TRACKING_USERNAME" in check.mend and "secretEnvironment" in check.mend
    assert not bucket.check_mlflow("http://127.0.0.1:9").ok


def place(uri: str) -> Any:
    """A cluster with one release, whose MLflow is at ``uri``."""
    labels, said = {"cuda-agent.io/profile": "cpu"}, {"cuda-agent.io/version": "0.1.0", "cuda-agent.io/mlflow": uri}
    about = {"name": "cuda-agent-cpu-0-1-0", "labels": labels, "annotations": said}
    return SimpleNamespace(namespace="n", name="c", metadata=lambda kind, selector: [about])


def test_the_command_line_logs_in_and_says_how_if_it_did_not(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"refuses this user \(401\). Log in with MLFLOW_TRACKING_USERNAME"):  # noqa: SIM117
        with results.mlflow(place(closed)) as address:
            results.log(address, "run", "rft")
    text, mend = doctor._results(place(closed), None)
    assert "refuses this user" in text and mend.startswith("Log in with")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    with pytest.raises(ConfigError, match="MLflow knows no run run"), results.mlflow(place(closed)) as address:
        results.log(address, "run", "rft")
    assert doctor._results(place(closed), None) == (f"this machine reads them from {closed}", "")


def test_a_refused_mirror_asks_no_more(closed: str) -> None:
    said: list[str] = []
    mirror = Mirror(closed, "x", "run", None, said.append)
    mirror.update("stage", metrics={0: {"loss": 1.0}})
    assert not mirror.close(timeout=60)
    assert len(Closed.asked) == 1 and len(said) == 1 and "Log in with" in said[0] and "kept in the store" in said[0]


def test_a_private_authority_is_trusted_beside_the_public_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, authority = tmp_path / "key.pem", tmp_path / "ca.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", authority]
    subprocess.run([*made, "-subj", "/CN=Private"], check=True, capture_output=True)
    for name in ("MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_INSECURE_TLS", "CUDA_AGENT_CA_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert mlflow_api.trusted() is True
    monkeypatch.setenv("CUDA_AGENT_CA_FILE", str(authority))
    names = [dict(part[0] for part in one["subject"]).get("commonName") for one in mlflow_api.trusted().get_ca_certs()]
    assert "Private" in names and len(names) == len(httpx.create_ssl_context().get_ca_certs()) + 1 > 10
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(authority))
    assert len(mlflow_api.trusted().get_ca_certs()) == 1
