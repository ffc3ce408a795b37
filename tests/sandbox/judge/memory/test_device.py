"""The judge's part on a GPU, as far as it runs without one."""

import gc

import pytest

from cuda_agent.sandbox import driver
from cuda_agent.sandbox.judge.memory import device

MICROSECONDS = 1e-6


@pytest.mark.parametrize(
    ("part", "of_whole", "shared"),
    [
        (45, 34.9, False), (44, 34.8, False), (45, 35.9, False),  # alone
        (56, 72.4, True), (49, 68.1, True), (45, 57.6, True), (46, 66.7, True),  # beside products of matrices
        (994, 196, True), (1002, 227, True),  # each part has waited, too
    ],
)  # fmt: skip
def test_fills_of_an_h100_tell_whether_others_use_it(part: float, of_whole: float, shared: bool) -> None:
    """The times were measured on an H100, with no other process and beside one."""
    times = (MICROSECONDS * microseconds for microseconds in (part, of_whole, 31.3))
    assert device.takes_turns(*times) == shared


def test_an_array_that_gets_no_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int) -> int:
        raise driver.NoDevice("full")

    given_back: list[int] = []
    monkeypatch.setattr(driver, "take", full)
    monkeypatch.setattr(driver, "give_back", given_back.append)
    with pytest.raises(driver.NoDevice):
        device.Array(12345)
    gc.collect()
    assert not given_back
