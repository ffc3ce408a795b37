"""The store: atomic, content-addressed, and clear about what is wrong, for a folder, memory and S3."""

import contextlib
import hashlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from cuda_agent.storage import (
    StoreDamaged,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    absolute_uri,
    open_store,
)


class _S3(BaseHTTPRequestHandler):
    """As much of S3 as the store uses: objects in a dict, If-None-Match, listing."""

    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def log_message(self, *args):
        pass

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _key(self):
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("If-None-Match") == "*" and self._key() in self.objects:
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.objects[self._key()] = body
        self._answer(200, ETag='"1"')

    def do_GET(self):
        url = urlsplit(self.path)
        if "list-type=2" in url.query:
            prefix = parse_qs(url.query).get("prefix", [""])[0]
            keys = sorted(key for key in self.objects if key.startswith(prefix))
            entries = "".join(
                f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>1</ETag>"
                f"<Size>{len(self.objects[key])}</Size></Contents>"
                for key in keys
            )
            return self._answer(
                200, f"<ListBucketResult>{entries}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()
            )
        if self._key() not in self.objects:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        modified = "Thu, 01 Jan 2026 00:00:00 GMT"
        self._answer(200, self.objects[self._key()], ETag='"1"', Last_Modified=modified)

    do_HEAD = do_GET

    def do_POST(self):  # DeleteObjects
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        keys = re.findall("<Key>(.*?)</Key>", body)
        for key in keys:
            self.objects.pop(key, None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def do_DELETE(self):
        self.objects.pop(self._key(), None)
        self._answer(204)


@pytest.fixture(params=["folder", "memory", "s3"])
def store(request, tmp_path, monkeypatch):
    if request.param == "folder":
        yield open_store(tmp_path / "store")
    elif request.param == "memory":
        yield open_store("memory://")
    else:
        handler = type("Handler", (_S3,), {"objects": {}})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield open_store("s3://bucket/some/prefix")
        server.shutdown()
        server.server_close()


ROLE = "arn:aws:iam::1:role/store"
GIVEN = """<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>TEMPORARY</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>
<Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


def test_a_pod_with_an_iam_role_needs_no_keys(tmp_path, monkeypatch):
    """The environment is as EKS sets it.  The token of the service account gives temporary keys, over HTTPS only."""
    asked, signed = [], []

    class Identity(_S3):
        objects: ClassVar[dict[str, bytes]] = {}

        def do_POST(self):
            asked.append(parse_qs(urlsplit(self.path).query))
            self._answer(200, GIVEN.encode())

        def do_PUT(self):
            signed.append(self.headers["Authorization"])
            super().do_PUT()

    token = tmp_path / "token"
    token.write_text("of-the-service-account")
    with serving(Identity, tmp_path) as (address, certificate):
        environment = {"AWS_ENDPOINT_URL_STS": address, "AWS_ROLE_ARN": ROLE, "AWS_WEB_IDENTITY_TOKEN_FILE": str(token)}
        use(monkeypatch, AWS_ENDPOINT_URL=address, SSL_CERT_FILE=str(certificate), **environment)
        open_store("s3://bucket/x").put("a", b"1")
    assert (asked[0]["WebIdentityToken"], asked[0]["RoleArn"]) == (["of-the-service-account"], [ROLE])
    assert "Credential=TEMPORARY/" in signed[0]


def test_pod_identity_of_eks_gives_keys(tmp_path, monkeypatch):
    """The environment is as EKS Pod Identity sets it: an address of the node's agent, and a file with a token."""
    asked, signed = [], []

    class Agent(_S3):
        objects: ClassVar[dict[str, bytes]] = {}

        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            keys = {"AccessKeyId": "TEMPORARY", "SecretAccessKey": "s", "Token": "t"}
            self._answer(200, json.dumps(keys | {"Expiration": "2099-01-01T00:00:00Z"}).encode())

        def do_PUT(self):
            signed.append(self.headers["Authorization"])
            super().do_PUT()

    token = tmp_path / "token"
    token.write_text("of-the-pod")
    with serving(Agent) as (address, _):
        environment = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{address}/v1/credentials"}
        use(monkeypatch, AWS_ENDPOINT_URL=address, AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE=str(token), **environment)
        open_store("s3://bucket/x").put("a", b"1")
    assert asked == [("/v1/credentials", "of-the-pod")] and "Credential=TEMPORARY/" in signed[0]


def test_a_private_authority_is_trusted_where_it_is_named(tmp_path, monkeypatch):
    handler = type("Handler", (_S3,), {"objects": {}})
    with serving(handler, tmp_path) as (address, certificate):
        use(monkeypatch, AWS_ENDPOINT_URL=address, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(StoreUnavailable, match="does not answer"):
            open_store("s3://bucket").put("a", b"1")
        monkeypatch.setenv("CUDA_AGENT_CA_FILE", str(certificate))
        open_store("s3://bucket").put("a", b"1")
    monkeypatch.setenv("CUDA_AGENT_CA_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreUnavailable, match=r"cannot be opened: .*No such file"):
        open_store("s3://bucket")


@contextlib.contextmanager
def serving(handler, folder=None):
    """Serves ``handler``, over TLS if there is a folder for a certificate.  Yields the address and the certificate."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        certificate = folder / "certificate.pem" if folder else None
        if folder:
            key = folder / "key.pem"
            made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
            made += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
            subprocess.run([*made, "-addext", "basicConstraints=CA:FALSE"], check=True, capture_output=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http{'s' * bool(folder)}://127.0.0.1:{server.server_port}", certificate
        server.shutdown()


def use(monkeypatch, **environment):
    """Sets AWS's variables to those of ``environment`` alone."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ROLE_ARN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"AWS_REGION": "eu-west-1"} | environment).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "made"
    (made / "sub").mkdir(parents=True)
    (made / "a.txt").write_text("alpha")
    (made / "sub" / "b.bin").write_bytes(os.urandom(9 << 20))  # larger than a part of an upload
    return made


def test_objects_are_written_read_listed_and_deleted(store):
    store.put("x/a", b"1")
    store.put("x/b/c", b"22")
    store.put("y", b"3")
    assert store.get("x/b/c") == b"22" and store.size("x/b/c") == 2 and store.exists("y")
    assert store.list("x") == ["x/a", "x/b/c"]
    assert set(store.sizes("x")) == {"x/a", "x/b/c"}
    store.delete("x/a")
    store.delete("x/a")
    assert not store.exists("x/a") and store.size("x/a") is None


def test_create_lets_only_the_first_one_win(store):
    assert store.create("k", b"first") and not store.create("k", b"second")
    assert store.get("k") == b"first"


def test_an_absent_object_is_said_to_be_absent(store):
    with pytest.raises(StoreDamaged, match="no such object"):
        store.get("nothing")


def test_an_absent_object_leaves_no_file(store, tmp_path):
    with pytest.raises(StoreDamaged, match="no such object"):
        store.get_file("nothing", tmp_path / "file", "0" * 64)
    assert not (tmp_path / "file").exists()


def test_a_folder_comes_back_as_it_was_and_has_one_digest(tmp_path, folder):
    store = open_store(tmp_path / "store")
    digest = store.put_folder(folder)
    assert store.put_folder(folder) == digest and store.has_folder(digest)
    store.get_folder(digest, tmp_path / "back")
    assert (tmp_path / "back" / "a.txt").read_text() == "alpha"
    assert (tmp_path / "back" / "sub" / "b.bin").read_bytes() == (folder / "sub" / "b.bin").read_bytes()
    assert not os.access(tmp_path / "back" / "a.txt", os.W_OK) or os.geteuid() == 0
    (folder / "a.txt").write_text("beta")
    assert store.put_folder(folder) != digest


def test_a_folder_travels_through_every_store(store, tmp_path):
    source = tmp_path / "small"
    source.mkdir()
    (source / "ä b.txt").write_text("ü")
    store.get_folder(store.put_folder(source), tmp_path / "back")
    assert (tmp_path / "back" / "ä b.txt").read_text() == "ü"


def test_a_damaged_file_is_refused_and_removed_so_that_it_can_be_made_again(tmp_path, folder):
    store = open_store(tmp_path / "store")
    digest = store.put_folder(folder)
    blob = f"cas/{store.tree(digest)['a.txt']['sha256']}"
    store.put(blob, b"alphA")
    with pytest.raises(StoreDamaged, match="digest"):
        store.get_folder(digest, tmp_path / "back")
    assert not store.exists(blob) and not store.has_folder(digest)
    assert store.put_folder(folder) == digest and store.has_folder(digest)


def test_a_damaged_tree_is_refused(tmp_path, folder):
    store = open_store(tmp_path / "store")
    digest = store.put_folder(folder)
    store.put(f"cas/{digest}", b'{"files":{}}')
    with pytest.raises(StoreDamaged):
        store.tree(digest)
    assert not store.has_folder(digest)


def test_a_tree_cannot_write_outside_of_its_folder(tmp_path):
    store = open_store(tmp_path / "store")
    text = hashlib.sha256(b"x").hexdigest()
    store.put(f"cas/{text}", b"x")
    tree = b'{"files":{"../evil":{"sha256":"%s","size":1}}}' % text.encode()
    digest = hashlib.sha256(tree).hexdigest()
    store.put(f"cas/{digest}", tree)
    with pytest.raises(StoreDamaged, match="outside"):
        store.get_folder(digest, tmp_path / "back")
    assert not (tmp_path / "evil").exists()


def test_a_half_written_object_is_never_visible(tmp_path):
    """A writer is killed in the middle of a large object, again and again."""
    script = (
        "import sys; from cuda_agent.storage import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "print('go', flush=True)\n"
        "while True: store.put('big', b'x' * (64 << 20))\n"
    )
    store = open_store(tmp_path / "store")
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "store")], stdout=subprocess.PIPE)
        writer.stdout.readline()
        threading.Event().wait(0.05)
        writer.kill()
        writer.wait()
        assert store.size("big") in (None, 64 << 20)
        assert [key for key in store.list("") if key != "big"] == []


