"""Whether what a worker tells of the device's clock can be true.

In the extension and python formats the solution shares its process with the events that time it, and could forge them,
or leave work to a stream that they do not cover.  So the judge's own clock sets a bound: what a chain of calls on
different inputs, in one request, takes longer than one call, from the request until the judge holds a copy of all
outputs.  The difference leaves out what a request costs; what an empty call of the same form costs, measured before
anything untrusted was loaded, is taken off.  The device waits in a kernel of known length while the host enqueues the
chain, so that an honest host's own time does not count.  How long it enqueues is the solution's own word, and what
another stream does while the device waits is not seen: the wait is bounded by what eager's host needs.

Times far below the bound are not believed.  Stopping and continuing processes and switching between their contexts
makes walls longer by up to some tenths of a millisecond (H200), never shorter: so the shortest of several chains
counts, and more of them are timed before anybody is accused.  What is left of the noise a chain divides by its length:
a lie about a time that is shorter than that is not seen here, nor what fits into the wait.
"""

import math
from collections.abc import Callable

from cuda_agent.sandbox.wire import DELAY_UNIT

LONGEST_CHAIN = 8
_SHORTEST, _ENOUGH, _LONGEST = 4, 16, 1250  # in units: 64 us, 256 us and 20 ms
_EMPTY_DELAY = 64  # units: longer than a host takes to enqueue the longest empty chain
_ROUNDS, _MOST_ROUNDS = 3, 12  # the latter when in doubt
CALLS = _ROUNDS * (1 + LONGEST_CHAIN)  # of a candidate that nobody doubts, at most, each on inputs of its own
_LONG_ENOUGH = 5e-3  # seconds of calls that a chain needs at most
_SLACK = 3e-4  # seconds that the shortest walls of two kinds of request may differ by, beside the device's time
_SHARE = 0.8


def longest(host: float) -> float:
    """Seconds of the longest wait for a call that eager's host enqueues in ``host`` seconds."""
    return 2 * host


class CrossCheck:
    def __init__(self, slots: int, empty: Callable[[int, int], float], host: float) -> None:
        """``empty``: wall seconds of a chain of so many empty calls, with a delay of so many units.  ``slots``: the
        longest chain, at least 2.  ``host``: seconds in which eager's host enqueues a call."""
        self.delay = _SHORTEST
        self._allowed = longest(host)
        self._enqueues = 0.0
        self._slots = slots
        walls = _Walls(slots)
        for _ in range(2 * _ROUNDS):
            walls.add(lambda count: empty(count, _EMPTY_DELAY))
        self._empty = max(0.0, walls.slope())

    def heard(self, host: float) -> None:
        """For how long the host of one call enqueued it, as it says: the next call's delay covers that."""
        self._enqueues = min(1.5 * host, self._allowed)
        self.delay = max(_units(self._enqueues), min(_units(1.5 * host), _ENOUGH))

    def believe(self, told: float, chain: Callable[[int, int], tuple[float, float]]) -> tuple[float, str]:
        """The time to report for a ``told`` median, and what is wrong with it (empty: nothing).  ``chain``: seconds of
        so many calls with a delay of so many units: of the judge's wall, and of the host while it enqueued."""
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
            return bound, ""  # the host takes longer than any delay: it is the host's time that counts
        return bound, f"the device's clock says {told * 1e6:.0f} us of calls that take at least {bound * 1e6:.0f} us"


def _units(seconds: float) -> int:
    return min(max(math.ceil(seconds / DELAY_UNIT) + 2, _SHORTEST), _LONGEST)


class _Walls:
    """The shortest walls of chains of one call and of ``count``."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._short = self._long = math.inf

    def add(self, wall: Callable[[int], float]) -> None:
        self._short = min(self._short, wall(1))
        self._long = min(self._long, wall(self._count))

    def slope(self) -> float:
        """Seconds of one more call."""
        return (self._long - self._short) / (self._count - 1)
