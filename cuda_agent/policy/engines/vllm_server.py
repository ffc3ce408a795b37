"""A vLLM server that this process starts on this machine, and that ends with it.

It listens on a Unix socket in a private folder: the interface that replaces weights has no password, and must not be an
open port. vLLM requires its own PyTorch version, so it may be in another environment, whose interpreter the variable
``CUDA_AGENT_VLLM_PYTHON`` names; that environment need not have this package, which is added to its path.

What it does not cover: external servers (``vllm.connect`` takes their addresses), several GPUs for one server.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cuda_agent
from cuda_agent.config import SERVED_RANK
from cuda_agent.errors import PolicyError
from cuda_agent.policy.engines.vllm_plugin import LEASE, WHOLE, on_processor, served

PYTHON = "CUDA_AGENT_VLLM_PYTHON"
NAME = "policy"  # name under which it serves the weights
_STOP_SECONDS = 20.0
_ENTRY_POINT = "[vllm.general_plugins]\ncuda_agent = cuda_agent.policy.engines.vllm_plugin:register\n"


class VllmServer:
    """One server.  The thread that creates it must live as long as the server, so use the main thread: the kernel ends
    the server with that thread.

    Args:
        policy: the Hugging Face folder to serve.
        device: number of the GPU; None: the processor.
        memory: share of that GPU's memory.
        lease: folder of the timing lease, under which it pauses.

    Raises:
        PolicyError: vLLM is not installed.
    """

    def __init__(
        self,
        policy: Path,
        *,
        context: int,
        batch: int,
        threads: int = 2,
        memory: float = 0.9,
        lora: bool = False,
        lease: Path | None = None,
        device: int | None = None,
    ) -> None:
        self.python = interpreter()
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-"))  # 0700; a socket's path must be short
        self.socket = self._folder / "socket"
        self.log = self._folder / "log"
        command = [self.python, "-P", "-m", "cuda_agent.policy.engines.vllm_plugin", str(os.getpid())]
        command += ["--uds", str(self.socket)]
        share, rank = memory if device is not None else None, SERVED_RANK if lora else None
        command += served(policy, NAME, context, batch, share, rank)
        environment = self._environment(threads, lora, lease, device)
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, env=environment, **streams)

    def _environment(self, threads: int, lora: bool, lease: Path | None, device: int | None) -> dict[str, str]:
        package = self._folder / "package"
        plugin = package / "cuda_agent_plugin-0.dist-info"
        plugin.mkdir(parents=True)
        (plugin / "METADATA").write_text("Name: cuda-agent-plugin\nVersion: 0\n")
        (plugin / "entry_points.txt").write_text(_ENTRY_POINT)
        (package / "cuda_agent").symlink_to(Path(cuda_agent.__file__).parent.resolve())
        environment = _clean_environment() | {
            "PYTHONPATH": str(package),
            WHOLE: "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if lora:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if lease is not None:
            environment[LEASE] = str(lease)
        if device is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # those that this process may use
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device] if visible else str(device)
        else:
            environment = on_processor(environment, Path(self.python).parent.parent / "lib", threads)
        return environment

    def tail(self, lines: int = 25) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Ends the server and removes its folder."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def interpreter() -> str:
    """The Python interpreter that has vLLM.

    Raises:
        PolicyError: There is none; the message says how to get one.
    """
    python = os.environ.get(PYTHON, sys.executable)
    search = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        found = not subprocess.run([python, "-c", search], env=_clean_environment(), capture_output=True).returncode
    except OSError as error:
        raise PolicyError(f"{PYTHON}={python} cannot be run: {error}") from error
    if not found:
        raise PolicyError(
            f"policy.engine=vllm, and {python} has no vLLM: install it (docs/engines.md), or name the interpreter of "
            f"an environment that has it in {PYTHON}, or running servers in policy.vllm.servers"
        )
    return python


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
