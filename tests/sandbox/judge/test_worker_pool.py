"""The workers of one judge beside the timings of other processes."""

import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.lease import Lease
from cuda_agent.sandbox.jail import scratch
from cuda_agent.sandbox.jail.descendants import state
from cuda_agent.sandbox.judge.reference_client import ReferenceClient
from cuda_agent.sandbox.judge.worker_pool import WorkerPool
from tests.sandbox.conftest import CHAIN
from tests.sandbox.judge.fakes import settings_in
from tests.test_lease import free_for


def test_a_task_that_opens_stands_still_while_another_process_times(tmp_path: Path) -> None:
    folder = scratch.make_folder("pool")
    pool = WorkerPool(settings_in(folder, clock="real", run_seconds=60.0))
    states: list[str] = []

    def time_a_kernel() -> None:
        with Lease(folder / "lease").timing():
            states.extend(state(f"/proc/{worker.pid}/stat") for _ in range(100))

    other = threading.Thread(target=time_a_kernel)
    slow = CHAIN + "\nimport time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\n"
    try:
        worker = pool.reference()
        with pool.lease.working():
            other.start()
            reference = ReferenceClient(worker, slow, 0, pool.settings)
            assert states and set(states) == {"T"}
            reference.close()
        other.join()
    finally:
        pool.close()
        scratch.remove(folder)


def test_on_a_gpu_others_may_time_while_the_parent_of_compilers_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = scratch.make_folder("pool")
    pool = WorkerPool(settings_in(folder, clock="real", device="cuda"))
    free: list[bool] = []

    def parent(start: Any) -> None:
        free.append(free_for(folder / "lease", fcntl.LOCK_EX))

    def start(home: Path, read: Sequence[str]) -> None:
        free.append(free_for(folder / "lease", fcntl.LOCK_EX))

    monkeypatch.setattr("cuda_agent.sandbox.judge.worker_pool.compiling_parent", parent)
    monkeypatch.setattr(pool, "_known", lambda: folder)
    monkeypatch.setattr(pool, "_start_compiler", start)
    try:
        pool.compiler()
        assert free == [True, False]
    finally:
        pool.close()
        scratch.remove(folder)


def test_a_worker_that_is_started_ahead_holds_the_timing_lease_until_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = scratch.make_folder("pool")
    pool = WorkerPool(settings_in(folder, clock="real"))
    copies: list[int] = []

    def fork(options: Any, fds: Sequence[int], real: Any = pool._plain.fork) -> int:
        copies.extend(map(os.dup, fds[1:]))  # so that the worker is not ready before it was looked at
        return int(real(options, fds))

    monkeypatch.setattr(pool._plain, "fork", fork)
    try:
        assert pool.torch
        pool.start_spare()
        assert not free_for(folder / "lease", fcntl.LOCK_EX) and len(copies) == 1
        worker = pool.candidate()
        assert not free_for(folder / "lease", fcntl.LOCK_EX)
        os.close(copies[0])
        assert free_for(folder / "lease", fcntl.LOCK_EX), "the worker has closed its own"
        worker.kill()
    finally:
        pool.close()
        scratch.remove(folder)
