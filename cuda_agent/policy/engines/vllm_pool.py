"""Main program of a container that runs a vLLM server on a cluster. It waits for the first policy (the first language
model that the run samples from), then replaces its process with the server.

The first stage of the run that needs the server writes this policy atomically into the sub-folder ``policy`` of a
shared folder. A server that restarts later loads the first policy again, although the trainer has newer weights. Each
start therefore serves the policy under a new random name. Requests under the old name fail, so that no client samples
from the first policy by mistake. Besides vLLM and ``torch``, this module needs none of the package's requirements."""

import argparse
import os
import secrets
import signal
import sys
import time
from pathlib import Path

from cuda_agent.policy.engines.vllm_plugin import on_processor, served

FIRST = "policy"  # sub-folder with the initial policy in the shared folder


def command(policy: Path, port: int, context: int, batch: int, memory: float, gpus: int) -> list[str]:
    """Returns the arguments with which a Python interpreter runs vLLM's server on ``gpus`` GPUs, or on the CPU if
    ``gpus`` is 0. ``memory`` is the share of each GPU's memory that the server may use. ``vllm_plugin.served``
    describes ``context`` and ``batch``."""
    name = f"policy-{secrets.token_hex(6)}"
    line = ["-P", "-m", "vllm.entrypoints.openai.api_server", "--host", "0.0.0.0", "--port", str(port)]
    line += served(policy, name, context, batch, memory if gpus else None, None)
    return [*line, "--tensor-parallel-size", str(gpus)] if gpus > 1 else line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory", type=float, required=True)
    for name in ("--port", "--context", "--batch", "--threads"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # process 1 of a container has no default handler
    policy = given.folder / FIRST
    print(f"waiting for {policy}", flush=True)
    while not policy.is_dir():
        time.sleep(1.0)
    import torch

    gpus = torch.cuda.device_count()
    line = [sys.executable, *command(policy, given.port, given.context, given.batch, given.memory, gpus)]
    environment = dict(os.environ)
    if not gpus:  # PyTorch's location tells vLLM's environment: the interpreter may differ
        environment = on_processor(environment, Path(torch.__file__).parents[3], given.threads)
    os.execve(line[0], line, environment)


if __name__ == "__main__":
    main()
