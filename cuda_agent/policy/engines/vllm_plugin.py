"""Code that runs inside vLLM's processes: a plugin for every process, and methods for the workers.

vLLM calls the plugin ``register`` in each of its processes, through the entry point ``vllm.general_plugins``. vLLM also
adds the methods of ``WeightSync`` to its workers. The engine (``vllm.VllmEngine``) calls these methods over HTTP,
through vLLM's route ``/collective_rpc``. vLLM's Python environment must be able to import this package, but may lack
the package's requirements. ``torch`` and vLLM are therefore imported only inside the functions that use them. With
``python -m`` this module runs a vLLM server."""

import ctypes
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from cuda_agent.machine import die_with_parent

LEASE = "CUDA_AGENT_ENGINE_LEASE"  # folder of the timing lease, if kernels are timed on the same processor

LEAST_CACHE = 64 << 20  # bytes of keys and values on a processor, below which vLLM does not start
STEP_TOKENS = 4096  # most tokens of prompts that start together on a processor
WHOLE = "CUDA_AGENT_ENGINE_WHOLE"  # set for servers started here: their processes end with the first process
TRANSFER_SECONDS = 600.0  # limit for one tensor
PIECE = 1 << 24  # elements per step of a digest: a server has little spare memory


def register() -> None:
    """Prepares this vLLM process. On a CPU, turns off packed copies of the weights, because new weights would not
    replace them. If the variable ``CUDA_AGENT_ENGINE_LEASE`` is set, makes the workers pause while a kernel is timed
    (``cuda_agent.lease``). If this package started the server, the process ends together with its parent process. vLLM
    may call this function several times."""
    if WHOLE in os.environ and (parent := multiprocessing.parent_process()) and parent.pid is not None:
        die_with_parent(parent.pid)  # else vLLM's engine and workers outlive a killed server and keep its memory
    from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]

    if current_platform.is_cpu():
        _keep_plain_weights()
    if folder := os.environ.get(LEASE):
        _work_under_lease(Path(folder))


def _keep_plain_weights() -> None:
    """Turns off the CPU kernels for which vLLM makes packed copies of the weights. Loading new weights would not change
    these copies."""
    from vllm import _custom_ops  # type: ignore[import-not-found, unused-ignore]
    from vllm.model_executor.layers import utils  # type: ignore[import-not-found, unused-ignore]

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def _work_under_lease(folder: Path) -> None:
    """Makes every step of a vLLM worker hold the timing lease, a file lock in ``folder``, in shared mode. The step
    therefore waits while another process times a kernel."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # type: ignore[import-not-found, unused-ignore]

    from cuda_agent.lease import Lease

    plain = WorkerWrapperBase.execute_model
    if hasattr(plain, "__wrapped__"):
        return
    lease = functools.cache(lambda: Lease(folder))  # made in the worker's process, at its first step

    @functools.wraps(plain)
    def leased(self: Any, scheduled: Any) -> Any:
        with lease().working():
            return plain(self, scheduled)

    WorkerWrapperBase.execute_model = leased


class WeightSync:
    """Methods that report and replace the weights of a vLLM worker. vLLM adds them to the class of its workers. Each
    method returns a dict, which vLLM sends over HTTP."""

    model_runner: Any
    device: Any
    _cuda_agent_group: Any = None

    def cuda_agent_weights(self) -> dict[str, str]:
        """Returns a digest of this worker's weights, their element type, and the worker's device."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        dtype = str(self.model_runner.model_config.dtype).removeprefix("torch.")
        return {"digest": digest(parameters.items()), "dtype": dtype, "device": self.device.type}

    def cuda_agent_load(self, folder: str) -> dict[str, str]:
        """Replaces this worker's weights by those in the Hugging Face folder ``folder``, which this worker must be able
        to read. Returns the result of ``cuda_agent_weights``."""
        self.model_runner.reload_weights(weights_path=folder)
        return self.cuda_agent_weights()

    def cuda_agent_join(self, host: str, port: int, rank: int, size: int) -> dict[str, str]:
        """Joins the process group in which the trainer broadcasts weights to the workers. ``host`` and ``port`` are the
        address of the trainer's TCP store. ``size`` counts the trainer and the workers of all servers. ``rank`` is the
        group rank of this server's first worker; the server's other workers get the next ranks."""
        from vllm.distributed import get_world_group  # type: ignore[import-not-found, unused-ignore]

        store = transfer_store(host, port, size, False)
        rank += get_world_group().rank
        self._cuda_agent_group = transfer_group(store, host, rank, size, self.device.type)
        return {}

    def cuda_agent_receive(self, tensors: list[list[Any]]) -> dict[str, str]:
        """Replaces this worker's weights by weights that the trainer broadcasts. ``tensors`` lists the [name, element
        type, shape] of each weight, in sending order. Returns the result of ``cuda_agent_weights``."""
        self.model_runner.reload_weights(weights_iterator=self._received(tensors))
        return self.cuda_agent_weights()

    def _received(self, tensors: list[list[Any]]) -> Iterator[tuple[str, Any]]:
        import torch

        for name, dtype, shape in tensors:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self._cuda_agent_group.broadcast([tensor]).wait()
            yield name, tensor


