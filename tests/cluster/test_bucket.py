"""The store that the chart brings: a real MinIO, made ready and then used for a whole run."""

import os
import secrets
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from cuda_agent.cluster import bucket
from cuda_agent.storage import StoreUnavailable, open_store
from tests.deploy.charts import TOOLS
from tests.ports import free_port

MINIO = next(iter(sorted((TOOLS.parent / "cluster").glob("minio-*/minio"))), None)
pytestmark = pytest.mark.skipif(MINIO is None, reason="no MinIO: tests/cluster builds it")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("minio")
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {
        "MINIO_ROOT_USER": "tester",
        "MINIO_ROOT_PASSWORD": "a-long-password",
        "MINIO_BROWSER": "off",
    }
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [str(MINIO), "server", str(folder / "data"), "--address", address], env=environment, stdout=log, stderr=log
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def store(server, monkeypatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-long-password")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://b-{secrets.token_hex(4)}/team"


def test_a_bucket_is_made_from_nothing_and_again(store):
    """The server is only starting when this is asked for the first time."""
    for _ in range(2):
        assert "team/argo/ expires after 7 days" in bucket.make(store, 7)
    opened = open_store(store)
    assert opened.create("a", b"1") and not opened.create("a", b"2") and opened.get("a") == b"1"


def test_the_store_is_tried_for_what_a_run_relies_on(store):
    bucket.make(store, 7)
    checks = list(bucket.probe(store, "off"))
    assert all(check.ok for check in checks) and any("create-if-absent holds" in check.text for check in checks)
    assert open_store(store).list("doctor") == []


def test_a_store_that_is_not_there_is_a_finding(store):
    *_, last = bucket.probe(store, "http://127.0.0.1:1")
    assert not last.ok and "127.0.0.1:1" in last.text and "values tracking" in last.mend
    assert not all(check.ok for check in bucket.probe(store, "off"))


def test_a_wrong_key_is_said_at_once(store, monkeypatch, server):
    for _ in range(100):
        try:
            if httpx.get(f"{server}/minio/health/ready").status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-password")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="could not make bucket"):
        bucket.make(store, 7)
    assert time.monotonic() - began < bucket.PATIENCE / 2
