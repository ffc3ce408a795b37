"""One rank of a distributed trainer: its shards of the trainers, and a loop that serves the driver.

``TrainerRank`` has plain methods with plain arguments, so that anything can hold it: a process at the end of a pipe
(``rank_main``), or an actor of a scheduler.  All ranks must receive the same calls in the same order.  Not covered:
starting ranks and detecting their death (``ranks``).
"""

import os
import pickle
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cuda_agent.lease import Lease
from cuda_agent.machine import die_with_parent
from cuda_agent.training import recipes
from cuda_agent.training.distributed import TrainerRef
from cuda_agent.training.trainer import Trainer

MEETING_SECONDS = 600.0  # seconds until all ranks have joined; also the longest wait for another rank in a step
RECIPES = ("sft_step", "sft_loss_of", "value_epoch", "value_quality", "ppo_update")


class TrainerRank:
    """One rank.  ``address``: host:port of the store where the ``world`` ranks find each other.  The constructor runs
    in the rank's process and joins torch's process group."""

    def __init__(
        self, rank: int, world: int, address: str, device: str = "cpu", threads: int = 1, lease: str | None = None
    ) -> None:
        host, _, port = address.rpartition(":")
        if host == "127.0.0.1":  # a machine's hostname may not resolve to itself
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._device = f"cuda:{rank % torch.cuda.device_count()}" if device == "cuda" else "cpu"
        if device == "cuda":
            torch.cuda.set_device(self._device)
        torch.set_num_threads(threads)
        limit = timedelta(seconds=MEETING_SECONDS)
        store = dist.PrefixStore("trainer", dist.TCPStore(host, int(port), None, False, timeout=limit))
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        self._mesh = init_device_mesh(device, (world,))
        self._lease = Lease(Path(lease)) if lease is not None and rank == 0 else None
        self._trainers: dict[str, Trainer] = {}

    def open(self, name: str, model: Any, options: dict[str, Any]) -> None:
        """Makes a trainer called ``name``; the ranks own ``model``, which may be the file that torch saved it in."""
        if isinstance(model, str):
            model = torch.load(model, map_location="cpu", weights_only=False, mmap=True)
        self._trainers[name] = Trainer(model, device=self._device, lease=self._lease, mesh=self._mesh, **options)

    def run(self, recipe: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Runs a recipe and returns (its result, {trainer's name: (its step, its seconds)})."""
        if recipe not in RECIPES:
            raise ValueError(f"{recipe} is none of {', '.join(RECIPES)}")
        named = {thing.name: self._at(thing) for thing in arguments if isinstance(thing, TrainerRef)}
        passed = [named[thing.name] if isinstance(thing, TrainerRef) else thing for thing in arguments]
        result = getattr(recipes, recipe)(*passed, **keywords)
        return result, {name: (trainer.step, trainer.seconds) for name, trainer in named.items()}

    def weights(self, name: str) -> dict[str, Tensor]:
        """Returns ``Trainer.weights``: all on the first rank, none on the others."""
        return self._trainers[name].weights()

    def save(self, trainer: TrainerRef, folder: str) -> None:
        self._at(trainer).save(Path(folder))

    def load(self, name: str, folder: str) -> tuple[int, float]:
        """Loads a checkpoint and returns its step and seconds."""
        trainer = self._trainers[name]
        trainer.load(Path(folder))
        return trainer.step, trainer.seconds

    def close(self) -> None:
        dist.destroy_process_group()

    def _at(self, named: TrainerRef) -> Trainer:
        trainer = self._trainers[named.name]
        trainer.seconds = named.seconds
        return trainer


def rank_main(
    connection: Connection, rank: int, world: int, address: str, device: str, threads: int, lease: str | None
) -> None:
    """Answers (method, arguments) with ("done", the first rank's result) or ("failed", the exception), until the pipe
    closes.  The process ends with its parent, also in the middle of a step."""
    die_with_parent()
    member: TrainerRank | None = None
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            member = member or TrainerRank(rank, world, address, device, threads, lease)
            value = getattr(member, method)(*arguments)
            answer = pickle.dumps(("done", value if rank == 0 else None))
        except Exception as error:
            traceback.print_exc()
            answer = _failure(error)
        try:
            connection.send_bytes(answer)
        except OSError:
            break
    if member is not None:
        member.close()


def _failure(error: Exception) -> bytes:
    try:
        answer = pickle.dumps(("failed", error))
        pickle.loads(answer)
        return answer
    except Exception:  # some exceptions cannot be pickled
        return pickle.dumps(("failed", RuntimeError(f"{type(error).__name__}: {error}")))
