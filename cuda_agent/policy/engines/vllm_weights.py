"""Broadcasts new weights into the memory of vLLM's workers, by NCCL between GPUs and by Gloo between CPUs.

``vllm.py`` does the rest: it pauses the servers, notices dead servers and verifies the weights."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from cuda_agent.machine import gpus
from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.engines.vllm_plugin import TRANSFER_SECONDS, transfer_group, transfer_store
from cuda_agent.policy.engines.vllm_server import Replica
from cuda_agent.policy.lora import merged_parameters


class Broadcast:
    """The trainer's end of the process group that broadcasts weights to vLLM servers."""

    def __init__(self) -> None:
        self._group: Any = None
        self._members: list[Replica] = []

    async def send(self, replicas: Sequence[Replica], model: Any) -> None:
        """Sends the parameters of ``model`` to all ``replicas``. If the model is on another kind of device than the
        servers, copies its parameters one by one to a device of the servers' kind.

        Raises:
            Fault: A server failed. The next call makes a new group.
            EngineError: The broadcast failed, this process has no device of the servers' kind, or the servers run on
                several kinds of devices."""
        device, *others = sorted({replica.device for replica in replicas})
        if others or (device == "cuda" and not gpus()):
            there = ", ".join([device, *others])
            raise EngineError(f"weights cannot be broadcast from this process to servers on {there}: sync=disk can")
        place = str(model.device) if model.device.type == device else device
        try:
            if self._members != list(replicas):
                await self._join(replicas, device)
            parameters = list(merged_parameters(model))
            dtype = replicas[0].dtype
            tensors = [[name, dtype, list(tensor.shape)] for name, tensor in parameters]
            await _collective(
                lambda: _send(self._group, parameters, place, dtype),
                [replica.call("cuda_agent_receive", tensors=tensors) for replica in replicas],
            )
        except BaseException:
            self._group, self._members = None, []
            raise

    async def _join(self, replicas: Sequence[Replica], device: str) -> None:
        size = 1 + sum(replica.workers for replica in replicas)
        host = _address_towards([urlsplit(replica.url).hostname for replica in replicas])
        store = transfer_store(host, 0, size, True)
        calls, rank = [], 1
        for replica in replicas:
            calls.append(replica.call("cuda_agent_join", host=host, port=store.port, rank=rank, size=size))
            rank += replica.workers
        self._group = await _collective(lambda: transfer_group(store, host, 0, size, device), calls)
        self._members = list(replicas)


def _send(group: Any, parameters: Iterable[tuple[str, Any]], device: str, dtype: str) -> None:
    import torch

    for _, parameter in parameters:
        group.broadcast([parameter.detach().to(device, getattr(torch, dtype)).contiguous()]).wait()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)  # NCCL's ``wait`` blocks only a stream, not this thread


def _address_towards(hosts: Sequence[str | None]) -> str:
    remote = [host for host in hosts if host not in (None, "localhost", "127.0.0.1")]
    if not remote:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing; Linux chooses the route
        probe.connect((remote[0], 9))
        return str(probe.getsockname()[0])


async def _collective(work: Callable[[], Any], calls: Sequence[Awaitable[Any]]) -> Any:
    """Runs a collective operation of the trainer and the servers. ``work`` is the trainer's part and runs in a thread.
    ``calls`` are the requests that start the servers' parts. Returns the result of ``work``. If a request fails, raises
    its error; the thread may then wait for the servers forever."""
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(EngineError(f"weights could not be broadcast: {error}"))

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        async with asyncio.timeout(TRANSFER_SECONDS):
            await asyncio.gather(*tasks)
            return await asyncio.wrap_future(result)
    except TimeoutError:
        raise EngineError(f"weights were not broadcast within {TRANSFER_SECONDS:.0f} s") from None
    finally:
        for task in tasks:
            task.cancel()