def transfer_store(host: str, port: int, size: int, master: bool) -> Any:
    """Opens the TCP store through which the trainer and vLLM's workers form a group to broadcast weights. If ``master``
    is true, this process runs the store; this is the case in the trainer only. The trainer may pass ``port`` 0 for any
    free port."""
    import torch.distributed as dist

    limit = timedelta(seconds=TRANSFER_SECONDS)
    return dist.TCPStore(host, port, size, master, timeout=limit, wait_for_workers=False)


def transfer_group(store: Any, host: str, rank: int, size: int, device: str) -> Any:
    """Joins the process group that broadcasts weights, as member ``rank`` of ``size``. The members find each other
    through ``store``. ``host`` is the address of the trainer. The group uses NCCL if ``device`` is "cuda", otherwise
    Gloo."""
    import torch.distributed as dist

    limit = timedelta(seconds=TRANSFER_SECONDS)
    store = dist.PrefixStore("cuda-agent-weights", store)
    if device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = limit
    here = {"hostname": host} if host == "127.0.0.1" else {}  # other hosts: the default, this machine's name
    gloo._devices = [dist.ProcessGroupGloo.create_device(**here)]
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def digest(parameters: Iterable[tuple[str, Any]]) -> str:
    """Returns a hash (SHA-256, hexadecimal) of the names and weights in ``parameters``. The hash does not depend on the
    device, because it is made from exact integer sums of the weights' bits."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def sums(tensor: Any) -> tuple[int, int]:
        bits = tensor.detach().contiguous().view(integers[tensor.element_size()]).flatten()
        products = 0
        for piece in bits.split(PIECE):
            mixed = piece ^ (piece >> 4 * tensor.element_size())  # round numbers end in zeros; products would keep them
            products += int((mixed[1:] * mixed[:-1]).sum(dtype=torch.int64))
        return int(bits.sum(dtype=torch.int64)), products

    text = "".join(f"{name} {sums(tensor)}\n" for name, tensor in sorted(parameters, key=lambda p: p[0]))
    return hashlib.sha256(text.encode()).hexdigest()


def served(policy: Path, name: str, context: int, batch: int, memory: float | None, rank: int | None) -> list[str]:
    """Returns the command-line arguments of a vLLM server, except for its address.

    Args:
        policy: Hugging Face folder of the served model.
        name: Name under which the server serves the model.
        context: Most tokens of a sequence. The model's own limit applies, too.
        batch: Most sequences that run at once.
        memory: Share of a GPU's memory that vLLM may use. None for a server on the CPU, which computes in float32.
        rank: Largest rank of a LoRA adapter that the server accepts. None for a server without adapters."""
    config = json.loads((policy / "config.json").read_text())
    shape = config.get("text_config") or config
    context = min(context, shape.get("max_position_embeddings") or context)
    command = ["--model", str(policy), "--served-model-name", name]
    command += ["--max-model-len", str(context), "--max-num-seqs", str(batch)]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--worker-extension-cls", "cuda_agent.policy.engines.vllm_plugin.WeightSync"]
    command += ["--uvicorn-log-level", "warning"]
    if memory is not None:
        command += ["--gpu-memory-utilization", str(memory)]
    else:  # on the processor compiling takes longer than it saves
        heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
        head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
        cache = 2 * 4 * 2 * batch * context * shape["num_hidden_layers"] * heads * head  # keys and values in float32
        command += ["--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(max(LEAST_CACHE, cache))]
        # For a prompt in pieces vLLM rewinds the request's random numbers.  PyTorch cannot do that on a processor:
        # vLLM would crash.
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, STEP_TOKENS))]
    return command if rank is None else [*command, "--enable-lora", "--max-lora-rank", str(rank)]


def on_processor(environment: dict[str, str], lib: Path, threads: int) -> dict[str, str]:
    """Returns a copy of the environment variables ``environment`` with settings for vLLM on the CPU. vLLM uses
    ``threads`` OpenMP threads. ``lib`` is the ``lib`` folder of the Python environment in which vLLM is installed."""
    made = environment | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    made.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the arguments of ``served``
    openmp = lib / "libiomp5.so"  # vLLM's operators are linked to it
    return made | {"LD_PRELOAD": str(openmp)} if openmp.exists() else made


def _serve(parent: int, arguments: list[str]) -> None:
    """Replaces this process by vLLM's server. Linux ends the server when the process ``parent`` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() == parent:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *arguments])


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
