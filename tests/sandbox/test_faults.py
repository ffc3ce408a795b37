"""Faults that are ours: what is killed, full or sick is mended, retried and never charged to a solution or a task."""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuda_agent.config import SandboxConfig
from cuda_agent.errors import SandboxUnready
from cuda_agent.sandbox import judge_process, local
from cuda_agent.sandbox.formats import plan
from cuda_agent.sandbox.wire import Solution
from tests.sandbox.conftest import KERNEL, Running, plan_solution, task
from tests.sandbox.drill import _children, _descendants
from tests.sandbox.faults import python

pytestmark = pytest.mark.nightly
SLOW = "time.sleep(0.1)"


def judge_of(running: Running) -> int:
    process = running.sandbox._judges[0]._process
    assert process
    return process.pid


def parent_of(running: Running) -> int:
    return _children(judge_of(running), b"cuda_agent.sandbox.worker.main")[0]


def begun(running: Running, solution: Solution) -> Any:
    """An evaluation under way, once its judge is at it."""
    future = asyncio.run_coroutine_threadsafe(running.sandbox.evaluate(task(), solution), running._loop)
    while not running.sandbox._judges[0]._lock.locked() and not future.done():
        time.sleep(0.005)
    time.sleep(0.2)
    return future


def kill(pid: int, how: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):  # it went while it was looked for
        os.kill(pid, how)


