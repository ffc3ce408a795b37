"""What the judge believes of a device's clock that shares its process with the solution: numbers alone, no GPU."""

import pytest

from cuda_agent.sandbox.crosscheck import UNIT, CrossCheck, longest

EMPTY = 1e-3  # wall seconds of an empty call without any wait


def check(host: float = 30e-6) -> CrossCheck:
    return CrossCheck(lambda units: EMPTY + units * UNIT, host)


def called(cross: CrossCheck, device: float, host: float, waits: bool = True) -> None:
    """One call that keeps the device busy for so long, whose host says that it enqueued for so long."""
    wait = cross.delay * UNIT if waits else 0.0
    cross.add(EMPTY + max(wait, host if waits else 0.0) + device, host)


@pytest.mark.parametrize("device", [5e-6, 3e-4, 2e-2])
def test_an_honest_time_is_believed(device: float) -> None:
    cross = check()
    for _ in range(9):
        called(cross, device, host=50e-6)
    assert cross.believe(device) == (device, "")


def test_work_that_the_events_do_not_cover_is_a_lie() -> None:
    cross = check()
    for _ in range(9):
        called(cross, 0.02, host=50e-6)
    seconds, doubt = cross.believe(1e-6)
    assert seconds == pytest.approx(0.02, rel=0.01) and "take at least" in doubt


def test_a_host_that_says_it_is_slow_hides_no_more_than_eagers_would() -> None:
    cross = check()
    for _ in range(9):
        called(cross, 0.015, host=0.014, waits=False)  # the wait is left out, its time is used
    assert cross.delay == longest(30e-6)
    assert cross.believe(1e-6)[0] > 0.014


def test_the_wait_is_as_long_as_eagers_host_needs_within_limits() -> None:
    assert longest(0.0) == longest(30e-6) == 16
    assert longest(2e-3) == 250
    assert longest(1.0) == 1250
    cross = check(host=2e-3)
    for _ in range(9):
        called(cross, 1e-4, host=1.5e-3)
    assert cross.believe(1e-4) == (1e-4, "")
