"""Plants secrets in a release and searches for them in all places where they must not be.

These places are all objects of a namespace except Secrets, the logs of its pods, all objects of the store, and all
bytes of MLflow's volume. A secret is found as plain text, in base64 at any alignment, in hexadecimal and in URLs.
Compressed text (except gzip in the store), encrypted text and etcd are not searched."""

import base64
import gzip
import json
import os
import secrets
import string
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from release import Release

from cuda_agent.cluster.api import Cluster as Api
from cuda_agent.cluster.forward import forwarded, pod_of
from cuda_agent.storage import Store, open_store

PLANTED = "planted"  # name of the Secret


def plant() -> dict[str, str]:
    """Returns name -> value of new secrets.  The values are random, so that they occur nowhere else."""
    letters = string.ascii_letters + string.digits

    def word(length: int) -> str:
        return "".join(secrets.choice(letters) for _ in range(length))

    return {"accesskey": word(20), "secretkey": word(40), "url": word(32)}


def values(planted: Mapping[str, str]) -> dict[str, Any]:
    """Returns the chart's values for a release whose MinIO and webhook use the secrets ``planted``."""
    data = {**planted, "url": f"https://hooks.invalid/{planted['url']}"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": PLANTED}, "stringData": data}
    return {"extraObjects": [secret], "minio": {"existingSecret": PLANTED}, "webhook": {"existingSecret": PLANTED}}


def spellings(value: str) -> set[bytes]:
    """Returns the value in every encoding that a search must look for."""
    plain = value.encode()
    found = {plain, plain.hex().encode(), plain.hex().upper().encode()}
    for before in range(3):  # what precedes it in the same text decides how its letters fall into base64's groups
        coded = base64.b64encode(b"\0" * before + plain)
        inner = coded[-(-before * 8 // 6) : (before + len(plain)) * 8 // 6]
        found |= {inner, inner.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def leaks(installed: Release, planted: Mapping[str, str]) -> list[str]:
    """Searches ``everything`` for the planted secrets, in all their ``spellings``. Returns ``place: name`` for each
    secret found, with the place where it can be read."""
    wanted = {name: spellings(value) for name, value in planted.items()}
    return [
        f"{place}: {name}"
        for place, data in everything(installed)
        for name, forms in wanted.items()
        if any(form in data for form in forms)
    ]


def everything(installed: Release) -> Iterator[tuple[str, bytes]]:
    """Yields (place, content) of all data that a person without access to Secrets might see."""
    space = installed.cluster
    kinds = space.run("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    for item in space.get(",".join(sorted({*kinds} - {"secrets"})))["items"]:
        yield f"{item['kind']}/{item['metadata']['name']}", json.dumps(item).encode()
    for pod in space.get("pods")["items"]:
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            name = pod["metadata"]["name"]
            for which in ((), ("--previous",)):
                log = space.try_run("logs", name, "-c", container["name"], *which)
                yield f"log of {name}/{container['name']}", log.stdout.encode()
    with open_bucket(installed) as store:
        for key in store.list(""):
            data = store.get(key)
            yield f"store/{key}", gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    folder = space.state / "volumes" / space.get("pvc", "cuda-agent-mlflow")["spec"]["volumeName"]
    for path in folder.rglob("*"):
        if path.is_file():
            yield f"MLflow/{path.relative_to(folder)}", path.read_bytes()


@contextmanager
def open_bucket(installed: Release, prefix: str = "") -> Iterator[Store]:
    """Yields the release's store, or its folder ``prefix``, reached through a forwarded port of MinIO's pod."""
    space = installed.cluster
    with served(installed, "minio", 9000) as address:
        (secret,) = [item for item in space.get("secrets")["items"] if "secretkey" in item.get("data", {})]
        keys = {name: base64.b64decode(secret["data"][name]).decode() for name in ("accesskey", "secretkey")}
        environment = {
            "AWS_ENDPOINT_URL": address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": keys["accesskey"],
            "AWS_SECRET_ACCESS_KEY": keys["secretkey"],
        }
        with mock.patch.dict(os.environ, environment):
            yield open_store(f"s3://cuda-agent/{prefix}".rstrip("/"))


@contextmanager
def served(installed: Release, component: str, port: int) -> Iterator[str]:
    """Yields the address on this machine of a server that the chart brings; its pod serves on the port ``port``."""
    from kubernetes import config

    client = config.new_client_from_config(str(installed.cluster.state / "kubeconfig"))
    api = Api(client, installed.cluster.namespace, "the test cluster")
    with forwarded(api, pod_of(api, component), port) as local:
        yield f"http://127.0.0.1:{local}"
