"""Installs the chart on the test cluster, and runs the command line ``cuda-agent`` against it.

The release gets a namespace with Pod Security `restricted`, the project's images, and a volume with the Python
environment (PyTorch is not in the images)."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kubectl import HERE, Cluster, script, setting, wait_for

CHART = HERE.parents[1] / "charts" / "cuda-agent"
NAME = "cuda-agent"
ROOT = HERE.parents[1]

_VOLUME = {"name": "environment", "persistentVolumeClaim": {"claimName": "environment", "readOnly": True}}
_MOUNT = {"name": "environment", "mountPath": "/opt/environment", "readOnly": True}


def _size(memory: str) -> dict[str, Any]:
    """Returns resources with tiny requests, so that all pods of a run fit on a node of two cores."""
    return {
        "requests": {"cpu": "10m", "memory": "64Mi"},
        "limits": {"cpu": "2", "memory": memory, "ephemeral-storage": "4Gi"},
    }


def values() -> dict[str, Any]:
    """Returns the chart's values for a release that brings MinIO and MLflow.  Runs of the profile ``cpu`` may all work
    at once.  Of the profile ``tight``, one and a half fit on a node of two CPUs, and one works at once."""
    mounted = {"extraVolumes": [_VOLUME], "extraVolumeMounts": [_MOUNT]}
    pools = {role: {"resources": _size("4Gi")} for role in ("workspace", "build", "evaluate")}
    tight = {"resources": {"requests": {"cpu": "300m"}}}
    profiles = {
        "cpu": {"runs": 0, "defaults": {"resources": _size("4Gi")}, "pools": pools},
        "tight": {"runs": 1, "device": "cpu", "defaults": tight, "pools": dict.fromkeys(pools, tight)},
    }
    server = {"enabled": True, "persistence": {"size": "2Gi"}, "resources": _size("2Gi")}
    return {
        "images": {"registry": "localhost"},
        "minio": server,
        "mlflow": server | {"artifacts": "s3://cuda-agent/mlflow"},
        "networkPolicy": {"apiServerCidrs": [f"{setting('NODE_IP')}/32"]},
        "profiles": profiles,
        "workflow": {"smallResources": _size("1Gi"), "retryAfter": "2s"},
        "sandbox": mounted,
        **mounted,
    }


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``one`` with the chart values ``other`` merged into it, as helm merges them: groups are merged, and
    single values of ``other`` win."""
    result = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


@dataclass(frozen=True)
class Release:
    """A release of the chart with the chart's name, in the namespace of ``cluster``."""

    cluster: Cluster

    @property
    def environment(self) -> dict[str, str]:
        """Returns the environment for processes that find the cluster by a kubeconfig."""
        kubeconfig = {"KUBECONFIG": str(self.cluster.state / "kubeconfig"), "PYTHONPATH": str(ROOT)}
        return {**os.environ, **kubeconfig}

    def command(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs ``cuda-agent WORDS --namespace ...`` as a person would on this machine."""
        line = [sys.executable, "-m", "cuda_agent.cli", *words, "--namespace", self.cluster.namespace]
        return subprocess.run(
            line,
            text=True,
            capture_output=True,
            timeout=600,
            env=self.environment | environment,
            cwd=self.cluster.state,
        )

    def helm(self, *words: str) -> subprocess.CompletedProcess[str]:
        return helm(self.cluster, *words)

    def upgrade(self, given: Mapping[str, Any], chart: Path = CHART) -> None:
        """Upgrades the release.  Returns when the store has its bucket; MLflow may still be starting."""
        done = helm(self.cluster, "upgrade", NAME, str(chart), "--timeout=15m", given=given)
        assert done.returncode == 0, done.stderr


def helm(cluster: Cluster, *words: str, given: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs helm in the cluster's namespace.  ``given`` are the chart's values."""
    program = subprocess.run(
        ["bash", "-euc", f'. "{HERE}/env.sh"; at helm'], text=True, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        homes = {f"HELM_{kind}_HOME": folder for kind in ("CACHE", "CONFIG", "DATA")}
        line = [f"{program.stdout.strip()}/helm", *words, f"--kubeconfig={cluster.state}/kubeconfig"]
        line += ["--namespace", cluster.namespace]
        if given is not None:
            file = Path(folder) / "values.json"
            file.write_text(json.dumps(given))
            line += ["--values", str(file)]
        return subprocess.run(line, text=True, capture_output=True, timeout=1000, env=os.environ | homes)


def of_version(version: str, folder: Path) -> str:
    """Returns a PYTHONPATH with which this checkout reports ``version``.  Writes the metadata for it to ``folder``."""
    about = folder / f"cuda_agent-{version}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cuda-agent\nVersion: {version}\n")
    return f"{folder}{os.pathsep}{ROOT}"


@cache
def images(number: int) -> None:
    """Builds this checkout's images and loads them into the cluster with this number, once per process."""
    script("project", number=number)


@contextmanager
def release(cluster: Cluster, namespace: str, given: Mapping[str, Any]) -> Iterator[Release]:
    """Installs the chart with these values in a new namespace, and removes everything at the end."""
    images(cluster.number)
    cluster.run("create", "namespace", namespace)
    try:
        cluster.run("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        script("environment", namespace, number=cluster.number)
        here = Cluster(cluster.number, namespace)
        wait_for("the service account", 60, lambda: here.try_run("get", "serviceaccount", "default").returncode == 0)
        done = helm(here, "install", NAME, str(CHART), "--wait", "--timeout=15m", given=given)
        assert done.returncode == 0, f"{done.stderr}\n{here.try_run('get', 'pods,events').stdout}"
        yield Release(here)
    finally:
        helm(Cluster(cluster.number, namespace), "uninstall", NAME, "--wait", "--timeout=2m")
        # Workflows of a run that a test left behind hold a finalizer only while Argo archives their logs.
        cluster.run("delete", "namespace", namespace, "--wait=false")
        cluster.run("delete", "persistentvolume", f"environment-{namespace}", "--ignore-not-found", "--wait=false")
