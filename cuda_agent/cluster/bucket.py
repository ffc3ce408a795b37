"""Creates the bucket of the store in MinIO, and checks whether a run can use the store and MLflow.

The store is the object storage that holds the records, artifacts and checkpoints of all runs."""

import os
import re
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cuda_agent import mlflow_api
from cuda_agent.diagnostics.doctor import Check
from cuda_agent.storage import StoreError, StoreUnavailable, open_store

if TYPE_CHECKING:
    from minio import Minio
    from minio.lifecycleconfig import Rule

PATIENCE = 120.0  # longest wait for a server to start, in seconds


def make(store: str, expire_logs_days: int) -> str:
    """Creates the bucket of the store if it is missing, and sets the bucket's expiry rule for Argo's logs.

    The environment variable AWS_ENDPOINT_URL gives the address of MinIO.  If MinIO does not answer, tries again for
    ``PATIENCE`` seconds.  Other rules of the bucket stay.  If the client would change one of them, sets no rule.

    Args:
        store: URI of the store: s3://bucket/prefix.
        expire_logs_days: Age in days at which MinIO deletes the files below the store's folder ``argo``.

    Returns:
        A line of text for the user, with the bucket and the rule.

    Raises:
        StoreUnavailable: ``store`` is not an S3 URI, AWS_ENDPOINT_URL is not set, or MinIO refuses or does not
            answer."""
    from minio import Minio
    from minio.commonconfig import ENABLED, Filter
    from minio.error import MinioException, S3Error
    from minio.lifecycleconfig import Expiration, Rule
    from urllib3.exceptions import HTTPError

    parts, endpoint = urlsplit(store), urlsplit(os.environ.get("AWS_ENDPOINT_URL", ""))
    if parts.scheme != "s3" or not endpoint.netloc:
        raise StoreUnavailable(f"{store}: expected s3://bucket/prefix, and AWS_ENDPOINT_URL.")
    keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    client = Minio(endpoint.netloc, *keys, secure=endpoint.scheme == "https", region=os.environ.get("AWS_REGION"))
    logs = "/".join(filter(None, [parts.path.strip("/"), "argo/"]))
    expiry = Expiration(days=expire_logs_days)
    rule = Rule(ENABLED, rule_id="logs-of-argo", rule_filter=Filter(prefix=logs), expiration=expiry)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if not client.bucket_exists(parts.netloc):
                client.make_bucket(parts.netloc)
            expires = f"{logs} expires after {expire_logs_days} days"
            if not _set_rule(client, parts.netloc, rule):
                expires = f"it has rules that cannot be kept as they are; add one yourself: {expires}"
            return f"bucket {parts.netloc} at {endpoint.geturl()}; {expires}"
        except (MinioException, HTTPError, OSError) as error:
            # 409: another process has just made the bucket; the next attempt finds it.
            refused = isinstance(error, S3Error) and error.response.status < 500 and error.response.status != 409
            if refused or time.monotonic() > deadline:
                text = f"could not make bucket {parts.netloc} ({str(error).splitlines()[0][:200]})."
                raise StoreUnavailable(f"{endpoint.geturl()}: {text}") from None
            time.sleep(2)


def _set_rule(client: "Minio", bucket: str, rule: "Rule") -> bool:
    """Adds a lifecycle rule to a bucket, or replaces the rule with the same id.  The bucket's other rules stay.  Writes
    nothing if the bucket has this rule.  Returns False, and writes nothing, if another rule has a part that the client
    does not know and would drop: without its prefix, for example, that rule would delete too much."""
    from minio.lifecycleconfig import LifecycleConfig
    from minio.xml import marshal

    try:
        found = client.get_bucket_lifecycle(bucket) or LifecycleConfig([])
    except ValueError:  # a rule without any part that the client knows
        return False
    if rule in found.rules:
        return True
    others = [other for other in found.rules if other.rule_id != rule.rule_id]
    if others:
        answer = client._execute("GET", bucket, query_params={"lifecycle": ""})  # the only way to see all parts
        if _tags(answer.data.decode()) != _tags(marshal(found).decode()):
            return False
    client.set_bucket_lifecycle(bucket, LifecycleConfig([*others, rule]))
    return True


def _tags(xml: str) -> list[str]:
    return sorted(re.findall(r"<(\w+)", xml))


def probe(store: str, mlflow: str) -> Iterator[Check]:
    """Does in the store and in MLflow what a run does there.  Yields one ``Check`` for each result.  ``store`` is the
    store's URI.  ``mlflow`` is MLflow's URI, or ``off`` for a cluster without MLflow."""

    def check(name: str, ok: bool, text: str) -> Check:
        return Check(name, ok, text, "" if ok else f"look at the chart's values {name} and networkPolicy")

    key = f"doctor/{secrets.token_hex(8)}"
    try:
        opened = open_store(store)
        opened.put(key, b"one")
        yield check("store", True, f"{store}: written")
        yield check("store", opened.get(key) == b"one", f"{store}: read back")
        kept = not opened.create(key, b"two") and opened.get(key) == b"one"
        said = "create-if-absent holds" if kept else "create-if-absent does not hold: an object was overwritten"
        yield check("store", kept, f"{store}: {said}")
        opened.delete(key)
        yield check("store", not opened.exists(key), f"{store}: deleted")
    except StoreError as error:
        yield check("store", False, str(error).splitlines()[0])
    yield Check("mlflow", True, "MLflow: none") if mlflow == "off" else check_mlflow(mlflow)


def check_mlflow(uri: str) -> Check:
    """Does in MLflow what a run does there, and returns how it went."""
    try:
        return Check("mlflow", True, f"{uri}: {mlflow_api.try_out(uri)}")
    except Exception as error:  # a check that breaks is a finding
        refused, _, login = mlflow_api.refusal(error).partition(". ")
        text = refused or (str(error).splitlines() or [type(error).__name__])[0]
        helps = login + " In the chart, secretEnvironment takes them from a secret." if refused else ""
        return Check(
            "mlflow", False, f"{uri}: {text}", helps or "look at the chart's values tracking and networkPolicy"
        )
