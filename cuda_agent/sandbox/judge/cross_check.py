"""Checks the times that a worker reports from the device's clock against the judge's own clock.

In the formats whose host code is not ours, the solution could forge the CUDA events that time it, or run work on a
stream that they do not cover. The judge therefore computes a lower bound. One request runs a chain of calls on
different inputs; its wall time ends when the judge holds a copy of all outputs. The wall of a chain minus the wall of
one call has no cost per request, and the cost of an empty call, measured in the same form before untrusted code is
loaded, is subtracted. The device waits in a kernel of known length while the host enqueues the chain. Work on another
stream during that wait is not seen, so the wait is at most twice the time that eager's host needs.

Stopping processes lengthens walls by tenths of a millisecond (H200) and never shortens them: the shortest of several
chains counts. A false time below the remaining noise divided by the chain's length is missed."""

import math
from collections.abc import Callable

from cuda_agent.sandbox.wire import DELAY_UNIT

LONGEST_CHAIN = 8
_SHORTEST, _ENOUGH, _LONGEST = 4, 16, 1250  # in units: 64 us, 256 us and 20 ms
_EMPTY_DELAY = 64  # units: longer than a host takes to enqueue the longest empty chain
_ROUNDS, _MOST_ROUNDS = 3, 12  # the latter when in doubt
CALLS = _ROUNDS * (1 + LONGEST_CHAIN)  # most calls of a candidate that passes at once, each on different inputs
_LONG_ENOUGH = 5e-3  # seconds: a chain needs no more calls than this
_SLACK = 3e-4  # seconds by which the shortest walls of two kinds of request may differ, device time aside
_SHARE = 0.8


def longest(host: float) -> float:
    """Returns the longest wait in seconds for a call that eager's host enqueues in ``host`` seconds."""
    return 2 * host


class CrossCheck:
    def __init__(self, slots: int, empty: Callable[[int, int], float], host: float) -> None:
        """Sets the bounds for one candidate. ``slots``: the longest chain, at least 2. ``empty`` returns the wall
        seconds of a chain of that many empty calls with a delay of that many units. ``host``: seconds in which eager's
        host enqueues a call."""
        self.delay = _SHORTEST
        self._allowed = longest(host)
        self._enqueues = 0.0
        self._slots = slots
        walls = _Walls(slots)
        for _ in range(2 * _ROUNDS):
            walls.add(lambda count: empty(count, _EMPTY_DELAY))
        self._empty = max(0.0, walls.slope())

    def heard(self, host: float) -> None:
        """Records the host's reported seconds to enqueue one call; the delay of the next call covers them."""
        self._enqueues = min(1.5 * host, self._allowed)
        self.delay = max(_units(self._enqueues), min(_units(1.5 * host), _ENOUGH))

    def believe(self, told: float, chain: Callable[[int, int], tuple[float, float]]) -> tuple[float, str]:
        """Returns the time to report for the median ``told``, and why it is rejected (empty: it is not). ``chain`` runs
        so many calls with a delay of so many units; it returns wall seconds of the judge and enqueueing seconds of the
        host."""
        count = min(max(2, math.ceil(_LONG_ENOUGH / max(told, 1e-6))), self._slots)
        delay = _units(count * self._enqueues)
        late: list[float] = []

        def wall(calls: int) -> float:
            seconds, host = chain(calls, delay)
            late.append(host - delay * DELAY_UNIT)
            return seconds

        walls = _Walls(count)
        for number in range(_MOST_ROUNDS):
            walls.add(wall)
            bound = walls.slope() - self._empty
            if number + 1 >= _ROUNDS and told >= _SHARE * bound - _SLACK / (count - 1):
                return told, ""
        if min(late) > 0:
            return bound, ""  # the host takes longer than any delay, so its time counts
        return bound, f"the device's clock says {told * 1e6:.0f} us of calls that take at least {bound * 1e6:.0f} us"


def _units(seconds: float) -> int:
    return min(max(math.ceil(seconds / DELAY_UNIT) + 2, _SHORTEST), _LONGEST)


class _Walls:
    """The shortest wall seconds of chains of one call and of ``count`` calls."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._short = self._long = math.inf

    def add(self, wall: Callable[[int], float]) -> None:
        self._short = min(self._short, wall(1))
        self._long = min(self._long, wall(self._count))

    def slope(self) -> float:
        """Returns the seconds of one more call."""
        return (self._long - self._short) / (self._count - 1)
