"""Broadcasts from the trainer to the rollout workers of Ray, as members of one group led by the stage.

The stage's process holds the rendezvous, ends it when a member is gone or takes too long, and creates another when the
members change.

What it does not cover: the group and the transfer (``policy.engines.broadcast``), and when weights are sent
(``runtime``).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from cuda_agent.policy.engines.broadcast import Form, Rendezvous, TransferError, common_device
from cuda_agent.policy.engines.vllm_plugin import TRANSFER_SECONDS

ENDING_SECONDS = 30.0  # for a living member to answer after its group was ended
Errors = list[Exception | None]  # one per member, in order


class WeightBroadcastGroup:
    """The group of one trainer and its workers.  ``host``: this machine's address as the members see it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._rendezvous: Rendezvous | None = None
        self._members: list[Any] = []

    def end(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.end()
        self._rendezvous, self._members = None, []

    async def transfer(self, trainer: Any, workers: Sequence[Any], forms: Sequence[Form]) -> Errors:
        """Sends the trainer's parameters to all workers, which keep them until they are told to serve them.

        Returns:
            One entry per member: None, or its error.  If one fails all do: the member's own error gives the cause,
            ``TransferError`` marks members that took part in vain, ``TimeoutError`` members that did not answer.
        """
        errors = await self._join([trainer, *workers])
        if not any(errors):
            errors = await self._all_or_none(
                [trainer.send.remote(), *(worker.receive.remote(forms) for worker in workers)]
            )
        if any(errors):
            self.end()
        return errors

    async def _join(self, members: list[Any]) -> Errors:
        if members == self._members:
            return [None] * len(members)
        self.end()
        places: list[str] = []
        errors = await self._all_or_none([member.place.remote() for member in members], places)
        if any(errors):
            return errors
        self._rendezvous = meeting = Rendezvous(self._host)
        device, size = common_device(places), len(members)
        joined = [m.join.remote(meeting.host, meeting.port, rank, size, device) for rank, m in enumerate(members)]
        errors = await self._all_or_none(joined)
        self._members = members
        return errors

    async def _all_or_none(self, calls: Sequence[Awaitable[Any]], results: list[Any] | None = None) -> Errors:
        """Awaits all calls, after the first failure only for a short time.  Without a failure ``results`` holds their
        results."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, timeout=TRANSFER_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                if self._rendezvous is not None:
                    self._rendezvous.end()
                await asyncio.wait(pending, timeout=ENDING_SECONDS)
            errors = [_error(task) for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        if results is not None and not any(errors):
            results += [task.result() for task in tasks]
        return errors


def _error(task: "asyncio.Future[Any]") -> Exception | None:
    if not task.done() or task.cancelled():
        return TimeoutError("it hangs in a broadcast")
    error = task.exception()
    cause = getattr(error, "cause", None)  # the actor's own error
    found = cause if isinstance(cause, TransferError) else error
    assert found is None or isinstance(found, Exception)
    return found
