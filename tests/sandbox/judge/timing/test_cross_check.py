"""The judge's own bound on what a worker tells of the device's clock, against walls that are made up of known parts."""

import random
from collections.abc import Callable

import pytest

from cuda_agent.sandbox.judge.timing.cross_check import CrossCheck
from cuda_agent.sandbox.wire import DELAY_UNIT

REQUEST, COPY, EAGER_HOST = 4e-4, 1e-5, 1e-3  # seconds: of a request, of one call's outputs, of eager's host


def made(
    device: float, host: float = 2e-5, noise: Callable[[], float] = lambda: 0.0, slots: int = 8
) -> tuple[CrossCheck, Callable]:
    """A check, and the chains of a candidate whose calls take so long on the device and on the host."""
    check = CrossCheck(slots, lambda count, delay: REQUEST + delay * DELAY_UNIT + count * COPY + noise(), EAGER_HOST)
    check.heard(host)

    def chain(count: int, delay: int) -> tuple[float, float]:
        waiting = max(delay * DELAY_UNIT, count * host)
        return REQUEST + waiting + count * (COPY + device) + noise(), count * host

    return check, chain


@pytest.mark.parametrize("slots", [8, 1])
@pytest.mark.parametrize("device", [2e-6, 2e-5, 2e-4, 2e-3, 2e-2])
def test_an_honest_time_is_believed(device: float, slots: int) -> None:
    check, chain = made(device, slots=slots)
    assert check.believe(device, chain) == (device, "")


def test_an_honest_time_is_believed_whatever_lengthens_the_walls() -> None:
    rng = random.Random(1)
    for _ in range(500):
        check, chain = made(2e-5, noise=lambda: rng.expovariate(5000) + (rng.random() < 0.2) * 2e-3)
        assert check.believe(2e-5, chain)[1] == ""


@pytest.mark.parametrize(
    ("device", "told", "slots"), [(2e-4, 2e-5, 8), (2e-3, 9e-4, 8), (2e-2, 1e-3, 8), (2e-3, 5e-4, 1), (2e-2, 1e-3, 1)]
)
def test_a_time_far_below_the_walls_is_doubted_with_both_figures(device: float, told: float, slots: int) -> None:
    check, chain = made(device, slots=slots)
    bound, doubt = check.believe(told, chain)
    assert bound == pytest.approx(device)
    assert f"{told * 1e6:.0f} us" in doubt and f"{device * 1e6:.0f} us" in doubt


@pytest.mark.parametrize(("device", "told", "slots"), [(2e-4, 1e-4, 8), (2e-3, 1.2e-3, 8), (15.1e-3, 10.4e-3, 1)])
def test_a_time_between_half_and_four_fifths_of_the_walls_gives_way_to_them(
    device: float, told: float, slots: int
) -> None:
    check, chain = made(device, slots=slots)
    assert check.believe(told, chain) == (pytest.approx(device), "")


def test_what_a_host_takes_longer_than_any_delay_is_the_time_that_is_reported() -> None:
    check, chain = made(1e-5, host=5e-2)
    seconds, doubt = check.believe(1e-5, chain)
    assert doubt == "" and seconds > 4e-2


def test_a_host_that_becomes_slow_after_its_last_timed_call_accuses_no_solution() -> None:
    check, _ = made(5e-6, host=2e-5)
    _, chain = made(5e-6, host=2e-4)
    seconds, doubt = check.believe(5e-6, chain)
    assert doubt == "" and seconds > 1e-4


def test_empty_calls_that_were_slow_only_lower_the_bound() -> None:
    check = CrossCheck(8, lambda count, delay: REQUEST + delay * DELAY_UNIT + count * 1e-3, EAGER_HOST)
    assert check.believe(2e-5, made(2e-4)[1]) == (2e-5, "")


def test_a_host_that_says_it_is_slow_hides_no_more_than_eagers_would() -> None:
    device, says = 1.5e-2, 1.4e-2
    check, _ = made(1e-6, host=says)

    def chain(count: int, delay: int) -> tuple[float, float]:
        """It leaves the wait out where it has many calls to do, and uses the time."""
        return REQUEST + count * (COPY + device) + (delay * DELAY_UNIT if count == 1 else 0.0), count * says

    assert check.believe(1e-6, chain)[0] > device - 3 * EAGER_HOST
    assert check.delay * DELAY_UNIT < 3 * EAGER_HOST


@pytest.mark.parametrize("device", [2e-3, 2e-2])
def test_a_pause_in_chains_of_one_call_hides_nothing(device: float) -> None:
    """It makes the difference between a long chain and one call as small as the candidate likes."""
    check, chain = made(device)

    def paused(count: int, delay: int) -> tuple[float, float]:
        wall, host = chain(count, delay)
        return wall + 7 * device * (count == 1), host

    bound, doubt = check.believe(1e-5, paused)
    assert bound == pytest.approx(device, rel=0.1) and "10 us of calls that take at least" in doubt


def test_an_honest_time_stays_below_the_second_bound_too() -> None:
    rng = random.Random(2)
    for _ in range(500):
        device, host = 10 ** rng.uniform(-5.5, -1.5), 10 ** rng.uniform(-5, -3.5)
        check, chain = made(device, host, noise=lambda: rng.expovariate(10_000))
        seconds, doubt = check.believe(device, chain)
        assert doubt == "" and seconds == pytest.approx(device, abs=host + 1e-4)
