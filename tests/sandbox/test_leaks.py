"""What an evaluation must give back: descriptors of the client and of its judge."""

import asyncio
import os

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.build import builder
from tests.sandbox.conftest import CHAIN, Running, plan_solution, task


def _open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _settled(running: Running) -> int:
    """Descriptors of this process while one compiler waits, neither being started nor ended."""
    ahead = running.sandbox._builder._ahead
    assert ahead
    ahead.start()
    assert ahead._next
    ahead._next.result(30)
    running.wait(asyncio.sleep(0))
    return _open(os.getpid())


def test_builds_leave_no_descriptor_open(running: Running) -> None:
    running.evaluate(task(), plan_solution())
    before = _settled(running)
    for number in range(3):
        running.wait(running.sandbox._builder.library({"k.cpp": f"int n = {number};"}, ["k.cpp"]))
        with pytest.raises(builder.BuildError):
            running.wait(running.sandbox._builder.library({"k.cpp": f"int n = {number}"}, ["k.cpp"]))
    assert _settled(running) <= before


def test_a_task_that_cannot_be_run_leaves_no_descriptor_open_in_the_judge(running: Running) -> None:
    running.evaluate(task(), plan_solution())
    judge = running.sandbox._judges[0]._process
    assert judge
    before = _open(judge.pid)
    for number in range(4):
        with pytest.raises(TaskError):
            running.wait(running.sandbox.spec(task(CHAIN + f"\nassert {number} < 0")))
    assert _open(judge.pid) <= before
