"""Checks the times that a worker reports from the device's clock against the judge's own clock.

A solution with host code can forge the CUDA events that time a call, or run work on a stream that the events do not
cover. The judge therefore measures a lower bound of a call's time.

The judge times requests for one call, and requests for a chain: several calls on different inputs. The wall time of a
request ends when the judge holds a copy of all outputs. The judge divides the difference of the two wall times by the
number of additional calls, so the fixed cost of a request cancels out. It subtracts the time of an empty call, which it
measured in the same way before untrusted code was loaded. The result is a lower bound. A candidate could make this
bound small by a pause in its requests for one call. So there is a second bound without such requests: the wall time of
a chain, minus its delay and the time of an empty chain, divided by the number of calls. The larger bound counts. If the
device only has room for the inputs and outputs of one call, there is no chain. The bound is then the wall time of one
call, minus the call's delay and the time of an empty request.

The delay is a kernel of known length that runs before the calls. The device runs it while the host enqueues the calls.
The judge cannot detect work that another stream does during the delay. A chain's delay is therefore at most about twice
the time in which the host would enqueue the same number of calls of the task's model in eager PyTorch.

Each wall time is the shortest of several. It includes stopping the worker after the calls, which can only lengthen it
(by tenths of a millisecond on H200). A reported time counts if it is at least 80 % of the bound, minus an allowance for
noise. Otherwise the bound counts. A reported time below half of the bound is a forgery, unless the host always needed
longer than the delay to enqueue the chain. The limit is not higher, because honest calls that move gigabytes can report
too little. On H200, one such call reported 10.4 ms and took 15.1 ms by the judge's clock."""

import math
from collections.abc import Callable

from cuda_agent.sandbox.wire import DELAY_UNIT

LONGEST_CHAIN = 8
_SHORTEST, _ENOUGH, _LONGEST = 4, 16, 1250  # in units: 64 us, 256 us and 20 ms
_EMPTY_DELAY = 64  # units: longer than a host takes to enqueue the longest empty chain
_ROUNDS, _MOST_ROUNDS = 3, 12  # usual rounds, and most rounds while a time is in doubt
CALLS = _ROUNDS * (1 + LONGEST_CHAIN)  # most calls of a candidate that passes at once, each on different inputs
_LONG_ENOUGH = 5e-3  # seconds: a chain needs no more calls than take this long
_SLACK = 3e-4  # seconds by which shortest wall times may differ for other reasons than device time
_SHARE, _FORGED = 0.8, 0.5


def longest(host: float) -> float:
    """Returns the longest allowed delay before a chain, in seconds per call of the chain. ``host`` is the time in
    seconds in which the host enqueues one call of eager PyTorch."""
    return 2 * host


class CrossCheck:
    def __init__(self, slots: int, empty: Callable[[int, int], float], host: float) -> None:
        """Measures an empty call's time. ``slots`` is the number of calls in the longest chain. ``empty(calls, delay)``
        runs a chain of empty calls after a delay in units of ``DELAY_UNIT``, and returns its wall seconds. ``host`` is
        the time in seconds in which the host enqueues one call of eager PyTorch; it limits later delays."""
        self.delay = _SHORTEST
        self._allowed = longest(host)
        self._enqueues = 0.0
        self._slots = slots
        walls = _Walls(slots)
        for _ in range(2 * _ROUNDS):
            walls.add(lambda count: empty(count, _EMPTY_DELAY))
        self._empty = max(0.0, walls.slope(_EMPTY_DELAY))
        self._request = walls.request(_EMPTY_DELAY)

    def heard(self, host: float) -> None:
        """Sets the delay before later calls to 1.5 times ``host``, within limits. ``host`` is the host's seconds to
        enqueue the last call."""
        self._enqueues = min(1.5 * host, self._allowed)
        self.delay = max(_units(self._enqueues), min(_units(1.5 * host), _ENOUGH))

    def believe(self, told: float, chain: Callable[[int, int], tuple[float, float]]) -> tuple[float, str]:
        """Checks ``told``, the median of the seconds per call that the worker reported. Returns the seconds that count,
        and the reason for a refusal (or an empty string). ``chain(calls, delay)`` runs a chain after a delay in units
        of ``DELAY_UNIT``. It returns the wall seconds by the judge's clock, and the host's seconds to enqueue the
        chain."""
        count = min(max(2, math.ceil(_LONG_ENOUGH / max(told, 1e-6))), self._slots)
        delay = _units(count * self._enqueues)
        late: list[float] = []

        def wall(calls: int) -> float:
            seconds, host = chain(calls, delay)
            if calls == count:
                late.append(host - delay * DELAY_UNIT)
            return seconds

        walls, slack = _Walls(count), _SLACK / max(1, count - 1)
        for number in range(_MOST_ROUNDS):
            walls.add(wall)
            bound = max(walls.slope(delay) - self._empty, walls.share(delay, self._request, self._empty))
            if number + 1 >= _ROUNDS and told >= _SHARE * bound - slack:
                return told, ""
        if min(late) > 0 or told >= _FORGED * bound - slack:
            return bound, ""  # if ``late``, the host takes longer than any delay, so the host's time counts
        return bound, f"the device's clock says {told * 1e6:.0f} us of calls that take at least {bound * 1e6:.0f} us"


def _units(seconds: float) -> int:
    return min(max(math.ceil(seconds / DELAY_UNIT) + 2, _SHORTEST), _LONGEST)


class _Walls:
    """Holds the shortest wall times so far, in seconds: that of a request for one call and, if ``count`` exceeds 1,
    that of a request for a chain of ``count`` calls."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._short = self._long = math.inf

    def add(self, wall: Callable[[int], float]) -> None:
        self._short = min(self._short, wall(1))
        if self._count > 1:
            self._long = min(self._long, wall(self._count))

    def slope(self, delay: int) -> float:
        """Returns the wall seconds that each further call adds to a chain. If ``count`` is 1 (no chain), returns
        ``request(delay)``: the wall seconds of a request for one call, minus the delay."""
        if self._count == 1:
            return self.request(delay)
        return (self._long - self._short) / (self._count - 1)

    def request(self, delay: int) -> float:
        """Returns the wall seconds of a request for one call, minus its ``delay`` (in units of ``DELAY_UNIT``)."""
        return self._short - delay * DELAY_UNIT

    def share(self, delay: int, request: float, empty: float) -> float:
        """Returns a lower bound of the seconds of one call in the chain; 0 without a chain. It is the chain's wall
        seconds, minus its ``delay`` (in units of ``DELAY_UNIT``), an empty chain's seconds and an allowance for noise,
        divided by the number of calls. An empty chain takes ``request`` seconds with one call, and ``empty`` seconds
        more for each further call."""
        if self._count == 1:
            return 0.0
        rest = self._long - delay * DELAY_UNIT - request - (self._count - 1) * empty
        return (rest - _SLACK) / self._count
