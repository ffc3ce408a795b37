"""The store that the chart brings: a real MinIO, made ready and then used for a whole run."""

import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx
import pytest
from minio import Minio
from minio.commonconfig import ENABLED, Filter
from minio.lifecycleconfig import Expiration, LifecycleConfig, Rule

from cuda_agent.cluster import bucket
from cuda_agent.storage import StoreUnavailable, open_store
from tests.deploy.charts import TOOLS
from tests.ports import free_port

MINIO = next(iter(sorted((TOOLS.parent / "cluster").glob("minio-*/minio"))), None)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    if MINIO is None:
        pytest.skip("no MinIO: tests/cluster builds it")
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


class _Bucket(BaseHTTPRequestHandler):
    """As much of S3 as rules need: a bucket that is there, and its rules as they were written."""

    written: list[str]

    def _answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_HEAD(self) -> None:
        self._answer(200)

    def do_GET(self) -> None:
        none = "<Error><Code>NoSuchLifecycleConfiguration</Code></Error>"
        self._answer(*((200, self.written[-1]) if self.written else (404, none)))

    def do_PUT(self) -> None:
        self.written.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self._answer(200)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def written(monkeypatch) -> Iterator[list[str]]:
    """The rules that were written to the bucket s3://bucket, the last ones at the end."""
    rules: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Bucket,), {"written": rules}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield rules
    server.shutdown()
    server.server_close()


def use(server: str, monkeypatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-long-password")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def store(server, monkeypatch) -> str:
    use(server, monkeypatch)
    return f"s3://b-{secrets.token_hex(4)}/team"


def test_a_bucket_is_made_from_nothing_and_again(store):
    """The server is only starting when this is asked for the first time."""
    for _ in range(2):
        assert "team/argo/ expires after 7 days" in bucket.make(store, 7)
    opened = open_store(store)
    assert opened.create("a", b"1") and not opened.create("a", b"2") and opened.get("a") == b"1"


def rules_of(name: str, add: Rule | None = None) -> dict[str | None, Rule]:
    """The bucket's rules by id, after ``add`` became the only one."""
    address = urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc
    client = Minio(address, "tester", "a-long-password", secure=False, region="us-east-1")
    if add:
        client.set_bucket_lifecycle(name, LifecycleConfig([add]))
    found = client.get_bucket_lifecycle(name)
    return {rule.rule_id: rule for rule in found.rules} if found else {}


THEIRS = Rule(ENABLED, rule_id="theirs", rule_filter=Filter(prefix="other/"), expiration=Expiration(days=3))


def keeps_rules_of_others(name: str) -> None:
    rules_of(name, THEIRS)
    for days in (7, 9):
        bucket.make(f"s3://{name}/team", days)
        found = rules_of(name)
        assert found.keys() == {"theirs", "logs-of-argo"} and found["theirs"] == THEIRS
        own = found["logs-of-argo"]
        assert own.expiration and own.expiration.days == days
        assert own.rule_filter and own.rule_filter.prefix == "team/argo/"


def test_rules_of_others_stay(written):
    keeps_rules_of_others("bucket")


def test_minio_keeps_the_rules_of_others(store):
    bucket.make(store, 7)
    keeps_rules_of_others(urlsplit(store).netloc)


def test_a_rule_that_is_there_is_not_written_again(written):
    for _ in range(2):
        bucket.make("s3://bucket/team", 7)
    assert len(written) == 1 and rules_of("bucket").keys() == {"logs-of-argo"}
    rules_of("bucket", THEIRS)
    for _ in range(2):
        bucket.make("s3://bucket/team", 7)
    assert len(written) == 3, "ours, theirs, both"


@pytest.mark.parametrize(
    "rule",
    [
        "<Prefix>big/</Prefix><Expiration><Days>1</Days></Expiration>",
        "<Filter><And><Prefix>big/</Prefix><ObjectSizeGreaterThan>9</ObjectSizeGreaterThan></And></Filter>"
        "<Expiration><Days>1</Days></Expiration>",
        "<Filter><Prefix>big/</Prefix></Filter><DelMarkerExpiration><Days>1</Days></DelMarkerExpiration>",
    ],
)
def test_a_rule_that_would_lose_a_part_is_not_touched(written, rule):
    """Without its prefix or its size, a rule would delete more than its owner wants."""
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    theirs = f"<Rule><ID>theirs</ID><Status>Enabled</Status>{rule}</Rule>"
    written.append(f'<LifecycleConfiguration xmlns="{space}">{theirs}</LifecycleConfiguration>')
    assert "add one yourself: team/argo/ expires after 7 days" in bucket.make("s3://bucket/team", 7)
    assert len(written) == 1


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
