"""What a person sees while a verdict takes long."""

import asyncio
import io

import pytest

from cuda_agent.optimize.evaluation import with_clock


class Screen(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


async def slow(seconds=0.2, fail=False):
    await asyncio.sleep(seconds)
    if fail:
        raise ValueError("no")
    return 7


@pytest.mark.parametrize(("terminal", "shown"), [(True, "\rjudging: 0 s "), (False, "judging\n")])
def test_long_work_is_told(terminal, shown):
    screen = Screen(terminal)
    assert asyncio.run(with_clock(slow(), "judging", screen, pause=0.01)) == 7
    told = screen.getvalue()
    assert told.startswith(shown) and (told.endswith("\r\x1b[K") if terminal else told.count("judging") == 1)


def test_short_work_is_not_told_and_an_error_goes_on():
    screen = Screen(True)
    assert asyncio.run(with_clock(slow(0), "judging", screen)) == 7 and screen.getvalue() == ""
    with pytest.raises(ValueError):
        asyncio.run(with_clock(slow(0, fail=True), "judging", screen))


def test_a_cancelled_work_cleans_up_first():
    done = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            done.append(True)

    async def script():
        task = asyncio.ensure_future(with_clock(work(), "judging", Screen(False), pause=0.01))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait({task})
        return task.cancelled()

    assert asyncio.run(script()) and done == [True]