def test_a_full_disk_is_one_clear_message_and_leaves_nothing_behind(tmp_path):
    script = (
        "import resource, sys; from cuda_agent.storage import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "store = open_store(sys.argv[1])\n"
        "try: store.put('big', b'x' * 1000000)\n"
        "except StoreFull as error: print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True, check=True
    ).stdout
    assert "is full" in said and "cuda-agent gc" in said and "Debug source" not in said
    assert open_store(tmp_path / "store").list("") == []


def test_no_space_left_is_known_by_its_number(tmp_path):
    store = open_store(tmp_path / "store")
    with pytest.raises(StoreFull), store._errors("write x"):
        raise OSError(28, "No space left on device")


def test_a_store_that_cannot_be_reached_is_one_clear_message(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(StoreUnavailable) as error:
        open_store("s3://bucket").get("x")
    assert "s3://bucket" in str(error.value) and len(str(error.value).splitlines()) < 5


@pytest.mark.parametrize(
    ("status", "code", "error", "exit_code", "words"),
    [
        (403, "AccessDenied", StoreDenied, 78, r"denies access: could not write a \(AccessDenied\)"),
        (403, "SignatureDoesNotMatch", StoreDenied, 78, "denies access"),
        (401, "Unauthorized", StoreDenied, 78, "denies access"),
        (403, "QuotaExceeded", StoreFull, 75, "is full"),
        (507, "XMinioStorageFull", StoreFull, 75, "is full"),
        (404, "NoSuchBucket", StoreUnavailable, 75, "no such bucket"),
        (400, "RequestTimeout", StoreUnavailable, 75, "does not answer"),
    ],
)
def test_a_refusal_of_the_store_is_told_by_its_kind(monkeypatch, status, code, error, exit_code, words):
    class Refusing(_S3):
        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with pytest.raises(StoreError, match=words) as raised:
            open_store("s3://bucket/x").put("a", b"1")
        server.shutdown()
    assert type(raised.value) is error and raised.value.exit_code == exit_code


def test_credentials_in_an_address_are_refused():
    with pytest.raises(StoreUnavailable, match="AWS_ACCESS_KEY_ID"):
        open_store("s3://user:secret@bucket/x")


def test_other_schemes_and_places_that_are_no_folder_are_refused(tmp_path):
    with pytest.raises(StoreUnavailable, match="expected a folder"):
        open_store("ftp://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        open_store(tmp_path / "file")


def test_an_address_means_the_same_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute_uri("store") == str(tmp_path / "store")
    assert absolute_uri("s3://a/b") == "s3://a/b"
