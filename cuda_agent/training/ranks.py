"""Runs the trainer's processes (ranks) on one machine. The driver (the process of a pipeline stage) starts the ranks
and sends them calls.

All ranks must receive the same calls in the same order. A rank that dies is not replaced. ``sharding`` and
``attention`` divide the computation among the ranks. ``rl.ray.ranks`` runs ranks on several machines."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cuda_agent.lease import Lease
from cuda_agent.machine import die_with_parent
from cuda_agent.training.distributed import TRAINERS, TrainerLost, joint_results
from cuda_agent.training.trainer import Trainer

CLOSE_SECONDS = 10.0
MEETING_SECONDS = 600.0  # seconds until all ranks have joined; also the longest wait for another rank in a step
PRELOAD = ["cuda_agent.training.ranks", "transformers", "transformers.models.qwen3.modeling_qwen3"]


def open_store(host: str) -> tuple[Any, str]:
    """Opens torch's TCP store, through which the ranks find each other. The store listens on ``host`` only. Returns
    the store and its address, as host:port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


class Rank:
    """One rank: the object that executes calls in one of the trainer's processes. The constructor joins torch's process
    group of ``world`` ranks through the store at ``address`` (host:port). If ``world`` is 1, there is no process group.
    ``lease`` is None, or the folder of the timing lease (``cuda_agent.lease``), a lock. Rank 0 holds it in shared mode
    while the ranks compute, so that no process times a kernel meanwhile."""

    def __init__(self, rank: int, world: int, address: str, device: str, threads: int, lease: Path | None) -> None:
        self._device = f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else "cpu"
        if device == "cuda":
            torch.cuda.set_device(self._device)
        torch.set_num_threads(threads)
        self._mesh: DeviceMesh | None = None
        if world > 1:
            host, _, port = address.rpartition(":")
            if host == "127.0.0.1":  # a machine's hostname may not resolve to itself
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            limit = timedelta(seconds=MEETING_SECONDS)
            store = dist.PrefixStore("trainer", dist.TCPStore(host, int(port), None, False, timeout=limit))
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
            self._mesh = init_device_mesh(device, (world,))
        self._lease = Lease(lease) if lease is not None and rank == 0 else None

    def open(self, name: str, path: str, options: dict[str, Any]) -> None:
        """Makes a trainer called ``name`` from the model that torch saved in the file ``path``. ``options`` are further
        arguments of ``Trainer``."""
        model = torch.load(path, map_location="cpu", weights_only=False, mmap=self._mesh is not None)
        TRAINERS[name] = Trainer(model, device=self._device, lease=self._lease, mesh=self._mesh, **options)

    def run(self, recipe: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Runs ``recipe``, a training function. Returns its result, and a dict from the name of each trainer to a pair
        of its attributes: ``step`` and ``seconds``."""
        result = recipe(*arguments, **keywords)
        return result, {name: (trainer.step, trainer.seconds) for name, trainer in TRAINERS.items()}

    def weights(self, name: str) -> dict[str, Any]:
        return TRAINERS[name].weights()

    def save(self, name: str, folder: Path) -> None:
        TRAINERS[name].save(folder)

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        """Loads a checkpoint into the trainer ``name``. Returns the trainer's attributes ``step`` and ``seconds``,
        which the checkpoint has set."""
        TRAINERS[name].load(folder)
        return TRAINERS[name].step, TRAINERS[name].seconds


def _rank_main(connection: Connection, number: int, *arguments: Any) -> None:
    """Runs the process of rank ``number``: receives calls through ``connection`` and answers them, until an empty
    message comes. ``arguments`` are the other arguments of ``Rank``.

    A call is a pickled pair (method, arguments). The answer is (None, result) or (error, None), pickled. The result is
    sent by rank 0 only; other ranks send None instead. The process also ends when its parent ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # may reach all of a pod; the stage still needs its ranks then
    die_with_parent()
    rank: Rank | None = None
    while message := connection.recv_bytes():
        try:
            rank = rank or Rank(number, *arguments)
            method, given = pickle.loads(message)
            value = getattr(rank, method)(*given)
            answer = pickle.dumps((None, value if number == 0 else None))
        except Exception as error:
            traceback.print_exc()
            answer = _failure(error)
        connection.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _failure(error: Exception) -> bytes:
    try:
        answer = pickle.dumps((error, None))
        pickle.loads(answer)
        return answer
    except Exception:  # some exceptions cannot be pickled
        return pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), None))


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Runs ``count`` rank processes on this machine, each with its own GPU if ``device`` is "cuda". As a context
    manager, it ends the processes on exit.

    ``threads`` is the number of torch's threads in each rank. ``lease`` is None, or the folder of the timing lease
    (``cuda_agent.lease``), a lock. Rank 0 holds it in shared mode while the ranks compute, so that no process times a
    kernel meanwhile. The other three arguments are needed only if some ranks run on other machines. ``world`` is the
    number of all ranks, and ``first`` is the number of the first rank on this machine. ``address`` (host:port) is the
    address of the store through which the ranks find each other (``open_store``)."""

    def __init__(
        self,
        count: int,
        *,
        device: str = "cpu",
        threads: int = 1,
        lease: Path | None = None,
        first: int = 0,
        world: int | None = None,
        address: str | None = None,
    ) -> None:
        if address is None:
            self._store, address = open_store("127.0.0.1")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._threads = ThreadPoolExecutor(count)  # one thread waits for each rank
        self._pipes: dict[int, Connection] = {}  # rank -> pipe
        self.processes: list[Any] = []
        context = multiprocessing.get_context("forkserver")  # imports run once and serve later ranks too
        context.set_forkserver_preload(PRELOAD)
        for rank in range(first, first + count):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world or count, address, device, threads, lease)
            process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes[rank] = cast(Connection, ours)
            self.processes.append(process)

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        path = Path(self._folder.name) / f"{name}.pt"
        torch.save(model, path)
        self.call("open", name, str(path), options)
        path.unlink()

    def save(self, name: str, folder: Path) -> None:
        self.call("save", name, folder)

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        return cast(tuple[int, float], self.call("load", name, folder))

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method on every rank of this machine, and returns the result of the first of them. This result is
        None if rank 0 is on another machine. If a rank is gone, or only some ranks fail, ends the remaining ranks,
        which would wait forever, and raises ``TrainerLost``. If all ranks fail, raises the first rank's error."""
        return self.send(pickle.dumps((method, arguments)))

    def send(self, message: bytes) -> Any:
        """Does the same as ``call`` for a call that is already pickled: ``message`` is the pickled pair (method,
        arguments)."""
        if not self._pipes:
            raise TrainerLost("the ranks are closed")
        try:
            return joint_results([self._threads.submit(self._ask, rank, message) for rank in self._pipes])[0]
        except TrainerLost:
            self._end(0.0)
            raise

    def _ask(self, rank: int, message: bytes) -> Any:
        try:
            self._pipes[rank].send_bytes(message)
            error, value = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            raise TrainerLost(f"rank {rank} of the trainer is gone") from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Ends the ranks, and kills those that do not end within ``CLOSE_SECONDS``."""
        self._end(CLOSE_SECONDS)

    def _end(self, seconds: float) -> None:
        pipes, self._pipes = self._pipes, {}
        for pipe in pipes.values():
            with contextlib.suppress(OSError):  # the rank is dead
                pipe.send_bytes(b"")
        for process in self.processes:
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._threads.shutdown()
        for pipe in pipes.values():
            pipe.close()
        self._folder.cleanup()
