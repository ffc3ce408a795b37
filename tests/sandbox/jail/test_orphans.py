"""Processes that a worker with the right to start programs leaves: they end with it, and there are only so many."""

import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuda_agent.errors import TaskError
from cuda_agent.sandbox.jail import jail
from cuda_agent.sandbox.jail.descendants import descendants
from cuda_agent.sandbox.jail.processes import JailedProcess
from cuda_agent.sandbox.jail.warm_parent import WarmParent, warm_parent
from cuda_agent.sandbox.judge.reference_client import ReferenceClient
from cuda_agent.sandbox.messages import JudgeSettings
from tests.sandbox.conftest import CHAIN
from tests.sandbox.drill import _children

DAEMON = """
import os, time
if os.fork() == 0:
    for leave in (os.setsid, os.setpgrp):
        try: leave()
        except PermissionError: pass
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
"""
BOMB = """
import os, time
try:
    for _ in range(11):
        os.fork()
except OSError:
    pass
time.sleep(1000)
"""


before: dict[WarmParent, set[int]] = {}  # children of this process


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[WarmParent]:
    parent = warm_parent(1, tmp_path / "log")
    parent.wait_ready()
    prctl = ctypes.CDLL(None).prctl
    prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what nobody looks after comes to this process
    before[parent] = {*_children(os.getpid())}
    yield parent
    prctl(36, 0, 0, 0, 0)
    parent.close()


def run(parent: WarmParent, code: str) -> None:
    """In a worker as it compiles: with the right to start programs."""
    home = Path(tempfile.mkdtemp(prefix="orphans-"))
    read, execute = (*jail.SYSTEM_READ, sys.prefix, sys.base_prefix), (*jail.SYSTEM_EXECUTE, sys.base_prefix)
    policy = jail.JailPolicy(read=read, write=(str(home),), execute=execute, read_any=True, memory_mb=0, one_group=True)
    options = {
        "role": "reference",
        "threads": 1,
        "folder": str(home),
        "environment": {},
        "device": "cpu",
        "train_mode": False,
    }
    worker = JailedProcess(parent, options, policy, 400, home)
    worker.wait_started()
    settings = JudgeSettings(1, 1, 0.1, 1, 1.0, 400, "model", (), "", "", "")
    ReferenceClient(worker, CHAIN + code, 0, settings).close()


def left(parent: WarmParent) -> set[int]:
    """What is still there of what the worker started; it ends here."""
    time.sleep(0.5)  # a daemon may be about to be
    mine = {*_children(os.getpid())} - before[parent] | descendants(parent.pid)
    for pid in mine:
        os.kill(pid, signal.SIGKILL)
    return mine


def test_a_daemon_ends_with_the_worker_that_started_it(parent: WarmParent) -> None:
    run(parent, DAEMON)
    assert not left(parent)


def test_a_fork_bomb_ends_with_its_worker(parent: WarmParent) -> None:
    with pytest.raises(TaskError, match=r"more than 48 processes|did not finish in time"):
        run(parent, BOMB)
    assert not left(parent)
