"""Broadcasts a model's weights from one process to others: NCCL between GPUs, Gloo between CPUs.

The leader holds a ``Rendezvous``.  Each participating process is a ``Member`` of a group; rank 0 sends.  No member
waits longer than the rendezvous lasts: the leader ends it when a member is gone or takes too long, and then creates
another with the remaining ones.  Received weights must have the digest that the sender named.

What it does not cover: the leader (``rl.ray.broadcast``), the workers of vLLM servers (``vllm_weights``,
``vllm_plugin``), and trainers of several processes, whose weights must be gathered first.
"""

import contextlib
import ctypes
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cuda_agent.policy.engines.engine import EngineError
from cuda_agent.policy.engines.vllm_plugin import digest, transfer_group, transfer_store
from cuda_agent.policy.lora import merged_parameters

Weights = dict[str, Any]  # arrays or tensors by name
Form = tuple[str, str, tuple[int, ...]]  # name, element type and shape of a tensor
ENDED = "ended"
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.1  # seconds between checks of the rendezvous
Result = TypeVar("Result")


class TransferError(RuntimeError):
    """The group is gone: a member died, or the rendezvous was ended.  No weights were changed."""


class Rendezvous:
    """The meeting point of one group, at ``host`` (an address of this machine that all members reach) and ``port``.
    Members also watch it to notice its end."""

    def __init__(self, host: str) -> None:
        import torch.distributed as dist

        self.host = host
        listener = socket.create_server((host, 0))
        self.port: int = listener.getsockname()[1]
        self._store: Any = dist.TCPStore(
            host, self.port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def end(self) -> None:
        """Ends the group: all calls of its members, running ones included, raise ``TransferError``."""
        if self._store is not None:
            self._store.set(ENDED, "")
            self._store = None


class Member:
    """One process's end of a group of ``size``; ``rank`` 0 sends.  ``device``: of the tensors on the wire.  All
    processes create their members at about the same time; the constructor returns when all have joined.

    Raises:
        TransferError: The rendezvous cannot be reached, or ended before all had joined.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, device: str) -> None:
        self.device = device
        self._rendezvous: Any = None
        self._group: Any = None

        def join() -> None:
            store = transfer_store(host, port, size, False)
            self._group = transfer_group(store, host, rank, size, device.partition(":")[0])

        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()  # fails at once; a store would retry
            self._rendezvous = transfer_store(host, port, size, False)  # separate, because a wait blocks a connection
        except (OSError, RuntimeError) as error:
            raise TransferError(f"there is no meeting at {host}:{port}: {error}") from error
        self._bounded(join)

    def send(self, parameters: Iterable[tuple[str, Any]]) -> None:
        """Sends the tensors to all others, in order; the receivers know their shapes by ``form``."""
        self._bounded(lambda: send(self._group, parameters, self.device))

    def receive(self, forms: Sequence[Form]) -> Weights:
        """Receives the tensors, on the group's device."""
        import torch

        def take() -> Weights:
            weights = {}
            for name, dtype, shape in forms:
                weights[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                self._group.broadcast([weights[name]]).wait()
            _finish(self.device)
            return weights

        return self._bounded(take)

    def leave(self) -> None:
        """Leaves the group, between two calls."""
        self._group = None

    def _abandon(self) -> None:
        """Leaves the group during a call.  NCCL is aborted.  Gloo cannot be, and its destructor waits for the last
        collective, so the group is never destroyed."""
        if (group := self._group) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self._group = None
            with contextlib.suppress(Exception):
                group.abort()

    def _bounded(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` in a thread and returns its result.  If nothing can end the collective, the thread is left
        behind.

        Raises:
            TransferError: ``work`` failed, or the rendezvous ended before.
        """
        results: list[Result] = []
        errors: list[BaseException] = []
        finished = threading.Event()

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            finished.set()

        threading.Thread(target=run, name="broadcast", daemon=True).start()
        while not finished.wait(LOOK_SECONDS):
            if self._ended():
                break
        if results:
            return results[0]
        self._abandon()
        if errors:
            raise TransferError(f"weights could not be broadcast: {errors[0]}") from errors[0]
        raise TransferError("the broadcast of weights was ended")

    def _ended(self) -> bool:
        try:
            return bool(self._rendezvous.check([ENDED]))
        except RuntimeError:  # the leader is gone
            return True


def send(group: Any, parameters: Iterable[tuple[str, Any]], device: str, dtype: str | None = None) -> None:
    """The sender's part of a broadcast: ``parameters`` from ``device``, converted to ``dtype`` if it is given."""
    import torch

    for _, parameter in parameters:
        tensor = parameter.detach().to(device, getattr(torch, dtype) if dtype else None).contiguous()
        group.broadcast([tensor]).wait()
    _finish(device)


def _finish(device: str) -> None:
    """Waits for the device: NCCL's ``wait`` blocks a stream only, not this thread."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def place(device: Any) -> str:
    """The name of the processor that holds tensors of ``device``: "cpu", or one GPU with the same name in every
    process."""
    import torch

    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


def common_device(places: Sequence[str]) -> str:
    """The device of weights on the wire between members at ``places``: NCCL needs a separate GPU for each."""
    gpus = all(where.startswith("cuda") for where in places) and len(set(places)) == len(places)
    return "cuda" if gpus else "cpu"


def address_towards(hosts: Iterable[str | None]) -> str:
    """This machine's address as the machines ``hosts`` see it."""
    remote = [host for host in hosts if host not in (None, "localhost", "127.0.0.1")]
    if not remote:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing; the kernel chooses the route
        probe.connect((remote[0], 9))
        return str(probe.getsockname()[0])


def forms_of(model: Any) -> list[Form]:
    """The forms of ``merged_parameters``, in their order."""
    return [(n, str(p.dtype).removeprefix("torch."), tuple(p.shape)) for n, p in merged_parameters(model)]


def weights_of(model: Any) -> Weights:
    """The merged weights as arrays."""
    return {name: parameter.detach().cpu().numpy() for name, parameter in merged_parameters(model)}


def load_weights(model: Any, weights: Mapping[str, Any], expected: str | None = None) -> None:
    """Loads the weights into the model.

    Raises:
        EngineError: Names or shapes differ from the model's, or the loaded model's digest differs from ``expected``.
    """
    import torch

    parameters = dict(model.named_parameters())
    wrong = parameters.keys() ^ weights.keys()
    wrong |= {n for n in parameters.keys() & weights.keys() if tuple(parameters[n].shape) != tuple(weights[n].shape)}
    if wrong:
        raise EngineError(f"these are the weights of another model: {', '.join(sorted(wrong)[:3])}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            given = weights[name]
            parameter.copy_(given if isinstance(given, torch.Tensor) else torch.tensor(given))
    if expected is not None and (found := digest(model.named_parameters())) != expected:
        raise EngineError(f"weights arrived with digest {found[:12]} instead of {expected[:12]}")
