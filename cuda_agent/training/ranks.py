"""Several ranks of the trainer, seen from the process that leads them: started, called, and missed when they die.

``Ranks`` starts processes on this machine and calls methods of the ``TrainerRank`` in each (``rank``) by messages over
pipes.  A ``RankedTrainer`` stands for a trainer that they share; to those who train it looks like a ``Trainer``:
recipes that are ``over_ranks`` run there with the same arguments, on all ranks at once, and give what the first one
gives.  Whoever places ranks elsewhere is a ``Group`` as ``Ranks`` is, and has such ``Ranks`` on each machine.
Does not cover: what a rank computes (``rank``, ``sharding``), reaching other machines, ranks that come back.
"""

import contextlib
import functools
import math
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")
GRACE_SECONDS = 10.0  # between the first rank's failure and the others', or their end
CLOSE_SECONDS = 10.0
PRELOAD = ["cuda_agent.training.rank", "transformers", "transformers.models.qwen3.modeling_qwen3"]


class TrainerLost(RuntimeError):
    """A rank died.  What was learnt since the last checkpoint is lost; new ranks may go on from there."""


@dataclass(frozen=True)
class Named:
    """A trainer of the ranks, inside the arguments of a recipe."""

    name: str
    seconds: float


class Group(Protocol):
    """All ranks, wherever they run."""

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        """Makes a trainer called ``name`` on every rank, of a model that is theirs from then on."""
        ...

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of every ``TrainerRank``; what the first one returns."""
        ...

    def save(self, trainer: Named, folder: Path) -> None:
        """Every rank's part of a checkpoint into ``folder`` of this process's machine."""
        ...

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        """Step and seconds of the checkpoint in ``folder``, which every rank has loaded."""
        ...


class RankedTrainer:
    """A ``Trainer`` on ranks.  ``model`` is this process's copy, which is brought up to date when it is looked at."""

    def __init__(self, ranks: Group, name: str, model: Any, **options: Any) -> None:
        self.step, self.seconds = 0, 0.0
        self._ranks, self._name, self._model, self._stale = ranks, name, model, False
        ranks.place(name, model, options)

    @property
    def model(self) -> Any:
        import torch

        if self._stale:
            weights = self._ranks.call("weights", self._name)
            with torch.no_grad():
                for name, parameter in self._model.named_parameters():
                    if name in weights:
                        parameter.copy_(weights[name])
            self._stale = False
        return self._model

    def save(self, folder: Path) -> None:
        from cuda_agent.training.checkpoint import seal

        self._ranks.save(self._named(), folder)
        seal(folder)

    def load(self, folder: Path) -> None:
        self.step, self.seconds = self._ranks.load(self._name, folder)
        self._stale = True

    def run(self, recipe: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """A recipe over this trainer and others of the same ranks."""
        trainers = [thing for thing in arguments if isinstance(thing, RankedTrainer)]
        passed = [thing._named() if isinstance(thing, RankedTrainer) else thing for thing in arguments]
        result, facts = self._ranks.call("run", recipe, passed, keywords)
        for trainer in trainers:
            step, trainer.seconds = facts[trainer._name]
            trainer._stale, trainer.step = trainer._stale or step != trainer.step, step
        return result

    def _named(self) -> Named:
        return Named(self._name, self.seconds)


def over_ranks(recipe: Callable[P, R]) -> Callable[P, R]:
    """Lets a recipe run on the ranks of the trainers that it is given."""

    @functools.wraps(recipe)
    def spread(*args: P.args, **kwargs: P.kwargs) -> R:
        for thing in args:
            if isinstance(thing, RankedTrainer):
                return cast(R, thing.run(recipe.__name__, args, kwargs))
        return recipe(*args, **kwargs)

    return spread


class Ranks:
    """``count`` processes on this machine; on GPUs, the first ``count`` of them.  A context manager; it ends them.

    ``threads`` are each rank's on a processor; ``lease``: folder of the timing lease, which the first rank holds for
    all.  Where others of the same ``world`` run elsewhere, these begin with number ``first``, and all find each other
    at ``address``."""

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
        from cuda_agent.training.rank import rank_main

        if address is None:
            import torch.distributed as dist

            self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            address = f"127.0.0.1:{self._store.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._first = first
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        context = multiprocessing.get_context("forkserver")  # what ranks import is imported once, for later ones too
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

    def save(self, trainer: Named, folder: Path) -> None:
        self.call("save", trainer, str(folder))

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        return cast(tuple[int, float], self.call("load", name, str(folder)))

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises what the ranks raise, and TrainerLost when one of them is gone."""
        if not self._pipes:
            raise TrainerLost("the ranks are closed")
        message = pickle.dumps((method, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # its end is noticed below
                pipe.send_bytes(message)
        answers = self._answers()
        gone = [self._first + index for index, (kind, _) in answers.items() if kind == "gone"]
        failures = [value for kind, value in answers.values() if kind == "failed"]
        if gone or len(answers) < len(self._pipes) or 0 < len(failures) < len(answers):
            self.close()  # the others wait for what will not come
        if gone:
            raise TrainerLost(f"rank {', '.join(map(str, gone))} of the trainer is gone, in {method}")
        if failures:
            raise failures[0]
        return answers[0][1]

    def _answers(self) -> dict[int, tuple[str, Any]]:
        """Of every rank; of fewer when one has died, or others did not follow the first failure in time."""
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
        """Ends them; those that are stuck in a step are killed."""
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
