"""The timing lease: no process works while another times a kernel, and one handle may nest its contexts."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

from cuda_agent.lease import Lease


def free_for(folder: Path, kind: int) -> bool:
    """Whether another process could lock the lease now (``LOCK_SH`` to work, ``LOCK_EX`` to time)."""
    with open(folder / "lease.lock") as lock:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_others_may_work_beside_work_and_not_beside_a_timing(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    with lease.working():
        assert free_for(tmp_path, fcntl.LOCK_SH) and not free_for(tmp_path, fcntl.LOCK_EX)
    with lease.timing():
        assert not free_for(tmp_path, fcntl.LOCK_SH)
    assert free_for(tmp_path, fcntl.LOCK_EX)


def test_work_inside_a_timing_leaves_the_timing_undisturbed(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    with lease.timing():
        with lease.working(), lease.timing():
            assert not free_for(tmp_path, fcntl.LOCK_SH)
        assert not free_for(tmp_path, fcntl.LOCK_SH)
    with lease.working():
        with lease.working():
            pass
        assert not free_for(tmp_path, fcntl.LOCK_EX)
    assert free_for(tmp_path, fcntl.LOCK_EX)


def test_a_process_can_take_the_lease_over(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    with lease.lent() as descriptor:
        copy = os.dup(descriptor)
    assert free_for(tmp_path, fcntl.LOCK_SH) and not free_for(tmp_path, fcntl.LOCK_EX)
    with lease.working():
        pass
    assert not free_for(tmp_path, fcntl.LOCK_EX), "the work of this process is another matter"
    os.close(copy)
    assert free_for(tmp_path, fcntl.LOCK_EX)


def test_a_timing_inside_work_is_an_error_and_no_deadlock(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    with lease.working(), pytest.raises(RuntimeError, match="inside work"), lease.timing():
        pass
    with pytest.raises(ZeroDivisionError), lease.timing():
        1 / 0  # noqa: B018
    with lease.timing():
        assert not free_for(tmp_path, fcntl.LOCK_SH)


def test_work_sees_that_another_process_wants_to_time_and_lets_it(tmp_path: Path) -> None:
    lease, timed = Lease(tmp_path), threading.Event()

    def time_a_kernel() -> None:
        with Lease(tmp_path).timing():
            assert lease.wanted
            timed.set()

    with lease.working():
        assert not lease.wanted
        other = threading.Thread(target=time_a_kernel)
        other.start()
        while not lease.wanted:
            pass
        assert not timed.is_set()
        lease.pause()
        assert timed.is_set() and not free_for(tmp_path, fcntl.LOCK_EX)
        other.join()
    assert not lease.wanted and free_for(tmp_path, fcntl.LOCK_EX)
