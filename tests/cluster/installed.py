"""The chart on the test cluster, installed as a platform engineer installs it, and used by the command line as a
researcher uses it: MinIO and MLflow are the chart's own, PyTorch comes by the volume of environment.sh."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubectl import HERE, Cluster, script, wait_for

from cuda_agent.pipeline.cluster_api import Cluster as Api
from cuda_agent.pipeline.forward import forwarded, pod_of
from cuda_agent.storage import Store, open_store

ROOT = HERE.parents[1]
VALUES = HERE / "values.yaml"


class Installed(Cluster):
    """The namespace of one release, which is called `cuda-agent`."""

    def helm(self, *words: str) -> str:
        """Its output. Raises when it fails."""
        binary = subprocess.run(["bash", "-euc", f'. "{HERE}/env.sh"; at helm'], text=True, capture_output=True)
        command = [f"{binary.stdout.strip()}/helm", f"--kubeconfig={self.state}/kubeconfig", "-n", self.namespace]
        done = subprocess.run([*command, *words], text=True, capture_output=True, timeout=900)
        assert done.returncode == 0, f"helm {words}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, *words: str, folder: Path = ROOT) -> subprocess.Popen[str]:
        """`cuda-agent` with these words, in `folder`, on this cluster and namespace."""
        environment = os.environ | {"KUBECONFIG": f"{self.state}/kubeconfig", "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-m", "cuda_agent.cli", *words, "--namespace", self.namespace],
            env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def command(self, *words: str, folder: Path = ROOT, seconds: float = 120) -> str:
        """What `cuda-agent` prints. Raises when it fails."""
        running = self.start(*words, folder=folder)
        try:
            out, err = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
        assert running.returncode == 0, f"cuda-agent {words}: {out}\n{err}"
        return out

    def phase_of(self, workflow: str) -> str:
        """Empty while it has none, and while the API server is too busy to say."""
        return self.try_run("get", "workflow", workflow, "-o", "jsonpath={.status.phase}").stdout

    def follow(self, workflow: str, seconds: float) -> str:
        """Waits for its end; its phase. Raises, with what every pod wrote last, when it takes too long."""
        end = time.monotonic() + seconds
        while (phase := self.phase_of(workflow)) not in ("Succeeded", "Failed", "Error"):
            assert time.monotonic() < end, f"{workflow} is {phase}:\n{self.last_words(workflow)}"
            time.sleep(1)
        return phase

    def last_words(self, workflow: str) -> str:
        words = []
        for pod in self.get("pods")["items"]:
            name = pod["metadata"]["name"]
            if name.startswith(workflow):
                words.append(f"== {name} {json.dumps(pod['status'].get('containerStatuses', []))[:1500]}")
                words.append(self.try_run("logs", name, "--all-containers", "--tail=30").stdout)
        return "\n".join(words)[-20000:]

    def nodes(self, workflow: str, kind: str = "Pod") -> dict[str, dict[str, Any]]:
        """The nodes of one type (Pod, Skipped, ...) of a Workflow, by their names in the graph."""
        found = self.get("workflow", workflow)["status"]["nodes"].values()
        return {node["displayName"]: node for node in found if node["type"] == kind}

    @property
    def api(self) -> Api:
        from kubernetes import config

        client = config.new_client_from_config(f"{self.state}/kubeconfig")
        return Api(client, self.namespace, "the test cluster")

    @contextlib.contextmanager
    def reached(self, component: str, port: int) -> Iterator[str]:
        """The address on this machine of the chart's MinIO (9000) or MLflow (5000)."""
        with forwarded(self.api, pod_of(self.api, component), port) as local:
            yield f"http://127.0.0.1:{local}"

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """The run's store in the chart's MinIO, with the rights of an administrator."""
        import base64

        secret = self.get("secret", "cuda-agent-minio")["data"]
        names = {"AWS_ACCESS_KEY_ID": "accesskey", "AWS_SECRET_ACCESS_KEY": "secretkey"}
        with self.reached("minio", 9000) as address:
            given = {name: base64.b64decode(secret[key]).decode() for name, key in names.items()}
            given |= {"AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1"}
            before = {name: os.environ.get(name) for name in given}
            os.environ.update(given)
            try:
                yield open_store("s3://cuda-agent")
            finally:
                for name, value in before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def installed(cluster: Cluster, *words: str) -> Iterator[Installed]:
    """A release in a namespace of its own, ready; `words` go to `helm install`. It goes with the namespace."""
    script("project", number=cluster.number)
    name = f"release-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    cluster.run("create", "namespace", name)
    cluster.run("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    script("environment", name, number=cluster.number)
    release = Installed(cluster.number, name)
    release.helm("install", "cuda-agent", str(ROOT / "charts" / "cuda-agent"), "--values", str(VALUES), *words)
    try:
        release.run("wait", "--for=condition=Available", "--timeout=280s", "deployment", "--all")
        yield release
    finally:
        release.helm("uninstall", "cuda-agent")  # what is not in the namespace goes with this alone
        cluster.run("delete", "namespace", name, "--wait=false")
        wait_for("the release goes", 240, lambda: cluster.try_run("get", "namespace", name).returncode)
        cluster.run("delete", "persistentvolume", f"environment-{name}", "--wait=false")