@pytest.mark.parametrize("victim", ["candidate", "reference", "warm parent", "judge"])
def test_a_process_of_ours_that_is_killed_costs_an_honest_solution_nothing(running: Running, victim: str) -> None:
    running.evaluate(task(), python(0))
    judge, parent = judge_of(running), parent_of(running)
    future = begun(running, python(time.time_ns(), SLOW))
    workers = _children(parent)
    killed = {"candidate": workers[-1], "reference": workers[0], "warm parent": parent, "judge": judge}[victim]
    kill(killed)
    verdict = future.result(120)
    assert (verdict.status, verdict.message) == ("ok", "")
    if victim in ("candidate", "reference"):
        assert judge_of(running) == judge  # who need not begin again for that
    else:
        assert not [pid for pid in workers if Path(f"/proc/{pid}/exe").is_symlink() and _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_worker_killed_after_its_answer_costs_an_honest_solution_nothing(running: Running) -> None:
    running.evaluate(task(), python(0))
    judge = judge_of(running)
    future = begun(running, python(time.time_ns(), SLOW))
    worker = _children(parent_of(running))[-1]
    os.kill(judge, signal.SIGSTOP)  # so that the answer lies there unread
    time.sleep(0.3)
    kill(worker)
    os.kill(judge, signal.SIGCONT)
    verdict = future.result(120)
    assert (verdict.status, verdict.message) == ("ok", "")


def test_a_worker_killed_between_two_calls_costs_an_honest_solution_nothing(running: Running) -> None:
    """It is stopped then, for as long as its buffers are filled: a moment that is not hit every time."""
    for _ in range(10):
        running.evaluate(task(), python(0))
        future = begun(running, python(time.time_ns(), SLOW))
        stat = Path(f"/proc/{_children(parent_of(running))[-1]}/stat")
        with contextlib.suppress(OSError):  # missed: it is gone
            while not (stopped := stat.read_text().rpartition(")")[2].split()[0] == "T") and not future.done():
                pass
            if stopped:
                os.kill(int(stat.parent.name), signal.SIGKILL)
                break
        future.result(120)
    verdict = future.result(120)
    assert (verdict.status, verdict.message) == ("ok", "")


def test_a_spare_worker_that_dies_before_its_use_is_replaced(running: Running) -> None:
    for number in range(2):
        running.evaluate(task(), python(time.time_ns()))
        judge = judge_of(running)
        if number:  # once it has started, and once while it starts
            time.sleep(0.5)
        kill(_children(parent_of(running))[-1], signal.SIGTERM)
        assert running.evaluate(task(), python(time.time_ns())).status == "ok"
        assert judge_of(running) == judge


def test_who_kills_itself_is_charged(running: Running) -> None:
    verdict = running.evaluate(task(), python(0, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert (verdict.status, verdict.reward) == ("crash", -1)


def test_a_judge_killed_while_it_times_leaves_the_lease_free(timed: Running) -> None:
    timed.evaluate(task(), python(0))
    for _ in range(10):  # a moment that is not hit every time
        future = begun(timed, python(time.time_ns(), SLOW))
        held = False
        with open(timed.sandbox.lease_folder / "lease.lock") as lock:
            while not held and not future.done():
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    held = True  # alone: a time is being taken
                else:
                    fcntl.flock(lock, fcntl.LOCK_UN)
                    time.sleep(0.001)
            if held and not future.done():
                os.kill(judge_of(timed), signal.SIGKILL)
                break
        future.result(120)
    else:
        raise AssertionError("no time was seen being taken")
    assert future.result(120).status == "ok"


def test_a_compiler_that_is_killed_is_started_again(running: Running) -> None:
    running.evaluate(task(), plan_solution())
    source = "#include <regex>\nbool f(const char* s) { return std::regex_match(s, std::regex(s)); }\n"
    source += f"int n{time.time_ns()};"
    future = asyncio.run_coroutine_threadsafe(
        running.sandbox._builder.library({"k.cpp": source}, ["k.cpp"]), running._loop
    )
    victims: list[int] = []
    while not victims and not future.done():
        victims = [pid for pid in _descendants(os.getpid()) if b"cc1plus" in _command(pid)]
    assert victims
    kill(victims[0])
    assert future.result(120).name == "library.so"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
    except OSError:
        return b""


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="small-disk-"))  # which workers of other users can reach
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m,mode=711", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        folder.rmdir()
        pytest.skip("a small disk cannot be mounted here")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


def test_a_full_temporary_folder_is_no_authors_fault(small_disk: Path, start: Callable[..., Running]) -> None:
    running = start(clock="model", run_seconds=2.0, memory_mb=400)
    assert running.evaluate(task(), plan_solution()).status == "ok"
    running.probe(task())  # which the judge answers when it has given back what that took
    with open(small_disk / "ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize)
    another = plan_solution(KERNEL + "// another\n")
    verdict = running.evaluate(task(), another)
    assert (verdict.status, verdict.reward) == ("infra", None)
    assert "space left" in verdict.message
    (small_disk / "ballast").unlink()
    assert running.evaluate(task(), another).status == "ok"  # neither build nor verdict was kept


def test_a_cache_of_builds_that_cannot_be_written_is_no_authors_fault(start: Callable[..., Running]) -> None:
    running = start(clock="model", run_seconds=2.0, memory_mb=400)
    running.evaluate(task(), python(0))
    builds = running.sandbox.cache / "builds"
    running.wait(plan.runtime(running.sandbox._builder))
    for number in range(256):
        with contextlib.suppress(FileExistsError, IsADirectoryError):
            (builds / f"{number:02x}").write_text("in the way")  # where root would write all the same
    verdict = running.evaluate(task(), plan_solution(KERNEL + "// another\n"))
    assert (verdict.status, verdict.reward) == ("infra", None)
    assert str(builds) in verdict.message


def test_a_cache_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxUnready, match="needs its cache"):
        asyncio.run(local.LocalSandbox(SandboxConfig(), tmp_path / "file" / "cache").__aenter__())


def test_a_device_that_fails_its_health_probe_gets_a_new_judge(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_process.JudgeHandle, "program", "tests.sandbox.sick_judge")
    running = start(clock="model", run_seconds=2.0, memory_mb=400)
    assert running.evaluate(task(), python(0)).status == "ok"
    first = judge_of(running)
    (running.sandbox.cache / "sick").write_text("1")
    assert running.evaluate(task(), python(0, "os.abort()")).status == "crash"  # and then it is probed
    assert running.evaluate(task(), python(1)).status == "ok"
    assert judge_of(running) != first


def test_a_sandbox_whose_device_fails_its_health_probe_is_unready(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_process.JudgeHandle, "program", "tests.sandbox.sick_judge")
    running = start(clock="model", run_seconds=2.0, memory_mb=400)
    (running.sandbox.cache / "sick").write_text("1")
    with pytest.raises(SandboxUnready, match="the device cpu fails its health probe"):
        running.wait(running.sandbox.ready())


def test_a_device_that_stays_sick_is_quarantined_and_named(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_process.JudgeHandle, "program", "tests.sandbox.sick_judge")
    running = start(clock="model", run_seconds=2.0, memory_mb=400)
    assert running.evaluate(task(), python(0)).status == "ok"
    sick = running.sandbox.cache / "sick"
    sick.write_text("1000")
    assert running.evaluate(task(), python(0, "os.abort()")).status == "crash"
    for number in (1, 2):
        verdict = running.evaluate(task(), python(number))
        assert (verdict.status, verdict.reward) == ("infra", None)
        assert "the device cpu fails its health probe: quarantined" in verdict.message
    assert sick.read_text() == "998"  # one new judge tried, and no more
    sick.write_text("0")
    until, why = running.sandbox._judges[0]._quarantine
    assert until > time.monotonic() + 10
    running.sandbox._judges[0]._quarantine = (time.monotonic(), why)  # when it is over
    assert running.evaluate(task(), python(1)).status == "ok"
