"""Starts a real sandbox server (``cuda-agent sandbox serve``) in its own process, and makes requests for it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from cuda_agent.sandbox.wire import Solution
from tests import made_once
from tests.sandbox.conftest import CHAIN, plan_solution

TOKEN = "a-token-of-the-tests-0123456789"
ROOT = Path(__file__).parents[3]
QUICK = ("sandbox.clock=model", "sandbox.checks=2", "sandbox.run_seconds=2.0", "sandbox.memory_mb=400")

ONE_JUDGE = "import os; os.cpu_count = lambda: 1"  # a second one imports torch again


class Served:
    """A process ``cuda-agent sandbox serve`` with its files in ``folder``, and an HTTP client that sends the token."""

    def __init__(self, folder: Path, *arguments: str, token: str | None = TOKEN, wrapper: str = "") -> None:
        """Starts the server.  ``wrapper`` is Python code that its process runs first, such as ``ONE_JUDGE``."""
        self.folder = folder
        self.tmp = Path(tempfile.mkdtemp(prefix="served-"))  # where users without rights can pass, unlike ``folder``
        self.tmp.chmod(0o711)
        environment = os.environ | {"TMPDIR": str(self.tmp), "PYTHONPATH": str(ROOT)}
        environment.pop("CUDA_AGENT_SANDBOX_TOKEN", None)
        if token is not None:
            environment["CUDA_AGENT_SANDBOX_TOKEN"] = token
        start = f"{wrapper}\nimport sys\nfrom cuda_agent.cli import main as cli\nsys.argv[0] = 'cuda-agent'\ncli.main()"
        command = [sys.executable, "-c", start, "sandbox", "serve", "--port", "0"]
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--cache", str(made_once.share(folder / "cache")), *arguments],
                stdout=log, stderr=log, env=environment, cwd=folder,
            )  # fmt: skip
        self.address = self._address()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=self.address, headers=headers, timeout=60, trust_env=False)

    def _address(self) -> str:
        for _ in range(3000):
            if found := re.search(r"listening on (http://\S+)", self.log.read_text()):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def ready(self) -> Self:
        for _ in range(3000):
            if self.http.get("/readyz").status_code == 200:
                return self
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Sends the signal ``how`` to the server, waits for its end and returns its exit code."""
        self.process.send_signal(how)
        code = self.process.wait(60)
        self.http.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop()
        shutil.rmtree(self.tmp, ignore_errors=True)


def body(solution: Solution | None = None, code: str = CHAIN, **more: Any) -> dict[str, Any]:
    """Returns the body of a request to evaluate a solution."""
    solution = solution or plan_solution()
    return {"task": {"code": code}, "solution": {"format": solution.format, "files": solution.files}} | more


def variant(number: int, code: str = CHAIN) -> dict[str, Any]:
    """Returns the body of a request whose content depends on ``number``. The kernel is always the same, so one build
    serves all numbers."""
    solution = plan_solution()
    plan = json.loads(solution.files["plan.json"]) | {"guards": [f"{number} == {number}"]}
    return body(Solution("plan", solution.files | {"plan.json": json.dumps(plan)}), code)


SLOW = (
    "#include <unistd.h>\n"
    "void chain(long block, long grid, const float* x, float* y, long n, double s) { for (;;) usleep(1000); }\n"
)
