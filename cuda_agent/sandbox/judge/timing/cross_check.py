"""Checks the times that a worker reports from the GPU's clock against the judge's own clock.

The judge is the trusted process that times a solution. A worker is the jailed process that runs it. A solution with
host code can forge the CUDA events that time a call, or run work on a stream that the events do not cover. The judge
therefore measures a lower bound of a call's time.

The judge sends the worker two kinds of requests: for one call, and for a chain (several calls on different inputs).
The wall time of a request ends when the judge holds a copy of all outputs. Before the calls of a request, the GPU runs
a kernel of known length, the delay. Meanwhile the host enqueues the calls. The judge computes two lower bounds:

- The wall time of a chain minus the wall time of a request for one call, divided by the number of calls in the chain
  minus one. The fixed cost of a request and the delay cancel out. The judge then subtracts the time of an empty call,
  which it measured in the same way before untrusted code was loaded.
- The wall time of a chain, minus its delay, the time of an empty chain and an allowance for noise, divided by the
  number of calls. A solution can make the first bound small if it pauses in requests for one call. The second bound
  does not use such requests.

The larger bound counts. If the GPU only has room for the inputs and outputs of one call, there is no chain. The bound
is then the wall time of a request for one call, minus the delay and the time of an empty request.

The judge cannot detect work that another stream does during the delay. A chain's delay is therefore at most about twice
the time in which the host would enqueue the same number of calls of the task's model in eager PyTorch.

Each wall time is the minimum of several measurements. It includes the time to stop the worker after the calls, which
can only lengthen it (by tenths of a millisecond on H200). A reported time counts if it is at least 80 % of the bound,
minus an allowance for noise. Otherwise the bound counts. A reported time below half of the bound (minus the allowance)
is a forgery, unless the host needed longer than the delay to enqueue every chain. The limit for a forgery is only half,
because the clock can report too little for honest calls that move gigabytes. On H200, one such call reported 10.4 ms
and took 15.1 ms by the judge's clock."""

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
    """Returns the longest allowed delay (a kernel that runs before a chain of calls), in seconds per call of the chain.
    ``host`` is the time in seconds in which the host enqueues one call of the task's model in eager PyTorch."""
    return 2 * host


class CrossCheck:
    def __init__(self, slots: int, empty: Callable[[int, int], float], host: float) -> None:
        """Measures the time of an empty call. ``slots`` is the number of calls in the longest chain. ``empty(calls,
        delay)`` runs a chain of empty calls after a delay in units of ``DELAY_UNIT``, and returns the chain's wall
        seconds. ``host`` is the time in seconds in which the host enqueues one call of the task's model in eager
        PyTorch. It limits the delays of later chains (see ``longest``)."""
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
        """Sets the delay before later calls to 1.5 times ``host``, within limits. ``host`` is the time in seconds in
        which the host enqueued the last call."""
        self._enqueues = min(1.5 * host, self._allowed)
        self.delay = max(_units(self._enqueues), min(_units(1.5 * host), _ENOUGH))

    def believe(self, told: float, chain: Callable[[int, int], tuple[float, float]]) -> tuple[float, str]:
        """Checks ``told``, the median of the seconds per call that the worker reported. Returns the seconds per call to
        use (``told`` or the judge's lower bound), and the reason to refuse the solution (an empty string if there is
        none). ``chain(calls, delay)`` runs a chain of calls after a delay in units of ``DELAY_UNIT``. It returns the
        wall seconds by the judge's clock, and the seconds in which the host enqueued the chain."""
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
    """Holds the shortest measured wall times, in seconds, of two kinds of requests: for one call, and for a chain of
    ``count`` calls. There is no chain if ``count`` is 1."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._short = self._long = math.inf

    def add(self, wall: Callable[[int], float]) -> None:
        self._short = min(self._short, wall(1))
        if self._count > 1:
            self._long = min(self._long, wall(self._count))

    def slope(self, delay: int) -> float:
        """Returns the wall seconds that each call after the first adds to a chain. If ``count`` is 1 (no chain),
        returns ``request(delay)``: the wall seconds of a request for one call, minus the delay."""
        if self._count == 1:
            return self.request(delay)
        return (self._long - self._short) / (self._count - 1)

    def request(self, delay: int) -> float:
        """Returns the wall seconds of a request for one call, minus the ``delay`` before the call (in units of
        ``DELAY_UNIT``)."""
        return self._short - delay * DELAY_UNIT

    def share(self, delay: int, request: float, empty: float) -> float:
        """Returns a lower bound of the seconds of one call in the chain, or 0 without a chain. Three times are
        subtracted from the chain's wall seconds: its ``delay`` (in units of ``DELAY_UNIT``), the time of an empty
        chain of the same length, and an allowance for noise. The rest is divided by the number of calls. An empty
        chain takes ``request`` seconds for the first call and ``empty`` seconds for each later call."""
        if self._count == 1:
            return 0.0
        rest = self._long - delay * DELAY_UNIT - request - (self._count - 1) * empty
        return (rest - _SLACK) / self._count
