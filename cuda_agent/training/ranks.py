"""Driver of the trainer's processes on one machine: starts ranks, sends calls, detects dead ones.

Each rank is a ``TrainerRank`` (``rank``) at the end of a pipe.  Not covered: a rank's computation (``rank``,
``sharding``), ranks on other machines (``rl.ray.ranks``), replacing a dead rank.
"""

import contextlib
import math
import multiprocessing
import pickle
import socket
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from cuda_agent.training.distributed import TrainerLost, TrainerRef
from cuda_agent.training.rank import rank_main

GRACE_SECONDS = 10.0  # seconds from the first rank's failure until the others have failed or are killed
CLOSE_SECONDS = 10.0
PRELOAD = ["cuda_agent.training.rank", "transformers", "transformers.models.qwen3.modeling_qwen3"]


def open_store(host: str) -> tuple[Any, str]:
    """Opens the store where ranks meet, which listens at this address of the machine alone.  Returns it with its
    host:port."""
    import torch.distributed as dist

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


class Ranks:
    """Runs ``count`` rank processes on this machine; on GPUs, on the first ``count`` of them.  A context manager; its
    exit ends them.

    ``threads``: threads of each rank on a CPU.  ``lease``: folder of the timing lease, which the first rank holds for
    all.  Where other ranks of the same ``world`` run elsewhere, numbers here begin at ``first``, and all ranks meet at
    ``address``."""

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
        self._first = first
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = multiprocessing.get_context("forkserver")  # imports run once and serve later ranks too
        context.set_forkserver_preload(PRELOAD)
        for rank in range(first, first + count):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world or count, address, device, threads, None if lease is None else str(lease))
            process = context.Process(target=rank_main, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(cast(Connection, ours))
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        import torch

        path = Path(self._folder.name) / f"{name}.pt"
        torch.save(model, path)
        self.call("open", name, str(path), options)
        path.unlink()

    def save(self, trainer: TrainerRef, folder: Path) -> None:
        self.call("save", trainer, str(folder))

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        return cast(tuple[int, float], self.call("load", name, str(folder)))

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method on every rank and returns the first rank's result.  Raises the ranks' exception, or
        ``TrainerLost`` when a rank has died."""
        if not self._pipes:
            raise TrainerLost("the ranks are closed")
        message = pickle.dumps((method, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead rank is detected below
                pipe.send_bytes(message)
        answers = self._answers()
        gone = [self._first + index for index, (kind, _) in answers.items() if kind == "gone"]
        failures = [value for kind, value in answers.values() if kind == "failed"]
        if gone or len(answers) < len(self._pipes) or 0 < len(failures) < len(answers):
            self.close()  # the others would wait forever
        if gone:
            raise TrainerLost(f"rank {', '.join(map(str, gone))} of the trainer is gone, in {method}")
        if failures:
            raise failures[0]
        return answers[0][1]

    def _answers(self) -> dict[int, tuple[str, Any]]:
        """Returns the answers by rank, without dead ranks and those too late after the first failure."""
        answers: dict[int, tuple[str, Any]] = {}
        deadline = math.inf
        while len(answers) < len(self._pipes):
            missing = [rank for rank in range(len(self._pipes)) if rank not in answers]
            pipes = [self._pipes[rank] for rank in missing]
            ends = [self.processes[rank].sentinel for rank in missing]
            ready = wait([*pipes, *ends], None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
            if not ready:
                return answers
            for rank, pipe, end in zip(missing, pipes, ends, strict=True):
                try:
                    if pipe in ready:
                        answers[rank] = pickle.loads(pipe.recv_bytes())
                    elif end in ready and not pipe.poll():
                        answers[rank] = ("gone", None)
                except (EOFError, OSError):
                    answers[rank] = ("gone", None)
            if any(kind == "gone" for kind, _ in answers.values()):
                return answers
            if any(kind == "failed" for kind, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def close(self) -> None:
        """Ends the ranks; those that are stuck in a step are killed."""
        broken = any(process.exitcode is not None for process in self.processes)
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        for process in self.processes:
            if not broken:
                process.join(CLOSE_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._folder.cleanup()
