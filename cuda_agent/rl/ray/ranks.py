"""The trainer's process group over several machines: one actor holds the processes of a machine, led from here.

All processes are one torch process group, whose rendezvous is at an address of the leader.  A call goes to every
machine at once.  Checkpoints travel in parts, so that no process holds more than a few of them in memory: from each
machine into the leader's folder, and from there to every machine.

What it does not cover: creating the actors (``trainer``), their class (``actors``), and the training (``training``).
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from cuda_agent.context import WorkerContext
from cuda_agent.rl.ray.transfer import keep, parts
from cuda_agent.training.distributed import TrainerLost, TrainerRef
from cuda_agent.training.ranks import GRACE_SECONDS, open_store

STREAM = {"num_returns": "streaming", "_generator_backpressure_num_objects": 4}  # parts produced ahead


class SpreadRanks:
    """See ``training.ranks.Group``.  The processes of ``training`` are distributed evenly over ``hosts``, the
    actors."""

    def __init__(self, hosts: Sequence[Any], context: WorkerContext) -> None:
        import ray

        self._ray, self._hosts = ray, list(hosts)
        self._store, address = open_store(ray.util.get_node_ip_address())
        training, each = context.config.training, context.config.training.num_processes // len(hosts)
        settings = {
            "device": training.device,
            "threads": max(1, context.config.policy.threads // each),
            "lease": context.cache / "lease",
            "world": training.num_processes,
            "address": address,
        }
        self._all(lambda number, host: host.start.remote(each, settings | {"first": number * each}))

    def place(self, name: str, model: Any, options: dict[str, Any]) -> None:
        given = self._ray.put(model)  # stored once for all hosts
        self._all(lambda _, host: host.place.remote(name, given, options))

    def call(self, method: str, *arguments: Any) -> Any:
        given = self._ray.put(arguments)
        return self._all(lambda _, host: host.call.remote(method, given))[0]

    def save(self, trainer: TrainerRef, folder: Path) -> None:
        self._all(lambda _, host: host.save.remote(trainer))
        for host in self._hosts:
            try:
                for reference in host.saved.options(**STREAM).remote():
                    keep(self._ray.get(reference), folder)
            except self._ray.exceptions.RayActorError as error:
                raise TrainerLost("a machine of the trainer's ranks is gone, in save") from error

    def load(self, name: str, folder: Path) -> tuple[int, float]:
        for part in parts(folder):
            given = self._ray.put(part)
            self._all(lambda _, host, given=given: host.keep.remote(given))
        return cast(tuple[int, float], self._all(lambda _, host: host.load.remote(name))[0])

    def _all(self, call: Callable[..., Any]) -> list[Any]:
        """The results of ``call(number, host)`` for every host.  Raises an error that all hosts share.

        Raises:
            TrainerLost: A host or one of its processes is gone, or the hosts disagree.
        """
        calls = [call(number, host) for number, host in enumerate(self._hosts)]
        pending, deadline = list(calls), None
        values: dict[Any, Any] = {}
        errors: list[Exception] = []
        lost: list[Exception] = []
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, pending = self._ray.wait(pending, num_returns=1, timeout=left)
            if not ready:
                break
            try:
                values[ready[0]] = self._ray.get(ready[0])
                continue
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause if isinstance(error.cause, Exception) else error
                (lost if isinstance(cause, TrainerLost) else errors).append(cause)
            except self._ray.exceptions.RayActorError as error:
                lost.append(error)
            if lost:
                break
            deadline = deadline or time.monotonic() + GRACE_SECONDS
        if lost:
            raise TrainerLost(f"a machine of the trainer's ranks is gone: {lost[0]}") from lost[0]
        if errors and len(errors) == len(calls):
            raise errors[0]
        if errors:
            raise TrainerLost(f"ranks of the trainer do not follow the others: {errors[0]}") from errors[0]
        return [values[reference] for reference in calls]
