"""Secrets that are planted to be looked for: where nothing should hold them, nothing does.

Covers every object of a namespace but Secrets, the logs of its pods, every object of the store, and every byte of
MLflow's volume, each for the value as it is, in base64 at any alignment, in hexadecimal and in URLs. Does not cover
what is compressed or encrypted, nor etcd itself.
"""

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
    """Name of a secret -> its value, which occurs nowhere else in the world."""
    letters = string.ascii_letters + string.digits

    def word(length: int) -> str:
        return "".join(secrets.choice(letters) for _ in range(length))

    return {"accesskey": word(20), "secretkey": word(40), "url": word(32)}


def values(planted: Mapping[str, str]) -> dict[str, Any]:
    """Of a release whose MinIO and webhook use them."""
    data = {**planted, "url": f"https://hooks.invalid/{planted['url']}"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": PLANTED}, "stringData": data}
    return {"extraObjects": [secret], "minio": {"existingSecret": PLANTED}, "webhook": {"existingSecret": PLANTED}}


def spellings(value: str) -> set[bytes]:
    """The value in every form in which it would still be readable."""
    plain = value.encode()
    found = {plain, plain.hex().encode(), plain.hex().upper().encode()}
    for before in range(3):  # what precedes it in the same text decides how its letters fall into base64's groups
        coded = base64.b64encode(b"\0" * before + plain)
        inner = coded[-(-before * 8 // 6) : (before + len(plain)) * 8 // 6]
        found |= {inner, inner.replace(b"+", b"-").replace(b"/", b"_")}
    return found


def leaks(installed: Release, planted: Mapping[str, str]) -> list[str]:
    """``place: name`` for each place where one of them can be read."""
    wanted = {name: spellings(value) for name, value in planted.items()}
    return [
        f"{place}: {name}"
        for place, data in everything(installed)
        for name, forms in wanted.items()
        if any(form in data for form in forms)
    ]


def everything(installed: Release) -> Iterator[tuple[str, bytes]]:
    """All that somebody without access to Secrets might come to see: where it is, and what it holds."""
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
def open_bucket(installed: Release) -> Iterator[Store]:
    """The release's store, through a port of MinIO's that the API server forwards."""
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
            yield open_store("s3://cuda-agent")


@contextmanager
def served(installed: Release, component: str, port: int) -> Iterator[str]:
    """The address, on this machine, of a server that the chart brings."""
    from kubernetes import config

    client = config.new_client_from_config(str(installed.cluster.state / "kubeconfig"))
    api = Api(client, installed.cluster.namespace, "the test cluster")
    with forwarded(api, pod_of(api, component), port) as local:
        yield f"http://127.0.0.1:{local}"
