"""What an evaluation must give back: descriptors of the client and of its judge."""

import asyncio
import os

import pytest

from cuda_agent.sandbox import build
from cuda_agent.sandbox.wire import TaskError
from tests.sandbox.conftest import CHAIN, Running, plan_solution, task


def _open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_builds_leave_no_descriptor_open(running: Running) -> None:
    running.evaluate(task(), plan_solution())
    before = _open(os.getpid())
    for number in range(3):
        running.wait(running.sandbox._builder.library({"k.cpp": f"int n = {number};"}, ["k.cpp"]))
        with pytest.raises(build.BuildError):
            running.wait(running.sandbox._builder.library({"k.cpp": f"int n = {number}"}, ["k.cpp"]))
    running.wait(asyncio.sleep(0))
    assert _open(os.getpid()) <= before


def test_a_task_that_cannot_be_run_leaves_no_descriptor_open_in_the_judge(running: Running) -> None:
    running.evaluate(task(), plan_solution())
    judge = running.sandbox._judges[0]._process
    assert judge
    before = _open(judge.pid)
    for number in range(4):
        with pytest.raises(TaskError):
            running.wait(running.sandbox.spec(task(CHAIN + f"\nassert {number} < 0")))
    assert _open(judge.pid) <= before
