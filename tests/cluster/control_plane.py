"""A real API server for tests: etcd and kube-apiserver, all definitions of Argo and KubeRay, and four users.

There is no node and no controller: objects are checked (schemas, roles, admission) and stored, but nothing runs.  The
programs are those that the test cluster builds; without them the tests that need them are skipped."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import yaml

from tests.deploy.charts import ARGO, KUBERAY, TOOLS
from tests.ports import free_port

_BUILT = TOOLS.parent / "cluster"
ETCD = next(iter(sorted(_BUILT.glob("etcd-*/etcd"))), None)
API = next(iter(sorted(_BUILT.glob("kubernetes-*/kube-apiserver"))), None)
KUBECTL = next(iter(sorted(_BUILT.glob("kubernetes-*/kubectl"))), None)
MISSING = ETCD is None or API is None or KUBECTL is None or ARGO is None
NAMESPACE = "kernels"
USERS = ("admin", "ada", "eve", "mallory")  # cluster-admin, submitter, viewer, nobody


class ControlPlane:
    """A context manager that starts the API server and stops it at the end."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="control-plane-")
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            return self._entered()
        except BaseException:
            self.__exit__()
            raise

    def _entered(self) -> Self:
        self.folder = Path(self._folder.name)
        client, peer, self.port = free_port(), free_port(), free_port()
        key = self.folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        tokens = [f"token-of-{u},{u},{u}" + (',"system:masters"' if u == "admin" else "") for u in USERS]
        (self.folder / "tokens.csv").write_text("\n".join(tokens) + "\n")
        address = f"http://127.0.0.1:{client}"
        peers = f"http://127.0.0.1:{peer}"
        self._start(
            [str(ETCD), "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", address,
             "--advertise-client-urls", address, "--listen-peer-urls", peers,
             "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}", "--unsafe-no-fsync"],
            "etcd",
        )  # fmt: skip
        self._start(
            [str(API), "--etcd-servers", address, "--bind-address=127.0.0.1", "--secure-port", str(self.port),
             "--cert-dir", str(self.folder / "certs"), "--token-auth-file", str(self.folder / "tokens.csv"),
             "--authorization-mode=RBAC", "--service-cluster-ip-range=10.99.0.0/24",
             "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
             f"--service-account-signing-key-file={key}", "--enable-admission-plugins=ResourceQuota",
             "--disable-admission-plugins=ServiceAccount", "--max-requests-inflight=100"],
            "api",
        )  # fmt: skip
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))
        self._await()
        self.kubectl("create", "namespace", NAMESPACE)
        assert ARGO is not None
        self.kubectl("create", "-f", str(ARGO.parent))
        if KUBERAY is not None:
            self.kubectl("create", "-f", str(KUBERAY))
        self._await_definitions()
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def apply(self, items: list[dict[str, Any]], user: str = "admin") -> None:
        """Creates or changes the objects ``items``.  A field that the API server does not know is an error."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self.kubectl("apply", "--server-side", "--validate=strict", "-n", NAMESPACE, "-f", "-", user=user, text=text)

    def kubectl(self, *arguments: str, user: str = "admin", text: str | None = None) -> str:
        done = self.try_kubectl(*arguments, user=user, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def try_kubectl(
        self, *arguments: str, user: str = "admin", text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [str(KUBECTL), "--kubeconfig", str(self.kubeconfig), "--context", user, *arguments]
        environment = os.environ | {"GOGC": "off"}  # it lives too shortly for that
        return subprocess.run(command, capture_output=True, text=True, input=text, timeout=120, env=environment)

    def _kubeconfig(self) -> dict[str, Any]:
        server = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "ada",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": user, "user": {"token": f"token-of-{user}"}} for user in USERS],
            "contexts": [
                {"name": user, "context": {"cluster": "test", "user": user, "namespace": NAMESPACE}} for user in USERS
            ],
        }

    def _start(self, command: list[str], name: str) -> None:
        # A third of the processor time of such a short life is the collection of garbage.
        environment = {"PATH": os.environ["PATH"], "GOGC": "400", "GOMEMLIMIT": "1GiB"}
        with open(self.folder / f"{name}.log", "wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder))

    def _await_definitions(self) -> None:
        """Waits until Argo's kinds can be created.  `kubectl wait` fails on a definition that has no condition yet."""
        deadline = time.monotonic() + 60
        while (
            done := self.try_kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        ).returncode:
            assert time.monotonic() < deadline, done.stderr[-2000:]
            time.sleep(0.2)

    def _await(self) -> None:
        deadline = time.monotonic() + 180
        while self.try_kubectl("get", "--raw", "/readyz").returncode != 0:
            for process in self._processes:
                assert process.poll() is None, (self.folder / "api.log").read_text()[-3000:]
            assert time.monotonic() < deadline, (self.folder / "api.log").read_text()[-3000:]
            time.sleep(0.5)
