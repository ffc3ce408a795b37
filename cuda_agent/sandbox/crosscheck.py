"""Whether what a worker tells of the device's clock can be true.

In the extension and python lanes the solution shares its process with the events that time it, and could forge them,
or leave work to a stream that they do not cover.  So the judge's own clock sets a bound: a call lasts from its request
until the judge holds a copy of its outputs, and an empty call of the same form, measured before anything untrusted was
loaded, says how much of that is not the call's.  While the host enqueues a call the device waits in a kernel of known
length, so that an honest host's own time does not count.  How long it says that it enqueues is the solution's own word,
and what another stream does while the device waits is not seen: the wait is bounded by what eager's host needs.

Times far below the bound are not believed.  What it cannot resolve is left to the device's clock: stopping and
continuing processes and switching between their contexts makes walls differ by up to half a millisecond (H200), so a
lie about a shorter call is not seen here, nor what fits into the wait beside it.
"""

import statistics
from collections.abc import Callable

UNIT = 16e-6  # seconds; the delay crosses as a number of these
_SHORTEST, _ENOUGH, _LONGEST = 4, 16, 1250  # in units: 64 us, 256 us and 20 ms
_CALLS = 9
_SLACK = 5e-4  # seconds by which an honest call's wall time may exceed the empty call's, beside the device's time
_SHARE = 0.8


def longest(host: float) -> int:
    """Units of the longest wait where eager's host enqueues a call in so many seconds."""
    return min(max(int(2 * host / UNIT), _ENOUGH), _LONGEST)


class CrossCheck:
    def __init__(self, empty_call: Callable[[int], float], host: float) -> None:
        """``empty_call``: wall seconds of an empty call with a delay of so many units.  ``host``: seconds in which
        eager's host enqueues a call."""
        self._longest = longest(host)
        low, high = _SHORTEST, 16 * _SHORTEST
        first = statistics.median(empty_call(low) for _ in range(_CALLS))
        second = statistics.median(empty_call(high) for _ in range(_CALLS))
        self._slope = max(0.0, (second - first) / (high - low))
        self._empty = first - self._slope * low
        self._calls: list[tuple[float, float]] = []  # bound, and by how much the host was late
        self.delay = _SHORTEST

    def add(self, wall: float, host: float) -> None:
        """One call with the current ``delay``: wall seconds, and for how long its host says it enqueued."""
        self._calls.append((wall - self._empty - self._slope * self.delay, host - self.delay * UNIT))
        self.delay = min(max(int((1.5 * host + 2 * UNIT) / UNIT) + 1, _SHORTEST), self._longest)

    def believe(self, told: float) -> tuple[float, str]:
        """The time to report for a ``told`` median, and what is wrong with it (empty: nothing)."""
        bound = statistics.median(bound for bound, _ in self._calls)
        if told >= _SHARE * bound - _SLACK:
            return told, ""
        if statistics.median(late for _, late in self._calls) > 0:
            return bound, ""  # the host takes longer than any delay: it is the host's time that counts
        return bound, f"the device's clock says {told * 1e6:.0f} us of calls that take at least {bound * 1e6:.0f} us"
