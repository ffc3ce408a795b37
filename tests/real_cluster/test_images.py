"""The project's images work as restricted pods with read-only roots, in the cluster that they are meant for."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubectl import Cluster, pod, script, setting, wait_for

pytestmark = pytest.mark.cluster

VERSION = importlib.metadata.version("cuda-agent")
KEYS = {"MINIO_ROOT_USER": "tester", "MINIO_ROOT_PASSWORD": "long-enough"}


def of_image(
    name: str, image: str, *arguments: str, port: int = 0, probe: str = "", env: dict[str, str] | None = None
) -> dict[str, Any]:
    """A restricted pod of one of our images, with writable /tmp and /data, and the Python environment."""
    mounts = [{"name": "environment", "mountPath": "/opt/environment", "readOnly": True}]
    volumes: list[dict[str, Any]] = [
        {"name": "environment", "persistentVolumeClaim": {"claimName": "environment", "readOnly": True}}
    ]
    for folder in ("tmp", "data"):
        mounts.append({"name": folder, "mountPath": f"/{folder}"})
        volumes.append({"name": folder, "emptyDir": {}})
    locked = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    more: dict[str, Any] = {"image": f"localhost/{image}:{VERSION}", "securityContext": locked, "volumeMounts": mounts}
    more["env"] = [{"name": key, "value": value} for key, value in {"HOME": "/tmp", **(env or {})}.items()]
    if probe:
        more["readinessProbe"] = {"httpGet": {"path": probe, "port": port}, "periodSeconds": 2, "timeoutSeconds": 5}
    made = pod(name, "", **more)
    del made["spec"]["containers"][0]["command"]
    made["spec"]["containers"][0]["args"] = list(arguments)
    made["spec"]["securityContext"] |= {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
    made["spec"]["volumes"] = volumes
    return made


def python(name: str, code: str) -> dict[str, Any]:
    made = of_image(name, "cuda-agent")
    made["spec"]["containers"][0] |= {"command": ["python3", "-c", code]}
    return made


def service(name: str, port: int) -> dict[str, Any]:
    spec = {"selector": {"app": name}, "ports": [{"port": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def images(cluster: Cluster) -> None:
    script("project")


@pytest.fixture
def here(space: Cluster, images: None) -> Iterator[Cluster]:
    script("environment", space.namespace)
    yield space
    space.run("delete", "pod", "--all", "--now")
    space.run("delete", "pvc", "environment")
    space.run("delete", "pv", f"environment-{space.namespace}")


def test_the_stage_image_says_what_its_commands_are_and_imports_torch(here: Cluster) -> None:
    help_of_stage = of_image("help", "cuda-agent", "--help")
    numbers = python("numbers", "import torch; print(torch.ones(3).sum().item())")
    where = python("where", "import cuda_agent; print(cuda_agent.__file__)")
    here.create(help_of_stage, numbers, where)
    help_text = here.finished("help", 180)
    assert "doctor" in help_text and "sandbox" in help_text
    assert here.finished("numbers", 180) == "3.0\n"
    assert here.finished("where", 180).startswith("/usr/local/")  # the image's package, not the environment's


def test_the_environment_cannot_be_written(here: Cluster) -> None:
    here.create(python("writes", "open('/opt/environment/new', 'w')"))
    assert here.ended("writes", 180) == "Failed"
    assert "Read-only file system" in here.run("logs", "writes")


def test_a_sandbox_proves_its_walls_in_a_restricted_pod(here: Cluster) -> None:
    served = ["sandbox", "serve", "--host", "0.0.0.0", "--roles", "evaluate"]
    token = {"CUDA_AGENT_SANDBOX_TOKEN": "a-token-for-tests", "CUDA_AGENT_HOME": "/tmp/home"}
    here.create(of_image("sandbox", "cuda-agent-sandbox", *served, port=8750, probe="/readyz", env=token))
    wait_for("it is ready", 240, lambda: ready(here, "sandbox"))


def ready(space: Cluster, name: str) -> bool:
    status = space.get("pod", name)["status"]
    assert status["phase"] in ("Pending", "Running"), space.run("logs", name)
    return any(has["type"] == "Ready" and has["status"] == "True" for has in status.get("conditions") or [])


CLIENT = """
import mlflow, minio, obstore
from obstore.store import S3Store
minio.Minio("minio:9000", "tester", "long-enough", secure=False).make_bucket("bucket")
store = S3Store("bucket", endpoint="http://minio:9000", access_key_id="tester", secret_access_key="long-enough",
    region="us-east-1", client_options={"allow_http": True}, virtual_hosted_style_request=False)
obstore.put(store, "key", b"bytes", mode="create")
try:
    obstore.put(store, "key", b"others", mode="create")
except obstore.exceptions.AlreadyExistsError:
    print("only once")
print(bytes(obstore.get(store, "key").bytes()))
mlflow.set_tracking_uri("http://mlflow:5000")
with mlflow.start_run() as run:
    mlflow.log_metric("reward", 0.5)
print(mlflow.get_run(run.info.run_id).data.metrics)
"""


def test_a_stage_stores_artifacts_in_minio_and_metrics_in_mlflow(here: Cluster) -> None:
    stored = ["server", "--host=0.0.0.0", "--port=5000", "--workers=1", "--allowed-hosts=*"]
    stored += ["--backend-store-uri=sqlite:////data/mlflow.db", "--artifacts-destination=/data/artifacts"]
    here.create(
        of_image("minio", "cuda-agent-minio", "server", "/data", port=9000, probe="/minio/health/ready", env=KEYS),
        of_image("mlflow", "cuda-agent-mlflow", *stored, port=5000, probe="/health"),
        service("minio", 9000),
        service("mlflow", 5000),
    )
    wait_for("both are ready", 240, lambda: ready(here, "minio") and ready(here, "mlflow"))
    here.create(python("client", CLIENT))
    log = here.finished("client", 240)
    assert "only once" in log and "b'bytes'" in log and "{'reward': 0.5}" in log


def test_the_minio_that_is_tested_is_the_one_that_the_image_names() -> None:
    recipe = (Path(__file__).parents[2] / "images" / "minio.Containerfile").read_text()
    assert f"ARG MINIO=v{setting('MINIO')}\n" in recipe
