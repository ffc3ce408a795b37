"""Runs a trainer's processes (ranks) on Ray. On each machine one actor (``RankHost``) runs the ranks. The stage calls
these actors.

To save a checkpoint, each machine sends its files to the stage. To load a checkpoint, the stage sends all files to all
machines. Files are sent in parts, so that no process holds more than a few parts in memory."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from cuda_agent.context import WorkerContext
from cuda_agent.rl.ray.cluster import raise_if_init_failed
from cuda_agent.rl.ray.transfer import keep, parts
from cuda_agent.training.distributed import TrainerLost, joint_results

STREAM = {"num_returns": "streaming", "_generator_backpressure_num_objects": 4}  # parts produced ahead


class SpreadRanks:
    """Starts the trainer's processes (ranks), evenly distributed over the ``RankHost`` actors ``hosts``, and calls
    them. Implements the interface ``training.distributed.RankGroup``."""

    def __init__(self, hosts: Sequence[Any], context: WorkerContext) -> None:
        import ray

        self._ray, self._hosts = ray, list(hosts)
        (address,) = self._all([hosts[0].meet.remote()])
        training, each = context.config.training, context.config.training.num_processes // len(hosts)
        settings = {
            "device": training.device,
            "threads": max(1, context.config.policy.threads // each),
            "lease": context.cache.absolute() / "lease",
            "world": training.num_processes,
            "address": address,
        }
        self._all([host.start.remote(each, settings | {"first": n * each}) for n, host in enumerate(hosts)])

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        given = self._ray.put(model)  # stored once for all hosts
        self._all([host.place.remote(name, given, options) for host in self._hosts])

    def call(self, method: str, *arguments: Any) -> Any:
        message = self._ray.put(pickle.dumps((method, arguments)))
        return self._all([host.call.remote(message) for host in self._hosts])[0]

    def save(self, name: str, folder: Path) -> None:
        self._all([host.save.remote(name) for host in self._hosts])
        for host in self._hosts:
            for reference in host.saved.options(**STREAM).remote():
                keep(self._all([reference])[0], folder)

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        for part in parts(folder):
            given = self._ray.put(part)
            self._all([host.keep.remote(given) for host in self._hosts])
        return cast(tuple[int, float], self._all([host.load.remote(name) for host in self._hosts])[0])

    def _all(self, calls: Sequence[Any]) -> list[Any]:
        """Waits for ``calls`` to hosts and returns their results. Raises TrainerLost if a host is gone or only some
        calls fail. If all calls fail, raises the first call's error."""
        try:
            return joint_results([call.future() for call in calls], self._ray.exceptions.RayActorError)
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except TrainerLost as error:
            raise_if_init_failed(error.__cause__)
            raise
