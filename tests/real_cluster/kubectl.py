"""Runs the test cluster's scripts and kubectl in a namespace, and describes small pods for tests."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.waiting import wait_for as wait_for

HERE = Path(__file__).parent
NUMBER = int(os.environ.get("CLUSTER", "0"))


def setting(name: str, number: int = NUMBER) -> str:
    """Returns a variable of env.sh for the cluster with this number."""
    script = f'CLUSTER={number}; . "{HERE}/env.sh"; printf %s "${name}"'
    return subprocess.run(["bash", "-euc", script], text=True, capture_output=True, check=True).stdout


def script(name: str, *words: str, number: int = NUMBER) -> str:
    """Runs one of the scripts in this folder and returns its output. Raises with its output if it fails."""
    environment = {**os.environ, "CLUSTER": str(number)}
    command = [str(HERE / f"{name}.sh"), *words]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
    return done.stdout


class Cluster:
    """kubectl, bound to one cluster and one namespace."""

    def __init__(self, number: int = NUMBER, namespace: str = "default") -> None:
        self.number, self.namespace = number, namespace
        self.state = Path(setting("STATE", number))
        folder = subprocess.run(["bash", "-euc", f'. "{HERE}/env.sh"; at kubernetes'], text=True, capture_output=True)
        self.kubectl = [f"{folder.stdout.strip()}/kubectl", f"--kubeconfig={self.state}/kubeconfig", "-n", namespace]

    def try_run(self, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.kubectl, *words], input=stdin, text=True, capture_output=True, timeout=300)

    def run(self, *words: str, stdin: str | None = None) -> str:
        done = self.try_run(*words, stdin=stdin)
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def get(self, *words: str) -> Any:
        return json.loads(self.run("get", *words, "-o", "json"))

    def create(self, *things: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(things)}
        self.run("create", "-f", "-", stdin=json.dumps(listed))

    def exec(self, pod: str, command: str) -> subprocess.CompletedProcess[str]:
        return self.try_run("exec", pod, "--", "sh", "-c", command)

    def phase(self, pod: str) -> str:
        return str(self.get("pod", pod)["status"]["phase"])

    def finished(self, pod: str, seconds: float = 60) -> str:
        """Waits for the pod's end and returns its log. Raises if the pod did not succeed."""
        ended = self.ended(pod, seconds)
        log = self.run("logs", pod)
        assert ended == "Succeeded", f"{pod}: {log}"
        return log

    def ended(self, pod: str, seconds: float = 60) -> str:
        """Waits for the pod's end and returns its phase."""

        def phase() -> str:
            return seen if (seen := self.phase(pod)) in ("Succeeded", "Failed") else ""

        return wait_for(f"{pod} ends", seconds, phase)

    def ready(self, *pods: str) -> None:
        self.run("wait", "--for=condition=Ready", "--timeout=60s", *(f"pod/{pod}" for pod in pods))


def pod(name: str, command: str, labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """Returns a pod of one busybox container without rights that runs `command`; `more` are fields of the container."""
    container = {
        "name": "main",
        "image": "localhost/busybox:1",
        "command": ["sh", "-c", command],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **more,
    }
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {"app": name}},
        "spec": {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": security,
        },
    }
