"""A model's weights from one process to others, all at once: NCCL between GPUs, Gloo between CPUs.

Whoever leads holds a ``Rendezvous``; each process that takes part is a ``Member`` of a group, the first of them the
sender.  No member waits longer than the meeting lasts: who leads ends it when one of them is gone or takes too long,
and then makes another with those that are left.  Weights are taken only with the digest that their sender named.

Not here: who leads (``stages.ray_broadcast``), the workers of vLLM servers, which take the weights as they come
(``vllm_weights``, ``vllm_plugin``), and trainers of several processes, whose weights must be gathered before.
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
Form = tuple[str, str, tuple[int, ...]]  # of a tensor: name, element type, shape
ENDED = "ended"
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 0.1  # between looks at whether the meeting lasts
Result = TypeVar("Result")


class TransferError(RuntimeError):
    """The group is no more: a member died, or the meeting was ended.  No weights were changed."""


class Rendezvous:
    """Where the members of one group find each other, at ``host`` (an address of this machine that all of them reach)
    and ``port``, and what they watch; it listens there alone."""

    def __init__(self, host: str) -> None:
        import torch.distributed as dist

        self.host = host
        listener = socket.create_server((host, 0))
        self.port: int = listener.getsockname()[1]
        self._store: Any = dist.TCPStore(
            host, self.port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def end(self) -> None:
        """All members' calls raise ``TransferError`` from now on, those under way as well."""
        if self._store is not None:
            self._store.set(ENDED, "")
            self._store = None


class Member:
    """One process's end of a group of ``size``; ``rank`` 0 sends.  ``device``: of the tensors that travel.  Made by all
    at about the same time: returns when they are all there."""

    def __init__(self, host: str, port: int, rank: int, size: int, device: str) -> None:
        self.device = device
        self._rendezvous: Any = None
        self._group: Any = None

        def join() -> None:
            store = transfer_store(host, port, size, False)
            self._group = transfer_group(store, host, rank, size, device.partition(":")[0])

        try:
            socket.create_connection((host, port), CONNECT_SECONDS).close()  # a store tries for as long as it may wait
            self._rendezvous = transfer_store(host, port, size, False)  # its own line: a wait blocks one
        except (OSError, RuntimeError) as error:
            raise TransferError(f"there is no meeting at {host}:{port}: {error}") from error
        self._bounded(join)

    def send(self, parameters: Iterable[tuple[str, Any]]) -> None:
        """Gives all others the tensors, one after the other; by ``form`` they know what comes."""
        self._bounded(lambda: send(self._group, parameters, self.device))

    def receive(self, forms: Sequence[Form]) -> Weights:
        """The tensors that are sent, on the group's device."""
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
        """Ends this process's part, between two calls."""
        self._group = None

    def _abandon(self) -> None:
        """Ends it in the middle of one: NCCL's is aborted.  Gloo cannot be, and its group waits for the last collective
        before it goes; so it never goes."""
        if (group := self._group) is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            self._group = None
            with contextlib.suppress(Exception):
                group.abort()

    def _bounded(self, work: Callable[[], Result]) -> Result:
        """What ``work`` gives; ``TransferError`` when it fails or the meeting ends before.  It runs in a thread, which
        is left behind where nothing can end it: a collective waits for its last member."""
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
        except RuntimeError:  # the process that held it is gone
            return True


def send(group: Any, parameters: Iterable[tuple[str, Any]], device: str, dtype: str | None = None) -> None:
    """The sender's part in a broadcast of ``parameters``, as ``dtype``, else as they are, from ``device``."""
    import torch

    for _, parameter in parameters:
        tensor = parameter.detach().to(device, getattr(torch, dtype) if dtype else None).contiguous()
        group.broadcast([tensor]).wait()
    _finish(device)


def _finish(device: str) -> None:
    """NCCL's ``wait`` lets a stream wait, and not this thread."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def place(device: Any) -> str:
    """What names the processor that holds tensors of ``device``: "cpu", or one GPU, wherever it is seen from."""
    import torch

    return "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"


def common_device(places: Sequence[str]) -> str:
    """Where weights travel between members at ``places``: NCCL wants a GPU for each."""
    gpus = all(where.startswith("cuda") for where in places) and len(set(places)) == len(places)
    return "cuda" if gpus else "cpu"


def address_towards(hosts: Iterable[str | None]) -> str:
    """This machine's address as the machines ``hosts`` see it."""
    remote = [host for host in hosts if host not in (None, "localhost", "127.0.0.1")]
    if not remote:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing; the kernel picks the way
        probe.connect((remote[0], 9))
        return str(probe.getsockname()[0])


def forms_of(model: Any) -> list[Form]:
    """Of ``merged_parameters``, in their order."""
    return [(n, str(p.dtype).removeprefix("torch."), tuple(p.shape)) for n, p in merged_parameters(model)]


def weights_of(model: Any) -> Weights:
    """Merged, where it has adapters; as arrays."""
    return {name: parameter.detach().cpu().numpy() for name, parameter in merged_parameters(model)}


def load_weights(model: Any, weights: Mapping[str, Any], expected: str | None = None) -> None:
    """Raises ``EngineError`` when they are not this model's, by name and shape, or when the model that was made of them
    has another digest than ``expected``."""
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
